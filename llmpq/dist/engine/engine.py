"""Engine: steps of a scheduler, computed by an executor, and the tokens that they make.

The scheduler decides the steps, in the runtime as in the simulator: a ``BlockScheduler`` mixes
decode rows and prompt chunks, a ``PolicyScheduler`` obeys a batching policy. The engine has the
tokens of every sequence and chooses the next ones. Stages see only the blocks and lengths of rows.

With speculative decoding, the next token of a sequence and its draft tokens are rows of one token.
The engine chooses the token after each of them in turn, as without a draft, and goes on while the
draft has the token that was chosen. So the answer is the one of an engine without drafts, sampled
or greedy, with the same log-probabilities, masks and ends.

A token is chosen by the ``SamplingParams`` of its sequence. Scores are changed in vLLM's order:
allowed tokens, bad words, minimum length, bias, penalties; a random choice then applies
temperature, min-p, top-k and top-p. The random number of a token depends on the seed, the request
and the position only, not on the other sequences of the step; so a request can be resumed,
recomputed, regrouped or repeated.

Shapes: R rows with an output, V vocabulary, N prompt positions.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
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
from llmpq.dist.engine.executor import StepExecutor, rows_of
from llmpq.dist.engine.mtp import MtpDrafter
from llmpq.dist.io.generation import GenerationEnd
from llmpq.dist.io.prompts import Request
from llmpq.dist.io.results import FinishReason
from llmpq.dist.io.sampling_params import GREEDY, SamplingParams, TokenLogprobs
from llmpq.dist.io.structured_outputs import GrammarCompiler
from llmpq.dist.transport.frames import Row
from llmpq.kernels.base import exact_dtype
from llmpq.models.attention import on_device
from llmpq.options.run import Pooling

NAN_SCORES = (
    "the model's scores are not numbers (NaN): found an overflow in the layers, "
    "expected finite values; try --dtype bfloat16 or float32 when planning"
)
NO_TOKEN = "sampling_params: found no token that all of them allow, expected at least one"
_UNIFORM_BITS = 52
"""Bits of a random number: with one bit more, its product with the total could round up to it."""
MAX_IDLE_WAIT_S = 0.5
"""Longest single wait of an idle run, after which it looks at its callbacks again."""
VALUES_AT_ONCE = 1 << 22
"""Scores from which tokens are chosen together: on a GPU, for about fifty bytes each."""
VALUES_AT_ONCE_ON_CPU = 1 << 17
ROWS_AT_ONCE = 64
"""Positions whose log probabilities are computed together; more would take memory alone."""


NAN_STATES = NAN_SCORES.replace("scores", "hidden states", 1)


class PooledPrompt:
    """The embedding of a prompt: the mean of its final hidden states, or the last one.

    Args:
        pooling: which of both.
        num_tokens: of the prompt.
    """

    def __init__(self, pooling: Pooling, num_tokens: int) -> None:
        self.first = 0 if pooling == "mean" else num_tokens - 1
        self._next = self.first
        self._end = num_tokens
        self._total: Tensor | None = None  # [H]

    @property
    def is_complete(self) -> bool:
        """Whether all states were added."""
        return self._next == self._end

    def next_rows(self, places: Iterable[tuple[int, int]]) -> list[int]:
        """Return the rows of the states that were not added yet; they count as added.

        Args:
            places: row and position of states. A preempted prompt is computed again from its start.
        """
        found = []
        for row, position in places:
            if position == self._next:
                found.append(row)
                self._next += 1
        return found

    def add(self, states: Tensor) -> None:
        """Add states ``[N, H]``."""
        # In float64, the steps that a prompt is computed in do not show in the float32 embedding.
        total = states.sum(dim=0, dtype=exact_dtype(states.device)).cpu()
        self._total = total if self._total is None else self._total + total

    def embedding(self) -> bytes | None:
        """Return the mean of length 1, float32 and little-endian; ``None`` if it is not finite."""
        assert self._total is not None
        mean = self._total / (self._end - self.first)
        if not bool(mean.isfinite().all()):
            return None
        unit = torch.nn.functional.normalize(mean, dim=0)
        return unit.numpy().astype("<f4").tobytes()


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
        pooled: the embedding that is the answer; ``None`` where tokens are.
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
    pooled: PooledPrompt | None = None
    num_cached_tokens: int | None = None
    lookup: PromptLookup | None = None
    draft: Sequence[int] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        request: EngineRequest,
        prompt_token_ids: Sequence[int],
        state: SamplingState,
        pooling: Pooling | None = None,
    ) -> RunningSequence:
        """Return the sequence of a request, with the tokens of the answer that ``state`` has."""
        return cls(
            number=request.request,
            tokens=[*prompt_token_ids, *state.token_ids],
            num_prompt_tokens=len(prompt_token_ids),
            state=state,
            max_tokens=request.max_tokens + len(state.token_ids),
            prompt_logprobs=[] if request.scores_prompt and pooling is None else None,
            pooled=None if pooling is None else PooledPrompt(pooling, len(prompt_token_ids)),
        )

    @property
    def reads_prompt(self) -> bool:
        """Whether an output of every position of the prompt is needed."""
        if self.pooled is not None:
            return self.pooled.first == 0
        found = self.prompt_logprobs
        return found is not None and len(found) < self.num_prompt_tokens - 1

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
    """New tokens of a sequence; the last one may be an error. ``reason``: why it ends, if so.

    One with an ``embedding`` has no tokens.
    """

    sequence: RunningSequence
    tokens: Sequence[SampledToken]
    reason: GenerationEnd | None
    embedding: bytes | None = None


Output = tuple[ScheduledChunk, int]
"""The chunk of an output of a step, and the position of its token."""


class _Dispatched(NamedTuple):
    """A step in flight: the outputs whose scores, and those whose hidden states are wanted."""

    step: EngineStep
    scored: list[Output]
    pooled: list[Output]


class Engine:
    """Answers requests: dispatches the steps of a scheduler and chooses the next tokens.

    It keeps nothing that a restart needs: the client adds its unfinished requests again, with the
    tokens that it has.

    Args:
        executor: computes the steps.
        scheduler: decides them.
        limits: of the scheduler.
        clock: seconds; arrivals count from when the engine was made.
        lookup: finds drafts in the text so far; ``None`` for none.
        draft_model: proposes them where ``limits.draft`` has its size. An ``MtpDrafter`` reads what
            the steps compute, of which the executor then returns all hidden states.
        on_start: called with the requests whose first step is about to be dispatched.

    Attributes:
        start_s: when it was made, by the clock.
    """

    def __init__(  # noqa: PLR0913  the parts of an engine
        self,
        *,
        executor: StepExecutor,
        scheduler: StepScheduler,
        limits: EngineLimits,
        clock: Callable[[], float],
        lookup: SpeculativeConfig | None = None,
        draft_model: Drafter | None = None,
        on_start: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        self._on_start = on_start
        self._executor = executor
        self._scheduler = scheduler
        self._limits = limits
        self._clock = clock
        self.start_s = clock()
        self._draft_model = draft_model
        self._mtp = draft_model if isinstance(draft_model, MtpDrafter) else None
        if self._mtp is not None:
            self._mtp.clear()
        self._lookup = None if draft_model is not None else lookup
        if self._lookup is not None:
            scheduler.drafts.propose = self._propose
        self._unmade: dict[int, Callable[[], RunningSequence]] = {}
        self._sequences: dict[int, RunningSequence] = {}
        self._in_flight: dict[int, _Dispatched] = {}  # by number

    def now_s(self) -> float:
        """Return the time on the clock of the arrivals."""
        return self._clock() - self.start_s

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
        if self._mtp is not None:
            self._mtp.forget(request)
        self._scheduler.abort(request)

    def dispatch(self) -> EngineStep | None:
        """Dispatch the step that the scheduler decides; ``None`` if there is none now."""
        step = self._scheduler.schedule(self.now_s())
        if step is None:
            return None
        if step.drafts:
            self._compute_drafts(step)
        rows: list[Row] = []
        token_ids: list[int] = []
        outputs: list[int] = []
        scored: list[Output] = []
        pooled_rows: list[int] = []
        pooled: list[Output] = []
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
            is_pooled = sequence.pooled is not None
            for row, position in self._rows(chunk, sequence):
                if position is not None:
                    (pooled_rows if is_pooled else outputs).append(len(rows))
                    (pooled if is_pooled else scored).append((chunk, position))
                rows.append(row)
        if started and self._on_start is not None:
            self._on_start(started)
        self._in_flight[step.number] = _Dispatched(step, scored, pooled)
        self._executor.dispatch(
            step.number, step.phase, np.array(token_ids), rows, outputs, pooled_rows
        )
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
        number, scores, states, all_states = self._executor.collect()
        step, scored, pooled = self._in_flight.pop(number)
        # Sequences that were aborted meanwhile are not here any more.
        alive = [
            (row, chunk, position)
            for row, (chunk, position) in enumerate(scored)
            if chunk.request in self._sequences
        ]
        made = [] if scores is None else self.sample(scores, alive)
        if states is not None:
            made += self._pool(states, pooled)
        if self._mtp is not None and all_states is not None:
            self._observe(self._mtp, step, all_states)
        self._executor.end_step()
        tokens: dict[int, int] = {}
        accepted: dict[int, list[int]] = {}
        finished: list[int] = []
        for sequence, sampled, reason, _ in made:
            ids = [token.token_id for token in sampled if token.error is None]
            if ids:
                *accepted[sequence.number], tokens[sequence.number] = ids
            if reason is not None:
                finished.append(sequence.number)
                del self._sequences[sequence.number]
                if self._mtp is not None:
                    self._mtp.forget(sequence.number, sequence.tokens)
        self._scheduler.complete(step.number, tokens, finished, accepted, now_s=self.now_s())
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
        choices = [
            Choice(row, self._sequences[number].state, ahead)
            for number, own in places.items()
            for ahead, row in enumerate(own)
            # What changes the scores after a draft token depends on whether it is accepted.
            if ahead == 0 or not self._sequences[number].state.params.changes_scores
        ]
        scored = ScoredRows(scores if len(rows) == len(scores) else scores[rows], choices)
        made = []
        for number, own in places.items():
            sequence = self._sequences[number]
            made.append(NewTokens(sequence, *sequence.sample(scored, own)))
        return made

    def _pool(self, states: Tensor, pooled: Sequence[Output]) -> list[NewTokens]:
        """Add the hidden states ``[R, H]`` of a step to their prompts; return what is complete."""
        places: dict[int, list[tuple[int, int]]] = {}  # row and position, of each request
        for row, (chunk, position) in enumerate(pooled):
            if chunk.request in self._sequences:
                places.setdefault(chunk.request, []).append((row, position))
        made = []
        for number, own in places.items():
            sequence = self._sequences[number]
            assert sequence.pooled is not None
            rows = sequence.pooled.next_rows(own)
            if rows:
                sequence.pooled.add(states[rows])
            if sequence.pooled.is_complete:
                embedding = sequence.pooled.embedding()
                failed = [SampledToken(-1, error=NAN_STATES)] if embedding is None else []
                reason: GenerationEnd = "error" if embedding is None else "length"
                made.append(NewTokens(sequence, failed, reason, embedding))
        return made

    def drain(self) -> None:
        """Wait until all steps in flight are back, and drop what they made."""
        while self._in_flight:
            del self._in_flight[self._executor.collect().number]

    def _observe(self, mtp: MtpDrafter, step: EngineStep, states: Tensor) -> None:
        """Show the hidden states ``[N, H]`` of a step to the layer for multi-token prediction."""
        parts = torch.split(states, [chunk.count for chunk in step.chunks])
        for chunk, own in zip(step.chunks, parts, strict=True):
            sequence = self._sequences.get(chunk.request)
            if sequence is not None and sequence.pooled is None:
                mtp.observe(chunk.request, chunk.first, own, sequence.tokens, chunk.blocks)

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
        works = step.drafts
        found = [self._sequence(work.request) for work in works]
        sequences = [sequence for sequence in found if sequence is not None]
        if self._mtp is not None:
            blocks = {chunk.request: chunk.blocks for chunk in step.chunks}
            works = tuple(work._replace(blocks=blocks[work.request]) for work in works)
        drafts = self._draft_model.propose(works, [one.tokens for one in sequences])
        # The step has rows for drafts although the draft model may have ended: any tokens do.
        proposed = drafts or [[0] * work.length for work in step.drafts]
        for sequence, draft in zip(sequences, proposed, strict=True):
            sequence.draft = draft
        self._scheduler.complete_drafts(step, self.now_s(), has_ended=drafts is None)

    def _rows(
        self, chunk: ScheduledChunk, sequence: RunningSequence
    ) -> list[tuple[Row, int | None]]:
        """Return the rows of a chunk, each with the position whose scores are wanted."""
        last = chunk.first + chunk.count - 1
        if chunk.num_draft_tokens:
            known = last + 1 - chunk.num_draft_tokens
            rows = [self._row(chunk, sequence, chunk.first, known)]
            rows += [
                self._row(chunk, sequence, place, place + 1) for place in range(known, last + 1)
            ]
            if chunk.draft_slot >= 0:
                rows[1:] = [replace(row, slot=chunk.draft_slot, to_slot=-1) for row in rows[1:]]
                rows[1] = replace(rows[1], parent_slot=chunk.slot)
            return [(row, row.length - 1) for row in rows]
        needed = sequence.num_prompt_tokens - 1
        if not sequence.reads_prompt or chunk.first >= needed:
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
            slot=chunk.slot,
            from_slot=chunk.from_slot if first == chunk.first else -1,
            to_slot=chunk.to_slot,
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


class TokenMatcher(Protocol):
    """The tokens that may come next in an answer of a given form."""

    @property
    def is_complete(self) -> bool:
        """Whether the form allows no further token but an end token."""
        ...

    def allowed(self, count: int) -> NDArray[np.bool_]:
        """Return which of ``count`` tokens may come next."""
        ...

    def accept(self, token: int) -> None:
        """Take the next token of the answer."""
        ...


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The next token of a sequence.

    Attributes:
        token_id: the token; -1 where there is an error.
        logprobs: its log probabilities, where they are asked for.
        error: why no token could be chosen.
    """

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None


class SamplingState:
    """What the choice of a sequence's next token depends on, in addition to the scores.

    Args:
        params: how tokens are chosen.
        request: identifies the request in the random numbers.
        prompt_token_ids: of the request.
        stop_token_ids: tokens that end the answer, those of the model included.
        matcher: the form of the answer, ``None`` for a free one.
        token_ids: tokens of the answer so far.
    """

    def __init__(
        self,
        params: SamplingParams = GREEDY,
        *,
        request: str = "",
        prompt_token_ids: Sequence[int] = (),
        stop_token_ids: Collection[int] = (),
        matcher: TokenMatcher | None = None,
        token_ids: Iterable[int] = (),
    ) -> None:
        self.params = params
        self.is_plain = params.is_greedy and params.logprobs is None and not params.changes_scores
        self.token_ids: list[int] = []
        self._request = request
        self._stop_token_ids = list(stop_token_ids)
        self._matcher = matcher
        self._allowed: NDArray[np.bool_] | None = None
        self._prompt = set(prompt_token_ids) if params.repetition_penalty != 1 else set()
        self._counts: Counter[int] = Counter()
        self._counts_tokens = params.presence_penalty != 0 or params.frequency_penalty != 0
        for token in token_ids:
            self.accept(token)

    @property
    def is_complete(self) -> bool:
        """Whether the form of the answer allows no further token."""
        return self._matcher is not None and self._matcher.is_complete

    @property
    def ends_with_stop_token(self) -> bool:
        """Whether the last token is a stop token."""
        return self.token_ids[-1] in self._stop_token_ids

    def finish_reason(self, max_tokens: int) -> FinishReason | None:
        """Return why the answer is complete, ``None`` while it is not."""
        if self.ends_with_stop_token or self.is_complete:
            return "stop"
        return "length" if len(self.token_ids) == max_tokens else None

    def accept(self, token: int) -> None:
        """Take the next token of the answer."""
        self.token_ids.append(token)
        if self._prompt:
            self._prompt.add(token)
        if self._counts_tokens:
            self._counts[token] += 1
        if self._matcher is not None:
            self._matcher.accept(token)

    def mask(self, count: int) -> NDArray[np.bool_] | None:
        """Return which of ``count`` tokens are allowed; ``None`` for all."""
        found: NDArray[np.bool_] | None = None
        if self._matcher is not None:
            found = self._matcher.allowed(count)
        if self.params.allowed_token_ids is not None:
            if self._allowed is None:
                self._allowed = np.zeros(count, dtype=np.bool_)
                self._allowed[list(self.params.allowed_token_ids)] = True
            found = self._allowed if found is None else found & self._allowed
        return found

    def forbidden(self) -> list[int]:
        """Return the tokens that bad words and the minimum length exclude."""
        found = self._bad_tokens()
        if len(self.token_ids) < self.params.min_tokens:
            found += self._stop_token_ids
        return found

    def repeated(self) -> list[int]:
        """Return the tokens whose scores the repetition penalty changes."""
        return sorted(self._prompt)

    def subtracted(self) -> dict[int, np.float32]:
        """Return what presence and frequency penalties subtract from scores, by token."""
        each, once = (
            np.float32(value)
            for value in (self.params.frequency_penalty, self.params.presence_penalty)
        )
        return {token: each * np.float32(count) + once for token, count in self._counts.items()}

    def uniform(self, ahead: int = 0) -> float:
        """Return the random number in [0, 1) of the next token, or of one further ahead."""
        place = len(self.token_ids) + ahead
        text = f"{self.params.seed or 0}/{place}/{self._request}".encode()
        number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        return (number >> (64 - _UNIFORM_BITS)) / (1 << _UNIFORM_BITS)

    def _bad_tokens(self) -> list[int]:
        """Return the tokens that would complete a forbidden sequence."""
        found = []
        for *start, last in self.params.bad_words_ids:
            if not start or self.token_ids[-len(start) :] == start:
                found.append(last)
        return found


def sampling_state_of(request: Request, grammars: GrammarCompiler | None) -> SamplingState:
    """Return the state of a request without an answer yet.

    Raises:
        SpecError: the form of its answer is not valid.
    """
    form = request.sampling_params.structured_outputs
    assert form is None or grammars is not None
    return SamplingState(
        request.sampling_params,
        request=str(request.id),
        prompt_token_ids=request.prompt_token_ids,
        stop_token_ids=request.stop_token_ids,
        matcher=None if form is None or grammars is None else grammars.compile(form),
    )


class Choice(NamedTuple):
    """A row whose token is chosen, and its state; ``ahead`` draft tokens are taken before it."""

    row: int
    state: SamplingState
    ahead: int = 0


class ScoredRows:
    """The scores of several positions, and the tokens that are chosen by them.

    All are chosen at once, and read by the host once. A choice that depends on tokens of the same
    step is made when it is asked for.

    Args:
        logits: ``[R, V]`` float32, finite (or minus infinity for a forbidden token).
        choices: at most one of a row.
    """

    def __init__(self, logits: Tensor, choices: Sequence[Choice]) -> None:
        self._logits = logits
        rows = [choice.row for choice in choices]
        self._known = dict(zip(rows, _choose(logits, choices), strict=True))

    def sample(self, row: int, state: SamplingState) -> SampledToken:
        """Return the token of a row; the state does not change."""
        if row not in self._known:
            self._known[row] = _choose(self._logits, [Choice(row, state)])[0]
        return self._known[row]


def _choose(logits: Tensor, choices: Sequence[Choice]) -> list[SampledToken]:
    """Choose tokens by the scores ``[R, V]``; the host reads the device once."""
    best = logits.argmax(dim=-1)  # [R]; a NaN, if there is one
    is_nan = logits.gather(-1, best[:, None]).isnan()[:, 0]
    others = [place for place, choice in enumerate(choices) if not choice.state.is_plain]
    on_cpu = logits.device.type == "cpu"
    most = max(1, (VALUES_AT_ONCE_ON_CPU if on_cpu else VALUES_AT_ONCE) // logits.shape[1])
    parts = [best, is_nan.long()]
    for first in range(0, len(others), most):
        own_choices = [choices[place] for place in others[first : first + most]]
        parts += _choose_some(logits, best, own_choices)
    numbers = iter(torch.cat(parts).tolist())
    best_ids = [next(numbers) for _ in range(len(logits))]
    has_nan = [bool(next(numbers)) for _ in range(len(logits))]
    made = [SampledToken(best_ids[choice.row]) for choice in choices]
    for first in range(0, len(others), most):
        own = others[first : first + most]
        tokens = [next(numbers) for _ in own]
        for place, token in zip(own, tokens, strict=True):
            made[place] = SampledToken(token, error=NO_TOKEN if token < 0 else None)
        for places, count in _by_logprobs([choices[place] for place in own], logits.shape[1]):
            bits = np.array([next(numbers) for _ in range(len(places) * (1 + 2 * count))])
            for place, found in zip(places, bits.reshape(len(places), -1), strict=True):
                made[own[place]] = _with_logprobs(made[own[place]], found, count)
    return [
        SampledToken(-1, error=NAN_SCORES) if has_nan[choice.row] else token
        for choice, token in zip(choices, made, strict=True)
    ]


def _choose_some(logits: Tensor, best: Tensor, choices: Sequence[Choice]) -> list[Tensor]:
    """Return what the host reads of some choices: integers, one part after the other.

    These are the tokens, -1 where none is allowed; and for those that report as many log
    probabilities, the chosen one, the best ones and their tokens: the bits of float32 numbers.

    Args:
        logits: ``[R, V]``.
        best: ``[R]``, the tokens with the highest ones.
        choices: of some of the rows.
    """
    device = logits.device
    rows = [choice.row for choice in choices]
    scores, tokens = rows_of(logits, rows), rows_of(best, rows)  # [C, V], [C]
    changed = [place for place, one in enumerate(choices) if one.state.params.changes_scores]
    if changed:
        scores = scores.clone()
        change_scores(scores, {place: choices[place].state for place in changed})
        tokens = scores.argmax(dim=-1)
    has_none = scores.gather(-1, tokens[:, None])[:, 0] == -math.inf
    drawn = [place for place, one in enumerate(choices) if not one.state.params.is_greedy]
    if drawn:
        params = [choices[place].state.params for place in drawn]
        uniforms = [choices[place].state.uniform(choices[place].ahead) for place in drawn]
        found = _draw(_truncated(rows_of(scores, drawn), params), uniforms)
        are_all = len(drawn) == len(choices)
        places = None if are_all else on_device(np.array(drawn), device)
        tokens = found if places is None else tokens.index_copy(0, places, found)
    tokens = tokens.masked_fill(has_none, -1)
    parts = [tokens]
    for own, count in _by_logprobs(choices, logits.shape[1]):
        at = on_device(np.array(own), device)
        values = torch.log_softmax(rows_of(logits, [rows[place] for place in own]), dim=-1)
        found = values.gather(-1, tokens[at].clamp(min=0)[:, None])
        top = values.topk(count, dim=-1)
        bits = torch.cat((found, top.values), dim=1).view(torch.int32).long()
        parts.append(torch.cat((bits, top.indices), dim=1).flatten())
    return parts


def _by_logprobs(choices: Sequence[Choice], width: int) -> list[tuple[list[int], int]]:
    """Return the places of choices that report log probabilities, by how many of the best."""
    found: dict[int, list[int]] = {}
    for place, choice in enumerate(choices):
        count = choice.state.params.logprobs
        if count is not None:
            found.setdefault(width if count == -1 else min(count, width), []).append(place)
    return [(places, count) for count, places in found.items()]


def _with_logprobs(token: SampledToken, bits: NDArray[np.int64], count: int) -> SampledToken:
    if token.error is not None:
        return token
    logprob, *values = bits[: 1 + count].astype(np.int32).view(np.float32).tolist()
    top = tuple(zip(bits[1 + count :].tolist(), values, strict=True))
    return replace(token, logprobs=TokenLogprobs(token.token_id, logprob, top))


def change_scores(scores: Tensor, states: Mapping[int, SamplingState]) -> None:
    """Apply masks, bias and penalties to scores ``[C, V]`` in place, in vLLM's order.

    Args:
        scores: float32.
        states: of some of the rows.
    """
    width, device, flat = scores.shape[1], scores.device, scores.view(-1)
    masks = [(row, mask) for row, one in states.items() if (mask := one.mask(width)) is not None]
    if masks:
        at = on_device(np.array([row for row, _ in masks]), device)
        allowed = on_device(np.stack([mask for _, mask in masks]), device)
        masked = scores.index_select(0, at).masked_fill(~allowed, -math.inf)
        scores.index_copy_(0, at, masked)
    forbidden = [row * width + token for row, one in states.items() for token in one.forbidden()]
    if forbidden:
        flat.index_fill_(0, on_device(np.array(forbidden), device), -math.inf)
    bias = [
        (row * width + token, value)
        for row, one in states.items()
        for token, value in one.params.logit_bias
    ]
    if bias:
        at, values = _entries(bias, device)
        flat.index_copy_(0, at, flat.index_select(0, at) + values)
    repeated = [
        (row * width + token, one.params.repetition_penalty)
        for row, one in states.items()
        for token in one.repeated()
    ]
    if repeated:
        at, penalty = _entries(repeated, device)
        found = flat.index_select(0, at)
        flat.index_copy_(0, at, torch.where(found > 0, found / penalty, found * penalty))
    subtracted = [
        (row * width + token, value)
        for row, one in states.items()
        for token, value in one.subtracted().items()
    ]
    if subtracted:
        at, values = _entries(subtracted, device)
        flat.index_copy_(0, at, flat.index_select(0, at) - values)


def _entries(
    entries: Sequence[tuple[int, float | np.float32]], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return indices and float32 values on the device."""
    at, values = zip(*entries, strict=True)
    return on_device(np.array(at), device), on_device(np.array(values, np.float32), device)


def _truncated(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Divide by temperatures and mask what min-p, top-k and top-p leave out: ``[C, V]``.

    The best token of a row always stays.
    """
    width, device = scores.shape[1], scores.device
    numbers = on_device(
        np.array(
            [
                (one.temperature, math.log(one.min_p) if one.min_p > 0 else -math.inf, one.top_p)
                for one in params
            ],
            np.float32,
        ),
        device,
    )
    scores = scores / numbers[:, :1]
    if any(one.min_p > 0 for one in params):
        least = scores.amax(dim=-1, keepdim=True) + numbers[:, 1:2]
        scores = scores.masked_fill(scores < least, -math.inf)
    counts = [one.top_k if 0 < one.top_k < width else width for one in params]
    limited = [row for row, count in enumerate(counts) if count < width]
    if limited:
        last = np.array([(row, counts[row] - 1) for row in limited])
        rows, places = on_device(np.ascontiguousarray(last.T), device)
        own = scores.index_select(0, rows)
        ordered = own.topk(int(last[:, 1].max()) + 1, dim=-1).values
        own = own.masked_fill(own < ordered.gather(-1, places[:, None]), -math.inf)
        scores = scores.index_copy(0, rows, own)
    few = [row for row, one in enumerate(params) if one.top_p < 1]
    if few and device.type == "cpu":
        for row in few:
            scores[row] = _nucleus(scores[row], params[row].top_p)
    elif few:
        rows = on_device(np.array(few), device)
        own = _nuclei(scores.index_select(0, rows), numbers.index_select(0, rows)[:, 2:])
        scores = scores.index_copy(0, rows, own)
    return scores


def _nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Mask what top-p leaves out of ``[V]`` on a CPU, where sorting all tokens takes longest."""
    kept = (scores > -math.inf).nonzero()[:, 0]
    ordered, order = scores[kept].sort(descending=True, stable=True)
    shares = torch.softmax(ordered, dim=-1)
    before = shares.cumsum(dim=-1) - shares
    return scores.index_fill(0, kept[order[before >= top_p]], -math.inf)


def _nuclei(scores: Tensor, top_p: Tensor) -> Tensor:
    """Mask what top-p ``[C, 1]`` leaves out of ``[C, V]``, without the host."""
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    shares = torch.softmax(ordered, dim=-1)
    before = shares.cumsum(dim=-1) - shares
    left_out = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, before >= top_p)
    return scores.masked_fill(left_out, -math.inf)


def _draw(scores: Tensor, uniforms: Sequence[float]) -> Tensor:
    """Return tokens ``[C]`` at places in [0, 1) of the cumulative distributions of ``[C, V]``."""
    device = scores.device
    if exact_dtype(device) is not torch.float64:
        scores = scores.cpu()  # float32 sums would change which token a number draws
    places = on_device(np.array(uniforms)[:, None], scores.device)
    total = torch.softmax(scores, dim=-1, dtype=torch.float64).cumsum(dim=-1)  # [C, V]
    # Minus infinity in all of a row: no token is allowed, and none of its sums is a number.
    found = torch.searchsorted(total, places * total[:, -1:], right=True)[:, 0]
    return found.clamp(max=scores.shape[1] - 1).to(device)


def prompt_logprobs(
    logits: Tensor, rows: Sequence[int], next_token_ids: Sequence[int], count: int
) -> list[TokenLogprobs]:
    """Return the log probabilities of prompt tokens.

    Args:
        logits: ``[R, V]``.
        rows: those of consecutive prompt positions [N].
        next_token_ids: the prompt token that follows each position [N].
        count: how many of the best tokens to report; -1 is all.
    """
    found: list[TokenLogprobs] = []
    for start in range(0, len(rows), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        found += _logprobs(logits[list(rows[part])], next_token_ids[part], count)
    return found


def _logprobs(logits: Tensor, token_ids: Sequence[int], count: int) -> list[TokenLogprobs]:
    values = torch.log_softmax(logits.float(), dim=-1)  # [N, V]
    chosen = values.gather(-1, torch.tensor(token_ids, device=values.device)[:, None])[:, 0]
    width = values.shape[-1]
    best = values.topk(width if count == -1 else min(count, width), dim=-1)
    return [
        TokenLogprobs(token, logprob, tuple(zip(tops, logprobs, strict=True)))
        for token, logprob, tops, logprobs in zip(
            token_ids, chosen.tolist(), best.indices.tolist(), best.values.tolist(), strict=True
        )
    ]
