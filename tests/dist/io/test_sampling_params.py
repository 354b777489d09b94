"""SamplingParams have vLLM's ranges and survive JSON."""

from __future__ import annotations

import json
import math

import pytest

from llmpq.dist.io.sampling_params import SamplingParams, StructuredOutputsParams
from llmpq.errors import SpecError
from llmpq.spec.fields import Fields, from_json, to_json


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"top_k": -2},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"seed": 2**63},
        {"repetition_penalty": 0.0},
        {"presence_penalty": 2.1},
        {"frequency_penalty": -2.1},
        {"logit_bias": {3: math.nan}},
        {"bad_words_ids": [[]]},
        {"allowed_token_ids": []},
        {"min_tokens": -1},
        {"min_tokens": 5, "max_tokens": 4},
        {"max_tokens": 0},
        {"logprobs": -2},
        {"prompt_logprobs": -2},
    ],
)
def test_values_out_of_range_are_errors(options):
    with pytest.raises(SpecError, match=next(iter(options))):
        SamplingParams(**options)


@pytest.mark.parametrize(
    "options", [{}, {"regex": "a", "choice": ["b"]}, {"choice": []}, {"json_object": False}]
)
def test_structured_outputs_need_exactly_one_form(options):
    with pytest.raises(SpecError, match="structured_outputs"):
        StructuredOutputsParams(**options)


def test_bias_is_limited_and_sorted():
    params = SamplingParams(logit_bias={9: 1000.0, 3: -1000})
    assert params.logit_bias == ((3, -100.0), (9, 100.0))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(
            max_tokens=9,
            temperature=0.7,
            top_p=0.9,
            top_k=-1,
            min_p=0.1,
            seed=-(2**63),
            repetition_penalty=1.2,
            presence_penalty=-2,
            frequency_penalty=2,
            logit_bias={5: 1.5, 2: -3},
            bad_words_ids=[[1, 2], [3]],
            allowed_token_ids=[9, 1],
            stop_token_ids=[4],
            min_tokens=2,
            ignore_eos=True,
            logprobs=-1,
            prompt_logprobs=0,
            structured_outputs=StructuredOutputsParams(json={"type": "object"}),
        ),
        SamplingParams(seed=2**63 - 1, structured_outputs=StructuredOutputsParams(choice=["a"])),
    ],
)
def test_params_are_hashable_and_survive_json(params):
    line = json.loads(json.dumps(to_json(params)))
    again = from_json(SamplingParams, Fields(line, "sampling_params"))
    assert again == params
    assert hash(again) == hash(params)


def test_fields_may_be_left_out():
    assert from_json(SamplingParams, Fields({"top_k": 3}, "here")) == SamplingParams(top_k=3)


def test_a_bias_of_no_token_is_an_error():
    with pytest.raises(SpecError, match="whole number"):
        from_json(SamplingParams, Fields({"logit_bias": {"x": 1}}, "here"))


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_tokens_outside_the_vocabulary_are_errors(name):
    params = SamplingParams(**{name: {8: 1.0} if name == "logit_bias" else [8]})
    params.check_tokens(9)
    with pytest.raises(SpecError, match=f"'{name}': found token 8"):
        params.check_tokens(8)


def test_words_outside_the_vocabulary_are_errors():
    with pytest.raises(SpecError, match="'bad_words_ids': found token 12"):
        SamplingParams(bad_words_ids=[[1, 12]]).check_tokens(12)
