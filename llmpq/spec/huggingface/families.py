"""Model families: a ``ModelSpec`` from any supported ``config.json``, without torch.

Operators have their module path inside transformers' decoder layer as name. Sizes that define the
model must be in the file; fields that older files leave out (key-value heads, head size, biases,
ties, windows) have the defaults of transformers, which differ by family. Models that are not
decoder-only or of an unknown family are errors that name file and field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from llmpq.spec.fields import read_json
from llmpq.spec.huggingface.config import HEADS, HIDDEN, Config
from llmpq.spec.huggingface.gptq import stored_precisions
from llmpq.spec.model import LayerSpec, LinearSpec, ModelSpec


def load_model_dir(path: str | Path) -> ModelSpec:
    """Read ``config.json`` of a model directory; the model is named after the directory.

    Raises:
        SpecError: as ``model_from_config`` and ``stored_precisions``.
    """
    folder = Path(path)
    file = folder / "config.json"
    model = model_from_config(read_json(file), folder.resolve().name, str(file))
    return replace(model, stored=stored_precisions(folder, model.num_layers))


def model_from_config(config: Mapping[str, Any], name: str, where: str) -> ModelSpec:
    """Read the object of a ``config.json``; ``where`` is the file, for messages.

    Raises:
        SpecError: not a decoder-only model of a known family, or a field is missing or invalid.
    """
    fields = Config(config, where)
    family = config.get("model_type")
    if config.get("is_encoder_decoder"):
        raise fields.error("is_encoder_decoder", True, "a decoder-only model")
    if not isinstance(family, str) or family not in _FAMILIES:
        raise fields.error("model_type", family, f"one of {', '.join(sorted(_FAMILIES))}")
    parts = _FAMILIES[family](fields)
    kinds = tuple(dict.fromkeys(parts.layers))
    return ModelSpec(
        name=name,
        family=family,
        hidden_size=fields.size(*HIDDEN),
        vocab_size=fields.size("vocab_size"),
        head_in_features=parts.head_in_features,
        max_positions=parts.max_positions,
        layer_types=kinds,
        layer_kinds=tuple(kinds.index(layer) for layer in parts.layers),
        embedding_parameters=parts.embedding_parameters,
        final_parameters=parts.final_parameters,
        head_parameters=parts.head_parameters,
        dtype=fields.dtype(),
    )


Linears = tuple[LinearSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """Sizes that a family's reader finds."""

    layers: tuple[LayerSpec, ...]
    head_in_features: int
    max_positions: int | None
    embedding_parameters: int
    final_parameters: int
    head_parameters: int


def _linear(name: str, out_features: int, in_features: int, bias: bool = False) -> LinearSpec:
    return LinearSpec(name=name, out_features=out_features, in_features=in_features, bias=bias)


def _llama_like(variant: _Variant, fields: Config) -> _Parts:
    hidden = fields.size("hidden_size")
    layer = _attention_only(variant, fields)
    windows = variant.windows(fields)
    layers = [
        replace(layer, linears=layer.linears + feed_forward, sliding_window=window)
        for feed_forward, window in zip(
            variant.feed_forwards(variant, fields, len(windows)), windows, strict=True
        )
    ]
    return _parts(fields, layers, width=hidden, final=hidden, tied=variant.tied)


def _dense(variant: _Variant, fields: Config, num_layers: int) -> Sequence[Linears]:
    return [_gated(variant, fields, fields.size("intermediate_size"))] * num_layers


def _mixtral(variant: _Variant, fields: Config, num_layers: int) -> Sequence[Linears]:
    del variant
    experts = _experts(
        fields,
        fields.size("num_local_experts", "num_experts", default=8),
        fields.size("num_experts_per_tok", default=2),
        fields.size("intermediate_size"),
    )
    return [experts] * num_layers


def _qwen3_moe(variant: _Variant, fields: Config, num_layers: int) -> Sequence[Linears]:
    dense = _gated(variant, fields, fields.size("intermediate_size", default=6144))
    experts = _experts(
        fields,
        fields.size("num_experts", "num_local_experts", default=128),
        fields.size("num_experts_per_tok", default=8),
        fields.size("moe_intermediate_size", default=768),
    )
    step = fields.size("decoder_sparse_step", default=1)
    dense_layers = fields.indices("mlp_only_layers")
    return [
        experts if index not in dense_layers and (index + 1) % step == 0 else dense
        for index in range(num_layers)
    ]


def _parts(
    fields: Config, layers: Iterable[LayerSpec], *, width: int, final: int, tied: bool
) -> _Parts:
    """Return the parts of a model; ``width`` is of an embedding, ``final`` of the last norm."""
    matrix = fields.size("vocab_size") * width
    return _Parts(
        layers=tuple(layers),
        head_in_features=width,
        max_positions=fields.optional_size("max_position_embeddings"),
        embedding_parameters=matrix,
        final_parameters=final,
        head_parameters=0 if fields.flag_or("tie_word_embeddings", tied) else matrix,
    )


def _attention_only(variant: _Variant, fields: Config) -> LayerSpec:
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    kv_heads = fields.kv_heads(variant.kv_heads)
    head_dim = fields.head_dim(variant.head_dim)
    stated = fields.flag_or("attention_bias", default=False)
    qkv_bias = stated if variant.qkv_bias is None else variant.qkv_bias
    out_bias = stated if variant.out_bias is None else variant.out_bias
    query, key = heads * head_dim, kv_heads * head_dim
    if variant.fused:
        outputs = {"qkv_proj": query + 2 * key}
    else:
        outputs = {"q_proj": query, "k_proj": key, "v_proj": key}
    inputs = (_linear(f"self_attn.{name}", n, hidden, qkv_bias) for name, n in outputs.items())
    return LayerSpec(
        linears=(*inputs, _linear("self_attn.o_proj", hidden, query, out_bias)),
        norm_parameters=variant.norms * hidden + (2 * head_dim if variant.qk_norm else 0),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
    )


def _gated(variant: _Variant, fields: Config, intermediate: int) -> Linears:
    hidden = fields.size("hidden_size")
    bias = variant.mlp_bias and fields.flag_or("mlp_bias", default=False)
    down = _linear("mlp.down_proj", hidden, intermediate, bias)
    if variant.fused:
        return (_linear("mlp.gate_up_proj", 2 * intermediate, hidden, bias), down)
    names = ("mlp.gate_proj", "mlp.up_proj")
    return (*(_linear(name, intermediate, hidden, bias) for name in names), down)


def _experts(fields: Config, count: int, active: int, intermediate: int) -> Linears:
    hidden = fields.size("hidden_size")
    if active > count:
        raise fields.error("num_experts_per_tok", active, f"at most {count} experts")
    router = replace(_linear("mlp.gate", count, hidden), quantizable=False)
    gate_up = _linear("mlp.experts.gate_up_proj", 2 * intermediate, hidden)
    down = _linear("mlp.experts.down_proj", hidden, intermediate)
    return (
        router,
        replace(gate_up, count=count, active=active),
        replace(down, count=count, active=active),
    )


def _opt(fields: Config) -> _Parts:
    hidden = fields.size("hidden_size")
    ffn = fields.size("ffn_dim", default=3072)
    bias = fields.flag_or("enable_bias", default=True)
    norm = 2 * hidden if fields.flag_or("layer_norm_elementwise_affine", default=True) else 0
    projected = fields.size("word_embed_proj_dim", default=hidden)
    positions = fields.size("max_position_embeddings", default=2048)
    names = ("k_proj", "v_proj", "q_proj", "out_proj")
    layer = _plain_layer(
        fields,
        linears=(
            *(_linear(f"self_attn.{name}", hidden, hidden, bias) for name in names),
            _linear("fc1", ffn, hidden, bias),
            _linear("fc2", hidden, ffn, bias),
        ),
        norm_parameters=2 * norm,
    )
    has_final_norm = fields.flag_or("do_layer_norm_before", default=True) and not fields.flag_or(
        "_remove_final_layer_norm", default=False
    )
    # Learned positions start at 2 (the rows of padding); OPT-350m projects in and out of its width.
    projections = 0 if projected == hidden else 2 * projected * hidden
    final = norm if has_final_norm else 0
    parts = _parts(fields, [layer] * fields.layers(), width=projected, final=final, tied=True)
    return replace(
        parts,
        max_positions=positions,
        embedding_parameters=parts.embedding_parameters + (positions + 2) * hidden + projections,
    )


def _bloom(fields: Config) -> _Parts:
    hidden = fields.size(*HIDDEN)
    layer = _joint_layer(fields, "self_attention", inner=4 * hidden, bias=True)
    norm = 2 * hidden
    parts = _parts(fields, [layer] * fields.layers(), width=hidden, final=norm, tied=True)
    # ALiBi has no last position.
    embedding = parts.embedding_parameters + norm
    return replace(parts, max_positions=None, embedding_parameters=embedding)


def _gpt_neox(fields: Config) -> _Parts:
    hidden, inner = fields.size("hidden_size"), fields.size("intermediate_size")
    bias = fields.flag_or("attention_bias", default=True)
    layer = _joint_layer(fields, "attention", inner=inner, bias=bias)
    return _parts(fields, [layer] * fields.layers(), width=hidden, final=2 * hidden, tied=False)


def _joint_layer(fields: Config, attention: str, *, inner: int, bias: bool) -> LayerSpec:
    """Return a layer whose query, key and value are one matrix; ``bias`` is of the attention."""
    hidden = fields.size(*HIDDEN)
    linears = (
        _linear(f"{attention}.query_key_value", 3 * hidden, hidden, bias),
        _linear(f"{attention}.dense", hidden, hidden, bias),
        _linear("mlp.dense_h_to_4h", inner, hidden, bias=True),
        _linear("mlp.dense_4h_to_h", hidden, inner, bias=True),
    )
    return _plain_layer(fields, linears=linears, norm_parameters=4 * hidden)


def _phi(fields: Config) -> _Parts:
    hidden = fields.size("hidden_size")
    inner, kv_heads = fields.size("intermediate_size"), fields.kv_heads(None)
    heads, head_dim = fields.size("num_attention_heads"), fields.head_dim(None)
    query, key = heads * head_dim, kv_heads * head_dim
    # One norm serves attention and feed-forward, which run side by side.
    qk_norms = 4 * (hidden // heads) if fields.flag_or("qk_layernorm", default=False) else 0
    layer = LayerSpec(
        linears=(
            _linear("self_attn.q_proj", query, hidden, bias=True),
            _linear("self_attn.k_proj", key, hidden, bias=True),
            _linear("self_attn.v_proj", key, hidden, bias=True),
            _linear("self_attn.dense", hidden, query, bias=True),
            _linear("mlp.fc1", inner, hidden, bias=True),
            _linear("mlp.fc2", hidden, inner, bias=True),
        ),
        norm_parameters=2 * hidden + qk_norms,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
    )
    parts = _parts(fields, [layer] * fields.layers(), width=hidden, final=2 * hidden, tied=False)
    # The head has a bias.
    return replace(parts, head_parameters=parts.head_parameters + fields.size("vocab_size"))


def _plain_layer(
    fields: Config, *, linears: tuple[LinearSpec, ...], norm_parameters: int
) -> LayerSpec:
    heads = fields.size(*HEADS)
    return LayerSpec(
        linears=linears,
        norm_parameters=norm_parameters,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=fields.head_share(),
    )


def _no_windows(fields: Config) -> Sequence[int | None]:
    """Return no window for any layer (Llama, Gemma)."""
    return [None] * fields.layers()


def _windows_everywhere(default: int | None) -> Callable[[Config], Sequence[int | None]]:
    """Return a reader of ``sliding_window`` for all layers; null is none (Mistral, Phi-3)."""

    def windows(fields: Config) -> Sequence[int | None]:
        stated = fields.optional_size("sliding_window")
        missing = None if "sliding_window" in fields.names() else default
        return [stated or missing] * fields.layers()

    return windows


def _windows_if_used(fields: Config) -> Sequence[int | None]:
    """Return windows of all layers if ``use_sliding_window`` is set (Qwen3-MoE)."""
    used = fields.flag_or("use_sliding_window", default=False)
    return [_window(fields) if used else None] * fields.layers()


def _windows_from_layer(fields: Config) -> Sequence[int | None]:
    """Return windows from ``max_window_layers`` on if ``use_sliding_window`` is set (Qwen)."""
    count = fields.layers()
    window = _window(fields) if fields.flag_or("use_sliding_window", default=False) else None
    first = fields.size("max_window_layers", default=28, minimum=0)
    return _by_name(fields, [window if index >= first else None for index in range(count)], window)


def _windows_by_period(
    period: int, field: str | None = None
) -> Callable[[Config], Sequence[int | None]]:
    """Return a reader of windows except in every ``period``-th layer (Gemma 2, 3).

    ``field`` of the file overrides the period.
    """

    def windows(fields: Config) -> Sequence[int | None]:
        window = _window(fields)
        every = period if field is None else fields.size(field, default=period)
        count = fields.layers()
        pattern = [window if (index + 1) % every else None for index in range(count)]
        return _by_name(fields, pattern, window)

    return windows


def _by_name(
    fields: Config, pattern: Sequence[int | None], window: int | None
) -> Sequence[int | None]:
    """Return the windows by ``layer_types`` if the file has it, else ``pattern``."""
    names = fields.words("layer_types", len(pattern), ("full_attention", "sliding_attention"))
    if names is None:
        return pattern
    return [window if name == "sliding_attention" else None for name in names]


def _window(fields: Config) -> int | None:
    missing = None if "sliding_window" in fields.names() else 4096
    return fields.optional_size("sliding_window") or missing


@dataclass(frozen=True, slots=True, kw_only=True)
class _Variant:
    """How a family differs from Llama.

    Attributes:
        kv_heads, head_dim: transformers' defaults; ``None`` is the number of query heads, and the
            hidden size divided by it.
        qkv_bias, out_bias: whether there is one; ``None`` where ``attention_bias`` says.
        mlp_bias: whether ``mlp_bias`` of the file counts.
        fused: query, key and value are one matrix, gate and up another (Phi-3).
        qk_norm: norms on query and key heads.
        norms: norms of width ``h`` in a layer.
        tied: default of ``tie_word_embeddings``.
        windows: the sliding window of every layer.
        feed_forwards: the operators of every layer behind its attention.
    """

    kv_heads: int | None = None
    head_dim: int | None = None
    qkv_bias: bool | None = None
    out_bias: bool | None = None
    mlp_bias: bool = False
    fused: bool = False
    qk_norm: bool = False
    norms: int = 2
    tied: bool = False
    windows: Callable[[Config], Sequence[int | None]] = _no_windows
    feed_forwards: Callable[[_Variant, Config, int], Sequence[Linears]] = _dense


_MISTRAL = _Variant(kv_heads=8, qkv_bias=False, out_bias=False, windows=_windows_everywhere(4096))
_GEMMA2 = _Variant(kv_heads=4, head_dim=256, norms=4, tied=True, windows=_windows_by_period(2))
_VARIANTS = {
    "llama": _Variant(mlp_bias=True),
    "mistral": _MISTRAL,
    "mixtral": replace(_MISTRAL, windows=_windows_everywhere(None), feed_forwards=_mixtral),
    "phi3": replace(_MISTRAL, kv_heads=None, fused=True, windows=_windows_everywhere(None)),
    "qwen2": _Variant(kv_heads=32, qkv_bias=True, out_bias=False, windows=_windows_from_layer),
    "qwen3": _Variant(kv_heads=32, head_dim=128, qk_norm=True, windows=_windows_from_layer),
    "qwen3_moe": _Variant(
        kv_heads=4, qk_norm=True, windows=_windows_if_used, feed_forwards=_qwen3_moe
    ),
    "gemma": _Variant(kv_heads=16, head_dim=256, tied=True),
    "gemma2": _GEMMA2,
    "gemma3_text": replace(
        _GEMMA2, qk_norm=True, windows=_windows_by_period(6, "sliding_window_pattern")
    ),
}
_FAMILIES: dict[str, Callable[[Config], _Parts]] = {
    "opt": _opt,
    "bloom": _bloom,
    "gpt_neox": _gpt_neox,
    "phi": _phi,
    **{name: partial(_llama_like, variant) for name, variant in _VARIANTS.items()},
}
