"""Layers with a recurrent state answer as transformers' generate, under every limit and policy."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.answer_drafts import draft_freely
from helpers.decode_steps import HAS_STEPS, cache_of, compiled
from helpers.lanes import a_third
from helpers.ranks import make_plan, run_threads, serve_script
from helpers.scripted_channel import Script
from helpers.tiny_configs import tiny_config
from helpers.tiny_models import generate_alone, load_reference, make_tiny_model_script
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_policies_tokens import SCHEDULES

from llmpq.batching.block_scheduler import BlockScheduler
from llmpq.batching.engine_step import EngineStep
from llmpq.batching.speculation import SpeculativeConfig
from llmpq.dist.io.generation import GenerationRequest
from llmpq.dist.io.prompts import Request
from llmpq.dist.io.sampling_params import SamplingParams
from llmpq.errors import CapacityError, SpecError, StageError
from llmpq.kernels.cpu.native import library
from llmpq.models import PackedBatch
from llmpq.models.states import COMPILED, SequenceStates, mixer_of
from llmpq.options.engine import EngineOptions
from llmpq.options.limits import check_state_cache, engine_limits, policy_limits
from llmpq.quant.loading.loader import load_stage
from llmpq.quant.modules.mixers import compile_mixers_
from llmpq.spec import catalog
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.plan import default_schedule

torch.set_num_threads(1)

FAMILIES = (
    "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba",
    "kimi_linear", "lfm2", "lfm2_moe", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "granitemoehybrid wide",
    "qwen3_5_text wide",
)  # fmt: skip
_WIDE = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
WITHOUT_KERNELS = ("bailing_hybrid", "falcon_h1", "kimi_linear", "minimax", "olmo_hybrid")
"""Whose recurrences transformers' own code computes."""
WIDE = {
    "granitemoehybrid wide": {
        **_WIDE, "mamba_n_heads": 16, "num_local_experts": 0, "shared_intermediate_size": 96
    },
    "qwen3_5_text wide": {**_WIDE, "linear_num_value_heads": 16},
}  # fmt: skip
"""Models whose steps are compiled."""
CUTS = {1: (0, 3), 2: (0, 1, 3), 3: (0, 1, 2, 3)}
PREFIX = [(7 * number) % 90 + 3 for number in range(35)]
PROMPTS = [PREFIX, [3, 4], [*PREFIX[:33], 5, 6], [50] * 18, [61], [*PREFIX[:20], 9]]
NEW = 8
FREE = SamplingParams(ignore_eos=True, max_tokens=NEW)
Models = Callable[[str], tuple[Path, list[list[int]]]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Return tiny models by family, with transformers' answers to the prompts."""
    made: dict[str, tuple[Path, list[list[int]]]] = {}

    def model(family: str) -> tuple[Path, list[list[int]]]:
        if family not in made:
            script, folder = make_tiny_model_script(), tmp_path_factory.mktemp(family)
            config = tiny_config(family.split()[0], **WIDE.get(family, {}))
            tiny = script.make_model(config, seed=1)
            script.save_model(tiny, folder, dtype=torch.float32)
            reference = load_reference(folder)
            reference.generation_config.eos_token_id = None
            answers = [
                generate_alone(reference, prompt, NEW)[0][len(prompt) :] for prompt in PROMPTS
            ]
            made[family] = folder, answers
        return made[family]

    return model


class RandomDrafts:
    """Proposes a few next tokens of known answers; every other time, one of them is wrong.

    Args:
        answers: to the prompts.
        seed: of what is random.
        prompts: these.
    """

    def __init__(
        self,
        answers: Sequence[Sequence[int]],
        seed: int,
        prompts: Sequence[Sequence[int]] = PROMPTS,
    ) -> None:
        self._wholes = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
        self._chance = random.Random(seed)
        self.proposed = self.rejected = 0

    def __call__(self, _: SpeculativeConfig) -> RandomDrafts:
        return self

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        (whole, *_) = (one for one in self._wholes if one[: len(tokens)] == list(tokens))
        draft = whole[len(tokens) : len(tokens) + self._chance.randint(1, most)]
        self.proposed += 1
        if draft and self.proposed % 2:
            place = self._chance.randrange(len(draft))
            draft[place] = (draft[place] + 1) % 90
            self.rejected += 1
        return draft


class Preemptions:
    """Preempts sequences between steps, each at most once at a number of its tokens.

    Args:
        share: of these moments, at which it is preempted.
        seed: of the choice.

    Attributes:
        count: of sequences preempted so far.
    """

    def __init__(self, share: float, seed: int = 0) -> None:
        self._share, self._chance = share, random.Random(seed)
        self._seen: set[tuple[int, int]] = set()
        self.count = 0

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Preempt before each step of every scheduler."""
        own = BlockScheduler.schedule

        def schedule(scheduler: BlockScheduler, now_s: float) -> EngineStep | None:
            for sequence in scheduler._ready():
                moment = sequence.request.request, sequence.tokens
                if sequence.computed and moment not in self._seen:
                    self._seen.add(moment)
                    if self._chance.random() < self._share:
                        scheduler._preempt(sequence)
                        self.count += 1
            return own(scheduler, now_s)

        patch.setattr(BlockScheduler, "schedule", schedule)


def served(
    model_dir: Path, num_stages: int, kv_bits: int = 32, batch: int = 4, **options
) -> list[list[int]]:
    """Return the engine's answers to the prompts, which arrive one after the other."""
    plan = make_plan(CUTS[num_stages], batch=batch, prompt_tokens=48, new_tokens=16, prefill=2)
    script = Script()
    for number, prompt in enumerate(PROMPTS):
        item = GenerationRequest(id=str(number), prompt_token_ids=tuple(prompt), sampling=FREE)
        script.add(1 + 3 * number, item)
    serve_script(replace(plan, kv_bits=kv_bits), model_dir, script, EngineOptions(**options))
    assert not script.refused
    return [script.tokens(str(number)) for number in range(len(PROMPTS))]


LIMITS = (
    (1, {"token_budget": 24}),
    (2, {"token_budget": 1}),
    (3, {"token_budget": 5, "max_sequences": 2}),
    (2, {"num_blocks": 3}),
    (3, {"scheduler": "spf", "token_budget": 7}),
)


@pytest.mark.parametrize(("family", "num_stages", "options"), a_third(FAMILIES, LIMITS))
def test_limits_change_no_token(models, family, num_stages, options):
    model_dir, expected = models(family)
    assert served(model_dir, num_stages, **options) == expected


@st.composite
def served_schedules(draw):
    """Draw a family, stages, limits, drafts and moments at which sequences are preempted."""
    limits = {
        "token_budget": draw(st.integers(1, 40)),
        "num_blocks": draw(st.integers(3, 12)),
        "max_sequences": draw(st.integers(1, 4)),
    }
    drafts = draw(st.none() | st.tuples(st.integers(0, 99), st.integers(1, 5)))
    preempts = draw(st.none() | st.tuples(st.sampled_from([0.1, 0.5, 1.0]), st.integers(0, 99)))
    family, num_stages = draw(st.sampled_from(FAMILIES)), draw(st.integers(1, 3))
    return family, num_stages, limits, drafts, preempts


def _assert_served(models, family, num_stages, limits, drafts, preempts):
    model_dir, expected = models(family)
    with pytest.MonkeyPatch.context() as patch:
        if drafts is not None:
            draft_freely(patch, RandomDrafts(expected, drafts[0]))
            limits["speculative_config"] = SpeculativeConfig(num_speculative_tokens=drafts[1])
        if preempts is not None:
            Preemptions(*preempts).install(patch)
        assert served(model_dir, num_stages, **limits) == expected


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schedule=served_schedules())
def test_chunks_preemption_and_drafts_change_no_token(models, schedule):
    _assert_served(models, *schedule)


@pytest.mark.slow  # minutes: a thousand schedules
@settings(max_examples=1000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schedule=served_schedules())
def test_chunks_preemption_and_drafts_change_no_token_in_any_schedule(models, schedule):
    _assert_served(models, *schedule)


@pytest.mark.parametrize(("family", "num_stages"), a_third(FAMILIES, CUTS))
def test_preemption_at_every_step_changes_no_token(models, monkeypatch, family, num_stages):
    model_dir, expected = models(family)
    preemptions = Preemptions(1.0)
    preemptions.install(monkeypatch)
    assert served(model_dir, num_stages, token_budget=24) == expected
    # After the prompt, and after each token but the last.
    assert preemptions.count >= len(PROMPTS) * (NEW - 1)


def _assert_batch(models, family, num_stages, schedule, batch, numbers, drafts):
    model_dir, answers = models(family)
    plan = make_plan(CUTS[num_stages], batch=batch, prompt_tokens=48, new_tokens=16, prefill=1)
    requests = [
        Request(id=place, prompt_token_ids=tuple(PROMPTS[number]), max_new_tokens=NEW)
        for place, number in enumerate(numbers)
    ]
    with pytest.MonkeyPatch.context() as patch:
        config = None
        if drafts is not None:
            draft_freely(patch, RandomDrafts(answers, drafts[0]))
            config = SpeculativeConfig(num_speculative_tokens=drafts[1])
        plan = replace(plan, schedule=schedule)
        found, _ = run_threads(plan, model_dir, requests, speculative=config)
    made = [list(found[place][0]) for place in range(len(numbers))]
    assert made == [answers[number] for number in numbers]


@st.composite
def batches(draw):
    """Draw a family, stages, a schedule, prompts some of which begin as others, and drafts."""
    slots = draw(st.integers(1, 4))
    policy = draw(st.sampled_from(["hybrid", "iteration", "static"]))
    return {
        "family": draw(st.sampled_from(FAMILIES)),
        "num_stages": draw(st.integers(1, 3)),
        "schedule": default_schedule(policy, slots),
        "batch": slots,
        "numbers": draw(st.lists(st.integers(0, len(PROMPTS) - 1), min_size=2, max_size=9)),
        "drafts": draw(st.none() | st.tuples(st.integers(0, 99), st.integers(1, 4))),
    }


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=batches())
def test_equal_prompts_and_drafts_of_batches_change_no_token(models, batch):
    _assert_batch(models, **batch)


@pytest.mark.slow  # minutes: hundreds of batches
@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=batches())
def test_equal_prompts_and_drafts_of_any_batch_change_no_token(models, batch):
    _assert_batch(models, **batch)


@pytest.mark.parametrize(("family", "num_stages"), a_third(FAMILIES, CUTS))
def test_drafts_change_no_token(models, monkeypatch, family, num_stages):
    """Where one is wrong, the state goes back to that before the drafts."""
    model_dir, expected = models(family)
    drafts = RandomDrafts(expected, seed=num_stages)
    draft_freely(monkeypatch, drafts)
    config = SpeculativeConfig(num_speculative_tokens=4)
    assert served(model_dir, num_stages, batch=8, speculative_config=config) == expected
    assert drafts.rejected


@pytest.mark.parametrize(
    ("family", "num_stages", "token_budget"), a_third(FAMILIES, [(1, 24), (2, 1), (3, 7)])
)
def test_prompts_go_on_from_saved_states(models, family, num_stages, token_budget):
    """One after the other: the blocks before the last token of an earlier prompt are found."""
    model_dir, expected = models(family)
    plan = make_plan(CUTS[num_stages], batch=3, prompt_tokens=48, new_tokens=16, prefill=2)
    script = Script()
    numbers = [0, 2, 5, 0]  # 35 tokens; 33 of them and others; 20 of them: none saved there
    for place, number in enumerate(numbers):
        prompt = tuple(PROMPTS[number])
        item = GenerationRequest(id=str(place), prompt_token_ids=prompt, sampling=FREE)
        script.add(1 + 200 * place, item)
    options = EngineOptions(token_budget=token_budget)
    serve_script(replace(plan, kv_bits=32), model_dir, script, options)
    assert [script.tokens(str(place)) for place in range(4)] == [expected[one] for one in numbers]
    cached = [script.outputs[str(place)][0].num_cached_tokens for place in range(4)]
    assert cached == [0, 32, 0, 32]


@pytest.mark.parametrize("family", ["granitemoehybrid", "qwen3_5_text"])
@pytest.mark.parametrize("has_drafts", [False, True])
def test_a_conversation_goes_on_from_its_state(models, monkeypatch, family, has_drafts):
    """A plan of one sequence: each turn begins with all that was said before."""
    model_dir, _ = models(family)
    plan = make_plan(CUTS[2], batch=1, prompt_tokens=96, new_tokens=16, prefill=1)
    reference = load_reference(model_dir)
    reference.generation_config.eos_token_id = None
    said, turns, expected = list(PREFIX), [], []
    for turn in range(3):
        turns.append(list(said))
        answer = generate_alone(reference, said, NEW)[0][len(said) :]
        expected.append(answer)
        said = [*said, *answer, 5 + turn, 9]
    script = Script()
    for turn, prompt in enumerate(turns):
        item = GenerationRequest(id=str(turn), prompt_token_ids=tuple(prompt), sampling=FREE)
        script.add(1 + 200 * turn, item)
    options = EngineOptions(token_budget=24)
    if has_drafts:
        draft_freely(monkeypatch, RandomDrafts(expected, 1, turns))
        options = replace(options, speculative_config=SpeculativeConfig(num_speculative_tokens=3))
    serve_script(replace(plan, kv_bits=32), model_dir, script, options)
    assert [script.tokens(str(turn)) for turn in range(3)] == expected
    cached = [script.outputs[str(turn)][0].num_cached_tokens for turn in range(3)]
    assert cached[0] == 0
    assert all(0 < count <= len(turns[turn]) for turn, count in enumerate(cached) if turn)


@pytest.mark.parametrize(("name", "stages"), a_third(SCHEDULES, CUTS))
def test_policies_change_no_token(models, monkeypatch, name, stages):
    model_dir, expected = models(FAMILIES[stages])
    plan = make_plan(CUTS[stages], prefill=2, decode=2, batch=3, prompt_tokens=48, new_tokens=16)
    requests = [
        Request(id=number, prompt_token_ids=tuple(prompt), max_new_tokens=NEW)
        for number, prompt in enumerate(PROMPTS)
    ]
    plan = replace(plan, schedule=SCHEDULES[name])
    answers, _ = run_threads(plan, model_dir, requests)
    assert [list(answers[number][0]) for number in range(len(PROMPTS))] == expected
    drafts = RandomDrafts(expected, seed=stages)
    draft_freely(monkeypatch, drafts)
    config = SpeculativeConfig(num_speculative_tokens=4)
    answers, _ = run_threads(plan, model_dir, requests, speculative=config)
    assert [list(answers[number][0]) for number in range(len(PROMPTS))] == expected
    assert drafts.rejected


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_of_prompts_are_those_of_transformers(models, family):
    """Every position of such a prompt is a row of its own, of one state."""
    model_dir, _ = models(family)
    plan = make_plan(CUTS[2], batch=4, prompt_tokens=48, new_tokens=16, prefill=2)
    script, params = Script(), replace(FREE, prompt_logprobs=0)
    item = GenerationRequest(id="0", prompt_token_ids=tuple(PREFIX), sampling=params)
    script.add(1, item)
    serve_script(plan, model_dir, script, EngineOptions(token_budget=9))
    scored = script.outputs["0"][0].prompt_logprobs
    assert scored is not None
    found = [one.logprob for one in scored if one is not None]
    with torch.inference_mode():
        scores = load_reference(model_dir)(torch.tensor([PREFIX])).logits[0].log_softmax(-1)
    expected = scores[range(len(PREFIX) - 1), PREFIX[1:]]
    torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_states_have_the_bytes_that_the_plan_counts(models, family):
    model_dir, _ = models(family)
    cpu = torch.device("cpu")
    states = load_stage(model_dir, 0, 3, None, dtype=torch.float32, device=cpu).new_states(5)
    assert states is not None
    values = sum(layer.state_values for layer in load_model_dir(model_dir).layers)
    assert values
    assert states.nbytes == 5 * 4 * values


@pytest.mark.skipif(not HAS_STEPS, reason="needs AVX2 and a C compiler")
@pytest.mark.parametrize("family", WIDE)
def test_steps_of_wide_models_are_compiled(models, family):
    model_dir, _ = models(family)
    stage = load_stage(model_dir, 0, 3, None, dtype=torch.float32, device=torch.device("cpu"))
    assert compiled(stage, cache_of(stage))


@pytest.mark.skipif(library() is None, reason="needs the compiled kernels")
@pytest.mark.parametrize("family", [one for one in FAMILIES if one not in WITHOUT_KERNELS])
@pytest.mark.parametrize("bits", [None, 4])
def test_mixers_are_compiled_where_they_are_proven(models, family, bits):
    model_dir, _ = models(family)
    widths = None if bits is None else [bits] * 3
    cpu = torch.device("cpu")
    stage = load_stage(model_dir, 0, 3, widths, dtype=torch.bfloat16, device=cpu)
    mixers = [part for part in stage.modules() if hasattr(part, COMPILED)]
    assert mixers
    assert all(getattr(mixer, COMPILED) is not None for mixer in mixers)


def test_another_recurrence_keeps_the_code_of_transformers(models, caplog):
    model_dir, _ = models("qwen3_5_text")
    cpu = torch.device("cpu")
    stage = load_stage(model_dir, 0, 3, None, dtype=torch.float32, device=cpu)
    (mixer, *_) = (part for part in stage.modules() if getattr(part, COMPILED, None))
    setattr(mixer, COMPILED, None)
    mixer.activation = "gelu"  # of the convolution
    compile_mixers_(mixer, torch.float32)
    assert getattr(mixer, COMPILED) is None
    assert "found another function than its parts say" in caplog.text


def test_what_needs_earlier_states_is_refused():
    plan, drafts = make_plan((0, 3), batch=4), SpeculativeConfig(num_speculative_tokens=3)
    options = EngineOptions(kv_offloading_bytes=1 << 30)
    with pytest.raises(SpecError, match=r"kv_offloading_size.*have a recurrent state"):
        engine_limits(plan, options, state_bytes=8)
    options = EngineOptions(speculative_config=drafts)
    limits = policy_limits(plan, options, state_bytes=8)
    assert (limits.max_sequences, limits.num_state_slots) == (4, 8)
    limits = engine_limits(plan, EngineOptions(max_sequences=64), state_bytes=8)
    assert (limits.max_sequences, limits.num_state_slots, limits.prefix_caching) == (4, 4, True)
    alone = engine_limits(make_plan((0, 3), batch=1), EngineOptions(), state_bytes=8)
    # Two beside the running sequence's: a saved one, and that after draft tokens.
    assert (alone.max_sequences, alone.num_state_slots, alone.prefix_caching) == (1, 3, True)


def test_a_budget_holds_more_saved_states(models):
    """Three conversations in turn, in a plan of one sequence."""
    model_dir, expected = models("qwen3_5_text")
    plan = make_plan(CUTS[2], batch=1, prompt_tokens=48, new_tokens=16, prefill=1)
    state_bytes = load_model_dir(model_dir).state_bytes()
    numbers = [0, 3, 5, 0, 3, 5]
    found = {}
    for size in (0, 12 * state_bytes):
        script = Script()
        for place, number in enumerate(numbers):
            prompt = tuple(PROMPTS[number])
            item = GenerationRequest(id=str(place), prompt_token_ids=prompt, sampling=FREE)
            script.add(1 + 200 * place, item)
        options = EngineOptions(num_blocks=40, state_cache_bytes=size)
        serve_script(replace(plan, kv_bits=32), model_dir, script, options)
        places = range(len(numbers))
        assert [script.tokens(str(one)) for one in places] == [expected[one] for one in numbers]
        found[size] = [script.outputs[str(one)][0].num_cached_tokens for one in places]
    few, many = found.values()
    assert many[3:] == [32, 16, 16]
    assert sum(few) < sum(many)


def test_the_budget_of_saved_states_is_checked(models):
    plan, model = make_plan((0, 3), batch=4), load_model_dir(models("qwen3_5_text")[0])
    own = model.state_bytes()
    check_state_cache(EngineOptions(state_cache_bytes=own), model)
    options = EngineOptions(state_cache_bytes=3 * own + 1)
    assert engine_limits(plan, options, state_bytes=own).num_state_slots == 7
    assert policy_limits(plan, options, state_bytes=own).num_state_slots == 4
    with pytest.raises(SpecError, match=r"state_cache_size: found .*, expected at least"):
        check_state_cache(EngineOptions(state_cache_bytes=own - 1), model)
    with pytest.raises(SpecError, match=r"no layer of .* has a recurrent state"):
        check_state_cache(options, catalog.model("facebook/opt-125m"))
    with pytest.raises(SpecError, match="state_cache_bytes: found without prefix caching"):
        EngineOptions(state_cache_bytes=1, prefix_caching=False)


def test_slots_are_checked():
    shapes = [{}, {"conv": (6, 4)}]
    states = SequenceStates(shapes, 2, num_slots=3)
    batch = {"block_tables": [[0], [1]], "starts": [0, 0], "counts": [1, 1]}
    states.check(PackedBatch(**batch, slots=[2, 0]))
    for slots in ([], [0], [0, 3], [-1, 0]):
        with pytest.raises(StageError, match="found slots"):
            states.check(PackedBatch(**batch, slots=slots))
    with pytest.raises(CapacityError, match="found 0 slots"):
        SequenceStates(shapes, 2, num_slots=0)


def test_copies_of_states_are_of_all_layers_at_once():
    states = SequenceStates([{"conv": (2, 3)}, {"conv": (2,), "recurrent": (4,)}], 5, num_slots=3)
    stored = [one for layer in (5, 6) for one in states.of_layer(layer).values()]
    for one in stored:
        one.copy_(torch.arange(3.0).view(3, *[1] * (one.dim() - 1)).expand_as(one))
    states.copy([(0, 1), (1, 2)])  # what slot 1 had before
    for one in stored:
        assert one.flatten(1).unique(dim=1).flatten().tolist() == [0.0, 0.0, 1.0]
    with pytest.raises(StageError, match=r"found slot 3 to copy, expected one of \[0, 3\)"):
        states.copy([(0, 3)])


def test_a_layer_has_one_module_that_keeps_a_state(models):
    model_dir, _ = models("lfm2")  # conv, attention, conv
    layers = load_stage(model_dir, 0, 3, None, dtype=torch.float32, device=torch.device("cpu"))
    assert mixer_of(layers.layers[0]) is layers.layers[0].conv
    with pytest.raises(SpecError, match="found 0 modules that keep a state"):
        mixer_of(layers.layers[1])
