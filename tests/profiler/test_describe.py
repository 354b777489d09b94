"""Descriptions of models that the planner's table lacks."""

from __future__ import annotations

import json

import pytest
import torch
from helpers.tiny_configs import stored_fields, tiny_config
from transformers import AutoModelForCausalLM, DynamicCache

from llmpq.cli.commands.algo import main as algo
from llmpq.cli.commands.profile import main as profile
from llmpq.errors import SpecError
from llmpq.profiler.describe import describe
from llmpq.spec.catalog import resolve_model
from llmpq.spec.huggingface.described import MODEL_FILE, read_model_file, write_model_file
from llmpq.spec.huggingface.families import load_model_dir, model_types

torch.set_num_threads(1)

UNKNOWN = "gpt_neox_japanese"
"""A family of transformers that the planner's table lacks."""


@pytest.mark.parametrize("model_type", ["deepseek_v3", "gpt2", "gpt_oss", "qwen3_next", UNKNOWN])
def test_parameters_and_cache_are_those_of_a_real_model(model_type):
    config = tiny_config(model_type, num_hidden_layers=4, layer_types=...)
    model = AutoModelForCausalLM.from_config(config).eval()
    cache = DynamicCache(config=config)
    with torch.no_grad():
        model(input_ids=torch.tensor([[1, 2, 3, 4, 5]]), past_key_values=cache)
    described = describe(config, "tiny", "float32")
    assert described.parameters == sum(p.numel() for p in model.parameters())
    for spec, layer in zip(described.layers, cache.layers, strict=True):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        held = 0 if keys is None else keys.nbytes + values.nbytes
        assert spec.kv_bytes_per_token(4) * 5 == held


def test_linear_attention_leaves_a_state_and_no_keys():
    config = tiny_config("qwen3_next", num_hidden_layers=4, layer_types=...)
    layers = describe(config, "tiny", "float32").layers
    assert [layer.num_kv_heads > 0 for layer in layers] == [False, False, False, True]
    assert [layer.state_values > 0 for layer in layers] == [True, True, True, False]


@pytest.mark.parametrize(
    ("model_type", "with_keys"),
    [
        ("bamba", {1}),
        ("falcon_h1", {0, 1, 2}),
        ("jamba", {1}),
        ("mamba2", set()),
        ("minimax", {1}),
    ],
)
def test_layers_with_a_state_are_described(model_type, with_keys):
    config = tiny_config(model_type)
    model = describe(config, "tiny", "float32")
    assert {i for i, layer in enumerate(model.layers) if layer.num_kv_heads} == with_keys
    states = {i for i, layer in enumerate(model.layers) if layer.state_values}
    assert states | with_keys == set(range(model.num_layers))
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config)
    assert model.parameters == sum(p.numel() for p in whole.parameters())


@pytest.fixture
def unknown_dir(tmp_path):
    assert UNKNOWN not in model_types()
    folder = tmp_path / "unknown"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(stored_fields(tiny_config(UNKNOWN))))
    return folder


def test_a_described_model_is_planned_from_its_file(unknown_dir, tmp_path, capsys):
    file = tmp_path / "model.json"
    assert profile(["describe", "--model", str(unknown_dir), "--output", str(file), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    model, path = resolve_model(file)
    assert (printed["model_type"], printed["layers"]) == (UNKNOWN, 3)
    assert (model.family, model.parameters, path) == (UNKNOWN, printed["parameters"], file)
    cluster = ["--device_names", "T4-16G", "--device_numbers", "2"]
    arguments = [*cluster, "--global_bz", "4", "--s", "8", "--n", "8", "--json"]
    plan = str(tmp_path / "plan.json")
    assert algo(["--model", str(file), *arguments, "--output", plan]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(len(stage["bits"]) for stage in found["stages"]) == 3


def test_a_directory_with_a_model_file_is_a_model(unknown_dir):
    with pytest.raises(SpecError, match="or a description by 'llmpq-profile describe'"):
        load_model_dir(unknown_dir)
    assert profile(["describe", "--model", str(unknown_dir)]) == 0
    assert load_model_dir(unknown_dir) == read_model_file(unknown_dir / MODEL_FILE)


def test_a_model_file_is_read_as_it_was_written(tmp_path):
    model = describe(tiny_config("deepseek_v3"), "tiny", "bfloat16")
    write_model_file(tmp_path / "model.json", model)
    assert read_model_file(tmp_path / "model.json") == model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 0}, "hidden_size"),
        ({"layer_kinds": [9]}, "a layer names a kind that does not exist"),
        ({"colour": "red"}, "colour"),
        ({"schema": 2}, "schema"),
    ],
)
def test_a_damaged_model_file_raises_an_error(tmp_path, change, message):
    path = tmp_path / "model.json"
    write_model_file(path, describe(tiny_config("llama"), "tiny", "float32"))
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(SpecError, match=message):
        read_model_file(path)


def test_a_model_that_is_no_decoder_raises_an_error():
    with pytest.raises(SpecError, match="decoder-only"):
        describe(tiny_config("t5"), "tiny", "float32")
    with pytest.raises(SpecError, match="cannot run on the meta device"):
        describe(tiny_config("jetmoe"), "tiny", "float32")
