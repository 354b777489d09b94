"""DecoderStage: transformers' decoder layers ``[first_layer, end_layer)``, run on ragged rows.

The layers are the library's own modules; a stage gives them masks, positions and the KV store
that a whole model would. It never touches weights and knows nothing of precisions.

Shapes: R rows, T tokens per row, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from llmpq.errors import SpecError
from llmpq.models.activation import install_blocks
from llmpq.models.adapter import Skeleton, build_rotary, takes
from llmpq.models.alibi import alibi_bias, install_alibi
from llmpq.models.attention import (
    KVStore,
    KVView,
    MicroBatch,
    additive,
    keys_before,
    needs_no_mask,
    visible_keys,
)
from llmpq.models.config import kv_shapes, layer_window
from llmpq.models.families import CHECKED, Family, family_of
from llmpq.models.rotary import RotaryTables
from llmpq.models.slot_attention import AttendingStore, AttendingView, SlotMask, install

Mask = Tensor | SlotMask | None
LayerArguments = dict[str, Mask | KVView | tuple[Tensor, Tensor]]
"""What a layer is called with besides the hidden states."""


class DecoderStage(nn.Module):
    """A contiguous run of decoder layers.

    Args:
        config: from ``load_config``; of the whole model.
        layers: from ``build_layer`` in order, weights loaded.
        first_layer: index of ``layers[0]`` in the whole model.
        skeleton: the model's map, where the caller has it; else it is made, in 5 ms.
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
        # Ours, which takes the same masks, in the place of what writes scores out.
        self._is_sdpa = config._attn_implementation == "sdpa" or family.alibi
        (shape,) = kv_shapes(config, 0, 1)
        self._has_groups = shape.heads < config.num_attention_heads
        # Every layer, or none: a view is of one kind.
        is_known = family.attends_once and config.model_type in CHECKED
        self._may_attend = self._is_sdpa and all([_install(layer, family) for layer in layers])
        self._may_attend &= is_known
        self._windows = [layer_window(config, first_layer + i) for i in range(len(layers))]
        # BLOOM and GPT-NeoX kept the name from before the cache was an object.
        self._cache_arguments = [
            "layer_past" if takes(layer.forward, "layer_past") else "past_key_values"
            for layer in layers
        ]
        self.eval()

    @property
    def end_layer(self) -> int:
        """Index after the last layer."""
        return self.first_layer + len(self.layers)

    @torch.inference_mode()
    def forward(self, hidden: Tensor, batch: MicroBatch, cache: KVStore | None = None) -> Tensor:
        """Run the layers over one micro-batch.

        Args:
            hidden: ``[R, T, H]``, rows padded right.
            batch: positions and slots of the rows.
            cache: keys and values of these layers; ``None`` runs whole sequences from position 0
                without storing anything.

        Returns:
            ``[R, T, H]``; what stands at padding is meaningless.

        Raises:
            SpecError: ``hidden`` and ``batch`` have different shapes, or rows begin late with no
                cache to hold what came before.
        """
        if hidden.shape[:2] != batch.positions.shape:
            raise SpecError(
                f"micro-batch: found hidden states {list(hidden.shape)} for positions "
                f"{list(batch.positions.shape)}"
            )
        if cache is None and bool(batch.positions[:, 0].any()):
            raise SpecError("micro-batch: without a cache, expected rows that begin at position 0")
        attending = self._attending(cache, batch)
        view: KVView | None = attending
        if attending is None and cache is not None:
            view = cache.view(batch)
        masks = self._masks(hidden, batch, attending)
        positions = batch.query_positions.to(hidden.device)
        arguments = self._arguments(hidden, positions, batch.longest, view, masks)
        for index in range(len(self.layers)):
            hidden = self.run_layer(index, hidden, arguments[index])
        return hidden

    @torch.inference_mode()
    def decode_arguments(
        self, hidden: Tensor, positions: Tensor, view: KVView, longest: int
    ) -> list[LayerArguments]:
        """What every layer is called with for one new token a row, made on the device alone.

        In contrast to :meth:`forward`, which leaves masks out and picks kernels by the rows at
        hand, this
        depends on shapes only: a CUDA graph can hold it (``llmpq.dist.engine.cuda_graphs``).

        Args:
            hidden: ``[R, 1, H]``.
            positions: of the new tokens, ``[R, 1]`` int64 on the same device.
            view: of the rows' slots.
            longest: tokens that ``view`` gives of each row; at least those it has.
        """
        masks: dict[int | None, Mask] = {}
        for window in set(self._windows):
            visible = keys_before(positions, longest, window)
            masks[window] = visible if self._is_sdpa else additive(visible, hidden.dtype)
        return self._arguments(hidden, positions, longest, view, masks)

    @torch.inference_mode()
    def run_layer(self, index: int, hidden: Tensor, arguments: LayerArguments) -> Tensor:
        """Run the stage's layer ``index``, the first being 0: ``[R, T, H]`` from the same."""
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

    def _attending(self, cache: KVStore | None, batch: MicroBatch) -> AttendingView | None:
        """Open the cache as one that attends by itself, where it can."""
        if batch.width == 1 and self._may_attend and isinstance(cache, AttendingStore):
            return cache.attending_view(batch)
        return None

    def _masks(
        self, hidden: Tensor, batch: MicroBatch, attending: AttendingView | None
    ) -> dict[int | None, Mask]:
        """One mask for each kind of window among the layers."""
        if attending is not None:
            kinds = set(self._windows)
            return {window: SlotMask(view=attending, window=window) for window in kinds}
        is_sdpa = self._is_sdpa
        masks_decode = is_sdpa and self._has_groups and hidden.device.type == "cpu"
        masks: dict[int | None, Mask] = {}
        for window in set(self._windows):
            if needs_no_mask(batch, window, implied_causal=is_sdpa, masks_decode=masks_decode):
                masks[window] = None
                continue
            visible = visible_keys(batch, window, hidden.device)
            masks[window] = visible if is_sdpa else additive(visible, hidden.dtype)
        return masks


def _install(layer: nn.Module, family: Family) -> bool:
    """Put what is ours into a layer; tell whether a store may attend for it."""
    if family.activation is not None:
        install_blocks(layer, family.activation)
    if family.alibi:
        install_alibi(layer)
        return True
    return install(layer)
