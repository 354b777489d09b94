"""OPT-13B on four devices in a row: static batches, RRA and WAA planned and played on a task.

Two copies of the layers leave WAA less memory for keys and values: it is searched at several
numbers of slots, and what its expected throughput is highest at is what is played. Prompts are
padded to the longest of their micro-batch, as FasterTransformer and ExeGPT do; llmpq packs them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from llmpq.assigner import PlanRequest, make_plan
from llmpq.assigner.request import costs_of
from llmpq.assigner.schedules.plan import PERCENT, ScheduleRequest, Searched, with_schedule
from llmpq.assigner.schedules.waa import Balance
from llmpq.batching import PipelineShape, make_policy, percentile
from llmpq.costmodel import ClusterCosts
from llmpq.errors import InfeasibleError
from llmpq.sim import SimReport, simulate
from llmpq.sim.plan_costs import PlanCosts
from llmpq.spec import catalog
from llmpq.spec.cluster import Cluster
from llmpq.spec.fields import Fields, from_json
from llmpq.spec.plan import MicroBatching, Plan, Schedule
from llmpq.spec.precision import Phase
from llmpq.spec.workload import (
    LengthDistribution,
    TraceRequest,
    Workload,
    draw_trace,
    truncated_normal,
)
from reproduce.exegpt_published import TASKS
from reproduce.output import say

MODEL, DEVICE, DEVICES = "facebook/opt-13b", "A40", 4
KV_BYTES = 120e9
"""Left for keys and values of the four devices' 192 GB beside weights and temporary tensors."""
EIGHTHS = (8, 6, 5, 4, 3, 2)
"""Of the slots: the shares at which WAA is searched."""
ROUNDS = 4
"""Requests simulated: so many times the slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A schedule of ExeGPT's.

    Attributes:
        name: as in the paper.
        policy: whose variables are searched.
        balances: by what WAA shares the layers out.
    """

    name: str
    policy: Searched
    balances: tuple[Balance, ...] = ("time",)


VARIANTS = (
    Variant(name="RRA", policy="rra"),
    Variant(name="WAA-C", policy="waa"),
    Variant(name="WAA-M", policy="waa", balances=("memory",)),
)
WAA = Variant(name="WAA", policy="waa", balances=("time", "memory"))


class Served:
    """A task on the pipeline: plays schedules.

    Args:
        task: its name.
        scale: of the mean answer, for requests that differ from what was planned for.
        spread: of its standard deviation.
    """

    def __init__(self, task: str, scale: float = 1.0, spread: float = 1.0) -> None:
        prompt, answer = TASKS[task]
        self.prompts = truncated_normal(*prompt)
        self.answers = law(answer, scale, spread)
        self.plan, self.costs = planned(task)
        self.slots = self.plan.workload.batch
        count = ROUNDS * self.slots
        self.trace = draw_trace(count, self.prompts, self.answers, seed=3)

    def play(self, plan: Plan, trace: Sequence[TraceRequest] | None = None) -> SimReport:
        """Play requests, all of them or others, under a plan's schedule."""
        assert plan.schedule is not None
        shape = PipelineShape.of(plan)
        return simulate(
            PlanCosts(plan, self.costs, pads_prompts=True),
            make_policy(plan.schedule, shape),
            self.trace if trace is None else trace,
            num_slots=plan.workload.batch,
        )

    def static(self, batch: int) -> Plan:
        """Return the plan with static batches, in micro-batches for each stage."""
        size = math.ceil(batch / DEVICES)
        return replace(
            self.plan,
            schedule=Schedule(policy="static", decode_batch=batch),
            micro_batching=MicroBatching(prefill=min(size, 8), decode=size),
        )

    def static_latency_s(self, batch: int) -> float:
        """Return what static batches take when one answer is of the longest."""
        longest = replace(self.trace[0], new_tokens=self.answers.longest)
        return self.play(self.static(batch), [longest, *self.trace[1:batch]]).makespan_s

    def scheduled(self, bound_s: float, variant: Variant = VARIANTS[0]) -> Plan | None:
        """Return the best schedule whose 99th-percentile answer keeps a bound."""
        found = list(self._tried(bound_s, variant))
        return max(found, key=expected_rate, default=None)

    def _tried(self, bound_s: float, variant: Variant) -> Iterator[Plan]:
        wanted = ScheduleRequest(
            prompt_tokens=self.prompts,
            new_tokens=self.answers,
            latency_bound_s=bound_s,
            balances=variant.balances,
            pads_prompts=True,
        )
        for share in EIGHTHS if variant.policy == "waa" else EIGHTHS[:1]:
            plan = with_slots(self.plan, self.slots * share // 8)
            try:
                yield with_schedule(plan, self.costs, wanted, variant.policy)
            except InfeasibleError:
                continue


def expected_rate(plan: Plan) -> float:
    """Return the requests a second of a schedule's closed form."""
    assert plan.schedule is not None
    assert plan.schedule.estimate is not None
    return plan.schedule.estimate.requests_per_s


def with_slots(plan: Plan, slots: int) -> Plan:
    """Return the plan for so many sequences at once."""
    sizes = plan.micro_batching
    return replace(
        plan,
        workload=replace(plan.workload, batch=slots),
        micro_batching=MicroBatching(
            prefill=min(sizes.prefill, slots), decode=min(sizes.decode, slots)
        ),
    )


def variables(plan: Plan) -> str:
    """Return a schedule's control variables as the paper names them."""
    schedule, sizes = plan.schedule, plan.micro_batching
    assert schedule is not None
    if schedule.policy == "rra":
        return (
            f"B_E {schedule.encode_batch}, B_D {schedule.decode_batch}, "
            f"N_D {schedule.decode_iterations}"
        )
    encoders = len(plan.stages_of(Phase.PREFILL))
    return (
        f"B_E {schedule.encode_batch}, B_D {schedule.decode_batch}, B_m {sizes.decode}, "
        f"{encoders} of {len(plan.stages)} encode"
    )


def p99_s(made: SimReport) -> float:
    """Return the latency that 99 of 100 requests keep, from the start of their prefill."""
    return percentile([record.service_s for record in made.requests], PERCENT)


def law(answer: tuple[float, float, int], scale: float, spread: float) -> LengthDistribution:
    """Return a law of answers with another mean or another spread, cut at the same longest."""
    mean, deviation, longest = answer
    return truncated_normal(mean * scale, deviation * spread, longest)


@cache
def planned(task: str) -> tuple[Plan, ClusterCosts]:
    """Return four stages for a task's longest requests, and their costs."""
    (_, _, prompt), (_, _, new) = TASKS[task]
    model = catalog.model(MODEL)
    token_bytes = 2 * 2 * model.num_layers * model.hidden_size
    slots = min(256, int(KV_BYTES / (token_bytes * (prompt + new))) // 8 * 8)
    say(f"{task}: {slots} slots")
    cluster = {
        "schema": 1,
        "name": "four",
        "nodes": [{"name": "node0", "devices": [{"type": DEVICE, "count": DEVICES}]}],
        "links": [],
    }
    request = PlanRequest(
        model=model,
        cluster=from_json(Cluster, Fields(cluster, "cluster")),
        workload=Workload(batch=slots, prompt_tokens=prompt, new_tokens=new),
        dtype="float16",
        kv_bits=16,
        bits=(16,),
        theta_s=0.0,
        latency="roofline",
        time_limit_s=20.0,
    )
    plan = make_plan(request)
    return plan, costs_of(request, plan.cluster)
