"""The search by integer programs: its start, and the validity of its bound."""

from dataclasses import replace

import numpy as np
import pytest

from llmpq.assigner.exact.search import find_exact
from llmpq.assigner.heuristics.transfer import find_transfer
from llmpq.assigner.milp import search
from llmpq.assigner.milp.ilp import IlpOptions, IlpResult, solve_ilp
from llmpq.assigner.milp.search import find_plan
from llmpq.assigner.objective import AssignmentProblem
from llmpq.assigner.request import PlanningTask, PlanRequest, build_task, silent
from llmpq.spec import catalog
from llmpq.spec.cluster import Cluster, DeviceGroup, Node
from llmpq.spec.workload import Workload


@pytest.fixture
def uneven_task() -> PlanningTask:
    """Return a small task in which no two layers degrade alike."""
    cluster = Cluster(
        name="two",
        nodes=(
            Node(name="old", devices=(DeviceGroup(type="T4-16G", count=2),)),
            Node(name="new", devices=(DeviceGroup(type="V100-32G", count=1),)),
        ),
    )
    request = PlanRequest(
        model=catalog.model("facebook/opt-30b"),
        cluster=cluster,
        workload=Workload(batch=8, prompt_tokens=128, new_tokens=20),
        dtype="float16",
        kv_bits=16,
        solver="highs",
        gap=1e-4,
    )
    task = build_task(request)
    noise = np.random.default_rng(7).uniform(0.3, 1.7, (len(task.kinds), 1))
    omega = task.omega * noise
    return replace(task, omega=omega / omega[:, task.request.bits.index(4)].sum())


def test_search_starts_from_the_plan_of_bitwidth_transfer(
    uneven_task: PlanningTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    cutoffs: list[float] = []

    def watched(problem: AssignmentProblem, options: IlpOptions) -> IlpResult:
        cutoffs.append(options.cutoff_s)
        return solve_ilp(problem, options)

    monkeypatch.setattr(search, "solve_ilp", watched)
    started = find_transfer(uneven_task, silent).evaluation.objective_s
    find_plan(uneven_task, silent)
    assert cutoffs
    assert max(cutoffs) <= started


def test_uneven_search_is_within_its_gap_of_the_exact_value(uneven_task: PlanningTask) -> None:
    exact_s = find_exact(
        replace(uneven_task, request=replace(uneven_task.request, gap=0.0)), silent
    ).evaluation.objective_s
    found = find_plan(uneven_task, silent)
    assert found.status == "optimal"
    assert found.bound_s is not None
    assert found.bound_s <= exact_s * (1 + 1e-9)
    assert exact_s * (1 - 1e-9) <= found.evaluation.objective_s <= exact_s * (1 + 1e-4)


def test_search_without_time_for_programs_has_a_valid_gap(
    uneven_task: PlanningTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    def idle(problem: AssignmentProblem, options: IlpOptions) -> IlpResult:
        del problem, options
        return IlpResult(status="unknown", assignment=None, evaluation=None, bound_s=-np.inf)

    monkeypatch.setattr(search, "solve_ilp", idle)
    found = find_plan(uneven_task, silent)
    assert found.status == "feasible"
    assert found.bound_s is not None
    assert found.bound_s == pytest.approx(uneven_task.bounds(uneven_task.theta_s).min())


def test_the_old_name_cbc_means_highs(uneven_task: PlanningTask) -> None:
    assert replace(uneven_task.request, solver="cbc").program_solver == "highs"
