"""Estimate and forecast of a finished plan.

The estimate follows from the plan's file: seconds, quality and memory by cause. During a search the
last stage and the stages with layers of 16 bits are not known yet, so every stage reserves memory
for both; here only the stages that need it do. A plan with separate stages per phase (WAA,
experimental) holds its weights twice; its latency is that of the simulator, because the closed
formula describes one pipeline.

The forecast runs requests in the simulator, with the runtime's scheduler and policy. In addition to
the closed formula it covers ragged last micro-batches, regrouping between the phases, overlap of
prefill and decode, growing contexts and the limit of micro-batches in flight. The requests are
those of the plan's own workload, which are equal and wait at the start, or those that a run served.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from llmpq.assigner.enumeration import build_pairs
from llmpq.assigner.objective import (
    Assignment,
    AssignmentProblem,
    Evaluation,
    FloatArray,
    LayerCost,
    evaluate,
)
from llmpq.batching import BatchingPolicy, PipelineShape, make_policy
from llmpq.batching.length import ORACLE, Prediction, make_predictor
from llmpq.costmodel import ClusterCosts, LatencySource, build_costs
from llmpq.sim import BatchShape, simulate
from llmpq.sim.costs import PlanCosts
from llmpq.spec.cluster import Device
from llmpq.spec.model import ModelSpec
from llmpq.spec.plan import (
    MemoryParts,
    Plan,
    PlanEstimate,
    PlanForecast,
    Schedule,
    StageAssignment,
    StageEstimate,
    StageForecast,
)
from llmpq.spec.precision import BITS, Phase, Variant
from llmpq.spec.runtime_constants import STREAM_BUFFERS
from llmpq.spec.workload import TraceRequest

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
        make_policy(schedule, PipelineShape.of(plan)),
        chosen,
        num_slots=plan.workload.batch,
        predictor=predictor,
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
    plan: Plan, costs: _ThinnedCosts, rank: int, work_s: Mapping[Phase | None, float]
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


def costs_of_plan(
    plan: Plan,
    model: ModelSpec,
    profile_dir: Path | None = None,
    *,
    reads_tables: bool = True,
) -> ClusterCosts:
    """Return the cost models of a plan's cluster, of the kind that it was made with.

    Raises:
        SpecError: a measured table is not here; without ``reads_tables`` none is needed.
    """
    is_fitted = any(source.startswith("fit of ") for _, source in plan.provenance.inputs)
    latency: LatencySource = "fit" if is_fitted else "table"
    return build_costs(
        model,
        plan.cluster,
        dtype=plan.dtype,
        kv_bits=plan.kv_bits,
        head_bits=plan.head_width,
        profile_dir=profile_dir,
        latency=latency if reads_tables else "roofline",
    )


def evaluate_plan(plan: Plan, costs: ClusterCosts, omega: FloatArray) -> tuple[PlanEstimate, int]:
    """Return the estimate of a plan with the given cost models, and its bytes over capacity.

    ``omega`` is ``[L, B]`` over all of ``BITS``; the plan's own estimate is ignored.
    """
    if plan.is_split:
        estimate = _split_estimate(plan, costs, omega)
    else:
        # Only the bitwidths in use: a measured table need not hold the others.
        bits = tuple(width for width in BITS if width in plan.bits)
        (pair,) = build_pairs(costs, plan.workload, bits, [plan.micro_batching])
        problem = AssignmentProblem(
            costs=pair,
            kinds=np.array(costs.model.layer_kinds, dtype=np.int64),
            bits=bits,
            omega=omega[:, [BITS.index(width) for width in bits]],
            theta_s=plan.search.theta_s,
            quality_budget=None,
            formula=plan.search.formula,
            order=tuple(plan.device_of(stage).group for stage in plan.stages),
        )
        assignment = Assignment(
            tuple(stage.rank for stage in plan.stages for _ in stage.bits),
            tuple(bits.index(width) for width in plan.bits),
        )
        on_disk = {stage.first_layer + index for stage in plan.stages for index in stage.on_disk}
        apart = _layers_apart(plan, costs)
        found = estimate_of(problem, evaluate(problem, assignment, on_disk, apart))
        estimate = with_exact_memory(replace(plan, estimate=found), costs)
    over = [stage.memory.total - stage.capacity_bytes for stage in estimate.stages]
    over += [
        (one.memory.host or 0) - _host_bytes(plan.device_of(stage))
        for stage, one in zip(plan.stages, estimate.stages, strict=True)
    ]
    return estimate, sum(max(0, excess) for excess in over)


def _host_bytes(device: Device) -> int:
    return 0 if device.host is None else device.host.memory_bytes


def _layers_apart(plan: Plan, costs: ClusterCosts) -> dict[int, LayerCost]:
    """Return the cost of the layers whose experts are not as the rest of them.

    Raises:
        SpecError: as ``ClusterCosts.variant_s``.
    """
    found = {}
    for stage in plan.stages:
        device = plan.device_of(stage)
        crowding = costs.crowding(device)
        for layer, variant in enumerate(stage.variants, stage.first_layer):
            if variant == Variant(variant.bits):
                continue
            kind = costs.model.layer_kinds[layer]
            steps_s = [
                crowding * costs.layer_steps_s(device, phase, variant, rows, tokens, kind)
                for phase, rows, tokens in micro_batches_of(plan)
            ]
            whole = costs.layer_weight_bytes(device, kind, variant.bits)
            found[layer] = LayerCost(
                prefill_s=steps_s[0],
                decode_s=steps_s[1],
                saved_bytes=whole - costs.variant_bytes(device, kind, variant)[0],
            )
    return found


def estimate_of(problem: AssignmentProblem, found: Evaluation) -> PlanEstimate:
    """Return the estimate of an evaluated assignment, with the memory that the search reserved."""
    costs = problem.costs
    stages = []
    for stage in found.stages:
        group = problem.order[stage.position]
        memory = MemoryParts(
            weights=stage.weight_bytes,
            kv=stage.kv_bytes,
            temporary=int(costs.temporary_bytes[group]),
            master=int(costs.master_bytes[group]) if stage.position == 0 else 0,
            runtime=int(costs.runtime_bytes[group]),
        )
        stages.append(
            StageEstimate(
                prefill_s=stage.prefill_s,
                decode_s=stage.decode_s,
                send_prefill_s=stage.send_prefill_s,
                send_decode_s=stage.send_decode_s,
                memory=memory,
                capacity_bytes=int(costs.total_bytes[group]),
            )
        )
    return PlanEstimate(
        latency_s=found.latency_s,
        quality=found.quality,
        objective_s=found.objective_s,
        stages=tuple(stages),
    )


def empty_estimate(stages: int, *, quality: float) -> PlanEstimate:
    """Return the estimate of a plan that is not evaluated: no seconds and no bytes."""
    nothing = StageEstimate(
        prefill_s=0.0,
        decode_s=0.0,
        send_prefill_s=0.0,
        send_decode_s=0.0,
        memory=MemoryParts(weights=0, kv=0, temporary=0, master=0, runtime=0),
        capacity_bytes=0,
    )
    return PlanEstimate(latency_s=0.0, quality=quality, objective_s=0.0, stages=(nothing,) * stages)


def stage_memory(
    plan: Plan, costs: ClusterCosts, stage: StageAssignment, device: Device | None = None
) -> MemoryParts:
    """Return the bytes of one stage, by cause.

    Temporary buffers are those of both phases, even where a stage computes only one. ``device`` is
    the stage's in the cost models' cluster, the plan's own by default.
    """
    device, is_master = device or plan.device_of(stage), stage.rank == 0
    kinds = costs.model.layer_kinds[stage.first_layer : stage.end_layer]
    slots, tokens = plan.slots_of(stage)
    kv = sum(
        costs.layer_kv_bytes(kind, slots, tokens, device, keeps_all=plan.is_split) for kind in kinds
    )
    kv += costs.copied_kv_bytes(slots, tokens, device, (stage.first_layer, stage.end_layer))
    places = [
        costs.variant_bytes(device, kind, variant)
        for kind, variant in zip(kinds, stage.variants, strict=True)
    ]
    weights, apart = [own for own, _ in places], sum(host for _, host in places)
    on_host = [
        (kind, variant.expert_bits or variant.bits)
        for kind, variant, (_, host) in zip(kinds, stage.variants, places, strict=True)
        if host
    ]
    if on_host:
        apart += costs.host_buffer_bytes(device, plan.workload, plan.micro_batching, on_host)
    on_disk = [weights[index] for index in stage.on_disk]
    buffers = STREAM_BUFFERS * max(on_disk, default=0)
    return MemoryParts(
        weights=sum(weights) - sum(on_disk) + buffers,
        kv=kv,
        temporary=costs.temporary_bytes(
            device,
            plan.workload,
            plan.micro_batching,
            is_master,
            is_last=not plan.is_split and stage.rank == len(plan.stages) - 1,
            kv_bytes=kv,
        ),
        master=costs.master_bytes(device) if is_master else 0,
        runtime=costs.runtime_bytes(device),
        host=apart or None,
    )


def with_exact_memory(
    plan: Plan, costs: ClusterCosts, devices: Sequence[Device] | None = None
) -> PlanEstimate:
    """Return a plan's estimate with the memory of its finished stages, on ``devices`` if given."""
    places = devices or [plan.device_of(stage) for stage in plan.stages]
    stages = []
    for estimate, stage, place in zip(plan.estimate.stages, plan.stages, places, strict=True):
        memory = stage_memory(plan, costs, stage, place)
        # Equal totals keep the parts as the search counted them.
        old = estimate.memory
        differs = (memory.total, memory.host) != (old.total, old.host)
        stages.append(replace(estimate, memory=memory) if differs else estimate)
    return replace(plan.estimate, stages=tuple(stages))


def excess_bytes(plan: Plan, costs: ClusterCosts) -> int:
    """Return the bytes over capacity, of all stages together; 0 when the plan fits."""
    return sum(
        max(0, stage_memory(plan, costs, stage).total - costs.capacity_bytes(plan.device_of(stage)))
        for stage in plan.stages
    )


def _split_estimate(plan: Plan, costs: ClusterCosts, omega: FloatArray) -> PlanEstimate:
    """Return the estimate of a plan with separate stages per phase."""
    played = forecast(plan, costs)
    quality = sum(float(omega[layer, BITS.index(bits)]) for layer, bits in enumerate(plan.bits))
    seconds = PlanCosts(plan, costs)
    return PlanEstimate(
        latency_s=played.latency_s,
        quality=quality,
        objective_s=played.latency_s + plan.search.theta_s * quality,
        stages=tuple(_split_stage(plan, costs, seconds, stage) for stage in plan.stages),
        forecast=played,
    )


def _split_stage(
    plan: Plan, costs: ClusterCosts, seconds: PlanCosts, stage: StageAssignment
) -> StageEstimate:
    device = plan.device_of(stage)
    steps_s, sends_s = [], []
    for phase, rows, tokens in micro_batches_of(plan):
        path = plan.path(phase)
        has_layers = seconds.has_layers(stage.rank, phase)
        step_s = seconds.layers_s(stage.rank, phase, rows, tokens) if has_layers else 0.0
        if stage.rank == 0:
            step_s += costs.master_s(device, phase, rows, round(tokens))
        send_s = 0.0
        if stage.rank in path and len(path) > 1:
            target = path[(path.index(stage.rank) + 1) % len(path)]
            sent = 1 if target == 0 else round(tokens)
            send_s = costs.send_s(device, plan.device_of(plan.stages[target]), phase, rows, sent)
        steps_s.append(step_s)
        sends_s.append(send_s)
    return StageEstimate(
        prefill_s=steps_s[0],
        decode_s=steps_s[1],
        send_prefill_s=sends_s[0],
        send_decode_s=sends_s[1],
        memory=stage_memory(plan, costs, stage),
        capacity_bytes=costs.capacity_bytes(device),
    )
