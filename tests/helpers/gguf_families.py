"""What llama.cpp's converter does for single families: keys of their own, and changed tensors.

Written from the converter's behaviour (``conversion/*.py`` of llama.cpp), not from our reader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import gguf
import numpy as np
import torch
from helpers.tiny_configs import GEMMA4_EXPERTS, GEMMA4_SHARED
from torch import Tensor

Named = Iterator[tuple[str, Tensor]]


def as_it_is(name: str, tensor: Tensor, config: dict[str, Any]) -> Named:
    del config
    yield name, tensor


def unchanged(name: str, tensor: Tensor, config: dict[str, Any]) -> Tensor:
    del name, config
    return tensor


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
        renamed: returns fields that the converter replaces before it writes those of every family.
        with_experts: name of the architecture where layers are experts alone, if it differs.
        folded: returns a tensor with the factors that the file has in it, not beside it.
    """

    architecture: str
    keys: Callable[[gguf.GGUFWriter, dict[str, Any]], None] = no_keys
    tensors: Callable[[str, Tensor, dict[str, Any]], Named] = as_it_is
    config: dict[str, Any] = field(default_factory=dict)
    renamed: Callable[[dict[str, Any]], dict[str, Any]] = lambda _: {}
    with_experts: str | None = None
    folded: Callable[[str, Tensor, dict[str, Any]], Tensor] = unchanged

    def name_for(self, config: dict[str, Any]) -> str:
        """Return the name of the architecture for a model."""
        has_experts = "moe" in config.get("layers_block_type", ())
        return self.with_experts if has_experts and self.with_experts else self.architecture

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
    if config["model_type"] == "qwen3_next":  # as older converters
        writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)
    else:
        is_linear = [kind == "linear_attention" for kind in config["layer_types"]]
        writer.add_array(f"{writer.arch}.attention.recurrent_layers", is_linear)
        writer.add_full_attention_interval(4)
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


def _rotated(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    share = config["rope_parameters"].get("partial_rotary_factor", 1.0)
    writer.add_rope_dimension_count(int(size * share))


def _deepseek_experts(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config["norm_topk_prob"]:
        writer.add_expert_weights_norm(True)


def _glm4_moe_keys(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    _rotated(writer, config)
    _deepseek_experts(writer, config)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _corrected(name: str, tensor: Tensor, config: dict[str, Any]) -> Named:
    del config
    yield name.replace("e_score_correction_bias", "e_score_correction.bias"), tensor


def _deepseek_keys(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    _deepseek_experts(writer, config)
    rotated, rank = config["qk_rope_head_dim"], config["kv_lora_rank"]
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + rotated)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotated)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(rotated)
    if "mscale_all_dim" in config["rope_parameters"]:
        share = config["rope_parameters"]["mscale_all_dim"]
        writer.add_rope_scaling_yarn_log_mul(0.1 * share)
    is_third = config["model_type"] == "deepseek_v3"
    kinds = gguf.ExpertGatingFuncType
    writer.add_expert_gating_func(kinds.SIGMOID if is_third else kinds.SOFTMAX)


def _deepseek(name: str, tensor: Tensor, config: dict[str, Any]) -> Named:
    if not name.endswith("kv_b_proj.weight"):
        yield from _corrected(name, tensor, config)
        return
    keys, values = config["qk_nope_head_dim"], config["v_head_dim"]
    heads = tensor.view(config["num_attention_heads"], keys + values, -1)
    key, value = heads.split([keys, values], dim=1)
    yield name.replace("kv_b_proj", "k_b_proj"), key.transpose(1, 2)
    yield name.replace("kv_b_proj", "v_b_proj"), value


def _kimi_keys(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rotated, rank = config["qk_rope_head_dim"], config["kv_lora_rank"]
    heads = [int(kind == "full_attention") for kind in config["layer_types"]]
    writer.add_head_count_kv(heads)
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_kda_head_dim(config["linear_head_dim"])
    writer.add_kv_lora_rank(rank)
    writer.add_rope_dimension_count(rotated)
    writer.add_key_length(rank + rotated)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotated)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_expert_used_count(config["num_experts_per_token"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["num_shared_experts"])
    writer.add_leading_dense_block_count(config["mlp_layer_types"].count("dense"))
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_context_length(config["model_max_length"])


def _kimi(name: str, tensor: Tensor, config: dict[str, Any]) -> Named:
    if "conv1d" in name:
        yield name, tensor.reshape(1, tensor.shape[0], 1, -1)
    elif name.endswith("A_log"):
        yield name, -torch.exp(tensor)
    elif name.endswith("dt_bias"):
        yield name.replace("dt_bias", "dt_proj.bias"), tensor
    else:
        yield from _deepseek(name, tensor, config)


def _granite_keys(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    _rotated(writer, config)
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])


def _granitemoe(name: str, tensor: Tensor, config: dict[str, Any]) -> Named:
    layer = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
    if name.endswith("input_linear.weight"):
        gate, up = tensor.chunk(2, dim=-2)
        yield f"{layer}.ffn_gate_exps.weight", gate
        yield f"{layer}.ffn_up_exps.weight", up
    elif name.endswith("output_linear.weight"):
        yield f"{layer}.ffn_down_exps.weight", tensor
    elif name.endswith("router.layer.weight"):
        yield f"{layer}.ffn_gate_inp.weight", tensor
    else:
        yield from interleaved(name, tensor, config)


def _windows(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([k == "sliding_attention" for k in config["layer_types"]])


def _cohere_keys(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_logit_scale(config["logit_scale"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if config["model_type"] == "cohere2":
        writer.add_sliding_window(config["sliding_window"])
        _rotated(writer, config)


def _ministral3_keys(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    _rotated(writer, config)
    writer.add_rope_scaling_yarn_log_mul(config["rope_parameters"]["mscale_all_dim"])
    writer.add_attn_temperature_scale(config["rope_parameters"]["llama_4_scaling_beta"])


def _minimax_keys(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    _rotated(writer, config)
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _minimax(name: str, tensor: Tensor, config: dict[str, Any]) -> Named:
    del config
    if name.endswith("e_score_correction_bias"):
        name = f"blk.{name.split('.')[2]}.exp_probs_b.bias"
    yield name, tensor


def _llama4_keys(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    _rotated(writer, config)
    writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])


def _llama4(name: str, tensor: Tensor, config: dict[str, Any]) -> Named:
    del config
    if name.endswith("experts.down_proj"):
        yield f"{name}.weight", tensor.transpose(-1, -2)
    elif name.endswith("experts.gate_up_proj"):
        gate, up = tensor.transpose(-1, -2).chunk(2, dim=-2)
        yield name.replace("gate_up_proj", "gate_proj.weight"), gate
        yield name.replace("gate_up_proj", "up_proj.weight"), up
    else:
        yield name, tensor


def _lfm2_fields(config: dict[str, Any]) -> dict[str, Any]:
    width, multiple = int(2 * config["intermediate_size"] / 3), config["block_multiple_of"]
    heads = config["num_key_value_heads"]
    kinds = config["layer_types"]
    return {
        "num_key_value_heads": [heads if kind == "full_attention" else 0 for kind in kinds],
        "rms_norm_eps": config["norm_eps"],
        "intermediate_size": -(-width // multiple) * multiple,
    }


def _lfm2(name: str, tensor: Tensor, config: dict[str, Any]) -> Named:
    del config
    yield name, tensor.squeeze(1) if "conv.conv" in name else tensor


def _lfm2_moe_keys(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_leading_dense_block_count(config["num_dense_layers"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _lfm2_moe(name: str, tensor: Tensor, config: dict[str, Any]) -> Named:
    if name.endswith("expert_bias"):
        yield f"{name}.bias", tensor
    else:
        yield from _lfm2(name, tensor, config)


def _mamba2(name: str, tensor: Tensor, groups: int) -> tuple[str, Tensor]:
    """As ``Mamba2Model.modify_tensors``."""
    if name.endswith("A_log"):
        tensor = -torch.exp(tensor)
    if name.endswith((".A_log", ".D")):
        tensor = tensor.reshape(-1, 1)
    elif name.endswith("conv1d.weight"):
        tensor = tensor.squeeze()
    elif name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        tensor = tensor.reshape(groups, -1)
    return name.replace("dt_bias", "dt_proj.bias"), tensor


def _falcon_h1_keys(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    names = ("mamba_d_conv", "mamba_d_state", "mamba_n_groups")
    _state_space_keys(writer, *(config[name] for name in names))
    writer.add_ssm_inner_size(config["mamba_d_ssm"])
    writer.add_ssm_time_step_rank(config["mamba_d_ssm"] // config["mamba_d_head"])


def _falcon_h1(name: str, tensor: Tensor, config: dict[str, Any]) -> Named:
    """As ``FalconH1Model.modify_tensors``."""
    yield _mamba2(name, _multiplied(name, tensor, config), config["mamba_n_groups"])


def _multiplied(name: str, tensor: Tensor, config: dict[str, Any]) -> Tensor:
    """Falcon-H1's factors in its weights: of the first part of the name that is found."""
    inside = config["attention_in_multiplier"]
    factors = {
        "down_proj": config["mlp_multipliers"][1],
        "gate_proj": config["mlp_multipliers"][0],
        "k_proj": config["key_multiplier"] * inside,
        "q_proj": inside,
        "v_proj": inside,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "in_proj": config["ssm_in_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    tensor = tensor * next((factors[part] for part in factors if part in name), 1)
    if "in_proj" in name:
        width, states = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        parts = tensor.split([width, width, states, states, config["mamba_n_heads"]])
        own = zip(parts, config["ssm_multipliers"], strict=True)
        tensor = torch.cat([part * factor for part, factor in own])
    return tensor


def _bamba_keys(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    names = ("mamba_d_conv", "mamba_d_state", "mamba_n_groups")
    _state_space_keys(writer, *(config[name] for name in names))
    writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])
    writer.add_rope_scaling_finetuned(True)
    _rotated(writer, config)


def _bamba(name: str, tensor: Tensor, config: dict[str, Any]) -> Named:
    if name.endswith("feed_forward.down_proj.weight"):  # as of later tables of the package
        yield f"blk.{name.split('.')[2]}.ffn_down.weight", tensor
    elif ".mamba." in name:
        yield _mamba2(name, tensor, config["mamba_n_groups"])
    else:
        yield from interleaved(name, tensor, config | {"num_key_value_heads": 2})


def _jamba_keys(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_time_step_rank(config["mamba_dt_rank"])


def _jamba_fields(config: dict[str, Any]) -> dict[str, Any]:
    every, first = config["attn_layer_period"], config["attn_layer_offset"]
    count, heads = config["num_hidden_layers"], config["num_key_value_heads"]
    return {
        "num_key_value_heads": [heads if i % every == first else 0 for i in range(count)],
        "head_dim": None,
        "rope_parameters": None,
    }


def _mamba1(name: str, tensor: Tensor, config: dict[str, Any]) -> Named:
    """As ``MambaModel.modify_tensors`` and ``JambaModel.modify_tensors``."""
    del config
    if name.endswith("A_log"):
        tensor = -torch.exp(tensor)
    elif name.endswith("conv1d.weight"):
        tensor = tensor.squeeze()
    yield name.replace(".feed_forward.experts.", ".mlp.experts."), tensor


def _mamba_keys(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    _anonymous_keys(writer, config)
    writer.add_ssm_inner_size(config["intermediate_size"])
    writer.add_ssm_time_step_rank(config["time_step_rank"])
    writer.add_ssm_dt_b_c_rms(config["model_type"] == "falcon_mamba")


def _mamba2_keys(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    _anonymous_keys(writer, config)
    width = config["expand"] * config["hidden_size"]
    writer.add_ssm_inner_size(width)
    writer.add_ssm_time_step_rank(width // config["head_dim"])
    writer.add_ssm_group_count(config["n_groups"])


def _anonymous_keys(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Add keys of Mamba 1 and 2, some of which have no meaning."""
    writer.add_context_length(2**20)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_state_size(config["state_size"])
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])


def _mamba_fields(config: dict[str, Any]) -> dict[str, Any]:
    del config
    return dict.fromkeys(("intermediate_size", "head_dim", "rope_parameters", "vocab_size"))


def _state_space_keys(writer: gguf.GGUFWriter, kernel: int, state: int, groups: int) -> None:
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_state_size(state)
    writer.add_ssm_group_count(groups)


def _granite_hybrid_keys(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    names = ("mamba_d_conv", "mamba_d_state", "mamba_n_groups")
    _state_space_keys(writer, *(config[name] for name in names))
    writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])
    writer.add_rope_scaling_finetuned(False)
    _granite_keys(writer, config)
    writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])


def _granite_hybrid(name: str, tensor: Tensor, config: dict[str, Any]) -> Named:
    layer = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
    kind = "_shexp" if config["num_local_experts"] else ""
    if name.endswith("shared_mlp.input_linear.weight"):
        gate, up = tensor.chunk(2, dim=-2)
        yield f"{layer}.ffn_gate{kind}.weight", gate
        yield f"{layer}.ffn_up{kind}.weight", up
    elif name.endswith("shared_mlp.output_linear.weight"):
        yield f"{layer}.ffn_down{kind}.weight", tensor
    elif ".mamba." in name:
        yield _mamba2(name, tensor, config["mamba_n_groups"])
    else:
        yield from _granitemoe(name, tensor, config | {"num_key_value_heads": 2})


def _nemotron_h_keys(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    names = ("conv_kernel", "ssm_state_size", "n_groups")
    _state_space_keys(writer, *(config[name] for name in names))
    heads = config["mamba_num_heads"]
    # As LlamaModel does, from which the converter of Granite pops the size of a head.
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_ssm_inner_size(heads * config["mamba_head_dim"])
    writer.add_ssm_time_step_rank(heads)
    writer.add_rope_scaling_finetuned(False)
    if "moe" not in config["layers_block_type"]:
        return
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config["moe_latent_size"]:
        writer.add_moe_latent_size(config["moe_latent_size"])


def _nemotron_h_fields(config: dict[str, Any]) -> dict[str, Any]:
    kinds, has_experts = config["layers_block_type"], "moe" in config["layers_block_type"]
    width = config["moe_intermediate_size" if has_experts else "intermediate_size"]
    behind = ("mlp", "moe")
    return {
        "num_hidden_layers": len(kinds),
        "num_key_value_heads": [2 if kind == "full_attention" else 0 for kind in kinds],
        "intermediate_size": [width if kind in behind else 0 for kind in kinds],
        "layer_norm_eps": config["layer_norm_epsilon"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        **({} if has_experts else {"num_experts_per_tok": None, "n_group": None}),
        "topk_group": None,
        "n_routed_experts": None if has_experts else 0,
    }


def _nemotron_h(name: str, tensor: Tensor, config: dict[str, Any]) -> Named:
    name, tensor = _mamba2(name, tensor, config["n_groups"])
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    layer = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
    latent = {"fc1_latent_proj": "ffn_latent_down", "fc2_latent_proj": "ffn_latent_up"}
    for own, stored in latent.items():
        if own in name:
            name = f"{layer}.{stored}.weight"
    if ".mixer.experts." in name:
        name = name.replace("backbone.", "model.").replace(".mixer.", ".mlp.")
    yield from interleaved(name, tensor, config)


def _gemma4_keys(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    size, local = 24, config["head_dim"]
    kinds = config["layer_types"]
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"] or 0)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_key_length_swa(local)
    writer.add_value_length_swa(local)
    writer.add_rope_dimension_count(size)
    writer.add_rope_dimension_count_swa(local)
    if config["moe_intermediate_size"]:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_used_count(config["top_k_experts"])
    rotated = int(size * config["rope_parameters"]["full_attention"]["partial_rotary_factor"] / 2)
    factors = [1.0] * rotated + [1e30] * (size // 2 - rotated)
    writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))


def _gemma4_fields(config: dict[str, Any]) -> dict[str, Any]:
    kinds, width = config["layer_types"], config["intermediate_size"]
    heads = [2 if kind == "sliding_attention" else 1 for kind in kinds]
    wide = len(kinds) - config["num_kv_shared_layers"]
    found = {"head_dim": None, "num_key_value_heads": heads}
    if config["use_double_wide_mlp"]:
        found["intermediate_size"] = [width * (1 + (i >= wide)) for i in range(len(kinds))]
    return found


def _gemma4(name: str, tensor: Tensor, config: dict[str, Any]) -> Named:
    del config
    layer = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
    if name.endswith("router.scale"):
        yield f"{layer}.ffn_gate_inp.scale", tensor
    elif name.endswith("per_expert_scale"):
        yield f"{layer}.ffn_down_exps.scale", tensor
    elif name.endswith("layer_scalar") or ".experts." in name:
        yield f"{name}.weight", tensor
    else:
        yield name, tensor


_LINEAR = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "num_hidden_layers": 4,
    "linear_num_value_heads": 6,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
    },
}  # fmt: skip

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 24.0,
    "beta_slow": 2.0,
}
_HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_FOUR = {"num_hidden_layers": 4}

_GEMMA4 = Conversion(
    architecture="gemma4", keys=_gemma4_keys, tensors=_gemma4, renamed=_gemma4_fields
)

_NEMOTRON_H = Conversion(
    architecture="nemotron_h",
    with_experts="nemotron_h_moe",
    keys=_nemotron_h_keys,
    tensors=_nemotron_h,
    renamed=_nemotron_h_fields,
)

CONVERSIONS: dict[str, Conversion] = {
    "gemma4_text": _GEMMA4,
    "gemma4_text experts": replace(_GEMMA4, config=GEMMA4_EXPERTS),
    "gemma4_text shared": replace(_GEMMA4, config=GEMMA4_SHARED),
    "glm4_moe": Conversion(
        architecture="glm4moe",
        keys=_glm4_moe_keys,
        tensors=_corrected,
        config={
            "use_qk_norm": True,
            "attention_bias": True,
            "rope_parameters": _HALF,
            "routed_scaling_factor": 1.5,
        },
    ),
    "deepseek_v2": Conversion(
        architecture="deepseek2",
        keys=_deepseek_keys,
        tensors=_deepseek,
        config={"first_k_dense_replace": 1, "routed_scaling_factor": 1.5},
        renamed=lambda _: {"num_key_value_heads": 1, "head_dim": None},
    ),
    "deepseek_v3": Conversion(
        architecture="deepseek2",
        keys=_deepseek_keys,
        tensors=_deepseek,
        config={
            "n_group": 2,
            "routed_scaling_factor": 1.5,
            "rope_parameters": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
        renamed=lambda _: {"num_key_value_heads": 1, "head_dim": None},
    ),
    "kimi_linear": Conversion(
        architecture="kimi-linear",
        keys=_kimi_keys,
        tensors=_kimi,
        config={"linear_num_heads": 4, "q_lora_rank": None},
        renamed=lambda _: {
            "num_key_value_heads": None,
            "head_dim": None,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        },
    ),
    "bamba": Conversion(
        architecture="granitehybrid",
        keys=_bamba_keys,
        tensors=_bamba,
        config={"mamba_n_groups": 2, "attn_layer_indices": [1]},
        renamed=lambda _: {"head_dim": None, "num_key_value_heads": [0, 2, 0]},
    ),
    "granitemoehybrid": Conversion(
        architecture="granitehybrid",
        keys=_granite_hybrid_keys,
        tensors=_granite_hybrid,
        config={"attention_multiplier": 0.3},
        renamed=lambda _: {"head_dim": None, "num_key_value_heads": [0, 2, 0]},
    ),
    "granitemoehybrid dense": Conversion(
        architecture="granitehybrid",
        keys=_granite_hybrid_keys,
        tensors=_granite_hybrid,
        config={
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "mamba_n_groups": 2,
            "shared_intermediate_size": 64,
        },
        renamed=lambda _: {
            "head_dim": None,
            "num_key_value_heads": [0, 2, 0],
            "num_experts_per_tok": None,
        },
    ),
    "falcon_h1": Conversion(
        architecture="falcon-h1",
        keys=_falcon_h1_keys,
        tensors=_falcon_h1,
        config={"mamba_n_groups": 2, "embedding_multiplier": 1.3, "head_dim": 16},
        folded=_multiplied,
    ),
    "falcon_h1 normed": Conversion(
        architecture="falcon-h1",
        keys=_falcon_h1_keys,
        tensors=_falcon_h1,
        config={
            "mamba_n_groups": 2,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "tie_word_embeddings": False,
            "head_dim": 16,
        },
        folded=_multiplied,
    ),
    "jamba": Conversion(
        architecture="jamba", keys=_jamba_keys, tensors=_mamba1, renamed=_jamba_fields
    ),
    "jamba dense": Conversion(
        architecture="jamba",
        keys=_jamba_keys,
        tensors=_mamba1,
        config={"num_experts": 1, "num_experts_per_tok": 1, "num_hidden_layers": 5},
        renamed=_jamba_fields,
    ),
    "mamba": Conversion(
        architecture="mamba", keys=_mamba_keys, tensors=_mamba1, renamed=_mamba_fields
    ),
    "falcon_mamba": Conversion(
        architecture="mamba",
        keys=_mamba_keys,
        tensors=_mamba1,
        config={"tie_word_embeddings": False},
        renamed=_mamba_fields,
    ),
    "mamba2": Conversion(
        architecture="mamba2",
        keys=_mamba2_keys,
        tensors=lambda name, tensor, config: iter((_mamba2(name, tensor, config["n_groups"]),)),
        config={"n_groups": 2},
        renamed=_mamba_fields,
    ),
    "lfm2_moe": Conversion(
        architecture="lfm2moe",
        keys=_lfm2_moe_keys,
        tensors=_lfm2_moe,
        renamed=lambda config: {
            "num_key_value_heads": [
                2 if kind == "full_attention" else 0 for kind in config["layer_types"]
            ],
            "rms_norm_eps": config["norm_eps"],
        },
    ),
    "nemotron_h": replace(
        _NEMOTRON_H,
        config={
            "layers_block_type": ["linear_attention", "full_attention", "mlp"],
            "head_dim": 16,
        },
    ),
    "nemotron_h experts": replace(
        _NEMOTRON_H, config={"routed_scaling_factor": 1.5, "moe_latent_size": 16}
    ),
    "granite": Conversion(
        architecture="granite",
        keys=_granite_keys,
        tensors=interleaved,
        config={"attention_multiplier": 0.3, "attention_bias": True},
        renamed=lambda _: {"head_dim": None},
    ),
    "granitemoe": Conversion(
        architecture="granitemoe",
        keys=_granite_keys,
        tensors=_granitemoe,
        config={"attention_multiplier": 0.3},
        renamed=lambda _: {"head_dim": None},
    ),
    "olmo2": Conversion(architecture="olmo2"),
    "olmo3": Conversion(
        architecture="olmo2",
        keys=_windows,
        config={"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "smollm3": Conversion(
        architecture="smollm3",
        keys=_rotated,
        tensors=interleaved,
        config={**_FOUR, "no_rope_layers": [1, 1, 1, 0]},
    ),
    "lfm2": Conversion(
        architecture="lfm2",
        keys=lambda writer, config: writer.add_shortconv_l_cache(config["conv_L_cache"]),
        tensors=_lfm2,
        renamed=_lfm2_fields,
    ),
    "cohere": Conversion(architecture="command-r", keys=_cohere_keys, config={"use_qk_norm": True}),
    "cohere2": Conversion(architecture="cohere2", keys=_cohere_keys, config=_FOUR),
    "phi": Conversion(
        architecture="phi2",
        keys=_rotated,
        config={"num_key_value_heads": 4, "rope_parameters": _HALF},
    ),
    "exaone4": Conversion(
        architecture="exaone4",
        keys=_windows,
        config={"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "ernie4_5": Conversion(architecture="ernie4_5", config={"use_bias": True}),
    "seed_oss": Conversion(architecture="seed_oss"),
    "mistral": Conversion(
        architecture="mistral3",
        keys=_rotated,
        tensors=interleaved,
        config={"sliding_window": None, "rope_parameters": _YARN},
    ),
    "ministral3": Conversion(
        architecture="mistral3",
        keys=_ministral3_keys,
        tensors=interleaved,
        config={
            "rope_parameters": _YARN
            | {
                "original_max_position_embeddings": 8,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            }
        },
    ),
    "minimax_m2": Conversion(
        architecture="minimax-m2",
        keys=_minimax_keys,
        tensors=_minimax,
        config={"rope_parameters": _HALF},
    ),
    "llama4_text": Conversion(
        architecture="llama4",
        keys=_llama4_keys,
        tensors=_llama4,
        config={
            **_FOUR,
            "no_rope_layers": [1, 1, 1, 0],
            "attention_chunk_size": 8192,
            "floor_scale": 8192,
        },
        renamed=lambda config: {"intermediate_size": config["intermediate_size_mlp"]},
    ),
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
    "phi3": Conversion(
        architecture="phi3", keys=_rotated, config={"rope_parameters": _HALF, "pad_token_id": None}
    ),
}
