"""Every family in ``TESTED``, with a tiny configuration."""

from __future__ import annotations

import pytest
import torch
from helpers.tiny_models import (
    Pipeline,
    Sequences,
    generate_alone,
    load_reference,
    make_tiny_model_script,
)
from transformers import CONFIG_MAPPING

from llmpq.models.families import TESTED

torch.set_num_threads(1)

PROMPTS = {"long": (3, [1, 2, 3, 4, 5, 11, 12, 13, 14]), "short": (0, [7, 8]), "one": (4, [61])}
SIZES = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "ffn_hidden_size": 64,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "max_position_embeddings": 128,
    "sliding_window": 6,
    "initializer_range": 0.17,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "embedding_multiplier": 0.7,
    "residual_multiplier": 0.7,
    "logits_scaling": 0.7,
    "logit_scale": 0.7,
}
OPTIONAL = {"bos_token_id", "eos_token_id", "pad_token_id"}


def _tiny_config(model_type):
    config_class = CONFIG_MAPPING[model_type]
    usual = config_class()
    fields = {name: None for name in OPTIONAL if hasattr(usual, name)}
    for name, value in SIZES.items():
        if getattr(usual, name, None) is not None or name == "num_key_value_heads":
            fields[name] = value
    if not hasattr(usual, "num_key_value_heads"):
        fields.pop("num_key_value_heads")
    return config_class(**fields)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(TESTED))
def test_tested_family_generates_the_tokens_of_transformers(model_type, tmp_path):
    if model_type not in CONFIG_MAPPING:
        pytest.skip("this version of transformers does not know the family")
    script = make_tiny_model_script()
    model = script.make_model(_tiny_config(model_type), seed=1)
    script.save_model(model, tmp_path, dtype=torch.float32)

    run = Sequences(Pipeline(tmp_path, [0, 1, 3]))
    run.prefill(PROMPTS)
    run.decode(list(PROMPTS), 10)

    reference = load_reference(tmp_path)
    for name, (_, prompt) in PROMPTS.items():
        tokens, logits = generate_alone(reference, prompt, 11)
        assert run.tokens[name] == tokens
        assert (torch.stack(run.logits[name]) - logits).abs().max() <= 1e-4
