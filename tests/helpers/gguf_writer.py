"""Writes tiny models as GGUF files with the ``gguf`` package, as llama.cpp's converter does."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

ARCHITECTURES = {
    "llama": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
}
F32 = gguf.GGMLQuantizationType.F32


DEMO = Path(__file__).parents[2] / "models" / "demo"


def demo_tokenizer():
    """Return how many tokens the shipped model has, and ``extra`` that writes its tokenizer."""
    stored = json.loads((DEMO / "tokenizer.json").read_text())["model"]
    vocabulary = sorted(stored["vocab"], key=stored["vocab"].get)
    merges = [one if isinstance(one, str) else " ".join(one) for one in stored["merges"]]
    return len(vocabulary), [
        lambda writer: writer.add_tokenizer_model("gpt2"),
        lambda writer: writer.add_tokenizer_pre("qwen2"),
        lambda writer: writer.add_token_list(vocabulary),
        lambda writer: writer.add_token_types([1] * len(vocabulary)),
        lambda writer: writer.add_token_merges(merges),
    ]


def write_gguf(model_dir: Path, output: Path, kind: str = "F32", extra=()) -> Path:
    """Write a model directory as GGUF; matrices in the number format ``kind``.

    ``extra`` are further metadata and tensors: callables that take the writer.
    """
    config = json.loads((model_dir / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(output, architecture)
    _add_metadata(writer, config)
    for add in extra:
        add(writer)
    for name, values in _tensors(load_file(model_dir / "model.safetensors"), config, architecture):
        is_matrix = values.ndim > 1
        type_ = gguf.GGMLQuantizationType[kind] if is_matrix else F32
        stored = gguf.quantize(values, type_)
        writer.add_tensor(name, stored, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return output


def _add_metadata(writer, config) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config["rope_parameters"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    experts = config.get("num_local_experts") or config.get("num_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size") or 0)
    if config["model_type"].startswith("gemma") and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    for field in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(field):
            getattr(writer, f"add_{field}")(config[field])


def _tensors(state, config, architecture):
    kind = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in _stacked(state).items():
        module, _, suffix = name.rpartition(".")
        values = tensor.to(torch.float32)
        if architecture == "llama" and module.endswith((".q_proj", ".k_proj")):
            values = _interleaved(values, heads[module.rpartition(".")[2]])
        if architecture.startswith("gemma") and module.endswith("norm"):
            values = values + 1
        yield f"{names.get_name(module)}.{suffix}", np.ascontiguousarray(values.numpy())


def _stacked(state):
    """The tensors, experts of a layer as one under the names that gguf's table has."""
    found, experts = {}, {}
    for name, tensor in state.items():
        if ".experts." not in name:
            found[name.replace(".block_sparse_moe.", ".mlp.")] = tensor
            continue
        block, _, rest = name.partition(".experts.")
        index, part, _ = rest.split(".")
        part = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}.get(part, part)
        experts.setdefault((block, part), {})[int(index)] = tensor
    for (block, part), parts in experts.items():
        name = f"{block.replace('.block_sparse_moe', '.mlp')}.experts.{part}.weight"
        found[name] = torch.stack([parts[index] for index in sorted(parts)])
    return found


def _interleaved(values, heads):
    # conversion/llama.py of llama.cpp, LlamaModel.permute
    shape = (heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return values.reshape(shape).swapaxes(1, 2).reshape(values.shape)
