"""The paper's clusters: each file is readable and has a plan that passes the certificate."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.certificate import certify

from llmpq.assigner import PlanRequest, make_plan
from llmpq.assigner.request import omega_of
from llmpq.costmodel import build_costs
from llmpq.spec import catalog
from llmpq.spec.cluster import load_cluster
from llmpq.spec.precision import BITS
from llmpq.spec.workload import Workload

CLUSTERS = Path(__file__).parents[2] / "inputs" / "clusters"
OPT = "facebook/opt-{}"
MODELS = {
    1: OPT.format("13b"),
    2: OPT.format("13b"),
    3: OPT.format("30b"),
    4: OPT.format("30b"),
    5: OPT.format("66b"),
    6: OPT.format("66b"),
    7: "bigscience/bloom",
    8: "bigscience/bloom",
    9: OPT.format("30b"),
    10: OPT.format("66b"),
    11: "bigscience/bloom",
}


@pytest.mark.parametrize(
    "number", [pytest.param(i, marks=pytest.mark.slow if i == 7 else ()) for i in MODELS]
)
def test_every_cluster_of_the_paper_has_a_certified_plan(number: int) -> None:
    request = PlanRequest(
        model=catalog.model(MODELS[number]),
        cluster=load_cluster(CLUSTERS / f"paper-{number:02d}.json"),
        workload=Workload(batch=32, prompt_tokens=512, new_tokens=100),
        dtype="float16",
        kv_bits=16,
    )
    plan = make_plan(request)
    costs = build_costs(request.model, request.cluster, dtype="float16", kv_bits=16)
    omega = omega_of(request)
    certify(plan, costs, lambda layer, width: float(omega[layer, BITS.index(width)]))
    assert plan.search.status == "optimal"
    assert plan.search.gap <= 1e-3 + 1e-9
