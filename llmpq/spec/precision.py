"""Precision of linear weights, and the bytes of a stored linear operator in every kernel.

The cost model computes memory with these functions, and the packed weights of the runtime are
tested against them byte for byte.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Annotated, Literal, NamedTuple

from llmpq.errors import SpecError
from llmpq.spec.fields import Rule

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


class Variant(NamedTuple):
    """How a layer is stored.

    Attributes:
        bits: of all of it but for its routed experts.
        expert_bits: of these; ``None`` for the same.
        resident: how many of them are on the device; ``None`` for all.
    """

    bits: int
    expert_bits: int | None = None
    resident: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerExperts:
    """The routed experts of a layer, where they are not as the rest of it.

    Attributes:
        layer: its index in the model.
        bits: of the experts; ``None`` for those of the layer.
        resident: experts on the stage's device, by their number, rising. The others are in the
            memory of its host, whose threads compute them; ``None`` for none there.
    """

    layer: int
    bits: int | None = None
    resident: tuple[int, ...] | None = None

    def variant(self, bits: int) -> Variant:
        """Return how the layer is stored, the rest of it at ``bits``."""
        resident = None if self.resident is None else len(self.resident)
        return Variant(bits, None if self.bits == bits else self.bits, resident)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageExperts:
    """The routed experts of a stage, where they are not as the rest of their layers.

    Attributes:
        threads: that compute the experts in the host's memory, on cores of their own where the host
            has enough.
        layers: in order; a layer that is not here has its experts with it.
    """

    threads: Annotated[int, Rule(minimum=1, maximum=256, optional=True)] = 1
    layers: Annotated[tuple[LayerExperts, ...], Rule(minimum=1)]

    @property
    def host_threads(self) -> int:
        """Threads of the host that the stage needs."""
        return self.threads if any(one.resident is not None for one in self.layers) else 0

    @classmethod
    def on_host(
        cls, use: ExpertUse, share: float, *, bits: int | None = None, threads: int = 1
    ) -> StageExperts:
        """Return a placement that leaves a share of the experts of each layer to the host.

        The experts that a text visits most are on the device.

        Args:
            use: of the layers of the stage.
            share: 0 to 1, rounded to whole experts of a layer.
            bits: of all experts; ``None`` for those of the layer.
            threads: of the host.

        Raises:
            SpecError: the share is no such number.
        """
        if not 0 <= share <= 1:
            raise SpecError(f"experts: found a share of {share}, expected 0 to 1")
        layers = tuple(
            LayerExperts(
                layer=layer,
                bits=bits,
                resident=use.most_used(layer, round((1 - share) * len(counts))),
            )
            for layer, counts in use.layers
        )
        return cls(threads=threads, layers=layers)

    def of(self, layer: int) -> LayerExperts | None:
        """Return the experts of a layer, ``None`` if they are as the rest of it."""
        return next((one for one in self.layers if one.layer == layer), None)

    def check(self, field: str, layers: tuple[int, int], on_disk: Collection[int]) -> None:
        """Check that these are experts of the layers of a stage, each named once.

        Args:
            field: of the file, for messages, such as ``plan: field 'stages[0].experts``.
            layers: first and end layer of the stage.
            on_disk: those of them (from 0) whose weights rest on disk.

        Raises:
            SpecError: they are not.
        """
        least, end_layer = layers
        for place, own in enumerate(self.layers):
            where = f"{field}.layers[{place}]"
            if not least <= own.layer < end_layer:
                raise SpecError(
                    f"{where}.layer': found {own.layer}, expected a layer in "
                    f"[{least}, {end_layer}), in rising order"
                )
            if own.layer - layers[0] in on_disk:
                raise SpecError(
                    f"{where}.layer': found {own.layer}, whose weights rest on disk, expected a "
                    "layer that is 'resident'"
                )
            if own.bits not in (None, *BITS):
                raise SpecError(f"{where}.bits': found {own.bits}, expected one of {list(BITS)}")
            if own.bits is None and own.resident is None:
                raise SpecError(f"{where}': found neither bits nor resident experts, expected one")
            if any(a >= b for a, b in pairwise(own.resident or ())):
                raise SpecError(
                    f"{where}.resident': found {list(own.resident or ())}, expected rising numbers"
                )
            least = own.layer + 1


def variants_of(
    experts: Sequence[LayerExperts], first_layer: int, bits: Sequence[int]
) -> tuple[Variant, ...]:
    """Return how layers with these bits from ``first_layer`` on are stored, with these experts."""
    given = {one.layer: one for one in experts}
    return tuple(
        given[layer].variant(width) if layer in given else Variant(width)
        for layer, width in enumerate(bits, first_layer)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertUse:
    """How often a text visits the routed experts of a model.

    Attributes:
        tokens: of the text.
        layers: tokens that visit each expert, for each layer with routed experts, in order.
    """

    tokens: int
    layers: tuple[tuple[int, tuple[int, ...]], ...]

    def most_used(self, layer: int, count: int) -> tuple[int, ...]:
        """Return the ``count`` experts of a layer that are visited most, in rising order."""
        counts = dict(self.layers)[layer]
        ranked = sorted(range(len(counts)), key=lambda expert: (-counts[expert], expert))
        return tuple(sorted(ranked[:count]))

    def part(self, first_layer: int, end_layer: int) -> ExpertUse:
        """Return the use of the experts of layers ``[first_layer, end_layer)``."""
        own = tuple(one for one in self.layers if first_layer <= one[0] < end_layer)
        return ExpertUse(tokens=self.tokens, layers=own)
