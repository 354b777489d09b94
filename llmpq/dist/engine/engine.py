"""Engine: steps of a scheduler, computed by an executor, and the tokens that they make.

The scheduler decides the steps, in the runtime as in the simulator: a ``BlockScheduler`` mixes
decode rows and prompt chunks, a ``PolicyScheduler`` obeys a batching policy. The engine has the
tokens of every sequence and chooses the next ones. Stages see only the blocks and lengths of rows.

With speculative decoding, the next token of a sequence and its draft tokens are rows of one token.
The engine chooses the token after each of them in turn, as without a draft, and goes on while the
draft has the token that was chosen. So the answer is the one of an engine without drafts, sampled
or greedy, with the same log-probabilities, masks and ends.

Shapes: R rows with an output, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from torch import Tensor

from llmpq.batching.engine_step import (
    EngineLimits,
    EngineRequest,
    EngineStep,
    ScheduledChunk,
    StepScheduler,
)
from llmpq.batching.speculation import SpeculativeConfig
from llmpq.dist.engine.drafters import Drafter, PromptLookup
from llmpq.dist.engine.executor import StepExecutor
from llmpq.dist.engine.sampler import SampledToken, SamplingState, ScoredRows, prompt_logprobs
from llmpq.dist.io.generation import GenerationEnd
from llmpq.dist.io.sampling_params import TokenLogprobs
from llmpq.dist.transport.frames import Row


@dataclass(slots=True, kw_only=True, eq=False)
class RunningSequence:
    """An unfinished request with its tokens, and the draft of its next ones.

    Attributes:
        number: of the request.
        tokens: prompt and answer.
        num_prompt_tokens: those of the prompt.
        state: the tokens of the answer, and how the next one is chosen.
        max_tokens: of the answer.
        prompt_logprobs: found so far, ``None`` when they are not asked for.
        num_cached_tokens: of the prompt, whose keys and values were found; ``None`` before its
            first step.
        lookup: finds drafts, ``None`` without prompt lookup.
        draft: the tokens proposed last.
    """

    number: int
    tokens: list[int]
    num_prompt_tokens: int
    state: SamplingState
    max_tokens: int
    prompt_logprobs: list[TokenLogprobs] | None = None
    _num_taken: int = 0  # of ``prompt_logprobs``
    num_cached_tokens: int | None = None
    lookup: PromptLookup | None = None
    draft: Sequence[int] = field(default_factory=list)

    def take_prompt_logprobs(self) -> list[TokenLogprobs]:
        """Return those that were found since the last call."""
        new = (self.prompt_logprobs or [])[self._num_taken :]
        self._num_taken += len(new)
        return new

    def sample(
        self, scored: ScoredRows, rows: Sequence[int]
    ) -> tuple[list[SampledToken], GenerationEnd | None]:
        """Choose tokens while the draft has them, and one more.

        Args:
            scored: the scores of the step.
            rows: of the newest token and of the draft tokens.

        Returns:
            The tokens, the last one of which may be an error; and why the answer ends, if it does.
        """
        tokens: list[SampledToken] = []
        reason: GenerationEnd | None = None
        for row, proposed in zip(rows, [*self.draft[: len(rows) - 1], None], strict=True):
            token = scored.sample(row, self.state)
            tokens.append(token)
            if token.error is not None:
                return tokens, "error"
            self.state.accept(token.token_id)
            self.tokens.append(token.token_id)
            reason = self.state.finish_reason(self.max_tokens)
            if reason is not None or token.token_id != proposed:
                break
        return tokens, reason


class NewTokens(NamedTuple):
    """New tokens of a sequence; the last one may be an error. ``reason``: why it ends, if so."""

    sequence: RunningSequence
    tokens: Sequence[SampledToken]
    reason: GenerationEnd | None


class _Dispatched(NamedTuple):
    """A step in flight; ``scored`` are the chunk of each output and the position of its token."""

    step: EngineStep
    scored: list[tuple[ScheduledChunk, int]]


class Engine:
    """Answers requests: dispatches the steps of a scheduler and chooses the next tokens.

    It keeps nothing that a restart needs: the client adds its unfinished requests again, with the
    tokens that it has.

    Args:
        executor: computes the steps.
        scheduler: decides them.
        limits: of the scheduler.
        now: returns the time on the clock of the arrivals.
        lookup: finds drafts in the text so far; ``None`` for none.
        draft_model: proposes them where ``limits.draft`` has its size.
        on_start: called with the requests whose first step is about to be dispatched.
    """

    def __init__(  # noqa: PLR0913  the parts of an engine
        self,
        *,
        executor: StepExecutor,
        scheduler: StepScheduler,
        limits: EngineLimits,
        now: Callable[[], float],
        lookup: SpeculativeConfig | None = None,
        draft_model: Drafter | None = None,
        on_start: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        self._on_start = on_start
        self._executor = executor
        self._scheduler = scheduler
        self._limits = limits
        self._now = now
        self._draft_model = draft_model
        self._lookup = None if draft_model is not None else lookup
        if self._lookup is not None:
            scheduler.drafts.propose = self._propose
        self._unmade: dict[int, Callable[[], RunningSequence]] = {}
        self._sequences: dict[int, RunningSequence] = {}
        self._in_flight: dict[int, _Dispatched] = {}  # by number

    @property
    def num_in_flight(self) -> int:
        """Steps that are not complete."""
        return len(self._in_flight)

    def has_result(self) -> bool:
        """Return whether :meth:`complete` would not wait."""
        return bool(self._in_flight) and self._executor.has_result()

    def add(self, request: EngineRequest, make_sequence: Callable[[], RunningSequence]) -> None:
        """Queue a request.

        Args:
            request: as the scheduler sees it.
            make_sequence: called before its first step.

        Raises:
            CapacityError: it does not fit into the KV memory.
        """
        self._scheduler.add(request)
        self._unmade[request.request] = make_sequence

    def abort(self, request: int) -> None:
        """End a request, which gets no more tokens."""
        self._unmade.pop(request, None)
        self._sequences.pop(request, None)
        self._scheduler.abort(request)

    def dispatch(self) -> EngineStep | None:
        """Dispatch the step that the scheduler decides; ``None`` if there is none now."""
        step = self._scheduler.schedule(self._now())
        if step is None:
            return None
        if step.drafts:
            self._compute_drafts(step)
        rows: list[Row] = []
        token_ids: list[int] = []
        outputs: list[int] = []
        scored: list[tuple[ScheduledChunk, int]] = []
        started: list[int] = []
        for chunk in step.chunks:
            sequence = self._sequence(chunk.request)
            if sequence is None:  # a policy keeps finished sequences: they cost what others do
                token_ids += [0] * chunk.count
                outputs.append(len(rows))
                scored.append((chunk, chunk.first))
                rows.append(self._row(chunk, None, chunk.first, chunk.first + chunk.count))
                continue
            if sequence.num_cached_tokens is None:
                sequence.num_cached_tokens = chunk.first
                started.append(chunk.request)
            token_ids += sequence.tokens[chunk.first : chunk.first + chunk.count]
            token_ids += sequence.draft[: chunk.num_draft_tokens]
            for row, position in self._rows(chunk, sequence):
                if position is not None:
                    outputs.append(len(rows))
                    scored.append((chunk, position))
                rows.append(row)
        if started and self._on_start is not None:
            self._on_start(started)
        self._in_flight[step.number] = _Dispatched(step, scored)
        self._executor.dispatch(step.number, step.phase, np.array(token_ids), rows, outputs)
        return step

    def _sequence(self, request: int) -> RunningSequence | None:
        """Return the sequence of a request; ``None`` once it is finished."""
        make_sequence = self._unmade.pop(request, None)
        if make_sequence is not None:
            sequence = self._sequences[request] = make_sequence()
            if self._lookup is not None:
                sequence.lookup = PromptLookup(self._lookup)
        return self._sequences.get(request)

    def complete(self) -> list[NewTokens]:
        """Complete the next step that is back, waiting for it; return the new tokens.

        Raises:
            StageError: a stage failed, hangs, or returned another step than expected.
        """
        number, scores = self._executor.collect()
        step, scored = self._in_flight.pop(number)
        # Sequences that were aborted meanwhile are not here any more.
        alive = [
            (row, chunk, position)
            for row, (chunk, position) in enumerate(scored)
            if chunk.request in self._sequences
        ]
        made = [] if scores is None else self.sample(scores, alive)
        self._executor.end_step()
        tokens: dict[int, int] = {}
        accepted: dict[int, list[int]] = {}
        finished: list[int] = []
        for sequence, sampled, reason in made:
            ids = [token.token_id for token in sampled if token.error is None]
            if ids:
                *accepted[sequence.number], tokens[sequence.number] = ids
            if reason is not None:
                finished.append(sequence.number)
                del self._sequences[sequence.number]
        self._scheduler.complete(step.number, tokens, finished, accepted, now_s=self._now())
        return made

    def sample(
        self, scores: Tensor, alive: Sequence[tuple[int, ScheduledChunk, int]]
    ) -> list[NewTokens]:
        """Choose the new tokens of every sequence whose chunk makes one.

        Args:
            scores: ``[R, V]`` of the outputs of a step.
            alive: row, chunk and position of those whose sequence is not finished.
        """
        self._read_prompt_logprobs(scores, alive)
        rows: list[int] = []
        places: dict[int, list[int]] = {}  # of each request in ``rows``
        for row, chunk, position in alive:
            first = chunk.first + chunk.count - 1 - chunk.num_draft_tokens
            if chunk.makes_token and position >= first:
                places.setdefault(chunk.request, []).append(len(rows))
                rows.append(row)
        if not rows:
            return []
        scored = ScoredRows(scores if len(rows) == len(scores) else scores[rows])
        made = []
        for number, own in places.items():
            sequence = self._sequences[number]
            made.append(NewTokens(sequence, *sequence.sample(scored, own)))
        return made

    def drain(self) -> None:
        """Wait until all steps in flight are back, and drop what they made."""
        while self._in_flight:
            number, _ = self._executor.collect()
            del self._in_flight[number]

    def _propose(self, number: int, most: int) -> int:
        """Find draft tokens of a sequence; return how many."""
        sequence = self._sequence(number)
        assert sequence is not None
        assert sequence.lookup is not None
        sequence.draft = sequence.lookup.propose(sequence.tokens, most)
        return len(sequence.draft)

    def _compute_drafts(self, step: EngineStep) -> None:
        """Let the draft model compute the draft tokens of a step."""
        assert self._draft_model is not None
        found = [self._sequence(work.request) for work in step.drafts]
        sequences = [sequence for sequence in found if sequence is not None]
        drafts = self._draft_model.propose(step.drafts, [one.tokens for one in sequences])
        # The step has rows for drafts although the draft model may have ended: any tokens do.
        proposed = drafts or [[0] * work.length for work in step.drafts]
        for sequence, draft in zip(sequences, proposed, strict=True):
            sequence.draft = draft
        self._scheduler.complete_drafts(step, self._now(), has_ended=drafts is None)

    def _rows(
        self, chunk: ScheduledChunk, sequence: RunningSequence
    ) -> list[tuple[Row, int | None]]:
        """Return the rows of a chunk, each with the position whose scores are wanted."""
        last = chunk.first + chunk.count - 1
        if chunk.num_draft_tokens:
            places = range(chunk.first, last + 1)
            return [(self._row(chunk, sequence, place, place + 1), place) for place in places]
        found = sequence.prompt_logprobs
        needed = sequence.num_prompt_tokens - 1
        if found is None or len(found) >= needed or chunk.first >= needed:
            row = self._row(chunk, sequence, chunk.first, last + 1)
            return [(row, last if chunk.makes_token else None)]
        # A stage returns the last token of a row: every position is a row of its own.
        return [
            (
                self._row(chunk, sequence, position, position + 1),
                position if position < needed or chunk.makes_token else None,
            )
            for position in range(chunk.first, last + 1)
        ]

    def _row(
        self, chunk: ScheduledChunk, sequence: RunningSequence | None, first: int, length: int
    ) -> Row:
        width, rope_length = self._limits.blocks_for(length), 0
        if sequence is not None:
            tokens = max(length, len(sequence.tokens))
            rope_length = self._limits.rope_length(sequence.num_prompt_tokens, tokens)
        return Row(
            blocks=chunk.blocks[:width],
            window_blocks=chunk.window_blocks[:width],
            first=first,
            length=length,
            rope_length=rope_length,
            origin=chunk.origin,
        )

    def _read_prompt_logprobs(
        self, scores: Tensor, alive: Sequence[tuple[int, ScheduledChunk, int]]
    ) -> None:
        rows: dict[int, list[int]] = {}  # of each request
        next_tokens: dict[int, list[int]] = {}
        for row, chunk, position in alive:
            sequence = self._sequences[chunk.request]
            found = sequence.prompt_logprobs
            if found is None:
                continue
            own = rows.setdefault(chunk.request, [])
            # A preempted prompt is computed again from its start.
            if position == len(found) + len(own) and position < sequence.num_prompt_tokens - 1:
                own.append(row)
                next_tokens.setdefault(chunk.request, []).append(sequence.tokens[position + 1])
        for number, own in rows.items():
            sequence = self._sequences[number]
            found, count = sequence.prompt_logprobs, sequence.state.params.prompt_logprobs
            if own and found is not None and count is not None:
                found += prompt_logprobs(scores, own, next_tokens[number], count)
