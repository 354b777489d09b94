"""Writes tiny models as GGUF files with the ``gguf`` package, as llama.cpp's converter does."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from helpers.gguf_families import CONVERSIONS
from safetensors.torch import load_file

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
    config.setdefault("num_hidden_layers", len(config.get("layers_block_type", ())))
    conversion = CONVERSIONS[config["model_type"]]
    state = load_file(model_dir / "model.safetensors")
    if any(name.startswith("mtp.") for name in state):
        count = config["num_hidden_layers"]
        state = {_mtp_name(name, count): value for name, value in state.items()}
        config["num_hidden_layers"] = count + 1
        extra = (*extra, lambda writer: writer.add_nextn_predict_layers(1))
    writer = gguf.GGUFWriter(output, conversion.name_for(config))
    _add_metadata(writer, config | conversion.renamed(config))
    conversion.keys(writer, config)
    for add in extra:
        add(writer)
    for name, values in _tensors(state, config, conversion):
        is_matrix = values.ndim > 1 and values.shape[-1] % 32 == 0
        type_ = gguf.GGMLQuantizationType[kind] if is_matrix else F32
        stored = gguf.quantize(values, type_)
        writer.add_tensor(name, stored, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return output


def _mtp_name(name: str, count: int) -> str:
    """What the converter calls a tensor of Qwen3.5: the layer that drafts follows the others."""
    part = name.removeprefix("mtp.")
    own = {
        "fc": "eh_proj",
        "pre_fc_norm_embedding": "enorm",
        "pre_fc_norm_hidden": "hnorm",
        "norm": "shared_head_norm",
    }
    if part == name:
        return name
    for stored, known in own.items():
        if part == f"{stored}.weight":
            return f"blk.{count}.nextn.{known}.weight"
    return f"model.layers.{count}.{part.removeprefix('layers.0.')}"


def rewritten(source: Path, target: Path, tensors, extra=()) -> Path:
    """Copy a file with some tensors replaced: ``(data, type)`` by name; ``extra`` are added."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, entry in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(name, entry.contents(), *entry.types[:2])
    for tensor in reader.tensors:
        data, type_ = tensors.get(tensor.name, (tensor.data, tensor.tensor_type))
        writer.add_tensor(tensor.name, data, raw_dtype=type_)
    for name in extra:
        writer.add_tensor(name, extra[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _add_metadata(writer, config) -> None:
    """Add what the converter writes for every model that has the field."""
    rope = config.get("rope_parameters") or {"rope_theta": None, "rope_type": None}
    local, rope = rope.get("sliding_attention"), rope.get("full_attention", rope)
    for add, field in _KEYS:
        if config.get(field) is not None:
            getattr(writer, f"add_{add}")(config[field])
    experts = config.get("num_local_experts") or config.get("num_experts")
    if experts:
        writer.add_expert_count(experts)
    if rope["rope_theta"] is not None:
        writer.add_rope_freq_base(rope["rope_theta"])
    if local is not None:
        writer.add_rope_freq_base_swa(local["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for name in ("beta_fast", "beta_slow"):
            if name in rope:
                getattr(writer, f"add_rope_scaling_yarn_{name}")(rope[name])
    if config["model_type"].startswith("gemma") and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])


_KEYS = (
    ("context_length", "max_position_embeddings"),
    ("vocab_size", "vocab_size"),
    ("embedding_length", "hidden_size"),
    ("block_count", "num_hidden_layers"),
    ("feed_forward_length", "intermediate_size"),
    ("head_count", "num_attention_heads"),
    ("head_count_kv", "num_key_value_heads"),
    ("layer_norm_rms_eps", "rms_norm_eps"),
    ("layer_norm_eps", "layer_norm_eps"),
    ("key_length", "head_dim"),
    ("value_length", "head_dim"),
    ("expert_used_count", "num_experts_per_tok"),
    ("expert_group_count", "n_group"),
    ("expert_group_used_count", "topk_group"),
    ("attn_logit_softcapping", "attn_logit_softcapping"),
    ("final_logit_softcapping", "final_logit_softcapping"),
)


def _tensors(state, config, conversion):
    table = gguf.MODEL_ARCH_NAMES.items()
    kind = next(key for key, value in table if value == conversion.name_for(config))
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    for name, tensor in _stacked(state).items():
        for own, values in conversion.tensors(name, tensor.to(torch.float32), config):
            stored = own if own.startswith("blk.") else names.get_name(own, (".weight", ".bias"))
            assert stored is not None, own
            yield stored, np.ascontiguousarray(values.numpy())


def _stacked(state):
    """The tensors, experts of a layer as one under the names that gguf's table has."""
    found, experts = {}, {}
    for name, tensor in state.items():
        parts = name.partition(".experts.")[2].split(".")
        if len(parts) != 3:
            found[name.replace(".block_sparse_moe.", ".mlp.")] = tensor
            continue
        block, (index, part, _) = name.partition(".experts.")[0], parts
        part = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}.get(part, part)
        experts.setdefault((block, part), {})[int(index)] = tensor
    for (block, part), parts in experts.items():
        name = f"{block.replace('.block_sparse_moe', '.mlp')}.experts.{part}.weight"
        found[name] = torch.stack([parts[index] for index in sorted(parts)])
    return found
