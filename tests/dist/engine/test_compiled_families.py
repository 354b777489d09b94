"""Which families have compiled decode steps, and that their tokens are those of generate."""

from __future__ import annotations

import dataclasses
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
from helpers.tiny_configs import SIZES, tiny_config
from helpers.tiny_models import generate_alone, load_reference, make_tiny_model_script

from llmpq.dist.engine import compiled_steps
from llmpq.dist.engine.compiled_steps import CompiledSteps, step_runner_of
from llmpq.quant.loading.loader import load_stage
from llmpq.spec.families import LayerForm, family_of

pytestmark = pytest.mark.skipif(not HAS_STEPS, reason="needs AVX-512 and a C compiler")

WIDE = {
    **SIZES,
    "hidden_size": 128,
    "intermediate_size": 192,
    "ffn_hidden_size": 192,
    "ffn_dim": 192,
    "n_inner": 192,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "head_dim": 32,
    "query_pre_attn_scalar": 48,
}
"""Rows and heads of whole vectors."""
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(16)],
    "long_factor": [4.0 + i for i in range(16)],
    "original_max_position_embeddings": 20,
}
_HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 16,
    "mamba_n_heads": 16,
    "shared_expert_intermediate_size": 96,
    "shared_intermediate_size": 96,
}
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention"], "block_multiple_of": 64}
CASES = {
    "phi3": ("phi3", {}),
    "phi3 longrope": (
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 20},
    ),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "ernie4_5": ("ernie4_5", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"attn_logit_softcapping": 0.5}),
    "gemma3_text": ("gemma3_text", {"layer_types": ["sliding_attention", "full_attention"]}),
    "gemma4_text": (
        "gemma4_text",
        {"layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 64},
    ),
    "vaultgemma": ("vaultgemma", {}),
    "olmo": ("olmo", {}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"layer_types": ["sliding_attention", "full_attention"]}),
    "exaone4": ("exaone4", {"layer_types": ["sliding_attention", "full_attention"]}),
    "granite": ("granite", {"attention_multiplier": 0.3}),
    "helium": ("helium", {}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {"head_dim": 32}),
    "cohere": ("cohere", {"use_qk_norm": True}),
    "cohere2": ("cohere2", {"layer_types": ["sliding_attention", "full_attention"]}),
    "gpt2": ("gpt2", {}),
    "gpt_bigcode": ("gpt_bigcode", {}),
    "gpt_bigcode heads": ("gpt_bigcode", {"multi_query": False}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox in sequence": ("gpt_neox", {"use_parallel_residual": False}),
    "gptj": ("gptj", {"rotary_dim": 16}),
    "opt": ("opt", {}),
    "bloom": ("bloom", {}),
    "mpt": ("mpt", {}),
    "phi": ("phi", {}),
    "falcon": ("falcon", {}),
    "falcon heads": (
        "falcon", {"multi_query": False, "parallel_attn": False, "bias": True}
    ),
    "starcoder2": ("starcoder2", {}),
    "stablelm": ("stablelm", {}),
    "stablelm parallel": ("stablelm", {"use_parallel_residual": True}),
    "nemotron": ("nemotron", {}),
    "arcee": ("arcee", {}),
    "jais2": ("jais2", {}),
    "persimmon": ("persimmon", {}),
    "mixtral": ("mixtral", {}),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True, "mlp_only_layers": [0]}),
    "qwen2_moe": ("qwen2_moe", {"shared_expert_intermediate_size": 96}),
    "olmoe": ("olmoe", {}),
    "flex_olmo": ("flex_olmo", {}),
    "granitemoe": ("granitemoe", {}),
    "phimoe": ("phimoe", {"router_jitter_noise": 0.2}),
    "minimax_m2": ("minimax_m2", {}),
    "dots1": ("dots1", {"routed_scaling_factor": 1.5}),
    "glm4_moe": ("glm4_moe", {"routed_scaling_factor": 1.5}),
    "ernie4_5_moe": ("ernie4_5_moe", {}),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {"head_dim": 32}),
    "mellum": ("mellum", {}),
    "solar_open": ("solar_open", {}),
    "lfm2": ("lfm2", _CONVOLUTIONS),
    "lfm2_moe": ("lfm2_moe", {**_CONVOLUTIONS, "num_dense_layers": 1}),
    "qwen3_next": ("qwen3_next", _HYBRID),
    "qwen3_5_text": ("qwen3_5_text", _HYBRID),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", _HYBRID),
    "granitemoehybrid": ("granitemoehybrid", {**_HYBRID, "attention_multiplier": 0.3}),
    "granitemoehybrid dense": (
        "granitemoehybrid", {**_HYBRID, "attention_multiplier": 0.3, "num_local_experts": 0}
    ),
    "gpt_oss": (
        "gpt_oss",
        {"layer_types": ["sliding_attention", "full_attention"], "initializer_range": 0.1},
    ),
}  # fmt: skip
"""Model type and fields of the configuration."""
REFUSED = {
    "groups of experts": (
        "glm4_moe", {"n_group": 2, "topk_group": 1}, "layer 1: the router Glm4MoeTopkRouter"
    ),
    "latent attention": ("deepseek_v3", {}, "its attention has no compiled kernel"),
    "weights of an activation": ("apertus", {}, "layer 0: weights in 'mlp.act_fn'"),
    "dynamic rotation": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
        "layer 0: its rotary embedding depends on the length of a row",
    ),
    "bounds": ("olmo", {"clip_qkv": 100.0}, "layer 0: queries, keys and values with a bound"),
    "bounded activation": (
        "llama", {"hidden_act": "gelu_10"}, "layer 0: the activation ClippedGELUActivation"
    ),
    "groups by turns": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2},
        "layer 0: computes something else",
    ),
    "norms of sums": ("opt", {"do_layer_norm_before": False}, "layer 0: computes something else"),
}  # fmt: skip
"""Model type, fields of the configuration, and the reason that is logged."""


def _save(folder, model_type, overrides):
    script = make_tiny_model_script()
    model = script.make_model(tiny_config(model_type, WIDE, **overrides), seed=1)
    for parameter in model.parameters():
        if not parameter.any():  # a router that chooses among equals
            parameter.data.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    return script.save_model(model, folder, dtype=torch.float32)


def _stage(path, bits, dtype=torch.float32):
    return load_stage(path, 0, 2, [bits] * 2, dtype=dtype, device="cpu")


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_generate(case, tmp_path, monkeypatch):
    path = _save(tmp_path, *CASES[case])
    stage, reference = _stage(path, 16), load_reference(path)
    steps, run, made = compiled(stage, cache_of(stage)), CompiledSteps.run, []

    def counted(self, hidden, batch):
        made.append(batch.rows)
        return run(self, hidden, batch)

    monkeypatch.setattr(CompiledSteps, "run", counted)
    prompts = random_prompts((12, 22))
    rows = generate(path, steps, prompts, 5)
    assert rows == [generate_alone(reference, prompt, 5)[0] for prompt in prompts]
    # The prompts, unless their angles depend on their length, and four steps.
    assert made == [2] * (4 if "longrope" in case else 5)
    _assert_few_bits_are_those_of_the_layers(path)


@pytest.mark.parametrize("case", ["qwen3_next", "qwen3_5_text", "granitemoehybrid", "lfm2"])
def test_states_go_on_from_one_part_of_a_prompt_to_the_next(case, tmp_path):
    path = _save(tmp_path, *CASES[case])
    stage, reference = _stage(path, 16), load_reference(path)
    steps, prompts = compiled(stage, cache_of(stage)), random_prompts((12, 22))
    steps._program.most_rows = 7  # within both sequences
    rows = generate(path, steps, prompts, 5)
    assert rows == [generate_alone(reference, prompt, 5)[0] for prompt in prompts]


def test_positions_beyond_which_queries_are_scaled_run_operator_by_operator(tmp_path):
    rope = {
        "rope_type": "default", "rope_theta": 10000.0,
        "llama_4_scaling_beta": 5.0, "original_max_position_embeddings": 24,
    }  # fmt: skip
    path = _save(tmp_path, "ministral3", {"head_dim": 32, "rope_parameters": rope})
    stage, reference = _stage(path, 16), load_reference(path)
    steps, prompts = compiled(stage, cache_of(stage)), random_prompts((10, 21))
    rows = generate(path, steps, prompts, 6)
    assert rows == [generate_alone(reference, prompt, 6)[0] for prompt in prompts]


def _assert_few_bits_are_those_of_the_layers(path):
    """Compare a step of prompts, where rounding could choose other experts, and one after them."""
    is_alone = "longrope" not in (path / "config.json").read_text(encoding="utf-8")
    for dtype in (torch.float32, torch.bfloat16):
        stage = _stage(path, 4, dtype)
        caches = cache_of(stage, dtype=dtype), cache_of(stage, dtype=dtype)
        steps = compiled(stage, caches[0])
        hidden = torch.randn(1, 22, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
        prompts, batch = hidden[:, :20], batch_of([17, 3], [17, 3])
        if dtype == torch.float32 and is_alone:
            _assert_close(steps.run(prompts, batch), stage(prompts, batch, caches[1]), prompts)
        else:
            for cache in caches:
                stage(prompts, batch, cache)
        last, batch = hidden[:, 20:], batch_of([18, 4], [1, 1])
        found, expected = steps.forward(last, batch), stage(last, batch, caches[1])
        # Where experts are nearly as good as others, rounding may choose others.
        is_clear = steps.margins(2) > 0.05
        assert is_clear.any()
        _assert_close(found[:, is_clear], expected[:, is_clear], last[:, is_clear])


def _assert_close(found, expected, hidden):
    limit = 1e-4 if hidden.dtype == torch.float32 else 0.02
    assert (found - expected).float().norm() < limit * (expected - hidden).float().norm()


@pytest.mark.parametrize("case", REFUSED)
def test_other_layers_run_operator_by_operator(case, tmp_path, caplog):
    model_type, overrides, reason = REFUSED[case]
    stage = _stage(_save(tmp_path, model_type, overrides), 16)
    with caplog.at_level(logging.INFO, logger="llmpq"):
        assert step_runner_of(stage, cache_of(stage)) is None
    assert f"steps run operator by operator: {reason}" in caplog.text


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (LayerForm(rotation="pairs"), "computes something else"),
        (LayerForm(rotation=None), "computes something else"),
        (LayerForm(is_parallel=True), "computes something else"),
        (LayerForm(norms=("norm", None, "post_attention_layernorm", None)), "no module 'norm'"),
        (LayerForm(norms=("input_layernorm", None, None, None)), "weights in 'post_attention_"),
    ],
)
def test_a_layer_that_is_not_of_the_form_of_its_record_runs_operator_by_operator(
    form, reason, tmp_path, caplog, monkeypatch
):
    record = dataclasses.replace(family_of("llama"), form=form)
    monkeypatch.setattr(compiled_steps, "family_of", lambda _: record)
    stage = _stage(_save(tmp_path, "llama", {}), 16)
    with caplog.at_level(logging.INFO, logger="llmpq"):
        assert step_runner_of(stage, cache_of(stage)) is None
    assert f"steps run operator by operator: layer 0: {reason}" in caplog.text
