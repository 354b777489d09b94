"""DBRX: experts in stacks of rows, attention below a block of norms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llmpq.spec.families import Family, ModelParts
from llmpq.spec.huggingface.attention import AttentionSizes
from llmpq.spec.huggingface.config import HEADS, HIDDEN, Config
from llmpq.spec.huggingface.feed_forward import FeedForward, linear
from llmpq.spec.huggingface.sizes import Sizes
from llmpq.spec.model import LinearSpec


def _attention(fields: Config) -> Sequence[AttentionSizes]:
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


def _feed_forward(fields: Config) -> Sequence[FeedForward]:
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


def _stack(name: str, shape: tuple[int, int], count: tuple[int, int]) -> LinearSpec:
    return replace(linear(name, *shape), count=count[0], active=count[1])


FAMILY = Family(
    name="dbrx",
    own_modules=(("ffn", "routed_experts"),),
    sizes=Sizes(attention=_attention, feed_forward=_feed_forward),
    parts=ModelParts(embedding="wte", final_norm="norm_f"),
)
