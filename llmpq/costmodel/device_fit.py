"""The figures of a device from its measurements: those with which the roofline returns them.

Products of many rows determine the arithmetic of a format or bitwidth and how many tokens fill the
device, one of a single row the bandwidth of reading weights, those of some rows the arithmetic of
decode steps.
"""

from __future__ import annotations

from llmpq.costmodel.roofline import DECODE_ARITHMETIC, OVERLAP_LOSS
from llmpq.errors import SpecError
from llmpq.spec.devices.figures import DeviceEntry, PrecisionCost
from llmpq.spec.devices.timings import DeviceTimings, ProductTiming

LEAST = 0.01
"""Least factor of a precision cost."""


def fit_device(timings: DeviceTimings, name: str, provenance: str) -> DeviceEntry:
    """Return the entry of a measured device, with ``provenance`` as the source of its figures.

    Raises:
        SpecError: no product was measured.
    """
    best = _main_format(timings)
    dense = _by_rows(timings, best, 16)
    few, some, short, many = sorted(dense)
    stream = dense[few].stored_bytes / dense[few].seconds
    saturation = _saturation(dense[short], dense[many], stream)
    rates = {
        dtype: _prefill_flops(_by_rows(timings, dtype, 16)[many], stream, saturation)
        for dtype in dict.fromkeys(one.dtype for one in timings.products)
    }
    peak = max(timings.copy_bytes_per_s, stream)
    costs = []
    for bits in dict.fromkeys(one.bits for one in timings.products):
        own = _by_rows(timings, best, bits)
        rate = _prefill_flops(own[many], stream, saturation)
        one_s = _flops(own[few]) / (rate * DECODE_ARITHMETIC)
        read_s = _other(own[few].seconds, one_s)
        thin_s = _other(own[some].seconds, read_s)
        thin = thin_s * DECODE_ARITHMETIC * rate / _flops(own[some])
        share = own[few].stored_bytes / stream / read_s
        costs.append(
            PrecisionCost(
                bits=bits,
                compute=max(LEAST, rates[best] / rate),
                stream=1.0 if bits == 16 else max(LEAST, share),
                thin=max(LEAST, thin),
            )
        )
    source = f"measured by llmpq-profile device, {provenance}"
    measured = [
        "memory_bytes",
        "flops",
        "memory_bytes_per_s",
        "memory_efficiency",
        "compute_efficiency",
    ]
    measured += ["layer_overhead_s", "precision_costs", "saturation_tokens"]
    if timings.host_bytes_per_s is not None:
        measured += ["link_bytes_per_s", "link_latency_s"]
    return DeviceEntry(
        type=name,
        kind=timings.kind,
        memory_bytes=timings.memory_bytes,
        flops=tuple(rates.items()),
        memory_bytes_per_s=peak,
        compute_efficiency=max(LEAST, timings.prefill_share),
        memory_efficiency=max(LEAST, timings.decode_share * stream / peak),
        layer_overhead_s=timings.layer_overhead_s,
        saturation_tokens=saturation,
        precision_costs=tuple(costs),
        compute_capability=timings.compute_capability,
        cores=timings.threads if timings.kind == "cpu" and timings.threads > 1 else None,
        link_bytes_per_s=timings.host_bytes_per_s,
        link_latency_s=timings.host_latency_s,
        source=tuple(dict.fromkeys(measured, source).items()),
    )


def _main_format(timings: DeviceTimings) -> str:
    """Return the format in which bitwidths were compared: the one with the most products."""
    formats = [one.dtype for one in timings.products]
    if not formats:
        raise SpecError("device: found no product that it computes, expected at least one format")
    return max(dict.fromkeys(formats), key=formats.count)


def _by_rows(timings: DeviceTimings, dtype: str, bits: int) -> dict[int, ProductTiming]:
    return {one.rows: one for one in timings.products if (one.dtype, one.bits) == (dtype, bits)}


def _flops(one: ProductTiming) -> float:
    return 2.0 * one.rows * one.out_features * one.in_features


def _saturation(short: ProductTiming, many: ProductTiming, stream: float) -> float:
    """Return the tokens by which a short prompt counts as longer than it is."""
    short_s, many_s = (_other(one.seconds, one.stored_bytes / stream) for one in (short, many))
    if many_s <= short_s:
        return 0.0
    return max(0.0, (many.rows * short_s - short.rows * many_s) / (many_s - short_s))


def _prefill_flops(one: ProductTiming, stream: float, saturation: float) -> float:
    """Return the operations per second of a product of many rows."""
    seconds = _other(one.seconds, one.stored_bytes / stream)
    return _flops(one) * (one.rows + saturation) / one.rows / seconds


def _other(total_s: float, known_s: float) -> float:
    """Return ``x`` for which the roofline's overlap of ``x`` and ``known_s`` is ``total_s``.

    The roofline counts the larger in full and a share of the smaller. ``x`` is taken as the larger
    where that is consistent, else as the smaller, and is always positive.
    """
    larger = total_s - OVERLAP_LOSS * known_s
    if larger >= known_s:
        return larger
    return max((total_s - known_s) / OVERLAP_LOSS, LEAST * total_s)
