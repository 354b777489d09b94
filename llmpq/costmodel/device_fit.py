"""The figures of a device from its measurements: those with which the roofline returns them.

Decode steps of the smallest and the largest batch determine the bandwidth of reading weights and
the arithmetic of few rows; those in between, how much of the smaller of both adds to the larger.
Prompts determine the arithmetic of many rows and how many tokens fill the device; all of this for
every bitwidth, as each has kernels of its own; narrow layers, what the values that products make
cost besides. Long prompts and contexts determine attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean

from llmpq.errors import SpecError
from llmpq.spec.devices.figures import SOURCED, DeviceEntry, PrecisionCost
from llmpq.spec.devices.timings import (
    HEAD_DIM,
    DeviceTimings,
    LayerTiming,
    kv_heads_of,
    layer_matrices,
    narrow_features,
)
from llmpq.spec.precision import DTYPE_BYTES, Phase, default_precision, linear_bytes

LEAST, MOST = 0.01, 100.0
"""Least and greatest factor."""
OVERLAP_LOSS = 0.15
"""Usual share of the smaller time that counts: the catalogue's."""
LOSSES = tuple(step / 20 for step in range(1, 21))
"""Candidates for it."""
MEASURED = (0.15, 0.15)
"""By how much a measured device is faster and slower than forecast, four times of five."""
MOST_OUTPUT = 0.75
"""Largest share of output values in the arithmetic of a prompt."""
USUAL = 0.01
"""Relative error that a share must save for every 1 of its distance to the usual one."""


def fit_device(timings: DeviceTimings, name: str, provenance: str) -> DeviceEntry:
    """Return the entry of a measured device, with ``provenance`` as the source of its figures.

    Raises:
        SpecError: no layer was measured.
    """
    if not timings.layers:
        raise SpecError("device: found no layer that it computes, expected at least one format")
    fit = _Fit(timings=timings)
    peak = max(timings.copy_bytes_per_s, fit.stream)
    entry = DeviceEntry(
        type=name,
        kind=timings.kind,
        memory_bytes=timings.memory_bytes,
        flops=tuple(fit.rates().items()),
        memory_bytes_per_s=peak,
        compute_efficiency=1.0,
        memory_efficiency=max(LEAST, fit.stream / peak),
        overlap_loss=fit.loss(16),
        attention_efficiency=fit.attention_efficiency(),
        attention_memory_efficiency=fit.attention_memory_efficiency(),
        layer_overhead_s=timings.layer_overhead_s,
        step_overhead_s=timings.step_overhead_s,
        saturation_tokens=fit.saturation_tokens(16),
        decode_efficiency=1.0,
        prefill_deviation=MEASURED,
        decode_deviation=MEASURED,
        precision_costs=tuple(fit.cost(bits) for bits in fit.widths),
        compute_capability=timings.compute_capability,
        cores=timings.threads if timings.kind == "cpu" and timings.threads > 1 else None,
        link_bytes_per_s=timings.host_bytes_per_s,
        link_latency_s=timings.host_latency_s,
        gather_bytes_per_s=timings.gather_bytes_per_s,
    )
    source = f"measured by llmpq-profile device, {provenance}"
    unmeasured = ("kind", "compute_capability", "cores")
    stated = [one for one in SOURCED if getattr(entry, one) is not None and one not in unmeasured]
    return replace(entry, source=tuple(dict.fromkeys(stated, source).items()))


@dataclass(frozen=True, kw_only=True)
class _Fit:
    """The figures of one device."""

    timings: DeviceTimings

    @cached_property
    def dtype(self) -> str:
        """The format in which bitwidths were compared: the one with the most layers."""
        formats = [one.dtype for one in self.timings.layers]
        return max(dict.fromkeys(formats), key=formats.count)

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Bitwidths that were measured."""
        return tuple(dict.fromkeys(one.bits for one in self._own))

    @cached_property
    def stream(self) -> float:
        """Bytes of 16-bit weights that decode reads per second."""
        return self._stored_bytes(16) / self._decode_s(16)[0]

    def saturation_tokens(self, bits: int) -> float:
        """Return the tokens by which a short prompt counts as longer than it is."""
        (few, few_s), (many, many_s) = self._arithmetic_s(bits)
        return max(0.0, (many * few_s - few * many_s) / (many_s - few_s)) if many_s > few_s else 0.0

    def loss(self, bits: int) -> float:
        """Return how much of the smaller time counts: with the least error in decode."""
        return self._losses[bits]

    @cached_property
    def _losses(self) -> dict[int, float]:
        return {
            bits: min(
                LOSSES,
                key=lambda loss: self._error(bits, loss) + USUAL * abs(loss - OVERLAP_LOSS),
            )
            for bits in self.widths
        }

    def _error(self, bits: int, loss: float) -> float:
        """Return the mean relative error in decode; the smallest and largest batch have none."""
        steps = self._short(bits, Phase.DECODE)
        read_s, row_s = _decode_s(steps, loss)
        return fmean(
            abs(_overlapped(read_s, one.rows * row_s, loss) / one.seconds - 1) for one in steps
        )

    def rates(self) -> dict[str, float]:
        """Return the operations per second of 16-bit layers by number format."""
        product_s = self._product_s(16)
        found = {self.dtype: self._token_flops / product_s}
        for timing in self.timings.layers:
            if timing.dtype != self.dtype:
                one = self._without_attention(timing)
                read_s = self._stored_bytes(16, one.dtype) / self.stream
                arithmetic_s = _other(one.seconds, read_s, self.loss(16))
                arithmetic_s *= product_s / self._token_s(16)
                tokens = one.rows + self.saturation_tokens(16)
                found[one.dtype] = self._token_flops * tokens / arithmetic_s
        return found

    def cost(self, bits: int) -> PrecisionCost:
        """Return the factors of a bitwidth."""
        read_s, row_s = self._decode_s(bits)
        token_s, product_s = self._token_s(bits), self._product_s(bits)
        thin = row_s / token_s
        rows = max(one.rows for one in self._short(bits, Phase.DECODE))
        if rows * row_s < read_s:
            # The arithmetic of so few rows hardly shows: it is not faster than that of a prompt.
            thin = max(1.0, thin)
        return PrecisionCost(
            bits=bits,
            compute=_factor(product_s / self._product_s(16)),
            stream=_factor(self._stored_bytes(bits) / self.stream / read_s),
            thin=_factor(thin),
            value_flops=self._output_s(bits) * self._token_flops / product_s,
            overlap_loss=None if bits == 16 else self.loss(bits),
            saturation_tokens=None if bits == 16 else self.saturation_tokens(bits),
        )

    def attention_efficiency(self) -> float:
        """Return the rate of attention relative to that of products."""
        product_s = 4.0 * self.timings.features / self._token_flops * self._product_s(16)
        return _factor(product_s / max(self._pair_s, product_s / MOST))

    def attention_memory_efficiency(self) -> float:
        """Return the bandwidth of reading cached values relative to that of reading weights."""
        read_s = DTYPE_BYTES[self.dtype] / self.stream
        return _factor(read_s / max(self._value_s, read_s / MOST))

    @cached_property
    def _pair_s(self) -> float:
        """Seconds of attention of one token to another, from long prompts and short ones."""
        prompts = [one for one in self._own if (one.bits, one.phase) == (16, Phase.PREFILL)]
        long = max(prompts, key=lambda one: one.tokens)
        (short,) = (one for one in prompts if one.rows == long.rows and one is not long)
        pairs = long.rows * (long.tokens - short.tokens)
        return max(0.0, long.seconds - short.seconds) / pairs

    @cached_property
    def _value_s(self) -> float:
        """Seconds of reading a cached value, from decode with long contexts and short ones."""
        steps = [one for one in self._own if (one.bits, one.phase) == (16, Phase.DECODE)]
        long = max(steps, key=lambda one: one.tokens)
        (short,) = (one for one in steps if one.batch == long.batch and one is not long)
        pairs = long.batch * (long.tokens - short.tokens)
        seconds = long.seconds - short.seconds - pairs * self._pair_s
        return max(0.0, seconds) / (self._cached_values * pairs)

    @cached_property
    def _own(self) -> list[LayerTiming]:
        return [one for one in self.timings.layers if one.dtype == self.dtype]

    def _short(self, bits: int, phase: Phase) -> list[LayerTiming]:
        """Return the short steps of a bitwidth without their attention, by rows."""
        steps = [one for one in self._own if (one.bits, one.phase) == (bits, phase)]
        least = min(one.tokens for one in steps)
        found = [self._without_attention(one) for one in steps if one.tokens == least]
        return sorted(found, key=lambda one: one.rows)

    def _without_attention(self, one: LayerTiming) -> LayerTiming:
        """Return a timing less its attention, which is at most half of it."""
        values = self._cached_values * one.batch * one.tokens
        attention_s = one.rows * one.tokens * self._pair_s + values * self._value_s
        return replace(one, seconds=max(one.seconds / 2, one.seconds - attention_s))

    @property
    def _token_flops(self) -> float:
        return 2.0 * _weights(self._matrices)

    @property
    def _matrices(self) -> tuple[tuple[int, int], ...]:
        return layer_matrices(self.timings.features)

    @property
    def _cached_values(self) -> int:
        """Values of keys and values of a token."""
        return 2 * HEAD_DIM * kv_heads_of(self.timings.features)

    def _stored_bytes(self, bits: int, dtype: str | None = None) -> int:
        value_bytes, precision = DTYPE_BYTES[dtype or self.dtype], default_precision(bits)
        return sum(linear_bytes(*shape, precision, value_bytes) for shape in self._matrices)

    def _decode_s(self, bits: int) -> tuple[float, float]:
        return _decode_s(self._short(bits, Phase.DECODE), self.loss(bits))

    def _arithmetic_s(self, bits: int) -> list[tuple[int, float]]:
        """Return rows and seconds of arithmetic of the short prompts of a bitwidth."""
        read_s = self._decode_s(bits)[0]
        steps = self._short(bits, Phase.PREFILL)
        return [(one.rows, _other(one.seconds, read_s, self.loss(bits))) for one in steps]

    def _token_s(self, bits: int) -> float:
        """Return the seconds of arithmetic of a token of a prompt that fills the device.

        Of the values that the two prompts have at some bits it is the geometric mean.
        """
        saturation = self.saturation_tokens(bits)
        few_s, many_s = (
            seconds / (rows + saturation) for rows, seconds in self._arithmetic_s(bits)
        )
        return math.sqrt(few_s * many_s)

    def _product_s(self, bits: int) -> float:
        """Return the seconds of a token of such a prompt without those of output values."""
        outputs = sum(rows for rows, _ in self._matrices)
        return self._token_s(bits) - outputs * self._output_s(bits)

    def _output_s(self, bits: int) -> float:
        """Return the seconds of an output value, besides those of its product.

        Of a token, ``P`` weights and ``W`` output values take ``a P + e W``. Layers of half the
        features have about twice the output values to a weight.
        """
        narrow = next((one for one in self.timings.narrow if one.bits == bits), None)
        if narrow is None:
            return 0.0
        features = narrow_features(self.timings.features)
        small = layer_matrices(features)
        small_share = _weights(small) / _weights(self._matrices)
        pair_s = self._pair_s * features / self.timings.features
        seconds = narrow.seconds - narrow.rows * narrow.tokens * pair_s
        arithmetic_s = _other(seconds, self._decode_s(bits)[0] * small_share, self.loss(bits))
        small_s = arithmetic_s / (narrow.rows + self.saturation_tokens(bits)) / _weights(small)
        large_s = self._token_s(bits) / _weights(self._matrices)
        ratio = sum(rows for rows, _ in self._matrices) / _weights(self._matrices)
        small_ratio = sum(rows for rows, _ in small) / _weights(small)
        found = (small_s - large_s) / (small_ratio - ratio)
        return min(max(0.0, found), MOST_OUTPUT * large_s / ratio)


def _weights(matrices: Sequence[tuple[int, int]]) -> int:
    return sum(rows * columns for rows, columns in matrices)


def _decode_s(steps: Sequence[LayerTiming], loss: float) -> tuple[float, float]:
    """Return the seconds of reading the weights of a layer, and of the arithmetic of a row.

    Steps of ``m`` rows take ``read + loss m row`` while reading takes longer, else
    ``m row + loss read``: of the smallest batch the first holds, of the largest one of both.
    """
    few, many = steps[0], steps[-1]
    ratio = few.rows / many.rows
    read_s = (few.seconds - loss * ratio * many.seconds) / (1 - loss * loss * ratio)
    row_s = (many.seconds - loss * read_s) / many.rows
    if many.rows * row_s < read_s:
        row_s = (many.seconds - few.seconds) / (many.rows - few.rows) / loss
        read_s = few.seconds - loss * few.rows * row_s
    return max(read_s, LEAST * few.seconds), max(row_s, LEAST * few.seconds / many.rows)


def _overlapped(first_s: float, second_s: float, loss: float) -> float:
    return max(first_s, second_s) + loss * min(first_s, second_s)


def _other(total_s: float, known_s: float, loss: float) -> float:
    """Return ``x`` whose overlap with ``known_s`` takes ``total_s``, at least a little.

    ``x`` is taken as the larger where that is consistent, else as the smaller.
    """
    larger = total_s - loss * known_s
    if larger >= known_s:
        return larger
    return max((total_s - known_s) / loss, LEAST * total_s)


def _factor(value: float) -> float:
    return min(MOST, max(LEAST, value))
