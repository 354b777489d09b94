"""JetMoE: experts in the feed-forward and in the queries and outputs of attention.

The query heads of a group are far from each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llmpq.spec.families import Family
from llmpq.spec.huggingface.attention import AttentionSizes
from llmpq.spec.huggingface.config import EXPERTS, EXPERTS_PER_TOKEN, HIDDEN, Config
from llmpq.spec.huggingface.feed_forward import FeedForward, linear
from llmpq.spec.huggingface.sizes import Sizes
from llmpq.spec.model import LinearSpec


def _attention(fields: Config) -> Sequence[AttentionSizes]:
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


def _feed_forward(fields: Config) -> Sequence[FeedForward]:
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


FAMILY = Family(
    name="jetmoe",
    sizes=Sizes(attention=_attention, feed_forward=_feed_forward),
    attends_to_cache=False,
)
