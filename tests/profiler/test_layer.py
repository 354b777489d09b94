"""The layer profiler times every requested point on the runtime's own stages."""

from __future__ import annotations

import logging
import random
import time
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from llmpq.costmodel.tables.profiles import StageOverhead
from llmpq.errors import SpecError
from llmpq.profiler import layer as layer_module
from llmpq.profiler.bench import MASTER_STEPS, Bench, LayerJob, Timing, Trial, is_short
from llmpq.profiler.grid import Shape, product_grid
from llmpq.profiler.journal import Journal
from llmpq.profiler.layer import profile_layer
from llmpq.spec.precision import Phase
from llmpq.spec.tables import MASTER_BITS

SHAPES = product_grid((1, 3), (4, 9), (5,), prefill_tokens=20)


def always(seconds):
    """Return a bench's ``run`` on which everything takes equally long."""

    def run(_, trial):
        return [Timing(trial=trial, seconds=seconds)]

    return run


@pytest.fixture(scope="module")
def job(tiny_model):
    torch.set_num_threads(1)
    return LayerJob(
        model_dir=tiny_model("llama"),
        bits=(16, 4),
        shapes=SHAPES,
        dtype=torch.float32,
        device=torch.device("cpu"),
        layers=2,
        budget_s=0.05,
    )


def test_profile_layer_times_every_point_at_every_bitwidth_and_the_master(job):
    shares = []
    table = profile_layer(job, shares.append)
    measured = {(s.phase, s.bits, s.batch, s.tokens) for s in table.samples}
    layers = {(s.phase, bits, s.batch, s.tokens) for s in SHAPES for bits in (16, 4)}
    prompts = {(s.phase, 0, s.batch, s.tokens) for s in SHAPES if s.phase is Phase.PREFILL}
    # A decode step of the master depends on its rows only: its context is given as 1.
    decode = {(Phase.DECODE, MASTER_BITS, batch, 1) for batch in (1, 3)}
    assert measured == layers | prompts | decode
    assert all(sample.seconds > 0 for sample in table.samples)
    assert shares == sorted(shares)
    assert 0 < shares[-1] <= 1


def test_decode_with_the_head_at_other_bits_is_timed_too(job):
    table = profile_layer(replace(job, bits=(16,), head_bits=(8, 4)))
    found = {(s.phase, s.bits, s.batch, s.tokens) for s in table.samples if s.bits < MASTER_BITS}
    assert found == {(Phase.DECODE, bits, batch, 1) for bits in (-8, -4) for batch in (1, 3)}


def test_the_provenance_states_dtype_rounds_spread_and_stage_overhead(job):
    provenance = dict(profile_layer(job).provenance)
    assert provenance["dtype"] == "float32"
    assert int(provenance["rounds"].split()[0]) >= 3
    assert provenance["noise"].endswith("median interquartile range over median")
    assert StageOverhead.of("table", provenance).decode >= 0


def test_the_time_of_a_layer_is_separated_from_the_stage_overhead(job, monkeypatch):
    def run(self, trial):
        seconds = 7.0 if trial.bits == MASTER_BITS else 0.5 + 2.0 * trial.layers
        return [Timing(trial=trial, seconds=seconds)]

    monkeypatch.setattr(Bench, "run", run)
    table = profile_layer(job)
    assert StageOverhead.of("table", dict(table.provenance)) == StageOverhead(
        prefill=0.5, decode=0.5
    )
    assert {s.seconds for s in table.samples if s.bits} == {2.0}
    assert {s.seconds for s in table.samples if not s.bits} == {7.0}


def test_the_first_run_of_a_burst_counts_as_stage_overhead(job, monkeypatch):
    state = {"is_first": False}
    run_trial = Bench.run

    def run(self, trial):
        state["is_first"] = True
        return run_trial(self, trial)

    def run_once(_, trial):
        first_s = 0.25 if state["is_first"] and is_short(trial) else 0.0
        state["is_first"] = False
        return first_s + 2.0 * trial.layers

    monkeypatch.setattr(Bench, "run", run)
    monkeypatch.setattr(Bench, "_run_once", run_once)
    table = profile_layer(job)
    stage = StageOverhead.of("table", dict(table.provenance))
    assert (stage.prefill, stage.decode) == (pytest.approx(0.25), pytest.approx(0.25))
    assert [s.seconds for s in table.samples if s.bits] == pytest.approx([2.0] * 2 * len(SHAPES))


def test_reading_other_memory_is_not_part_of_the_master_s_time(job, monkeypatch):
    bench = Bench(job)
    trial = bench.trials()[-1][0]
    read_s = 0.2

    def slow(*_):
        time.sleep(read_s)

    monkeypatch.setattr(torch, "mv", slow)
    timings = bench.run(trial)
    assert len(timings) == MASTER_STEPS
    assert all(0 < timing.seconds < read_s for timing in timings)


def test_no_two_trials_of_one_bitwidth_follow_each_other():
    shape = SHAPES[0]
    groups = [[Trial(shape=shape, bits=b, layers=n) for n in range(4)] for b in (0, 4, 16)]
    order = layer_module._interleaved(groups, random.Random(0))
    assert sorted(order, key=str) == sorted([t for group in groups for t in group], key=str)
    assert all(one.bits != other.bits for one, other in pairwise(order))


def test_a_finished_point_is_not_timed_again(job, monkeypatch):
    calls = []

    def run(self, trial):
        calls.append(trial)
        self.first_run_s[trial.shape.phase].append(0.0)
        return [Timing(trial=trial, seconds=1.0)]

    monkeypatch.setattr(Bench, "run", run)
    profile_layer(replace(job, budget_s=30.0))  # ends at once: nothing varies
    most = max(calls.count(trial) for trial in calls)
    # One warms up; a short trial finishes its last round.
    assert (
        layer_module.FINISHED_ROUNDS < most <= layer_module.FINISHED_ROUNDS + layer_module.REPEATS
    )


def test_a_table_holds_medians_and_a_noisy_host_gives_a_warning(job, monkeypatch, caplog):
    seconds = [1.0, 1.0, 1.5]

    def run(_, trial):
        seconds.append(seconds.pop(0))
        return [Timing(trial=trial, seconds=seconds[0])]

    monkeypatch.setattr(Bench, "run", run)
    monkeypatch.setattr(
        layer_module, "_interleaved", lambda groups, _: [t for g in groups for t in g]
    )
    with caplog.at_level(logging.WARNING):
        table = profile_layer(replace(job, layers=1, budget_s=0.5))
    layers = [one.seconds for one in table.samples if one.bits]
    assert layers == [1.0] * len(layers)
    assert dict(table.provenance)["noise"].startswith("50.0%")
    assert "noisy host" in caplog.text


def test_a_quiet_host_gives_no_warning(job, monkeypatch, caplog):
    monkeypatch.setattr(Bench, "run", always(1.0))
    table = profile_layer(job)
    assert "noisy host" not in caplog.text
    assert dict(table.provenance)["noise"].startswith("0.0%")


def test_an_interrupted_run_is_resumed_from_its_journal(job, tmp_path, monkeypatch):
    monkeypatch.setattr(Bench, "run", always(1.0))
    with Journal(tmp_path / "t.part", (("model", "m"),), resume=False) as journal:
        profile_layer(job, journal=journal)
    monkeypatch.setattr(Bench, "run", always(9.0))
    with Journal(tmp_path / "t.part", (("model", "m"),), resume=True) as journal:
        table = profile_layer(replace(job, budget_s=1e-9), journal=journal)
    assert {sample.seconds for sample in table.samples if not sample.bits} == {1.0}


def test_more_tokens_than_the_model_has_positions_are_rejected(job, tiny_model):
    shapes = product_grid((1,), (100_000,), (4,), prefill_tokens=100_000)
    with pytest.raises(SpecError, match="positions"):
        profile_layer(replace(job, model_dir=tiny_model("opt"), shapes=shapes, bits=(16,)))


def test_one_layer_in_a_row_gives_no_stage_overhead(job, monkeypatch):
    monkeypatch.setattr(Bench, "run", always(1.0))
    table = profile_layer(replace(job, layers=1))
    assert StageOverhead.of("table", dict(table.provenance)) == StageOverhead()
    assert Shape(phase=Phase.DECODE, batch=1, tokens=5) in SHAPES
