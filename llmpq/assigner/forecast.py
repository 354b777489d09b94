"""Forecast: requests in the simulator, with the runtime's scheduler and policy.

In addition to the closed formula the simulator covers ragged last micro-batches, regrouping between
the phases, overlap of prefill and decode, growing contexts and the limit of micro-batches in
flight. The requests are those of the plan's own workload, which are equal and wait at the start, or
those that a run served.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from llmpq.batching import BatchingPolicy, PipelineShape, make_policy
from llmpq.batching.length import ORACLE, Prediction, make_predictor
from llmpq.costmodel import ClusterCosts
from llmpq.sim import BatchShape, simulate
from llmpq.sim.plan_costs import PlanCosts
from llmpq.spec.cluster import Device
from llmpq.spec.plan import Plan, PlanForecast, StageForecast
from llmpq.spec.precision import Phase
from llmpq.spec.schedule import Schedule
from llmpq.spec.trace import TraceRequest

MAX_STEPS = 20_000
"""Micro-batches times stages to simulate; beyond, one decode round stands for several."""
MIN_ROUNDS = 8
MORE_ROWS = 8
"""Rows of the longer step that the cost of a row follows from: a few draft tokens more than one."""
MAX_RUN_STEPS = 50_000
"""Most micro-batches times stages of a run to simulate; of a longer run, every second, third, ...
request stands for all."""
MIN_ROUNDS_OF_SLOTS = 4
"""A part of a run stands for the whole if it fills all slots so many times."""


def forecast(
    plan: Plan, costs: ClusterCosts, devices: Sequence[Device] | None = None
) -> PlanForecast:
    """Simulate a plan's workload on ``devices`` of the cost models' cluster, the plan's by default.

    Raises:
        ProfileMissError: a table has nothing for a phase and bitwidth of the plan.
    """
    work, sizes, stages = plan.workload, plan.micro_batching, len(plan.stages)
    rounds = work.new_tokens - 1
    steps_a_round = stages * (1 + -(-work.batch // sizes.decode))
    simulated = min(rounds, max(MIN_ROUNDS, MAX_STEPS // steps_a_round))
    request = TraceRequest(
        arrival_s=0.0, prompt_tokens=work.prompt_tokens, new_tokens=simulated + 1
    )
    thinned = _ThinnedCosts(plan, costs, devices, rounds / simulated if simulated else 1.0)
    # With separate stages per phase the plan's own policy counts.
    schedule = plan.schedule if plan.is_split else None
    policy = policy_of(plan, schedule or Schedule(policy="hybrid"))
    report = simulate(thinned, policy, [request] * work.batch, num_slots=work.batch)
    prefill_s = max(record.first_token_s for record in report.requests)
    return PlanForecast(
        latency_s=prefill_s + (report.makespan_s - prefill_s) * thinned.stretch,
        prefill_s=prefill_s,
        stages=tuple(
            _stage(plan, thinned, rank, work_s) for rank, work_s in enumerate(report.work_s)
        ),
        row_cost=_row_cost(plan, thinned),
    )


def forecast_run(
    plan: Plan,
    costs: ClusterCosts,
    requests: Sequence[TraceRequest],
    *,
    schedule: Schedule,
    prediction: Prediction = ORACLE,
) -> PlanForecast | None:
    """Simulate the requests that a run served; ``None`` where that says nothing about them.

    The plan's own seconds of its micro-batches count, as if measured, and the cost models say how
    seconds change with the shape: the tables that the plan was made with need not be here.

    Args:
        plan: the plan.
        costs: cost models of the plan's cluster.
        requests: in order of arrival, with the lengths of their answers.
        schedule: of the run.
        prediction: predictor of answer lengths.

    Raises:
        ProfileMissError: a table has nothing for a phase and bitwidth of the plan.
    """
    every = -(-_steps_of(plan, requests) // MAX_RUN_STEPS)
    chosen = requests[:: max(1, every)]
    has_seconds = plan.estimate.latency_s > 0
    is_too_few = every > 1 and len(chosen) < MIN_ROUNDS_OF_SLOTS * plan.workload.batch
    if not chosen or not has_seconds or is_too_few:
        return None
    answers = [item.new_tokens for item in chosen]
    predictor = make_predictor(prediction, [item.prompt_tokens for item in chosen], answers)
    run_costs = _RunCosts(plan, costs)
    report = simulate(
        run_costs,
        make_policy(schedule, PipelineShape.of(plan), predictor),
        chosen,
        num_slots=plan.workload.batch,
    )
    share = sum(item.new_tokens for item in requests) / sum(answers)
    first_s = chosen[0].arrival_s
    return PlanForecast(
        latency_s=report.makespan_s * share,
        prefill_s=(max(one.first_token_s for one in report.requests) - first_s) * share,
        stages=tuple(
            StageForecast(
                prefill_s=run_costs.median_s(rank, Phase.PREFILL),
                decode_s=run_costs.median_s(rank, Phase.DECODE),
                prefill_busy_s=work_s[Phase.PREFILL] * share,
                decode_busy_s=work_s[Phase.DECODE] * share,
            )
            for rank, work_s in enumerate(report.work_s)
        ),
    )


def _steps_of(plan: Plan, requests: Sequence[TraceRequest]) -> int:
    """Return how many micro-batches of all stages a run has, at least."""
    sizes = plan.micro_batching
    rounds = sum(item.new_tokens - 1 for item in requests)
    micro_batches = -(-len(requests) // sizes.prefill) + -(-rounds // sizes.decode)
    return micro_batches * len(plan.stages)


class _RunCosts(PlanCosts):
    """A plan's costs at the level of its own figures; keeps the seconds of every micro-batch."""

    def __init__(self, plan: Plan, costs: ClusterCosts) -> None:
        super().__init__(plan, costs)
        sizes = plan.micro_batching
        self._full = {Phase.PREFILL: sizes.prefill, Phase.DECODE: sizes.decode}
        self._steps: defaultdict[tuple[int, Phase], list[tuple[int, float]]] = defaultdict(list)
        plain = PlanCosts(plan, costs)
        self._levels = {
            (rank, phase): _level(
                own.prefill_s if phase is Phase.PREFILL else own.decode_s, seconds
            )
            for rank, own in enumerate(plan.estimate.stages)
            for phase, seconds in _full_steps_s(plan, plain, rank).items()
        }

    def stage_s(self, rank: int, shape: BatchShape) -> float:
        seconds = super().stage_s(rank, shape) * self._levels[rank, shape.phase]
        whole_s = seconds + (self.project_s(shape) if rank == 0 else 0.0)
        self._steps[rank, shape.phase].append((shape.rows, whole_s))
        return seconds

    def project_s(self, shape: BatchShape) -> float:
        return super().project_s(shape) * self._levels[0, shape.phase]

    def median_s(self, rank: int, phase: Phase) -> float:
        """Return the median of a phase's full micro-batches on a rank, of any if none was full."""
        steps = self._steps[rank, phase]
        full = [seconds for rows, seconds in steps if rows == self._full[phase]]
        return statistics.median(full or [seconds for _, seconds in steps] or [0.0])


def _level(planned_s: float, seconds: float) -> float:
    """Return the plan's seconds of a micro-batch over those of the cost models."""
    return planned_s / seconds if planned_s > 0 and seconds > 0 else 1.0


def _row_cost(plan: Plan, costs: PlanCosts) -> float:
    """Return the seconds of one more row of a decode step, in steps of one row: 0 to 1.

    It is the mean over ``MORE_ROWS`` rows, for a step that passes all stages alone.
    """
    one_s, most_s = (_decode_step_s(plan, costs, rows) for rows in (1, MORE_ROWS))
    return min(max(0.0, (most_s / one_s - 1) / (MORE_ROWS - 1)), 1.0) if one_s > 0 else 0.0


def _decode_step_s(plan: Plan, costs: PlanCosts, rows: int) -> float:
    """Return the seconds of a decode step of so many rows at the mean context, with its hops."""
    context = plan.workload.mean_context_tokens
    shape = BatchShape(
        phase=Phase.DECODE, rows=rows, longest=round(context), total=round(rows * context)
    )
    total_s = costs.project_s(shape)
    for rank in costs.layout.path(Phase.DECODE):
        hop = costs.hop(rank, shape)
        total_s += 2 * hop.end_s + hop.delay_s
        if costs.has_layers(rank, Phase.DECODE):
            total_s += costs.layers_s(rank, Phase.DECODE, rows, context)
    return total_s


def policy_of(plan: Plan, schedule: Schedule) -> BatchingPolicy:
    """Return the policy of a schedule on the plan's pipeline."""
    shape = PipelineShape.of(plan)
    return make_policy(schedule, shape)


def micro_batches_of(plan: Plan) -> tuple[tuple[Phase, int, float], ...]:
    """Return rows and tokens of a full micro-batch of both phases, in decode the mean context."""
    work, sizes = plan.workload, plan.micro_batching
    return (
        (Phase.PREFILL, sizes.prefill, float(work.prompt_tokens)),
        (Phase.DECODE, sizes.decode, work.mean_context_tokens),
    )


def _stage(
    plan: Plan, costs: _ThinnedCosts, rank: int, work_s: dict[Phase, float]
) -> StageForecast:
    """Return a stage's seconds of one full micro-batch and of all of them."""
    seconds = _full_steps_s(plan, costs, rank)
    return StageForecast(
        prefill_s=seconds[Phase.PREFILL],
        decode_s=seconds[Phase.DECODE] if plan.workload.new_tokens > 1 else 0.0,
        prefill_busy_s=work_s[Phase.PREFILL],
        decode_busy_s=work_s[Phase.DECODE] * costs.stretch,
    )


def _full_steps_s(plan: Plan, costs: PlanCosts, rank: int) -> dict[Phase, float]:
    """Return a stage's seconds of a full micro-batch of both phases, the master's work included."""
    seconds = {}
    for phase, rows, tokens in micro_batches_of(plan):
        shape = BatchShape(
            phase=phase, rows=rows, longest=round(tokens), total=round(rows * tokens)
        )
        has_layers = costs.has_layers(rank, phase)
        seconds[phase] = costs.layers_s(rank, phase, rows, tokens) if has_layers else 0.0
        seconds[phase] += costs.project_s(shape) if rank == 0 else 0.0
    return seconds


class _ThinnedCosts(PlanCosts):
    """A plan's costs when each simulated decode round is the middle of ``stretch`` rounds."""

    def __init__(
        self,
        plan: Plan,
        costs: ClusterCosts,
        devices: Sequence[Device] | None,
        stretch: float,
    ) -> None:
        super().__init__(plan, costs, devices)
        self.stretch = stretch
        self._prompt_tokens = plan.workload.prompt_tokens

    def stage_s(self, rank: int, shape: BatchShape) -> float:
        if shape.phase is Phase.PREFILL or not self.has_layers(rank, shape.phase):
            return super().stage_s(rank, shape)
        made = shape.longest - self._prompt_tokens
        context = self._prompt_tokens + 0.5 + (made - 0.5) * self.stretch
        return self.layers_s(rank, shape.phase, shape.rows, context)
