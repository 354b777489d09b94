"""The runtime's engine and the simulator, on one trace and one clock, decide the same.

The engine runs as it is, with stages, ends and clock replaced: a ring of stages that only take
time, ``Master`` and ``StageRunner`` that advance the clock, and dummy tokens. Costs are
multiples of a power of two, so that sums of them are exact in any order.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmpq.batching import (
    BatchingPolicy,
    Decision,
    PipelineShape,
    PolicyScheduler,
    SchedulerView,
    Wait,
    make_policy,
)
from llmpq.batching.drift import DriftMonitor
from llmpq.batching.length import Prediction, make_predictor
from llmpq.batching.policies.multibin import quantile_boundaries
from llmpq.batching.policy_scheduler import slot_limits
from llmpq.dist.engine.batch_run import BatchRun
from llmpq.dist.engine.executor import PipelineExecutor
from llmpq.dist.io.prompts import Request
from llmpq.dist.metrics.stats import StageClock
from llmpq.dist.transport.frames import Frame, FrameKind
from llmpq.sim import BatchShape, Hop, PipelineLayout, linear_layout, simulate
from llmpq.spec.plan import POLICY_NAMES, MicroBatching, Schedule, default_schedule
from llmpq.spec.precision import Phase
from llmpq.spec.workload import TraceRequest

TICK_S = 1 / 64
HIDDEN, VOCABULARY = 1, 2


@dataclass
class Costs:
    """Seconds that grow with rows and tokens, in ticks."""

    prefill: tuple[int, ...]
    decode: tuple[int, ...]
    embed: int
    project: int
    link: int
    decoding: int | None = None  # so many ranks only decode, and the others only prefill
    handover: int = 0

    @property
    def layout(self) -> PipelineLayout:
        ranks = len(self.prefill)
        if self.decoding is None:
            return linear_layout(ranks)
        return replace(
            linear_layout(ranks),
            prefill_path=(0, *range(self.decoding, ranks)),
            decode_path=tuple(range(self.decoding)),
        )

    def stage_s(self, stage: int, shape: BatchShape) -> float:
        return self.layers_s(stage, shape) + (TICK_S * self.embed * shape.rows if stage == 0 else 0)

    def layers_s(self, stage: int, shape: BatchShape) -> float:
        if self.decoding is not None and (stage < self.decoding) is (shape.phase is Phase.PREFILL):
            return 0.0
        if shape.phase is Phase.PREFILL:
            return TICK_S * self.prefill[stage] * shape.rows * shape.longest
        return TICK_S * (self.decode[stage] * 4 + shape.rows + shape.longest // 8)

    def project_s(self, shape: BatchShape) -> float:
        return TICK_S * self.project * shape.rows

    def hop(self, stage: int, shape: BatchShape) -> Hop:
        is_last = shape.phase is Phase.PREFILL and stage == self.layout.prefill_path[-1]
        ticks = self.link * (1 + stage) + (self.handover if is_last else 0)
        return Hop(0.0, TICK_S * ticks * shape.rows)


@dataclass
class Clock:
    now_s: float = 0.0
    # By kind, when they are there: answers on their way.
    back: dict[FrameKind, deque] = field(default_factory=dict)

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0, "the engine spins"
        self.now_s += seconds

    def first(self) -> tuple[float, FrameKind] | None:
        """When the next answer is there, and of which kind; of equals, decode."""
        heads = [(queue[0][0], kind is FrameKind.PREFILL, kind) for kind, queue in self.queues()]
        return min(heads)[0::2] if heads else None

    def queues(self):
        # Answers that share their stages come back in one order.
        return [(kind, queue) for kind, queue in self.back.items() if queue]


def shape_of(kind: FrameKind, rows) -> BatchShape:
    lengths = [row.length for row in rows]
    phase = Phase.PREFILL if kind is FrameKind.PREFILL else Phase.DECODE
    return BatchShape(phase=phase, rows=len(rows), longest=max(lengths), total=sum(lengths))


@dataclass
class TimedRing:
    """The stages after the master's, each one micro-batch at a time, in order of arrival."""

    costs: Costs
    clock: Clock
    rank: int = 0

    def __post_init__(self) -> None:
        self.names = [f"stage {rank}" for rank in range(len(self.costs.prefill))]
        self.ranks = range(len(self.names))
        self.free_s = [0.0] * len(self.names)
        self.delivered_s: dict[tuple[int, int], float] = {}
        queue: deque = deque()
        self.clock.back = dict.fromkeys((FrameKind.DECODE, FrameKind.PREFILL), queue)
        if self.costs.decoding is not None:
            self.clock.back[FrameKind.PREFILL] = deque()

    def _deliver(self, source: int, target: int, at_s: float) -> float:
        """Links keep the order of their messages."""
        at_s = max(at_s, self.delivered_s.get((source, target), 0.0))
        self.delivered_s[source, target] = at_s
        return at_s

    def send(self, frame: Frame) -> None:
        costs, shape = self.costs, shape_of(frame.kind, frame.rows)
        path = costs.layout.path(shape.phase)
        at_s = self.clock.now_s
        for place, stage in enumerate(path):
            if place > 0:
                at_s = max(at_s, self.free_s[stage]) + costs.stage_s(stage, shape)
                self.free_s[stage] = at_s
            following = path[(place + 1) % len(path)]
            delay_s = costs.hop(stage, shape).delay_s
            at_s = self._deliver(stage, following, at_s + delay_s)
        self.clock.back[frame.kind].append((at_s, frame))

    def has_frame(self) -> bool:
        first = self.clock.first()
        return first is not None and first[0] <= self.clock.now_s

    def await_frame(self, longest_s: float) -> bool:
        assert longest_s > 0, "the engine spins"
        end_s = self.clock.now_s + longest_s
        first = self.clock.first()
        self.clock.now_s = max(self.clock.now_s, end_s if first is None else min(end_s, first[0]))
        return self.has_frame()

    def recv(self) -> Frame:
        back, now_s = self.clock.back, self.clock.now_s
        is_decoded = back[FrameKind.DECODE] and back[FrameKind.DECODE][0][0] <= now_s
        kind = FrameKind.DECODE if is_decoded else self.clock.first()[1]
        at_s, frame = back[kind].popleft()
        self.clock.now_s = max(now_s, at_s)
        return frame

    def close(self) -> None:
        return


@dataclass
class TimedEnds:
    """Master and first stage's runner in one: nothing but the passing of time."""

    costs: Costs
    clock: Clock
    device: torch.device = torch.device("cpu")  # noqa: RUF009  a value
    dtype: torch.dtype = torch.float32
    landing: BatchShape | None = None

    def embed(self, token_ids, positions):  # noqa: ARG002
        return torch.zeros(*token_ids.shape, HIDDEN)

    def run(self, hidden, rows):
        kind = FrameKind.PREFILL if rows[0].first == 0 else FrameKind.DECODE
        shape = shape_of(kind, rows)
        self.clock.now_s += self.costs.stage_s(0, shape)
        return hidden[:, : len(rows)]

    def acquire(self, rows):
        return rows

    def release(self, rows):
        """Nothing is kept."""

    def logits(self, hidden):
        rows = hidden.shape[0]
        shape = BatchShape(phase=Phase.DECODE, rows=rows, longest=1, total=rows)
        self.clock.now_s += self.costs.project_s(shape)
        return torch.zeros(rows, VOCABULARY)


@dataclass
class Recorder:
    """A policy that remembers what it decided, and when; what it waited for does not count."""

    policy: BatchingPolicy
    decided: list[tuple[float, Decision]] = field(default_factory=list)

    @property
    def holds_finished(self) -> bool:
        return self.policy.holds_finished

    def decide(self, view: SchedulerView) -> Decision:
        decision = self.policy.decide(view)
        slots = [slot for batch in view.in_flight for slot in batch.slots]
        slots += [sequence.slot for sequence in view.ready]
        assert len(slots) == len(set(slots)), "a slot with two owners"
        if not isinstance(decision, Wait):
            self.decided.append((view.now_s, decision))
        return decision


@st.composite
def traces(draw) -> list[TraceRequest]:
    count = draw(st.integers(1, 14))
    gaps = draw(st.lists(st.integers(0, 200), min_size=count, max_size=count))
    gaps = [0] * count if draw(st.booleans()) else gaps
    prompts = draw(st.lists(st.integers(1, 6), min_size=count, max_size=count))
    answers = draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    now, trace = 0, []
    for gap, prompt, answer in zip(gaps, prompts, answers, strict=True):
        now += gap
        item = TraceRequest(arrival_s=now * TICK_S, prompt_tokens=prompt, new_tokens=answer)
        trace.append(item)
    return trace


@st.composite
def all_costs(draw) -> Costs:
    stages = draw(st.integers(1, 4))
    numbers = st.lists(st.integers(1, 9), min_size=stages, max_size=stages)
    small = st.integers(1, 5)
    return Costs(
        prefill=tuple(draw(numbers)),
        decode=tuple(draw(numbers)),
        embed=draw(small),
        project=draw(small),
        link=draw(st.integers(0, 3)),
    )


@st.composite
def schedules(draw, policy: str, slots: int, trace: list[TraceRequest]) -> Schedule:
    schedule = default_schedule(policy, slots)
    if policy in ("static", "multibin"):
        schedule = replace(
            schedule,
            decode_batch=draw(st.integers(1, slots)),
            max_wait_s=draw(st.none() | st.integers(1, 400).map(lambda ticks: ticks * TICK_S)),
            holds_finished=draw(st.booleans()),
        )
    if policy == "multibin":
        bins = quantile_boundaries([item.new_tokens for item in trace], draw(st.integers(1, 4)))
        schedule = replace(schedule, boundaries=bins)
    if policy == "waa":
        batch = draw(st.integers(1, slots))
        schedule = replace(
            schedule, decode_batch=batch, encode_batch=draw(st.integers(1, batch)), threshold=0.5
        )
    if policy == "rra":
        batch = draw(st.integers(1, slots))
        schedule = replace(
            schedule,
            decode_batch=batch,
            encode_batch=draw(st.integers(1, batch)),
            decode_iterations=draw(st.integers(1, 6)),
        )
    return schedule


@pytest.mark.parametrize("policy", POLICY_NAMES)
@given(data=st.data(), trace=traces(), costs=all_costs(), slots=st.integers(1, 7))
@settings(max_examples=60, deadline=None)
def test_runtime_and_simulator_make_the_same_decisions(policy, data, trace, costs, slots):
    schedule = data.draw(schedules(policy, slots, trace))
    if policy == "waa" and len(costs.prefill) > 1:
        costs = replace(
            costs,
            decoding=data.draw(st.integers(1, len(costs.prefill) - 1)),
            handover=data.draw(st.integers(0, 3)),
        )
    sizes = MicroBatching(
        prefill=data.draw(st.integers(1, slots)), decode=data.draw(st.integers(1, slots))
    )
    shape = PipelineShape(micro_batching=sizes, num_slots=slots, num_stages=len(costs.prefill))
    answers = [item.new_tokens for item in trace]
    replans, group = data.draw(st.booleans()), data.draw(st.integers(1, 4))

    prediction = Prediction(predictor="noisy", error=0.3)
    predictor = make_predictor(prediction, [item.prompt_tokens for item in trace], answers)

    def fresh() -> tuple[Recorder, DriftMonitor | None]:
        made = make_policy(schedule, shape)
        return Recorder(made), DriftMonitor.of(
            schedule, made, replans=replans, group_requests=group
        )

    played, seen = fresh()
    report = simulate(costs, played, trace, num_slots=slots, monitor=seen, predictor=predictor)
    obeyed, monitor = fresh()
    made = run_engine(costs, trace, sizes, slots, obeyed, monitor, predictor)
    assert obeyed.decided == played.decided
    assert made.records == report.requests
    assert (monitor is None) == (seen is None)
    if monitor is not None and seen is not None:
        assert monitor.drifts == seen.drifts
        assert made.adjusted == monitor.adjusted == seen.adjusted


@pytest.mark.parametrize("replans", [False, True])
def test_both_detect_the_same_drift_at_the_same_request(replans):
    schedule = Schedule(policy="rra", encode_batch=2, decode_batch=4, decode_iterations=2)
    costs = Costs(prefill=(1, 2), decode=(2, 1), embed=1, project=1, link=1)
    sizes = MicroBatching(prefill=2, decode=2)
    shape = PipelineShape(micro_batching=sizes, num_slots=6, num_stages=2)
    # For answers of 5 tokens, two phases; they become longer, and then shorter again.
    lengths = [5] * 8 + [17] * 16 + [3] * 40
    trace = [TraceRequest(arrival_s=0.0, prompt_tokens=2, new_tokens=one) for one in lengths]
    found = []
    for runs in (False, True):
        told: list[int] = []
        policy = make_policy(schedule, shape)
        recorder = Recorder(policy)

        def tell(_, told=told, recorder=recorder) -> None:
            told.append(len(recorder.decided))

        monitor = DriftMonitor.of(
            schedule, policy, replans=replans, group_requests=4, on_drift=tell
        )
        if runs:
            run_engine(costs, trace, sizes, 6, recorder, monitor)
        else:
            simulate(costs, recorder, trace, num_slots=6, monitor=monitor)
        found.append((told, monitor.adjusted, monitor.observed, recorder.decided))
    assert found[0] == found[1]
    told, adjusted, observed, _ = found[0]
    assert sorted(observed) == sorted(lengths)
    if replans:
        assert adjusted[0] > 2  # rarer while answers are long
        assert adjusted[-1] < max(adjusted)  # more often when they are short again
    else:
        assert (len(told), adjusted) == (1, ())


def run_engine(costs, trace, sizes, slots, policy, monitor, predictor=None):
    """Run the runtime's engine on a clock that only costs advance; every request is answered."""
    clock = Clock()
    ends = TimedEnds(costs, clock)
    depth = costs.layout.depth
    stage_clock = StageClock(micro_batching=sizes, now=clock.now, sleep=clock.sleep)
    limits = slot_limits(slots, max(item.prompt_tokens + item.new_tokens for item in trace))
    engine = BatchRun(
        executor=PipelineExecutor(
            master=ends,
            runner=ends,
            communicator=TimedRing(costs, clock) if len(costs.prefill) > 1 else None,
            clock=stage_clock,
            prefill_runner=None if costs.decoding is None else ends,
            local_phases=[phase for phase in Phase if depth.is_local(phase)],
        ),
        scheduler=PolicyScheduler(policy, limits, depth, monitor=monitor),
        limits=limits,
        clock=stage_clock,
        monitor=monitor,
        predictor=predictor,
    )
    requests = [
        Request(
            id=number,
            prompt_token_ids=(1,) * item.prompt_tokens,
            max_new_tokens=item.new_tokens,
            arrival_s=item.arrival_s,
        )
        for number, item in enumerate(trace)
    ]
    finished: list[int] = []
    made = engine.run(requests, lambda answer: finished.append(answer.request.id))
    assert sorted(finished) == list(range(len(trace))), "a request lost or answered twice"
    return made
