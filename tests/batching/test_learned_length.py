"""The learned predictor of answer lengths."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmpq.batching.engine_step import EngineRequest
from llmpq.batching.length import LearnedPredictor, Prediction, make_predictor
from llmpq.batching.length.learned import (
    LENGTH_FEATURES,
    MIN_SAMPLES,
    Answered,
    fit_length_model,
    length_classes,
    read_length_model,
    token_features,
    write_length_model,
)
from llmpq.errors import SpecError

VOCABULARY = 300


def asked(tokens, max_tokens=1000):
    return EngineRequest(
        request=0,
        token_ids=tuple(tokens),
        prompt_tokens=len(tokens),
        max_tokens=max_tokens,
        arrival_s=0.0,
    )


def answered(count=600, seed=0):
    """Prompts of random tokens; those with token 7 have answers ten times as long."""
    chance = random.Random(seed)
    found = []
    for number in range(count):
        tokens = [chance.randrange(20, VOCABULARY) for _ in range(chance.randint(3, 60))]
        if number % 2:
            tokens[chance.randrange(len(tokens))] = 7
        scale = 100 if number % 2 else 10
        found.append(Answered(len(tokens), round(scale * chance.uniform(0.8, 1.2)), tokens))
    return found


def test_a_token_that_tells_the_length_is_found():
    model, report = fit_length_model(answered(), vocab_size=VOCABULARY)
    assert report.samples == 600
    assert report.explained > 0.6
    assert dict(report.accuracy)["2"] > 0.95
    fresh = answered(seed=1)
    long, short = (
        np.median([model.predict(one.prompt_tokens, one.token_ids) for one in fresh[first::2]])
        for first in (1, 0)
    )
    assert 80 <= long <= 120
    assert 8 <= short <= 12


def test_the_length_of_a_prompt_alone_may_tell_it():
    lengths = [(3 + number % 900) for number in range(2000)]
    model, report = fit_length_model([Answered(one, 2 * one) for one in lengths])
    assert report.rank_correlation > 0.99
    assert model.token_weights == ()
    for prompt in (10, 100, 800):
        assert model.predict(prompt) == pytest.approx(2 * prompt, rel=0.1)
        assert model.predict(prompt, [1] * prompt) == model.predict(prompt)


@pytest.mark.parametrize("seed", range(3))
def test_predictions_are_distributed_as_the_lengths_were(seed):
    # Whether they are right or not: bins of equal probability are filled evenly.
    chance = random.Random(seed)
    samples = [
        Answered(40, chance.randint(1, 500), [chance.randrange(VOCABULARY) for _ in range(40)])
        for _ in range(2000)
    ]
    model, report = fit_length_model(samples[:1000], vocab_size=VOCABULARY, seed=seed)
    edges = model.boundaries(4)
    assert edges == pytest.approx((125, 250, 375), rel=0.1)
    assert abs(report.rank_correlation) < 0.15
    found = [model.predict(40, one.token_ids) for one in samples[1000:]]
    for share in (0.25, 0.5, 0.75):
        edge = edges[round(4 * share) - 1]
        assert np.mean([one < edge for one in found]) == pytest.approx(share, abs=0.1)


def test_equal_answers_are_predicted_exactly():
    model, report = fit_length_model([Answered(5, 42)] * MIN_SAMPLES)
    assert model.predict(5) == model.predict(900) == 42
    assert (report.explained, report.rank_correlation) == (0.0, 0.0)


def test_where_content_is_unknown_the_mean_prompt_counts():
    samples = answered()
    model, _ = fit_length_model(samples, vocab_size=VOCABULARY)
    weights = np.array(model.token_weights)
    scores = [token_features(one.token_ids) @ weights for one in samples]
    assert model.mean_token_score == pytest.approx(np.mean(scores))


@given(
    tokens=st.lists(st.integers(0, 200_000), min_size=1, max_size=80),
    shift=st.integers(1, 1000),
)
@settings(deadline=None)
def test_features_have_length_one_and_depend_on_the_tokens(tokens, shift):
    found = token_features(tokens)
    assert np.linalg.norm(found) == pytest.approx(1.0)
    assert (found == token_features(tuple(tokens))).all()
    assert sum(found > 0) <= 2 * len(tokens) - 1
    assert (token_features(tokens) != token_features([one + shift for one in tokens])).any()


def test_features_stay_the_same_from_version_to_version():
    # Files of predictors hold weights of these numbers.
    assert np.flatnonzero(token_features([5, 9, 5])).tolist() == [59, 92, 575, 710]
    assert length_classes(1) == (0, 40)
    assert length_classes(100) == (13, 93)
    assert length_classes(1 << 30) == (39, LENGTH_FEATURES - 1)


@given(prompt=st.integers(1, 10**7), tokens=st.lists(st.integers(0, 299), max_size=30))
@settings(deadline=None)
def test_predictions_lie_between_the_shortest_and_the_longest_answer(fitted, prompt, tokens):
    low, high = fitted.lengths[0], fitted.lengths[-1]
    assert low <= fitted.predict(prompt) <= high
    assert low <= fitted.predict(prompt, tokens) <= high


@pytest.fixture(scope="module")
def fitted():
    return fit_length_model(answered(), vocab_size=VOCABULARY)[0]


def test_a_file_says_the_same(fitted, tmp_path):
    path = tmp_path / "lengths.json"
    write_length_model(path, replace(fitted, provenance=(("model", "x"),)))
    found = read_length_model(path)
    assert replace(found, provenance=()) == fitted
    prediction = Prediction(predictor="learned", file=path)
    predictor = make_predictor(prediction, [], [], VOCABULARY)
    tokens = answered()[1].token_ids
    assert predictor(asked(tokens)) == fitted.predict(len(tokens), tokens)
    assert predictor(asked(tokens, max_tokens=9)) == 9
    with pytest.raises(SpecError, match="'vocab_size': found 300, expected the model's 77"):
        LearnedPredictor(path, 77)


def test_what_cannot_be_a_predictor_is_refused(fitted, tmp_path):
    with pytest.raises(SpecError, match="found 49 answers, expected at least 50"):
        fit_length_model(answered(49), vocab_size=VOCABULARY)
    with pytest.raises(SpecError, match="3 length_weights"):
        replace(fitted, length_weights=(0.0, 1.0, 2.0))
    with pytest.raises(SpecError, match="'scores': expected rising"):
        replace(fitted, scores=fitted.scores[::-1])
    with pytest.raises(SpecError, match="1 scores and"):
        replace(fitted, scores=(1.0,))
    with pytest.raises(SpecError, match="'file'"):
        Prediction(predictor="learned")
    with pytest.raises(SpecError, match="'file'"):
        Prediction(file=tmp_path / "x.json")
    with pytest.raises(SpecError, match=r"no\.json"):
        make_predictor(Prediction(predictor="learned", file=tmp_path / "no.json"), [], [])
