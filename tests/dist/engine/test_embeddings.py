"""Embeddings are the pooled hidden states of transformers' own model, on any number of stages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.block_steps import BlockSteps
from helpers.online_runs import limits, serve
from helpers.ranks import make_plan, serve_script
from helpers.scripted_channel import Script
from helpers.tiny_models import load_reference
from numpy.typing import NDArray

from llmpq.dist.io.generation import GenerationRequest
from llmpq.dist.io.sampling_params import SamplingParams
from llmpq.options.engine import EngineOptions
from llmpq.options.run import Pooling

torch.set_num_threads(1)
CUTS = {1: (0, 3), 2: (0, 1, 3), 3: (0, 1, 2, 3)}
PREFIX = [(7 * number) % 90 + 3 for number in range(35)]
PROMPTS = [PREFIX, [3, 4], [*PREFIX[:33], 5, 6], [50] * 18, [61], [*PREFIX[:20], 9]]
FREE = SamplingParams(ignore_eos=True, max_tokens=8)
ONE = SamplingParams(max_tokens=1)


def asked(name: str, prompt: list[int], pooling: Pooling) -> GenerationRequest:
    return GenerationRequest(id=name, prompt_token_ids=tuple(prompt), sampling=ONE, pooling=pooling)


def script_of(pooling: Pooling) -> Script:
    """Return a script of the prompts; every second one generates tokens instead."""
    script = Script()
    for number, prompt in enumerate(PROMPTS):
        script.add(1 + 3 * number, asked(str(number), prompt, pooling))
        item = GenerationRequest(id=f"t{number}", prompt_token_ids=tuple(prompt), sampling=FREE)
        script.add(2 + 3 * number, item)
    return script


def found_in(script: Script, name: str) -> NDArray[np.float32]:
    (output,) = script.outputs[name]
    assert (output.token_ids, output.finish_reason) == ((), "length")
    assert output.embedding is not None
    return np.frombuffer(output.embedding, "<f4")


def expected_of(model: torch.nn.Module, prompt: list[int], pooling: Pooling) -> torch.Tensor:
    with torch.inference_mode():
        states = model.base_model(torch.tensor([prompt])).last_hidden_state[0].double()
    pooled = states[-1] if pooling == "last" else states.mean(0)
    return pooled / pooled.norm()


def check(model_dir: Path, script: Script, pooling: Pooling) -> None:
    model = load_reference(model_dir)
    for number, prompt in enumerate(PROMPTS):
        found = found_in(script, str(number))
        assert float(np.linalg.norm(found)) == pytest.approx(1.0, abs=1e-6)
        expected = expected_of(model, prompt, pooling).numpy()
        np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize(
    ("family", "num_stages", "transport"),
    [
        ("llama", 3, "torch"),
        ("opt", 2, "threads"),
        ("gemma", 1, "threads"),
        ("mistral", 2, "threads"),
    ],
)
def test_embeddings_are_those_of_transformers(tiny_model, family, num_stages, transport, pooling):
    options = {"sliding_window": 6} if family == "mistral" else {}
    model_dir = tiny_model(family, seed=1, **options)
    script, plain = script_of(pooling), Script()
    plan = make_plan(CUTS[num_stages], batch=4, prompt_tokens=48, new_tokens=16, prefill=2)
    plan = replace(plan, kv_bits=32)
    serve_script(plan, model_dir, script, EngineOptions(token_budget=24), transport)
    check(model_dir, script, pooling)
    for number, prompt in enumerate(PROMPTS):
        item = GenerationRequest(id=f"t{number}", prompt_token_ids=tuple(prompt), sampling=FREE)
        plain.add(1, item)
    serve_script(plan, model_dir, plain, EngineOptions(token_budget=24))
    for number in range(len(PROMPTS)):  # the embeddings between them change no token
        assert script.tokens(f"t{number}") == plain.tokens(f"t{number}")


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("options", [{"token_budget": 5, "max_sequences": 2}, {"num_blocks": 4}])
def test_chunks_of_prompts_change_no_embedding(tiny_model, pooling, options):
    model_dir = tiny_model("llama", seed=1)
    plan = replace(make_plan(CUTS[2], batch=4, prompt_tokens=48, new_tokens=16), kv_bits=32)
    script = script_of(pooling)
    serve_script(plan, model_dir, script, EngineOptions(**options))
    check(model_dir, script, pooling)


@pytest.fixture(scope="module")
def steps(tiny_model) -> BlockSteps:
    return BlockSteps(tiny_model("llama", seed=1), 64, 4)


def test_the_last_state_follows_a_prefix_that_is_found_and_the_mean_needs_all(steps):
    prompt, script = [3, 4, 5, 6, 7, 8, 9, 10, 11], Script()
    for call, name, pooling in ((1, "a", "last"), (200, "b", "last"), (400, "c", "mean")):
        script.add(call, asked(name, prompt, pooling))
    engine = serve(steps, script, limits())
    cached = [script.outputs[name][0].num_cached_tokens for name in ("a", "b", "c")]
    assert cached == [0, 8, 0]
    for name, pooling in (("a", "last"), ("b", "last"), ("c", "mean")):
        expected = expected_of(steps.model, prompt, pooling).numpy()
        np.testing.assert_allclose(found_in(script, name), expected, atol=2e-5)
    assert engine.scheduler.is_idle


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_preempted_prompt_counts_every_position_once(steps, pooling):
    script = Script()
    prompts = [[3 + number, *range(4, 4 + 17)] for number in range(3)]
    for number in range(3):
        item = GenerationRequest(
            id=f"t{number}",
            prompt_token_ids=(9, 8, 7 + number),
            sampling=replace(FREE, max_tokens=14),
        )
        script.add(1, item)
    for number, prompt in enumerate(prompts):
        script.add(2, asked(f"e{number}", prompt, pooling))
    engine = serve(steps, script, limits(num_blocks=9, token_budget=5))
    assert engine.scheduler.num_preemptions > 0
    for number, prompt in enumerate(prompts):
        expected = expected_of(steps.model, prompt, pooling).numpy()
        np.testing.assert_allclose(found_in(script, f"e{number}"), expected, atol=2e-5)


def test_states_that_are_no_numbers_end_their_request_alone(steps, monkeypatch):
    real = BlockSteps.states

    def states(self, tokens):
        found = real(self, tokens)
        return torch.full_like(found, float("nan")) if tokens[0] == 3 else found

    monkeypatch.setattr(BlockSteps, "states", states)
    script = Script()
    script.add(1, asked("a", [3, 4, 5], "mean"))
    script.add(1, asked("b", [4, 4, 5], "mean"))
    serve(steps, script, limits())
    (output,) = script.outputs["a"]
    assert (output.embedding, output.finish_reason) == (None, "error")
    found_in(script, "b")


def test_a_request_that_is_aborted_leaves_nothing(steps):
    script = Script()
    script.add(1, asked("a", list(range(3, 33)), "mean"))
    script.abort(4, "a")
    engine = serve(steps, script, limits(token_budget=5, steps_in_flight=2))
    assert "a" not in script.outputs
    assert engine.scheduler.is_idle
    assert engine.scheduler.free_blocks == 64
