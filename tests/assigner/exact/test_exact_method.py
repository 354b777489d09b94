"""The exact search as a planning method, on the paper's clusters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llmpq.assigner.exact import search
from llmpq.assigner.exact.native import NotCoveredError
from llmpq.assigner.milp.search import find_plan
from llmpq.assigner.objective import evaluate
from llmpq.assigner.planner import plan_task
from llmpq.assigner.request import PlanningTask, PlanRequest, build_task, silent
from llmpq.errors import InfeasibleError
from llmpq.spec import catalog
from llmpq.spec.cluster import load_cluster
from llmpq.spec.workload import Workload

CLUSTERS = Path(__file__).parents[3] / "inputs" / "clusters"


def task_of(model: str, cluster: int, *, batch: int = 8, **fields: object) -> PlanningTask:
    request = PlanRequest(
        model=catalog.model(model),
        cluster=load_cluster(CLUSTERS / f"paper-{cluster:02d}.json"),
        workload=Workload(batch=batch, prompt_tokens=512, new_tokens=100),
        dtype="float16",
        kv_bits=16,
        gap=0.0,
    )
    return build_task(replace(request, **fields))


def test_exact_method_equals_the_integer_programs() -> None:
    task = task_of("facebook/opt-30b", 3, batch=2)
    exact = search.find_exact(task, silent)
    program = find_plan(task, silent)
    assert exact.evaluation.objective_s == pytest.approx(program.evaluation.objective_s, rel=1e-6)
    assert exact.status == "optimal"
    assert evaluate(exact.problem, exact.assignment) == exact.evaluation


@pytest.mark.parametrize("cluster", [3, 5, 7])
def test_exact_method_is_certified_for_all_interleavings(cluster: int) -> None:
    model = {3: "facebook/opt-30b", 5: "facebook/opt-66b", 7: "bigscience/bloom"}[cluster]
    blocks = search.find_exact(task_of(model, cluster), silent)
    free = search.find_exact(task_of(model, cluster, orders="all"), silent)
    assert free.bound_s is not None
    assert free.bound_s >= free.evaluation.objective_s * (1 - 1e-6)
    assert free.evaluation.objective_s <= blocks.evaluation.objective_s * (1 + 1e-9)


def test_integer_programs_replace_an_unsupported_exact_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise NotCoveredError("on purpose")

    task = task_of("facebook/opt-13b", 1, batch=2)
    want = search.find_exact(task, silent)
    monkeypatch.setattr(search, "solve_exact", refuse)
    got = search.find_exact(task, silent)
    assert (want.solver, got.solver) == ("exact", "highs")
    assert got.evaluation.objective_s == pytest.approx(want.evaluation.objective_s, rel=1e-6)


def test_a_model_that_does_not_fit_is_explained() -> None:
    with pytest.raises(InfeasibleError, match="smallest single fixes"):
        plan_task(task_of("facebook/opt-66b", 1), "llmpq")
