"""Speculative decoding changes no answer, no distribution and no log-probability."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch
from helpers.block_steps import BlockSteps
from helpers.byte_tokenizer import EOS, TOKENS, text_of, write_byte_tokenizer
from helpers.online_runs import BLOCK, FREE, greedy, limits, request, serve
from helpers.scripted_channel import Script
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmpq.batching.speculation import DraftCredit, RowCost, SpeculativeConfig
from llmpq.dist.engine import engine as engine_module
from llmpq.dist.engine import online_run
from llmpq.dist.io.sampling_params import SamplingParams, StructuredOutputsParams
from llmpq.dist.io.structured_outputs import GrammarCompiler

torch.set_num_threads(1)
LOOKUP = SpeculativeConfig(num_speculative_tokens=5, prompt_lookup_min=1)
SAMPLED = replace(FREE, temperature=1.0, max_tokens=20)


@pytest.fixture(scope="module")
def steps(tiny_model) -> BlockSteps:
    return BlockSteps(tiny_model("llama", seed=1), num_blocks=64, block_size=BLOCK)


@pytest.fixture
def free_drafts(monkeypatch) -> None:
    """Drafts may lose any number of steps."""
    monkeypatch.setattr(DraftCredit, "longest", lambda *_: 31)


class Drafts:
    """Proposes tokens, a share of which are those that the model has the best scores for."""

    def __init__(self, steps: BlockSteps, seed: int, share: float, other: tuple[int, int]) -> None:
        self.steps, self.chance, self.share, self.other = steps, random.Random(seed), share, other

    def __call__(self, _: SpeculativeConfig) -> Drafts:
        return self

    def propose(self, tokens: list[int], most: int) -> list[int]:
        draft: list[int] = []
        for _ in range(self.chance.randint(0, most)):
            known = tuple(tokens + draft)
            is_best = self.chance.random() < self.share
            best = int(self.steps.scores(known).argmax()) if is_best else 0
            draft.append(best if is_best else self.chance.randrange(*self.other))
        return draft


def answers(script: Script) -> dict:
    """Return tokens, log-probabilities and ends of all answers."""
    found = {}
    for name, outputs in script.outputs.items():
        logprobs = [item for output in outputs for item in output.logprobs or ()]
        last = outputs[-1]
        end = last.finish_reason, last.stop_reason, last.is_form_complete
        assert {output.finish_reason for output in outputs[:-1]} <= {None}
        found[name] = script.tokens(name), logprobs, outputs[0].prompt_logprobs, end
    return found


PROMPTS = st.lists(st.integers(3, 6), min_size=1, max_size=16)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompts=st.lists(
        st.tuples(PROMPTS, st.integers(1, 16), st.integers(0, 30), st.integers(0, 40)),
        min_size=1,
        max_size=6,
    ),
    drafts=st.none() | st.tuples(st.integers(0, 999), st.sampled_from([0.0, 0.6, 1.0])),
    num_speculative_tokens=st.integers(1, 7),
    budget=st.integers(1, 24),
    num_blocks=st.integers(8, 24),
    most=st.integers(1, 3),
    prefix_caching=st.booleans(),
    order=st.sampled_from(["fcfs", "no_preempt", "spf"]),
    max_sequences=st.integers(1, 6),
)
def test_tokens_equal_generate_under_random_schedules_and_drafts(
    steps, free_drafts, prompts, drafts, num_speculative_tokens, budget, num_blocks, most,
    prefix_caching, order, max_sequences,
):  # fmt: skip
    script, aborted = Script(), set()
    for number, (prompt, count, call, abort) in enumerate(prompts):
        script.add(call + 1, request(number, prompt, replace(FREE, max_tokens=count)))
        if abort < 20:
            script.abort(call + 1 + abort, f"r{number}")
            aborted.add(number)
    with pytest.MonkeyPatch.context() as patch:
        if drafts is not None:
            patch.setattr(engine_module, "PromptLookup", Drafts(steps, *drafts, (3, 7)))
        engine = serve(
            steps,
            script,
            limits(
                token_budget=budget,
                num_blocks=num_blocks,
                steps_in_flight=most,
                prefix_caching=prefix_caching,
                max_sequences=max_sequences,
                num_speculative_tokens=num_speculative_tokens,
            ),
            order,
            speculative=replace(LOOKUP, num_speculative_tokens=num_speculative_tokens),
        )
    assert not script.refused
    found = answers(script)
    for number, (prompt, count, _, _) in enumerate(prompts):
        expected = greedy(steps, prompt, count)
        tokens, _, _, end = found.get(f"r{number}", ([], [], None, (None,)))
        assert tokens == expected[: len(tokens)]
        assert end[0] == ("length" if len(tokens) == count else None)
        assert len(tokens) == count or number in aborted
    scheduler = engine.scheduler
    assert scheduler.free_blocks == num_blocks
    assert scheduler.is_idle
    assert scheduler.drafts.num_accepted_tokens <= scheduler.drafts.num_draft_tokens


VARIED = [
    SAMPLED,
    replace(SAMPLED, temperature=0.3, seed=4, logprobs=3),
    replace(SAMPLED, seed=5, top_k=3, min_p=0.1, top_p=0.9),
    replace(FREE, max_tokens=20, repetition_penalty=1.2, frequency_penalty=0.3, logprobs=0),
    replace(FREE, max_tokens=20, logit_bias={4: 3.0}, bad_words_ids=((4, 4), (5,))),
    replace(SAMPLED, allowed_token_ids=(3, 4), stop_token_ids=(4,), min_tokens=9),
    replace(FREE, max_tokens=20, prompt_logprobs=1, logprobs=1),
    SamplingParams(max_tokens=20, temperature=1.0, allowed_token_ids=(2, 3, 4)),
]


@pytest.mark.parametrize(("lookup", "budget"), [(True, 7), (False, 40)])
def test_sampled_answers_are_those_of_an_engine_without_drafts(
    steps, free_drafts, monkeypatch, lookup, budget
):
    prompts = [[3, 4, 5, 6, 3, 4, 5], [4], [3, 3, 3, 3, 3, 3]]
    found = []
    for speculative in (None, LOOKUP):
        if speculative and not lookup:
            monkeypatch.setattr(engine_module, "PromptLookup", Drafts(steps, 0, 0.5, (3, 6)))
        script = Script()
        for number, (params, prompt) in enumerate(itertools.product(VARIED, prompts)):
            script.add(1 + number, request(number, prompt, params))
        engine = serve(
            steps,
            script,
            limits(token_budget=budget, num_speculative_tokens=5 if speculative else 0),
            speculative=speculative,
        )
        found.append(answers(script))
    assert found[0] == found[1]
    assert {end[0] for _, _, _, end in found[0].values()} == {"length", "stop"}
    assert engine.scheduler.drafts.num_accepted_tokens > (50 if budget == 40 else 0)


def test_drawn_pairs_have_the_models_probabilities(steps, free_drafts, monkeypatch):
    """Chi-squared of 1,800 fixed draws of two tokens each, some of which were drafts."""
    allowed, prompt, draws = (3, 4, 5, 6, 7), [3, 4, 5, 6, 7], 1800
    params = replace(SAMPLED, max_tokens=3, allowed_token_ids=allowed)
    monkeypatch.setattr(engine_module, "PromptLookup", Drafts(steps, 1, 0.0, (3, 8)))
    script = Script()
    for number in range(draws):
        script.add(1, request(number, prompt, params))
    engine = serve(
        steps,
        script,
        limits(token_budget=32, num_blocks=64, num_speculative_tokens=2),
        speculative=replace(LOOKUP, num_speculative_tokens=2),
    )
    accepted = (
        engine.scheduler.drafts.num_accepted_tokens / engine.scheduler.drafts.num_draft_tokens
    )
    assert 0.1 < accepted < 0.9
    assert engine.scheduler.drafts.num_drafts > draws / 4

    def shares(context: list[int]) -> torch.Tensor:
        return torch.softmax(steps.scores(tuple(context))[list(allowed)].double(), -1)

    counts = Counter(tuple(script.tokens(f"r{number}")[1:]) for number in range(draws))
    expected: Counter = Counter()
    for first, share in zip(allowed, shares(prompt), strict=True):
        for second, other in zip(allowed, shares([*prompt, first]), strict=True):
            for third, last in zip(allowed, shares([*prompt, first, second]), strict=True):
                expected[second, third] += draws * float(share * other * last)
    squares = sum((counts[pair] - mean) ** 2 / mean for pair, mean in expected.items())
    assert min(expected.values()) > 5
    assert squares < 51.2  # of 24 degrees of freedom: exceeded once in a thousand


def test_prompt_lookup_saves_steps(steps, monkeypatch):
    monkeypatch.setattr(RowCost, "observe", lambda *_: None)  # the clock here counts calls
    prompt, dispatched = [3, 4, 5, 6, 7, 8], []
    params = replace(FREE, max_tokens=26, logit_bias={3: 100.0})
    for speculative in (None, LOOKUP):
        script = Script()
        script.add(1, request(0, prompt, params))
        script.add(400, request(1, [3], replace(FREE, max_tokens=1)))  # sends the counters again
        serve(
            steps,
            script,
            limits(token_budget=32, num_speculative_tokens=5, row_cost=0.05),
            speculative=speculative,
        )
        assert script.tokens("r0") == [3] * 26
        dispatched.append(steps.dispatched - 1)
    assert dispatched[0] == 26
    assert dispatched[1] == 26 - script.stats["num_accepted_tokens"]
    assert script.stats["num_accepted_tokens"] > 8
    assert script.stats["num_drafts"] <= dispatched[1]
    assert script.stats["num_draft_tokens"] >= script.stats["num_accepted_tokens"]


def test_scores_that_are_no_numbers_end_an_answer_after_its_accepted_tokens(
    steps, free_drafts, monkeypatch
):
    prompt = [3, 4, 5]
    expected = greedy(steps, prompt, 12)
    broken = (*prompt, *expected[:5])
    real = BlockSteps.scores

    def scores(self, tokens):
        found = real(self, tokens)
        return torch.full_like(found, float("nan")) if tokens == broken else found

    monkeypatch.setattr(engine_module, "PromptLookup", Drafts(steps, 0, 1.0, (3, 4)))
    monkeypatch.setattr(BlockSteps, "scores", scores)
    script = Script()
    script.add(1, request(0, prompt, replace(FREE, max_tokens=12)))
    engine = serve(steps, script, limits(num_speculative_tokens=7), speculative=LOOKUP)
    assert script.tokens("r0") == expected[:5]
    assert script.outputs["r0"][-1].finish_reason == "error"
    assert engine.scheduler.free_blocks == 64


class AtOnce:
    """An executor that runs its tasks when they are submitted."""

    def __init__(self, *_) -> None: ...

    def submit(self, function, *arguments):
        future: Future = Future()
        future.set_result(function(*arguments))
        return future

    def shutdown(self, **_) -> None: ...


@pytest.mark.parametrize(
    "form",
    [
        StructuredOutputsParams(regex="(ab){6}(c|d)"),
        StructuredOutputsParams(
            json={"type": "array", "items": {"enum": [True]}, "minItems": 4, "maxItems": 5}
        ),
    ],
)
def test_answers_of_a_form_are_those_of_an_engine_without_drafts(
    tiny_model, tmp_path, monkeypatch, free_drafts, form
):
    pytest.importorskip("llguidance")
    monkeypatch.setattr(online_run, "ThreadPoolExecutor", AtOnce)
    model = tiny_model("llama", seed=1, vocab_size=len(TOKENS))
    own = BlockSteps(model, num_blocks=64, block_size=BLOCK)
    grammars = GrammarCompiler(write_byte_tokenizer(tmp_path), [EOS])
    params = SamplingParams(temperature=1.0, max_tokens=36, structured_outputs=form)
    found = []
    for speculative in (None, LOOKUP):
        script = Script()
        for number in range(4):
            script.add(1, request(number, [5, 6], params))
        engine = serve(
            own,
            script,
            limits(num_speculative_tokens=5 if speculative else 0),
            speculative=speculative,
            grammars=grammars,
        )
        found.append(answers(script))
    assert found[0] == found[1]
    assert engine.scheduler.drafts.num_accepted_tokens > 1
    for tokens, _, _, end in found[0].values():
        assert end[0] == "stop" or form.json
        assert text_of(tokens).startswith(("ababab", "["))
