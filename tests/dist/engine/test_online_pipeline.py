"""The online engine on real stages answers as transformers' generate, on any number of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.answer_drafts import draft_freely
from helpers.ranks import make_plan, serve_script
from helpers.scripted_channel import Script
from helpers.tiny_models import generate_alone, load_reference
from hypothesis import given
from hypothesis import strategies as st

from llmpq.batching.speculation import DraftCredit, SpeculativeConfig
from llmpq.dist.io.generation import GenerationRequest
from llmpq.dist.io.sampling_params import SamplingParams
from llmpq.errors import SpecError
from llmpq.options.engine import EngineOptions
from llmpq.options.limits import engine_limits, max_model_len

torch.set_num_threads(1)
CUTS = {1: (0, 3), 2: (0, 1, 3), 3: (0, 1, 2, 3)}
PREFIX = [(7 * number) % 90 + 3 for number in range(35)]
PROMPTS = [PREFIX, [3, 4], [*PREFIX[:33], 5, 6], [50] * 18, [61], [*PREFIX[:20], 9]]
FREE = SamplingParams(ignore_eos=True, max_tokens=8)
WIDE = {"layers": 3, "hidden": 128, "intermediate": 192, "heads": 4, "kv_heads": 2}
"""Wide enough for compiled decode steps."""
SWITCH = 20
"""Longest sequence with the first table of ``longrope``."""
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(16)],
    "long_factor": [4.0 + i for i in range(16)],
    "original_max_position_embeddings": SWITCH,
}
_expected: dict[Path, list[list[int]]] = {}


def expected_tokens(model_dir: Path) -> list[list[int]]:
    if model_dir not in _expected:
        model = load_reference(model_dir)
        model.generation_config.eos_token_id = None
        _expected[model_dir] = [
            generate_alone(model, prompt, 8)[0][len(prompt) :] for prompt in PROMPTS
        ]
    return _expected[model_dir]


def serve(
    model_dir: Path,
    num_stages: int,
    script: Script,
    kv_bits: int = 32,
    transport: str = "threads",
    **options,
) -> None:
    """Run the stages of a plan in threads, the master in this one."""
    plan = make_plan(CUTS[num_stages], batch=4, prompt_tokens=48, new_tokens=16, prefill=2)
    plan = replace(plan, kv_bits=kv_bits)
    serve_script(plan, model_dir, script, EngineOptions(**options), transport)


def script_of(params: SamplingParams = FREE) -> Script:
    script = Script()
    for number, prompt in enumerate(PROMPTS):
        item = GenerationRequest(id=str(number), prompt_token_ids=tuple(prompt), sampling=params)
        script.add(1 + 3 * number, item)
    return script


@pytest.mark.parametrize("family", ["llama", "opt", "bloom", "gemma", "mistral", "qwen3"])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_tokens_equal_generate(tiny_model, family, num_stages):
    options = {"sliding_window": 6} if family == "mistral" else {}
    model_dir = tiny_model(family, seed=1, **options)
    script = script_of()
    serve(model_dir, num_stages, script, token_budget=24)
    assert not script.refused
    for number, tokens in enumerate(expected_tokens(model_dir)):
        assert script.tokens(str(number)) == tokens


@pytest.mark.parametrize(
    ("num_stages", "transport"), [(1, "threads"), (2, "threads"), (3, "torch")]
)
@pytest.mark.parametrize(
    "options",
    [
        {"token_budget": 1},
        {"token_budget": 5, "max_sequences": 2},
        {"num_blocks": 3, "prefix_caching": False},
        {"num_blocks": 4},
        {"num_blocks": 60, "scheduler": "larry", "alpha": 0.5},
        {"scheduler": "spf", "token_budget": 7},
    ],
)
def test_limits_change_no_token(tiny_model, num_stages, transport, options):
    model_dir = tiny_model("llama", seed=1)
    script = script_of()
    serve(model_dir, num_stages, script, transport=transport, **options)
    for number, tokens in enumerate(expected_tokens(model_dir)):
        assert script.tokens(str(number)) == tokens


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_request_may_be_longer_than_those_of_the_plan(tiny_model, num_stages):
    model_dir = tiny_model("llama", seed=1, max_position_embeddings=256)
    prompt = [(11 * number) % 90 + 3 for number in range(150)]
    script = Script()
    item = GenerationRequest(id="0", prompt_token_ids=tuple(prompt), sampling=FREE)
    script.add(1, item)
    serve(model_dir, num_stages, script, max_model_len=158)
    model = load_reference(model_dir)
    model.generation_config.eos_token_id = None
    assert script.tokens("0") == generate_alone(model, prompt, 8)[0][150:]


def test_a_plan_has_room_for_the_context_that_it_states():
    plan = make_plan((0, 3), batch=4, prompt_tokens=16, new_tokens=8)
    plan = replace(plan, workload=replace(plan.workload, context_tokens=4000))
    assert max_model_len(plan, EngineOptions(), None) == 4000
    limits = engine_limits(plan, EngineOptions())
    assert limits.num_blocks == 4 * 250
    assert limits.token_budget == 1024  # a step takes a chunk of the longest prompt


@given(asked=st.integers(2, 400) | st.none(), positions=st.integers(2, 400) | st.none())
def test_the_longest_request_fits_model_and_blocks(asked, positions):
    plan = make_plan((0, 3), batch=4, prompt_tokens=48, new_tokens=16)  # 4 x 4 blocks of 16 tokens
    options = EngineOptions(max_model_len=asked)
    if asked is None:
        assert max_model_len(plan, options, positions) == min(64, positions or 64)
    elif asked > min(256, positions or 256):
        found = "positions" if positions is not None and asked > positions else "16 KV blocks"
        with pytest.raises(SpecError, match=f"max_model_len: found {asked}, expected .*{found}"):
            max_model_len(plan, options, positions)
    else:
        assert max_model_len(plan, options, positions) == asked


@pytest.mark.parametrize(
    ("family", "num_stages"), [("llama", 1), ("llama", 3), ("opt", 2), ("mistral", 2)]
)
def test_drafts_change_no_token(tiny_model, monkeypatch, family, num_stages):
    """Drafts as rows of one token, in compiled decode steps (llama, mistral) and without."""
    monkeypatch.setattr(DraftCredit, "longest", lambda *_: 31)
    options = {} if family == "opt" else {"shape": WIDE}
    options |= {"sliding_window": 6} if family == "mistral" else {}
    model_dir = tiny_model(family, seed=1, **options)
    script = script_of(replace(FREE, max_tokens=16))
    config = SpeculativeConfig(num_speculative_tokens=4, prompt_lookup_min=1)
    serve(model_dir, num_stages, script, num_blocks=14, speculative_config=config)
    model = load_reference(model_dir)
    model.generation_config.eos_token_id = None
    for number, prompt in enumerate(PROMPTS):
        assert script.tokens(str(number)) == generate_alone(model, prompt, 16)[0][len(prompt) :]
    made = [len(output.token_ids) for outputs in script.outputs.values() for output in outputs]
    assert max(made) == 5


@pytest.mark.parametrize(
    ("family", "is_same", "num_stages"),
    [("llama", True, 1), ("llama", False, 2), ("opt", True, 2), ("opt", False, 1)],
)
def test_a_draft_model_changes_no_token(tiny_model, monkeypatch, family, is_same, num_stages):
    """The model itself, all of whose tokens are accepted, and another one."""
    draft_freely(monkeypatch)
    model_dir = tiny_model(family, seed=1, shape=WIDE)
    draft_dir = model_dir if is_same else tiny_model(family, seed=5)
    script = script_of(replace(FREE, max_tokens=16))
    config = SpeculativeConfig(method="draft_model", model=str(draft_dir), num_speculative_tokens=4)
    serve(model_dir, num_stages, script, num_blocks=14, speculative_config=config)
    model = load_reference(model_dir)
    model.generation_config.eos_token_id = None
    for number, prompt in enumerate(PROMPTS):
        assert script.tokens(str(number)) == generate_alone(model, prompt, 16)[0][len(prompt) :]
    made = [len(output.token_ids) for outputs in script.outputs.values() for output in outputs]
    assert max(made) == 5 or not is_same


def test_prefixes_are_found(tiny_model):
    model_dir = tiny_model("llama", seed=1)
    script = Script()
    for number, call in ((0, 1), (2, 200), (5, 400)):
        item = GenerationRequest(
            id=str(number), prompt_token_ids=tuple(PROMPTS[number]), sampling=FREE
        )
        script.add(call, item)
    serve(model_dir, 1, script)
    cached = [script.outputs[name][0].num_cached_tokens for name in ("0", "2", "5")]
    assert cached == [0, 32, 16]
    expected = expected_tokens(model_dir)
    assert all(script.tokens(str(number)) == expected[number] for number in (0, 2, 5))


@pytest.mark.parametrize("num_stages", [1, 2])
def test_prompt_logprobs_are_those_of_the_model(tiny_model, num_stages):
    model_dir = tiny_model("llama", seed=1)
    script = script_of(replace(FREE, prompt_logprobs=1, max_tokens=1))
    serve(model_dir, num_stages, script, token_budget=24)
    model = load_reference(model_dir)
    for number, prompt in enumerate(PROMPTS):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt])).logits[0].float()
        expected = torch.log_softmax(logits, -1)
        found = script.outputs[str(number)][0].prompt_logprobs
        assert found is not None
        assert found[0] is None
        assert len(found) == len(prompt)
        for position, item in enumerate(found[1:]):
            assert item.token_id == prompt[position + 1]
            value = float(expected[position, item.token_id])
            assert item.logprob == pytest.approx(value, abs=1e-4)


@pytest.mark.parametrize("kv_bits", [8, 4])
def test_quantized_keys_and_values_give_the_same_tokens_in_any_chunks(tiny_model, kv_bits):
    model_dir = tiny_model("llama", seed=1, shape=WIDE)
    whole, chunked = script_of(), script_of()
    serve(model_dir, 1, whole, kv_bits=kv_bits, token_budget=500)
    serve(model_dir, 2, chunked, kv_bits=kv_bits, token_budget=5, prefix_caching=False)
    for number in range(len(PROMPTS)):
        assert whole.tokens(str(number)) == chunked.tokens(str(number))


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"token_budget": 512},
        {"token_budget": 7},
        {"num_blocks": 5, "token_budget": 12},
        {"speculative_config": SpeculativeConfig(num_speculative_tokens=4, prompt_lookup_min=1)},
    ],
    ids=["at once", "chunks", "few blocks", "drafts"],
)
def test_angles_of_the_length_change_no_token(tiny_model, monkeypatch, num_stages, options):
    """Chunks, prefixes of shorter and longer prompts, and growth past the switch."""
    monkeypatch.setattr(DraftCredit, "longest", lambda *_: 31)
    model_dir = tiny_model(
        "phi3", seed=1, shape=WIDE, rope_parameters=LONGROPE,
        original_max_position_embeddings=SWITCH, max_position_embeddings=256,
    )  # fmt: skip
    prompts = [
        PREFIX[:18], PREFIX, PREFIX[:SWITCH], [*PREFIX[:33], 5], PREFIX[:19], [50] * 12,
    ]  # fmt: skip
    script = Script()
    for number, prompt in enumerate(prompts):
        params = replace(FREE, max_tokens=12)
        item = GenerationRequest(id=str(number), prompt_token_ids=tuple(prompt), sampling=params)
        script.add(1 + 6 * number, item)
    serve(model_dir, num_stages, script, **options)
    model = load_reference(model_dir)
    model.generation_config.eos_token_id = None
    for number, prompt in enumerate(prompts):
        expected, _ = generate_alone(model, prompt, 12)
        assert script.tokens(str(number)) == expected[len(prompt) :]
