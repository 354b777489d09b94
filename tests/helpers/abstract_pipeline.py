"""An in-order pipeline without tensors, which drives a policy through its book of requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from llmpq.batching import BatchingPolicy, Decision, Scheduler, Step, Wait, WaitingRequest


@dataclass
class Pipeline:
    """What enters first comes back first; a step of the clock is a landing.

    Attributes:
        wanted: tokens each request asks for.
        num_slots: KV slots.
        limit: micro-batches on their way at most.
        arrivals: step at which each request comes, rising; all at once without.
    """

    wanted: Sequence[int]
    num_slots: int
    limit: int
    arrivals: Sequence[int] | None = None
    prompt_tokens: int = 3
    made: dict[int, int] = field(default_factory=dict)
    computed: int = 0
    finished: list[int] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    sizes: list[tuple[str, int]] = field(default_factory=list)
    most_alive: int = 0

    def run(self, policy: BatchingPolicy) -> None:
        """Serve every request; fail when that takes unreasonably many steps."""
        book = Scheduler(policy=policy, num_slots=self.num_slots)
        flights: deque[Step] = deque()
        arrived, now = 0, 0
        times = self.arrivals or [0] * len(self.wanted)
        while not book.is_done:
            while arrived < len(times) and times[arrived] <= now:
                book.arrive(
                    WaitingRequest(
                        request=arrived, prompt_tokens=self.prompt_tokens, arrival_s=times[arrived]
                    )
                )
                arrived += 1
                if arrived == len(times):
                    book.close()
            if len(flights) < self.limit:
                decision, step = book.decide(now)
                self.decisions.append(decision)
                if step is not None:
                    self.sizes.append((str(step.flight.phase), len(step.flight.slots)))
                    flights.append(step)
                    self._check(flights)
                    continue
                assert isinstance(decision, Wait)
            now += 1
            assert now < 100_000, "the policy never ends"
            if flights:
                self._land(book, flights.popleft())

    def _check(self, flights: Sequence[Step]) -> None:
        slots = [slot for step in flights for slot in step.flight.slots]
        assert len(slots) == len(set(slots)), "a slot with two owners"
        assert all(0 <= slot < self.num_slots for slot in slots)
        self.most_alive = max(self.most_alive, len(slots))

    def _land(self, book: Scheduler, step: Step) -> None:
        complete = []
        for item in step.sequences:
            self.computed += 1
            if not item.is_finished:
                assert item.new_tokens == self.made.get(item.request, 0)
                self.made[item.request] = item.new_tokens + 1
            complete.append(self.made[item.request] == self.wanted[item.request])
        self.finished += book.land(step.flight.number, complete)
