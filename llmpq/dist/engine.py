"""MasterEngine: requests in, policy decisions, tokens out. It owns all state of requests.

The master embeds, runs the first stage's layers, sends the hidden states round the ring, projects
what comes back and samples. It keeps a few micro-batches in flight so that every stage has work,
and takes in what has arrived before it sends more: nothing can pile up, so nothing can deadlock.
Stages know nothing of requests; slots and lengths in a frame are all they need.

Shapes: R rows, T tokens a row, H hidden size.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from llmpq.batching import (
    BatchingPolicy,
    Decode,
    Prefill,
    ReadySequence,
    SchedulerView,
    WaitingRequest,
    check_decision,
)
from llmpq.dist.communicator import Communicator
from llmpq.dist.kv_cache import SlotPool
from llmpq.dist.messages import Frame, FrameKind, Row
from llmpq.dist.prompts import Request
from llmpq.dist.results import FinishReason
from llmpq.dist.ring import error_of
from llmpq.dist.sampler import Sampler
from llmpq.dist.stage import PHASES, StageRunner
from llmpq.dist.stats import StageClock, synchronize
from llmpq.errors import StageError
from llmpq.models import Master

OnFinish = Callable[[Request, tuple[int, ...], FinishReason], None]
OnTokens = Callable[[int], None]


@dataclass(slots=True, kw_only=True)
class _Sequence:
    """A request that holds a slot."""

    number: int
    request: Request
    slot: int
    token_ids: list[int] = field(default_factory=list)

    @property
    def context_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.token_ids)

    def ready(self) -> ReadySequence:
        return ReadySequence(
            request=self.number,
            slot=self.slot,
            context_tokens=self.context_tokens,
            new_tokens=len(self.token_ids),
        )

    def finish_reason(self) -> FinishReason | None:
        if self.token_ids[-1] in self.request.stop_token_ids:
            return "stop"
        return "length" if len(self.token_ids) == self.request.max_new_tokens else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flight:
    """A micro-batch on its way, and what the master spent on sending it off."""

    number: int
    kind: FrameKind
    sequences: tuple[_Sequence, ...]
    rows: tuple[Row, ...]
    spent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """What a run made.

    Attributes:
        requests: finished ones.
        generated_tokens: new tokens of all of them.
        elapsed_s: from the first micro-batch sent off to the last token.
    """

    requests: int
    generated_tokens: int
    elapsed_s: float


class MasterEngine:
    """Runs requests to their end over a pipeline.

    Args:
        master: the two ends of the model.
        runner: the first stage's own layers.
        communicator: the ring; ``None`` when there is only one stage.
        policy: decides what is sent off next.
        sampler: chooses tokens.
        clock: collects the master's busy times.
        num_slots: KV slots of every stage.
    """

    def __init__(  # noqa: PLR0913  the parts a pipeline's head is made of
        self,
        *,
        master: Master,
        runner: StageRunner,
        communicator: Communicator | None,
        policy: BatchingPolicy,
        sampler: Sampler,
        clock: StageClock,
        num_slots: int,
    ) -> None:
        self._master = master
        self._runner = runner
        self._communicator = communicator
        self._policy = policy
        self._sampler = sampler
        self._clock = clock
        self._slots = SlotPool(num_slots)
        num_stages = 1 if communicator is None else len(communicator.names)
        # One micro-batch in every stage and one on its way: more would only wait in queues.
        self._max_in_flight = 1 if communicator is None else num_stages + 1
        self._waiting: deque[WaitingRequest] = deque()
        self._requests: Sequence[Request] = ()
        self._ready: dict[int, _Sequence] = {}  # by slot, in the order they became ready
        self._flights: deque[_Flight] = deque()
        self._landed: deque[Tensor] = deque()  # answers of a pipeline that is this process alone
        self._launched = 0
        self._tokens = 0

    def run(
        self, requests: Sequence[Request], on_finish: OnFinish, on_tokens: OnTokens | None = None
    ) -> EngineStats:
        """Answer every request.

        Args:
            requests: in order of arrival.
            on_finish: called once for each, when its last token is known.
            on_tokens: called with the number of new tokens of every step.

        Raises:
            StageError: a stage failed, hangs, or answers something else than it was asked.
        """
        self._requests = requests
        self._waiting.extend(
            WaitingRequest(request=number, prompt_tokens=len(request.prompt_token_ids))
            for number, request in enumerate(requests)
        )
        start = time.perf_counter()
        while self._waiting or self._ready or self._flights:
            if self._must_land() or not self._launch_next():
                before = self._tokens
                self._land(on_finish)
                if on_tokens is not None:
                    on_tokens(self._tokens - before)
        return EngineStats(
            requests=len(requests),
            generated_tokens=self._tokens,
            elapsed_s=time.perf_counter() - start,
        )

    def _must_land(self) -> bool:
        """Whether to take in an answer before asking the policy."""
        if len(self._flights) >= self._max_in_flight:
            return True
        has_frame = self._communicator is not None and self._communicator.has_frame()
        return bool(self._flights) and has_frame

    def _launch_next(self) -> bool:
        """Send off what the policy decides; tell whether that was anything."""
        view = self._view()
        decision = self._policy.decide(view)
        check_decision(view, decision)
        if isinstance(decision, Prefill):
            self._launch_prefill(decision.requests)
        elif isinstance(decision, Decode):
            self._launch_decode(decision.slots)
        else:
            return False
        return True

    def _view(self) -> SchedulerView:
        return SchedulerView(
            waiting=self._waiting,
            ready=[sequence.ready() for sequence in self._ready.values()],
            free_slots=self._slots.num_slots - self._slots.in_use,
            prefills_in_flight=self._sizes_in_flight(FrameKind.PREFILL),
            decodes_in_flight=self._sizes_in_flight(FrameKind.DECODE),
        )

    def _sizes_in_flight(self, kind: FrameKind) -> tuple[int, ...]:
        return tuple(len(flight.rows) for flight in self._flights if flight.kind is kind)

    def _launch_prefill(self, numbers: Sequence[int]) -> None:
        self._take_from_queue(set(numbers))
        sequences = [
            _Sequence(number=number, request=self._requests[number], slot=self._slots.acquire())
            for number in numbers
        ]
        prompts = [sequence.request.prompt_token_ids for sequence in sequences]
        width = max(len(prompt) for prompt in prompts)
        # Padding holds token 0, a valid one; no row ever attends to it.
        padded = [[*prompt, *[0] * (width - len(prompt))] for prompt in prompts]
        rows = [
            Row(slot=sequence.slot, first=0, length=len(prompt))
            for sequence, prompt in zip(sequences, prompts, strict=True)
        ]
        self._launch(FrameKind.PREFILL, sequences, rows, torch.tensor(padded))

    def _take_from_queue(self, chosen: set[int]) -> None:
        """Remove requests from the queue without walking past the last of them."""
        passed_over = []
        while chosen:
            item = self._waiting.popleft()
            if item.request in chosen:
                chosen.remove(item.request)
            else:
                passed_over.append(item)
        self._waiting.extendleft(reversed(passed_over))

    def _launch_decode(self, slots: Sequence[int]) -> None:
        sequences = [self._ready.pop(slot) for slot in slots]
        # The newest token is not in the cache yet: its position is one less than the context.
        rows = [
            Row(
                slot=sequence.slot,
                first=sequence.context_tokens - 1,
                length=sequence.context_tokens,
            )
            for sequence in sequences
        ]
        newest = torch.tensor([[sequence.token_ids[-1]] for sequence in sequences])
        self._launch(FrameKind.DECODE, sequences, rows, newest)

    def _launch(
        self, kind: FrameKind, sequences: Sequence[_Sequence], rows: list[Row], token_ids: Tensor
    ) -> None:
        start = self._clock.now()
        first = torch.tensor([row.first for row in rows])
        positions = first[:, None] + torch.arange(token_ids.shape[1])  # [R, T]
        hidden = self._master.embed(token_ids.to(self._runner.device), positions)
        hidden = self._runner.run(hidden, rows)  # [R, T, H]
        synchronize(self._runner.device)
        flight = _Flight(
            number=self._launched,
            kind=kind,
            sequences=tuple(sequences),
            rows=tuple(rows),
            spent_s=self._clock.now() - start,
        )
        if self._communicator is None:
            self._landed.append(hidden)
        else:
            self._communicator.send(
                Frame(kind=kind, micro_batch=flight.number, rows=flight.rows, hidden=hidden)
            )
        self._flights.append(flight)
        self._launched += 1

    def _land(self, on_finish: OnFinish) -> None:
        """Take in the oldest micro-batch: one new token for each of its sequences."""
        flight = self._flights[0]
        hidden = self._landed.popleft() if self._communicator is None else self._receive(flight)
        self._flights.popleft()
        start = self._clock.now()
        logits = self._master.logits(hidden[:, 0].to(self._runner.device))  # [R, V]
        keys = [(str(item.request.id), len(item.token_ids)) for item in flight.sequences]
        tokens = self._sampler.sample(logits, keys)
        spent_s = flight.spent_s + self._clock.now() - start
        self._clock.record(PHASES[flight.kind], len(flight.rows), spent_s)
        self._tokens += len(tokens)
        for sequence, token in zip(flight.sequences, tokens, strict=True):
            sequence.token_ids.append(token)
            reason = sequence.finish_reason()
            if reason is None:
                self._ready[sequence.slot] = sequence
            else:
                self._slots.release(sequence.slot)
                on_finish(sequence.request, tuple(sequence.token_ids), reason)

    def _receive(self, flight: _Flight) -> Tensor:
        assert self._communicator is not None
        frame = self._communicator.recv()
        if frame.kind is FrameKind.ERROR:
            raise error_of(frame)
        slots = tuple(row.slot for row in frame.rows)
        expected = (flight.kind, flight.number, tuple(row.slot for row in flight.rows))
        if (frame.kind, frame.micro_batch, slots) != expected or frame.hidden is None:
            raise StageError(
                f"{self._communicator.names[-1]}: found micro-batch {frame.micro_batch} "
                f"({frame.kind.name}), expected {flight.number} ({flight.kind.name})"
            )
        return frame.hidden
