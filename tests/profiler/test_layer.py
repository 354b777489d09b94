"""The layer profiler times every point it was asked for, on the runtime's own stages."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import count, pairwise

import pytest
import torch

from llmpq.costmodel.tables.profiles import Company, StageOverhead
from llmpq.errors import SpecError
from llmpq.profiler import layer as layer_module
from llmpq.profiler.bench import MASTER_BITS, MASTER_STEPS, Bench, LayerJob, Timing, Trial, is_short
from llmpq.profiler.grid import Shape, product_grid
from llmpq.profiler.journal import Journal
from llmpq.profiler.layer import profile_layer
from llmpq.spec.precision import Phase

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
    # A decode step of the master depends on its rows only: its context is told as 1.
    decode = {(Phase.DECODE, MASTER_BITS, batch, 1) for batch in (1, 3)}
    assert measured == layers | prompts | decode
    assert all(sample.seconds > 0 for sample in table.samples)
    assert shares == sorted(shares)
    assert 0 < shares[-1] <= 1


def test_profile_layer_tells_dtype_noise_rounds_and_what_a_stage_takes(job):
    provenance = dict(profile_layer(job).provenance)
    assert provenance["dtype"] == "float32"
    assert 0 < float(provenance["reference_s"]) < 10
    assert int(provenance["rounds"].split()[0]) >= 3
    assert provenance["noise"].endswith("median interquartile range over median")
    assert StageOverhead.of("table", provenance).decode >= 0


def test_one_layer_and_the_stage_are_told_apart(job, monkeypatch):
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


def test_a_first_run_is_told_apart_from_those_that_follow(job, monkeypatch):
    state = {"is_first": False}

    def reference_s():  # before every trial
        state["is_first"] = True
        return 1.0

    def run_once(_, trial):
        first_s = 0.25 if state["is_first"] and is_short(trial) else 0.0
        state["is_first"] = False
        return first_s + 2.0 * trial.layers

    monkeypatch.setattr(layer_module, "reference_s", reference_s)
    monkeypatch.setattr(Bench, "_run_once", run_once)
    table = profile_layer(job)
    stage = StageOverhead.of("table", dict(table.provenance))
    assert (stage.prefill, stage.decode) == (pytest.approx(0.25), pytest.approx(0.25))
    assert [s.seconds for s in table.samples if s.bits] == pytest.approx([2.0] * 2 * len(SHAPES))


def test_reading_other_memory_is_no_work_of_the_masters(job, monkeypatch):
    """Were it on the clock, the master would take as long as that reading."""
    bench = Bench(job)
    trial = bench.trials()[-1][0]
    read_s = 0.2

    def slow(*_):
        layer_module.time.sleep(read_s)

    monkeypatch.setattr(torch, "mv", slow)
    timings = bench.run(trial)
    assert len(timings) == MASTER_STEPS
    assert all(0 < timing.seconds < read_s for timing in timings)


def test_no_two_trials_of_one_bitwidth_follow_each_other():
    shape = SHAPES[0]
    groups = [[Trial(shape=shape, bits=b, layers=n) for n in range(4)] for b in (0, 4, 16)]
    order = layer_module._dealt(groups, random.Random(0))
    assert sorted(order, key=str) == sorted([t for group in groups for t in group], key=str)
    assert all(one.bits != other.bits for one, other in pairwise(order))


def test_a_settled_point_is_not_timed_again(job, monkeypatch):
    calls = []

    def run(self, trial):
        calls.append(trial)
        self.cold_s[trial.shape.phase].append(0.0)
        return [Timing(trial=trial, seconds=1.0)]

    monkeypatch.setattr(Bench, "run", run)
    monkeypatch.setattr(layer_module, "reference_s", lambda: 1.0)
    profile_layer(replace(job, budget_s=30.0))  # ends at once: nothing varies
    most = max(calls.count(trial) for trial in calls)
    # One to warm up; and the round that settles a short trial deals it to the end.
    assert layer_module.SETTLED_ROUNDS < most <= layer_module.SETTLED_ROUNDS + layer_module.REPEATS


@pytest.fixture
def machine(monkeypatch):
    """A machine whose core is disturbed for three eighths of the time, and says when."""
    found = {"calls": 0, "slow": False}

    def reference_s():
        found["calls"] += 1
        found["slow"] = found["calls"] % 32 < 12
        return 2.0 if found["slow"] else 1.0

    monkeypatch.setattr(layer_module, "reference_s", reference_s)
    return found


@pytest.fixture
def often_disturbed(machine, monkeypatch):
    """All trials take half as long again on its disturbed core."""

    def run(_, trial):
        return [Timing(trial=trial, seconds=1.5 if machine["slow"] else 1.0)]

    monkeypatch.setattr(Bench, "run", run)


def test_timings_on_a_disturbed_core_are_told_apart(job, often_disturbed):
    provenance = dict(profile_layer(replace(job, layers=1, budget_s=0.2)).provenance)
    assert float(provenance["reference_s"]) == 1.0
    assert provenance["disturbed"] == "prefill 1.5000 decode 1.5000"
    for kind in ("prefill 16", "decode 4"):  # by rows
        words = provenance[f"disturbed {kind}"].split()
        assert {int(word) for word in words[::2]} <= {shape.rows for shape in SHAPES}
        assert set(words[1::2]) == {"1.500"}
    assert provenance["disturbed share"] in {f"{share}% of the timings" for share in range(25, 45)}
    assert provenance["noise"].startswith("0.0%")


def test_a_table_holds_what_a_run_meets_in_the_mean(job, often_disturbed):
    """The calm level, times the mean of all timings over it."""
    table = profile_layer(replace(job, layers=1, budget_s=0.2))
    words = dict(table.provenance)["slack"].split()
    slack = {Phase(name): float(value) for name, value in zip(words[::2], words[1::2], strict=True)}
    for sample in table.samples:
        assert sample.seconds == pytest.approx(slack[sample.phase], abs=1e-4)
    assert all(1.1 < value < 1.3 for value in slack.values())  # 3 of 8 are disturbed: 1.19


def test_shapes_that_suffer_more_lie_further_above_the_calm_level(job, machine, monkeypatch):
    def run(_, trial):
        factor = 1.6 if trial.shape.rows == 1 else 1.1
        return [Timing(trial=trial, seconds=factor if machine["slow"] else 1.0)]

    monkeypatch.setattr(Bench, "run", run)
    shapes = tuple(Shape(phase=Phase.DECODE, batch=batch, tokens=tokens)
                   for batch in (1, 64) for tokens in range(2, 12))  # fmt: skip
    table = profile_layer(replace(job, shapes=shapes, layers=1, budget_s=0.3))
    provenance = dict(table.provenance)
    share = float(provenance["disturbed share"].partition("%")[0]) / 100
    words = provenance["slack"].split()
    slack = float(words[words.index("decode") + 1])
    seconds = {one.batch: one.seconds for one in table.samples if one.bits}
    ratio = (1 + 0.6 * share) / (1 + 0.1 * share)
    assert seconds[1] / seconds[64] == pytest.approx(ratio, rel=0.02)
    assert (seconds[1] + seconds[64]) / 2 == pytest.approx(slack, rel=0.05)


def test_the_level_of_each_span_tells_the_drift(job, monkeypatch):
    clock = {"s": 0.0}

    def run(_, trial):
        clock["s"] += 0.05
        is_slow = int(clock["s"] / (5 * layer_module.DRIFT_SPAN_S)) % 2
        return [Timing(trial=trial, seconds=1.2 if is_slow else 0.8)]

    monkeypatch.setattr(layer_module, "SETTLED_ROUNDS", 10**6)
    monkeypatch.setattr(layer_module.time, "perf_counter", lambda: clock["s"])
    monkeypatch.setattr(layer_module, "reference_s", lambda: 1.0)
    monkeypatch.setattr(Bench, "run", run)
    drift = float(dict(profile_layer(replace(job, layers=1, budget_s=40.0)).provenance)["drift"])
    assert 0.15 < drift < 0.35  # of 0.8 and 1.2 in turn, over medians that are either


def test_a_moment_tells_no_drift(job, monkeypatch):
    monkeypatch.setattr(Bench, "run", always(1.0))
    assert "drift" not in dict(profile_layer(replace(job, budget_s=1e-3)).provenance)


def test_a_machine_that_is_slow_for_good_does_not_stop_the_profiler(job, monkeypatch):
    calls = count(1)
    monkeypatch.setattr(layer_module, "reference_s", lambda: 1.1 ** next(calls))
    monkeypatch.setattr(Bench, "run", always(1.0))
    table = profile_layer(replace(job, budget_s=0.01))
    assert int(dict(table.provenance)["rounds"].split()[0]) >= layer_module.MIN_ROUNDS


def test_company_is_the_ratio_of_pairs_by_phase(job, monkeypatch):
    class Companions:
        are_working = False

        def __init__(self, _, cores):
            assert cores == (1,)

        def __enter__(self):
            Companions.are_working = True

        def __exit__(self, *_):
            Companions.are_working = False

        def close(self):
            assert not Companions.are_working

    def run(_, trial):
        slower = {Phase.PREFILL: 0.9, Phase.DECODE: 1.25}[trial.shape.phase]
        return [Timing(trial=trial, seconds=slower if Companions.are_working else 1.0)]

    monkeypatch.setattr(layer_module, "Company", Companions)
    monkeypatch.setattr(layer_module, "COMPANY_PAUSE_S", 0.0)
    monkeypatch.setattr(Bench, "run", run)
    provenance = dict(profile_layer(replace(job, companions=(1,))).provenance)
    # Nobody is faster in company: that is noise.
    assert Company.of("table", provenance) == Company(prefill=1.0, decode=1.25)
    assert "company" not in dict(profile_layer(job).provenance)


def test_an_interrupted_run_goes_on_where_it_stopped(job, tmp_path, monkeypatch):
    monkeypatch.setattr(Bench, "run", always(1.0))
    with Journal(tmp_path / "t.part", (("model", "m"),), resume=False) as journal:
        profile_layer(job, journal=journal)
    monkeypatch.setattr(Bench, "run", always(9.0))
    with Journal(tmp_path / "t.part", (("model", "m"),), resume=True) as journal:
        table = profile_layer(replace(job, budget_s=1e-9), journal=journal)
    assert {sample.seconds for sample in table.samples if not sample.bits} == {1.0}


def test_profile_layer_refuses_more_tokens_than_the_model_has_positions(job, tiny_model):
    shapes = product_grid((1,), (100_000,), (4,), prefill_tokens=100_000)
    with pytest.raises(SpecError, match="positions"):
        profile_layer(replace(job, model_dir=tiny_model("opt"), shapes=shapes, bits=(16,)))


def test_a_model_of_one_layer_in_a_row_says_nothing_of_the_stage(job, monkeypatch):
    monkeypatch.setattr(Bench, "run", always(1.0))
    table = profile_layer(replace(job, layers=1))
    assert StageOverhead.of("table", dict(table.provenance)) == StageOverhead()
    assert Shape(phase=Phase.DECODE, batch=1, tokens=5) in SHAPES
