"""ALiBi: the linear bias of BLOOM's attention scores.

Source: Press et al., "Train Short, Test Long" (2022); slopes as in transformers' BLOOM.

BLOOM in transformers does not support registered attention functions: it stores the scores of all
queries and keys, with matrix products that oneDNN compiles again for each context length.
``AlibiAttention`` replaces it.

Shapes: R rows, T new tokens per row, S cached tokens, H heads, d head_dim.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from llmpq.models.attention import KVView
from llmpq.models.slot_attention import SlotMask
from llmpq.spec.runtime_constants import BIAS_BLOCK_TOKENS


def alibi_slopes(heads: int) -> Tensor:
    """Return the slope of every head, ``[heads]`` float32."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = _geometric(power, torch.arange(1, 1 + power))
    if power == heads:
        return slopes
    # Heads beyond the power of two take every other slope of the next one.
    extra = _geometric(2 * power, torch.arange(1, 1 + 2 * (heads - power), 2))
    return torch.cat([slopes, extra])


def _geometric(heads: int, exponents: Tensor) -> Tensor:
    base = torch.full((), 2 ** (-(2 ** -(math.log2(heads) - 3))), dtype=torch.float32)
    return torch.pow(base, exponents.to(torch.int32))


@lru_cache(maxsize=64)
def _slopes_on(heads: int, device: torch.device) -> Tensor:
    return alibi_slopes(heads).to(device)


def alibi_bias(heads: int, keys: int, like: Tensor) -> Tensor:
    """Return the bias of every key, float32 ``[heads, keys]``, rounded to the dtype of ``like``.

    It depends on the key alone: softmax cancels the constant of the query position.
    """
    slopes = _slopes_on(heads, like.device)
    bias = slopes[:, None] * torch.arange(keys, device=like.device)
    return bias.to(like.dtype).to(torch.float32)


def attend_with_bias(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, visible: Tensor | None, scaling: float
) -> Tensor:
    """Compute attention with a bias on the keys, one block of queries at a time.

    Memory holds the bias of one block. Scores are float32 up to the softmax.

    Args:
        query: ``[R, H, T, d]`` of the last T tokens.
        key: ``[R, H, S, d]``.
        value: ``[R, H, S, d]``.
        bias: ``[H, S]``, added to the scaled scores.
        visible: keys that each query attends to, bool ``[R, 1, T, S]``; ``None`` is causal.
        scaling: factor of the scores.

    Returns:
        ``[R, T, H, d]``, contiguous.
    """
    rows, heads, width, dim = query.shape
    tokens, bias = key.shape[2], bias.to(query.dtype)
    out = query.new_empty(rows, width, heads, dim)
    places = torch.arange(tokens, device=query.device)
    many = BIAS_BLOCK_TOKENS if visible is None else max(1, BIAS_BLOCK_TOKENS // rows)
    for first in range(0, width, many):
        block = slice(first, min(first + many, width))
        if visible is None:
            own = places[tokens - width :][block]
            seen = slice(tokens - width + block.stop)
            shown = places[seen] <= own[:, None]  # [B, S']
        else:
            seen, shown = slice(tokens), visible[:, :, block]  # [R, 1, B, S]
        hidden = torch.zeros(shown.shape, dtype=query.dtype, device=query.device)
        hidden.masked_fill_(~shown, -math.inf)
        mask = bias[:, None, seen] + hidden  # [H, B, S'] or [R, H, B, S]
        part = scaled_dot_product_attention(
            query[:, :, block],
            key[:, :, seen],
            value[:, :, seen],
            attn_mask=mask if mask.dim() == 4 else mask[None],
            scale=scaling,
        )
        out[:, block] = part.transpose(1, 2)
    return out


class AlibiAttention(nn.Module):
    """Self-attention of BLOOM with blockwise scores; the same submodules and call.

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
        attention_mask: Tensor | SlotMask | None,
        layer_past: KVView | None = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        """Return ``[R, T, hidden]`` plus the residual; ``alibi`` is from :func:`alibi_bias`."""
        rows, width, _size = hidden_states.shape
        fused = self.query_key_value(hidden_states)
        parts = fused.view(rows, width, self._heads, 3, self._head_dim).transpose(1, 2)
        query, key, value = parts.unbind(3)  # [R, H, T, d]
        if layer_past is not None:
            key, value = layer_past.update(key, value, self._layer)
        scaling = self._head_dim**-0.5
        if isinstance(attention_mask, SlotMask):
            view, window = attention_mask.view, attention_mask.window
            attended = view.attend(query, scaling, window, alibi)
        else:
            attended = attend_with_bias(query, key, value, alibi, attention_mask, scaling)
        return residual + self.dense(attended.view(rows, width, -1)), None


def use_alibi_attention(layer: nn.Module) -> None:
    """Replace the self-attention of a BLOOM layer by :class:`AlibiAttention`."""
    if not isinstance(layer.self_attention, AlibiAttention):
        layer.self_attention = AlibiAttention(layer.self_attention)
