"""The figures of a device type: complete, and as a file states them.

A file of devices states what is known; the rest is taken from another type (``like``), or from the
reference type of its kind.

A run has one number format; a device that does not compute it runs its stage in the nearest one it
has. Between stages a hidden state travels in the sender's format and is rounded once, on arrival:

- to the same format, and from any format to float32: exact;
- from bfloat16 to float16: exact from 2^-14 to 65504, beyond that an error of the stage; smaller
  numbers within 2^-25;
- to bfloat16: within 2^-8 of the number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, ClassVar, Literal

from llmpq.errors import SpecError, bad_field, missing_field
from llmpq.spec.fields import SCHEMA, Rule
from llmpq.spec.precision import BITS, DTYPE_BYTES, Dtype, Phase
from llmpq.units import MIB

DeviceKind = Literal["cpu", "cuda", "mps", "xpu"]
"""torch's name of the runtime that drives a device; ``cuda`` also is ROCm's."""

GPU_RESERVE_BYTES = 512 * MIB
"""Memory of a GPU that plans leave to its driver and a display, where its entry says no other: of
24 GiB such cards show programs about 23.7."""

Factor = Annotated[float, Rule(minimum=0.01)]
Share = Annotated[float, Rule(minimum=0.01, maximum=1)]
Deviation = tuple[Factor, Factor]
"""By how much at most a device is faster and slower than the roofline, four times of five.

Measured seconds lie between ``1 - faster`` and ``1 + slower`` times the forecast.
"""
UNMEASURED: Deviation = (0.5, 1.0)
"""Of devices and bitwidths that no public table measured: a factor of two."""
LEAST_CAPABILITY = {
    "cuda_int4": (8, 0),
    "triton_int": (8, 0),
    "bnb_int8": (7, 5),
    "cuda_int8": (7, 5),
}
"""By kernel, the lowest compute capability of an NVIDIA GPU that its project supports.

Whether Triton runs below its own is tried when a rank starts."""
_KERNELS = {
    8: ("triton_int", "bnb_int8", "cuda_int8"),
    4: ("cuda_int4", "triton_int"),
    3: ("triton_int",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionCost:
    """How a bitwidth changes a device's roofline: factors relative to 16 bits.

    Attributes:
        compute: on arithmetic time (dequantization, slower or faster matrix units).
        stream: on achieved memory bandwidth while reading weights.
        overhead: on the launch and dispatch time of a layer (more, smaller kernels).
        dequantize: times the layer's unquantized weights cross memory once more in prefill, where
            kernels widen a whole matrix before they multiply.
        thin: further factor on arithmetic time in decode, where another kernel multiplies few rows.
        few_rows: most rows of a decode step that this kernel takes; ``None`` for any number.
        stream_beyond: on achieved memory bandwidth in decode with more rows than those.
        value_flops: operations that every output value of a product costs besides: formats, scales,
            activation functions. Narrow matrices have more of them to an operation.
        rows_per_pass: rows that a kernel multiplies while it reads the weights once, prompt tokens
            and sequences alike; ``None``: all rows of a micro-batch.
        overlap_loss, saturation_tokens, prefill_deviation, decode_deviation: of this bitwidth,
            where they differ from the device's.
    """

    bits: int
    compute: Factor
    stream: Factor
    overhead: Factor = 1.0
    dequantize: float = 0.0
    thin: Annotated[float, Rule(minimum=0.01, optional=True)] = 1.0
    few_rows: Annotated[int | None, Rule(minimum=1)] = None
    stream_beyond: Annotated[float, Rule(minimum=0.01, optional=True)] = 1.0
    value_flops: Annotated[float, Rule(minimum=0, optional=True)] = 0.0
    rows_per_pass: Annotated[int | None, Rule(minimum=1)] = None
    overlap_loss: Share | None = None
    saturation_tokens: Annotated[float | None, Rule(minimum=0)] = None
    prefill_deviation: Deviation | None = None
    decode_deviation: Deviation | None = None

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise SpecError(f"precision cost: found {self.bits} bits, expected one of {BITS}")

    def stream_of(self, phase: Phase, rows: float) -> float:
        """Return the factor on memory bandwidth while a step of so many rows reads weights."""
        if phase is Phase.DECODE and self.few_rows is not None and rows > self.few_rows:
            return min(self.stream, self.stream_beyond)
        return self.stream

    def passes(self, rows: float) -> int:
        """Return how often a kernel reads the weights for so many rows."""
        return 1 if self.rows_per_pass is None else max(1, math.ceil(rows / self.rows_per_pass))


Rate = Annotated[float, Rule(minimum=1)]
Rates = Annotated[tuple[tuple[str, float], ...], Rule(minimum=1, choices=tuple(DTYPE_BYTES))]
MAX_CORES = 4096
BUS_TOLERANCE = 0.01
"""Relative difference of a stated bandwidth from bus width times rate: vendors round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """Complete figures of a device type.

    Attributes:
        kind: runtime that drives it.
        runtime_bytes: memory of the process and its context before any tensor is allocated.
        flops: peak dense operations per second by number format. A format that is not here is not
            computed: see ``formats``.
        memory_bytes_per_s: peak memory bandwidth.
        compute_efficiency: share of peak arithmetic that large matrix products reach.
        memory_efficiency: share of peak bandwidth that weight streaming reaches.
        overlap_loss: share of the faster of arithmetic and weight streaming that adds to the
            slower one.
        attention_efficiency: rate of attention relative to that of matrix products.
        attention_memory_efficiency: bandwidth of reading cached keys and values relative to that
            of weight streaming.
        layer_overhead_s: launch and dispatch time of one decoder layer at 16 bits.
        step_overhead_s: time of a step outside layers, embedding and head: scheduling, launches,
            choosing tokens; ``None``: that of a layer.
        link_bytes_per_s, link_latency_s: of a link to another device of the same node.
        precision_costs: how 3, 4 and 8 bits differ from 16.
        saturation_tokens: tokens of a prefill at which arithmetic reaches half of its efficiency.
        decode_efficiency: arithmetic of few rows, one a sequence, relative to that of large
            products.
        bits: bitwidths of weights that it multiplies by.
        compute_capability: of an NVIDIA GPU, ``None`` for others and where it is not known.
        cores: of a CPU whose figures are for all of its cores; ``None``: for one thread.
        prefill_deviation, decode_deviation: of measured seconds from the roofline of these figures.
        reserve_bytes: memory that plans leave free: for the driver, a display, other programs.
        disk_bytes_per_s: at which a host reads weights from the disk of its store; ``None`` where
            it was not measured: all weights stay in memory.
        gather_bytes_per_s: of a CPU, at which its threads read and multiply the experts of a row,
            which are scattered over memory; ``None`` where it was not measured.
    """

    type: str
    kind: DeviceKind
    memory_bytes: int
    runtime_bytes: int
    flops: tuple[tuple[str, float], ...]
    memory_bytes_per_s: float
    compute_efficiency: float
    memory_efficiency: float
    overlap_loss: float
    attention_efficiency: float
    attention_memory_efficiency: float
    layer_overhead_s: float
    link_bytes_per_s: float
    link_latency_s: float
    precision_costs: tuple[PrecisionCost, ...]
    saturation_tokens: float = 0.0
    decode_efficiency: float = 1.0
    bits: tuple[int, ...] = BITS
    compute_capability: tuple[int, int] | None = None
    cores: int | None = None
    step_overhead_s: float | None = None
    prefill_deviation: Deviation = UNMEASURED
    decode_deviation: Deviation = UNMEASURED
    reserve_bytes: int = 0
    disk_bytes_per_s: float | None = None
    gather_bytes_per_s: float | None = None

    def deviation(self, phase: Phase, bits: int = 16) -> Deviation:
        """Return by how much at most it is faster and slower than the roofline, 4 times of 5."""
        cost = self.precision_cost(bits)
        if phase is Phase.PREFILL:
            return cost.prefill_deviation or self.prefill_deviation
        return cost.decode_deviation or self.decode_deviation

    @property
    def formats(self) -> tuple[str, ...]:
        """Number formats that it computes, by descending rate."""
        return tuple(sorted(dict(self.flops), key=lambda name: -dict(self.flops)[name]))

    def peak_flops(self, dtype: str) -> float:
        """Return the peak of ``dtype``, or of the nearest format that it computes."""
        rates = dict(self.flops)
        for name in (dtype, "float16", "float32"):
            if name in rates:
                return rates[name]
        return next(iter(rates.values()))

    def precision_cost(self, bits: int) -> PrecisionCost:
        """Return the factors of ``bits``; 16 bits and unlisted widths cost 1."""
        for cost in self.precision_costs:
            if cost.bits == bits:
                return cost
        return PrecisionCost(bits=bits, compute=1.0, stream=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEntry:
    """A device type as a file states it: figures of ``DeviceSpec``, each of which may be absent.

    Attributes:
        like: type whose figures it has where it states none itself; ``None``: the reference type of
            its kind, and ``kind``, ``memory_bytes``, ``memory_bytes_per_s``, ``flops`` are stated.
        memory_bus_bits, memory_pin_bits_per_s: width of the memory bus and rate of one line, whose
            product is the bandwidth.
        source: by field, the origin of its figure.
    """

    type: str
    kind: DeviceKind | None = None
    like: str | None = None
    memory_bytes: Annotated[int | None, Rule(minimum=1)] = None
    runtime_bytes: int | None = None
    flops: Rates | None = None
    memory_bytes_per_s: Rate | None = None
    memory_bus_bits: Annotated[int | None, Rule(minimum=1)] = None
    memory_pin_bits_per_s: Rate | None = None
    compute_efficiency: Share | None = None
    memory_efficiency: Share | None = None
    overlap_loss: Share | None = None
    attention_efficiency: Factor | None = None
    attention_memory_efficiency: Factor | None = None
    layer_overhead_s: float | None = None
    step_overhead_s: float | None = None
    link_bytes_per_s: Rate | None = None
    link_latency_s: float | None = None
    precision_costs: tuple[PrecisionCost, ...] | None = None
    saturation_tokens: float | None = None
    decode_efficiency: Factor | None = None
    bits: Annotated[tuple[int, ...] | None, Rule(minimum=1)] = None
    compute_capability: tuple[int, int] | None = None
    cores: Annotated[int | None, Rule(minimum=1, maximum=MAX_CORES)] = None
    prefill_deviation: Deviation | None = None
    decode_deviation: Deviation | None = None
    reserve_bytes: int | None = None
    disk_bytes_per_s: Rate | None = None
    gather_bytes_per_s: Rate | None = None
    source: tuple[tuple[str, str], ...] | None = None

    def __post_init__(self) -> None:
        if self.like is None:
            for name in ("kind", "memory_bytes", "memory_bytes_per_s", "flops"):
                if getattr(self, name) is None:
                    raise missing_field(
                        f"device type '{self.type}'",
                        name,
                        "expected it, or a type that this one is 'like'",
                    )
        self._check_choices()
        self._check_bus()
        for name, _ in self.source or ():
            if name not in SOURCED:
                raise self.error("source", name, f"one of {', '.join(SOURCED)}")

    def error(self, field: str, found: object, expected: str) -> SpecError:
        """Build the error of a field."""
        return bad_field(f"device type '{self.type}'", field, found, expected)

    def _check_choices(self) -> None:
        if self.bits is not None and not set(self.bits) <= set(BITS):
            raise self.error("bits", list(self.bits), f"some of {list(BITS)}")
        costs = [cost.bits for cost in self.precision_costs or ()]
        if len(set(costs)) < len(costs):
            raise self.error("precision_costs", costs, "each bitwidth once")
        if self.kind not in (None, "cpu") and self.cores is not None:
            raise self.error("cores", self.cores, "nothing, or kind 'cpu'")

    def _check_bus(self) -> None:
        bus, rate, stated = (
            self.memory_bus_bits, self.memory_pin_bits_per_s, self.memory_bytes_per_s,
        )  # fmt: skip
        if bus is None or rate is None or stated is None:
            return
        product = bus * rate / 8
        if abs(product - stated) > BUS_TOLERANCE * stated:
            raise self.error(
                "memory_bytes_per_s", stated, f"{product:g}, its bus width times its rate"
            )


SOURCED = tuple(
    field.name for field in fields(DeviceEntry) if field.name not in ("type", "like", "source")
)
"""Fields that a source can be given for."""
FIGURES = tuple(field.name for field in fields(DeviceSpec) if field.name not in ("type", "kind"))


def completed(entry: DeviceEntry, base: DeviceSpec) -> DeviceSpec:
    """Return the figures of an entry, and those of ``base`` where it states none.

    A compute capability is never passed on, cores and deviations only by an explicit ``like``.

    Raises:
        SpecError: the entry is like a type of another kind.
    """
    if entry.kind not in (None, base.kind):
        raise entry.error("kind", entry.kind, f"'{base.kind}', as {base.type} has")
    own = {name: getattr(entry, name) for name in FIGURES}
    found = {name: getattr(base, name) if value is None else value for name, value in own.items()}
    found["compute_capability"] = entry.compute_capability
    if entry.like is None:
        found["cores"] = entry.cores
        found["prefill_deviation"] = entry.prefill_deviation or UNMEASURED
        found["decode_deviation"] = entry.decode_deviation or UNMEASURED
    return DeviceSpec(type=entry.type, kind=base.kind, **found)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFile:
    """The content of a file of device types, as ``--devices`` takes it."""

    SCHEMA: ClassVar[int] = SCHEMA

    devices: Annotated[tuple[DeviceEntry, ...], Rule(minimum=1)]

    def __post_init__(self) -> None:
        check_unique("devices", self.devices)


def check_unique(field: str, entries: Sequence[DeviceEntry]) -> None:
    """Raise ``SpecError`` if two entries describe one type."""
    names = [entry.type for entry in entries]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise SpecError(f"field '{field}': found type '{twice[0]}' twice, expected it once")


def compute_format(spec: DeviceSpec, dtype: Dtype, wanted: Dtype | None = None) -> Dtype:
    """Return the format in which a device runs its stage.

    It is ``wanted``, or the run's ``dtype``, where the device computes it. Else it is float16 where
    that is no slower than float32, which takes twice the memory, and float32 otherwise.

    Raises:
        SpecError: the device does not compute ``wanted``, or nothing as precise as float32 for a
            float32 run.
    """
    rates = dict(spec.flops)
    has = ", ".join(spec.formats)
    if wanted is not None and wanted not in rates:
        raise SpecError(
            f"device {spec.type}: field 'dtype': found '{wanted}', expected one of {has}, which it "
            "computes"
        )
    if (form := wanted or dtype) in rates:
        return form
    if dtype == "float32":
        raise SpecError(
            f"device {spec.type}: a float32 run found {has} alone, expected float32; plan with "
            f"--dtype {has.split(', ')[0]}"
        )
    if rates.get("float16", 0.0) >= rates.get("float32", 0.0):
        return "float16" if "float16" in rates else "bfloat16"
    return "float32"


def reads_blocks(spec: DeviceSpec) -> bool:
    """Return whether decode attention reads keys and values in their blocks on a device.

    Kernels of CPUs do, and of Triton on GPUs; elsewhere they are gathered first.
    """
    least, found = LEAST_CAPABILITY["triton_int"], spec.compute_capability
    return spec.kind == "cpu" or (spec.kind == "cuda" and (found is None or found >= least))


def offered_kernels(spec: DeviceSpec, bits: int, dtype: Dtype) -> tuple[str, ...]:
    """Return the kernels for weights of ``bits`` that a device may run, the preferred one first.

    A GPU of unknown capability is offered those without a condition. Of ``reference``, which runs
    anywhere, every call dequantizes the whole weight.
    """
    if bits == 16:
        return ()
    if spec.kind == "cpu":
        with_int8 = "cpu_llm_int8" if bits == 8 else "cpu_packed_int8"
        return (with_int8, "cpu_packed") if bits == 8 or dtype != "float32" else ("cpu_packed",)
    found = []
    for name in _KERNELS[bits] if spec.kind == "cuda" else ():
        least = LEAST_CAPABILITY[name]
        is_new = spec.compute_capability is not None and spec.compute_capability >= least
        # Triton also drives AMD's GPUs, which have no compute capability.
        is_new = is_new or (name == "triton_int" and spec.compute_capability is None)
        if is_new and not (name == "cuda_int4" and dtype != "bfloat16"):
            found.append(name)
    return (*found, "reference")
