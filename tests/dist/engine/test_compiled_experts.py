"""Decode steps of layers with experts in one compiled call, against the layers and generate."""

from __future__ import annotations

import logging

import pytest
import torch
from helpers.decode_steps import (
    HAS_STEPS,
    batch_of,
    cache_of,
    compiled,
    generate,
    random_prompts,
)
from helpers.instruction_sets import OWN, RUNNABLE, those, using
from helpers.tiny_models import generate_alone, load_reference

from llmpq.dist.engine.compiled_steps import step_runner_of
from llmpq.quant.loading.loader import load_stage

pytestmark = pytest.mark.skipif(not HAS_STEPS, reason="needs AVX2 and a C compiler")

SHAPE = {"layers": 2, "hidden": 128, "intermediate": 96, "heads": 4, "kv_heads": 2}
MANY = {"num_experts": 44, "num_experts_per_tok": 5}
OLDER = those([name for name in RUNNABLE if name not in (OWN, "baseline")], "older processor")
LENGTHS = (3, 21, 1, 16, 9, 2)


class _Pipeline:
    """Compiled steps of stages, one after the other."""

    def __init__(self, path, bits, dtype=torch.float32):
        self.stages = [
            load_stage(path, i, i + 1, [bits], dtype=dtype, device="cpu") for i in range(2)
        ]
        self.steps = [compiled(stage, cache_of(stage, dtype=dtype)) for stage in self.stages]

    def forward(self, hidden, batch):
        for steps in self.steps:
            hidden = steps.forward(hidden, batch)
        return hidden


@pytest.mark.parametrize(("family", "threads"), [("mixtral", 1), ("qwen3_moe", 2)])
def test_tokens_of_a_pipeline_are_those_of_generate(tiny_model, family, threads):
    path = tiny_model(family, shape=SHAPE)
    pipeline, reference = _Pipeline(path, 16), load_reference(path)
    prompts = random_prompts(LENGTHS)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rows = generate(path, pipeline, prompts, 5)
    finally:
        torch.set_num_threads(before)
    assert rows == [generate_alone(reference, prompt, 5)[0] for prompt in prompts]


@pytest.mark.parametrize("bits", [3, 4, 8, 16])
@pytest.mark.parametrize("rows", [1, 2, 6])
def test_bf16_numbers_are_those_of_the_layers(tiny_model, bits, rows):
    _check_numbers(tiny_model("qwen3_moe", shape=SHAPE, **MANY), bits, rows, torch.bfloat16)


@pytest.mark.parametrize("name", OLDER)
@pytest.mark.parametrize(("bits", "dtype"), [(4, torch.bfloat16), (16, torch.float32)])
def test_numbers_are_those_of_the_layers_on_older_processors(tiny_model, name, bits, dtype):
    path = tiny_model("qwen3_moe", shape=SHAPE, **MANY)
    with using(name):
        _check_numbers(path, bits, 6, dtype)


def _check_numbers(path, bits, rows, dtype):
    """Compare a step with the layers, but for rows whose experts are about as good as others."""
    stage = load_stage(path, 0, 2, [bits] * 2, dtype=dtype, device="cpu")
    caches = cache_of(stage, dtype=dtype), cache_of(stage, dtype=dtype)
    steps = compiled(stage, caches[0])
    lengths = LENGTHS[:rows]
    generator = torch.Generator().manual_seed(2)
    prompt = torch.randn(1, sum(lengths), 128, generator=generator).to(dtype)
    for cache in caches:
        stage(prompt, batch_of(lengths, list(lengths)), cache)
    compared = 0
    for seed in range(3):
        generator.manual_seed(seed)
        hidden = torch.randn(1, rows, 128, generator=generator).to(dtype)
        batch = batch_of([length + 1 for length in lengths], [1] * rows)
        found, expected = steps.forward(hidden, batch), stage(hidden, batch, caches[1])
        limit = 1e-5 if dtype == torch.float32 else 0.02
        clear = steps.margins(rows) > limit
        difference = (found - expected)[:, clear].float().norm()
        assert difference <= limit * (expected - hidden)[:, clear].float().norm()
        compared += int(clear.sum())
    assert compared > rows


def test_experts_that_are_as_good_as_others_are_not_compared(tiny_model):
    stage = load_stage(
        tiny_model("mixtral", shape=SHAPE), 0, 2, [16] * 2, dtype=torch.float32, device="cpu"
    )
    for layer in stage.layers:
        layer.mlp.gate.weight[0] = layer.mlp.gate.weight[1]
    steps, batch = compiled(stage, cache_of(stage)), batch_of([1] * 6, [1] * 6)
    steps.forward(torch.randn(1, 6, 128, generator=torch.Generator().manual_seed(0)), batch)
    margins = steps.margins(6)
    assert 0 < (margins < 1e-6).sum() < 6


def test_experts_that_are_all_as_good_run_operator_by_operator(tiny_model, caplog):
    stage = load_stage(
        tiny_model("mixtral", shape=SHAPE), 0, 2, [16] * 2, dtype=torch.float32, device="cpu"
    )
    stage.layers[0].mlp.gate.weight[1:] = stage.layers[0].mlp.gate.weight[0]
    with caplog.at_level(logging.INFO, logger="llmpq"):
        assert step_runner_of(stage, cache_of(stage)) is None
    assert "layer 0: " in caplog.text


def _damage_sum(layer):
    forward = layer.mlp.forward
    layer.mlp.forward = lambda x: forward(x) * 1.01


def _damage_expert(layer):
    expert = layer.mlp.experts.down[2]
    forward = expert.forward
    expert.forward = lambda x: forward(x) * 1.1


def _damage_router(layer):
    forward = layer.mlp.gate.forward

    def changed(hidden):
        logits, weights, chosen = forward(hidden)
        return logits, weights.flip(1), chosen

    layer.mlp.gate.forward = changed


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_damage_sum, "computes something else"),
        (_damage_expert, "computes something else"),
        (_damage_router, "the router MixtralTopKRouter"),
    ],
)
def test_a_mixture_that_computes_something_else_runs_as_it_is(tiny_model, damage, reason, caplog):
    stage = load_stage(
        tiny_model("mixtral", shape=SHAPE), 0, 2, [16] * 2, dtype=torch.float32, device="cpu"
    )
    damage(stage.layers[1])
    with caplog.at_level(logging.INFO, logger="llmpq"):
        assert step_runner_of(stage, cache_of(stage)) is None
    assert f"layer 1: {reason}" in caplog.text
