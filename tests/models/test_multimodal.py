"""The language part of multimodal checkpoints: sizes, weights and tokens are transformers' own."""

from __future__ import annotations

import json

import pytest
import torch
from helpers.tiny_configs import tiny_config
from helpers.tiny_models import Pipeline, Sequences, generate_alone, make_tiny_model_script
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from llmpq.models import Checkpoint
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.model_files.config import language_fields

torch.set_num_threads(1)

PROMPT = [5, 3, 11, 40, 2, 9]
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 8, "patch_size": 4, "depth": 1, "num_heads": 2, "embed_dim": 16,
    "out_hidden_size": 32, "fullatt_block_indexes": [0], "deepstack_visual_indexes": [0],
}  # fmt: skip
SPECIAL = {"image_token_id": 98, "image_token_index": 98, "video_token_id": 97}
TEXT = {
    "gemma3": "gemma3_text",
    "llava": "llama",
    "mistral3": "mistral",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
}


@pytest.fixture(params=sorted(TEXT))
def saved(request, tmp_path):
    """A tiny multimodal model and its directory."""
    outer = CONFIG_MAPPING[request.param]
    usual = outer()
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    is_qwen = request.param.startswith("qwen")
    text = tiny_config(TEXT[request.param], **({"rope_parameters": rope} if is_qwen else {}))
    vision = {key: value for key, value in VISION.items() if hasattr(usual.vision_config, key)}
    config = outer(
        text_config=text.to_dict(),
        vision_config={**vision, "model_type": usual.vision_config.model_type},
        **{name: value for name, value in SPECIAL.items() if hasattr(usual, name)},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    make_tiny_model_script().save_model(model, tmp_path, dtype=torch.float32)
    return model, tmp_path


def test_text_passes_as_in_transformers(saved):
    model, folder = saved
    run = Sequences(Pipeline(folder, [0, 1, 3]))
    run.prefill({"one": (2, PROMPT)})
    run.decode(["one"], 5)
    tokens, logits = generate_alone(model, PROMPT, 6)
    assert run.tokens["one"] == tokens
    assert (torch.stack(run.logits["one"]) - logits).abs().max() <= 1e-4


def test_sizes_are_those_of_the_language_model(saved):
    model, folder = saved
    language = sum(p.numel() for p in model.model.language_model.parameters())
    head = model.lm_head.weight
    is_tied = head is model.get_input_embeddings().weight
    found = load_model_dir(folder)
    assert found.parameters == language + (0 if is_tied else head.numel())


def test_older_prefixes_are_found(saved):
    _, folder = saved
    path = folder / "model.safetensors"
    expected = Checkpoint(folder).layer_state_dict(1)
    stored = load_file(path)
    save_file(
        {
            name.replace("model.language_model.", "language_model.model."): tensor
            for name, tensor in stored.items()
        },
        path,
    )
    found = Checkpoint(folder).layer_state_dict(1)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_fields_of_the_outer_object_complete_the_inner_one():
    config = {
        "model_type": "mistral3", "tie_word_embeddings": True, "dtype": "bfloat16",
        "text_config": {"model_type": "mistral", "tie_word_embeddings": False},
    }  # fmt: skip
    found = language_fields(json.loads(json.dumps(config)))
    assert found == {"model_type": "mistral", "tie_word_embeddings": True, "dtype": "bfloat16"}
    assert language_fields({"model_type": "kimi_k2"}) == {"model_type": "deepseek_v3"}
    assert language_fields({"model_type": "llama"}) == {"model_type": "llama"}
    rope = {"type": "mrope", "mrope_section": [1, 1, 2]}
    old = language_fields({"model_type": "qwen2_vl", "rope_scaling": rope})
    assert old == {"model_type": "qwen2", "rope_scaling": {"type": "default"}}
