"""Storage: which law the bytes of a weight follow in each kernel that can hold it.

The plan side cannot ask a kernel, so what kernels keep beside ``linear_bytes`` is written here by
name; the tensor side's registry is tested against this table, byte for byte. It refuses to know
how a kernel multiplies, or whether a machine has it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from llmpq.errors import SpecError
from llmpq.spec.precision import DTYPE_BYTES, Dtype, Precision, linear_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageLaw:
    """What a kernel keeps of a weight ``[out_features, in_features]``.

    Attributes:
        channel_bytes: kept for every output channel beside the law of ``linear_bytes``.
        stored_bits: bits a code takes, ``None`` for those of the precision.
        scale_bytes: bytes of a scale or zero point, ``None`` for the run's own.
    """

    channel_bytes: int = 0
    stored_bits: int | None = None
    scale_bytes: int | None = None


LAWS: dict[str, StorageLaw] = {
    # oneDNN's sums of every column, which undo the activations' zero point.
    "cpu_int8": StorageLaw(channel_bytes=4),
    # 3-bit codes kept in 4 bits each: a third more than a plan counts. By name only.
    "cpu_int4_widened": StorageLaw(stored_bits=4),
    "bnb_int8": StorageLaw(scale_bytes=4),
    "bnb_int8_cpu": StorageLaw(scale_bytes=4),
}
"""Kernels that keep anything else than ``linear_bytes``; all others keep exactly that."""


def stored_bytes(
    kernel: str | None, precision: Precision, dtype: Dtype, out_features: int, in_features: int
) -> int:
    """Return the bytes of one weight as ``kernel`` keeps it, without bias.

    Args:
        kernel: name in the registry of kernels; ``None`` is what is chosen by default, which on
            machines that can compile keeps ``linear_bytes``.
        precision: of the weight; 16 bits are ``linear_bytes`` in every kernel.
        dtype: number format of the run.
        out_features: rows of the weight.
        in_features: columns of the weight.

    Raises:
        SpecError: a widened kernel is asked for a precision it cannot hold.
    """
    law = LAWS.get(kernel or "", StorageLaw())
    value_bytes = DTYPE_BYTES[dtype]
    if precision.bits == 16:
        return linear_bytes(out_features, in_features, precision, value_bytes)
    if law.stored_bits is not None:
        if precision.bits > law.stored_bits:
            raise SpecError(f"kernel '{kernel}': found {precision}, expected 3 or 4 bits")
        precision = replace(precision, bits=law.stored_bits)
    total = linear_bytes(out_features, in_features, precision, law.scale_bytes or value_bytes)
    return total + law.channel_bytes * out_features


def needs_scratch(precision: Precision, out_features: int, in_features: int) -> bool:
    """Return whether no compiled CPU kernel fits: the weight is then widened at every call.

    They take whole tiles of 16 outputs and 32 inputs, none of which spans two groups.
    """
    if precision.bits == 16:
        return False
    whole = out_features % 16 == 0 and in_features % 32 == 0
    return not whole or precision.effective_group(in_features) % 32 != 0
