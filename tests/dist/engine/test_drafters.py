"""A draft model proposes its own greedy tokens, and changes no answer."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from helpers.answer_drafts import draft_freely
from helpers.block_steps import BlockSteps
from helpers.online_runs import BLOCK, FREE, fresh, greedy, limits, request, serve
from helpers.ranks import make_plan
from helpers.scripted_channel import Script
from helpers.tiny_models import generate_alone, load_reference
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmpq.batching.engine_step import DraftLimits, DraftModelSchedule, DraftWork
from llmpq.batching.speculation import SpeculativeConfig
from llmpq.dist.engine.drafters import DraftModel
from llmpq.dist.io.job import Job
from llmpq.dist.launch.draft_runner import load_draft_model
from llmpq.options.engine import EngineOptions
from llmpq.options.limits import MOST_FIRST_COST, draft_limits
from llmpq.spec.huggingface.families import load_model_dir

torch.set_num_threads(1)
SMALL = {"layers": 1, "hidden": 16, "intermediate": 32, "heads": 2, "kv_heads": 1}
WIDE = {"layers": 3, "hidden": 128, "intermediate": 192, "heads": 4, "kv_heads": 2}
"""Wide enough for compiled decode steps."""
SAMPLED = replace(FREE, temperature=1.0, max_tokens=20)


@pytest.fixture(scope="module")
def steps(tiny_model) -> BlockSteps:
    return BlockSteps(tiny_model("llama", seed=1), num_blocks=64, block_size=BLOCK)


@pytest.fixture(scope="module")
def small(tiny_model) -> BlockSteps:
    folder = tiny_model("llama", seed=7, shape=SMALL)
    return BlockSteps(folder, num_blocks=64, block_size=BLOCK)


@pytest.fixture(scope="module")
def same(tiny_model, steps) -> BlockSteps:
    """The model itself, with blocks of its own."""
    found = BlockSteps(tiny_model("llama", seed=1), num_blocks=64, block_size=BLOCK)
    found.known = steps.known
    return found


@pytest.fixture
def free_drafts(monkeypatch) -> None:
    """Drafts may lose any number of steps."""
    draft_freely(monkeypatch)


def drafting(steps: BlockSteps, token_budget: int = 16) -> DraftModel:
    return DraftModel(fresh(steps, 1), block_size=BLOCK, token_budget=token_budget)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), num_blocks=st.integers(6, 24), budget=st.integers(1, 16))
def test_drafts_are_the_models_greedy_tokens(small, free_drafts, seed, num_blocks, budget):
    """Whatever was accepted, and whichever sequences lost their blocks meanwhile."""
    chance = random.Random(seed)
    schedule = DraftModelSchedule(DraftLimits(num_blocks=num_blocks, cost=0.2), BLOCK)
    model = drafting(small, budget)
    texts = {
        number: [chance.randrange(3, 7) for _ in range(chance.randint(1, 12))]
        for number in range(4)
    }
    for _ in range(12):
        chosen = [number for number in texts if chance.random() < 0.6]
        counts = {
            number: schedule.reserve(number, len(texts[number]), chance.randint(1, 4))
            for number in chosen
        }
        works = schedule.take_works()
        assert {work.request: work.length for work in works} == {
            number: count for number, count in counts.items() if count
        }
        drafts = [[]] * len(works)
        if works:
            drafts = model.propose(works, [texts[work.request] for work in works])
        for work, draft in zip(works, drafts, strict=True):
            text = texts[work.request]
            assert draft == greedy(small, text, work.length)
            accepted = chance.randint(0, work.length)
            text += [*draft[:accepted], chance.randrange(3, 7)]
            schedule.verify(work.request, accepted, 4)
        for number in chosen:
            if not counts[number]:
                texts[number].append(chance.randrange(3, 7))
            if len(texts[number]) > BLOCK * num_blocks - 6 or chance.random() < 0.1:
                schedule.forget(number)
                texts[number] = [chance.randrange(3, 7)]


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompts=st.lists(
        st.tuples(
            st.lists(st.integers(3, 6), min_size=1, max_size=16),
            st.integers(1, 16),
            st.integers(0, 30),
            st.integers(0, 40),
        ),
        min_size=1,
        max_size=6,
    ),
    is_same=st.booleans(),
    most=st.integers(1, 7),
    budget=st.integers(1, 24),
    blocks=st.tuples(st.integers(8, 24), st.integers(1, 24)),
    in_flight=st.integers(1, 3),
    prefix_caching=st.booleans(),
    order=st.sampled_from(["fcfs", "no_preempt", "spf"]),
)
def test_tokens_equal_generate_under_random_schedules(
    steps, same, small, free_drafts, prompts, is_same, most, budget, blocks, in_flight,
    prefix_caching, order,
):  # fmt: skip
    script, aborted = Script(), set()
    for number, (prompt, count, call, abort) in enumerate(prompts):
        script.add(call + 1, request(number, prompt, replace(FREE, max_tokens=count)))
        if abort < 20:
            script.abort(call + 1 + abort, f"r{number}")
            aborted.add(number)
    engine = serve(
        steps,
        script,
        limits(
            token_budget=budget,
            num_blocks=blocks[0],
            steps_in_flight=in_flight,
            prefix_caching=prefix_caching,
            num_speculative_tokens=most,
            draft=DraftLimits(num_blocks=blocks[1], cost=0.2),
        ),
        order,
        draft_model=drafting(same if is_same else small, budget),
    )
    assert not script.refused
    for number, (prompt, count, _, _) in enumerate(prompts):
        tokens = script.tokens(f"r{number}")
        assert tokens == greedy(steps, prompt, count)[: len(tokens)]
        assert len(tokens) == count or number in aborted
    scheduler = engine.scheduler
    assert scheduler.free_blocks == blocks[0]
    assert scheduler.is_idle
    if is_same and not aborted:
        lost = scheduler.drafts.num_draft_tokens - scheduler.drafts.num_accepted_tokens
        assert lost == 0  # the draft of an answer ends before its last token


@pytest.mark.parametrize("is_same", [True, False])
def test_sampled_answers_are_those_without_drafts(steps, same, small, free_drafts, is_same):
    prompts = [[3, 4, 5, 6, 3, 4, 5], [3] * 20]
    varied = [
        SAMPLED,
        replace(SAMPLED, temperature=0.3, seed=4, logprobs=3),
        replace(FREE, max_tokens=20, repetition_penalty=1.2, logit_bias={4: 3.0}, logprobs=0),
        replace(SAMPLED, allowed_token_ids=(3, 4), stop_token_ids=(4,), min_tokens=9),
    ]
    found = []
    for draft in (None, DraftLimits(num_blocks=64, cost=0.2)):
        script = Script()
        for number, params in enumerate(varied):
            for place, prompt in enumerate(prompts):
                script.add(1 + number, request(2 * number + place, prompt, params))
        engine = serve(
            steps,
            script,
            limits(token_budget=40, num_speculative_tokens=4 if draft else 0, draft=draft),
            draft_model=drafting(same if is_same else small) if draft else None,
        )
        found.append(
            {
                name: (
                    script.tokens(name),
                    [item for output in outputs for item in output.logprobs or ()],
                    outputs[-1].finish_reason,
                )
                for name, outputs in script.outputs.items()
            }
        )
    assert found[0] == found[1]
    assert engine.scheduler.drafts.num_draft_tokens > 40
    assert engine.scheduler.drafts.num_accepted_tokens > 40 or not is_same


class Wrong(DraftModel):
    """Proposes a token that no model chooses."""

    def __init__(self) -> None: ...

    def propose(self, works, _):
        return [[99] * work.length for work in works]


def test_a_wrong_model_soon_drafts_no_more(steps):
    """Of 40 requests one after the other, only the first ones have drafts."""
    script = Script()
    params = replace(FREE, max_tokens=16, bad_words_ids=((99,),))
    for number in range(40):
        script.add(1, request(number, [3 + number % 4] * 10, params))
    engine = serve(
        steps,
        script,
        limits(
            max_sequences=1,
            num_speculative_tokens=4,
            token_budget=32,
            draft=DraftLimits(num_blocks=64, cost=0.2),
        ),
        draft_model=Wrong(),
    )
    assert engine.scheduler.drafts.num_accepted_tokens == 0
    assert 0 < engine.scheduler.drafts.num_drafts < 30


@pytest.mark.parametrize("bits", [None, 8, 3])
def test_the_draft_runner_computes_the_loaded_model(tiny_model, bits):
    """Tokens of one sequence, whose prompt is longer than a pass, and of three together."""
    model_dir = tiny_model("llama", seed=1, shape=WIDE)
    config = SpeculativeConfig(
        method="draft_model", model=str(model_dir), num_speculative_tokens=4, bits=bits
    )
    plan = make_plan((0, 3), batch=4, prompt_tokens=48, new_tokens=16)
    job = Job(
        strategy=model_dir, model_dir=model_dir, prompts=model_dir, output=model_dir,
        engine=EngineOptions(speculative_config=config, token_budget=20),
    )  # fmt: skip
    model = load_draft_model(job, plan, torch.device("cpu"))
    assert model is not None
    reference = load_reference(model_dir)
    reference.generation_config.eos_token_id = None
    prompts = [[(7 * number) % 90 + 3 for number in range(30)], [3, 4], [50] * 9]
    drafts = model.propose(
        [
            DraftWork(number, 0, len(prompt), 4 - number, (3 * number, 3 * number + 1, 9))
            for number, prompt in enumerate(prompts)
        ],
        prompts,
    )
    for number, prompt in enumerate(prompts):
        expected = generate_alone(reference, prompt, 4 - number)[0][len(prompt) :]
        assert len(drafts[number]) == 4 - number
        assert drafts[number] == expected or bits == 3


def test_no_draft_model_is_loaded_without_one(tiny_model):
    model_dir = tiny_model("llama", seed=1)
    config = SpeculativeConfig(num_speculative_tokens=4)
    plan = make_plan((0, 3))
    job = Job(
        strategy=model_dir, model_dir=model_dir, prompts=model_dir, output=model_dir,
        engine=EngineOptions(speculative_config=config),
    )  # fmt: skip
    assert load_draft_model(job, plan, torch.device("cpu")) is None
    assert draft_limits(plan, config, 9) is None
    assert draft_limits(plan, None, 9) is None


def test_the_first_cost_is_the_share_of_bytes(tiny_model):
    large = load_model_dir(tiny_model("llama", seed=1, shape=WIDE))
    folder = tiny_model("llama", seed=7, shape=SMALL)
    small = load_model_dir(folder)
    config = SpeculativeConfig(method="draft_model", model=str(folder), num_speculative_tokens=4)
    plan = make_plan((0, 3))
    stage = plan.estimate.stages[0]
    held = replace(stage.memory, weights=4 * large.parameters, master=0)
    estimate = replace(plan.estimate, stages=(replace(stage, memory=held),))
    found = draft_limits(replace(plan, estimate=estimate), config, 9)
    assert found is not None
    assert found.cost == pytest.approx(small.parameters / large.parameters)
    assert (found.num_blocks, found.max_tokens) == (9, 128)
    capped = draft_limits(plan, config, 9)  # of a plan whose stages hold a byte
    assert capped is not None
    assert capped.cost == MOST_FIRST_COST
