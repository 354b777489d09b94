"""A tiny configuration of any model type of transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, PreTrainedConfig

from llmpq.spec.families import known_families

TESTED = frozenset(family.name for family in known_families() if family.is_tested)
"""Model types whose tokens and logits are tested against transformers."""

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "intermediate_size_mlp": 48,
    "ffn_hidden_size": 64,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "max_position_embeddings": 128,
    "sliding_window": 6,
    "attention_chunk_size": 6,
    "initializer_range": 0.17,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "embedding_multiplier": 0.7,
    "residual_multiplier": 0.7,
    "logits_scaling": 0.7,
    "logit_scale": 0.7,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
"""Fields that a configuration class gets if it has them."""
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_LATENT: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": ...}
_STATE: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
OWN: dict[str, dict[str, Any]] = {
    "deepseek_v2": {**_LATENT, "num_experts_per_tok": 2},
    "deepseek_v3": _LATENT,
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "falcon": {"head_dim": ...},
    "glm4_moe_lite": _LATENT,
    "codegen": {"rotary_dim": 4},
    "dbrx": {
        "d_model": 32,
        "hidden_size": ...,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.5, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "num_kv_shared_layers": 1,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 100,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.5, 0.0, 0.5],
    },
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "global_head_dim": 24,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
    },
    "gpt_bigcode": {"num_key_value_heads": ...},
    "gptj": {"rotary_dim": 4},
    "hunyuan_v1_dense": {"head_dim": 8, "pad_token_id": 0},
    "hunyuan_v1_moe": {"head_dim": 8, "pad_token_id": 0, "moe_topk": 2, "eod_token_id": 3},
    "jetmoe": {"kv_channels": 16, "head_dim": ...},
    "minicpm3": {**_LATENT, "logits_scaling": ...},
    "bamba": {"mamba_n_heads": 8, "attn_layer_indices": [1]},
    "jamba": {
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "expert_layer_period": 3,
        "expert_layer_offset": 0,
    },
    "minimax": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "block_size": 4,
        "full_attn_alpha_factor": 1.2,
        "linear_attn_alpha_factor": 0.9,
        "linear_attn_beta_factor": 1.1,
        "mlp_alpha_factor": 0.8,
    },
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_state": 16,
        "key_multiplier": 0.7,
        "attention_in_multiplier": 0.9,
        "attention_out_multiplier": 1.2,
        "ssm_in_multiplier": 1.1,
        "ssm_out_multiplier": 0.8,
        "mlp_multipliers": [0.9, 1.2],
        "ssm_multipliers": [0.8, 1.1, 0.9, 1.2, 0.7],
        "lm_head_multiplier": 0.9,
    },
    "granitemoehybrid": {
        "mamba_n_heads": 4,
        "mamba_d_state": 16,
        "shared_intermediate_size": 24,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "moe"],
        "num_hidden_layers": ...,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "moe_shared_expert_intermediate_size": 24,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8},
    "llama4_text": {"no_rope_layers": [1, 0, 1], "floor_scale": 4},
    "ministral": {"head_dim": 8},
    "qwen3_5_moe_text": _STATE,
    "qwen3_5_text": _STATE,
    "qwen3_next": _STATE,
    "olmo_hybrid": _STATE,
    "kimi_linear": {
        **_LATENT,
        "linear_num_heads": 2,
        "linear_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "bailing_hybrid": {
        "num_key_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "youtu": _LATENT,
}
"""Fields of single families; ``...`` leaves one out."""
GEMMA4_EXPERTS = {
    "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16,
}  # fmt: skip
"""Fields that give Gemma 4 experts."""
SHARED_LAYERS = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 3,
}
"""Fields that let the last layers of Gemma 3n and 4 read keys and values of layers 1 and 2."""
GEMMA3N_SHARED = {**SHARED_LAYERS, "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0, 0.0, 0.5]}
GEMMA4_SHARED = {
    **SHARED_LAYERS,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 100,
}
"""Such layers, with embeddings of their own (E2B, E4B)."""


def tiny_config(
    model_type: str, sizes: Mapping[str, Any] = SIZES, **overrides: Any
) -> PreTrainedConfig:
    """Return a configuration of a few layers; skip the test if transformers lacks the type."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers does not know {model_type}")
    config_class = CONFIG_MAPPING[model_type]
    usual = config_class()
    usual.allow_global_per_layer_attribute_access = True  # layers of Gemma 4 differ in their heads
    fields: dict[str, Any] = dict.fromkeys(n for n in _SPECIAL_TOKENS if hasattr(usual, n))
    for name, value in sizes.items():
        is_null = name == "num_key_value_heads" and hasattr(usual, name)
        if is_null or getattr(usual, name, None) is not None:
            fields[name] = value
    fields |= {**OWN.get(model_type, {}), **overrides}
    return config_class(**{name: value for name, value in fields.items() if value is not ...})


def stored_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """Return what a ``config.json`` with all fields of ``config`` holds."""
    return dict(json.loads(config.to_json_string(use_diff=False)))
