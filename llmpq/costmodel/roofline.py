"""Roofline: seconds from a device's figures alone, used where nothing was measured.

The slower of arithmetic and weight streaming counts in full, the faster with a share; attention,
recurrent states, widening of quantized weights and launches are added. The figures of a device are
those of its family, fitted to public tables where there are any (``benchmarks/rooflines.py``). The
estimate is positive and never decreases with batch or tokens. Attention reads what its window sees.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmpq.costmodel.base import Estimate
from llmpq.costmodel.host_experts import distinct_experts
from llmpq.costmodel.memory import kv_scale_bytes
from llmpq.spec.devices.figures import DeviceSpec, PrecisionCost
from llmpq.spec.model import LayerSpec, LinearSpec, ModelSpec
from llmpq.spec.precision import (
    DTYPE_BYTES,
    Dtype,
    Phase,
    Precision,
    linear_bytes,
)
from llmpq.spec.runtime_constants import SCORE_BLOCK_TOKENS

DEVIATIONS = 1.28
"""Standard deviations within which four of five normally distributed values lie."""
BANDWIDTH_THREADS = 8
"""CPU threads after which more of them do not stream faster."""
THREADS_ARITHMETIC = 0.7
THREADS_STREAM = 0.4
"""Power of the CPU threads that a product's rate grows with: arithmetic, and streaming.

Measured: AMD EPYC, two cores, torch 2.13, weights 4096 x 1024, 2 threads against 1: 1.7 to 1.9
times at 64 and 512 rows, but 1.0 in bfloat16 at 512; at one row 1.0 in float32, 1.5 in bfloat16.
"""


GATHER_LIMIT = 1.5e11
"""Bytes a second of scattered experts that no memory is too slow for, in series with its stream.

By tokens a second that people report of experts on the host (benchmarks/expert_plans.py): servers
with 8 and 24 channels make 80 and 114 GB/s of 307 and 1152, desktops with two 33 to 40 of 51.
"""
STATE_FLOPS = 7.0
"""Operations of a token for each number of a recurrent state, as Gated DeltaNet has them: a decay,
two products that are summed, ``S^T k`` and ``S^T q``, and one that is added to the state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineLatencyModel:
    """Analytic latency of one model on one type of device.

    Figures of a CPU are of one thread, or of all its ``cores``.
    """

    model: ModelSpec
    device: DeviceSpec
    dtype: Dtype
    kv_bits: int
    threads: int = 1

    @property
    def source(self) -> str:
        """Where the seconds come from."""
        return "roofline"

    def layer_s(self, phase: Phase, bits: int, batch: int, tokens: float, kind: int) -> float:
        """Return the seconds of one decoder layer; see ``LatencyModel``."""
        return self.spec_s(self.model.layer_types[kind], phase, bits, batch, tokens)

    def spec_s(self, layer: LayerSpec, phase: Phase, bits: int, batch: int, tokens: float) -> float:
        """Return the seconds of one layer of operators that need not be one of the model's."""
        work = layer_work(layer, phase, batch, tokens)
        cost = self.device.precision_cost(bits)
        stored, kept = touched_bytes(
            layer, self.model.precision(bits), DTYPE_BYTES[self.dtype], work.rows,
            cost.passes(work.rows),
        )  # fmt: skip
        weights_s = (stored / cost.stream_of(phase, work.rows) + kept) / self._stream
        is_prefill = phase is Phase.PREFILL
        # A short prompt does not fill the device; it counts with that many more tokens.
        rows = work.rows + (self._saturation_tokens(cost) if is_prefill else 0.0)
        flops = work.linear_flops + cost.value_flops * work.output_values
        compute_s = self._arithmetic_s(cost, phase, flops * rows)
        seconds = self._overlapped(weights_s, compute_s, cost)
        seconds += work.attention_flops / (self._arithmetic * self.device.attention_efficiency)
        cached = work.kv_values * self.kv_bits / 8
        scales = work.kv_values / max(1, layer.read_values_per_token)
        cached += scales * kv_scale_bytes(layer, self.kv_bits)
        seconds += cached / (self._stream * self.device.attention_memory_efficiency)
        seconds += work.state_flops / (self._arithmetic * self.device.attention_efficiency)
        states = work.state_values * DTYPE_BYTES["float32"]
        seconds += states / (self._stream * self.device.attention_memory_efficiency)
        if is_prefill and bits != 16:
            widened = quantizable_parameters(layer, work.rows) * DTYPE_BYTES[self.dtype]
            seconds += cost.dequantize * widened / self._stream
        return seconds + self.device.layer_overhead_s * cost.overhead

    def row_s(self, phase: Phase, bits: int, weights: int) -> float:
        """Return the seconds of arithmetic of a row with so many weights, among many rows."""
        return self._arithmetic_s(self.device.precision_cost(bits), phase, 2.0 * weights)

    @property
    def gather_bytes_per_s(self) -> float | None:
        """Bytes a second of scattered experts.

        Where it was not measured, it is predicted for a whole processor, ``None`` for others.
        """
        rate = self.device.gather_bytes_per_s
        if rate is None:
            return None if self.device.cores is None else _scattered(self._stream)
        return rate * _stream_scale(self._threads)

    def layer_estimate(
        self, phase: Phase, bits: int, batch: int, tokens: float, kind: int
    ) -> Estimate:
        """Return the seconds of ``layer_s`` with their uncertainty; see ``LatencyModel``."""
        return Estimate(
            seconds=self.layer_s(phase, bits, batch, tokens, kind),
            is_extrapolated=True,
            relative_deviation=max(self.device.deviation(phase, bits)) / DEVIATIONS,
        )

    def master_s(self, phase: Phase, batch: int, tokens: float, head_bits: int = 16) -> float:
        """Return the seconds of embedding, final norm, head and sampling; see ``LatencyModel``."""
        value_bytes = DTYPE_BYTES[self.dtype]
        rows = batch * tokens if phase is Phase.PREFILL else float(batch)
        embed_s = 2.0 * rows * self.model.hidden_size * value_bytes / self._stream
        cost = self.device.precision_cost(head_bits)
        share = self.device.decode_efficiency / cost.thin
        flops = 2.0 * self.model.head_weights + cost.value_flops * self.model.vocab_size
        compute_s = batch * flops * cost.compute / (self._arithmetic * share)
        shape = self.model.vocab_size, self.model.head_in_features
        stored = linear_bytes(*shape, self.model.head_precision(head_bits), value_bytes)
        # As many rows as in decode: one position a sequence.
        stored *= cost.passes(batch)
        weights_s = stored / (self._stream * cost.stream_of(Phase.DECODE, batch))
        head_s = self._overlapped(weights_s, compute_s, cost)
        sample_s = 2.0 * batch * self.model.vocab_size * 4 / self._stream  # float32, written, read
        own_s = self.device.step_overhead_s
        overhead_s = self.device.layer_overhead_s if own_s is None else own_s
        return embed_s + head_s + sample_s + overhead_s

    def _arithmetic_s(self, cost: PrecisionCost, phase: Phase, operations: float) -> float:
        share = 1.0 if phase is Phase.PREFILL else self.device.decode_efficiency / cost.thin
        return operations * cost.compute / (self._arithmetic * share)

    def _overlapped(self, first_s: float, second_s: float, cost: PrecisionCost) -> float:
        shorter_s, longer_s = sorted((first_s, second_s))
        own = cost.overlap_loss
        return longer_s + (self.device.overlap_loss if own is None else own) * shorter_s

    def _saturation_tokens(self, cost: PrecisionCost) -> float:
        own = cost.saturation_tokens
        return self.device.saturation_tokens if own is None else own

    @property
    def _arithmetic(self) -> float:
        peak = self.device.peak_flops(self.dtype) * self.device.compute_efficiency
        return peak * (self._threads**THREADS_ARITHMETIC if self.device.kind == "cpu" else 1.0)

    @property
    def _stream(self) -> float:
        peak = self.device.memory_bytes_per_s * self.device.memory_efficiency
        return peak * (_stream_scale(self._threads) if self.device.kind == "cpu" else 1.0)

    @property
    def _threads(self) -> float:
        """Threads for each that the figures are for: one, or one a core of a whole processor."""
        cores = self.device.cores
        return self.threads if cores is None else min(self.threads, cores) / cores


def thread_gather_bytes_per_s(device: DeviceSpec, threads: int) -> float:
    """Return what ``gather_bytes_per_s`` of a thread is predicted to be where it was not measured.

    So many threads of such a type then read scattered experts as a whole processor with their
    bandwidth is predicted to.
    """
    scale = _stream_scale(threads)
    return _scattered(device.memory_bytes_per_s * device.memory_efficiency * scale) / scale


def _scattered(stream: float) -> float:
    """Return the bytes a second of scattered experts of a memory with such a stream."""
    return 1 / (1 / stream + 1 / GATHER_LIMIT)


def _stream_scale(threads: float) -> float:
    """Return how many times as fast so many threads stream as one."""
    scale: float = min(threads, BANDWIDTH_THREADS) ** THREADS_STREAM
    return scale


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """The work of one micro-batch in one decoder layer.

    ``rows`` tokens pass through it (``v s``, or ``v`` in decode), at ``linear_flops`` each, which
    make ``output_values``;
    attention counts the whole square in prefill and reads ``kv_values`` keys and values. With a
    window a token counts those of its window, and of the block of queries that it is in.
    A recurrence reads and writes ``state_values`` in all, at ``state_flops`` for all tokens.
    """

    rows: float
    linear_flops: float
    output_values: float
    attention_flops: float
    kv_values: float
    state_flops: float
    state_values: float


def layer_work(layer: LayerSpec, phase: Phase, batch: int, tokens: float) -> LayerWork:
    """Count the work of one layer; ``tokens`` is the prompt length, in decode the context's."""
    rows = batch * tokens if phase is Phase.PREFILL else float(batch)
    width = layer.num_heads * layer.head_dim
    seen = read = tokens
    if layer.sliding_window is not None:
        block = SCORE_BLOCK_TOKENS if phase is Phase.PREFILL else 0
        seen = min(tokens, layer.sliding_window + block)
        read = tokens if phase is Phase.PREFILL else seen
    return LayerWork(
        rows=rows,
        linear_flops=2.0 * layer.active_weight_parameters,
        output_values=float(sum(op.active * op.out_features for op in layer.linears)),
        attention_flops=4.0 * rows * seen * width,
        kv_values=float(batch * read * layer.read_values_per_token),
        state_flops=STATE_FLOPS * rows * layer.state_values,
        state_values=2.0 * batch * layer.state_values,
    )


def experts_hit(op: LinearSpec, rows: float) -> float:
    """Return how many of an operator's matrices ``rows`` tokens are expected to visit."""
    if op.count == op.active:
        return float(op.count)
    return distinct_experts(rows, op.active, op.count)


def touched_bytes(
    layer: LayerSpec, precision: Precision, dtype_bytes: int, rows: float, passes: int = 1
) -> tuple[float, float]:
    """Return the bytes of weights that ``rows`` tokens make a layer read.

    They are those of the quantizable operators at ``precision``, and of what stays in the dtype.
    The former are read in several ``passes``, an expert's in no more than its tokens need.
    """
    stored = 0.0
    kept = float(layer.norm_parameters * dtype_bytes)
    for op in layer.linears:
        hits = experts_hit(op, rows)
        if op.quantizable:
            read = hits if passes == 1 else max(hits, op.active * passes)
            stored += read * linear_bytes(op.out_features, op.in_features, precision, dtype_bytes)
        else:
            kept += hits * op.out_features * op.in_features * dtype_bytes
        kept += hits * (op.out_features * dtype_bytes if op.bias else 0)
    return stored, kept


def quantizable_parameters(layer: LayerSpec, rows: float) -> float:
    """Return the quantizable weights that ``rows`` tokens make a layer read."""
    return sum(
        experts_hit(op, rows) * op.out_features * op.in_features
        for op in layer.linears
        if op.quantizable
    )
