"""WAA: prefill and decode on stages of their own, and still the tokens of one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.answer_drafts import DRAFTS, AnswerDrafts, draft_freely
from helpers.links import TRANSPORTS
from helpers.ranks import make_plan, make_split_plan, run_threads
from helpers.tiny_models import load_reference, save_tiny_model

from llmpq.dist.io.prompts import Request
from llmpq.errors import SpecError
from llmpq.spec.plan import default_schedule

torch.set_num_threads(1)
WIDE = {"layers": 3, "hidden": 64, "intermediate": 96, "heads": 4, "kv_heads": 2}
"""Heads of 16 features, which 4-bit keys and values take."""

SLOTS = 4
PROMPTS = [
    [1, 2, 3, 4, 5], [7, 8], [9, 10, 11, 50], [61], [33, 34, 35, 36], [90, 3], [15, 16, 17],
    [70, 71, 72, 73, 74, 75, 76], [5], [44, 45],
]  # fmt: skip
NEW_TOKENS = [8, 3, 8, 5, 1, 2, 7, 1, 6, 4]
CUTS = {
    "1+1": ((0, 3), (0, 3)),
    "1+2": ((0, 3), (0, 1, 3)),
    "2+1": ((0, 2, 3), (0, 3)),
    "2+2, cut alike": ((0, 1, 3), (0, 1, 3)),
    "2+2, different cuts": ((0, 2, 3), (0, 1, 3)),
    "a master without layers": ((0, 0, 3), (0, 2, 3)),
}
"""Decode and prefill stages, by their cuts of three layers."""


def _requests(gap_s: float = 0.0, stops: tuple[int, ...] = ()) -> list[Request]:
    return [
        Request(
            id=number,
            prompt_token_ids=tuple(prompt),
            max_new_tokens=count,
            arrival_s=gap_s * number,
            stop_token_ids=stops,
        )
        for number, (prompt, count) in enumerate(zip(PROMPTS, NEW_TOKENS, strict=True))
    ]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save_tiny_model("llama", tmp_path_factory.mktemp("waa") / "llama")


@pytest.fixture(scope="module")
def expected(model_dir):
    model = load_reference(model_dir)
    model.generation_config.eos_token_id = None
    answers = {}
    for number, (prompt, count) in enumerate(zip(PROMPTS, NEW_TOKENS, strict=True)):
        ids = torch.tensor([prompt])
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count
        )
        answers[number] = made[0, len(prompt) :].tolist()
    return answers


def _tokens(answers) -> dict[int, list[int]]:
    return {number: list(tokens) for number, (tokens, _) in answers.items()}


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize(
    ("decode", "transport"), [(1, "sockets"), (2, "sockets"), (4, "sockets"), (2, "torch")]
)
def test_tokens_are_those_of_transformers(cuts, decode, transport, model_dir, expected):
    plan = make_split_plan(*CUTS[cuts], prefill=2, decode=decode, batch=SLOTS)
    answers, measurement = run_threads(plan, model_dir, _requests(), transport=transport)
    assert _tokens(answers) == expected
    assert measurement.policy == "waa"
    assert [record.new_tokens for record in measurement.records] == NEW_TOKENS
    assert [stage.rank for stage in measurement.stages] == list(range(len(plan.stages)))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("decode", [1, 4])
def test_drafts_change_no_token(decode, transport, model_dir, expected, monkeypatch):
    sequences = [prompt + expected[number] for number, prompt in enumerate(PROMPTS)]
    draft_freely(monkeypatch, AnswerDrafts(sequences))
    cuts = CUTS["2+2, different cuts"]
    plan = make_split_plan(*cuts, prefill=2, decode=decode, batch=SLOTS)
    answers, made = run_threads(
        plan, model_dir, _requests(), speculative=DRAFTS, transport=transport
    )
    assert _tokens(answers) == expected
    assert 0 < made.accepted_tokens < made.draft_tokens


@pytest.mark.parametrize("cuts", ["1+1", "2+2, different cuts"])
def test_requests_that_come_one_by_one_get_the_same_tokens(cuts, model_dir, expected):
    plan = make_split_plan(*CUTS[cuts], encode_batch=1, prefill=1, decode=2, batch=2)
    answers, _ = run_threads(plan, model_dir, _requests(gap_s=0.01))
    assert _tokens(answers) == expected


def test_an_answer_may_end_early_and_its_slot_goes_to_the_next(model_dir, expected):
    stop = expected[2][3]
    cut = {
        number: tokens[: tokens.index(stop) + 1] if stop in tokens else tokens
        for number, tokens in expected.items()
    }
    assert cut != expected
    plan = make_split_plan(*CUTS["2+2, different cuts"], prefill=2, decode=2, batch=2)
    answers, _ = run_threads(plan, model_dir, _requests(stops=(stop,)))
    assert _tokens(answers) == cut


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kv_bits", [8, 4])
def test_quantized_keys_and_values_travel_as_they_are_stored(transport, tiny_model, kv_bits):
    model_dir = tiny_model("llama", seed=1, shape=WIDE)
    alone = replace(make_plan((0, 3), prefill=2, decode=2, batch=SLOTS), kv_bits=kv_bits)
    plan = make_split_plan(
        *CUTS["2+2, different cuts"], kv_bits=kv_bits, prefill=2, decode=2, batch=SLOTS
    )
    assert _tokens(run_threads(plan, model_dir, _requests(), transport=transport)[0]) == _tokens(
        run_threads(alone, model_dir, _requests())[0]
    )


@pytest.mark.parametrize("family", ["opt", "gemma3", "mixtral"])
def test_other_families_too(family, tmp_path):
    where = save_tiny_model(family, tmp_path / family)
    layers = load_reference(where).config.num_hidden_layers
    one = make_plan((0, layers), prefill=2, decode=2, batch=SLOTS)
    plan = make_split_plan(
        (0, layers - 1, layers), (0, 1, layers), prefill=2, decode=2, batch=SLOTS
    )
    assert _tokens(run_threads(plan, where, _requests())[0]) == _tokens(
        run_threads(one, where, _requests())[0]
    )


def test_only_waa_runs_on_stages_of_either_phase():
    plan = make_split_plan(*CUTS["1+1"])
    with pytest.raises(SpecError, match="expected 'waa'"):
        replace(plan, schedule=default_schedule("hybrid", 4))
