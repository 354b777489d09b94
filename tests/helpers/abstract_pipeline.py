"""An in-order pipeline without tensors, which drives a policy through its scheduler of requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from llmpq.batching import BatchingPolicy, Decision, InFlightBatch, Scheduler, Wait, WaitingRequest


@dataclass
class Pipeline:
    """What enters first comes back first; each tick of the clock completes one.

    Attributes:
        wanted: tokens each request asks for.
        num_slots: KV slots.
        limit: most micro-batches in flight.
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
        scheduler = Scheduler(policy=policy, num_slots=self.num_slots)
        in_flight: deque[InFlightBatch] = deque()
        arrived, now = 0, 0
        times = self.arrivals or [0] * len(self.wanted)
        while not scheduler.is_done:
            while arrived < len(times) and times[arrived] <= now:
                scheduler.arrive(
                    WaitingRequest(
                        request=arrived, prompt_tokens=self.prompt_tokens, arrival_s=times[arrived]
                    )
                )
                arrived += 1
                if arrived == len(times):
                    scheduler.close()
            if len(in_flight) < self.limit:
                decision, batch = scheduler.decide(now)
                self.decisions.append(decision)
                if batch is not None:
                    self.sizes.append((str(batch.phase), len(batch.slots)))
                    in_flight.append(batch)
                    self._check(in_flight)
                    continue
                assert isinstance(decision, Wait)
            now += 1
            assert now < 100_000, "the policy never ends"
            if in_flight:
                self._complete(scheduler, in_flight.popleft())

    def _check(self, in_flight: Sequence[InFlightBatch]) -> None:
        slots = [slot for batch in in_flight for slot in batch.slots]
        assert len(slots) == len(set(slots)), "a slot with two owners"
        assert all(0 <= slot < self.num_slots for slot in slots)
        self.most_alive = max(self.most_alive, len(slots))

    def _complete(self, scheduler: Scheduler, batch: InFlightBatch) -> None:
        complete = []
        for item in batch.sequences:
            self.computed += 1
            if not item.is_finished:
                assert item.new_tokens == self.made.get(item.request, 0)
                self.made[item.request] = item.new_tokens + 1
            complete.append(self.made[item.request] == self.wanted[item.request])
        self.finished += scheduler.complete(batch.number, complete)
