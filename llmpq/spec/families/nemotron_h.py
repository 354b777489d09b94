"""Nemotron-H: each layer is Mamba 2, attention or a feed-forward alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from llmpq.spec.families import Family, LayerForm, ModelParts
from llmpq.spec.huggingface import mixers
from llmpq.spec.huggingface.attention import AttentionSizes, SelfAttention
from llmpq.spec.huggingface.config import (
    EXPERTS,
    EXPERTS_PER_TOKEN,
    HIDDEN,
    LAYER_KINDS,
    Config,
)
from llmpq.spec.huggingface.feed_forward import FeedForward, Plain, has_bias, linear
from llmpq.spec.huggingface.sizes import Sizes
from llmpq.spec.huggingface.windows import ATTENTION, FEED_FORWARD, LINEAR
from llmpq.spec.model_files.gguf_form import (
    MAMBA_NAMES,
    GgufForm,
    GgufMetadata,
    attention_layers,
    has_any,
    head_size,
    mamba_changes,
    routed_experts,
    state_space,
)

_PATTERN = {"M": LINEAR[0], "*": ATTENTION[0], "-": "mlp", "E": "moe"}
_ATTENTION = SelfAttention(prefix="mixer", bias=False)
_MAMBA = mixers.Mamba2(
    prefix="mixer",
    heads="mamba_num_heads",
    head_dim="mamba_head_dim",
    groups="n_groups",
    state_dim="ssm_state_size",
    kernel="conv_kernel",
    bias="use_bias",
    conv_bias="use_conv_bias",
)
_PLAIN = Plain(prefix="mixer", bias="mlp_bias")


def _kinds(fields: Config) -> Sequence[str]:
    name = "hybrid_override_pattern"
    if fields.has(name):
        pattern, count = fields.take(name), fields.layers()
        is_text = isinstance(pattern, str) and len(pattern) == count
        if not is_text or not all(one in _PATTERN for one in pattern):
            raise fields.error(name, pattern, f"{count} characters out of {' '.join(_PATTERN)}")
        return [_PATTERN[one] for one in pattern]
    names = (*ATTENTION, *LINEAR, *FEED_FORWARD)
    for field in (LAYER_KINDS, "layer_types"):
        found = fields.words(field, fields.layers(), names)
        if found is not None:
            return found
    raise fields.error(LAYER_KINDS, None, f"one of {', '.join(names)} for each layer")


def _mixers(fields: Config) -> Sequence[AttentionSizes]:
    kinds = _kinds(fields)
    attention, mamba = _ATTENTION.one(fields), _MAMBA(fields)
    return [
        attention if kind in ATTENTION else mamba if kind in LINEAR else mixers.NOTHING
        for kind in kinds
    ]


def _mixture(fields: Config) -> FeedForward:
    """Return experts without a gate, of a latent vector in larger models, and a shared one."""
    hidden, width = fields.size(*HIDDEN), fields.size("moe_intermediate_size")
    count, active = fields.size(*EXPERTS), fields.size(*EXPERTS_PER_TOKEN)
    if active > count:
        raise fields.error("num_experts_per_tok", active, f"at most {count} experts")
    latent = fields.optional_size("moe_latent_size")
    bias = has_bias(fields, "mlp_bias")
    around = () if latent is None else (
        linear("mixer.fc1_latent_proj", latent, hidden, bias),
        linear("mixer.fc2_latent_proj", hidden, latent, bias),
    )  # fmt: skip
    inner = hidden if latent is None else latent
    experts = (
        linear("mixer.experts.up_proj", width, inner),
        linear("mixer.experts.down_proj", inner, width),
    )
    shared = replace(_PLAIN, prefix="mixer.shared_experts")
    return FeedForward(
        linears=(
            replace(linear("mixer.gate", count, hidden), quantizable=False),
            *(replace(one, count=count, active=active) for one in experts),
            *shared.of_width(fields, fields.size("moe_shared_expert_intermediate_size")).linears,
            *around,
        )
    )


def _feed_forward(fields: Config) -> Sequence[FeedForward]:
    kinds = _kinds(fields)
    found = {"mlp": _PLAIN(fields)[0]}
    if "moe" in kinds:
        found["moe"] = _mixture(fields)
    return [found.get(kind, FeedForward(linears=())) for kind in kinds]


def _fields(metadata: GgufMetadata) -> dict[str, Any]:
    is_attention, kv_heads = attention_layers(metadata)
    has_experts = metadata.architecture.endswith("_moe")
    widths = metadata.each("feed_forward_length", len(is_attention))
    behind = "moe" if has_experts else "mlp"
    kinds = [
        ATTENTION[0] if attends else behind if width else LINEAR[0]
        for attends, width in zip(is_attention, widths, strict=True)
    ]
    sizes = ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel")
    metadata.whole("rope.dimension_count", 0)  # nothing is rotated
    epsilon = metadata.number("attention.layer_norm_epsilon")
    found = {
        "architectures": ["NemotronHForCausalLM"],
        **state_space(metadata, sizes),
        LAYER_KINDS: kinds,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size(metadata),
        "intermediate_size": max(widths),
        "rms_norm_eps": ...,
        "layer_norm_epsilon": metadata.number("attention.layer_norm_rms_epsilon", epsilon),
        "use_conv_bias": has_any(metadata, "ssm_conv1d.bias"),
        "use_bias": has_any(metadata, "ssm_in.bias"),
        "mlp_bias": has_any(metadata, "ffn_up.bias", "ffn_up_shexp.bias"),
    }
    if not has_experts:
        return found
    shared = metadata.whole("expert_shared_feed_forward_length")
    latent = metadata.whole("moe_latent_size", 0)
    return found | {
        **routed_experts(metadata, "n_routed_experts"),
        "n_shared_experts": metadata.whole("expert_shared_count", 1),
        "moe_shared_expert_intermediate_size": shared,
        "moe_latent_size": latent or None,
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "norm_topk_prob": metadata.flag("expert_weights_norm", default=False),
        "n_group": metadata.whole("expert_group_count", 1),
        "topk_group": metadata.whole("expert_group_used_count", 1),
    }


_SHARED = "mixer.shared_experts"
FAMILY = Family(
    name="nemotron_h",
    parts=ModelParts(embedding="embeddings", final_norm="norm_f"),
    form=LayerForm(norms=("norm", None, None, None), rotation=None),
    sizes=Sizes(attention=_mixers, feed_forward=_feed_forward, norms=1),
    gguf=GgufForm(
        architecture="nemotron_h",
        other_architectures=("nemotron_h_moe",),
        fields=_fields,
        names=(
            *((stored, f"mixer.{name}") for stored, name in MAMBA_NAMES),
            ("attn_norm.weight", "norm.weight"),
            *((f"attn_{one}.weight", f"mixer.{one}_proj.weight") for one in "qkv"),
            ("attn_output.weight", "mixer.o_proj.weight"),
            *(
                (f"ffn_{one}{stored}.{kind}", f"{module}.{one}_proj.{kind}")
                for stored, module in (("", "mixer"), ("_shexp", _SHARED))
                for one in ("up", "down")
                for kind in ("weight", "bias")
            ),
            ("ffn_gate_inp.weight", "mixer.gate.weight"),
            ("exp_probs_b.bias", "mixer.gate.e_score_correction_bias"),
            ("ffn_latent_down.weight", "mixer.fc1_latent_proj.weight"),
            ("ffn_latent_up.weight", "mixer.fc2_latent_proj.weight"),
        ),
        other_names=(
            ("token_embd.weight", "model.embeddings.weight"),
            ("output_norm.weight", "model.norm_f.weight"),
        ),
        experts="mixer.experts",
        changes=(
            ("mixer.q_proj.weight", ("interleaved_queries",)),
            ("mixer.k_proj.weight", ("interleaved_keys",)),
            *mamba_changes("mixer"),
        ),
    ),
)
