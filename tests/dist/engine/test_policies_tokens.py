"""With every policy the tokens equal those of transformers; no request is lost or served twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.answer_drafts import DRAFTS, AnswerDrafts, draft_freely
from helpers.ranks import make_plan, run_threads
from helpers.tiny_models import generate_alone, load_reference, save_tiny_model

from llmpq.batching.speculation import SpeculativeConfig
from llmpq.dist.io.prompts import Request
from llmpq.errors import SpecError
from llmpq.spec.plan import Schedule, default_schedule

torch.set_num_threads(1)

SLOTS = 3
SCHEDULES = {
    "hybrid": default_schedule("hybrid", SLOTS),
    "iteration": default_schedule("iteration", SLOTS),
    "static": default_schedule("static", SLOTS),
    "static, ended leave": replace(default_schedule("static", SLOTS), holds_finished=False),
    "rra": Schedule(policy="rra", encode_batch=2, decode_batch=3, decode_iterations=3),
    "multibin": Schedule(policy="multibin", decode_batch=2, boundaries=(3.0, 6.0), max_wait_s=0.02),
}
PROMPTS = [[1, 2, 3, 4, 5], [7, 8], [9, 10, 11, 50], [61], [33, 34, 35, 36], [90, 3], [15, 16, 17]]
NEW_TOKENS = [8, 3, 8, 5, 1, 2, 7]
CUTS = {1: (0, 3), 2: (0, 1, 3), 3: (0, 1, 2, 3)}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save_tiny_model("llama", tmp_path_factory.mktemp("policies") / "llama")


@pytest.fixture(scope="module")
def expected(model_dir):
    model = load_reference(model_dir)
    model.generation_config.eos_token_id = None
    answers = []
    for prompt, count in zip(PROMPTS, NEW_TOKENS, strict=True):
        ids = torch.tensor([prompt])
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count
        )
        answers.append(made[0, len(prompt) :].tolist())
    return answers


def _requests(gap_s: float) -> list[Request]:
    return [
        Request(
            id=number,
            prompt_token_ids=tuple(prompt),
            max_new_tokens=count,
            arrival_s=gap_s * number,
        )
        for number, (prompt, count) in enumerate(zip(PROMPTS, NEW_TOKENS, strict=True))
    ]


PIPELINES = [*((stages, "threads") for stages in CUTS), (3, "torch")]


# Arrivals one by one on the longest pipeline alone; the lanes run them on all.
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(
    ("stages", "transport", "gap_s"),
    [
        *(pytest.param(*one, 0.0, id=f"{one[0]}-{one[1]}-at once") for one in PIPELINES),
        *(
            pytest.param(
                *one,
                0.015,
                id=f"{one[0]}-{one[1]}-one by one",
                marks=[] if one == (max(CUTS), "threads") else pytest.mark.slow,
            )
            for one in PIPELINES
        ),
    ],
)
def test_tokens_are_the_same_under_every_policy(
    name, stages, transport, gap_s, model_dir, expected
):
    plan = make_plan(CUTS[stages], prefill=2, decode=2, batch=SLOTS)
    plan = replace(plan, schedule=SCHEDULES[name])
    answers, measurement = run_threads(plan, model_dir, _requests(gap_s), transport=transport)
    assert {number: list(tokens) for number, (tokens, _) in answers.items()} == dict(
        enumerate(expected)
    )
    assert measurement.policy == SCHEDULES[name].policy
    assert [record.new_tokens for record in measurement.records] == NEW_TOKENS
    for number, record in enumerate(measurement.records):
        assert record.request == number
        assert record.arrival_s == pytest.approx(gap_s * number)
        assert record.arrival_s <= record.start_s < record.first_token_s <= record.end_s


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("stages", "transport"), [(1, "threads"), (3, "threads"), (3, "torch")])
def test_drafts_change_no_token(name, stages, transport, model_dir, expected, monkeypatch):
    sequences = [prompt + answer for prompt, answer in zip(PROMPTS, expected, strict=True)]
    draft_freely(monkeypatch, AnswerDrafts(sequences))
    plan = make_plan(CUTS[stages], prefill=2, decode=2, batch=SLOTS)
    plan = replace(plan, schedule=SCHEDULES[name])
    answers, made = run_threads(
        plan, model_dir, _requests(0.0), speculative=DRAFTS, transport=transport
    )
    assert [list(answers[number][0]) for number in range(len(PROMPTS))] == expected
    assert [record.new_tokens for record in made.records] == NEW_TOKENS
    assert 0 < made.accepted_tokens < made.draft_tokens


@pytest.mark.parametrize("name", ["hybrid", "rra"])
@pytest.mark.parametrize("stages", [1, 3])
def test_a_draft_model_changes_no_token(name, stages, model_dir, expected, monkeypatch):
    draft_freely(monkeypatch)
    config = SpeculativeConfig(method="draft_model", model=str(model_dir), num_speculative_tokens=3)
    plan = make_plan(CUTS[stages], prefill=2, decode=2, batch=SLOTS)
    plan = replace(plan, schedule=SCHEDULES[name])
    answers, made = run_threads(plan, model_dir, _requests(0.0), speculative=config)
    assert [list(answers[number][0]) for number in range(len(PROMPTS))] == expected
    assert [record.new_tokens for record in made.records] == NEW_TOKENS
    assert 0 < made.accepted_tokens == made.draft_tokens


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("stages", CUTS)
def test_prompts_that_begin_as_earlier_ones_have_the_same_answers(name, stages, model_dir):
    model = load_reference(model_dir)
    model.generation_config.eos_token_id = None
    begin = [(7 * number) % 90 + 3 for number in range(36)]
    prompts = [[*begin[: 36 - number % 3], 40 + number] for number in range(3 * SLOTS)]
    requests = [
        Request(id=number, prompt_token_ids=tuple(prompt), max_new_tokens=4)
        for number, prompt in enumerate(prompts)
    ]
    plan = make_plan(CUTS[stages], prefill=2, decode=2, batch=SLOTS, prompt_tokens=40)
    plan = replace(plan, schedule=SCHEDULES[name])
    answers, made = run_threads(plan, model_dir, requests)
    for number, prompt in enumerate(prompts):
        whole, _ = generate_alone(model, prompt, 4)
        assert list(answers[number][0]) == whole[len(prompt) :]
    assert made.cached_tokens >= 32 * SLOTS


def test_waa_without_stages_of_its_own_is_refused_in_a_sentence(model_dir):
    plan = replace(make_plan(CUTS[2], batch=8), schedule=default_schedule("waa", 8))
    with pytest.raises(SpecError, match="stages of their own"):
        run_threads(plan, model_dir, _requests(0.0))
