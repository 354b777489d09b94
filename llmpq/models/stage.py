"""DecoderStage: the decoder layers ``[first_layer, end_layer)`` of transformers, on ragged rows.

A stage calls the modules of transformers with masks, positions and a KV store.

Shapes: R rows, T tokens per row, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from llmpq.errors import SpecError
from llmpq.models.adapter import Skeleton, accepts
from llmpq.models.alibi import alibi_bias, use_alibi_attention
from llmpq.models.attention import (
    KVStore,
    KVView,
    MicroBatch,
    additive_mask,
    keys_before,
    needs_no_mask,
    visible_keys,
)
from llmpq.models.config import kv_shapes, layer_window
from llmpq.models.families import TESTED, Family, family_of
from llmpq.models.rotary import RotaryTables, build_rotary
from llmpq.models.slot_attention import AttentionStore, AttentionView, SlotMask, use_slot_attention
from llmpq.spec.runtime_constants import ACTIVATION_BLOCK_VALUES

Mask = Tensor | SlotMask | None
LayerArguments = dict[str, Mask | KVView | tuple[Tensor, Tensor]]
"""Keyword arguments of a layer."""


class DecoderStage(nn.Module):
    """A contiguous range of decoder layers.

    Args:
        config: configuration of the whole model, from ``load_config``.
        layers: from ``build_layer`` in order, weights loaded.
        first_layer: index of ``layers[0]`` in the whole model.
        skeleton: skeleton of the model; by default it is built (5 ms).
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        layers: Sequence[nn.Module],
        first_layer: int,
        skeleton: Skeleton | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.first_layer = first_layer
        self.layers = nn.ModuleList(layers)
        rotary = build_rotary(config, skeleton)
        self.rotary = None if rotary is None else RotaryTables(rotary, config)
        family = family_of(config.model_type)
        self._has_alibi = family.alibi
        # AlibiAttention takes the same masks as sdpa.
        self._is_sdpa = config._attn_implementation == "sdpa" or family.alibi
        (shape,) = kv_shapes(config, 0, 1)
        self._has_groups = shape.heads < config.num_attention_heads
        # A KV view has one type, so the store attends for all layers or for none.
        is_known = family.attends_to_cache and config.model_type in TESTED
        self._may_attend = self._is_sdpa and all([_install(layer, family) for layer in layers])
        self._may_attend &= is_known
        self._windows = [layer_window(config, first_layer + i) for i in range(len(layers))]
        # BLOOM and GPT-NeoX kept the name from before the cache was an object.
        self._cache_arguments = [
            "layer_past" if accepts(layer.forward, "layer_past") else "past_key_values"
            for layer in layers
        ]
        self.eval()

    @property
    def end_layer(self) -> int:
        """Index after the last layer."""
        return self.first_layer + len(self.layers)

    @torch.inference_mode()
    def forward(self, hidden: Tensor, batch: MicroBatch, cache: KVStore | None = None) -> Tensor:
        """Run the layers on one micro-batch.

        Args:
            hidden: ``[R, T, H]``, rows padded on the right.
            batch: positions and slots of the rows.
            cache: KV store of these layers; ``None`` runs whole sequences from position 0.

        Returns:
            ``[R, T, H]``; values at padding are undefined.

        Raises:
            SpecError: ``hidden`` and ``batch`` have different shapes, or a row starts after
                position 0 without a cache.
        """
        if hidden.shape[:2] != batch.positions.shape:
            raise SpecError(
                f"micro-batch: found hidden states {list(hidden.shape)} for positions "
                f"{list(batch.positions.shape)}"
            )
        if cache is None and bool(batch.positions[:, 0].any()):
            raise SpecError("micro-batch: without a cache, expected rows that begin at position 0")
        attention = self._attention_view(cache, batch)
        view: KVView | None = attention
        if attention is None and cache is not None:
            view = cache.view(batch)
        masks = self._masks(hidden, batch, attention)
        positions = batch.query_positions.to(hidden.device)
        arguments = self._arguments(hidden, positions, batch.longest, view, masks)
        for index in range(len(self.layers)):
            hidden = self.run_layer(index, hidden, arguments[index])
        return hidden

    @torch.inference_mode()
    def decode_arguments(
        self, hidden: Tensor, positions: Tensor, view: KVView, longest: int
    ) -> list[LayerArguments]:
        """Return the arguments of every layer for one new token per row, computed on the device.

        The result depends on shapes only, so that a CUDA graph can capture it
        (``llmpq.dist.engine.cuda_graphs``).

        Args:
            hidden: ``[R, 1, H]``.
            positions: of the new tokens, ``[R, 1]`` int64 on the same device.
            view: KV view of the rows.
            longest: tokens that ``view`` returns of each row, at least the longest context.
        """
        masks: dict[int | None, Mask] = {}
        for window in set(self._windows):
            visible = keys_before(positions, longest, window)
            masks[window] = visible if self._is_sdpa else additive_mask(visible, hidden.dtype)
        return self._arguments(hidden, positions, longest, view, masks)

    @torch.inference_mode()
    def run_layer(self, index: int, hidden: Tensor, arguments: LayerArguments) -> Tensor:
        """Run layer ``index`` of the stage (from 0) on ``[R, T, H]``; return the same shape."""
        output = self.layers[index](hidden, **arguments)
        result: Tensor = output[0] if isinstance(output, tuple) else output
        return result

    def _arguments(
        self,
        hidden: Tensor,
        positions: Tensor,
        longest: int,
        view: KVView | None,
        masks: dict[int | None, Mask],
    ) -> list[LayerArguments]:
        shared: LayerArguments = {"position_ids": positions}
        if self._has_alibi:
            heads = self.config.num_attention_heads
            shared["alibi"] = alibi_bias(heads, longest, hidden)
        tables = None if self.rotary is None else self.rotary(hidden, positions)
        found = []
        for index in range(len(self.layers)):
            own = dict(shared)
            own[self._cache_arguments[index]] = view
            own["attention_mask"] = masks[self._windows[index]]
            if tables is not None:
                own["position_embeddings"] = tables[self.first_layer + index]
            found.append(own)
        return found

    def _attention_view(self, cache: KVStore | None, batch: MicroBatch) -> AttentionView | None:
        """Return the view that computes attention, if the store supports it."""
        if batch.width == 1 and self._may_attend and isinstance(cache, AttentionStore):
            return cache.attention_view(batch)
        return None

    def _masks(
        self, hidden: Tensor, batch: MicroBatch, attention: AttentionView | None
    ) -> dict[int | None, Mask]:
        """Return the mask of every window size among the layers."""
        if attention is not None:
            kinds = set(self._windows)
            return {window: SlotMask(view=attention, window=window) for window in kinds}
        is_sdpa = self._is_sdpa
        masks_decode = is_sdpa and self._has_groups and hidden.device.type == "cpu"
        masks: dict[int | None, Mask] = {}
        for window in set(self._windows):
            if needs_no_mask(batch, window, implied_causal=is_sdpa, masks_decode=masks_decode):
                masks[window] = None
                continue
            visible = visible_keys(batch, window, hidden.device)
            masks[window] = visible if is_sdpa else additive_mask(visible, hidden.dtype)
        return masks


def _install(layer: nn.Module, family: Family) -> bool:
    """Replace parts of a layer; return whether a KV store can compute its attention."""
    if family.activation is not None:
        use_blockwise_activation(layer, family.activation)
    if family.alibi:
        use_alibi_attention(layer)
        return True
    return use_slot_attention(layer)


class BlockwiseActivation(nn.Module):
    """An elementwise activation, computed in place for a block of rows at a time.

    The activations of BLOOM and Phi create five tensors as large as the feed-forward. Blocks bound
    that memory and stay in the cache of a core; the result is bit-identical.

    Args:
        activation: the module of transformers.
    """

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, values: Tensor) -> Tensor:
        """Return ``[..., features]``."""
        features = values.shape[-1]
        rows = max(1, ACTIVATION_BLOCK_VALUES // features)
        if values.numel() <= rows * features or values.device.type != "cpu":
            result: Tensor = self.activation(values)
            return result
        for block in torch.split(values.view(-1, features), rows):
            block.copy_(self.activation(block))
        return values


def use_blockwise_activation(layer: nn.Module, name: str) -> None:
    """Replace the activation ``name`` of ``layer``, such as ``mlp.gelu_impl``."""
    path, _, last = name.rpartition(".")
    owner = layer.get_submodule(path)
    activation = owner.get_submodule(last)
    if not isinstance(activation, BlockwiseActivation):
        setattr(owner, last, BlockwiseActivation(activation))
