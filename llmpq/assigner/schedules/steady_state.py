"""The steady state of a schedule: expected batch sizes in closed form, and the seconds of a cycle.

A phase is ``N_D`` decode iterations (WAA has ``N_D = 1``). An answer of ``S`` tokens needs ``D = S
- 1`` iterations, because prefill makes its first token, and so ``ceil(D / N_D)`` phases.

**Deviation from ExeGPT (Sec. 6).** The paper takes the lengths of a decoding batch's members to
have the distribution of arriving requests, ``B_E = B_D E[1 / ceil(S / N_D)]``. In the steady state
long answers stay longer, and Little's law gives ``B_E = B_D / E[ceil(D / N_D)]``. At ``N_D = 1``
this is the paper's formula for WAA. A Monte Carlo simulation confirms ours (tests).

As in ExeGPT's XSimulator, a cycle's encoding and its iterations have their expected sizes, and a
flow shop over the stages gives its seconds: each stage processes micro-batches in order of arrival,
links only delay.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from llmpq.errors import SpecError
from llmpq.sim import BatchShape, Hop, MicroBatchCosts, PipelineLayout, linear_layout
from llmpq.spec.plan import MicroBatching, Plan, StageEstimate
from llmpq.spec.precision import Phase
from llmpq.spec.workload import LengthDistribution


class FlowShop:
    """Stages in a row; the master is first and also ends every micro-batch.

    ``spans`` holds start and end of the last micro-batch on each stage, in seconds.
    """

    def __init__(self, costs: MicroBatchCosts) -> None:
        self._costs = costs
        self._free_s = [0.0] * costs.layout.num_ranks
        self.spans: list[tuple[float, float]] = []

    def run(self, shape: BatchShape, ready_s: float) -> float:
        """Process a micro-batch that is ready at ``ready_s``; return when its tokens are known."""
        costs, free_s = self._costs, self._free_s
        start_s = max(ready_s, free_s[0])
        now_s = start_s + costs.stage_s(0, shape)
        self.spans = [(start_s, now_s)]
        # The projection comes when the micro-batch is back; the master's time is spent either way.
        project_s = costs.project_s(shape)
        free_s[0] = now_s + project_s
        received_s = 0.0
        for stage in range(1, len(free_s)):
            end_s, delay_s = costs.hop(stage - 1, shape)
            free_s[stage - 1] += end_s
            start_s = max(now_s + end_s + delay_s, free_s[stage])
            now_s = start_s + (end_s + costs.stage_s(stage, shape))
            self.spans.append((start_s, now_s))
            free_s[stage] = now_s
        if len(free_s) > 1:
            end_s, delay_s = costs.hop(len(free_s) - 1, shape)
            free_s[-1] += end_s
            received_s = end_s
            now_s += end_s + delay_s
        return now_s + received_s + project_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One micro-batch on one stage; step 0 is prefill, then decode rounds are counted."""

    rank: int
    phase: Phase
    micro_batch: int
    step: int
    start_s: float
    end_s: float


def timeline(plan: Plan, decode_rounds: int) -> tuple[Block, ...]:
    """Return the blocks of prefill and of the first ``decode_rounds`` rounds, as they start."""
    pipeline = FlowShop(_EstimateCosts(plan.estimate.stages))
    work, sizes = plan.workload, plan.micro_batching
    blocks: list[Block] = []

    def run(phase: Phase, micro_batch: int, step: int, ready_s: float) -> float:
        done_s = pipeline.run(BatchShape(phase=phase, rows=1, longest=1, total=1), ready_s)
        blocks.extend(
            Block(
                rank=rank,
                phase=phase,
                micro_batch=micro_batch,
                step=step,
                start_s=start_s,
                end_s=end_s,
            )
            for rank, (start_s, end_s) in enumerate(pipeline.spans)
        )
        return done_s

    batches = -(-work.batch // sizes.prefill)
    prefilled_s = max(run(Phase.PREFILL, index, 0, 0.0) for index in range(batches))
    # As in the latency formulas, the whole batch is prefilled before it decodes.
    ready = [prefilled_s] * -(-work.batch // sizes.decode)
    for step in range(1, min(decode_rounds, work.new_tokens - 1) + 1):
        ready = [run(Phase.DECODE, index, step, start_s) for index, start_s in enumerate(ready)]
    return tuple(blocks)


class _EstimateCosts:
    """``MicroBatchCosts`` of a plan's estimate: a stage's seconds include the master's own work."""

    def __init__(self, stages: tuple[StageEstimate, ...]) -> None:
        self._stages = stages
        self.layout: PipelineLayout = linear_layout(len(stages))

    def stage_s(self, rank: int, shape: BatchShape) -> float:
        stage = self._stages[rank]
        return stage.prefill_s if shape.phase is Phase.PREFILL else stage.decode_s

    def hop(self, rank: int, shape: BatchShape) -> Hop:
        stage = self._stages[rank]
        is_prefill = shape.phase is Phase.PREFILL
        return Hop(0.0, stage.send_prefill_s if is_prefill else stage.send_decode_s)

    def project_s(self, _: BatchShape) -> float:
        return 0.0


@dataclass(frozen=True, kw_only=True)
class SteadyBatch:
    """The members of a decoding batch in the steady state, with ``N_D`` iterations a phase.

    Answer lengths ``S`` include the first token and do not depend on prompt lengths.
    """

    prompt_tokens: LengthDistribution
    new_tokens: LengthDistribution
    decode_iterations: int

    def __post_init__(self) -> None:
        if self.decode_iterations < 1:
            raise SpecError(
                f"schedule: found {self.decode_iterations} decode iterations, expected 1 or more"
            )

    @cached_property
    def phases(self) -> float:
        """Mean number of phases of a request ``E[ceil(D / N_D)] = B_D / B_E``."""
        return math.fsum(
            share * -(-(tokens - 1) // self.decode_iterations) for tokens, share in self._lengths
        )

    @cached_property
    def ending(self) -> tuple[float, ...]:
        """Probability ``P_D(U)`` that a member ends at iteration U of a phase, U = 1..N_D."""
        shares = [0.0] * self.decode_iterations
        for tokens, share in self._lengths:
            if tokens > 1:
                shares[(tokens - 2) % self.decode_iterations] += share
        return tuple(share / self.phases for share in shares) if self.phases else tuple(shares)

    @cached_property
    def alive(self) -> tuple[float, ...]:
        """Share of the batch that still decodes at iteration U, U = 1..N_D; the first is 1."""
        left, shares = 1.0, []
        for share in self.ending:
            shares.append(left)
            left -= share
        return tuple(shares)

    @cached_property
    def mean_context_tokens(self) -> float:
        """Mean context of a decoding sequence; it decodes at ``s + 1, .., s + S - 1`` tokens."""
        steps = math.fsum(share * (tokens - 1) for tokens, share in self._lengths)
        made = math.fsum(share * (tokens - 1) * tokens / 2 for tokens, share in self._lengths)
        return self.prompt_tokens.mean + (made / steps if steps else 0.0)

    def encode_batch(self, decode_batch: float) -> float:
        """Return the ``B_E`` that keeps a decoding batch at ``B_D``; all of it without decoding."""
        return decode_batch / self.phases if self.phases else decode_batch

    def decode_batch(self, encode_batch: float) -> float:
        """Return the ``B_D`` that results from encoding ``B_E`` requests a phase."""
        return encode_batch * self.phases

    @property
    def _lengths(self) -> list[tuple[int, float]]:
        return list(zip(self.new_tokens.lengths, self.new_tokens.probabilities, strict=True))


@lru_cache(maxsize=4096)
def expected_longest(lengths: LengthDistribution, count: int) -> float:
    """Return the mean of the longest of ``count`` independent lengths, to which an engine pads."""
    if count < 1:
        raise SpecError(f"schedule: found {count} requests, expected at least one")
    below, before, mean = 0.0, 0.0, 0.0
    for length, share in zip(lengths.lengths, lengths.probabilities, strict=True):
        below = min(1.0, below + share)
        at_most = below**count
        mean += length * (at_most - before)
        before = at_most
    return mean


def prefill_shape(prompt_tokens: LengthDistribution, rows: int) -> BatchShape:
    """Return the expected micro-batch of ``rows`` prompts.

    Its total is that of the mean, so that the seconds of its tokens are expected ones; its spread
    ``E[s^2] / E[s]^2`` makes the seconds of attention expected ones, too.
    """
    return BatchShape(
        phase=Phase.PREFILL,
        rows=rows,
        longest=round(expected_longest(prompt_tokens, rows)),
        total=max(rows, round(rows * prompt_tokens.mean)),
        spread=1.0 + (prompt_tokens.std / prompt_tokens.mean) ** 2,
    )


def decode_shape(context_tokens: float, rows: int) -> BatchShape:
    """Return the decode micro-batch of ``rows`` sequences at the mean context."""
    return BatchShape(
        phase=Phase.DECODE,
        rows=rows,
        longest=round(context_tokens),
        total=round(rows * context_tokens),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Performance:
    """Expected throughput and latency of a schedule.

    The latency is that of the answer that the bound applies to, from the start of its encoding; the
    batches are mean sizes ``B_D`` and ``B_E`` at the start of their phases; a cycle is one encoding
    and its decode iterations.
    """

    requests_per_s: float
    latency_s: float
    decode_batch: float
    encode_batch: float
    cycle_s: float


def rra_performance(
    costs: MicroBatchCosts,
    batch: SteadyBatch,
    encode_batch: float,
    sizes: MicroBatching,
    new_tokens: int,
) -> Performance:
    """Return the performance of RRA in the steady state, for an answer of ``new_tokens`` tokens."""
    decode_batch = batch.decode_batch(encode_batch)
    pipeline = FlowShop(costs)
    now_s = encoded_s = encode_s(pipeline, batch.prompt_tokens, encode_batch, sizes.prefill)
    ends_s = []
    if decode_batch:
        ready_s = [now_s]
        for alive in batch.alive:
            ready_s = _iterate(pipeline, batch, decode_batch * alive, sizes.decode, ready_s)
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
    pipeline: FlowShop, prompt_tokens: LengthDistribution, requests: float, size: int
) -> float:
    """Return the seconds to encode ``requests`` requests in micro-batches of ``size``."""
    return [
        pipeline.run(prefill_shape(prompt_tokens, rows), 0.0)
        for rows in _micro_batches(requests, size)
    ][-1]


def _iterate(
    pipeline: FlowShop, batch: SteadyBatch, sequences: float, size: int, ready_s: list[float]
) -> list[float]:
    """Run one decode iteration; return when each micro-batch has its tokens.

    A micro-batch continues then; one merged from several waits for the last of its parts.
    """
    parts = list(_micro_batches(sequences, size))
    after_s = []
    for part, rows in enumerate(parts):
        # The part's share of the micro-batches of the last iteration, at least one of them.
        first = part * len(ready_s) // len(parts)
        end = max(first + 1, (part + 1) * len(ready_s) // len(parts))
        shape = decode_shape(batch.mean_context_tokens, rows)
        after_s.append(pipeline.run(shape, max(ready_s[first:end])))
    return after_s


def _micro_batches(sequences: float, size: int) -> Iterator[int]:
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
