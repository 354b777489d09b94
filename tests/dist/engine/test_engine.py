"""The pipeline, all ranks as threads of this process, says what transformers' generate says."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.answer_drafts import DRAFTS, AnswerDrafts, draft_freely
from helpers.ranks import make_plan, rank_contexts, run_threads
from helpers.tiny_models import generate_alone, load_reference

from llmpq.batching import (
    Decision,
    Decode,
    PolicyScheduler,
    Prefill,
    SchedulerView,
    Wait,
    uniform_depth,
)
from llmpq.batching.policy_scheduler import slot_limits
from llmpq.dist.engine.batch_run import BatchRun
from llmpq.dist.engine.executor import PipelineExecutor
from llmpq.dist.io.prompts import Request
from llmpq.dist.io.sampling_params import SamplingParams
from llmpq.dist.launch.rank import load_runner, run_master
from llmpq.dist.metrics.stats import StageClock
from llmpq.errors import StageError
from llmpq.models import Master
from llmpq.quant.loading.master import load_master
from llmpq.quant.modules.layer import quantize_layer_
from llmpq.spec.plan import default_schedule

torch.set_num_threads(1)

CUTS = {1: (0, 3), 2: (0, 1, 3), 3: (0, 1, 2, 3)}
FAMILIES = {
    "opt": {},
    "bloom": {},
    "llama": {},
    "mistral": {"sliding_window": 6},
    "qwen3": {},
    "gemma": {},
    "gpt_neox": {},
    "mixtral": {},
}
PROMPTS = [
    [1, 2, 3, 4, 5, 11, 12, 13, 14],
    [7, 8],
    [9, 10, 11, 50, 51],
    [61],
    [33, 34, 35, 36],
    [90, 3, 90],
    [15, 16, 17, 18, 19, 20, 21],
]
NEW_TOKENS = [8, 3, 8, 5, 1, 8, 7]
_expected: dict[tuple[Path, int], list[int]] = {}


def expected_tokens(model_dir: Path, number: int) -> list[int]:
    """What transformers generates for a prompt alone, without end tokens."""
    if (model_dir, number) not in _expected:
        model = load_reference(model_dir)
        model.generation_config.eos_token_id = None
        for index, prompt in enumerate(PROMPTS):
            tokens, _ = generate_alone(model, prompt, max(NEW_TOKENS))
            _expected[model_dir, index] = tokens[len(prompt) :]
    return _expected[model_dir, number][: NEW_TOKENS[number]]


def requests_with_stops(model_dir: Path) -> tuple[list[Request], dict[int, list[int]]]:
    """All prompts; every other one with a stop token that its own answer contains."""
    requests, answers = [], {}
    for number, prompt in enumerate(PROMPTS):
        tokens = expected_tokens(model_dir, number)
        stops = frozenset(tokens[len(tokens) // 2 :][:1]) if number % 2 == 0 else frozenset()
        end = next((i + 1 for i, token in enumerate(tokens) if token in stops), len(tokens))
        answers[number] = tokens[:end]
        requests.append(
            Request(
                id=number,
                prompt_token_ids=tuple(prompt),
                max_new_tokens=NEW_TOKENS[number],
                stop_token_ids=stops,
            )
        )
    return requests, answers


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_those_of_transformers(tiny_model, family, stages):
    model_dir = tiny_model(family, seed=1, **FAMILIES[family])
    requests, expected = requests_with_stops(model_dir)
    for prefill, decode, batch in ((3, 4, 5), (1, 3, 7), (2, 5, 5)):
        plan = make_plan(CUTS[stages], prefill=prefill, decode=decode, batch=batch)
        answers, measurement = run_threads(plan, model_dir, requests)
        assert {number: list(tokens) for number, (tokens, _) in answers.items()} == expected
        for number, (tokens, reason) in answers.items():
            is_stop = tokens[-1] in requests[number].stop_token_ids
            assert reason == ("stop" if is_stop else "length")
        assert measurement.generated_tokens == sum(len(tokens) for tokens in expected.values())
        assert [stage.rank for stage in measurement.stages] == list(range(stages))


def test_a_master_may_hold_no_layers(tiny_model):
    model_dir = tiny_model("llama", seed=1)
    requests, expected = requests_with_stops(model_dir)
    answers, _ = run_threads(make_plan((0, 0, 3), batch=4), model_dir, requests)
    assert {number: list(tokens) for number, (tokens, _) in answers.items()} == expected


@pytest.mark.parametrize("family", ["opt", "llama", "mixtral"])
def test_a_quantized_pipeline_equals_one_quantized_process(tiny_model, family):
    model_dir = tiny_model(family, seed=1)
    bits = (8, 4, 3)
    model = load_reference(model_dir)
    model.generation_config.eos_token_id = None
    decoder = getattr(model.model, "decoder", model.model)
    for layer, width in zip(decoder.layers, bits, strict=True):
        quantize_layer_(layer, width, torch.float32)
    plan = make_plan((0, 1, 2, 3), bits=bits, prefill=3, decode=2)
    requests = [
        Request(id=number, prompt_token_ids=tuple(prompt), max_new_tokens=max(NEW_TOKENS))
        for number, prompt in enumerate(PROMPTS)
    ]
    answers, _ = run_threads(plan, model_dir, requests)
    for number, prompt in enumerate(PROMPTS):
        tokens, _ = generate_alone(model, prompt, max(NEW_TOKENS))
        assert list(answers[number][0]) == tokens[len(prompt) :]


def test_sampling_does_not_depend_on_the_plan(tiny_model):
    model_dir = tiny_model("llama", seed=1)
    requests, greedy = requests_with_stops(model_dir)
    sampling = SamplingParams(temperature=1.0, top_p=0.9, seed=3)
    requests = [replace(request, sampling_params=sampling) for request in requests]
    alone, _ = run_threads(make_plan((0, 3)), model_dir, requests)
    plan = make_plan((0, 1, 3), prefill=2, decode=4)
    together, _ = run_threads(plan, model_dir, requests)
    assert together == alone
    assert {number: list(tokens) for number, (tokens, _) in alone.items()} != greedy


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("family", ["opt", "llama"])
def test_drafts_change_no_token(tiny_model, monkeypatch, family, stages):
    model_dir = tiny_model(family, seed=1)
    requests, expected = requests_with_stops(model_dir)
    # The whole answers: drafts go on after the stop tokens.
    answers = [prompt + _expected[model_dir, i] for i, prompt in enumerate(PROMPTS)]
    draft_freely(monkeypatch, AnswerDrafts(answers))
    for prefill, decode, batch in ((3, 4, 5), (1, 1, 7), (2, 5, 5)):
        plan = make_plan(CUTS[stages], prefill=prefill, decode=decode, batch=batch)
        found, made = run_threads(plan, model_dir, requests, speculative=DRAFTS)
        assert {number: list(tokens) for number, (tokens, _) in found.items()} == expected
        for number, (tokens, reason) in found.items():
            is_stop = tokens[-1] in requests[number].stop_token_ids
            assert reason == ("stop" if is_stop else "length")
        assert made.generated_tokens == sum(len(tokens) for tokens in expected.values())
        assert [record.new_tokens for record in made.records] == [
            len(expected[number]) for number in range(len(requests))
        ]
        assert 5 < made.accepted_tokens < made.draft_tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_prompt_lookup_changes_no_token(tiny_model, monkeypatch, temperature):
    """Sampled answers too: a random number depends on the position of its token alone."""
    model_dir = tiny_model("llama", seed=1)
    sampling = SamplingParams(temperature=temperature, seed=3, logit_bias={5: 9.0, 6: 9.0})
    requests = [
        Request(
            id=number, prompt_token_ids=tuple(prompt), max_new_tokens=8, sampling_params=sampling
        )
        for number, prompt in enumerate(PROMPTS)
    ]
    draft_freely(monkeypatch)
    plan = make_plan((0, 1, 3), prefill=2, decode=4)
    alone, _ = run_threads(plan, model_dir, requests)
    drafted, made = run_threads(plan, model_dir, requests, speculative=DRAFTS)
    assert drafted == alone
    assert made.accepted_tokens > 0


@pytest.mark.parametrize("drafts", [None, DRAFTS])
@pytest.mark.parametrize("stages", [1, 2])
def test_log_probabilities_are_those_of_the_model(tiny_model, monkeypatch, stages, drafts):
    model_dir = tiny_model("llama", seed=1)
    model = load_reference(model_dir)
    requests, expected = requests_with_stops(model_dir)
    asked = SamplingParams(logprobs=2)
    requests = [
        replace(one, sampling_params=asked if number % 2 else one.sampling_params)
        for number, one in enumerate(requests)
    ]
    draft_freely(monkeypatch)
    found = {}
    monkeypatch.setattr(
        "helpers.ranks.run_master",
        lambda context, all, finish: run_master(
            context, all, lambda one: (found.update({one.request.id: one.logprobs}), finish(one))
        ),
    )
    run_threads(make_plan(CUTS[stages], prefill=2, decode=4), model_dir, requests,
                speculative=drafts)  # fmt: skip
    for number, answer in expected.items():
        logprobs = found[number]
        if not number % 2:
            assert logprobs is None
            continue
        assert [one.token_id for one in logprobs] == answer
        with torch.inference_mode():
            logits = model(torch.tensor([PROMPTS[number] + answer])).logits[0].float()
        wanted = torch.log_softmax(logits, -1)[len(PROMPTS[number]) - 1 :]
        for one, row in zip(logprobs, wanted, strict=False):
            assert one.logprob == pytest.approx(float(row[one.token_id]), abs=1e-4)
            assert len(one.top) == 2
            assert one.top[0][0] == one.token_id  # greedy


@pytest.mark.parametrize("policy", ["hybrid", "static", "iteration", "rra"])
@pytest.mark.parametrize("stages", [1, 2])
def test_log_probabilities_of_prompts_are_those_of_the_model(
    tiny_model, monkeypatch, stages, policy
):
    """Of a prompt longer than planned and of short ones, beside prompts without them."""
    model_dir = tiny_model("llama", seed=1)
    model = load_reference(model_dir)
    prompts = [list(range(2, 41)), *PROMPTS[:4]]
    asked = SamplingParams(prompt_logprobs=2)
    requests = [
        Request(
            id=number,
            prompt_token_ids=tuple(prompt),
            max_new_tokens=3,
            sampling_params=SamplingParams() if number == 2 else asked,
        )
        for number, prompt in enumerate(prompts)
    ]
    plain = [replace(one, sampling_params=SamplingParams()) for one in requests]
    plan = make_plan(CUTS[stages], prefill=2, decode=4, batch=4, new_tokens=16)
    plan = replace(plan, schedule=default_schedule(policy, plan.workload.batch))
    expected, _ = run_threads(plan, model_dir, plain)
    found = {}
    monkeypatch.setattr(
        "helpers.ranks.run_master",
        lambda context, all, finish: run_master(
            context,
            all,
            lambda one: (found.update({one.request.id: one.prompt_logprobs}), finish(one)),
        ),
    )
    answers, made = run_threads(plan, model_dir, requests)
    assert answers == expected
    assert found.pop(2) is None
    for number, (first, *scores) in found.items():
        assert first is None
        assert [one.token_id for one in scores] == prompts[number][1:]
        with torch.inference_mode():
            logits = model(torch.tensor([prompts[number]])).logits[0].float()
        for one, row in zip(scores, torch.log_softmax(logits, -1), strict=False):
            assert one.logprob == pytest.approx(float(row[one.token_id]), abs=1e-4)
            best = row.topk(2)
            assert [token for token, _ in one.top] == best.indices.tolist()
            assert [value for _, value in one.top] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert all(one.start_s <= one.first_token_s for one in made.records)


@pytest.mark.parametrize("policy", ["hybrid", "static", "iteration", "rra"])
@pytest.mark.parametrize("stages", [1, 2])
def test_sequences_longer_than_planned_take_the_memory_of_several(tiny_model, stages, policy):
    """Prompts of up to 3 parts and 40 tokens, in slots of 32 for prompts of up to 16."""
    model_dir = tiny_model("llama", seed=1)
    model = load_reference(model_dir)
    model.generation_config.eos_token_id = None
    prompts = [[7 + number, *range(2, 2 + length)] for number, length in enumerate((3, 39, 16, 33))]
    requests, expected = [], {}
    for number, prompt in enumerate([*prompts, *PROMPTS]):
        asked = 9 if number < len(prompts) else 4
        requests.append(Request(id=number, prompt_token_ids=tuple(prompt), max_new_tokens=asked))
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            whole = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=asked, do_sample=False
            )
        expected[number] = whole[0, len(prompt) :].tolist()
    for prefill, decode, batch in ((2, 3, 4), (1, 2, 2)):
        plan = make_plan(CUTS[stages], prefill=prefill, decode=decode, batch=batch)
        plan = replace(plan, schedule=default_schedule(policy, batch))
        usual = replace(plan.workload, prompt_tokens=4, new_tokens=2, context_tokens=24)
        for work in (plan.workload, usual):
            found, _ = run_threads(replace(plan, workload=work), model_dir, requests)
            assert {number: list(tokens) for number, (tokens, _) in found.items()} == expected


def test_no_requests_is_a_run_too(tiny_model):
    answers, measurement = run_threads(make_plan((0, 1, 3)), tiny_model("llama", seed=1), [])
    assert answers == {}
    assert (measurement.requests, measurement.generated_tokens) == (0, 0)


class LastFirst:
    """A policy of another kind: one request at a time, the one that came last first."""

    holds_finished = False

    def decide(self, view: SchedulerView) -> Decision:
        if view.waiting and view.free_slots:
            return Prefill(requests=(view.waiting[-1].request,))
        if view.ready:
            return Decode(slots=(view.ready[-1].slot,))
        return Wait()


def lone_engine(model_dir, policy):
    """Return a master that has all layers and two slots."""
    device = torch.device("cpu")
    plan = make_plan((0, 3), batch=2)
    (context,) = rank_contexts(plan, model_dir)
    clock = StageClock(micro_batching=plan.micro_batching)
    limits = slot_limits(2, plan.workload.max_context_tokens)
    return BatchRun(
        executor=PipelineExecutor(
            master=load_master(model_dir, dtype=torch.float32, device=device),
            runner=load_runner(context, device),
            communicator=None,
            clock=clock,
        ),
        scheduler=PolicyScheduler(policy, limits, uniform_depth(1)),
        limits=limits,
        clock=clock,
    )


def test_the_engine_takes_any_policy(tiny_model):
    model_dir = tiny_model("llama", seed=1)
    requests, expected = requests_with_stops(model_dir)
    answers = {}
    engine = lone_engine(model_dir, LastFirst())
    made = engine.run(requests, lambda one: answers.update({one.request.id: one.token_ids}))
    assert {number: list(tokens) for number, tokens in answers.items()} == expected
    assert next(iter(answers)) in (len(requests) - 1, len(requests) - 2)
    assert made.requests == len(requests)


def test_scores_that_are_no_numbers_end_the_run_for_good(tiny_model, monkeypatch):
    model_dir = tiny_model("llama", seed=1)
    requests, _ = requests_with_stops(model_dir)
    monkeypatch.setattr(
        Master, "logits", lambda _, hidden: hidden.new_full((len(hidden), 9), math.nan)
    )
    with pytest.raises(StageError, match="NaN") as caught:
        lone_engine(model_dir, LastFirst()).run(requests, lambda *_: None)
    assert caught.value.is_permanent  # another start would read the same weights


class StopsAfterAnAnswer(LastFirst):
    """A policy that breaks once a request has left."""

    def __init__(self) -> None:
        self._most_alive = 0

    def decide(self, view: SchedulerView) -> Decision:
        alive = view.alive + len(view.waiting)
        self._most_alive = max(self._most_alive, alive)
        if alive < self._most_alive:
            raise RuntimeError("broken")
        return super().decide(view)


def test_an_answer_that_is_complete_is_handed_over_though_the_run_breaks(tiny_model):
    model_dir = tiny_model("llama", seed=1)
    requests, expected = requests_with_stops(model_dir)
    answers = {}
    engine = lone_engine(model_dir, StopsAfterAnAnswer())
    with pytest.raises(RuntimeError, match="broken"):
        engine.run(requests, lambda one: answers.update({one.request.id: one.token_ids}))
    (number,) = answers
    assert list(answers[number]) == expected[number]


@pytest.mark.parametrize("stages", [1, 2])
def test_sequences_that_grow_past_the_switch_of_longrope_are_those_of_transformers(
    tiny_model, stages
):
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 8,
    }
    model_dir = tiny_model("phi3", seed=1, rope_parameters=rope, original_max_position_embeddings=8)
    requests, expected = requests_with_stops(model_dir)
    for prefill, decode, batch in ((3, 4, 5), (1, 3, 7)):
        plan = make_plan(CUTS[stages], prefill=prefill, decode=decode, batch=batch)
        answers, _ = run_threads(plan, model_dir, requests)
        assert {number: list(tokens) for number, (tokens, _) in answers.items()} == expected


def test_sequences_beyond_the_length_before_yarn_are_those_of_transformers(tiny_model):
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0}
    model_dir = tiny_model("llama", seed=1, shape={"max_positions": 8}, rope_parameters=rope)
    requests, expected = requests_with_stops(model_dir)
    assert max(len(one.prompt_token_ids) + one.max_new_tokens for one in requests) > 8
    plan = make_plan(CUTS[2], prefill=3, decode=4, batch=5)
    answers, _ = run_threads(plan, model_dir, requests)
    assert {number: list(tokens) for number, (tokens, _) in answers.items()} == expected
