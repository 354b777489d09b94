"""ExeGPT's evaluation in simulation, beside what it published.

    python -m reproduce.exegpt [--model NAME ...] [--keep FILE]

Figures 6 and 8 for OPT-13B and the four sizes of GPT-3, Figures 7 and 11, Tables 4 to 7, on the
paper's A40 and A100. Devices share layers in teams, by a roofline (``reproduce/teams.py``).
FasterTransformer is the static policy on the largest teams of a node, and pads prompts to the
longest of their micro-batch; its bounds are the 10, 30 and 70 % quantiles of its latencies over its
batch sizes, and none, and it keeps them for the longest answer (Sec. 7.1). ExeGPT's engine packs
prompts: the time of its encoder varies with their lengths (Table 7), which padded batches would
not. Layouts of the teams are compared by playing their best schedules by closed form; the first
that keeps the bound when searched in simulation is taken.

ExeGPT prints Tables 1 to 7 as numbers; its figures are pictures, of which the text names averages
and extremes. With ``--keep`` a later start goes on where this one was stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from statistics import NormalDist, mean
from typing import Any

import numpy as np

from llmpq.assigner.schedules.plan import PERCENT, ScheduleRequest, Searched, with_schedule
from llmpq.assigner.schedules.rra import RraSpace, ScheduleTask
from llmpq.assigner.schedules.waa import WaaSpace
from llmpq.batching import PipelineShape, make_policy, percentile
from llmpq.errors import InfeasibleError
from llmpq.sim import SimReport, simulate
from llmpq.sim.costs import PlanCosts
from llmpq.spec import catalog
from llmpq.spec.fields import dump_json, write_text
from llmpq.spec.huggingface.families import model_from_config
from llmpq.spec.model import ModelSpec
from llmpq.spec.plan import MicroBatching, Plan, Schedule
from llmpq.spec.precision import Phase
from llmpq.spec.workload import LengthDistribution, TraceRequest, draw_trace, truncated_normal
from reproduce.exegpt_paper import (
    TABLE_4,
    TABLE_5,
    TABLE_6,
    TABLE_7,
    TASKS,
    Selected,
    non_monotone_shares,
)
from reproduce.output import IMAGES, Record, emit, number, say, table, times
from reproduce.teams import VALUE_BYTES, Machines, Teams

# --- Models, machines and tasks ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model on its machines (Tables 1 and 2).

    Attributes:
        model: its name here.
        machines: where it runs.
        tasks: those of Figures 6 and 8.
        has_waa: two copies of it fit, as the paper found.
        slots: sequences at once, at most.
        quantiles: of the static batches' latencies: the bounds, beside none.
    """

    model: str
    machines: Machines
    tasks: tuple[str, ...]
    has_waa: bool = True
    slots: int = 128
    quantiles: tuple[float, ...] = (0.3,)

    @property
    def name(self) -> str:
        """The model and its devices."""
        return f"{self.model}, {self.machines.devices} {self.machines.device}"


SMALL_TASKS = ("S", "T", "C1")
OPT = Case(
    model="OPT-13B", machines=Machines(device="A40", nodes=1, each=4), tasks=SMALL_TASKS,
    slots=256, quantiles=(0.1, 0.3, 0.7),
)  # fmt: skip
LARGE_TASKS = ("G", "C1", "C2")
A100S = Machines(device="A100-80G", nodes=2, each=8)
CASES = (
    OPT,
    Case(model="GPT-3 39B", machines=Machines(device="A40", nodes=2, each=8), tasks=SMALL_TASKS),
    Case(model="GPT-3 101B", machines=A100S, tasks=("S", "T", *LARGE_TASKS)),
    Case(model="GPT-3 175B", machines=A100S, tasks=LARGE_TASKS, has_waa=False),
    Case(
        model="GPT-3 175B", machines=Machines(device="A40", nodes=4, each=8), tasks=LARGE_TASKS,
        has_waa=False,
    ),
    Case(
        model="GPT-3 341B", machines=Machines(device="A40", nodes=6, each=8), tasks=LARGE_TASKS,
        has_waa=False,
    ),
)  # fmt: skip
SHAPES = {"39B": (48, 8192, 64), "101B": (80, 10240, 80), "175B": (96, 12288, 96),
          "341B": (120, 15360, 120)}  # fmt: skip
"""Layers, hidden size and heads of GPT-3 (Table 1)."""
FIGURE_6 = [(case.name, task) for case in CASES[:3] for task in SMALL_TASKS]
FIGURE_8 = [(case.name, task) for case in CASES[2:] for task in LARGE_TASKS]
"""Models and tasks of the paper's averages; Figure 6 has T5, too."""


def model_of(name: str) -> ModelSpec:
    """Return the sizes of a model; GPT-3's layers are those of OPT."""
    if name == OPT.model:
        return catalog.model("facebook/opt-13b")
    layers, hidden, heads = SHAPES[name.removeprefix("GPT-3 ")]
    config = {
        "model_type": "opt", "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "ffn_dim": 4 * hidden, "vocab_size": 50272,
        "max_position_embeddings": 2048, "word_embed_proj_dim": hidden,
        "do_layer_norm_before": True, "tie_word_embeddings": True, "torch_dtype": "float16",
    }  # fmt: skip
    return model_from_config(config, name, name)


# --- Schedules, planned and played ---


REQUESTS, SEED = 2000, 3
"""Requests that are played, as many as the search simulates, but others."""
ORDERS = ("random", "sorted", "randomised")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Lengths of a task's requests, or of others (Figure 11).

    Attributes:
        task: its name.
        scale, spread: factors on mean and deviation of the answers.
        skewness: of the answers (skew normal); 0 for the truncated normal distribution.
    """

    task: str
    scale: float = 1.0
    spread: float = 1.0
    skewness: float = 0.0

    @property
    def prompts(self) -> LengthDistribution:
        """Law of the prompts."""
        return truncated_normal(*TASKS[self.task][0])

    @property
    def answers(self) -> LengthDistribution:
        """Law of the answers."""
        answer = TASKS[self.task][1]
        if self.skewness:
            return skewed(answer, self.skewness)
        return law(answer, self.scale, self.spread)

    def trace(self, count: int = REQUESTS) -> tuple[TraceRequest, ...]:
        """Return requests that all wait from the start."""
        return draw_trace(count, self.prompts, self.answers, seed=SEED)


class Served:
    """A task on the teams of a case: plans and plays schedules.

    Args:
        case: model and machines.
        task: its name.
        layout: teams of a node.
    """

    def __init__(self, case: Case, task: str, layout: tuple[int, ...]) -> None:
        self.lengths = Lengths(task=task)
        self.teams = Teams(model=model_of(case.model), machines=case.machines, layout=layout)
        (_, _, prompt), (_, _, new) = TASKS[task]
        self.plan, self.costs = self.teams.planned(prompt, new, case.slots)
        self.slots = self.plan.workload.batch

    def play(
        self,
        plan: Plan,
        trace: Sequence[TraceRequest] | None = None,
        *,
        pads_prompts: bool = False,
        with_activities: bool = False,
    ) -> SimReport:
        """Play requests, by default the task's, under a plan's schedule."""
        assert plan.schedule is not None
        return simulate(
            PlanCosts(plan, self.costs, pads_prompts=pads_prompts),
            make_policy(plan.schedule, PipelineShape.of(plan)),
            self.lengths.trace() if trace is None else trace,
            num_slots=plan.workload.batch,
            with_activities=with_activities,
        )

    def static(self, batch: int) -> Plan:
        """Return the plan with static batches, in micro-batches for each stage."""
        size = math.ceil(batch / len(self.plan.stages))
        return replace(
            self.plan,
            schedule=Schedule(policy="static", decode_batch=batch),
            micro_batching=MicroBatching(prefill=min(size, 8), decode=size),
        )

    def static_s(self, batch: int, tokens: int) -> float:
        """Return what static batches take when the longest answer has so many tokens."""
        trace = self.lengths.trace(batch)
        capped = [replace(item, new_tokens=min(item.new_tokens, tokens)) for item in trace]
        capped[0] = replace(capped[0], new_tokens=tokens)
        return self.play(self.static(batch), capped, pads_prompts=True).makespan_s

    def iteration(self, slots: int, prefill: int) -> Plan:
        """Return iteration-level scheduling (ORCA) with so many slots, prompts at a time."""
        return replace(
            self.plan,
            workload=replace(self.plan.workload, batch=slots),
            schedule=Schedule(policy="iteration"),
            micro_batching=MicroBatching(prefill=prefill, decode=slots),
        )

    def wanted(self, bound_s: float, policy: Searched, **changes: Any) -> ScheduleRequest:
        """Return the request of a schedule: bounds are kept when simulated."""
        del policy
        request = ScheduleRequest(
            prompt_tokens=self.lengths.prompts,
            new_tokens=self.lengths.answers,
            latency_bound_s=bound_s,
        )
        return replace(request, **changes)

    def closed_form(self, bound_s: float, policy: Searched) -> Plan | None:
        """Return the best schedule by closed form, which is not improved by playing."""
        finite = bound_s if math.isfinite(bound_s) else 1e6
        return self._scheduled(self.wanted(finite, policy, sla="length"), policy)

    def scheduled(
        self, bound_s: float, policy: Searched, lengths: Lengths | None = None
    ) -> Plan | None:
        """Return the best schedule that keeps a bound when simulated, for other lengths too."""
        others = {} if lengths is None else {"new_tokens": lengths.answers}
        return self._scheduled(self.wanted(bound_s, policy, **others), policy)

    def _scheduled(self, wanted: ScheduleRequest, policy: Searched) -> Plan | None:
        try:
            return with_schedule(self.plan, self.costs, wanted, policy)
        except InfeasibleError:
            return None


@cache
def served(case: Case, task: str, layout: tuple[int, ...]) -> Served | None:
    """Return a task on teams, ``None`` where memory does not hold four requests."""
    try:
        return Served(case, task, layout)
    except InfeasibleError:
        return None


def baseline(case: Case, task: str) -> Served:
    """Return a task on the largest teams of a node, as FasterTransformer runs it."""
    found = served(case, task, (case.machines.each,))
    assert found is not None
    return found


def expected_rate(plan: Plan) -> float:
    """Return the requests a second of a schedule's estimate."""
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


def kept_s(made: SimReport, answers: LengthDistribution) -> float:
    """Return what a bound is for: 99 % of all requests, and of the answers about as long as it."""
    least, most = answers.quantile(0.97), answers.quantile(PERCENT / 100)
    about = [one.service_s for one in made.requests if least <= one.new_tokens <= most]
    return max(p99_s(made), percentile(about, PERCENT))


def law(answer: tuple[float, float, int], scale: float, spread: float) -> LengthDistribution:
    """Return a law of answers with another mean or another spread, cut at the same longest."""
    mean, deviation, longest = answer
    return truncated_normal(mean * scale, deviation * spread, longest)


def skewed(answer: tuple[float, float, int], skewness: float) -> LengthDistribution:
    """Return a skew normal law of that mean, deviation and skewness, cut at 1 and at the longest.

    Its density is ``2 phi(x) Phi(a x)``; ``|a|`` follows from the skewness.
    """
    mean, deviation, longest = answer
    power = abs(skewness) ** (2 / 3)
    delta = math.sqrt(math.pi / 2 * power / (power + ((4 - math.pi) / 2) ** (2 / 3)))
    shape = math.copysign(delta / math.sqrt(1 - delta**2), skewness)
    delta = math.copysign(delta, skewness)
    scale = deviation / math.sqrt(1 - 2 * delta**2 / math.pi)
    centre = mean - scale * delta * math.sqrt(2 / math.pi)
    shares = []
    for length in range(1, longest + 1):
        x = (length - centre) / scale
        shares.append(math.exp(-x * x / 2) * math.erfc(-shape * x / math.sqrt(2)))
    total = math.fsum(shares)
    found = [(length, share / total) for length, share in enumerate(shares, start=1)]
    least = [(length, share) for length, share in found if share > 0]
    return LengthDistribution(
        lengths=tuple(length for length, _ in least),
        probabilities=tuple(share for _, share in least),
    )


# --- The evaluation ---


BATCHES = 6
"""Sizes of static batches that are played; FasterTransformer's are all multiples of four."""
FEW_SLOTS = 64
"""Slots of the spaces whose every point is looked at (Table 5)."""
SHIFTS = (0.7, 0.85, 1.15, 1.3)
SKEWS = (-0.4, -0.2, 0.2, 0.4)
POLICIES: tuple[Searched, ...] = ("rra", "waa")
NAMES = {"rra": "RRA", "waa": "WAA"}
CORRELATIONS = (0.0, 0.57, 0.94)
"""Of prompts and answers: none, and the range of the paper's translations (Sec. 7.1)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Play and print."""
    parser = argparse.ArgumentParser(prog="reproduce.exegpt", description=__doc__)
    parser.add_argument("--keep", type=Path, metavar="FILE", help="keeps the figures, part by part")
    parser.add_argument(
        "--only", metavar="TEXT", help="parts whose names begin so, with ; between them"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, for machines")
    options = parser.parse_args(argv)
    record = collect(options.keep, options.only)
    emit(report(record), record, as_json=options.json)
    return 0


def parts() -> dict[str, Callable[[], Any]]:
    """Return what there is to play, by name."""
    found: dict[str, Callable[[], Any]] = {}
    for case in CASES:
        for task in case.tasks:
            for place in range(len(case.quantiles) + 1):
                name = f"bounds / {case.name} / {task} / {place}"
                found[name] = partial(bounds, case, task, place)
    return found | {
        **{f"table 6 / {place}": partial(selected, one) for place, one in enumerate(TABLE_6)},
        "table 7": stage_times,
        "table 5": lambda: [row for task in TABLE_5 for row in monotone(task)],
        "figure 7": lambda: [row for task in OPT.tasks for row in rivals(task)],
        "figure 11": lambda: [row for policy in POLICIES for row in shifts(policy)],
        "correlated": lambda: [row for policy in POLICIES for row in correlated(policy)],
        "table 4": loading,
    }


def collect(keep: Path | None = None, only: str | None = None) -> Record:
    """Return the rows of every figure and table."""
    known: Record = json.loads(keep.read_text()) if keep is not None and keep.exists() else {}
    for name, play in parts().items():
        if name in known or (only is not None and not name.startswith(tuple(only.split(";")))):
            continue
        say(name)
        known[name] = json.loads(json.dumps(play()))
        if keep is not None:
            write_text(keep, dump_json(known))
    record: Record = {"bounds": [], "table 6": []}
    for name in parts():
        rows = name.partition(" / ")[0]
        if rows in record:
            record[rows] += [known[name]] if name in known else []
        elif name in known:
            record[name] = known[name]
    if only is None:
        _draw(record)
    return record


@cache
def bounds_of(case: Case, task: str) -> tuple[list[Record], list[float]]:
    """Return static batches by size, and a task's bounds: three, and none."""
    base = baseline(case, task)
    sizes = {max(4, base.slots * step // BATCHES // 4 * 4) for step in range(1, BATCHES + 1)}
    answers = base.lengths.answers
    static = []
    for batch in sorted({4, *sizes}):
        made = base.play(base.static(batch), pads_prompts=True)
        static.append({
            "batch": batch, "requests_per_s": made.throughput_requests_per_s,
            "latency_s": base.static_s(batch, answers.quantile(PERCENT / 100)),
            "longest_s": base.static_s(batch, answers.longest),
        })  # fmt: skip
    # Batches of all multiples of four: seconds between those played are on straight lines.
    every = np.interp(
        np.arange(4, base.slots + 1, 4),
        [one["batch"] for one in static],
        [one["latency_s"] for one in static],
    )
    found = [float(np.quantile(every, quantile)) for quantile in case.quantiles]
    return static, [*found, math.inf]


def bounds(case: Case, task: str, place: int) -> Record:
    """Return static batches, RRA and WAA under one of a task's bounds (Figures 6 and 8)."""
    static, wanted = bounds_of(case, task)
    bound_s = wanted[place]
    kept = [one for one in static if one["longest_s"] <= bound_s]
    best = max(kept, key=lambda one: one["requests_per_s"]) if kept else None
    row: Record = {
        "case": case.name, "task": task, "bound_s": None if math.isinf(bound_s) else bound_s,
        "static": best, "schedules": schedules(case, task, bound_s),
    }  # fmt: skip
    if best is not None and row["schedules"]:
        rates = (one["requests_per_s"] for one in row["schedules"].values())
        row["gain"] = max(rates) / best["requests_per_s"]
    return row


@cache
def schedules(case: Case, task: str, bound_s: float) -> Record:
    """Return what RRA and WAA do within a bound; those that cannot are absent."""
    found = {}
    for policy in POLICIES:
        if policy == "waa" and not case.has_waa:
            continue
        rated = []
        for layout in case.machines.layouts():
            teams = served(case, task, layout)
            plan = None if teams is None else teams.closed_form(bound_s, policy)
            if teams is not None and plan is not None:
                rate = teams.play(plan).throughput_requests_per_s
                rated.append((rate, layout, expected_rate(plan)))
        for _, layout, closed_form in sorted(rated, reverse=True):
            row = row_of(case, task, layout, bound_s, policy)
            if row:
                found[NAMES[policy]] = row | {"closed_form": closed_form}
                break
    return found


def row_of(
    case: Case, task: str, layout: tuple[int, ...], bound_s: float, policy: Searched
) -> Record:
    """Return what a schedule on teams does, as written and played; nothing where there is none."""
    teams = served(case, task, layout)
    assert teams is not None
    plan = teams.scheduled(bound_s, policy)
    if plan is None:
        return {}
    made = teams.play(plan)
    return {
        "layout": layout,
        "requests_per_s": made.throughput_requests_per_s,
        "expected": expected_rate(plan),
        "p99_s": p99_s(made),
        "kept_s": kept_s(made, teams.lengths.answers),
        "slots": plan.workload.batch,
        "variables": variables(plan),
    }


def selected(published: Selected) -> Record:
    """Return the schedule that answers most, played, under a published bound (Table 6)."""
    found = schedules(OPT, "S", math.inf if published.bound_s is None else published.bound_s)
    name = max(found, key=lambda key: found[key]["requests_per_s"], default=None)
    ours = {} if name is None else {"policy": name, **found[name]}
    return {"bound_s": published.bound_s, "ours": ours}


def stage_times() -> list[Record]:
    """Return the mean of a stage's seconds in either phase, and the range of 99 % (Table 7)."""
    rows = []
    for policy, chosen in schedules(OPT, "S", math.inf).items():
        teams = served(OPT, "S", tuple(chosen["layout"]))
        assert teams is not None
        plan = teams.scheduled(math.inf, policy.lower())  # type: ignore[arg-type]
        assert plan is not None
        made = teams.play(plan, with_activities=True)
        row: Record = {"policy": policy}
        for phase in Phase:
            stage = next(one.rank for one in plan.stages if one.computes(phase) and one.num_layers)
            own = [one for one in made.activities if one.stage == stage and one.rows]
            times = [
                sum(one.end_s - one.start_s for one in group)
                for key, group in groupby(own, key=lambda one: one.phase)
                if key is phase
            ]
            if phase is Phase.DECODE or policy == "WAA":
                times = [one.end_s - one.start_s for one in own if one.phase is phase]
            middle = times[len(times) // 10 : -len(times) // 10]  # neither filling nor draining
            low, high = np.quantile(middle, (0.005, 0.995))
            row[phase.value] = {"mean_s": float(np.mean(middle)), "range_s": float(high - low) / 2}
        rows.append(row)
    return rows


def rivals(task: str) -> list[Record]:
    """Return other systems' policies on a team of four, under the task's bounds (Figure 7)."""
    static, wanted = bounds_of(OPT, task)
    base = baseline(OPT, task)
    answers = base.lengths.answers
    mean = base.lengths.prompts.mean + answers.mean
    paged = int(base.slots * base.plan.workload.max_context_tokens / mean)
    found: dict[str, list[Record]] = {"FT, DSI": [
        one | {"kept_s": one["longest_s"]} for one in static
    ]}  # fmt: skip
    for name, most, prefill in (("ORCA", base.slots, 1), ("vLLM", paged, 8)):
        found[name] = []
        for step in range(1, BATCHES + 1):
            slots = max(4, most * step // BATCHES // 4 * 4)
            made = base.play(base.iteration(slots, min(prefill, slots)))
            found[name].append({
                "batch": slots, "requests_per_s": made.throughput_requests_per_s,
                "kept_s": kept_s(made, answers),
            })  # fmt: skip
    rows = []
    for bound_s in wanted:
        row: Record = {"task": task, "bound_s": None if math.isinf(bound_s) else bound_s}
        for name, tried in found.items():
            kept = [one for one in tried if one["kept_s"] <= bound_s]
            row[name] = max((one["requests_per_s"] for one in kept), default=None)
        rows.append(row)
    return rows


def monotone(task: str) -> list[Record]:
    """Return the share of steps that are not monotone, for RRA and WAA (Table 5)."""
    teams = served(OPT, task, (1, 1, 1, 1))
    assert teams is not None
    waa = teams.scheduled(math.inf, "waa")
    assert waa is not None
    spaces = {
        ("B_E", "N_D"): RraSpace(_task(teams, teams.plan)),
        ("B_m", "micro-batches"): WaaSpace(_task(teams, waa)),
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


def _task(teams: Served, plan: Plan) -> ScheduleTask:
    return ScheduleTask(
        costs=PlanCosts(plan, teams.costs),
        num_slots=FEW_SLOTS,
        prompt_tokens=teams.lengths.prompts,
        new_tokens=teams.lengths.answers,
        latency_bound_s=math.inf,
        bound_tokens=teams.lengths.answers.quantile(PERCENT / 100),
    )


@cache
def bounded(policy: Searched) -> tuple[Served, Plan, float] | None:
    """Return task T on the teams that a policy chooses under the second bound, and its plan."""
    _, wanted = bounds_of(OPT, "T")
    chosen = schedules(OPT, "T", wanted[1]).get(NAMES[policy])
    if chosen is None:
        return None
    teams = served(OPT, "T", tuple(chosen["layout"]))
    assert teams is not None
    plan = teams.scheduled(wanted[1], policy)
    assert plan is not None
    return teams, plan, wanted[1]


def shifts(policy: Searched) -> list[Record]:
    """Return a schedule on answers it was not made for, and on its own (Figure 11, SLA a)."""
    changes = [("mean", shift, Lengths(task="T", scale=shift)) for shift in SHIFTS]
    changes += [("deviation", shift, Lengths(task="T", spread=shift)) for shift in SHIFTS]
    changes += [("skewness", skew, Lengths(task="T", skewness=skew)) for skew in SKEWS]
    return [
        {
            "policy": NAMES[policy],
            "what": what,
            "shift": shift,
            **shifted(policy, lengths, replans=policy == "waa"),
        }
        for what, shift, lengths in changes
        if bounded(policy) is not None
    ]


def shifted(policy: Searched, lengths: Lengths, *, replans: bool = True) -> Record:
    """Return the schedule of task T on other answers, and one that is made for these."""
    found = bounded(policy)
    assert found is not None
    teams, plan, bound_s = found
    say(f"T: {policy}, {lengths}")
    usual, old = p99_s(teams.play(plan)), teams.play(plan, lengths.trace())
    row: Record = {"kept": old.throughput_requests_per_s, "p99": p99_s(old) / usual}
    if replans:
        new = teams.scheduled(bound_s, policy, lengths)
        made = None if new is None else teams.play(new, lengths.trace())
        row["replanned"] = None if made is None else made.throughput_requests_per_s
        row["replanned_p99"] = None if made is None else p99_s(made) / usual
    return row


def correlated(policy: Searched) -> list[Record]:
    """Return task T's schedule where long prompts have long answers (Sec. 5.2 and 6)."""
    found = bounded(policy)
    if found is None:
        return []
    teams, plan, bound_s = found
    rows = []
    for correlation in CORRELATIONS:
        trace = paired(teams.lengths, correlation)
        for order in ORDERS:
            made = teams.play(plan, ordered(trace, order))
            rows.append({
                "policy": NAMES[policy], "correlation": correlation, "order": order,
                "requests_per_s": made.throughput_requests_per_s,
                "p99": p99_s(made) / bound_s,
            })  # fmt: skip
    return rows


def paired(lengths: Lengths, correlation: float) -> list[TraceRequest]:
    """Return requests whose prompts and answers follow their laws and are correlated.

    Two normal variables of that correlation choose the quantiles.
    """
    chance, normal = random.Random(SEED), NormalDist()
    found = []
    for _ in range(REQUESTS):
        first, other = chance.gauss(0, 1), chance.gauss(0, 1)
        second = correlation * first + math.sqrt(1 - correlation**2) * other
        found.append(
            TraceRequest(
                arrival_s=0.0,
                prompt_tokens=lengths.prompts.quantile(normal.cdf(first)),
                new_tokens=lengths.answers.quantile(normal.cdf(second)),
            )
        )
    return found


SORTED_RUN = 200


def ordered(trace: Sequence[TraceRequest], order: str) -> list[TraceRequest]:
    """Return requests as drawn, in runs sorted by their prompts, or these in a random order."""
    if order == "random":
        return list(trace)
    runs = [trace[first : first + SORTED_RUN] for first in range(0, len(trace), SORTED_RUN)]
    found = [item for run in runs for item in sorted(run, key=lambda one: one.prompt_tokens)]
    if order == "randomised":
        random.Random(SEED).shuffle(found)
    return found


def loading() -> list[Record]:
    """Return the bytes of GPT-3 and the rates of the paper's loads (Table 4)."""
    rows = []
    for size, (devices, dram_s, ssd_s) in TABLE_4.items():
        weights = VALUE_BYTES * model_of(f"GPT-3 {size}").parameters
        rows.append({
            "model": size, "devices": devices, "weights": weights,
            "dram_bytes_per_s": weights / devices / dram_s,
            "ssd_bytes_per_s": weights / (devices / 8) / ssd_s,
        })  # fmt: skip
    return rows


# --- The report ---


def report(record: Record) -> str:
    """Return the tables of what was played."""
    rows = record["bounds"]
    found = ["## Figures 6 and 8: four bounds, requests/s", _rates(rows), _gains(rows)]
    for name, (title, shown) in TITLES.items():
        if record.get(name):
            found += [f"## {title}", shown(record[name])]
    return "\n\n".join(found)


def layout_name(one: Record) -> str:
    """Return the teams of a schedule: the degree, or the degrees of a node."""
    degrees = one["layout"]
    return "+".join(map(str, degrees)) if len(set(degrees)) > 1 else str(degrees[0])


def _rates(rows: Sequence[Record]) -> str:
    lines = []
    for row in rows:
        found = row["schedules"]
        cells = [
            f"{number(found[name]['requests_per_s'])} (T_P {layout_name(found[name])})"
            if name in found else "-"
            for name in NAMES.values()
        ]  # fmt: skip
        over = [one["kept_s"] / row["bound_s"] for one in found.values() if row["bound_s"]]
        lines.append([row["case"], row["task"], number(row["bound_s"], 1, "none"),
                      number(row["static"] and row["static"]["requests_per_s"]), *cells,
                      times(row.get("gain")), number(max(over, default=None))])  # fmt: skip
    head = ("model", "task", "bound, s", "static", *NAMES.values(), "gain", "kept at")
    return table(head, lines)


def gains(
    rows: Sequence[Record], of: Sequence[tuple[str, str]], *, free: bool = False
) -> list[float]:
    """Return the gains of the cases and tasks of a figure, of all bounds or without one."""
    return [
        row["gain"] for row in rows
        if (row["case"], row["task"]) in set(of) and row.get("gain")
        and (not free or row["bound_s"] is None)
    ]  # fmt: skip


def _gains(rows: Sequence[Record]) -> str:
    lines = []
    for name, of, published in (
        ("Figure 6", FIGURE_6, "2.0x with T5, at most 5.4x"),
        ("Figure 8", FIGURE_8, "3.2x, 1.1x to 15.2x; 2.2x"),
    ):
        every, free = gains(rows, of), gains(rows, of, free=True)
        if every:
            lines.append([
                name, str(len(every)), times(mean(every)),
                f"{times(min(every))} to {times(max(every))}",
                times(mean(free) if free else None), published,
            ])  # fmt: skip
    head = ("gain over static", "of rows above", "mean", "range", "mean, no bound", "published")
    return table(head, lines)


def _selected(rows: Sequence[Record]) -> str:
    lines = []
    published = {one.bound_s: one for one in TABLE_6}
    for row in rows:
        theirs, ours = published[row["bound_s"]], row["ours"]
        name = (
            f"{ours['policy']}: {ours['variables']}, T_P {layout_name(ours)}" if ours else "not met"
        )
        lines.append([
            number(theirs.bound_s, 1, "none"),
            f"{theirs.policy}: {theirs.variables}", number(theirs.latency_s),
            number(theirs.requests_per_s), name, number(ours.get("kept_s")),
            number(ours.get("expected")), number(ours.get("requests_per_s")),
        ])  # fmt: skip
    head = ("bound, s", "paper", "latency, s", "requests/s", "ours", "latency, s", "as written",
            "played, requests/s")  # fmt: skip
    return table(head, lines)


def _stage_times(rows: Sequence[Record]) -> str:
    lines = []
    for row in rows:
        cells = [row["policy"]]
        for phase, theirs in zip(Phase, TABLE_7[row["policy"]], strict=True):
            own = row[phase.value]
            share = 100 * own["range_s"] / own["mean_s"]
            cells += [theirs, f"{own['mean_s']:.3f} (± {share:.1f} %)"]
        lines.append(cells)
    return table(("schedule", "paper: encoder", "ours", "paper: decoder", "ours"), lines)


def _rivals(rows: Sequence[Record]) -> str:
    names = ("FT, DSI", "ORCA", "vLLM")
    lines = [
        [row["task"], number(row["bound_s"], 1, "none"), *(number(row[name]) for name in names)]
        for row in rows
    ]
    return table(("task", "bound, s", *names), lines)


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
         number(row.get("replanned")), number(row["p99"]), number(row.get("replanned_p99"))]
        for row in rows
    ]  # fmt: skip
    head = ("schedule", "changed", "by", "kept, requests/s", "planned anew", "99 %, kept",
            "99 %, anew")  # fmt: skip
    return table(head, lines)


def _correlated(rows: Sequence[Record]) -> str:
    lines = []
    for policy in NAMES.values():
        for correlation in CORRELATIONS:
            own = {row["order"]: row for row in rows
                   if (row["policy"], row["correlation"]) == (policy, correlation)}  # fmt: skip
            if own:
                cells = (f"{number(one['requests_per_s'])} ({number(one['p99'])})"
                         for one in (own[order] for order in ORDERS))  # fmt: skip
                lines.append([policy, f"{correlation:g}", *cells])
    head = ("schedule", "correlation", *(f"{order}, requests/s (99 % / bound)" for order in ORDERS))
    return table(head, lines)


def _loading(rows: Sequence[Record]) -> str:
    lines = []
    for row in rows:
        _, dram_s, ssd_s = TABLE_4[row["model"]]
        lines.append([
            row["model"], str(row["devices"]), number(row["weights"] / 1e9, 0), number(dram_s, 1),
            number(row["dram_bytes_per_s"] / 1e9, 1), number(ssd_s, 1),
            number(row["ssd_bytes_per_s"] / 1e9, 1),
        ])  # fmt: skip
    head = ("model", "GPUs", "weights, GB", "paper: from DRAM, s", "GB/s a GPU", "from SSD, s",
            "GB/s a node")  # fmt: skip
    return table(head, lines)


TITLES: dict[str, tuple[str, Callable[[Sequence[Record]], str]]] = {
    "table 6": ("Table 6: OPT-13B, task S, under the published bounds", _selected),
    "table 7": ("Table 7: seconds of a stage, OPT-13B, task S, no bound", _stage_times),
    "figure 7": ("Figure 7: policies on a team of four A40, OPT-13B, requests/s", _rivals),
    "table 5": ("Table 5: steps that are not monotone, percent (latency, throughput)", _monotone),
    "figure 11": (
        "Figure 11: answers differ from those planned for (task T, bound at 30 %)", _shifts
    ),
    "correlated": ("Correlated lengths (task T, bound at 30 %)", _correlated),
    "table 4": ("Table 4: loads of GPT-3", _loading),
}  # fmt: skip


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
