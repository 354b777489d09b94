"""ALiBi: the linear bias of BLOOM's attention scores.

Source: Press et al., "Train Short, Test Long" (2022); slopes as in transformers' BLOOM.

BLOOM in transformers does not support registered attention functions. ``AlibiAttention`` replaces
it.

Shapes: N tokens of the step, H heads, d head_dim.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from llmpq.models.attention import KVView, ScoreOptions
from llmpq.models.packed_attention import LayerAttention


def alibi_slopes(heads: int) -> Tensor:
    """Return the slope of every head, ``[heads]`` float32."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = _geometric(power, torch.arange(1, 1 + power))
    if power == heads:
        return slopes
    # Heads beyond the power of two take every other slope of the next one.
    extra = _geometric(2 * power, torch.arange(1, 1 + 2 * (heads - power), 2))
    return torch.cat([slopes, extra])


def mpt_slopes(heads: int, largest: int) -> Tensor:
    """Return the slope of every head of MPT, ``[heads]`` float32; exponents end at ``largest``."""
    power = 2 ** math.ceil(math.log2(heads))
    exponents = torch.arange(1, power + 1).float() * (largest / power)
    slopes = 1.0 / torch.pow(2, exponents)
    return slopes if power == heads else torch.cat([slopes[1::2], slopes[::2]])[:heads]


def _geometric(heads: int, exponents: Tensor) -> Tensor:
    base = torch.full((), 2 ** (-(2 ** -(math.log2(heads) - 3))), dtype=torch.float32)
    return torch.pow(base, exponents.to(torch.int32))


@lru_cache(maxsize=64)
def _slopes_on(heads: int, mpt_largest: int | None, device: torch.device) -> Tensor:
    slopes = alibi_slopes(heads) if mpt_largest is None else mpt_slopes(heads, mpt_largest)
    return slopes.to(device)


def alibi_bias(heads: int, keys: int, like: Tensor, *, mpt_largest: int | None = None) -> Tensor:
    """Return the bias of every key, float32 ``[heads, keys]``, rounded to the dtype of ``like``.

    It depends on the key alone: softmax cancels the constant of the query position.

    Args:
        heads: number of heads.
        keys: number of keys.
        like: tensor with the dtype and device of the layer.
        mpt_largest: largest exponent of MPT's slopes, which are not rounded; ``None`` for BLOOM.
    """
    slopes = _slopes_on(heads, mpt_largest, like.device)
    bias = slopes[:, None] * torch.arange(keys, device=like.device)
    if mpt_largest is not None:
        return bias
    return bias.to(like.dtype).to(torch.float32)


class AlibiAttention(nn.Module):
    """Self-attention of BLOOM on packed tokens; the same submodules and call.

    Args:
        attention: the self-attention module of transformers.
    """

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.query_key_value = attention.query_key_value
        self.dense = attention.dense
        self._heads: int = attention.num_heads
        self._head_dim: int = attention.head_dim
        self._layer: int = attention.layer_idx

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Tensor,
        attention_mask: LayerAttention,
        layer_past: KVView | None = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        """Return ``[1, N, hidden]`` plus the residual; ``alibi`` is from :func:`alibi_bias`."""
        tokens = hidden_states.shape[1]
        fused = self.query_key_value(hidden_states)
        parts = fused.view(1, tokens, self._heads, 3, self._head_dim).transpose(1, 2)
        query, key, value = parts.unbind(3)  # [1, H, N, d]
        if layer_past is not None:
            key, value = layer_past.update(key, value, self._layer)
        scaling, window = self._head_dim**-0.5, attention_mask.window
        options = ScoreOptions(scaling=scaling, window=window, bias=alibi)
        attended = attention_mask.step.attend(query, key, value, options)  # [1, N, H, d]
        return residual + self.dense(attended.view(1, tokens, -1)), None
