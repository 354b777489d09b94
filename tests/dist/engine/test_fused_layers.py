"""Which layers are fused on a GPU, and that their tokens are those of transformers' generate.

Operators of torch stand in for Triton's kernels, which ``tests/kernels/rows_interpreted.py`` and
``paged_decode_interpreted.py`` compare with float64; ``triton_decode_interpreted.py`` runs both.
"""

from __future__ import annotations

import logging

import pytest
import torch
from helpers import decode_attention, fused_rows
from helpers.decode_steps import batch_of, cache_of, generate, random_prompts
from helpers.recorded_capture import CalledAgain
from helpers.tiny_configs import SIZES, tiny_config
from helpers.tiny_models import generate_alone, load_reference, make_tiny_model_script

from llmpq.dist.engine.compiled_steps import fuse_layers
from llmpq.dist.engine.cuda_graphs import DecodeGraphs
from llmpq.dist.kv.cache import KVCache
from llmpq.models import kv_shapes
from llmpq.quant.loading.loader import load_stage
from llmpq.quant.modules import fused_layer
from llmpq.quant.modules.fused_layer import FusedLayer, Products

torch.set_num_threads(1)

WIDE = {
    **SIZES, "hidden_size": 128, "intermediate_size": 192, "ffn_dim": 192, "n_inner": 192,
    "ffn_hidden_size": 192,
    "num_hidden_layers": 2, "head_dim": 32, "query_pre_attn_scalar": 48,
}  # fmt: skip
_BOTH = {"layer_types": ["sliding_attention", "full_attention"]}
_LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.1 * i for i in range(16)],
        "long_factor": [4.0 + i for i in range(16)], "original_max_position_embeddings": 20,
    },
    "original_max_position_embeddings": 20,
}  # fmt: skip
_DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}
CASES = {
    "llama": ("llama", {}),
    "dynamic rotation": ("llama", _DYNAMIC),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {"sliding_window": 6}),
    "phi3": ("phi3", {}),
    "phi3 longrope": ("phi3", _LONGROPE),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"attn_logit_softcapping": 0.5}),
    "gemma3_text": ("gemma3_text", _BOTH),
    "vaultgemma": ("vaultgemma", {}),
    "olmo": ("olmo", {}),
    "exaone4": ("exaone4", _BOTH),
    "granite": ("granite", {"attention_multiplier": 0.3}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {}),
    "gpt_bigcode": ("gpt_bigcode", {}),
    "gpt_bigcode heads": ("gpt_bigcode", {"multi_query": False}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox in sequence": ("gpt_neox", {"use_parallel_residual": False}),
    "opt": ("opt", {}),
    "phi": ("phi", {}),
    "starcoder2": ("starcoder2", {}),
    "stablelm": ("stablelm", {}),
    "stablelm parallel": ("stablelm", {"use_parallel_residual": True}),
    "nemotron": ("nemotron", {}),
    "arcee": ("arcee", {}),
    "jais2": ("jais2", {}),
}
"""Model type and fields of the configuration."""
REFUSED = {
    "glm": ("glm", {}, "layer 0 and those like it are not fused: rotation of neighbours"),
    "gemma4_text": ("gemma4_text", {**_BOTH, "global_head_dim": 64}, "a norm of values"),
    "olmo2": ("olmo2", {}, "a norm of 128 of 32 numbers"),
    "persimmon": ("persimmon", {}, "a norm of 32 numbers"),
    "gpt2": ("gpt2", {}, "TransposedLinear in 'attn.c_attn'"),
    "bloom": ("bloom", {}, "scores or positions of their own"),
    "mixtral": ("mixtral", {}, "layer 0 and those like it are not fused: experts"),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"]}, "layers have a recurrent state"),
    "latent attention": ("deepseek_v3", {}, "no kernel attends to their blocks in place"),
    "weights of an activation": ("apertus", {}, "weights in 'mlp.act_fn'"),
    "bounds": ("olmo", {"clip_qkv": 100.0}, "queries, keys and values with a bound"),
    "bounded activation": ("llama", {"hidden_act": "gelu_10"}, "activation ClippedGELUActivation"),
    "norms of sums": ("opt", {"do_layer_norm_before": False}, "computes something else"),
    "scaled positions": (
        "ministral3",
        {"rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "llama_4_scaling_beta": 5.0,
            "original_max_position_embeddings": 24,
        }},
        "scores or positions of their own",
    ),
}  # fmt: skip
"""Likewise, and the reason that is logged."""


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    decode_attention.use(monkeypatch)
    fused_rows.use(monkeypatch)
    monkeypatch.setattr(KVCache, "attends", False)
    monkeypatch.setattr(KVCache, "attends_rows", True)


def _save(folder, model_type, overrides):
    script = make_tiny_model_script()
    model = script.make_model(tiny_config(model_type, WIDE, **overrides), seed=1)
    return script.save_model(model, folder, dtype=torch.float32)


def _stage(path, bits=16, dtype=torch.float32):
    return load_stage(path, 0, 2, [bits] * 2, dtype=dtype, device="cpu")


def _fused(stage):
    return [isinstance(layer, FusedLayer) for layer in stage.layers]


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_generate(case, tmp_path):
    path = _save(tmp_path, *CASES[case])
    stage, reference = _stage(path), load_reference(path)
    cache = cache_of(stage)
    fuse_layers(stage, cache)
    assert _fused(stage) == [True, True]
    steps = stage
    if not (stage.rotary is not None and stage.rotary.depends_on_length):
        steps = DecodeGraphs(stage, cache, capture=CalledAgain())
        steps.capture([1, 2], 64)
    prompts = random_prompts((12, 22))
    rows = generate(path, _Runner(steps, cache), prompts, 5)
    assert rows == [generate_alone(reference, prompt, 5)[0] for prompt in prompts]


class _Runner:
    """Steps by graphs, or by layers."""

    def __init__(self, steps, cache):
        self._steps, self._cache = steps, cache

    def forward(self, hidden, batch):
        if isinstance(self._steps, DecodeGraphs):
            return self._steps.forward(hidden, batch)
        return self._steps(hidden, batch, self._cache)


@pytest.mark.parametrize("case", REFUSED)
def test_other_layers_keep_the_code_of_transformers(case, tmp_path, caplog):
    model_type, overrides, reason = REFUSED[case]
    stage = _stage(_save(tmp_path, model_type, overrides))
    with caplog.at_level(logging.INFO, logger="llmpq"):
        fuse_layers(stage, cache_of(stage))
    assert _fused(stage) == [False, False]
    assert reason in caplog.text


def test_layers_beside_experts_are_fused(tmp_path):
    stage = _stage(_save(tmp_path, "qwen3_moe", {"mlp_only_layers": [0]}))
    fuse_layers(stage, cache_of(stage))
    assert _fused(stage) == [True, False]


@pytest.mark.parametrize("kv_bits", [None, 8])
@pytest.mark.parametrize("bits", [16, 4, 3])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2"])
def test_mixed_steps_are_those_of_the_layers(tmp_path, family, bits, kv_bits):
    """A chunk of a prompt beside tokens of other rows, in both number formats."""
    path = _save(tmp_path, family, {})
    for dtype, limit in ((torch.float32, 1e-4), (torch.bfloat16, 0.02)):
        stages = [_stage(path, bits, dtype) for _ in range(2)]
        caches = [cache_of(stage, kv_bits, dtype) for stage in stages]
        fuse_layers(stages[1], caches[1])
        assert _fused(stages[1]) == [True, True]
        generator = torch.Generator().manual_seed(0)
        for lengths, counts in (([9, 20, 3], [9, 20, 3]), ([10, 33, 4], [1, 13, 1])):
            hidden = torch.randn(1, sum(counts), 128, generator=generator).mul(0.3).to(dtype)
            batch = batch_of(lengths, counts)
            expected, found = (
                stage(hidden, batch, cache) for stage, cache in zip(stages, caches, strict=True)
            )
            added = (expected - hidden).float().norm()
            assert (found - expected).float().norm() < limit * added


def test_products_are_joined_and_nothing_is_kept_twice(tmp_path):
    stage = _stage(_save(tmp_path, "qwen2", {}))
    matrices = [p.numel() for p in stage.parameters() if p.dim() == 2]
    fuse_layers(stage, cache_of(stage))
    products = [part for part in stage.modules() if isinstance(part, Products)]
    assert [len(list(part.parameters())) for part in products] == [2, 1, 1, 1] * 2
    assert [part.widths for part in products[:4]] == [[128, 64, 64], [128], [192, 192], [128]]
    assert sum(p.numel() for p in stage.parameters() if p.dim() == 2) == sum(matrices)


def test_products_without_memory_to_join_them_stay_apart(tmp_path, monkeypatch):
    def fail(_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(fused_layer, "_joined", fail)
    stage = _stage(_save(tmp_path, "llama", {}))
    fuse_layers(stage, cache_of(stage))
    assert _fused(stage) == [True, True]
    assert len(list(stage.layers[0]._projections.parameters())) == 3


@pytest.mark.parametrize("error", [RuntimeError("no kernel image"), ValueError("out of resource")])
def test_a_kernel_that_fails_leaves_the_layers_as_they_are(tmp_path, monkeypatch, caplog, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(fused_layer.rows, "gate", fail)
    stage = _stage(_save(tmp_path, "llama", {}))
    with caplog.at_level(logging.WARNING, logger="llmpq"):
        fuse_layers(stage, cache_of(stage))
    assert _fused(stage) == [False, False]
    assert f"not fused: {type(error).__name__}: {error}" in caplog.text


def test_a_kernel_that_computes_something_else_is_not_used(tmp_path, monkeypatch, caplog):
    add_norm = fused_layer.rows.add_norm

    def differs(hidden, made, **options):
        total, out = add_norm(hidden, made, **options)
        return total, out if made is None else out + 0.01

    monkeypatch.setattr(fused_layer.rows, "add_norm", differs)
    stage = _stage(_save(tmp_path, "llama", {}))
    with caplog.at_level(logging.INFO, logger="llmpq"):
        fuse_layers(stage, cache_of(stage))
    assert _fused(stage) == [False, False]
    assert "layer 0 and those like it are not fused: computes something else" in caplog.text


def test_windows_with_blocks_of_their_own(tmp_path):
    path = _save(tmp_path, "gemma3_text", {**_BOTH, "sliding_window": 6})
    stages = [_stage(path) for _ in range(2)]
    caches = [
        KVCache(
            kv_shapes(stage.config, 0, 2), 0, num_blocks=24, num_window_blocks=12,
            dtype=torch.float32,
        )
        for stage in stages
    ]  # fmt: skip
    fuse_layers(stages[1], caches[1])
    assert _fused(stages[1]) == [True, True]
    for lengths, counts in (([30, 20], [30, 20]), ([31, 21], [1, 1])):
        batch = batch_of(lengths, counts)
        windows = [[11 - block for block in table] for table in ([5, 6, 7], [1, 2, 3])]
        batch = type(batch)(
            block_tables=batch.block_tables, starts=batch.starts, counts=batch.counts,
            window_tables=windows,
        )  # fmt: skip
        hidden = torch.randn(1, sum(counts), 128)
        expected, found = (
            stage(hidden, batch, cache) for stage, cache in zip(stages, caches, strict=True)
        )
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
