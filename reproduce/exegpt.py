"""Part of ExeGPT's evaluation in simulation, beside what it published.

Figure 6 for OPT-13B, Figure 11 (a, b), Tables 5 and 6: its five tasks (Table 3) over four A40. The
catalogue's roofline prices no tensor parallelism, which all four schedules of the paper's Table 6
use: here are four stages in a row, or a row for either phase (WAA). FasterTransformer is the static
policy, its latency that of the longest answer; its bounds are the 10, 30 and 70 % quantiles of its
latencies over its batch sizes, and none (Sec. 7.1).

ExeGPT prints Tables 3, 5 and 6 as numbers; its figures are pictures. Two copies of the layers leave
WAA less memory for keys and values: it is searched at several numbers of slots, and what its
expected throughput is highest at is what is played. Prompts are padded to the longest of their
micro-batch, as FasterTransformer and ExeGPT do; llmpq packs them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from statistics import geometric_mean

from llmpq.assigner import PlanRequest, make_plan
from llmpq.assigner.request import costs_of
from llmpq.assigner.schedules.monotone import Evaluate, MemoizedEvaluator, Point
from llmpq.assigner.schedules.plan import PERCENT, ScheduleRequest, Searched, with_schedule
from llmpq.assigner.schedules.rra import RraSpace, ScheduleTask
from llmpq.assigner.schedules.waa import Balance, WaaSpace
from llmpq.batching import PipelineShape, make_policy, percentile
from llmpq.costmodel import ClusterCosts
from llmpq.errors import InfeasibleError
from llmpq.sim import SimReport, simulate
from llmpq.sim.costs import PlanCosts
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
from reproduce.output import IMAGES, Record, number, run, say, table, times

# --- Formulas of the paper ---


def paper_ending(new_tokens: LengthDistribution, decode_iterations: int) -> tuple[float, ...]:
    """Return ``P_D(U)``, U = 1..N_D.

    ``P_D(U | S)`` is 1 at ``U = S`` for ``S <= N_D``, else ``1 / ceil(S / N_D)`` at
    ``U = 1 + (S - 1) mod N_D``; all S iterations are decoding.
    """
    shares = [0.0] * decode_iterations
    for tokens, share in zip(new_tokens.lengths, new_tokens.probabilities, strict=True):
        shares[(tokens - 1) % decode_iterations] += share / -(-tokens // decode_iterations)
    return tuple(shares)


def paper_encode_batch(
    new_tokens: LengthDistribution, decode_iterations: int, decode_batch: float
) -> float:
    """Return ``B_E = B_D sum_U P_D(U)``."""
    return decode_batch * math.fsum(paper_ending(new_tokens, decode_iterations))


def non_monotone_shares(
    evaluate: Evaluate, shape: tuple[int, int], tolerance: float
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the share of grid steps on which a function falls (Table 5).

    Args:
        evaluate: throughput and latency of a point.
        shape: the grid.
        tolerance: relative; smaller falls do not count.

    Returns:
        For each of the two variables ``(latency, throughput)``; infeasible points are left out.
    """
    value_of = MemoizedEvaluator(evaluate)
    shares = []
    for axis in (0, 1):
        steps = [(value_of(low), value_of(high)) for low, high in _steps(shape, axis)]
        feasible = [(low, high) for low, high in steps if high.latency_s < math.inf]
        falls = (
            sum(high.latency_s < low.latency_s * (1 - tolerance) for low, high in feasible),
            sum(high.throughput < low.throughput * (1 - tolerance) for low, high in feasible),
        )
        shares.append((falls[0] / max(1, len(feasible)), falls[1] / max(1, len(feasible))))
    return shares[0], shares[1]


def _steps(shape: tuple[int, int], axis: int) -> Iterator[tuple[Point, Point]]:
    for first, second in product(range(shape[0]), range(shape[1])):
        after = (first + 1, second) if axis == 0 else (first, second + 1)
        if after[axis] < shape[axis]:
            yield (first, second), after


# --- Numbers that the paper prints ---


TASKS = {
    "S": ((256, 252, 512), (32, 13, 80)),
    "T": ((128, 81, 256), (128, 68, 320)),
    "G": ((64, 23, 128), (192, 93, 480)),
    "C1": ((256, 115, 512), (64, 30, 160)),
    "C2": ((512, 252, 1024), (256, 134, 640)),
}
"""Mean, standard deviation and longest of prompts and answers (Table 3)."""

Falls = tuple[float, float]
"""Percent of steps in which latency, throughput fall although the variable rises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """A row of Table 6: OPT-13B, task S, four A40.

    Attributes:
        bound_s: latency bound, ``None`` without one.
        policy: the schedule that was selected.
        variables: its control variables.
        latency_s: what it takes.
        requests_per_s: what it answers.
    """

    bound_s: float | None
    policy: str
    variables: str
    latency_s: float
    requests_per_s: float


TABLE_6 = (
    Selected(
        bound_s=3.1, policy="WAA", variables="B_E 4, T_P 2", latency_s=3.01, requests_per_s=22.41
    ),
    Selected(
        bound_s=5.9, policy="WAA", variables="B_E 10, T_P 2", latency_s=4.11, requests_per_s=23.76
    ),
    Selected(
        bound_s=11.5,
        policy="RRA",
        variables="B_E 52, N_D 13, T_P 4",
        latency_s=10.23,
        requests_per_s=25.23,
    ),
    Selected(
        bound_s=None,
        policy="RRA",
        variables="B_E 49, N_D 7, T_P 4",
        latency_s=16.87,
        requests_per_s=26.15,
    ),
)

TABLE_5: dict[str, dict[int, dict[str, Falls]]] = {
    "S": {
        2: {"B_E": (0.6, 2.3), "N_D": (0.0, 0.0), "WAA B_E": (0.0, 0.0), "B_m": (0.8, 0.0)},
        5: {"B_E": (0.6, 0.3), "N_D": (0.0, 0.0), "WAA B_E": (0.0, 0.0), "B_m": (0.5, 0.0)},
        10: {"B_E": (0.3, 0.0), "N_D": (0.0, 0.0), "WAA B_E": (0.0, 0.0), "B_m": (0.4, 0.0)},
    },
    "T": {
        2: {"B_E": (0.2, 0.1), "N_D": (0.0, 0.0), "WAA B_E": (0.1, 0.0), "B_m": (10.9, 0.0)},
        5: {"B_E": (0.2, 0.0), "N_D": (0.0, 0.0), "WAA B_E": (0.0, 0.0), "B_m": (10.6, 0.0)},
        10: {"B_E": (0.2, 0.0), "N_D": (0.0, 0.0), "WAA B_E": (0.0, 0.0), "B_m": (10.4, 0.0)},
    },
}
"""By task, tolerance in percent and variable: GPT-3 39B on sixteen A40. Its fifth is T_P."""


# --- Schedules, planned and played ---


MODEL, DEVICE, DEVICES = "facebook/opt-13b", "A40", 4
KV_BYTES = 120e9
"""Left for keys and values of the four devices' 192 GB beside weights and temporary tensors."""
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
        wanted = ScheduleRequest(
            prompt_tokens=self.prompts,
            new_tokens=self.answers,
            latency_bound_s=bound_s,
            sla="length",
            balances=variant.balances,
            pads_prompts=True,
        )
        try:
            return with_schedule(self.plan, self.costs, wanted, variant.policy)
        except InfeasibleError:
            return None


def expected_rate(plan: Plan) -> float:
    """Return the requests a second of a schedule's closed form."""
    assert plan.schedule is not None
    assert plan.schedule.estimate is not None
    return plan.schedule.estimate.requests_per_s


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


# --- The evaluation ---


QUANTILES = (0.1, 0.3, 0.7)
BATCHES = 6
FEW_SLOTS = 64
"""Slots of the spaces whose every point is looked at (Table 5)."""
SHIFTS = (0.7, 0.85, 1.0, 1.15, 1.3)
RRA = VARIANTS[0]
DETAILED = ("RRA", "WAA-C")
"""Schedules whose variables are shown."""


def main(argv: Sequence[str] | None = None) -> int:
    """Play and print."""
    return run("exegpt", __doc__, collect, report, argv)


def collect() -> Record:
    """Return the rows of every figure and table."""
    rows = {task: bounds(task) for task in TASKS}
    bound_s = rows["T"][1]["bound_s"]
    record = {
        "bounds": [row for task in TASKS for row in rows[task]],
        "table 5": [row for task in TABLE_5 for row in monotone(task)],
        "table 6": selected(),
        "figure 11": [
            {"policy": one.name, **row} for one in (RRA, WAA) for row in shifts("T", bound_s, one)
        ],
    }
    _draw(record)
    return record


def bounds(task: str) -> list[Record]:
    """Return static batches, RRA and WAA under a task's four bounds (Figure 6)."""
    served = Served(task)
    sizes = sorted(
        {max(4, served.slots * step // BATCHES // 4 * 4) for step in range(1, BATCHES + 1)}
    )
    static = []
    for batch in sizes:
        made = served.play(served.static(batch))
        static.append((served.static_latency_s(batch), made.throughput_requests_per_s, batch))
    latencies = sorted(latency_s for latency_s, _, _ in static)
    wanted = [percentile(latencies, 100 * quantile) for quantile in QUANTILES]
    rows = []
    for bound_s in (*wanted, math.inf):
        say(f"{task}: {bound_s:.2f} s")
        kept = [one for one in static if one[0] <= bound_s]
        best = max(kept, key=lambda one: one[1]) if kept else None
        row: Record = {"task": task, "bound_s": None if math.isinf(bound_s) else bound_s}
        row["schedules"] = schedules(served, bound_s)
        if best is not None:
            row |= {"static": best[1], "batch": best[2]}
            rates = {name: one["requests_per_s"] for name, one in row["schedules"].items()}
            row["gains"] = {name: rate / best[1] for name, rate in rates.items()}
        rows.append(row)
    return rows


def schedules(served: Served, bound_s: float) -> Record:
    """Return what every schedule of the paper does within a bound; those that cannot are absent."""
    plans = {one.name: served.scheduled(bound_s, one) for one in VARIANTS}
    return {name: _row(served, plan) for name, plan in plans.items() if plan is not None}


def _row(served: Served, plan: Plan) -> Record:
    """Return what a schedule does, by the closed form and played."""
    assert plan.schedule is not None
    assert plan.schedule.estimate is not None
    made = served.play(plan)
    return {
        "requests_per_s": made.throughput_requests_per_s,
        "expected": expected_rate(plan),
        "latency_s": plan.schedule.estimate.latency_s,
        "p99_s": p99_s(made),
        "slots": plan.workload.batch,
        "variables": variables(plan),
    }


def selected() -> list[Record]:
    """Return the schedule that answers most, played, under the published bounds (Table 6)."""
    served = Served("S")
    rows = []
    for one in TABLE_6:
        found = schedules(served, math.inf if one.bound_s is None else one.bound_s)
        name = max(found, key=lambda key: found[key]["requests_per_s"], default=None)
        ours = {} if name is None else {"policy": name, **found[name]}
        rows.append({"bound_s": one.bound_s, "ours": ours})
    return rows


def monotone(task: str) -> list[Record]:
    """Return the share of steps that are not monotone, for RRA and WAA (Table 5)."""
    served = Served(task)
    waa = served.scheduled(math.inf, WAA)
    assert waa is not None
    spaces = {
        ("B_E", "N_D"): RraSpace(_task(served, served.plan)),
        ("B_m", "micro-batches"): WaaSpace(_task(served, waa)),
    }
    rows = []
    for tolerance in TABLE_5[task]:
        ours = {}
        for names, space in spaces.items():
            falls = non_monotone_shares(space.evaluate, space.shape, tolerance / 100)
            ours |= {
                name: [100 * share for share in shares]
                for name, shares in zip(names, falls, strict=True)
            }
        rows.append({"task": task, "tolerance": tolerance, "ours": ours})
    return rows


def _task(served: Served, plan: Plan) -> ScheduleTask:
    return ScheduleTask(
        costs=PlanCosts(plan, served.costs, pads_prompts=True),
        num_slots=FEW_SLOTS,
        prompt_tokens=served.prompts,
        new_tokens=served.answers,
        latency_bound_s=math.inf,
        bound_tokens=served.answers.quantile(PERCENT / 100),
    )


def shifts(task: str, bound_s: float, variant: Variant) -> list[Record]:
    """Return a schedule on answers it was not made for, and on its own (Figure 11, SLA a)."""
    planned_for = Served(task)
    kept = planned_for.scheduled(bound_s, variant)
    if kept is None:
        return []
    usual = p99_s(planned_for.play(kept))
    rows = []
    for what in ("mean", "deviation"):
        for shift in SHIFTS:
            say(f"{task}: {variant.name}, {what} {shift}")
            scale, spread = (shift, 1.0) if what == "mean" else (1.0, shift)
            served = Served(task, scale, spread)
            old = served.play(kept)
            plan = served.scheduled(bound_s, variant)
            new = None if plan is None else served.play(plan)
            rows.append({
                "what": what, "shift": shift,
                "kept": old.throughput_requests_per_s, "p99": p99_s(old) / usual,
                "replanned": None if new is None else new.throughput_requests_per_s,
                "replanned_p99": None if new is None else p99_s(new) / usual,
            })  # fmt: skip
    return rows


def report(record: Record) -> str:
    """Return the tables."""
    rows = record["bounds"]
    return "\n\n".join([
        "## Figure 6 for OPT-13B, with tasks G and C2: four bounds, requests/s",
        _rates(rows),
        _gains(rows),
        "## Their schedules",
        _details(rows),
        "## Table 6: OPT-13B, task S, under the published bounds",
        _selected(record["table 6"]),
        "## Table 5: steps that are not monotone, percent (latency, throughput)",
        _monotone(record["table 5"]),
        "## Figure 11: answers differ from those planned for (task T, bound at 30 %)",
        _shifts(record["figure 11"]),
    ])  # fmt: skip


def _rates(rows: Sequence[Record]) -> str:
    names = [one.name for one in VARIANTS]
    lines = []
    for row in rows:
        found, gains = row["schedules"], row.get("gains", {})
        rates = [number(found.get(name, {}).get("requests_per_s")) for name in names]
        best = max(gains, key=lambda name: gains[name], default=None)
        gain = "-" if best is None else f"{times(gains[best])} ({best})"
        lines.append([row["task"], number(row["bound_s"], 1, "none"), number(row.get("static")),
                      *rates, gain])  # fmt: skip
    return table(("task", "bound, s", "static", *names, "best gain"), lines)


def _gains(rows: Sequence[Record]) -> str:
    best = {
        (row["task"], row["bound_s"]): max(row["gains"].values())
        for row in rows
        if row.get("gains")
    }
    free = [gain for (_, bound_s), gain in best.items() if bound_s is None]
    mean, largest = geometric_mean(best.values()), max(best.values())
    return (
        f"Gains of the best over static batches: geometric mean {mean:.2f}x over all bounds and "
        f"{geometric_mean(free):.2f}x without one, largest {largest:.2f}x. ExeGPT reports 2x on "
        "average with its smaller models and 3.2x with its larger ones, 2.2x of these without a "
        "bound, and 15.2x at most."
    )


def _details(rows: Sequence[Record]) -> str:
    """Return one row a schedule; WAA-M, which differs little on equal devices, is left out."""
    lines = []
    for row in rows:
        for name, one in row["schedules"].items():
            if name not in DETAILED:
                continue
            lines.append([
                row["task"], number(row["bound_s"], 1, "none"), name,
                number(one["requests_per_s"]), number(one["expected"]),
                number(one["latency_s"], 1), number(one["p99_s"], 1),
                one["variables"],
            ])  # fmt: skip
    head = ("task", "bound, s", "schedule", "played, requests/s", "closed form", "latency, s",
            "99 % in service, s", "variables")  # fmt: skip
    return table(head, lines)


def _selected(rows: Sequence[Record]) -> str:
    lines = []
    for theirs, row in zip(TABLE_6, rows, strict=True):
        ours = row["ours"]
        lines.append([
            number(theirs.bound_s, 1, "none"),
            f"{theirs.policy}: {theirs.variables}", number(theirs.latency_s),
            number(theirs.requests_per_s),
            f"{ours['policy']}: {ours['variables']}" if ours else "not met",
            number(ours.get("latency_s")), number(ours.get("expected")),
            number(ours.get("requests_per_s")),
        ])  # fmt: skip
    head = ("bound, s", "paper", "latency, s", "requests/s", "ours", "latency, s", "closed form",
            "played, requests/s")  # fmt: skip
    return table(head, lines)


def _monotone(rows: Sequence[Record]) -> str:
    lines = []
    for row in rows:
        theirs, ours = TABLE_5[row["task"]][row["tolerance"]], row["ours"]
        cells = [_two(falls) for falls in (*theirs.values(), *ours.values())]
        lines.append([row["task"], f"{row['tolerance']} %", *cells])
    head = ("task", "tolerance", "paper: RRA B_E", "N_D", "WAA B_E", "B_m", "ours: RRA B_E", "N_D",
            "WAA B_m", "micro-batches")  # fmt: skip
    return table(head, lines)


def _shifts(rows: Sequence[Record]) -> str:
    lines = [
        [row["policy"], row["what"], f"{row['shift']:g}", number(row["kept"]),
         number(row["replanned"]), number(row["p99"]), number(row["replanned_p99"])]
        for row in rows
    ]  # fmt: skip
    head = ("schedule", "changed", "by", "kept, requests/s", "planned anew", "99 %, kept",
            "99 %, anew")  # fmt: skip
    return table(head, lines)


def _two(found: Sequence[float]) -> str:
    """Return latency and throughput of a variable."""
    return f"({found[0]:.1f}, {found[1]:.1f})"


def _draw(record: Record) -> None:
    try:
        from reproduce.pictures import draw_exegpt  # noqa: PLC0415  matplotlib is extra
    except ImportError:
        return
    draw_exegpt(record, IMAGES / "reproduce_exegpt.png")


if __name__ == "__main__":
    raise SystemExit(main())
