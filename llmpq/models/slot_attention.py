"""The attention function of a stage's layers, registered in transformers by name.

In decode a KV store may compute attention itself, row by row on its slots: the mask argument is
then a ``SlotMask`` with the view that does it. Otherwise ``scaled_dot_product_attention`` runs.

Shapes: R rows, T new tokens per row, H heads, h KV heads, S cached tokens, d head_dim.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from llmpq.models.attention import KVStore, KVView, MicroBatch

SLOT_ATTENTION = "llmpq_slots"
"""Name of :func:`attend` in the registry of transformers."""
_REGISTRY = "ALL_ATTENTION_FUNCTIONS"
_FOREIGN = ("softcap", "s_aux", "position_bias")
"""Arguments of attention functions that a store does not support."""


class AttentionView(KVView, Protocol):
    """A view of one decode micro-batch that computes attention in place."""

    def attend(
        self, query: Tensor, scaling: float, window: int | None, bias: Tensor | None = None
    ) -> Tensor:
        """Store the keys and values of the last ``update`` and return ``[R, 1, H, d]``.

        ``bias``, float32 ``[H, S]``, is added to the scaled scores.
        """
        ...


@runtime_checkable
class AttentionStore(KVStore, Protocol):
    """A KV store that can compute attention."""

    def attention_view(self, batch: MicroBatch) -> AttentionView | None:
        """Return the view of a decode micro-batch; ``None`` if torch must compute attention."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotMask:
    """The mask argument of a layer whose attention is computed by a KV view.

    Attributes:
        view: computes the attention.
        window: tokens that a query sees, ``None`` for all.
    """

    view: AttentionView
    window: int | None


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | SlotMask | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention like ``sdpa`` of transformers: ``[R, T, H, d]`` from ``[R, H, T, d]``."""
    if isinstance(attention_mask, SlotMask):
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attention_mask.view.attend(query, scaling, attention_mask.window), None
    groups = query.shape[1] // key.shape[1]
    is_plain = attention_mask is None and not any(kwargs.get(name) is not None for name in _FOREIGN)
    if is_plain and groups > 1 and query.device.type == "cpu" and query.shape[2] == key.shape[2]:
        # transformers would use torch's grouping, which has no fast kernel on a CPU.
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
        out = scaled_dot_product_attention(query, key, value, scale=scaling, is_causal=True)
        return out.transpose(1, 2).contiguous(), None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, **kwargs
    )


AttentionInterface.register(SLOT_ATTENTION, attend)


def use_slot_attention(layer: nn.Module) -> bool:
    """Let ``layer`` call :func:`attend` in place of ``sdpa``; return whether it does.

    Only attention modules that look up their function by name support this.
    """
    found = [part for part in layer.modules() if _looks_up(part)]
    for part in found:
        config: Any = copy.copy(part.config)
        if config._attn_implementation == "sdpa":
            config._attn_implementation = SLOT_ATTENTION
            part.config = config
        elif config._attn_implementation != SLOT_ATTENTION:
            return False
    return bool(found)


def _looks_up(part: nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(part).forward), "__code__", None)
    return code is not None and _REGISTRY in code.co_names and hasattr(part, "config")
