"""The attention of a layer: its operators, and what a token leaves in the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from llmpq.spec.huggingface.config import HEADS, HIDDEN, Config
from llmpq.spec.huggingface.feed_forward import Bias, has_bias, linear
from llmpq.spec.model import LinearSpec

Attentions = Callable[[Config], Sequence["AttentionSizes"]]
"""Reads the attention of every layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSizes:
    """Operators, other parameters, and the cached heads of one layer.

    The fields are those of ``LayerSpec``.
    """

    linears: tuple[LinearSpec, ...]
    others: int = 0
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None
    state_values: int = 0
    kv_source: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfAttention:
    """Query, key, value and output; the same in every layer.

    Attributes:
        prefix: path of the block.
        names: of the operators; two if query, key and value are one matrix.
        bias: of query, key and value.
        out_bias: of the output; ``None`` for the same.
        norm: queries and keys are normed head by head, or all heads at once.
        norm_names: of the norms of queries, keys and values; optional in a model.
        norm_tensors: parameters of each norm and feature: 2 with a bias.
        norm_if: field that must be set for the norms.
        head_dim: size of a head, by default ``head_dim`` or an equal share of the width.
        kv_heads: number of key-value heads.
        sinks: a parameter of each head (attention sinks).
        others: further parameters, in units of ``head_dim``.
        query_widths: query outputs of each head, in units of ``head_dim``: 2 with an output gate.
        gate: an operator that gates the output; ``None`` for none.
    """

    prefix: str = "self_attn"
    names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    bias: Bias = "attention_bias"
    out_bias: Bias | None = None
    norm: Literal["heads", "rows"] | None = None
    norm_names: tuple[str, ...] = ("q_norm", "k_norm", "v_norm")
    norm_tensors: int = 1
    norm_if: str | None = None
    head_dim: Callable[[Config], int] = Config.head_dim
    kv_heads: Callable[[Config], int] = Config.kv_heads
    sinks: bool = False
    others: int = 0
    query_widths: int = 1
    gate: str | None = None

    @property
    def projections(self) -> tuple[str, ...]:
        """Names of the operators of queries, keys and values in this order, or of that of all.

        ``names`` has them in the order of the model's modules.
        """
        inputs = self.names[:-1]
        return (
            inputs if len(inputs) == 1 else tuple(sorted(inputs, key=lambda n: "qkv".index(n[0])))
        )

    def __call__(self, fields: Config) -> Sequence[AttentionSizes]:
        """Return the attention of every layer."""
        return [self.one(fields)] * fields.layers()

    def one(self, fields: Config) -> AttentionSizes:
        """Return the attention of one layer."""
        hidden, heads = fields.size(*HIDDEN), fields.size(*HEADS)
        kv_heads, head_dim = self.kv_heads(fields), self.head_dim(fields)
        query, key = heads * head_dim, kv_heads * head_dim
        *inputs, output = self.names
        widths = [self.query_widths * query, key, key]
        if len(inputs) == 1:
            widths = [sum(widths)]
        bias = has_bias(fields, self.bias)
        out_bias = bias if self.out_bias is None else has_bias(fields, self.out_bias)
        linears = [
            linear(f"{self.prefix}.{name}", width, hidden, bias)
            for name, width in zip(inputs, widths, strict=True)
        ]
        if self.gate is not None:
            linears.append(linear(f"{self.prefix}.{self.gate}", query, hidden, bias))
        linears.append(linear(f"{self.prefix}.{output}", hidden, query, out_bias))
        return AttentionSizes(
            linears=tuple(linears),
            others=self._norms(fields, query, key, head_dim)
            + (heads if self.sinks else 0)
            + self.others * head_dim,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
        )

    def _norms(self, fields: Config, query: int, key: int, head_dim: int) -> int:
        if self.norm is None or (self.norm_if and not fields.flag_or(self.norm_if, default=False)):
            return 0
        features = 2 * head_dim if self.norm == "heads" else query + key
        return self.norm_tensors * features


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, Sec. 2.1); the same in every layer.

    A token leaves its latent vector and the rotated part of its keys in the cache, for all heads.

    Attributes:
        prefix: path of attention.
        gate: operator of a gate of each head's output, if any.
    """

    prefix: str = "self_attn"
    gate: str | None = None

    def __call__(self, fields: Config) -> Sequence[AttentionSizes]:
        """Return the attention of every layer."""
        hidden, heads = fields.size(*HIDDEN), fields.size(*HEADS)
        latent, rotated = fields.size("kv_lora_rank"), fields.size("qk_rope_head_dim")
        plain, value = fields.size("qk_nope_head_dim"), fields.size("v_head_dim")
        rank = fields.optional_size("q_lora_rank")
        bias = has_bias(fields, "attention_bias")
        query = heads * (plain + rotated)
        if rank is None:
            queries = [linear("q_proj", query, hidden)]
        else:
            queries = [linear("q_a_proj", rank, hidden, bias), linear("q_b_proj", query, rank)]
        operators = [
            *queries,
            linear("kv_a_proj_with_mqa", latent + rotated, hidden, bias),
            linear("kv_b_proj", heads * (plain + value), latent),
            linear("o_proj", hidden, heads * value, bias),
        ]
        if self.gate is not None:
            operators.append(linear(self.gate, heads, hidden))
        attention = AttentionSizes(
            linears=tuple(replace(op, name=f"{self.prefix}.{op.name}") for op in operators),
            others=latent + (rank or 0),
            num_heads=heads,
            num_kv_heads=1,
            head_dim=latent,
            value_dim=rotated,
        )
        return [attention] * fields.layers()
