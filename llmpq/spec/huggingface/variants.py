"""The table of model families: what each has in place of Llama's parts.

The default of every field is Llama: separate projections, a gated feed-forward, two root mean
square norms, rotary positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from llmpq.spec.huggingface import gemma3n, gemma4, mixers, mixtures, windows
from llmpq.spec.huggingface.attention import Attentions, LatentAttention, SelfAttention
from llmpq.spec.huggingface.config import HIDDEN, POSITIONS, Config
from llmpq.spec.huggingface.feed_forward import (
    Experts,
    FeedForwards,
    Gated,
    Plain,
    after_first,
    by_interval,
    by_list,
    by_step,
)


def positions_of(fields: Config) -> int | None:
    """Return the longest sequence that the file states."""
    return next((fields.size(name) for name in POSITIONS if fields.has(name)), None)


def hidden_of(fields: Config) -> int:
    """Return the hidden size."""
    return fields.size(*HIDDEN)


def nothing(fields: Config) -> None:
    """Return ``None``: no last position, or nothing sent but hidden states."""
    del fields


_LLAMA_ATTENTION, _LLAMA_FEED_FORWARD = SelfAttention(), Gated()


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """How a family differs from Llama.

    Attributes:
        attention, feed_forward, windows: of every layer.
        norms: norms of the hidden size in a layer.
        norm_tensors: parameters of each and feature: 2 with a bias, 0 without any.
        final_norms: such norms after the last layer.
        positions: rows of a table of learned positions beyond the longest sequence; ``None``
            without a table.
        max_positions: longest sequence; ``None`` when unlimited.
        embedding_norms: norms of the embeddings.
        other_embeddings: further parameters before the first layer (Gemma 3n, Gemma 4).
        sent_features: numbers that a stage sends for each token; ``None`` for the hidden states.
        width: features of an embedding.
        head_bias: whether the head has a bias.
    """

    attention: Attentions = _LLAMA_ATTENTION
    feed_forward: FeedForwards = _LLAMA_FEED_FORWARD
    windows: windows.Windows = windows.no_windows
    norms: int | Callable[[Config], int] = 2
    norm_tensors: int | Callable[[Config], int] = 1
    final_norms: int | Callable[[Config], int] = 1
    positions: int | None = None
    max_positions: Callable[[Config], int | None] = positions_of
    embedding_norms: int = 0
    other_embeddings: int | Callable[[Config], int] = 0
    sent_features: Callable[[Config], int | None] = nothing
    width: Callable[[Config], int] = hidden_of
    head_bias: bool | str = False

    def norm_parameters(self, fields: Config) -> int:
        """Return the parameters of a norm of the hidden size."""
        return _value(self.norm_tensors, fields) * fields.size(*HIDDEN)

    def layer_norm_parameters(self, fields: Config) -> int:
        """Return the parameters of a layer's norms of the hidden size."""
        return _value(self.norms, fields) * self.norm_parameters(fields)

    def final_parameters(self, fields: Config) -> int:
        """Return the parameters of the norm before the head."""
        return _value(self.final_norms, fields) * self.norm_parameters(fields)

    def embedding_parameters(self, fields: Config) -> int:
        """Return the parameters before the first layer."""
        hidden, width = fields.size(*HIDDEN), self.width(fields)
        total = fields.size("vocab_size") * width + self.embedding_norms * self.norm_parameters(
            fields
        )
        total += _value(self.other_embeddings, fields)
        if self.positions is not None:
            total += (fields.size(*POSITIONS) + self.positions) * hidden
        # OPT-350m projects in and out of the hidden size.
        return total + (0 if width == hidden else 2 * width * hidden)

    def head_parameters(self, fields: Config) -> int:
        """Return the parameters of the LM head, its matrix only if it is not tied."""
        vocab = fields.size("vocab_size")
        bias = (
            fields.flag_or(self.head_bias, default=False)
            if isinstance(self.head_bias, str)
            else self.head_bias
        )
        is_tied = fields.flag_or("tie_word_embeddings", default=True)
        return (0 if is_tied else vocab * self.width(fields)) + (vocab if bias else 0)


def _value(rule: int | Callable[[Config], int], fields: Config) -> int:
    return rule if isinstance(rule, int) else rule(fields)


def _one_if(
    field: str, default: bool, count: int = 1, otherwise: int = 0
) -> Callable[[Config], int]:
    """Return a rule: ``count`` if the flag is set, else ``otherwise``."""
    return lambda fields: count if fields.flag_or(field, default) else otherwise


def _opt_final_norms(fields: Config) -> int:
    is_removed = fields.flag_or("_remove_final_layer_norm", default=False)
    return int(fields.flag_or("do_layer_norm_before", default=True) and not is_removed)


def _gpt_bigcode_heads(fields: Config) -> int:
    return 1 if fields.flag_or("multi_query", default=True) else fields.kv_heads("n_head")


def _falcon_heads(fields: Config) -> int:
    if fields.flag_or("new_decoder_architecture", default=False):
        return fields.kv_heads("num_kv_heads")
    return 1 if fields.flag_or("multi_query", default=True) else fields.size("num_attention_heads")


def _falcon_norms(fields: Config) -> int:
    if not fields.flag_or("parallel_attn", default=True):
        return 2
    is_new = fields.flag_or("new_decoder_architecture", default=False)
    return fields.size("num_ln_in_parallel_attn", default=2 if is_new else 1)


_PROJECTED = ("query_key_value", "dense")
_FC = Plain(names=("c_fc", "c_proj"), widths=("n_inner",), bias=True)
_JOINED = Gated(names=("gate_up_proj", "down_proj"), joined=True)
_NEOX_MLP = Plain(names=("dense_h_to_4h", "dense_4h_to_h"), bias=True)
_NO_BIAS = SelfAttention(bias=False)
_OLMO2 = Variant(attention=SelfAttention(norm="rows"))
_MIXTRAL = Experts(widths=("intermediate_size",))
_SHARED = Experts(shared="shared_experts", layers=after_first("first_k_dense_replace"))
_LATENT = Variant(attention=LatentAttention(), feed_forward=_SHARED)
_SCALED_EXPERTS = Experts(prefix="block_sparse_moe", router="router", widths=("intermediate_size",))
_LLAMA = Variant(feed_forward=Gated(bias="mlp_bias"))
_MISTRAL = Variant(attention=_NO_BIAS, windows=windows.uniform)
_GEMMA2 = Variant(norms=4, windows=windows.by_period(2))
_COHERE = Variant(norms=1)
_GPT_ATTENTION = SelfAttention(
    prefix="attn", head_dim=Config.head_share, kv_heads=lambda fields: fields.kv_heads("n_head")
)
_GPTJ_ATTENTION = replace(
    _GPT_ATTENTION, names=("k_proj", "v_proj", "q_proj", "out_proj"), bias=False
)
_GPT2_ATTENTION = replace(_GPT_ATTENTION, names=("c_attn", "c_proj"), bias=True)
_GPT2 = Variant(attention=_GPT2_ATTENTION, feed_forward=_FC, norm_tensors=2, positions=0)
_GPTJ = Variant(
    attention=_GPTJ_ATTENTION,
    feed_forward=Plain(names=("fc_in", "fc_out"), widths=("n_inner",), bias=True),
    norms=1,
    norm_tensors=2,
    head_bias=True,
)

_GATED_ATTENTION = SelfAttention(norm="heads", query_widths=2)
_QWEN2_EXPERTS = Experts(
    shared="shared_expert",
    shared_gate=True,
    shared_width=lambda fields: fields.size("shared_expert_intermediate_size"),
)
_QWEN3_5 = Variant(
    attention=mixers.Hybrid(
        attention=_GATED_ATTENTION,
        mixer=mixers.gated_delta_net(mixers.separate_inputs),
        is_attention=mixers.by_interval,
    ),
)

VARIANTS: dict[str, Variant] = {
    "afmoe": Variant(
        attention=SelfAttention(norm="heads", gate="gate_proj"),
        feed_forward=Experts(
            router="router.gate",
            shared="shared_experts",
            correction=1,
            layers=after_first("num_dense_layers"),
        ),
        windows=windows.by_period(4, "global_attn_every_n_layers"),
        norms=4,
    ),
    "apertus": Variant(attention=SelfAttention(norm="heads"), feed_forward=Plain(others=2)),
    "arcee": Variant(feed_forward=Plain(bias="mlp_bias")),
    "bitnet": Variant(feed_forward=Gated(norm=True), norms=3),
    "bloom": Variant(
        attention=SelfAttention(
            prefix="self_attention",
            names=_PROJECTED,
            bias=True,
            head_dim=Config.head_share,
            kv_heads=lambda fields: fields.kv_heads("n_head"),
        ),
        feed_forward=replace(_NEOX_MLP, widths=("n_inner",)),
        norm_tensors=2,
        embedding_norms=1,
        max_positions=nothing,  # ALiBi has no last position
    ),
    "codegen": replace(_GPTJ, attention=replace(_GPTJ_ATTENTION, names=("qkv_proj", "out_proj"))),
    "cohere": replace(_COHERE, attention=SelfAttention(norm="rows", norm_if="use_qk_norm")),
    "cohere2": replace(_COHERE, windows=windows.by_period(4, "sliding_window_pattern")),
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "dbrx": Variant(attention=mixtures.dbrx_attention, feed_forward=mixtures.dbrx_feed_forward),
    "diffllama": Variant(attention=SelfAttention(others=4)),
    "dots1": Variant(
        attention=SelfAttention(norm="heads"),
        feed_forward=_SHARED,
        windows=windows.always_from_layer,
    ),
    "ernie4_5": Variant(
        attention=SelfAttention(bias="use_bias"), feed_forward=Gated(bias="use_bias")
    ),
    "ernie4_5_moe": Variant(
        attention=SelfAttention(bias="use_bias"),
        feed_forward=Experts(
            shared="shared_experts", correction=1, layers=by_interval, dense=Gated(bias="use_bias")
        ),
        head_bias="use_bias",
    ),
    "exaone4": Variant(
        attention=SelfAttention(bias=False, norm="heads"),
        windows=windows.by_period(4, "sliding_window_pattern"),
    ),
    "exaone_moe": Variant(
        attention=SelfAttention(bias=False, norm="heads"),
        feed_forward=_SHARED,
        windows=windows.by_period(4, "sliding_window_pattern"),
    ),
    "falcon": Variant(
        attention=SelfAttention(
            prefix="self_attention",
            names=_PROJECTED,
            bias="bias",
            head_dim=Config.head_share,
            kv_heads=_falcon_heads,
        ),
        feed_forward=replace(_NEOX_MLP, bias="bias", widths=("ffn_hidden_size",)),
        norms=_falcon_norms,
        norm_tensors=2,
    ),
    "flex_olmo": replace(_OLMO2, feed_forward=_MIXTRAL),
    "gemma": Variant(),
    "gemma2": _GEMMA2,
    "gemma3_text": replace(
        _GEMMA2,
        attention=SelfAttention(norm="heads"),
        windows=windows.by_period(6, "sliding_window_pattern"),
    ),
    "gemma3n_text": Variant(
        attention=gemma3n.attention,
        feed_forward=gemma3n.feed_forward,
        windows=gemma3n.windows,
        norms=4,
        other_embeddings=gemma3n.embedding_parameters,
        sent_features=gemma3n.sent_features,
    ),
    "gemma4_text": Variant(
        attention=gemma4.attention,
        feed_forward=gemma4.feed_forward,
        windows=gemma4.windows,
        norms=4,
        other_embeddings=gemma4.embedding_parameters,
        sent_features=gemma4.sent_features,
    ),
    "glm": Variant(attention=SelfAttention(out_bias=False), feed_forward=_JOINED),
    "glm4": Variant(attention=SelfAttention(out_bias=False), feed_forward=_JOINED, norms=4),
    "glm4_moe": Variant(
        attention=SelfAttention(out_bias=False, norm="heads", norm_if="use_qk_norm"),
        feed_forward=_SHARED,
    ),
    "glm4_moe_lite": replace(_LATENT, feed_forward=replace(_SHARED, layers=after_first(default=1))),
    "gpt2": _GPT2,
    "gpt_bigcode": replace(_GPT2, attention=replace(_GPT2_ATTENTION, kv_heads=_gpt_bigcode_heads)),
    "gpt_neox": Variant(
        attention=SelfAttention(prefix="attention", names=_PROJECTED, head_dim=Config.head_share),
        feed_forward=_NEOX_MLP,
        norm_tensors=2,
    ),
    "gpt_oss": Variant(
        attention=SelfAttention(sinks=True),
        feed_forward=Experts(
            router="router",
            router_bias=True,
            widths=("intermediate_size",),
            bias=True,
        ),
        windows=windows.by_period(2),
    ),
    "gptj": _GPTJ,
    "granite": Variant(feed_forward=Gated(bias="mlp_bias")),
    "granitemoe": Variant(feed_forward=_SCALED_EXPERTS),
    "helium": Variant(attention=SelfAttention(out_bias=False), feed_forward=Gated(bias="mlp_bias")),
    "hunyuan_v1_dense": Variant(attention=SelfAttention(norm="heads")),
    "hunyuan_v1_moe": Variant(
        attention=SelfAttention(norm="heads"),
        feed_forward=replace(
            _MIXTRAL,
            router="gate.wg",
            shared="shared_mlp",
            shared_width=lambda fields: fields.size("intermediate_size"),
        ),
    ),
    "hy_v3": Variant(
        attention=SelfAttention(norm="heads"),
        feed_forward=replace(_SHARED, layers=after_first(default=1)),
    ),
    "internlm3": _LLAMA,
    "iquestcoder": _LLAMA,
    "jais2": Variant(feed_forward=Plain(bias="mlp_bias"), norm_tensors=2),
    "jetmoe": Variant(
        attention=mixtures.jetmoe_attention, feed_forward=mixtures.jetmoe_feed_forward
    ),
    "lfm2": Variant(
        attention=mixers.Hybrid(
            attention=SelfAttention(
                names=("q_proj", "k_proj", "v_proj", "out_proj"),
                bias=False,
                norm="heads",
                head_dim=Config.head_share,
            ),
            mixer=mixers.short_convolution,
            is_attention=mixers.by_list,
        ),
        feed_forward=mixers.adjusted_feed_forward,
    ),
    "llama": _LLAMA,
    "llama4_text": Variant(
        feed_forward=Experts(
            prefix="feed_forward",
            router="router",
            widths=("intermediate_size",),
            shared="shared_expert",
            shared_width=lambda fields: fields.size("intermediate_size"),
            layers=by_list,
            dense=Gated(prefix="feed_forward", widths=("intermediate_size_mlp",)),
        ),
        windows=windows.chunks,
    ),
    "mellum": Variant(
        attention=SelfAttention(norm="heads"),
        feed_forward=Experts(layers=after_first()),
        windows=windows.named,
    ),
    "minicpm3": replace(_LATENT, feed_forward=Gated()),
    "minimax_m2": Variant(attention=SelfAttention(norm="rows", bias=False), feed_forward=_MIXTRAL),
    "ministral": replace(_MISTRAL, windows=windows.everywhere),
    "ministral3": _MISTRAL,
    "mistral": _MISTRAL,
    "mixtral": replace(_MISTRAL, feed_forward=_MIXTRAL),
    "mpt": Variant(
        attention=SelfAttention(
            prefix="attn",
            names=("Wqkv", "out_proj"),
            bias=False,
            head_dim=Config.head_share,
            kv_heads=lambda fields: fields.kv_heads("n_heads"),
        ),
        feed_forward=Plain(prefix="ffn", widths=("inner_size",)),
        max_positions=nothing,
    ),
    "nanochat": Variant(feed_forward=Plain(names=("fc1", "fc2")), norm_tensors=0),
    "nemotron": Variant(feed_forward=Plain(bias="mlp_bias"), norm_tensors=2),
    "olmo": Variant(norm_tensors=0),
    "olmo2": _OLMO2,
    "olmo3": replace(_OLMO2, windows=windows.by_period(4)),
    "olmoe": replace(_OLMO2, feed_forward=_MIXTRAL),
    "opt": Variant(
        attention=SelfAttention(
            names=("k_proj", "v_proj", "q_proj", "out_proj"),
            bias="enable_bias",
            head_dim=Config.head_share,
            kv_heads=lambda fields: fields.size("num_attention_heads"),
        ),
        feed_forward=Plain(
            prefix="", names=("fc1", "fc2"), widths=("ffn_dim",), bias="enable_bias"
        ),
        norm_tensors=_one_if("layer_norm_elementwise_affine", default=True, count=2),
        final_norms=_opt_final_norms,
        positions=2,  # the rows of padding
        width=lambda fields: fields.size("word_embed_proj_dim", "hidden_size"),
    ),
    "persimmon": Variant(
        attention=SelfAttention(
            names=_PROJECTED,
            bias=True,
            norm="heads",
            norm_tensors=2,
            norm_if="qk_layernorm",
            head_dim=Config.head_share,
            kv_heads=lambda fields: fields.size("num_attention_heads"),
        ),
        feed_forward=_NEOX_MLP,
        norm_tensors=2,
    ),
    "phi": Variant(
        attention=SelfAttention(
            names=("q_proj", "k_proj", "v_proj", "dense"),
            bias=True,
            norm="heads",
            norm_tensors=2,
            norm_if="qk_layernorm",
        ),
        feed_forward=Plain(names=("fc1", "fc2"), bias=True),
        norms=1,  # one norm serves attention and feed-forward, which run side by side
        norm_tensors=2,
        head_bias=True,
    ),
    "phi3": Variant(
        attention=SelfAttention(names=("qkv_proj", "o_proj"), bias=False),
        feed_forward=_JOINED,
        windows=windows.uniform,
    ),
    "phimoe": Variant(
        feed_forward=replace(_MIXTRAL, router="router"),
        windows=windows.uniform,
        norm_tensors=2,
        head_bias="lm_head_bias",
    ),
    "qwen2": Variant(
        attention=SelfAttention(bias=True, out_bias=False), windows=windows.from_layer
    ),
    "qwen2_moe": Variant(
        attention=SelfAttention(bias="qkv_bias", out_bias=False),
        feed_forward=replace(_QWEN2_EXPERTS, layers=by_step),
        windows=windows.every_other,
    ),
    "qwen3": Variant(attention=SelfAttention(norm="heads"), windows=windows.from_layer),
    "qwen3_5_moe_text": replace(_QWEN3_5, feed_forward=_QWEN2_EXPERTS),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_next": Variant(
        attention=mixers.Hybrid(
            attention=_GATED_ATTENTION,
            mixer=mixers.gated_delta_net(mixers.joined_inputs),
            is_attention=mixers.by_interval,
        ),
        feed_forward=replace(_QWEN2_EXPERTS, layers=by_step),
    ),
    "qwen3_moe": Variant(
        attention=SelfAttention(norm="heads"),
        feed_forward=Experts(layers=by_step),
        windows=windows.if_used,
    ),
    "seed_oss": Variant(
        attention=SelfAttention(out_bias="attention_out_bias"),
        feed_forward=Gated(bias="mlp_bias"),
    ),
    "smollm3": Variant(feed_forward=Gated(bias="mlp_bias"), windows=windows.without_positions),
    "solar_open": Variant(feed_forward=replace(_SHARED, layers=None)),
    "stablelm": Variant(
        attention=SelfAttention(
            bias="use_qkv_bias", out_bias=False, norm="rows", norm_if="qk_layernorm"
        ),
        norms=_one_if("use_parallel_residual", default=False, count=1, otherwise=2),
        norm_tensors=2,
    ),
    "starcoder2": Variant(
        attention=SelfAttention(bias="use_bias"),
        feed_forward=Plain(names=("c_fc", "c_proj"), bias="use_bias"),
        windows=windows.uniform,
        norm_tensors=2,
    ),
    "vaultgemma": Variant(windows=windows.by_period(2)),
    "youtu": replace(_LATENT, feed_forward=Gated()),
}
