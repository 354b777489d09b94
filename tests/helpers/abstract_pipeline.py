"""An in-order pipeline without tensors, which drives a policy through its scheduler of requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from helpers.slots import complete, request_of, slots_of

from llmpq.batching import BatchingPolicy, Decision, PolicyScheduler, SchedulerView
from llmpq.batching.engine_step import EngineStep


class Recorder:
    """A policy that remembers its decisions."""

    def __init__(self, policy: BatchingPolicy) -> None:
        self.policy = policy
        self.decisions: list[Decision] = []

    @property
    def holds_finished(self) -> bool:
        return self.policy.holds_finished

    def decide(self, view: SchedulerView) -> Decision:
        self.decisions.append(self.policy.decide(view))
        return self.decisions[-1]


@dataclass
class Pipeline:
    """What enters first comes back first; each tick of the clock completes one.

    Attributes:
        wanted: tokens each request asks for.
        num_slots: KV slots.
        limit: most micro-batches in flight.
        arrivals: step at which each request comes, rising; all at once without.
        prompts: tokens of each prompt; all ``prompt_tokens`` without.
    """

    wanted: Sequence[int]
    num_slots: int
    limit: int
    arrivals: Sequence[int] | None = None
    prompt_tokens: int = 3
    prompts: Sequence[int] | None = None
    made: dict[int, int] = field(default_factory=dict)
    computed: int = 0
    finished: list[int] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    sizes: list[tuple[str, int]] = field(default_factory=list)
    most_alive: int = 0

    def run(self, policy: BatchingPolicy) -> None:
        """Serve every request; fail when that takes unreasonably many steps."""
        recorder = Recorder(policy)
        self.decisions = recorder.decisions
        longest = max(self.prompts or [self.prompt_tokens]) + max(self.wanted, default=1)
        scheduler = slots_of(recorder, self.num_slots, tokens=longest)
        in_flight: deque[EngineStep] = deque()
        arrived, now = 0, 0
        times = self.arrivals or [0] * len(self.wanted)
        while not scheduler.is_done:
            while arrived < len(times) and times[arrived] <= now:
                scheduler.add(
                    request_of(
                        arrived,
                        self._prompt(arrived),
                        self.wanted[arrived],
                        arrival_s=times[arrived],
                    )
                )
                arrived += 1
                if arrived == len(times):
                    scheduler.close()
            if len(in_flight) < self.limit:
                step = scheduler.schedule(now)
                if step is not None:
                    self.sizes.append((str(step.phase), len(step.chunks)))
                    in_flight.append(step)
                    self._check(in_flight)
                    continue
            now += 1
            assert now < 100_000, "the policy never ends"
            if in_flight:
                self._complete(scheduler, in_flight.popleft())

    def _prompt(self, number: int) -> int:
        return self.prompt_tokens if self.prompts is None else self.prompts[number]

    def _check(self, in_flight: Sequence[EngineStep]) -> None:
        slots = [chunk.blocks for step in in_flight for chunk in step.chunks]
        assert len(slots) == len(set(slots)), "a slot with two owners"
        assert all(0 <= slot < self.num_slots for (slot,) in slots)
        self.most_alive = max(self.most_alive, len(slots))

    def _complete(self, scheduler: PolicyScheduler, step: EngineStep) -> None:
        finished = []
        for chunk in step.chunks:
            self.computed += 1
            if chunk.makes_token:
                made = self.made.get(chunk.request, 0)
                assert chunk.first + chunk.count == self._prompt(chunk.request) + made
                self.made[chunk.request] = made + 1
                if made + 1 == self.wanted[chunk.request]:
                    finished.append(chunk.request)
        complete(scheduler, step, finished)
        self.finished += finished
