"""The attention function that a stage's layers call: the store's own for decode, else torch's.

transformers lets anyone register an attention function by name; the layers stay its own. In decode
a store may attend by itself, row by row on the slots it keeps; the mask's place in the call then
carries who does it. Everything else goes to torch's ``scaled_dot_product_attention``.

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
"""Name of :func:`attend` among transformers' attention functions."""
_REGISTRY = "ALL_ATTENTION_FUNCTIONS"
_FOREIGN = ("softcap", "s_aux", "position_bias")
"""Arguments that some family's function knows, and a store does not."""


class AttendingView(KVView, Protocol):
    """The keys and values of one decode micro-batch, attended to where they lie."""

    def attend(
        self, query: Tensor, scaling: float, window: int | None, bias: Tensor | None = None
    ) -> Tensor:
        """Keep what ``update`` was given last, and return ``[R, 1, H, d]`` for its layer.

        ``bias``, float32 ``[H, S]``, is added to the scaled scores.
        """
        ...


@runtime_checkable
class AttendingStore(KVStore, Protocol):
    """A store that may attend by itself."""

    def attending_view(self, batch: MicroBatch) -> AttendingView | None:
        """Open the slots of a decode micro-batch; ``None`` when torch must attend."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotMask:
    """Stands where layers pass a mask on: rows see their own tokens, the last ``window`` of them.

    Attributes:
        view: attends.
        window: tokens a query sees, ``None`` for all.
    """

    view: AttendingView
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
    """Attend as transformers' ``sdpa`` does: ``[R, T, H, d]`` from ``query`` ``[R, H, T, d]``."""
    if isinstance(attention_mask, SlotMask):
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attention_mask.view.attend(query, scaling, attention_mask.window), None
    groups = query.shape[1] // key.shape[1]
    is_plain = attention_mask is None and not any(kwargs.get(name) is not None for name in _FOREIGN)
    if is_plain and groups > 1 and query.device.type == "cpu" and query.shape[2] == key.shape[2]:
        # Left to itself, transformers asks torch for groups, which on a CPU has no fast kernel.
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
        out = scaled_dot_product_attention(query, key, value, scale=scaling, is_causal=True)
        return out.transpose(1, 2).contiguous(), None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, **kwargs
    )


AttentionInterface.register(SLOT_ATTENTION, attend)


def install(layer: nn.Module) -> bool:
    """Let ``layer`` call :func:`attend` where it would call ``sdpa``; tell whether it will.

    Only attention modules that look their function up by name can be told; one that calls torch
    itself, or another function, is left alone.
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
