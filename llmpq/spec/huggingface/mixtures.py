"""Mixtures of experts with names and fields of their own: DBRX and JetMoE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llmpq.spec.huggingface.attention import AttentionSizes
from llmpq.spec.huggingface.config import EXPERTS, EXPERTS_PER_TOKEN, HEADS, HIDDEN, Config
from llmpq.spec.huggingface.feed_forward import FeedForward, linear
from llmpq.spec.model import LinearSpec


def dbrx_attention(fields: Config) -> Sequence[AttentionSizes]:
    """Return the attention of DBRX; ``attn_config`` has the number of key-value heads."""
    hidden, heads, head_dim = fields.size(*HIDDEN), fields.size(*HEADS), fields.head_share()
    kv_heads = fields.inner("attn_config").size("kv_n_heads", default=1)
    if heads % kv_heads:
        raise fields.error("attn_config.kv_n_heads", kv_heads, f"a divisor of {heads} query heads")
    prefix = "norm_attn_norm.attn"
    attention = AttentionSizes(
        linears=(
            linear(f"{prefix}.Wqkv", hidden + 2 * kv_heads * head_dim, hidden),
            linear(f"{prefix}.out_proj", hidden, hidden),
        ),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
    )
    return [attention] * fields.layers()


def dbrx_feed_forward(fields: Config) -> Sequence[FeedForward]:
    """Return the experts of DBRX; ``ffn_config`` has their sizes."""
    own, hidden = fields.inner("ffn_config"), fields.size(*HIDDEN)
    width = own.size("ffn_hidden_size", default=3584)
    count, active = own.size("moe_num_experts", default=4), own.size("moe_top_k", default=1)
    if active > count:
        raise own.error("moe_top_k", active, f"at most {count} experts")
    linears = (
        replace(linear("ffn.router.layer", count, hidden), quantizable=False),
        _stack("ffn.experts.gate_up_proj", (2 * width, hidden), (count, active)),
        _stack("ffn.experts.down_proj", (hidden, width), (count, active)),
    )
    return [FeedForward(linears=linears)] * fields.layers()


def jetmoe_attention(fields: Config) -> Sequence[AttentionSizes]:
    """Return the attention of JetMoE, whose queries and outputs are those of a token's experts.

    Shen et al., "JetMoE: Reaching Llama2 Performance with 0.1M Dollars", 2024, Sec. 2.2.
    """
    hidden, head_dim = fields.size(*HIDDEN), fields.size("kv_channels")
    kv_heads = fields.size("num_key_value_heads")
    _, active = _experts(fields)
    width, prefix = kv_heads * head_dim, "self_attention"
    attention = AttentionSizes(
        linears=(
            linear(f"{prefix}.kv_proj", 2 * width, hidden),
            *_parallel(fields, f"{prefix}.experts", (width, hidden), (hidden, width)),
        ),
        others=hidden,
        num_heads=kv_heads * active,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
    )
    return [attention] * fields.layers()


def jetmoe_feed_forward(fields: Config) -> Sequence[FeedForward]:
    """Return the experts of JetMoE."""
    hidden, width = fields.size(*HIDDEN), fields.size("intermediate_size")
    linears = _parallel(fields, "mlp", (2 * width, hidden), (hidden, width))
    return [FeedForward(linears=linears, others=hidden)] * fields.layers()


def _parallel(
    fields: Config, prefix: str, first: tuple[int, int], last: tuple[int, int]
) -> tuple[LinearSpec, ...]:
    """Return the router of a block of JetMoE and its two stacks of matrices ``[N, K]``."""
    count = _experts(fields)
    router = linear(f"{prefix}.router.layer", count[0], fields.size(*HIDDEN))
    return (
        replace(router, quantizable=False),
        _stack(f"{prefix}.input_linear", first, count),
        _stack(f"{prefix}.output_linear", last, count),
    )


def _experts(fields: Config) -> tuple[int, int]:
    """Return the number of experts and of those that a token visits."""
    count, active = fields.size(*EXPERTS), fields.size(*EXPERTS_PER_TOKEN)
    if active > count:
        raise fields.error(EXPERTS_PER_TOKEN[0], active, f"at most {count} experts")
    return count, active


def _stack(name: str, shape: tuple[int, int], count: tuple[int, int]) -> LinearSpec:
    return replace(linear(name, *shape), count=count[0], active=count[1])
