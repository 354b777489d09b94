"""Llama 4: chunks that attend to themselves, experts in some layers, complex rotations."""

from __future__ import annotations

from typing import Any

from llmpq.spec.families import Family
from llmpq.spec.huggingface import windows
from llmpq.spec.huggingface.feed_forward import Experts, Gated, RouterKind, by_list
from llmpq.spec.huggingface.sizes import Sizes
from llmpq.spec.model_files.gguf_form import (
    SIGMOID,
    GgufForm,
    GgufMetadata,
    TextSplit,
    cased_words,
    layer_count,
)

_WITHOUT_ROTATION = 4  # every how many layers there is one; files do not say
_WITHOUT_NORMS = 128  # experts of the models that do not norm queries and keys
_CHUNK = 8192  # tokens that see each other in the other layers


def _fields(metadata: GgufMetadata) -> dict[str, Any]:
    rotates = [(i + 1) % _WITHOUT_ROTATION != 0 for i in range(layer_count(metadata))]
    experts = metadata.whole("expert_count")
    metadata.expect("expert_gating_func", SIGMOID)
    return {
        "architectures": ["Llama4ForCausalLM"],
        "intermediate_size": metadata.whole("expert_feed_forward_length"),
        "intermediate_size_mlp": metadata.whole("feed_forward_length"),
        "interleave_moe_layer_step": metadata.whole("interleave_moe_layer_step"),
        "num_local_experts": experts,
        "num_experts_per_tok": metadata.whole("expert_used_count"),
        "use_qk_norm": experts != _WITHOUT_NORMS,
        "no_rope_layers": list(map(int, rotates)),
        "layer_types": ["chunked_attention" if one else "full_attention" for one in rotates],
        "attention_chunk_size": _CHUNK,
        "attn_temperature_tuning": True,
        "floor_scale": _CHUNK,
        "attn_scale": 0.1,
        "attention_bias": False,
    }


FAMILY = Family(
    name="llama4_text",
    own_modules=(("self_attn", "complex_rotary"), ("feed_forward", "scaled_experts")),
    sizes=Sizes(
        feed_forward=Experts(
            prefix="feed_forward",
            router="router",
            kind=RouterKind(score="sigmoid", normalizes=False),
            widths=("intermediate_size",),
            shared="shared_expert",
            shared_width=lambda fields: fields.size("intermediate_size"),
            layers=by_list,
            dense=Gated(
                prefix="feed_forward", activation="activation_fn", widths=("intermediate_size_mlp",)
            ),
        ),
        windows=windows.chunks,
    ),
    gguf=GgufForm(
        architecture="llama4",
        fields=_fields,
        experts="feed_forward.experts",
        names=(
            ("ffn_gate.weight", "feed_forward.gate_proj.weight"),
            ("ffn_up.weight", "feed_forward.up_proj.weight"),
            ("ffn_down.weight", "feed_forward.down_proj.weight"),
            ("ffn_gate_inp.weight", "feed_forward.router.weight"),
            ("ffn_gate_shexp.weight", "feed_forward.shared_expert.gate_proj.weight"),
            ("ffn_up_shexp.weight", "feed_forward.shared_expert.up_proj.weight"),
            ("ffn_down_shexp.weight", "feed_forward.shared_expert.down_proj.weight"),
        ),
        splits=(TextSplit(names=("llama4",), patterns=(cased_words(3, endings=True),)),),
    ),
)
