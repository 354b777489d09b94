"""A task of the policies' benchmark: its requests, simulated and run under any schedule."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from workbench import command, write_prompts

from llmpq.assigner.schedules.plan import (
    ScheduleRequest,
    best_of_policies,
    safety_factor,
    simulated,
    with_schedule,
)
from llmpq.batching import PipelineShape, make_policy, percentile
from llmpq.batching.length import Prediction, make_predictor
from llmpq.batching.policies.multibin import quantile_boundaries
from llmpq.costmodel import ClusterCosts, build_costs
from llmpq.sim import SimReport, simulate
from llmpq.sim.costs import PlanCosts
from llmpq.spec.catalog import resolve_model
from llmpq.spec.plan import MicroBatching, Plan, Schedule, default_schedule, read_plan, write_plan
from llmpq.spec.precision import Phase
from llmpq.spec.workload import LengthDistribution, TraceRequest, draw_trace, truncated_normal

SLOTS, STAGES, PROMPT, NEW = 32, 2, 32, 160
BITS = 16
PREFILL, DECODE = 8, SLOTS // STAGES
TASKS = {
    "S": (256, 252, 512, 32, 13, 80),
    "T": (128, 81, 256, 128, 68, 320),
    "C1": (256, 115, 512, 64, 30, 160),
}
"""Mean, standard deviation and longest of prompts and answers."""
ANSWERS_BY = {"S": 1, "T": 2, "C1": 1}
REQUESTS = {"S": 640, "T": 160, "C1": 200}
"""Slots are filled twenty times with the shortest answers, five with others. While the last end,
slots are empty: 5 % of a run of 320 of S under schedules that fill them, nothing of static batches.
"""
POLICIES = ("static", "hybrid", "iteration", "rra", "waa", "multibin")
BOUND_BATCHES = (24, 16)
"""Static batches whose own latency is a bound; a batch of all slots is no bound."""
BINS, BIN_BATCH, BIN_TASK = 8, 16, "T"
BIN_REQUESTS = 256
"""Eight bins in batches of 16: with 160 requests most are not full, and nothing is gained."""
BIN_RUNS = {"bins1": (1, 0.0), "bins8": (BINS, 0.0), "noisy8": (BINS, 0.3)}
CONFIDENCE = 0.95
"""How sure a bound is to be kept, of what the table knows of itself: the default of llmpq-algo."""


class Bench:
    """One task: its requests, simulated and run under any schedule."""

    def __init__(self, folder: Path, task: str) -> None:
        self.plan = read_plan(folder / "plan.json")
        self.prompts, self.answers = laws_of(task)
        self.trace = draw_trace(REQUESTS[task], self.prompts, self.answers, seed=8)
        self.many = draw_trace(BIN_REQUESTS, self.prompts, self.answers, seed=8)
        self.folder = folder / "runs" / task
        self.folder.mkdir(parents=True, exist_ok=True)
        self.root = folder
        model, _ = resolve_model(str(self.root / "model"))
        (node,) = self.plan.cluster.nodes
        group = replace(node.devices[0], profile=str(self.root / "table.csv"))
        cluster = replace(self.plan.cluster, nodes=(replace(node, devices=(group,)),))
        self.costs: ClusterCosts = build_costs(
            model, cluster, dtype="bfloat16", kv_bits=16, profile_dir=self.root / "links"
        )

    def simulate(self, name: str) -> SimReport:
        """Play the requests under the schedule that a run is called for."""
        plan, error = self.plan_of(name), BIN_RUNS.get(name, (0, 0.0))[1]
        return played(plan, self.costs, self.many if name in BIN_RUNS else self.trace, error)

    def plan_of(self, name: str) -> Plan:
        """Return what a run is called for; what is searched is searched once and kept."""
        file = self.folder / f"plan-{name}.json"
        if not file.exists():
            write_plan(file, self._made(name))
        return read_plan(file)

    def _made(self, name: str) -> Plan:
        bound_s = self.bound_s(name)
        if bound_s is not None:
            wanted = replace(
                self._wanted(), latency_bound_s=bound_s, sla="queries", confidence=CONFIDENCE
            )
            return best_of_policies(self.plan, self.costs, wanted)
        if name in ("rra", "waa"):
            return with_schedule(self.plan, self.costs, self._wanted(), name)  # type: ignore[arg-type]
        batch = SLOTS
        answers = [item.new_tokens for item in self.trace]
        if name in BIN_RUNS:
            batch = BIN_BATCH
            edges = quantile_boundaries(answers, BIN_RUNS[name][0])
            schedule = Schedule(policy="multibin", decode_batch=batch, boundaries=edges)
        elif name == "multibin":
            edges = quantile_boundaries(answers, 2)
            schedule = Schedule(policy="multibin", decode_batch=batch, boundaries=edges)
        elif name.startswith("static"):
            batch = int(name.removeprefix("static") or SLOTS)
            schedule = Schedule(policy="static", decode_batch=batch)
        else:
            schedule = default_schedule(name, SLOTS)  # type: ignore[arg-type]
        half = batch // STAGES
        sizes = MicroBatching(prefill=min(PREFILL, half), decode=half)
        return replace(self.plan, schedule=schedule, micro_batching=sizes)

    def bound_s(self, name: str) -> float | None:
        """Return the bound of a run, set once: what static batches of its number surely keep.

        It is what 99 % of the requests take when played, times the guard.
        """
        batch = name.removeprefix("bound")
        if batch == name:
            return None
        file = self.folder / f"bound{batch}.json"
        if not file.exists():
            plan, wanted = self.plan_of(f"static{batch}"), self._wanted()
            played = simulated(plan, self.costs, wanted)
            slow_s = percentile([record.service_s for record in played.requests], 99)
            guard = safety_factor(plan, self.costs, CONFIDENCE)
            file.write_text(json.dumps({"bound_s": guard * slow_s, "guard": guard}))
        return float(json.loads(file.read_text())["bound_s"])

    def _wanted(self) -> ScheduleRequest:
        return ScheduleRequest(prompt_tokens=self.prompts, new_tokens=self.answers)

    def run(self, name: str, turn: int) -> None:
        """Run what is called for."""
        self.plan_of(name)
        prompts = self.folder / "prompts.jsonl"
        trace = self.many if name in BIN_RUNS else self.trace
        write_prompts(prompts, [(item.prompt_tokens, item.new_tokens) for item in trace])
        strategy = self.folder / f"plan-{name}.json"
        found = run_plan(strategy, prompts, BIN_RUNS.get(name, (0, 0.0))[1])
        counts = {key: found[key] for key in ("generated_tokens", "requests")}
        row = figures(found["per_request"] | counts, found["elapsed_s"])
        text = json.dumps({**row, "stages": found["stages"]}, indent=2)
        (self.folder / f"{name}-{turn}.json").write_text(text + "\n")
        print(
            self.folder.name, name, turn, f"{row['tokens_per_s']:.1f} tokens/s, 99 % in "
            f"{row['service_p99_s']:.2f} s", flush=True,
        )  # fmt: skip


def played(
    plan: Plan, costs: ClusterCosts, trace: Sequence[TraceRequest], error: float = 0.0
) -> SimReport:
    """Play requests under a plan's schedule, with lengths predicted with an error."""
    assert plan.schedule is not None
    shape = PipelineShape(
        micro_batching=plan.micro_batching,
        num_slots=SLOTS,
        num_stages=len(plan.path(Phase.DECODE)),
    )
    answers = [item.new_tokens for item in trace]
    prompts = [item.prompt_tokens for item in trace]
    predictor = make_predictor(Prediction(predictor="noisy", error=error), prompts, answers)
    policy = make_policy(plan.schedule, shape)
    prices = PlanCosts(plan, costs)
    return simulate(prices, policy, trace, num_slots=SLOTS, predictor=predictor)


def laws_of(task: str) -> tuple[LengthDistribution, LengthDistribution]:
    """Return the scaled laws of a task's prompts and answers."""
    mean_in, std_in, most_in, mean_out, std_out, most_out = TASKS[task]
    by = ANSWERS_BY[task]
    return (
        truncated_normal(mean_in / 16, std_in / 16, most_in // 16),
        truncated_normal(mean_out / by, std_out / by, most_out // by),
    )


def run_plan(strategy: Path, prompts: Path, error: float = 0.0) -> dict[str, Any]:
    """Return the report of a run."""
    answers = prompts.with_name("answers.jsonl")
    answers.unlink(missing_ok=True)
    return dict(json.loads(command([
        "llmpq-dist", "--strat_file_name", str(strategy), "--prompts", str(prompts),
        "--output", str(answers), "--predictor", "noisy", "--predictor_error", str(error),
        "--json",
    ])))  # fmt: skip


def bound_runs() -> Iterator[str]:
    """Yield the runs under a bound, each behind the static batches that it is held against."""
    for batch in BOUND_BATCHES:
        yield f"static{batch}"
        yield f"bound{batch}"


def figures(found: dict[str, Any], seconds: float) -> dict[str, float]:
    """Return what is compared."""
    return {
        "seconds": seconds,
        "tokens_per_s": found["generated_tokens"] / seconds,
        "requests_per_s": found["requests"] / seconds,
        "latency_s": found["latency_s"]["mean"],
        "service_s": found["service_s"]["mean"],
        "service_p99_s": found["service_s"]["p99"],
        "first_token_s": found["time_to_first_token_s"]["mean"],
    }


def words(plan: Plan) -> str:
    """Return a schedule and its micro-batches in short."""
    schedule, micro = plan.schedule, plan.micro_batching
    assert schedule is not None
    sizes = (schedule.encode_batch, schedule.decode_batch, schedule.decode_iterations)
    text = "/".join("-" if size is None else str(size) for size in sizes)
    return f"{schedule.policy} {text} by {micro.prefill}, {micro.decode}"
