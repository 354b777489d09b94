"""Precision of linear weights, and the bytes of a stored linear operator in every kernel.

The cost model computes memory with these functions, and the packed weights of the runtime are
tested against them byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from llmpq.errors import SpecError

BITS: tuple[int, ...] = (16, 8, 4, 3)
"""Bitwidths a plan may use, widest first. 16 means "not quantized", whatever the run's dtype."""

DEFAULT_GROUP_SIZE = 128

Method = Literal["none", "rtn", "gptq", "int8"]
Dtype = Literal["float32", "float16", "bfloat16"]
DTYPE_BYTES: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}


class Phase(StrEnum):
    """The two phases of generation (LLM-PQ, Sec. 2.1)."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """How the weight of a linear operator is stored.

    Attributes:
        bits: 3, 4, 8 or 16; 16 is the run's own floating type, untouched.
        method: how the integers were found; ``none`` exactly when ``bits`` is 16.
        group_size: input features that share one scale; ``None`` is one scale per output channel.
        symmetric: integers centred on zero (no stored zero point) instead of min-max.
    """

    bits: int
    method: Method = "rtn"
    group_size: int | None = DEFAULT_GROUP_SIZE
    symmetric: bool = False

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise SpecError(f"precision: found {self.bits} bits, expected one of {BITS}")
        if (self.bits == 16) != (self.method == "none"):
            raise SpecError(f"precision: {self.bits} bits cannot have method '{self.method}'")
        if self.group_size is not None and self.group_size < 1:
            raise SpecError(f"precision: group size {self.group_size}, expected at least 1")

    def __str__(self) -> str:
        """Return the canonical text, such as ``w4-rtn-g128-asym``."""
        if self.bits == 16:
            return "w16"
        group = "c" if self.group_size is None else str(self.group_size)
        return f"w{self.bits}-{self.method}-g{group}" + ("" if self.symmetric else "-asym")

    def effective_group(self, in_features: int) -> int:
        """Return the group length used on an operator of ``in_features`` inputs.

        A group that does not divide the inputs falls back to one group a channel.
        """
        if self.group_size is None or in_features % self.group_size:
            return in_features
        return self.group_size


def unquantized() -> Precision:
    """Return the precision of a layer left in the run's own floating type."""
    return Precision(bits=16, method="none", group_size=None, symmetric=True)


def default_precision(bits: int) -> Precision:
    """Return the precision that a plan means by a bitwidth.

    16: untouched. 8: symmetric, one scale an output channel (the vector-wise weights of
    LLM.int8()). 4 and 3: min-max with groups of 128 (the GPTQ convention).
    """
    if bits == 16:
        return unquantized()
    if bits == 8:
        return Precision(bits=8, method="rtn", group_size=None, symmetric=True)
    return Precision(bits=bits, method="rtn", group_size=DEFAULT_GROUP_SIZE, symmetric=False)


def heaviest(precisions: Iterable[Precision]) -> Precision:
    """Return the precision with the most bytes per weight."""
    return max(precisions, key=lambda one: (linear_bytes(1, 1 << 14, one, 2), str(one)))


def linear_bytes(
    out_features: int, in_features: int, precision: Precision, dtype_bytes: int
) -> int:
    """Return the bytes of one stored weight matrix ``[out_features, in_features]``, without bias.

    Rows are padded to whole bytes; every group stores one scale, and if asymmetric one zero point,
    in the run's dtype (the layout of torch's int4 kernels).
    """
    if precision.bits == 16:
        return out_features * in_features * dtype_bytes
    row_bytes = -(-in_features * precision.bits // 8)
    groups = in_features // precision.effective_group(in_features)
    values = 1 if precision.symmetric else 2
    return out_features * (row_bytes + groups * values * dtype_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageFormat:
    """How the storage of a kernel differs from ``linear_bytes``.

    Attributes:
        channel_bytes: additional bytes per output channel.
        scale_bytes: bytes of a scale or zero point, ``None`` for those of the run's dtype.
    """

    channel_bytes: int = 0
    scale_bytes: int | None = None


LAWS: dict[str, StorageFormat] = {
    # oneDNN's column sums, which correct for the zero point of the activations.
    "cpu_int8": StorageFormat(channel_bytes=4),
    "bnb_int8": StorageFormat(scale_bytes=4),
    "bnb_int8_cpu": StorageFormat(scale_bytes=4),
}
"""Kernels whose storage differs from ``linear_bytes``."""


def stored_bytes(
    kernel: str | None, precision: Precision, dtype: Dtype, out_features: int, in_features: int
) -> int:
    """Return the bytes of one weight as ``kernel`` stores it (``None``: the default), no bias."""
    law = LAWS.get(kernel or "", StorageFormat())
    value_bytes = DTYPE_BYTES[dtype]
    if precision.bits == 16:
        return linear_bytes(out_features, in_features, precision, value_bytes)
    total = linear_bytes(out_features, in_features, precision, law.scale_bytes or value_bytes)
    return total + law.channel_bytes * out_features


def needs_scratch(precision: Precision, out_features: int, in_features: int) -> bool:
    """Return whether no compiled CPU kernel fits, so that every call dequantizes the weight.

    Compiled kernels need whole tiles of 16 outputs and 32 inputs that do not span two groups.
    """
    if precision.bits == 16:
        return False
    whole = out_features % 16 == 0 and in_features % 32 == 0
    return not whole or precision.effective_group(in_features) % 32 != 0
