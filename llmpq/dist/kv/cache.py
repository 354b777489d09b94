"""KVCache: keys and values of a stage's layers, preallocated.

All memory is allocated when the stage starts. A slot holds one sequence; a micro-batch may use any
slots in any order, and its rows may have different lengths. ``kv.storage`` stores the values in the
run's dtype or at 8 bits.

Shapes: R rows, T new tokens per row, S cached tokens read, h KV heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmpq.dist.kv.storage import (
    DequantizeBuffer,
    Int8KVStorage,
    KVStorage,
    PlainKVStorage,
    SlotMapping,
    TokenIndex,
)
from llmpq.errors import CapacityError, SpecError, StageError
from llmpq.kernels.cpu.slot_attention import SlotCall, can_attend
from llmpq.models import KVShape, MicroBatch


class KVCache:
    """Preallocated keys and values of each layer, for ``num_slots`` sequences.

    At 8 bits all layers read into one buffer, so the result of :meth:`KVCacheView.update` is valid
    until the next layer's update. The layers of transformers run one after the other.

    Args:
        shapes: of each layer, in order, from ``kv_shapes``.
        first_layer: index of the first of them in the whole model.
        num_slots: sequences held at once.
        max_tokens: longest sequence, prompt and generated tokens together.
        dtype: of the run, and of keys and values unless ``kv_bits`` is 8.
        device: where they lie.
        kv_bits: 8 to quantize keys and values per token and head; ``None`` or the width of
            ``dtype`` to keep them.
        read_tokens: most tokens of all rows that a micro-batch reads; at 8 bits their memory is
            allocated at once. By default all tokens of all slots.

    Raises:
        CapacityError: there are no slots or no tokens.
        SpecError: ``kv_bits`` is neither 8 nor the dtype's own width.
    """

    def __init__(  # noqa: PLR0913  sizes, dtypes and device
        self,
        shapes: Sequence[KVShape],
        first_layer: int,
        *,
        num_slots: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        kv_bits: int | None = None,
        read_tokens: int | None = None,
    ) -> None:
        if num_slots < 1 or max_tokens < 1:
            raise CapacityError(f"KV cache: found {num_slots} slots of {max_tokens} tokens")
        width = 8 * dtype.itemsize
        if kv_bits not in (None, 8, width):
            raise SpecError(f"KV cache: found {kv_bits} bits, expected 8 or the {width} of {dtype}")
        self.first_layer = first_layer
        self.num_slots = num_slots
        self.max_tokens = max_tokens
        self.device = torch.device(device)
        self._dtype = dtype
        size = (num_slots, max_tokens)
        self._buffer: DequantizeBuffer | None = None
        self._layers: list[KVStorage]
        if kv_bits == 8:
            widest = max((2 * shape.heads * shape.head_dim for shape in shapes), default=0)
            tokens = num_slots * max_tokens if read_tokens is None else read_tokens
            self._buffer = DequantizeBuffer(widest * tokens, dtype, self.device)
            self._layers = [
                Int8KVStorage(shape, size, self._buffer, self.device) for shape in shapes
            ]
        else:
            self._layers = [PlainKVStorage(shape, size, dtype, self.device) for shape in shapes]

    @property
    def nbytes(self) -> int:
        """Bytes of the slots: ``2 * slots * h * max_tokens`` heads in each layer.

        A head has ``d`` values; at 8 bits ``d`` bytes and a scale of two.
        """
        return sum(layer.nbytes for layer in self._layers)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffer that 8-bit keys and values are read into; 0 at full width."""
        return 0 if self._buffer is None else self._buffer.nbytes

    def view(self, batch: MicroBatch) -> KVCacheView:
        """Open the slots of ``batch`` for one forward pass.

        Raises:
            CapacityError: a row is longer than ``max_tokens``.
            StageError: a slot does not exist or is used twice.
        """
        self.check(batch)
        return KVCacheView(self, SlotMapping.of(batch, self.device))

    def view_of_tensors(
        self, slots: Tensor, positions: Tensor, longest: int, block: slice | None
    ) -> KVCacheView:
        """Open slots given by tensors on the device: see ``SlotMapping.of_tensors``.

        The caller passes every batch to :meth:`check` before it fills the tensors.
        """
        return KVCacheView(self, SlotMapping.of_tensors(slots, positions, longest, block))

    def attention_view(self, batch: MicroBatch) -> DecodeAttentionView | None:
        """Open the slots of a decode micro-batch for attention without a copy.

        ``None`` if there is no kernel: not a CPU, no compiler, an unsupported head size.

        Raises:
            CapacityError: a row is longer than ``max_tokens``.
            StageError: a slot does not exist or is used twice.
        """
        stored, dtype = self._layers[0].slot_heads.keys, self._dtype
        if self.device.type != "cpu" or not can_attend(dtype, stored.dtype, stored.shape[-1]):
            return None
        self.check(batch)
        return DecodeAttentionView(self, SlotCall(batch.slots, batch.lengths))

    def check(self, batch: MicroBatch) -> None:
        """Check that the rows have different slots and fit them.

        Raises:
            CapacityError: a row is longer than ``max_tokens``.
            StageError: a slot does not exist or is used twice.
        """
        slots = batch.slots.tolist()
        if min(slots) < 0 or max(slots) >= self.num_slots or len(set(slots)) != len(slots):
            raise StageError(
                f"KV cache: found slots {slots}, expected different ones of [0, {self.num_slots})"
            )
        if batch.longest > self.max_tokens:
            raise CapacityError(
                f"KV cache: a row has {batch.longest} tokens, a slot holds {self.max_tokens}"
            )

    def pack(self, layer_idx: int, tokens: TokenIndex) -> Tensor:
        """Return the stored bytes of some tokens of a layer: uint8 ``[N, B]``.

        :meth:`unpack` of another rank's cache of that layer stores the same values, also at 8 bits.
        """
        return self._layers[layer_idx - self.first_layer].pack(tokens)

    def unpack(self, layer_idx: int, tokens: TokenIndex, data: Tensor) -> None:
        """Store what another cache has packed."""
        self._layers[layer_idx - self.first_layer].unpack(tokens, data)

    def clear(self, slots: Sequence[int]) -> None:
        """Zero the slots.

        Stale values are masked, but zero times infinity is not zero: clear the slot of a request
        whose numbers overflowed.
        """
        for layer in self._layers:
            layer.clear(list(slots))

    def storage_of(self, layer_idx: int, key: Tensor, value: Tensor) -> KVStorage:
        """Return the storage of a layer whose new keys and values are ``[R, h, T, d]``.

        Raises:
            StageError: the layer is not of this stage.
            SpecError: the keys or values do not have the configured heads.
        """
        layer = layer_idx - self.first_layer
        if not 0 <= layer < len(self._layers):
            raise StageError(f"KV cache: found layer {layer_idx}, which is not of this stage")
        shape = self._layers[layer].shape
        heads, head_dim = shape.heads, shape.head_dim
        for new in (key, value):
            if (new.shape[1], new.shape[3]) != (heads, head_dim):
                raise SpecError(
                    f"KV cache: layer {layer_idx} makes {new.shape[1]} heads of {new.shape[3]}, "
                    f"its configuration says {heads} of {head_dim}"
                )
        return self._layers[layer]


@dataclass(frozen=True, slots=True, eq=False)
class KVCacheView:
    """The slots of one micro-batch, as the attention of transformers calls a cache."""

    cache: KVCache
    mapping: SlotMapping

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Store ``[R, h, T, d]`` of one layer and return its rows so far, ``[R, h, S, d]``."""
        return self.cache.storage_of(layer_idx, key, value).update(self.mapping, key, value)


class DecodeAttentionView:
    """Attention of one decode micro-batch on a cache: ``attend`` stores what ``update`` received.

    Args:
        cache: of the keys and values.
        call: the kernel call for the rows.
    """

    def __init__(self, cache: KVCache, call: SlotCall) -> None:
        self._cache = cache
        self._call = call
        self._pending: tuple[KVStorage, Tensor, Tensor] | None = None

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Receive ``[R, h, 1, d]`` of one layer, and return it."""
        self._pending = (self._cache.storage_of(layer_idx, key, value), key, value)
        return key, value

    def attend(
        self, query: Tensor, scaling: float, window: int | None, bias: Tensor | None = None
    ) -> Tensor:
        """Store what ``update`` received last; return ``[R, 1, H, d]`` for its layer.

        ``bias``, float32 ``[H, S]``, is added to the scaled scores.
        """
        assert self._pending is not None, "update comes before attend"
        layer, key, value = self._pending
        self._pending = None
        new, heads = (key, value), layer.slot_heads
        return self._call.attend(query, new, heads, scaling=scaling, window=window, bias=bias)
