"""What llama.cpp's converter does for single families: keys of their own, and changed tensors.

Written from the converter's behaviour (``conversion/*.py`` of llama.cpp), not from our reader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import gguf
import torch
from torch import Tensor

Named = Iterator[tuple[str, Tensor]]


def as_it_is(name: str, tensor: Tensor, config: dict[str, Any]) -> Named:
    del config
    yield name, tensor


def no_keys(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    del writer, config


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """How the models of a family are written.

    Attributes:
        architecture: its name.
        keys: adds the keys that not all families have.
        tensors: yields what a tensor of transformers becomes, under names that the table of the
            gguf package has.
        config: fields of the tiny model that is written.
    """

    architecture: str
    keys: Callable[[gguf.GGUFWriter, dict[str, Any]], None] = no_keys
    tensors: Callable[[str, Tensor, dict[str, Any]], Named] = as_it_is
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def changes_rows(self) -> bool:
        """Whether some tensors are not stored as they are."""
        return self.tensors is not as_it_is


def interleaved(name: str, tensor: Tensor, config: dict[str, Any]) -> Named:
    # LlamaModel.permute
    for ending, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if name.endswith((f"{ending}.weight", f"{ending}.bias")):
            shape = (config[heads], 2, tensor.shape[0] // config[heads] // 2, *tensor.shape[1:])
            tensor = tensor.reshape(shape).swapaxes(1, 2).reshape(tensor.shape)
    yield name, tensor


def shifted(name: str, tensor: Tensor, config: dict[str, Any]) -> Named:
    del config
    yield name, tensor + 1 if name.endswith("norm.weight") else tensor


def _gpt_oss(name: str, tensor: Tensor, config: dict[str, Any]) -> Named:
    del config
    if name.endswith("sinks"):
        yield f"{name}.weight", tensor
    elif "gate_up_proj" in name:
        kind = "bias" if name.endswith("_bias") else "weight"
        rows = tensor if kind == "bias" else tensor.transpose(-1, -2)
        base = name.partition("gate_up_proj")[0]
        yield f"{base}gate_proj.{kind}", rows[:, ::2]
        yield f"{base}up_proj.{kind}", rows[:, 1::2]
    elif name.endswith("down_proj_bias"):
        yield name.replace("_bias", ".bias"), tensor
    elif name.endswith("down_proj"):
        yield f"{name}.weight", tensor.transpose(-1, -2)
    else:
        yield name, tensor


def _gpt_oss_keys(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_sliding_window(config["sliding_window"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])


def _shared_expert_keys(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def _state_keys(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    if "moe_intermediate_size" in config:
        _shared_expert_keys(writer, config)
    values = config["linear_num_value_heads"]
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(values)
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * values)
    writer.add_full_attention_interval(2)
    share = config["rope_parameters"]["partial_rotary_factor"]
    writer.add_rope_dimension_count(int(config["head_dim"] * share))
    writer.add_rope_dimension_sections([11, 11, 10, 0])


def _state(name: str, tensor: Tensor, config: dict[str, Any]) -> Named:
    if name.endswith("A_log"):
        tensor = -torch.exp(tensor)
    elif name.endswith("dt_bias"):
        name = name.replace("dt_bias", "dt_proj.bias")
    elif "conv1d" in name:
        tensor = tensor.squeeze()
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        tensor = tensor + 1
    if "in_proj_qkvz" not in name:
        yield name, tensor
        return
    keys, key = config["linear_num_key_heads"], config["linear_key_head_dim"]
    value = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
    q, k, v, z = tensor.view(keys, -1, tensor.shape[1]).split([key, key, value, value], dim=1)
    layer = name.split(".")[2]
    yield f"blk.{layer}.attn_qkv.weight", torch.cat([p.flatten(0, 1) for p in (q, k, v)])
    yield f"blk.{layer}.attn_gate.weight", z.flatten(0, 1)


def _tiled_state(name: str, tensor: Tensor, config: dict[str, Any]) -> Named:
    if "linear_attn." in name and not name.endswith("linear_attn.norm.weight"):
        keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
        first = 2 * keys * config["linear_key_head_dim"]
        if "out_proj" in name:
            tensor = _tiled(tensor.T, keys, values).T
        elif "in_proj_qkv" in name or "conv1d" in name:
            tensor = torch.cat((tensor[:first], _tiled(tensor[first:], keys, values)))
        else:
            tensor = _tiled(tensor, keys, values)
    yield from _state(name, tensor, config)


def _tiled(rows: Tensor, keys: int, values: int) -> Tensor:
    return (
        rows.reshape(keys, values // keys, -1, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)
    )


_LINEAR = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "num_hidden_layers": 4,
    "linear_num_value_heads": 6,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
    },
}  # fmt: skip

CONVERSIONS: dict[str, Conversion] = {
    "gpt_oss": Conversion(
        architecture="gpt-oss",
        keys=_gpt_oss_keys,
        tensors=_gpt_oss,
        config={
            "max_position_embeddings": 128,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 32,
                "rope_theta": 150000.0,
            },
        },
    ),
    "qwen2_moe": Conversion(
        architecture="qwen2moe",
        keys=_shared_expert_keys,
    ),
    "qwen3_next": Conversion(
        architecture="qwen3next", keys=_state_keys, tensors=_state, config=_LINEAR
    ),
    "qwen3_5_text": Conversion(
        architecture="qwen35", keys=_state_keys, tensors=_tiled_state, config=_LINEAR
    ),
    "qwen3_5_moe_text": Conversion(
        architecture="qwen35moe", keys=_state_keys, tensors=_tiled_state, config=_LINEAR
    ),
    "llama": Conversion(architecture="llama", tensors=interleaved),
    "mixtral": Conversion(architecture="llama", tensors=interleaved),
    "qwen2": Conversion(architecture="qwen2"),
    "qwen3": Conversion(architecture="qwen3"),
    "qwen3_moe": Conversion(
        architecture="qwen3moe",
        keys=lambda writer, config: writer.add_expert_feed_forward_length(
            config["moe_intermediate_size"]
        ),
        config={"norm_topk_prob": True},
    ),
    "gemma": Conversion(architecture="gemma", tensors=shifted),
    "gemma2": Conversion(architecture="gemma2", tensors=shifted),
    "gemma3_text": Conversion(architecture="gemma3", tensors=shifted),
    "phi3": Conversion(architecture="phi3"),
}
