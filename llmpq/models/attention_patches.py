"""Attention on packed tokens for families that do not look up a registered attention function.

ALiBi is the linear bias of BLOOM's and MPT's scores (Press et al., "Train Short, Test Long", 2022);
slopes are as in transformers' BLOOM.

The attention modules of BLOOM, MPT, Falcon and Llama 4 are replaced by modules with the same
submodules and call. GPT-J and CodeGen compute their scores in one method, which is replaced.

Shapes: N tokens of the step, H heads, h KV heads, d head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb
from transformers.models.llama4.modeling_llama4 import apply_rotary_emb

from llmpq.models.attention import KVView, LayerAttention, ScoreOptions


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
def _slopes_on(heads: int, largest: int | None, device: torch.device) -> Tensor:
    slopes = alibi_slopes(heads) if largest is None else mpt_slopes(heads, largest)
    return slopes.to(device)


def alibi_bias(heads: int, keys: int, like: Tensor, *, largest: int | None = None) -> Tensor:
    """Return the bias of every key, float32 ``[heads, keys]``, rounded to the dtype of ``like``.

    It depends on the key alone: softmax cancels the constant of the query position.

    Args:
        heads: number of heads.
        keys: number of keys.
        like: tensor with the dtype and device of the layer.
        largest: largest exponent of MPT's slopes, which are not rounded; ``None`` for BLOOM.
    """
    slopes = _slopes_on(heads, largest, like.device)
    bias = slopes[:, None] * torch.arange(keys, device=like.device)
    if largest is not None:
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


class MptAttention(nn.Module):
    """Self-attention of MPT on packed tokens; the same submodules and call.

    Args:
        attention: the self-attention module of transformers.
    """

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.Wqkv = attention.Wqkv
        self.out_proj = attention.out_proj
        self._heads: int = attention.n_heads
        self._layer: int = attention.layer_idx
        self._scaling: float = attention.softmax_scale
        self._largest: float | None = attention.clip_qkv

    def forward(
        self,
        hidden_states: Tensor,
        position_bias: Tensor,
        past_key_values: KVView | None = None,
        attention_mask: LayerAttention | None = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        """Return ``[1, N, hidden]``; ``position_bias`` is from ``alibi_bias``."""
        assert attention_mask is not None
        fused = self.Wqkv(hidden_states)
        if self._largest:
            fused = fused.clamp(min=-self._largest, max=self._largest)
        tokens = fused.shape[1]
        parts = fused.view(1, tokens, 3, self._heads, -1).transpose(1, 3)  # [1, H, 3, N, d]
        query, key, value = parts.unbind(2)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self._layer)
        options = ScoreOptions(
            scaling=self._scaling, window=attention_mask.window, bias=position_bias
        )
        attended = attention_mask.step.attend(query, key, value, options)  # [1, N, H, d]
        return self.out_proj(attended.reshape(1, tokens, -1)), None


class FalconAttention(nn.Module):
    """Self-attention of Falcon with rotary positions; grouped heads are cached once.

    Args:
        attention: the self-attention module of transformers.
    """

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.query_key_value = attention.query_key_value
        self.dense = attention.dense
        self._kv_heads: int = attention.num_kv_heads
        self._head_dim: int = attention.head_dim
        self._layer: int = attention.layer_idx

    def forward(
        self,
        hidden_states: Tensor,
        alibi: None,
        attention_mask: LayerAttention,
        layer_past: KVView | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        """Return ``[1, N, hidden]``; ``alibi`` is not supported."""
        assert alibi is None
        assert position_embeddings is not None
        tokens, dim = hidden_states.shape[1], self._head_dim
        fused = self.query_key_value(hidden_states)
        groups = fused.view(1, tokens, self._kv_heads, -1, dim)  # queries, a key and a value
        query = groups[:, :, :, :-2].reshape(1, tokens, -1, dim).transpose(1, 2)
        key, value = groups[:, :, :, -2].transpose(1, 2), groups[:, :, :, -1].transpose(1, 2)
        cos, sin = position_embeddings
        query, key = apply_rotary_pos_emb(query, key, cos, sin)  # type: ignore[no-untyped-call]
        if layer_past is not None:
            key, value = layer_past.update(key, value, self._layer)
        options = ScoreOptions(scaling=dim**-0.5, window=attention_mask.window)
        attended = attention_mask.step.attend(query, key, value, options)  # [1, N, H, d]
        return self.dense(attended.reshape(1, tokens, -1)), None


class Llama4Attention(nn.Module):
    """Self-attention of Llama 4; scales queries without rotation by their own positions.

    transformers counts positions from the length of the cache, the same for all tokens of a step.

    Args:
        attention: the self-attention module of transformers.
    """

    def __init__(self, attention: Any) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, getattr(attention, name))
        self.qk_norm: nn.Module | None = getattr(attention, "qk_norm", None)
        self._head_dim: int = attention.head_dim
        self._layer: int = attention.layer_idx
        self._rotates = bool(attention.use_rope)
        self._is_tuned = bool(attention.attn_temperature_tuning) and not self._rotates
        self._floor, self._scale = float(attention.floor_scale), float(attention.attn_scale)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Tensor,
        attention_mask: LayerAttention,
        past_key_values: KVView | None = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        """Return ``[1, N, hidden]``; ``position_embeddings`` are complex rotations."""
        tokens, dim = hidden_states.shape[1], self._head_dim
        query, key, value = (
            self.get_submodule(name)(hidden_states).view(1, tokens, -1, dim)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        if self._rotates:
            query, key = apply_rotary_emb(query, key, position_embeddings)
        if self.qk_norm is not None:
            query, key = self.qk_norm(query), self.qk_norm(key)
        if self._is_tuned:
            assert attention_mask.positions is not None
            steps = torch.floor((attention_mask.positions.float() + 1.0) / self._floor)
            scales = torch.log1p(steps) * self._scale + 1.0  # [1, N]
            query = (query * scales[..., None, None]).to(query.dtype)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self._layer)
        options = ScoreOptions(
            scaling=dim**-0.5, window=attention_mask.window, chunk=attention_mask.chunk
        )
        attended = attention_mask.step.attend(query, key, value, options)  # [1, N, H, d]
        return self.get_submodule("o_proj")(attended.reshape(1, tokens, -1)), None


_REPLACED: dict[str, Callable[[Any], nn.Module]] = {
    "BloomAttention": AlibiAttention,
    "FalconAttention": FalconAttention,
    "Llama4TextAttention": Llama4Attention,
    "MptAttention": MptAttention,
}
_SPLIT = frozenset({"CodeGenAttention", "GPTJAttention"})


def use_own_attention(layer: nn.Module) -> bool:
    """Replace the attention of a layer, if it is one of this module's; return whether it is."""
    for name, part in list(layer.named_modules()):
        kind = type(part).__name__
        if kind in _SPLIT:
            part._attn = partial(_attend, part.head_dim**-0.5)
            return True
        if kind in _REPLACED:
            if type(part).__module__.startswith("transformers."):
                layer.set_submodule(name, _REPLACED[kind](part))
            return True
        if isinstance(part, AlibiAttention):
            return True
    return False


def _attend(
    scaling: float, query: Tensor, key: Tensor, value: Tensor, attention_mask: LayerAttention
) -> tuple[Tensor, None]:
    """Attend in place of a method of transformers: ``[1, H, N, d]`` to the same shape."""
    options = ScoreOptions(scaling=scaling, window=attention_mask.window)
    attended = attention_mask.step.attend(query.to(value.dtype), key, value, options)
    return attended.transpose(1, 2), None
