"""FlexGen's rows: its published seconds, policies, and the linear program of its authors."""

import json
import sys
from dataclasses import replace
from itertools import product
from math import log2
from pathlib import Path

import highspy
import numpy as np
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from llmpq.units import GIB  # noqa: E402
from reproduce import flexgen as paper  # noqa: E402
from reproduce.run_all import LONG, SHORT, Case  # noqa: E402

RECORD = json.loads((REPOSITORY / "benchmarks/results/flexgen.json").read_text())["record"]["rows"]
ON_GPU = np.array([[1.0, 0, 0, 1, 0, 0]])


def test_there_are_the_published_rows():
    rows = [
        row for published, _ in paper.TABLES.values() for both in published.values() for row in both
    ]
    assert (len(rows), rows.count(None)) == (22, 1)


def test_policies_are_all_shares_of_whole_steps():
    found = paper.shares()
    assert len(found) == 231**2
    assert found.min() == 0
    assert found[:, :3].sum(1) == pytest.approx(1)
    assert found[:, 3:].sum(1) == pytest.approx(1)


@pytest.mark.parametrize("cluster", [1, 6])
def test_all_on_gpus_is_a_pipeline_of_their_layers(cluster):
    problem = paper.problem_of(Case(cluster=cluster, workload=LONG), is_int8=False)
    stages = [replace(stage, gpu_bytes=1e15) for stage in problem.stages]
    (found,) = paper.seconds_of(replace(problem, stages=tuple(stages)), ON_GPU)
    prefill = [stage.layers * stage.prefill_s for stage in stages]
    decode = [stage.layers * (stage.decode_s + stage.attention_s) for stage in stages]
    expected = sum(prefill) + (len(stages) - 1) * max(prefill)
    assert found == pytest.approx(expected + 99 * max(len(stages) * max(decode), sum(decode)))
    assert sum(stage.layers for stage in stages) == problem.model.num_layers


def linear_program(problem):
    """Return the least seconds by the program of FlexGen's authors, for one GPU, of any shares."""
    (stage,) = problem.stages
    ((_, host_bytes),) = problem.hosts
    load, rows, weights = problem.workload, problem.rows, problem.weight_bytes
    cache = 4 * problem.model.hidden_size
    context = cache * rows * (load.prompt_tokens + load.new_tokens / 2)
    program = highspy.Highs()
    program.silent()
    w, c = ([program.addVariable(lb=0) for _ in range(3)] for _ in range(2))
    first, later, slowest = (program.addVariable(lb=0) for _ in range(3))
    from_host = weights / stage.link_bytes_per_s * (w[1] + w[2])
    from_disk = weights / (0.473 * GIB) * w[2]
    prompts = cache * rows * (load.prompt_tokens + 1) / GIB
    rate = 12.3e9 * (1 - 0.0328 * log2(64 / rows))
    on_host = context / rate * (c[1] + c[2])
    caches = cache * load.batch * (load.prompt_tokens + load.new_tokens)
    hidden, prompt = problem.model.hidden_size, load.prompt_tokens
    kept = stage.layers * (weights * w[0] + caches * c[0]) + 2 * weights * (1 - w[0])
    worked = rows * (26 * prompt * hidden + 2 * (hidden // 128) * prompt**2)
    read = 4 * rows * (prompt + load.new_tokens) * hidden * c[0]
    held = stage.layers * (weights * w[1] + caches * c[1]) + 2 * weights * w[2]
    for constraint in (
        w[0] + w[1] + w[2] == 1,
        c[0] + c[1] + c[2] == 1,
        first >= from_host + from_disk,
        first >= prompts / 0.97 * (c[1] + c[2]) + prompts / 0.746 * c[2],
        first >= stage.prefill_s,
        slowest >= stage.decode_s + stage.attention_s * c[0] + on_host,
        slowest >= from_disk * (1 / 0.95) + context / (0.473 * GIB) * c[2],
        slowest >= cache * rows / (2.015 * GIB) * c[2],
        later == from_host + slowest,
        kept * 1e-9 + worked * 1e-9 <= stage.gpu_bytes * 1e-9,
        kept * 1e-9 + read * 1e-9 <= stage.gpu_bytes * 1e-9,
        held * 1e-9 <= host_bytes * 1e-9,
    ):
        program.addConstr(constraint)
    program.minimize(stage.layers * (first + (load.new_tokens - 1) * later))
    assert program.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return program.getInfo().objective_function_value


@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize(
    ("case", "host_bytes"),
    [
        (Case(cluster=1, workload=LONG), None),
        (Case(cluster=1, workload=SHORT), None),
        (Case(cluster=2, workload=LONG), None),
        (Case(cluster=1, workload=LONG), 9e9),  # weights or caches go to the disk
    ],
)
def test_the_best_policy_is_that_of_the_linear_program(case, host_bytes, is_int8):
    problem = paper.problem_of(case, is_int8=is_int8)
    if host_bytes is not None:
        stages = tuple(replace(stage, gpu_bytes=2e10) for stage in problem.stages)
        problem = replace(problem, stages=stages, hosts=(((0,), host_bytes),))
    least = linear_program(problem)
    policies = paper.shares()
    seconds = paper.seconds_of(problem, policies)
    assert least * (1 - 1e-6) <= seconds.min() <= 1.25 * least  # steps of 5 %
    fine = np.arange(-4, 5) / 100
    moves = np.array([(a, b, -a - b, c, d, -c - d) for a, b, c, d in product(fine, repeat=4)])
    best = policies[seconds.argmin()]
    for _ in range(9):  # steps of 1 %
        near = best + moves
        near = near[(near > -1e-9).all(1)]
        seconds = paper.seconds_of(problem, near)
        best = near[seconds.argmin()]
    assert least * (1 - 1e-6) <= seconds.min() <= 1.05 * least


def test_without_memory_nothing_fits():
    problem = paper.problem_of(Case(cluster=9, workload=LONG), is_int8=True)
    hosts = tuple((own, 1e10) for own, _ in problem.hosts)
    stages = tuple(replace(stage, gpu_bytes=5e9) for stage in problem.stages)
    found = paper.seconds_of(replace(problem, stages=stages, hosts=hosts), paper.shares())
    assert np.isfinite(found).any()  # the disk takes it
    small = tuple(replace(stage, gpu_bytes=1e9) for stage in problem.stages)
    found = paper.seconds_of(replace(problem, stages=small, hosts=hosts), paper.shares())
    assert np.isinf(found).all()


@pytest.mark.parametrize("at", [0, 5, 11])
def test_recorded_rows_are_those_of_the_code(at):
    row = RECORD[at]
    found = paper.priced(
        Case(cluster=row["cluster"], workload=row["workload"]), is_int8=row["scheme"] == paper.INT8
    )
    assert found["latency_s"] == pytest.approx(row["priced"]["latency_s"], rel=1e-5)
    assert found["percent"] == row["priced"]["percent"]
