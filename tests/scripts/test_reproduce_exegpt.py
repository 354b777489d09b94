"""ExeGPT's evaluation: teams cost what their parts cost, and lengths follow their laws."""

from __future__ import annotations

import math
from statistics import correlation, fmean, pstdev

import pytest

from llmpq.spec.precision import Phase
from reproduce import exegpt
from reproduce.exegpt import Lengths, model_of, ordered, paired, skewed
from reproduce.exegpt_paper import TASKS
from reproduce.teams import RINGS, Machines, Ring, Teams

FOUR = Machines(device="A40", nodes=1, each=4)


def teams_of(*layout):
    return Teams(model=model_of("OPT-13B"), machines=FOUR, layout=layout)


@pytest.mark.parametrize(
    ("name", "billions"), [("39B", 39), ("101B", 101), ("175B", 175), ("341B", 341)]
)
def test_models_have_the_published_parameters(name, billions):
    assert model_of(f"GPT-3 {name}").parameters / 1e9 == pytest.approx(billions, rel=0.02)


def test_a_ring_moves_each_byte_twice_but_for_the_own_part():
    ring = Ring(bytes_per_s=1e9, start_s=1e-6)
    assert ring.seconds(1e9, 1) == 0.0
    assert ring.seconds(1e9, 2) == pytest.approx(1.0 + 2e-6)
    assert ring.seconds(1e9, 4) == pytest.approx(1.5 + 4e-6)


def test_a_member_multiplies_its_part_and_waits_for_two_all_reduces():
    plans = {degree: teams_of(*(degree,) * (4 // degree)).planned(64, 16, 16) for degree in (1, 4)}
    one, team = (plans[degree][1].latency[0] for degree in (1, 4))
    assert one.layer_s(Phase.DECODE, 16, 8, 100, 0) == pytest.approx(
        one.one.layer_s(Phase.DECODE, 16, 8, 100, 0)
    )
    # A long prompt is bound by arithmetic: a quarter of it, and the exchange.
    prompt = Phase.PREFILL, 16, 16, 2048, 0
    exchange_s = 2 * RINGS["A40"].seconds(16 * 2048 * 5120 * 2, 4)
    overhead_s = one.one.device.layer_overhead_s
    expected_s = (one.layer_s(*prompt) - overhead_s) / 4 + overhead_s + exchange_s
    assert team.layer_s(*prompt) == pytest.approx(expected_s, rel=0.01)
    assert [len(plan.stages) for plan, _ in plans.values()] == [4, 1]


def test_teams_of_unequal_size_get_layers_by_their_speed():
    plan, _ = teams_of(2, 1, 1).planned(512, 80, 64)
    layers = {plan.device_of(stage).type: stage.num_layers for stage in plan.stages}
    assert sum(stage.num_layers for stage in plan.stages) == 40
    assert 1.3 < layers["2 A40"] / layers["A40"] < 2.2


def test_static_batches_keep_no_bound_below_their_longest_answer():
    base = exegpt.baseline(exegpt.OPT, "S")
    longest_s, percentile_s = base.static_s(8, 80), base.static_s(8, 62)
    assert longest_s > percentile_s
    made = base.play(base.static(8), base.lengths.trace(8), pads_prompts=True)
    assert made.makespan_s <= longest_s


@pytest.mark.parametrize("skewness", exegpt.SKEWS)
def test_a_skewed_law_has_its_mean_deviation_and_skewness(skewness):
    mean, deviation, longest = TASKS["T"][1]
    found = skewed((mean, deviation / 3, longest), skewness)  # so that little is cut off
    lengths = list(zip(found.lengths, found.probabilities, strict=True))
    own = sum(length * share for length, share in lengths)
    spread = math.sqrt(sum((length - own) ** 2 * share for length, share in lengths))
    third = sum(((length - own) / spread) ** 3 * share for length, share in lengths)
    assert own == pytest.approx(mean, rel=0.01)
    assert spread == pytest.approx(deviation / 3, rel=0.02)
    assert third == pytest.approx(skewness, abs=0.04)


def test_paired_lengths_keep_their_laws_and_are_correlated():
    lengths = Lengths(task="T")
    for wanted in exegpt.CORRELATIONS:
        trace = paired(lengths, wanted)
        prompts = [item.prompt_tokens for item in trace]
        answers = [item.new_tokens for item in trace]
        assert correlation(prompts, answers) == pytest.approx(wanted, abs=0.05)
        assert fmean(prompts) == pytest.approx(lengths.prompts.mean, rel=0.05)
        assert pstdev(answers) == pytest.approx(lengths.answers.std, rel=0.06)


def test_orders_are_of_the_same_requests():
    trace = paired(Lengths(task="T"), 0.9)
    for order in exegpt.ORDERS:
        assert sorted(map(repr, ordered(trace, order))) == sorted(map(repr, trace))
    run = [item.prompt_tokens for item in ordered(trace, "sorted")[: exegpt.SORTED_RUN]]
    assert run == sorted(run)
