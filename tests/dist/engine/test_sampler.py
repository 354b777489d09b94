"""Sampling equals transformers' processors, and depends on a row's own request only."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
import transformers
from helpers.sampled import sampled
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from llmpq.dist.engine import engine
from llmpq.dist.engine.engine import SamplingState, change_scores, prompt_logprobs
from llmpq.dist.io.sampling_params import SamplingParams

torch.set_num_threads(1)

LOGITS = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
VOCAB = 40
PROMPT = [3, 7, 7, 11, 30]
ANSWER = [5, 6, 5, 9, 7, 5]


def chosen(logits: torch.Tensor, states: list[SamplingState]) -> list[int]:
    found = sampled(logits, states)
    assert all(token.error is None for token in found)
    return [token.token_id for token in found]


def counts(params: SamplingParams, draws: int = 2000) -> Counter[int]:
    states = [SamplingState(params, request=f"request {n}") for n in range(draws)]
    return Counter(chosen(LOGITS.expand(draws, -1), states))


def distribution(params: SamplingParams, logits: torch.Tensor, **state: object) -> torch.Tensor:
    """Return the probabilities of the tokens, measured by draws at evenly spaced random numbers."""

    class Fixed(SamplingState):
        place = 0.0

        def uniform(self, _: int = 0) -> float:
            return self.place

    draws = 20_000
    found = torch.zeros(len(logits))
    one = Fixed(params, **state)
    kept = counts_at(one, logits, draws)
    for token, count in kept.items():
        found[token] = count / draws
    return found


def counts_at(state: SamplingState, logits: torch.Tensor, draws: int) -> Counter[int]:
    found: Counter[int] = Counter()
    low, low_token = 0, None
    # Tokens are in the order of the cumulative distribution: search for where each one ends.
    while low < draws:
        state.place = (low + 0.5) / draws
        low_token = chosen(logits[None], [state])[0]
        first, last = low, draws
        while last - first > 1:
            middle = (first + last) // 2
            state.place = (middle + 0.5) / draws
            if chosen(logits[None], [state])[0] == low_token:
                first = middle
            else:
                last = middle
        found[low_token] += last - low
        low = last
    return found


def random_logits(seed: int) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def test_greedy_takes_the_best():
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, -1.0, 0.0]])
    assert chosen(logits, [SamplingState(), SamplingState()]) == [1, 0]


def test_draws_follow_the_distribution():
    found = counts(SamplingParams(temperature=1.0))
    for token, share in enumerate((0.5, 0.3, 0.15, 0.05)):
        assert abs(found[token] / 2000 - share) < 4 * math.sqrt(share * (1 - share) / 2000)


def test_temperature_sharpens():
    expected = 0.25 / (0.25 + 0.09 + 0.0225 + 0.0025)
    assert abs(counts(SamplingParams(temperature=0.5))[0] / 2000 - expected) < 0.05


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(temperature=1.0, top_k=2), {0, 1}),
        (SamplingParams(temperature=1.0, top_p=0.6), {0, 1}),
        (SamplingParams(temperature=1.0, top_p=0.4), {0}),
        (SamplingParams(temperature=1.0, top_k=99), {0, 1, 2, 3}),
        (SamplingParams(temperature=1.0, top_k=-1), {0, 1, 2, 3}),
        (SamplingParams(temperature=1.0, top_k=3, top_p=0.9), {0, 1, 2}),
        (SamplingParams(temperature=1.0, min_p=0.25), {0, 1, 2}),
        (SamplingParams(temperature=1.0, min_p=1.0), {0}),
    ],
)
def test_truncation_keeps(params, kept):
    assert set(counts(params)) == kept


WARPERS = {
    "temperature": ({"temperature": 0.7}, [hf.TemperatureLogitsWarper(0.7)]),
    "top_k": ({"top_k": 5}, [hf.TopKLogitsWarper(5)]),
    "top_p": ({"top_p": 0.8}, [hf.TopPLogitsWarper(0.8)]),
    "min_p": ({"min_p": 0.05}, [hf.MinPLogitsWarper(0.05)]),
    "all": (
        {"temperature": 1.5, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
        [
            hf.TemperatureLogitsWarper(1.5),
            hf.MinPLogitsWarper(0.02),
            hf.TopKLogitsWarper(12),
            hf.TopPLogitsWarper(0.9),
        ],
    ),
}


@pytest.mark.parametrize("name", WARPERS)
@pytest.mark.parametrize("seed", range(3))
def test_probabilities_equal_those_of_transformers_warpers(name, seed):
    options, warpers = WARPERS[name]
    logits = random_logits(seed)
    expected = logits[None].clone()
    for warper in warpers:
        expected = warper(torch.tensor([PROMPT]), expected)
    params = SamplingParams(**({"temperature": 1.0} | options))
    torch.testing.assert_close(
        distribution(params, logits), torch.softmax(expected[0], -1), atol=2e-4, rtol=0
    )


PROCESSORS = {
    "repetition_penalty": (
        {"repetition_penalty": 1.7},
        lambda: hf.RepetitionPenaltyLogitsProcessor(1.7),
    ),
    "bias": (
        {"logit_bias": {4: 3.5, 9: -8.0}},
        lambda: hf.SequenceBiasLogitsProcessor([[[4], 3.5], [[9], -8.0]]),
    ),
    "bad_words": (
        {"bad_words_ids": [[20], [7, 5, 8], [7, 5], [5, 6]]},
        lambda: hf.NoBadWordsLogitsProcessor([[20], [7, 5, 8], [7, 5], [5, 6]], eos_token_id=39),
    ),
    "min_tokens": (
        {"min_tokens": 7},
        lambda: hf.MinNewTokensLengthLogitsProcessor(len(PROMPT), 7, [2, 21], device="cpu"),
    ),
    "min_tokens_reached": (
        {"min_tokens": 6},
        lambda: hf.MinNewTokensLengthLogitsProcessor(len(PROMPT), 6, [2, 21], device="cpu"),
    ),
    "allowed_token_ids": (
        {"allowed_token_ids": [8, 3, 21]},
        lambda: hf.PrefixConstrainedLogitsProcessor(lambda *_: [3, 8, 21], 1),
    ),
}


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("seed", range(3))
def test_scores_equal_those_of_transformers_processors(name, seed):
    options, make = PROCESSORS[name]
    scores = random_logits(seed)
    expected = make()(torch.tensor([PROMPT + ANSWER]), scores[None].clone())[0]
    state = SamplingState(
        SamplingParams(**options),
        prompt_token_ids=PROMPT,
        stop_token_ids={2, 21},
        token_ids=ANSWER,
    )
    change_scores(scores[None], {0: state})
    torch.testing.assert_close(scores, expected)


def test_presence_and_frequency_penalties_count_the_answer_only():
    # OpenAI's formula: mu[j] - c[j] * frequency - (c[j] > 0) * presence
    scores = random_logits(0)
    counted = torch.bincount(torch.tensor(ANSWER), minlength=VOCAB)
    expected = scores - counted * 0.3 - (counted > 0) * 1.1
    params = SamplingParams(frequency_penalty=0.3, presence_penalty=1.1)
    state = SamplingState(params, prompt_token_ids=PROMPT, token_ids=ANSWER)
    change_scores(scores[None], {0: state})
    torch.testing.assert_close(scores, expected)


def test_generate_of_transformers_gives_the_same_greedy_tokens(tiny_model):
    model_dir = tiny_model("llama", seed=1)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir).eval()
    params = SamplingParams(
        repetition_penalty=1.3, bad_words_ids=[[17], [3, 4]], min_tokens=12, max_tokens=12
    )
    expected = model.generate(
        torch.tensor([PROMPT]),
        do_sample=False,
        max_new_tokens=12,
        min_new_tokens=12,
        repetition_penalty=1.3,
        bad_words_ids=[[17], [3, 4]],
    )[0, len(PROMPT) :].tolist()
    eos = model.generation_config.eos_token_id
    state = SamplingState(
        params, prompt_token_ids=PROMPT, stop_token_ids=() if eos is None else (eos,)
    )
    with torch.inference_mode():
        for _ in range(12):
            logits = model(torch.tensor([PROMPT + state.token_ids])).logits[:, -1].float()
            state.accept(chosen(logits, [state])[0])
    assert state.token_ids == expected


PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        "top_k": st.integers(-1, 50),
        "top_p": st.floats(0.05, 1.0),
        "min_p": st.floats(0.0, 1.0),
        "seed": st.integers(-5, 5),
        "repetition_penalty": st.floats(0.5, 2.0),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-10, 10), max_size=3),
        "bad_words_ids": st.lists(
            st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=2), max_size=3
        ),
        "allowed_token_ids": st.lists(st.integers(0, VOCAB - 1), min_size=5),
        "min_tokens": st.integers(0, 9),
        "logprobs": st.integers(-1, 5),
    },
)


@settings(max_examples=150)
@given(
    options=st.lists(PARAMS, min_size=2, max_size=6),
    answers=st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=8), min_size=6, max_size=6),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_a_token_does_not_depend_on_its_neighbours(options, answers, seed, data):
    def state(row: int) -> SamplingState:
        return SamplingState(
            SamplingParams(**options[row]),
            request=f"r{row}",
            prompt_token_ids=PROMPT,
            stop_token_ids=(2,),
            token_ids=answers[row],
        )

    rows = range(len(options))
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(options), VOCAB, generator=generator) * 3
    before = logits.clone()
    together = sampled(logits, [state(row) for row in rows])
    assert torch.equal(logits, before)
    order = data.draw(st.permutations(rows))
    regrouped = sampled(logits[order], [state(row) for row in order])
    for row in rows:
        alone = sampled(logits[row : row + 1], [state(row)])[0]
        assert together[row] == alone == regrouped[order.index(row)]


def test_seed_request_and_position_change_the_draw():
    def draws(seed: int, step: int, name: str = "r") -> list[int]:
        params = SamplingParams(temperature=1.0, seed=seed)
        states = [
            SamplingState(params, request=f"{name}{n}", token_ids=[0] * step) for n in range(20)
        ]
        return chosen(torch.zeros(20, 1000), states)

    assert draws(0, 1) == draws(0, 1)
    assert draws(0, 1) != draws(1, 1)
    assert draws(0, 1) != draws(0, 2)
    assert draws(0, 1) != draws(0, 1, "s")


def test_a_recomputed_state_equals_the_first_one():
    params = SamplingParams(
        temperature=1.0, repetition_penalty=1.5, frequency_penalty=0.5, bad_words_ids=[[1, 2]]
    )
    state = SamplingState(params, request="a", prompt_token_ids=PROMPT)
    for step in range(10):
        logits = random_logits(step)[None]
        again = SamplingState(
            params, request="a", prompt_token_ids=PROMPT, token_ids=state.token_ids
        )
        assert chosen(logits, [again]) == chosen(logits, [state])
        state.accept(chosen(logits, [state])[0])


def test_logprobs_are_those_of_the_unchanged_scores():
    logits = random_logits(4)
    params = SamplingParams(logprobs=3, allowed_token_ids=[int(logits.argmin())], temperature=0.5)
    found = sampled(logits[None], [SamplingState(params)])[0]
    expected = torch.log_softmax(logits, -1)
    assert found.token_id == int(logits.argmin())
    assert found.logprobs is not None
    assert found.logprobs.logprob == pytest.approx(float(expected.min()))
    tops = expected.topk(3)
    assert [token for token, _ in found.logprobs.top] == tops.indices.tolist()
    assert [value for _, value in found.logprobs.top] == pytest.approx(tops.values.tolist())


@pytest.mark.parametrize(("count", "width"), [(0, 0), (2, 2), (-1, VOCAB), (VOCAB + 5, VOCAB)])
def test_as_many_logprobs_as_asked_for(count, width):
    state = SamplingState(SamplingParams(logprobs=count))
    found = sampled(random_logits(1)[None], [state])[0].logprobs
    assert found is not None
    assert len(found.top) == width


def test_prompt_logprobs_are_those_of_the_next_tokens():
    logits = torch.stack([random_logits(seed) for seed in range(4)])
    found = prompt_logprobs(logits, range(len(logits)), PROMPT[1:], 2)
    expected = torch.log_softmax(logits, -1)
    for position, item in enumerate(found):
        assert item.token_id == PROMPT[position + 1]
        assert item.logprob == pytest.approx(float(expected[position, item.token_id]))
        assert len(item.top) == 2


def test_scores_that_are_no_numbers_fail_their_row_alone():
    logits = torch.tensor([[math.nan, 1.0], [0.0, 1.0]])
    first, second = sampled(logits, [SamplingState(), SamplingState()])
    assert "NaN" in str(first.error)
    assert (second.token_id, second.error) == (1, None)


def test_a_row_without_allowed_tokens_fails_alone():
    none_left = SamplingParams(allowed_token_ids=[2], min_tokens=1)
    states = [SamplingState(none_left, stop_token_ids=[2]), SamplingState()]
    first, second = sampled(torch.zeros(2, 5), states)
    assert "no token" in str(first.error)
    assert second.error is None


@settings(max_examples=60)
@given(
    rows=st.lists(st.tuples(st.integers(0, 1000), st.floats(0.05, 0.95)), min_size=1, max_size=5)
)
def test_a_gpu_keeps_the_tokens_that_a_cpu_keeps(rows):
    """Of many rows at once, without the host."""
    scores = torch.stack([random_logits(seed) for seed, _ in rows])
    top_p = torch.tensor([[share] for _, share in rows])
    found = engine._nuclei(scores, top_p)
    for row, (_, share) in enumerate(rows):
        assert torch.equal(found[row], engine._nucleus(scores[row], share))


@settings(max_examples=60, deadline=None)
@given(options=st.lists(PARAMS, min_size=1, max_size=6))
def test_nothing_is_read_before_all_tokens_are_chosen(options):
    """On the meta device, where what the host reads raises an error."""
    choices = [
        engine.Choice(
            row,
            SamplingState(
                SamplingParams(**one), prompt_token_ids=PROMPT, stop_token_ids=(2,),
                token_ids=ANSWER,
            ),
        )
        for row, one in enumerate(options)
    ]  # fmt: skip
    logits = torch.empty(len(options), VOCAB, device="meta")
    parts = engine._choose_some(logits, logits.argmax(dim=-1), choices)
    assert parts[0].shape == (len(options),)
