"""Gemma 4: the operators, windows and embeddings of its layers, and what Gemma 3n shares with it.

Heads differ by kind of layer, the last layers may read keys and values of earlier ones, and a
layer may have experts beside its feed-forward and embeddings of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from llmpq.errors import SpecError
from llmpq.spec.families import Family, ModelParts, gemma2
from llmpq.spec.huggingface.attention import AttentionSizes
from llmpq.spec.huggingface.config import HEADS, HIDDEN, Config
from llmpq.spec.huggingface.feed_forward import FeedForward, Gated, has_bias, linear
from llmpq.spec.huggingface.sizes import Sizes
from llmpq.spec.huggingface.windows import FULL, SLIDING
from llmpq.spec.model_files.gguf_form import (
    FOUR_NORMS,
    GELU,
    GgufForm,
    GgufMetadata,
    has_experts,
    layer_count,
    rotation,
    window_kinds,
)

OWN_EMBEDDINGS = (
    "embed_tokens_per_layer",
    "per_layer_model_projection",
    "per_layer_projection_norm",
)
_PERIOD = 6
_GLOBAL_HEAD_DIM = 512
"""Default size of a head in layers of full attention."""


def _attention(fields: Config) -> Sequence[AttentionSizes]:
    """Return the attention of every layer."""
    kinds = _kinds(fields)
    return [
        _attention_of(fields, index, is_full=kind == FULL, source=source)
        for index, (kind, source) in enumerate(zip(kinds, kv_sources(fields, kinds), strict=True))
    ]


def _windows(fields: Config) -> Sequence[int | None]:
    """Return the window of every layer."""
    window = fields.size("sliding_window")
    return [window if kind == SLIDING else None for kind in _kinds(fields)]


def kv_sources(fields: Config, kinds: Sequence[str]) -> list[int | None]:
    """Return for every layer the earlier layer whose keys and values it reads.

    The last ``num_kv_shared_layers`` layers read those of the last layer of their kind before them;
    other layers read their own: ``None``.
    """
    shared = _shared_layers(fields)
    first = fields.layers() - shared
    last_of_kind = {kind: index for index, kind in enumerate(kinds[:first])}
    missing = next((kind for kind in kinds if kind not in last_of_kind), None)
    if missing is not None:
        raise fields.error("num_kv_shared_layers", shared, f"a layer of {missing} before them")
    return [None if index < first else last_of_kind[kind] for index, kind in enumerate(kinds)]


def _sent_features(fields: Config) -> int | None:
    """Return the numbers that a stage sends for each token; ``None`` for the hidden states alone.

    Embeddings of single layers, and keys and values that later layers read, travel with them.
    """
    return sent_beside(fields, _attention(fields), fields.size(*HIDDEN))


def sent_beside(fields: Config, layers: Sequence[AttentionSizes], hidden: int) -> int | None:
    """Return the numbers that a stage sends for each token, ``hidden`` of them hidden states."""
    sources = {layer.kv_source for layer in layers if layer.kv_source is not None}
    read = sum(2 * layers[source].num_kv_heads * layers[source].head_dim for source in sources)
    total = hidden + fields.layers() * _own_size(fields) + read
    return None if total == fields.size(*HIDDEN) else total


def _feed_forward(fields: Config) -> Sequence[FeedForward]:
    """Return the feed-forward of every layer, with what the layer has beside it."""
    count, width = fields.layers(), fields.size("intermediate_size")
    is_wide = fields.flag_or("use_double_wide_mlp", default=False)
    first_wide = count - _shared_layers(fields) if is_wide else count
    beside = [_experts(fields), own_embedding(fields)]
    found = []
    for index in range(count):
        dense = Gated().of_width(fields, 2 * width if index >= first_wide else width)
        parts = [dense, *beside]
        found.append(
            FeedForward(
                linears=tuple(op for part in parts for op in part.linears),
                others=sum(part.others for part in parts),
            )
        )
    return found


def embedding_parameters(fields: Config) -> int:
    """Return the parameters that make the embeddings of single layers; 0 without."""
    size, hidden = _own_size(fields), fields.size(*HIDDEN)
    if not size:
        return 0
    rows = fields.size("vocab_size_per_layer_input") + hidden  # the table and a projection
    return rows * fields.layers() * size + size


def _attention_of(
    fields: Config, index: int, *, is_full: bool, source: int | None
) -> AttentionSizes:
    hidden, heads, bias = (
        fields.size(*HIDDEN),
        fields.size(*HEADS),
        has_bias(fields, "attention_bias"),
    )
    head_dim, kv_heads = _heads(fields, index, is_full=is_full)
    joins = is_full and fields.flag_or("attention_k_eq_v", default=False)
    names = () if source is not None else ("k_proj",) if joins else ("k_proj", "v_proj")
    return AttentionSizes(
        linears=(
            linear("self_attn.q_proj", heads * head_dim, hidden, bias),
            *(linear(f"self_attn.{name}", kv_heads * head_dim, hidden, bias) for name in names),
            linear("self_attn.o_proj", hidden, heads * head_dim, bias),
        ),
        others=2 * head_dim if source is None else head_dim,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        kv_source=source,
    )


def _heads(fields: Config, index: int, *, is_full: bool) -> tuple[int, int]:
    """Return the size of a head and the number of key-value heads of a layer."""
    head_dim, kv_heads = fields.size("head_dim"), fields.size("num_key_value_heads")
    if fields.has("per_layer_config"):
        layers = fields.inner("per_layer_config")
        names = {int(name): name for name in layers.names() if name.isdigit()}
        own = layers.inner(names[index]) if index in names else None
        if own is not None:
            head_dim = own.size("head_dim", default=head_dim)
            kv_heads = own.size("num_key_value_heads", default=kv_heads)
    elif is_full:
        head_dim = fields.size("global_head_dim", default=_GLOBAL_HEAD_DIM)
        if fields.flag_or("attention_k_eq_v", default=False):
            kv_heads = fields.size("num_global_key_value_heads", default=kv_heads)
    heads = fields.size(*HEADS)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", kv_heads, f"a divisor of {heads} query heads")
    return head_dim, kv_heads


def _kinds(fields: Config) -> list[str]:
    """Return the kind of every layer; the last has full attention whatever the file says."""
    count = fields.layers()
    stated = fields.words("layer_types", count, (FULL, SLIDING))
    if stated is None:
        stated = tuple(SLIDING if (i + 1) % _PERIOD else FULL for i in range(count))
    return [*stated[:-1], FULL]


def _shared_layers(fields: Config) -> int:
    shared = fields.size("num_kv_shared_layers", default=0, minimum=0)
    if shared and shared >= fields.layers():
        raise fields.error("num_kv_shared_layers", shared, f"fewer than {fields.layers()} layers")
    return shared


def _experts(fields: Config) -> FeedForward:
    """Return the experts beside the feed-forward, with their router and norms."""
    if not fields.flag_or("enable_moe_block", default=False):
        return FeedForward(linears=())
    hidden, width = fields.size(*HIDDEN), fields.size("moe_intermediate_size")
    count, active = fields.size("num_experts"), fields.size("top_k_experts")
    if active > count:
        raise fields.error("top_k_experts", active, f"at most {count} experts")
    stacks = (
        linear("experts.gate_up_proj", 2 * width, hidden),
        linear("experts.down_proj", hidden, width),
    )
    return FeedForward(
        linears=(
            replace(linear("router.proj", count, hidden), quantizable=False),
            *(replace(op, count=count, active=active) for op in stacks),
        ),
        others=4 * hidden + count,  # three norms, the router's scale and one of each expert
    )


def own_embedding(fields: Config) -> FeedForward:
    """Return what adds a layer's own embedding of the token to its output."""
    size, hidden = _own_size(fields), fields.size(*HIDDEN)
    if not size:
        return FeedForward(linears=())
    return FeedForward(
        linears=(
            linear("per_layer_input_gate", size, hidden),
            linear("per_layer_projection", hidden, size),
        ),
        others=hidden,
    )


def _own_size(fields: Config) -> int:
    return fields.size("hidden_size_per_layer_input", default=0, minimum=0)


_UNROTATED = 1e29
"""Factors of frequencies above this leave features as they are."""


def _gguf_fields(metadata: GgufMetadata) -> dict[str, Any]:
    count, kinds = layer_count(metadata), window_kinds(metadata, _PERIOD)
    width = min(metadata.each("feed_forward_length", count))
    table = metadata.header.tensors.get("per_layer_token_embd.weight")
    own = metadata.whole("embedding_length_per_layer_input", 0)
    softcap = metadata.number("final_logit_softcapping", 0.0) or None
    return {
        "architectures": ["Gemma4ForCausalLM"],
        **_gguf_heads(metadata, kinds),
        "intermediate_size": width,
        "use_double_wide_mlp": max(metadata.each("feed_forward_length", count)) > width,
        "sliding_window": metadata.whole("attention.sliding_window"),
        "layer_types": kinds,
        "num_kv_shared_layers": metadata.whole("attention.shared_kv_layers", 0),
        "final_logit_softcapping": softcap,
        "hidden_size_per_layer_input": own,
        **({} if table is None else {"vocab_size_per_layer_input": table.shape[0]}),
        **_gguf_experts(metadata),
    } | GELU


def _gguf_heads(metadata: GgufMetadata, kinds: Sequence[str]) -> dict[str, Any]:
    """Return the fields of attention, with and without windows."""
    key = "attention.head_count_kv"
    heads = metadata.each(key, len(kinds))
    by_kind = {
        kind: {one for one, own in zip(heads, kinds, strict=True) if own == kind}
        for kind in (SLIDING, FULL)
    }
    if any(len(counts) > 1 for counts in by_kind.values()):
        raise metadata.error(key, tuple(heads), "one number for all layers of a kind")
    full, local = (min(by_kind[kind] or set(heads)) for kind in (FULL, SLIDING))
    size, local_size = (metadata.whole(f"attention.key_length{end}") for end in ("", "_swa"))
    for ending, expected in (("", size), ("_swa", local_size)):
        metadata.expect(f"attention.value_length{ending}", expected)
        metadata.expect(f"rope.dimension_count{ending}", expected)
    # Values that are not stored are the keys.
    index = kinds.index(FULL) if FULL in kinds else 0
    joins = not metadata.has_tensor(f"blk.{index}.attn_v.weight")
    if not joins and full != local:
        raise metadata.error(key, tuple(heads), "one number, as all layers have values")
    return {
        "head_dim": local_size,
        "global_head_dim": size,
        "num_key_value_heads": local,
        "num_global_key_value_heads": full,
        "attention_k_eq_v": joins,
        "rope_parameters": {
            FULL: _gguf_rotation(metadata),
            SLIDING: {
                "rope_type": "default",
                "rope_theta": metadata.number("rope.freq_base_swa"),
            },
        },
    }


def _gguf_rotation(metadata: GgufMetadata) -> dict[str, Any]:
    """Return the rotation of layers without a window: factors say which features rotate."""
    rope, name = rotation(metadata), "rope_freqs.weight"
    if not metadata.has_tensor(name):
        return rope
    factors = metadata.floats(name)
    rotated = sum(one < _UNROTATED for one in factors)
    if any(one != 1.0 for one in factors[:rotated]):
        raise SpecError(
            f"{metadata.header.path}: tensor '{name}': expected ones, then {_UNROTATED}"
        )
    return {
        "rope_type": "proportional",
        "rope_theta": rope["rope_theta"],
        "partial_rotary_factor": rotated / len(factors),
    }


def _gguf_experts(metadata: GgufMetadata) -> dict[str, Any]:
    if not has_experts(metadata):
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": metadata.whole("expert_count"),
        "top_k_experts": metadata.whole("expert_used_count"),
        "moe_intermediate_size": metadata.whole("expert_feed_forward_length"),
    }


_NAMES = (
    *FOUR_NORMS,
    ("layer_output_scale.weight", "layer_scalar"),
    ("inp_gate.weight", "per_layer_input_gate.weight"),
    ("proj.weight", "per_layer_projection.weight"),
    ("post_norm.weight", "post_per_layer_input_norm.weight"),
    ("ffn_gate_inp.weight", "router.proj.weight"),
    ("ffn_gate_inp.scale", "router.scale"),
    ("ffn_gate_up_exps.weight", "experts.gate_up_proj"),
    ("ffn_down_exps.weight", "experts.down_proj"),
    ("ffn_down_exps.scale", "router.per_expert_scale"),
    ("pre_ffw_norm_2.weight", "pre_feedforward_layernorm_2.weight"),
    ("post_ffw_norm_1.weight", "post_feedforward_layernorm_1.weight"),
    ("post_ffw_norm_2.weight", "post_feedforward_layernorm_2.weight"),
)


FAMILY = Family(
    name="gemma4_text",
    sizes=Sizes(
        attention=_attention,
        feed_forward=_feed_forward,
        windows=_windows,
        norms=4,
        other_embeddings=embedding_parameters,
        sent_features=_sent_features,
    ),
    parts=ModelParts(own_embeddings=OWN_EMBEDDINGS),
    form=gemma2.FORM,
    sends_more=True,
    gguf=GgufForm(
        architecture="gemma4",
        fields=_gguf_fields,
        names=_NAMES,
        experts="experts",
        other_names=(
            ("per_layer_token_embd.weight", "model.embed_tokens_per_layer.weight"),
            ("per_layer_model_proj.weight", "model.per_layer_model_projection.weight"),
            ("per_layer_proj_norm.weight", "model.per_layer_projection_norm.weight"),
        ),
    ),
)
