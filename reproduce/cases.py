"""The paper's cases as planning requests, their plans, and where the plans are kept.

A plan is made once for each process. A kept file is touched only when its plan
changes: a rerun that merely took another number of seconds leaves it alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from llmpq.assigner import METHODS, PlanRequest, make_plan
from llmpq.errors import InfeasibleError, SpecError
from llmpq.spec import catalog
from llmpq.spec.cluster import load_cluster
from llmpq.spec.plan import Plan, read_plan, write_plan
from llmpq.spec.workload import load_workload
from reproduce import paper
from reproduce.output import say

ROOT = Path(__file__).resolve().parents[1]
STRATEGIES = ROOT / "strategies"
IMAGES = ROOT / "docs" / "images"
LONG, SHORT = "s512-n100-b32", "s128-n200-b32"
"""Workloads: 32 prompts of 512 tokens and 100 new ones each; of 128 tokens and 200 (Sec. 6.6)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One of the paper's clusters with its model, under one of its workloads."""

    cluster: int
    workload: str = LONG

    @property
    def cluster_file(self) -> str:
        """Path of the cluster file, from the repository's root."""
        return f"inputs/clusters/paper-{self.cluster:02d}.json"

    @property
    def workload_file(self) -> str:
        """Path of the workload file, from the repository's root."""
        return f"inputs/workloads/{self.workload}.json"

    @property
    def model_name(self) -> str:
        """Catalogue name of the model."""
        return paper.MODELS[self.cluster]

    def request(self, **options: Any) -> PlanRequest:
        """Return the request for a plan, in float16 and with the default sensitivity."""
        return PlanRequest(
            model=catalog.model(self.model_name),
            cluster=load_cluster(ROOT / self.cluster_file),
            workload=load_workload(ROOT / self.workload_file),
            dtype="float16",
            kv_bits=16,
            # The paper's numbers rest on the catalogue's rooflines, whatever tables are installed.
            latency="roofline",
            **options,
        )

    def command(self, method: str) -> str:
        """Return the command that makes the plan which is kept."""
        return (
            f"llmpq-algo --model {self.model_name} --dtype float16 --cluster {self.cluster_file} "
            f"--workload {self.workload_file} --method {method}"
        )

    def strategy(self, method: str) -> Path:
        """Return where that plan is kept."""
        model = self.model_name.rpartition("/")[2]
        return STRATEGIES / f"{model}__paper-{self.cluster:02d}__{self.workload}__{method}.json"


@cache
def plan_of(case: Case, method: str) -> Plan | None:
    """Return a case's plan by the defaults of a method, ``None`` when there is none.

    A method that is not in the registry has none either; see ``has_method``.
    """
    if not has_method(method):
        return None
    say(f"cluster {case.cluster}, {case.workload}: {method}")
    try:
        return make_plan(case.request(), method, command=case.command(method))
    except InfeasibleError:
        return None


def has_method(method: str) -> bool:
    """Tell whether the planner knows a method."""
    return method in METHODS


def keep(case: Case, method: str) -> Plan | None:
    """Return a case's plan, written to its file if that holds another one or none."""
    plan = plan_of(case, method)
    path = case.strategy(method)
    if plan is None:
        path.unlink(missing_ok=True)
    elif not _holds(path, plan):
        write_plan(path, plan)
    return plan


def _holds(path: Path, plan: Plan) -> bool:
    """Tell whether a file holds that plan, whatever seconds its search took."""
    if not path.exists():
        return False
    try:
        kept = read_plan(path)
    except SpecError:
        return False
    return replace(kept, search=replace(kept.search, planning_s=plan.search.planning_s)) == plan
