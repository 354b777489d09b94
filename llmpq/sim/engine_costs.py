"""Seconds of packed steps, from the costs of prefill and decode micro-batches.

Cost models price micro-batches of one phase: ``P(v, s)`` for ``v`` prompts of ``s`` tokens, and
``D(v, c)`` for ``v`` sequences with a context of ``c`` tokens. A packed step mixes chunks of both.
Its linear operators see all of its tokens; attention is the sum over its sequences.

Attention of a prompt grows with ``v s^2`` and everything else with ``v s``, so two shapes of ``n``
tokens separate them::

    A(n) = 4/3 (P(1, n) - P(4, n/4))        attention of one whole prompt
    L(n) = P(1, n) - A(n)                   everything else

A step of ``r`` decode rows with a mean context ``c`` and of chunks ``[f, f + k)`` of prompts, ``n``
tokens in all, takes::

    max(L(n), D(r, 1)) + (D(r, c) - D(r, 1)) + sum max(A(f + k) - A(f), D(1, f) - D(1, 1))

The second term of each chunk reads the keys and values before it once. A step of decode rows alone
takes ``D(r, c)`` and one whole prompt ``P(1, s)``; the chunks of a prompt add up to its attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Protocol

from llmpq.batching.engine_step import ScheduledChunk
from llmpq.costmodel.base import PhaseSeconds, prompt_s
from llmpq.errors import SpecError
from llmpq.sim.costs import BatchShape, Hop
from llmpq.sim.plan_costs import PlanCosts
from llmpq.spec.precision import Phase

CONTEXT_STEP = 64
"""Decode times are evaluated at multiples of this context and interpolated."""


class StepSize(NamedTuple):
    """Rows, tokens and contexts that the seconds of a step depend on.

    Attributes:
        rows: output positions: one of every sequence, and one of every draft token.
        tokens: tokens of all sequences.
        decode_rows: tokens of sequences that decode, draft tokens included.
        decode_context: keys that those attend to, in all.
        prompts: first token and number of tokens of every other chunk.
    """

    rows: int
    tokens: int
    decode_rows: int
    decode_context: int
    prompts: tuple[tuple[int, int], ...]


def step_size(chunks: Sequence[ScheduledChunk]) -> StepSize:
    """Return the size of a step."""
    decode = context = tokens = drafts = 0
    prompts: list[tuple[int, int]] = []
    for chunk in chunks:
        count = chunk.count
        if count == 1:
            decode += 1
            context += chunk.first + 1
        elif chunk.num_draft_tokens:
            drafts += chunk.num_draft_tokens
            decode += count
            context += count * chunk.first + count * (count + 1) // 2
        else:
            prompts.append((chunk.first, count))
            tokens += count
    return StepSize(len(chunks) + drafts, decode + tokens, decode, context, tuple(prompts))


class EngineCosts(Protocol):
    """Seconds of the parts of an engine."""

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline; the first one belongs to the master."""
        ...

    def stage_s(self, stage: int, shape: StepSize) -> float:
        """Return the seconds of the layers of a stage."""
        ...

    def project_s(self, shape: StepSize) -> float:
        """Return the seconds of the master's own work: embedding, head, sampling."""
        ...

    def hop(self, stage: int, shape: StepSize) -> Hop:
        """Return the cost of sending the output of a stage to the next one or to the master."""
        ...


class StageLaw:
    """Seconds of a stage for packed steps; see the module.

    Args:
        prefill_s: ``P(v, s)``.
        decode_s: ``D(v, c)``.
    """

    def __init__(self, prefill_s: PhaseSeconds, decode_s: PhaseSeconds) -> None:
        self._prefill_s, self._decode_s = prefill_s, decode_s
        self._prompts: dict[int, tuple[float, float]] = {}
        self._decodes: dict[tuple[int, int], float] = {}

    def __call__(self, shape: StepSize) -> float:
        """Return the seconds of a step."""
        rows = shape.decode_rows
        decode_s = self._decode(rows, shape.decode_context / rows) if rows else 0.0
        if not shape.prompts:
            return decode_s
        linear_s, _ = self._prompt(shape.tokens)
        if rows:
            thin_s = self._decode(rows, 1.0)
            linear_s = max(linear_s, thin_s) + max(0.0, decode_s - thin_s)
        return linear_s + sum(self._attention(*chunk) for chunk in shape.prompts)

    def _attention(self, first: int, count: int) -> float:
        whole_s = self._prompt(first + count)[1]
        if not first:
            return whole_s
        read_s = self._decode(1, float(first)) - self._decode(1, 1.0)
        return max(whole_s - self._prompt(first)[1], read_s, 0.0)

    def _prompt(self, tokens: int) -> tuple[float, float]:
        """Return the seconds of one prompt, without attention and of attention."""
        if tokens not in self._prompts:
            self._prompts[tokens] = prompt_s(self._prefill_s, float(tokens))
        return self._prompts[tokens]

    def _decode(self, rows: int, context: float) -> float:
        below = int(context) // CONTEXT_STEP
        low_s = self._decode_at(rows, below)
        if below == 0:
            share = (context - 1.0) / (CONTEXT_STEP - 1.0)
        else:
            share = context / CONTEXT_STEP - below
        if not share:
            return low_s
        return low_s + share * (self._decode_at(rows, below + 1) - low_s)

    def _decode_at(self, rows: int, place: int) -> float:
        key = rows, place
        if key not in self._decodes:
            self._decodes[key] = self._decode_s(rows, max(1.0, float(place * CONTEXT_STEP)))
        return self._decodes[key]


class PlanEngineCosts:
    """Seconds of packed steps on the stages of a plan, its links and its master.

    Args:
        costs: of the plan.

    Raises:
        SpecError: the plan has separate stages for prefill and for decode.
    """

    def __init__(self, costs: PlanCosts) -> None:
        if costs.layout.is_split:
            raise SpecError(
                "engine: found separate stages for prefill and decode, expected one pipeline"
            )
        self._costs = costs
        self._laws = [
            StageLaw(
                partial(costs.micro_batch_s, rank, Phase.PREFILL),
                partial(costs.micro_batch_s, rank, Phase.DECODE),
            )
            for rank in range(costs.layout.num_ranks)
        ]

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return self._costs.layout.num_ranks

    def stage_s(self, stage: int, shape: StepSize) -> float:
        """Return the seconds of the layers of a stage; 0 for a master without layers."""
        if not self._costs.has_layers(stage, Phase.DECODE):
            return 0.0
        return self._laws[stage](shape)

    def project_s(self, shape: StepSize) -> float:
        """Return the seconds of embedding, final norm, head, sampling and scheduler."""
        if shape.prompts:
            return self._costs.master_s(Phase.PREFILL, shape.rows, shape.tokens / shape.rows)
        return self._costs.master_s(Phase.DECODE, shape.rows, 1.0)

    def hop(self, stage: int, shape: StepSize) -> Hop:
        """Return the cost of sending; the last stage sends one position of every sequence."""
        is_last = stage == self.num_stages - 1
        rows = shape.rows if is_last else shape.tokens
        return self._costs.hop(
            stage, BatchShape(phase=Phase.DECODE, rows=rows, longest=1, total=rows)
        )
