"""Configurations: plain decoders are read, others raise an error, no remote code runs."""

from __future__ import annotations

import json
import random
import shutil

import pytest
import torch
from helpers.tiny_configs import tiny_config
from transformers import (
    AriaTextConfig,
    BertConfig,
    DogeConfig,
    FalconConfig,
    GemmaConfig,
    GraniteConfig,
    Llama4TextConfig,
    LlamaConfig,
    OpenAIGPTConfig,
    Qwen2Config,
    T5Config,
)

from llmpq.errors import SpecError
from llmpq.models import KVShape, Master, build_layer, kv_shapes, load_config
from llmpq.models.adapter import layer_window, prepare_config


def _write(directory, text):
    (directory / "config.json").write_text(text)
    return directory


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not acceptable JSON"),
        ("[]", "expected a JSON object"),
        ("{}", "model_type"),
        ('{"model_type": "no-such-family"}', "model_type"),
        ('{"model_type": 3}', "model_type"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "transformers rejects"),
        ('{"model_type": "llama", "hidden_size": 0}', "llama"),
        ('{"model_type": "llama", "num_attention_heads": 0}', "transformers rejects"),
        ('{"model_type": "llama", "num_hidden_layers": -1}', "num_hidden_layers"),
        ('{"model_type": "llama", "num_hidden_layers": 1000000000000}', "num_hidden_layers"),
    ],
)
def test_broken_configuration_raises_an_error(tmp_path, text, message):
    with pytest.raises(SpecError, match=message):
        load_config(_write(tmp_path, text))


def test_missing_configuration_raises_an_error(tmp_path):
    with pytest.raises(SpecError, match=r"config\.json: no such file"):
        load_config(tmp_path)


def test_code_in_a_model_directory_never_runs(tiny_model, tmp_path):
    model_dir = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    marker = tmp_path / "ran"
    (model_dir / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass C: ...\n")
    fields = json.loads((model_dir / "config.json").read_text())
    fields["auto_map"] = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.C"}
    _write(model_dir, json.dumps(fields))
    assert type(load_config(model_dir)) is LlamaConfig
    fields["model_type"] = "evil"
    _write(model_dir, json.dumps(fields))
    with pytest.raises(SpecError, match="model_type"):
        load_config(model_dir)
    assert not marker.exists()


@pytest.mark.filterwarnings("ignore")  # transformers remarks on odd values
@pytest.mark.parametrize("family", ["llama", "opt", "bloom", "gemma3", "qwen3_moe"])
def test_mutated_configuration_is_read_or_raises_an_error(tiny_model, tmp_path, family):
    rng = random.Random(0)
    original = json.loads((tiny_model(family) / "config.json").read_text())
    values = [None, -1, 0, 1, 3, 2**40, 2**70, 0.5, True, "x", "", [], {}, [1], {"a": 1}]
    refused = 0
    for _ in range(150):
        fields = dict(original)
        for name in rng.sample(sorted(fields), rng.randint(1, 3)):
            fields[name] = rng.choice(values)
        try:
            config = load_config(_write(tmp_path, json.dumps(fields)))
            build_layer(config, 0)
        except SpecError:
            refused += 1
    assert 0 < refused < 150


def _of_unknown_layers():
    config = LlamaConfig(num_hidden_layers=2)
    config.layer_types = ["full_attention", "another"]
    return config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            _of_unknown_layers(),
            r"layer_types\[1\]': found 'another', expected one of full_attention",
        ),
        (T5Config(), "expected a decoder-only language model"),
        (BertConfig(), "plain decoder"),
        (OpenAIGPTConfig(), "found no 'embed_tokens' in OpenAIGPTModel"),
        (DogeConfig(), "not supported: its layers build their own attention masks"),
        (Llama4TextConfig(attention_chunk_size=None), "field 'attention_chunk_size': found None"),
        (FalconConfig(alibi=True), "field 'alibi': found True"),
        (LlamaConfig(embedding_multiplier=2.0), "field 'embedding_mul"),
    ],
)
def test_model_that_is_no_plain_decoder_raises_an_error(config, message):
    with pytest.raises(SpecError, match=message):
        prepare_config(config)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"rope_theta": 500.0},
        {"rope_theta": 500.0, "rope_scaling": None},
        {"rope_theta": 500.0, "rope_parameters": {"rope_type": "default"}},
    ],
)
def test_the_base_of_positions_is_read_in_either_place(tmp_path, fields):
    config = load_config(_write(tmp_path, json.dumps({"model_type": "llama", **fields})))
    assert config.rope_parameters["rope_theta"] == 500.0


def test_untested_family_runs_with_a_warning(caplog):
    prepare_config(LlamaConfig())
    assert not caplog.records
    prepare_config(AriaTextConfig())
    assert "aria_text was not tested" in caplog.text


def test_scales_that_the_family_applies_are_accepted():
    prepare_config(GraniteConfig(embedding_multiplier=12.0, logits_scaling=8.0))


def test_layer_is_built_without_memory(tiny_model):
    config = load_config(tiny_model("llama"))
    layer = build_layer(config, 2)
    assert type(layer).__name__ == "LlamaDecoderLayer"
    assert layer.self_attn.layer_idx == 2
    assert all(p.is_meta and not p.requires_grad for p in layer.parameters())
    assert not layer.training


@pytest.mark.parametrize("index", [-1, 3])
def test_layer_that_does_not_exist_raises_an_error(tiny_model, index):
    with pytest.raises(SpecError, match=rf"layer {index}: expected one of \[0, 3\)"):
        build_layer(load_config(tiny_model("llama")), index)


def test_windows_follow_the_type_of_each_layer():
    config = Qwen2Config(
        num_hidden_layers=4, use_sliding_window=True, sliding_window=6, max_window_layers=2
    )
    assert [layer_window(config, i) for i in range(4)] == [None, None, 6, 6]
    assert layer_window(LlamaConfig(), 0) is None


def test_kv_shapes_count_grouped_heads(tiny_model):
    assert kv_shapes(load_config(tiny_model("llama")), 1, 3) == (KVShape(heads=2, head_dim=8),) * 2
    assert kv_shapes(load_config(tiny_model("bloom")), 0, 1) == (KVShape(heads=4, head_dim=8),)
    assert kv_shapes(GemmaConfig(head_dim=256), 0, 1) == (KVShape(heads=16, head_dim=256),)


def test_master_holds_weights_on_meta_and_constants_for_real(tiny_model):
    master = Master(load_config(tiny_model("gemma")))
    assert all(p.is_meta for p in master.parameters())
    assert torch.equal(master.embed_tokens.embed_scale, torch.tensor(32**0.5))


@pytest.mark.parametrize(
    ("model_type", "field", "value"),
    [
        ("inkling_text", r"layer_types\[0\]", "hybrid_sliding"),
        ("recurrent_gemma", "model_type", "recurrent_gemma"),
        ("rwkv", "model_type", "rwkv"),
        ("zamba", r"layer_types\[2\]", "hybrid"),
    ],
)
def test_states_that_are_not_run_are_refused_in_one_sentence(model_type, field, value):
    with pytest.raises(
        SpecError, match=rf"^config\.json: field '{field}': found '{value}', ex"
    ) as (caught):
        prepare_config(tiny_config(model_type))
    assert str(caught.value).endswith(
        "; others do not run; llmpq-profile describe plans some of them"
    )
