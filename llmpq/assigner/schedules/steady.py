"""What a schedule of RRA takes: its cycle played forward with expected batch sizes.

ExeGPT's XSimulator (Sec. 6): the batches of an encoding phase and of ``N_D`` decode iterations have
their expected sizes, and a timeline over the stages gives the seconds of a cycle. From the cycle
follow throughput and the latency of an answer of a given length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from llmpq.assigner.schedules.expected import SteadyBatch, expected_longest
from llmpq.sim import Shape, StepCosts
from llmpq.spec.lengths import LengthDistribution
from llmpq.spec.plan import MicroBatching
from llmpq.spec.precision import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Performance:
    """What a schedule is expected to do.

    Attributes:
        requests_per_s: finished requests a second.
        latency_s: of the answer the latency bound is for, from the start of its encoding.
        decode_batch: mean sequences at the start of a decoding phase ``B_D``.
        encode_batch: mean requests of an encoding phase ``B_E``.
        cycle_s: seconds of one encoding and its decode iterations.
    """

    requests_per_s: float
    latency_s: float
    decode_batch: float
    encode_batch: float
    cycle_s: float


class _Line:
    """Stages in a row in expected time; the master's is first and also ends every micro-batch."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._free_s = [0.0] * costs.layout.num_ranks

    def passes(self, shape: Shape, ready_s: float) -> float:
        """Send a micro-batch through from ``ready_s``; return when its tokens are known."""
        costs, free_s = self._costs, self._free_s
        now_s = max(ready_s, free_s[0])
        now_s += costs.embed_s(shape) + costs.stage_s(0, shape)
        # Projection happens when the micro-batch is back; the master's time is spent either way.
        project_s = costs.project_s(shape)
        free_s[0] = now_s + project_s
        received_s = 0.0
        for stage in range(1, len(free_s)):
            end_s, delay_s = costs.hop(stage - 1, shape)
            free_s[stage - 1] += end_s
            now_s = max(now_s + end_s + delay_s, free_s[stage])
            now_s += end_s + costs.stage_s(stage, shape)
            free_s[stage] = now_s
        if len(free_s) > 1:
            end_s, delay_s = costs.hop(len(free_s) - 1, shape)
            free_s[-1] += end_s
            received_s = end_s
            now_s += end_s + delay_s
        return now_s + received_s + project_s


def rra_performance(
    costs: StepCosts,
    batch: SteadyBatch,
    encode_batch: float,
    sizes: MicroBatching,
    new_tokens: int,
) -> Performance:
    """Return what RRA does in the steady state.

    Args:
        costs: seconds of the plan's parts.
        batch: the laws of lengths, and ``N_D``.
        encode_batch: requests encoded a cycle ``B_E``.
        sizes: most sequences of a micro-batch in either phase.
        new_tokens: length of the answer whose latency is wanted.
    """
    decode_batch = batch.decode_batch(encode_batch)
    line = _Line(costs)
    now_s = _encode(line, batch.prompt_tokens, encode_batch, sizes.prefill)
    encoded_s = now_s
    ends_s = []
    if decode_batch:
        ready_s = [now_s]
        for alive in batch.alive:
            ready_s = _iterate(line, batch, decode_batch * alive, sizes.decode, ready_s)
            ends_s.append(max(ready_s))
        now_s = ends_s[-1]
    return Performance(
        requests_per_s=encode_batch / now_s,
        latency_s=_latency(batch, new_tokens, encoded_s, now_s, ends_s),
        decode_batch=decode_batch,
        encode_batch=encode_batch,
        cycle_s=now_s,
    )


def encode_s(
    costs: StepCosts, prompt_tokens: LengthDistribution, requests: int, size: int
) -> float:
    """Return the seconds to encode so many requests in micro-batches of ``size``."""
    return _encode(_Line(costs), prompt_tokens, requests, size)


def _encode(line: _Line, prompt_tokens: LengthDistribution, requests: float, size: int) -> float:
    now_s = 0.0
    for rows in _split(requests, size):
        shape = Shape(
            phase=Phase.PREFILL,
            rows=rows,
            longest=round(expected_longest(prompt_tokens, rows)),
            total=round(rows * prompt_tokens.mean),
        )
        now_s = line.passes(shape, 0.0)
    return now_s


def _iterate(
    line: _Line, batch: SteadyBatch, sequences: float, size: int, ready_s: list[float]
) -> list[float]:
    """One decode iteration of everyone; return when each micro-batch has its tokens.

    A micro-batch goes on as soon as its own tokens are known. When sequences end and micro-batches
    are merged, the merged one waits for the later of its parts.
    """
    context = batch.mean_context_tokens
    parts = list(_split(sequences, size))
    after_s = []
    for part, rows in enumerate(parts):
        shape = Shape(
            phase=Phase.DECODE, rows=rows, longest=round(context), total=round(rows * context)
        )
        # The part's share of those that were ready, at least one of them.
        first = part * len(ready_s) // len(parts)
        end = max(first + 1, (part + 1) * len(ready_s) // len(parts))
        after_s.append(line.passes(shape, max(ready_s[first:end])))
    return after_s


def _split(sequences: float, size: int) -> Iterator[int]:
    """Yield the sizes of even micro-batches; at least one, of at least one sequence."""
    whole = max(1, round(sequences))
    parts = math.ceil(whole / size)
    for part in range(parts):
        yield whole // parts + (part < whole % parts)


def _latency(
    batch: SteadyBatch, new_tokens: int, encoded_s: float, cycle_s: float, ends_s: list[float]
) -> float:
    """Return seconds from the start of encoding to the last of ``new_tokens`` tokens."""
    iterations = new_tokens - 1
    if iterations == 0 or not ends_s:
        return encoded_s
    full, rest = divmod(iterations - 1, batch.decode_iterations)
    return full * cycle_s + ends_s[rest]
