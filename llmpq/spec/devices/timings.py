"""What ``llmpq-profile device`` measures, as numbers between the profiler and the fit."""

from __future__ import annotations

from dataclasses import dataclass

from llmpq.spec.devices.figures import DeviceKind


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductTiming:
    """Seconds of ``rows`` vectors times one weight ``[out_features, in_features]``.

    ``stored_bytes`` is the size of the weight as its kernel stores it.
    """

    dtype: str
    bits: int
    rows: int
    out_features: int
    in_features: int
    stored_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTimings:
    """Rates, copies and overheads that were measured on one device.

    Attributes:
        threads: of a CPU; 1 for others.
        copy_bytes_per_s: bytes read and written by a copy inside its memory.
        layer_overhead_s: a decoder layer with next to no work.
        prefill_share, decode_share: time of a whole layer's products over that of the layer, less
            its overhead: for many rows, and for one.
        host_bytes_per_s, host_latency_s: of a copy from and to host memory, ``None`` for a CPU.
    """

    kind: DeviceKind
    memory_bytes: int
    threads: int
    copy_bytes_per_s: float
    products: tuple[ProductTiming, ...]
    layer_overhead_s: float
    prefill_share: float = 1.0
    decode_share: float = 1.0
    host_bytes_per_s: float | None = None
    host_latency_s: float | None = None
    compute_capability: tuple[int, int] | None = None
