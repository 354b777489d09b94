"""Run by ``test_triton_decode.py`` under ``TRITON_INTERPRET=1``: tokens by the code of a GPU."""

from __future__ import annotations

import pytest
import torch
import triton.runtime.interpreter
from helpers.ranks import make_plan, run_threads
from helpers.recorded_capture import CalledAgain
from helpers.tiny_models import generate_alone, load_reference

from llmpq.dist.engine.compiled_steps import fuse_layers
from llmpq.dist.engine.cuda_graphs import DecodeGraphs
from llmpq.dist.io.prompts import Request
from llmpq.dist.kv.cache import KVCache
from llmpq.quant.modules.fused_layer import FusedLayer
from llmpq.spec import runtime_constants

torch.set_num_threads(1)

FAMILIES = {
    "llama": {},
    "qwen3": {},
    "gemma2": {"attn_logit_softcapping": 2.0, "sliding_window": 6},
    "gpt_oss": {},
    "bloom": {"n_head": 3, "hidden_size": 24},
}
FUSED = ("llama", "qwen3", "gemma2")
"""Families whose layers are fused: those of the others keep transformers' code."""
NEW_TOKENS = 4
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7, 2], list(range(20, 37))]


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """Few programs, of which the interpreter takes milliseconds for each; names of kernels."""
    monkeypatch.setattr(runtime_constants, "DECODE_PROGRAMS", 8)
    kind, names = triton.runtime.interpreter.InterpretedFunction, []
    run = kind.run

    def noted(kernel, *args, **kwargs):
        names.append(kernel.__name__)
        return run(kernel, *args, **kwargs)

    monkeypatch.setattr(kind, "run", noted)
    return names


@pytest.mark.parametrize(
    ("family", "captures"),
    [
        pytest.param(family, captures, id=f"{family}-{'graphs' if captures else 'layers'}")
        for family in FAMILIES
        for captures in (True, False)
        if captures or family != "qwen3"  # its layers differ where they are fused
    ],
)
def test_tokens_are_those_of_transformers(tiny_model, monkeypatch, launches, family, captures):
    """In graphs of fused layers, whose prompts are not captured, and in transformers' layers."""
    monkeypatch.setattr(KVCache, "attends", False)
    model_dir = tiny_model(family, seed=3, **FAMILIES[family])
    capture, fused = CalledAgain(), []

    def runner(layers, cache):
        if captures:
            fuse_layers(layers, cache)
        fused.extend(isinstance(layer, FusedLayer) for layer in layers.layers)
        return DecodeGraphs(layers, cache, capture=capture) if captures else None

    monkeypatch.setattr("llmpq.dist.launch.rank.step_runner_of", runner)
    requests = [
        Request(id=number, prompt_token_ids=tuple(prompt), max_new_tokens=NEW_TOKENS)
        for number, prompt in enumerate(PROMPTS)
    ]
    plan = make_plan((0, 3), prefill=3, decode=3, new_tokens=NEW_TOKENS)
    answers, _ = run_threads(plan, model_dir, requests)
    model = load_reference(model_dir)
    expected = [generate_alone(model, prompt, NEW_TOKENS)[0] for prompt in PROMPTS]
    assert [[*prompt, *answers[number][0]] for number, prompt in enumerate(PROMPTS)] == expected
    assert (capture.replayed > 0) == captures
    is_fused = captures and family in FUSED
    assert fused == [is_fused] * 3
    assert launches.count("paged_decode_kernel") >= 3 * (NEW_TOKENS - 1)
    for name in ("add_norm_kernel", "rotate_store_kernel", "gate_kernel"):
        assert (launches.count(name) >= 3 * NEW_TOKENS) == is_fused
