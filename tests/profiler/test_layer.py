"""The layer profiler times every requested point on the runtime's own stages."""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from dataclasses import replace
from itertools import count, pairwise
from types import SimpleNamespace

import pytest
import torch

from llmpq.costmodel.tables.profiles import StageOverhead
from llmpq.dist.metrics.measurement import CoreTime, share_in
from llmpq.errors import SpecError
from llmpq.models.attention import KVShape
from llmpq.profiler import bench as bench_module
from llmpq.profiler import layer as layer_module
from llmpq.profiler.bench import MASTER_STEPS, LayerBench, LayerJob, TimedStep, Timing, is_short
from llmpq.profiler.grid import Shape, product_grid
from llmpq.profiler.journal import Journal
from llmpq.profiler.layer import profile_layer
from llmpq.spec import catalog
from llmpq.spec.precision import Phase
from llmpq.spec.tables import MASTER_BITS

SHAPES = product_grid((1, 3), (4, 9), (5,), prefill_tokens=20)


def always(seconds):
    """Return a bench's ``run`` on which everything takes equally long, by its own account."""

    def run(_, trial):
        return [Timing(trial=trial, seconds=seconds)]

    return run


def replace_runs(monkeypatch, run):
    """Let all runs of a bench, the first included, be those of ``run``."""
    monkeypatch.setattr(LayerBench, "run", run)
    monkeypatch.setattr(LayerBench, "prepare", run)


def ticking():
    """Return a clock that goes on by 0.1 ms with every look at it."""
    ticks = count()
    return lambda: 1e-4 * next(ticks)


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


class FakeStages:
    """Stages and a master whose runs take the seconds that ``run_s`` says, on a clock of its own.

    ``compile_s`` is what the first run of a trial takes in addition.
    """

    def __init__(self, monkeypatch, run_s, compile_s=0.0):
        self.now_s = 0.0
        self.run_s = run_s
        self.compile_s = compile_s
        self.runs = Counter()
        monkeypatch.setattr(LayerBench, "_run_once", lambda _, trial: self._run(trial))
        monkeypatch.setattr(
            LayerBench, "_run_master", lambda _, shape, bits: self._answer(shape, bits)
        )

    def now(self):
        return self.now_s

    def _run(self, trial):
        if trial not in self.runs:
            self.now_s += self.compile_s
        self.runs[trial] += 1
        seconds = self.run_s(trial)
        self.now_s += seconds
        return seconds

    def _answer(self, shape, bits):
        trial = TimedStep(shape=shape, bits=bits, layers=0)
        decode = replace(trial, shape=Shape(phase=Phase.DECODE, batch=shape.batch, tokens=1))
        return [Timing(trial=one, seconds=self._run(one)) for one in (trial, decode)]


def layers_take(seconds, slow_s):
    """Return the seconds of a run: a layer of 16 bits takes ``slow_s`` in prefill."""

    def run_s(trial):
        is_slow = trial.bits == 16 and trial.shape.phase is Phase.PREFILL
        return max(1, trial.layers) * (slow_s if is_slow else seconds)

    return run_s


def test_the_budget_holds_although_some_shapes_are_slow(job, monkeypatch):
    stages = FakeStages(monkeypatch, layers_take(0.0001, slow_s=0.2))
    table = profile_layer(replace(job, budget_s=4.0), now=stages.now)
    assert stages.now_s <= 4.0 * 1.05
    layers = {(s.phase, s.bits, s.batch, s.tokens): s.seconds for s in table.samples if s.bits > 0}
    assert set(layers) == {(s.phase, bits, s.batch, s.tokens) for s in SHAPES for bits in (16, 4)}
    for (phase, bits, *_), seconds in layers.items():
        is_slow = bits == 16 and phase is Phase.PREFILL
        assert seconds == pytest.approx(0.2 if is_slow else 0.0001)
    slow = [n for t, n in stages.runs.items() if t.bits == 16 and t.shape.phase is Phase.PREFILL]
    quick = [n for t, n in stages.runs.items() if t.bits == 4]
    assert max(slow) < layer_module.FINISHED_ROUNDS < min(quick)


@pytest.mark.parametrize("budget_s", [0.5, 5.0])
def test_one_slow_timing_of_a_point_does_not_bend_the_table(job, monkeypatch, budget_s):
    clean_s = layers_take(0.0001, slow_s=0.2)

    def run_s(trial):
        is_first_timing = trial.layers == 1 and stages.runs[trial] == 2
        return (5 if is_first_timing else 1) * clean_s(trial)

    stages = FakeStages(monkeypatch, run_s)
    table = profile_layer(replace(job, budget_s=budget_s), now=stages.now)
    slow = [s for s in table.samples if s.bits == 16 and s.phase is Phase.PREFILL]
    assert [s.seconds for s in slow] == pytest.approx([0.2] * len(slow))
    assert dict(table.provenance)["rounds"].endswith(f" {len(slow)} of them outliers")


@pytest.mark.parametrize(("left_s", "chosen"), [(3.5, "once"), (2.5, "twice"), (5.0, "all")])
def test_points_with_the_fewest_timings_come_first(left_s, chosen):
    bits = {"once": 16, "twice": 8}
    once, twice = (TimedStep(shape=SHAPES[0], bits=one, layers=1) for one in bits.values())
    bench = SimpleNamespace(
        now=lambda: 0.0, job=SimpleNamespace(budget_s=left_s), trials=lambda: [[once], [twice]]
    )
    rounds = layer_module._Rounds(bench, None, None)
    rounds.times = {once: [3.0], twice: [1.0, 1.0]}
    rounds.cost_s = {once: 3.0, twice: 1.0}
    wanted = list(bits.values()) if chosen == "all" else [bits[chosen]]
    assert [trial.bits for group in rounds._left() for trial in group] == wanted


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "facebook/opt-125m", "Qwen/Qwen3-30B-A3B"])
def test_stages_have_more_weights_than_caches_hold(job, monkeypatch, name):
    """Six small layers at 3 bits lie in a cache, those of a plan do not: up to 40 % faster."""
    model = catalog.model(name)
    monkeypatch.setattr(bench_module, "load_model_dir", lambda _: model)
    own = replace(job, layers=None, bits=(16, 8, 4, 3), dtype=torch.bfloat16)
    for bits, depth in own.depths().items():
        read = depth * model.layers[0].active_weight_parameters * bits / 8
        assert depth == model.num_layers or (depth >= 6 and read >= 128 * 2**20)
        assert depth == 6 or read - read / depth < 128 * 2**20
    assert set(replace(own, layers=7).depths().values()) == {7}
    assert set(replace(own, layers=700).depths().values()) == {model.num_layers}


def test_layers_of_deep_stages_share_keys_and_values(job, monkeypatch):
    monkeypatch.setattr(bench_module, "LEAST_LAYERS", 1)
    own = replace(job, layers=None, bits=(16,))
    bench = LayerBench(own)
    (depth,) = bench.depths.values()
    assert depth > 1
    token_bytes = bench._cache.token_bytes
    assert token_bytes == [token_bytes[0]] * depth
    with pytest.raises(SpecError, match="expected the shape of an earlier layer"):
        bench._cache.repeat_layers([KVShape(heads=99, head_dim=7)])
    addresses = {bench._cache.heads_of(layer).keys.data_ptr() for layer in range(depth)}
    assert len(addresses) == 1
    table = profile_layer(own)
    points = {(s.phase, s.batch, s.tokens) for s in table.samples if s.bits > 0}
    assert points == {(s.phase, s.batch, s.tokens) for s in SHAPES}


def test_many_layers_of_slow_shapes_are_left_out(job, monkeypatch):
    stages = FakeStages(monkeypatch, layers_take(0.0001, slow_s=0.2))
    profile_layer(replace(job, budget_s=2.0), now=stages.now)
    deep = {trial for trial in stages.runs if trial.layers == 2}
    assert {(trial.bits, trial.shape.phase) for trial in deep} == {
        (4, Phase.PREFILL), (4, Phase.DECODE), (16, Phase.DECODE)
    }  # fmt: skip
    assert stages.now_s <= 2.0 * 1.05


def test_a_budget_that_is_too_small_gives_a_warning_and_a_whole_table(job, monkeypatch, caplog):
    stages = FakeStages(monkeypatch, layers_take(0.01, slow_s=5.0))
    with caplog.at_level(logging.WARNING):
        table = profile_layer(replace(job, budget_s=0.5), now=stages.now, read_core=lambda _: None)
    assert "more than the budget" in caplog.text
    slow = [s for s in table.samples if s.bits == 16 and s.phase is Phase.PREFILL]
    assert [s.seconds for s in slow] == pytest.approx([5.0] * len(slow))
    # Once to prepare it, once timed.
    assert {stages.runs[t] for t in stages.runs if stages.run_s(t) >= 5.0} == {2}


def test_compiling_is_not_taken_from_the_budget(job, monkeypatch):
    quick = FakeStages(monkeypatch, layers_take(0.0001, slow_s=0.0001))
    profile_layer(replace(job, budget_s=0.5), now=quick.now)
    compiled = FakeStages(monkeypatch, layers_take(0.0001, slow_s=0.0001), compile_s=30.0)
    profile_layer(replace(job, budget_s=0.5), now=compiled.now)
    assert compiled.runs == quick.runs


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
    assert int(provenance["rounds"].split()[0]) >= 1
    assert provenance["noise"].endswith("median interquartile range over median")
    assert StageOverhead.of("table", provenance).decode >= 0


def test_the_time_of_a_layer_is_separated_from_the_stage_overhead(job, monkeypatch):
    def run(self, trial):
        seconds = 7.0 if trial.bits == MASTER_BITS else 0.5 + 2.0 * trial.layers
        return [Timing(trial=trial, seconds=seconds)]

    replace_runs(monkeypatch, run)
    table = profile_layer(job)
    assert StageOverhead.of("table", dict(table.provenance)) == StageOverhead(
        prefill=0.5, decode=0.5
    )
    assert {s.seconds for s in table.samples if s.bits} == {2.0}
    assert {s.seconds for s in table.samples if not s.bits} == {7.0}


def test_the_first_run_of_a_burst_counts_as_stage_overhead(job, monkeypatch):
    state = {"is_first": False}
    run_trial = LayerBench.run

    def run(self, trial):
        state["is_first"] = True
        return run_trial(self, trial)

    def run_once(_, trial):
        first_s = 0.005 if state["is_first"] and is_short(trial) else 0.0
        state["is_first"] = False
        return first_s + 0.002 * trial.layers

    monkeypatch.setattr(LayerBench, "run", run)
    monkeypatch.setattr(LayerBench, "_run_once", run_once)
    table = profile_layer(job)
    stage = StageOverhead.of("table", dict(table.provenance))
    assert (stage.prefill, stage.decode) == (pytest.approx(0.005), pytest.approx(0.005))
    assert [s.seconds for s in table.samples if s.bits] == pytest.approx([0.002] * 2 * len(SHAPES))


def test_reading_other_memory_is_not_part_of_the_master_s_time(job, monkeypatch):
    bench = LayerBench(job)
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
    groups = [[TimedStep(shape=shape, bits=b, layers=n) for n in range(4)] for b in (0, 4, 16)]
    order = layer_module._interleaved(groups, random.Random(0))
    assert sorted(order, key=str) == sorted([t for group in groups for t in group], key=str)
    assert all(one.bits != other.bits for one, other in pairwise(order))


def test_a_finished_point_is_not_timed_again(job, monkeypatch):
    calls = []

    def run(self, trial):
        calls.append(trial)
        self.first_run_s[trial.shape.phase].append(0.0)
        return [Timing(trial=trial, seconds=1.0)]

    monkeypatch.setattr(LayerBench, "run", run)
    monkeypatch.setattr(LayerBench, "prepare", always(2.0))
    # Ends at once: nothing varies.
    profile_layer(replace(job, budget_s=30.0), now=ticking())
    most = max(calls.count(trial) for trial in calls)
    # A short trial finishes its last round.
    assert 0 <= most - layer_module.FINISHED_ROUNDS <= layer_module.REPEATS


def test_a_table_holds_medians_and_a_noisy_host_gives_a_warning(job, monkeypatch, caplog):
    seconds = [1.0, 1.0, 1.5]

    def run(_, trial):
        seconds.append(seconds.pop(0))
        return [Timing(trial=trial, seconds=seconds[0])]

    monkeypatch.setattr(LayerBench, "run", run)
    monkeypatch.setattr(LayerBench, "prepare", always(2.0))
    monkeypatch.setattr(
        layer_module, "_interleaved", lambda groups, _: [t for g in groups for t in g]
    )
    with caplog.at_level(logging.WARNING):
        table = profile_layer(
            replace(job, layers=1, budget_s=0.5), now=ticking(), read_core=lambda _: None
        )
    layers = [one.seconds for one in table.samples if one.bits]
    assert layers == [1.0] * len(layers)
    assert dict(table.provenance)["noise"].startswith("50.0%")
    assert "noisy host" in caplog.text


def test_a_quiet_host_gives_no_warning(job, monkeypatch, caplog):
    replace_runs(monkeypatch, always(1.0))
    table = profile_layer(job, now=ticking(), read_core=lambda _: None)
    assert "noisy host" not in caplog.text
    assert dict(table.provenance)["noise"].startswith("0.0%")


def test_other_programs_on_the_core_give_a_warning_and_a_provenance_line(job, monkeypatch, caplog):
    replace_runs(monkeypatch, always(1.0))
    times = [CoreTime(ran_s=1.0, taken_s=0.0), CoreTime(ran_s=5.0, taken_s=6.0)]
    with caplog.at_level(logging.WARNING):
        table = profile_layer(job, now=ticking(), read_core=lambda _: times.pop(0))
    assert share_in(dict(table.provenance)) == pytest.approx(0.6)
    assert "CPU busy with other programs: 60%" in caplog.text
    assert "noisy host" not in caplog.text


def test_an_interrupted_run_is_resumed_from_its_journal(job, tmp_path, monkeypatch):
    replace_runs(monkeypatch, always(1.0))
    with Journal(tmp_path / "t.part", (("model", "m"),), resume=False) as journal:
        profile_layer(replace(job, budget_s=1.0), journal=journal, now=ticking())
    replace_runs(monkeypatch, always(9.0))
    with Journal(tmp_path / "t.part", (("model", "m"),), resume=True) as journal:
        table = profile_layer(replace(job, budget_s=1e-9), journal=journal)
    assert {sample.seconds for sample in table.samples if not sample.bits} == {1.0}


def test_more_tokens_than_the_model_has_positions_are_rejected(job, tiny_model):
    shapes = product_grid((1,), (100_000,), (4,), prefill_tokens=100_000)
    with pytest.raises(SpecError, match="positions"):
        profile_layer(replace(job, model_dir=tiny_model("opt"), shapes=shapes, bits=(16,)))


def test_one_layer_in_a_row_gives_no_stage_overhead(job, monkeypatch):
    replace_runs(monkeypatch, always(1.0))
    table = profile_layer(replace(job, layers=1))
    assert StageOverhead.of("table", dict(table.provenance)) == StageOverhead()
    assert Shape(phase=Phase.DECODE, batch=1, tokens=5) in SHAPES
