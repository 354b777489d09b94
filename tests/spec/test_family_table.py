"""The table of families against the models that transformers builds on the meta device."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import transformers
from helpers.tiny_configs import (
    GEMMA3N_SHARED,
    GEMMA4_EXPERTS,
    GEMMA4_SHARED,
    stored_fields,
    tiny_config,
)
from transformers import CONFIG_MAPPING
from transformers.models.jetmoe import modeling_jetmoe

from llmpq.profiler.describe import describe
from llmpq.spec import catalog
from llmpq.spec.huggingface.config import LAYERS, class_sizes, family_defaults
from llmpq.spec.huggingface.families import model_from_config, model_types
from scripts import config_defaults

torch.set_num_threads(1)

DATA = Path(catalog.__file__).parents[1] / "data"
CASES = {
    "bitnet biased": ("bitnet", {"attention_bias": True}),
    "cohere norms": ("cohere", {"use_qk_norm": True}),
    "deepseek_v2 lite": ("deepseek_v2", {"q_lora_rank": None, "attention_bias": True}),
    "ernie4_5 biased": ("ernie4_5", {"use_bias": True}),
    "ernie4_5_moe range": ("ernie4_5_moe", {"moe_layer_interval": 2, "use_bias": True}),
    "dots1 windows": ("dots1", {"max_window_layers": 1, "sliding_window": 6}),
    "falcon heads": ("falcon", {"multi_query": False, "bias": True}),
    "falcon serial": ("falcon", {"parallel_attn": False}),
    "gemma3n shared": (
        "gemma3n_text",
        {**GEMMA3N_SHARED, "intermediate_size": [64] * 3 + [32] * 3},
    ),
    "gemma4 experts": ("gemma4_text", GEMMA4_EXPERTS),
    "gemma4 joined": ("gemma4_text", {"attention_k_eq_v": False, "attention_bias": True}),
    "gemma4 shared": ("gemma4_text", GEMMA4_SHARED),
    "glm4_moe norms": ("glm4_moe", {"use_qk_norm": True, "attention_bias": True}),
    "gpt2 inner": ("gpt2", {"n_inner": 40, "tie_word_embeddings": False}),
    "gpt_bigcode heads": ("gpt_bigcode", {"multi_query": False}),
    "granite dense": ("granitemoehybrid", {"num_local_experts": 0, "mamba_proj_bias": True}),
    "nemotron latent": (
        "nemotron_h",
        {
            "layers_block_type": ["mlp", "linear_attention", "moe", "full_attention"],
            "moe_latent_size": 16,
            "mlp_bias": True,
            "use_bias": True,
            "use_conv_bias": False,
        },
    ),
    "falcon_h1 normed": (
        "falcon_h1",
        {"mamba_rms_norm": True, "projectors_bias": True, "attention_bias": True, "mlp_bias": True},
    ),
    "falcon_h1 expanded": ("falcon_h1", {"mamba_d_ssm": None, "mamba_n_groups": 2}),
    "jamba dense": ("jamba", {"num_experts": 1, "mamba_conv_bias": False, "mamba_proj_bias": True}),
    "jamba rank": ("jamba", {"mamba_dt_rank": 5, "expert_layer_period": 1}),
    "mamba wide": ("mamba", {"intermediate_size": 96, "use_bias": True, "use_conv_bias": False}),
    "lfm2 biased": ("lfm2", {"conv_bias": True, "block_auto_adjust_ff_dim": False}),
    "llama4 interleaved": ("llama4_text", {"interleave_moe_layer_step": 2}),
    "mistral wide": ("mistral", {"head_dim": 16, "sliding_window": None}),
    "mixed windows": ("smollm3", {"use_sliding_window": True, "sliding_window": 6}),
    "phimoe head": ("phimoe", {"lm_head_bias": True, "attention_bias": True}),
    "qwen2_moe dense": ("qwen2_moe", {"mlp_only_layers": [1], "qkv_bias": False}),
    "qwen2_moe windows": ("qwen2_moe", {"use_sliding_window": True}),
    "seed_oss out": ("seed_oss", {"attention_out_bias": True, "mlp_bias": True}),
    "stablelm norms": ("stablelm", {"qk_layernorm": True, "use_qkv_bias": True}),
    "stablelm parallel": ("stablelm", {"use_parallel_residual": True}),
    "starcoder2 plain": ("starcoder2", {"use_bias": False, "sliding_window": 6}),
}


MODELS = json.loads((DATA / "models.json").read_text())["models"]
PUBLISHED = {entry["config"]["model_type"]: entry for entry in MODELS}
"""One published model of every family in the catalogue."""
MAX_LAYERS = 5
"""Layers of a published model that are built: the kinds of layer of all these models are among
them."""


def _comparable(model):
    """Order operators by name; a model does not say which norm ends the embedding."""
    kinds = tuple(
        dataclasses.replace(layer, linears=tuple(sorted(layer.linears, key=lambda op: op.name)))
        for layer in model.layer_types
    )
    ends = model.embedding_parameters + model.final_parameters
    return dataclasses.replace(
        model, layer_types=kinds, embedding_parameters=ends, final_parameters=0
    )


def _assert_equal_to_transformers(config):
    found = model_from_config(stored_fields(config), "tiny", "config.json")
    assert _comparable(found) == _comparable(describe(config, "tiny", found.dtype))


@pytest.mark.parametrize("model_type", sorted({*model_types()} - {"jetmoe"}))
def test_a_family_has_the_operators_and_the_cache_of_transformers(model_type):
    _assert_equal_to_transformers(tiny_config(model_type))


@pytest.mark.parametrize("case", CASES)
def test_fields_mean_what_they_mean_to_transformers(case):
    model_type, overrides = CASES[case]
    _assert_equal_to_transformers(tiny_config(model_type, **overrides))


@pytest.mark.parametrize("model_type", sorted(PUBLISHED))
def test_published_sizes_are_those_of_transformers(model_type):
    fields = dict(PUBLISHED[model_type]["config"])
    name = next(name for name in LAYERS if name in fields)
    states_layers = "hybrid_override_pattern" in fields
    values = (*fields.values(), *fields.get("linear_attn_config", {}).values())
    if not states_layers and not any(isinstance(value, list) for value in values):
        fields[name] = min(fields[name], max(MAX_LAYERS, fields.get("layer_group_size", 0)))
    _assert_published(fields)


@pytest.mark.slow  # a minute: all layers of 106 models
@pytest.mark.parametrize("entry", MODELS, ids=lambda entry: entry["name"])
def test_every_published_model_is_that_of_transformers(entry):
    _assert_published(entry["config"])


def _assert_published(fields):
    model_type = fields["model_type"]
    if model_type not in CONFIG_MAPPING:
        pytest.skip("this version of transformers does not know the family")
    found = model_from_config(fields, "published", "config.json")
    config_class = CONFIG_MAPPING[model_type]
    expected = describe(config_class.from_dict(fields), "published", found.dtype)
    assert _comparable(found) == _comparable(expected)


def test_grouped_heads_of_falcon_are_cached_once():
    # transformers repeats them for every query head before it caches them.
    config = tiny_config("falcon", new_decoder_architecture=True, num_kv_heads=2)
    found = model_from_config(stored_fields(config), "tiny", "config.json")
    expected = describe(config, "tiny", found.dtype)
    assert [layer.num_kv_heads for layer in found.layer_types] == [2]
    repeated = [dataclasses.replace(layer, num_kv_heads=4) for layer in found.layer_types]
    found = dataclasses.replace(found, layer_types=tuple(repeated))
    assert _comparable(found) == _comparable(expected)


def test_every_family_has_defaults():
    different = sorted(set(model_types()) ^ set(family_defaults()))
    assert not different, f"{different}: run scripts/config_defaults.py"
    assert family_defaults().keys() == class_sizes().keys()


@pytest.mark.parametrize("model_type", model_types())
def test_defaults_are_those_of_transformers(model_type):
    if model_type not in CONFIG_MAPPING:
        pytest.skip("this version of transformers does not know the family")
    if (
        json.loads((DATA / "config_defaults.json").read_text())["transformers"]
        != transformers.__version__
    ):
        pytest.skip("written by another version of transformers")
    message = "run scripts/config_defaults.py"
    assert config_defaults.defaults_of(model_type) == family_defaults()[model_type], message
    assert config_defaults.sizes_of(model_type) == class_sizes()[model_type], message


def test_jetmoe_has_the_operators_and_the_cache_of_transformers(monkeypatch):
    # Its own routing reads values, which the meta device has not; sizes do not depend on it.
    def route(self, hidden_states):
        rows = len(hidden_states) * self.top_k
        order = torch.zeros(rows, dtype=torch.int64)
        return order, order, hidden_states.new_zeros(rows), [], None

    def run(self, inputs, expert_size):
        del expert_size
        return inputs.new_zeros(len(inputs), self.output_size)

    monkeypatch.setattr(modeling_jetmoe.JetMoeTopKGating, "forward", route)
    monkeypatch.setattr(modeling_jetmoe.JetMoeParallelExperts, "forward", run)
    _assert_equal_to_transformers(tiny_config("jetmoe"))
