"""KVCache: keys and values of a stage's layers, preallocated.

All memory is taken when the stage starts, so a plan that fits goes on fitting. A slot holds one
sequence; a micro-batch names its slots in any order and its rows may have any lengths. How values
are stored, in the run's dtype or at 8 bits, is ``kv_store``'s business.

Shapes: R rows, T new tokens per row, S cached tokens read, h KV heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmpq.dist.kv.storage import Int8Store, Places, PlainStore, ReadBuffer, Rows, Store
from llmpq.errors import CapacityError, SpecError, StageError
from llmpq.kernels.cpu.slot_attention import SlotCall, can_attend
from llmpq.models import KVShape, MicroBatch


class KVCache:
    """Preallocated keys and values of each layer, for ``num_slots`` sequences.

    At 8 bits a layer reads into a buffer that all layers share, so only the layer whose turn it is
    may use what :meth:`SlotView.update` gave it; transformers' layers run one after the other.

    Args:
        shapes: of each layer, in order, from ``kv_shapes``.
        first_layer: index of the first of them in the whole model.
        num_slots: sequences held at once.
        max_tokens: longest sequence, prompt and generated tokens together.
        dtype: number format of the run, and of keys and values unless ``kv_bits`` says otherwise.
        device: where they live.
        kv_bits: 8 to quantize keys and values per token and head; ``None`` to keep them.
        read_tokens: most tokens, of all rows together, that one micro-batch reads; at 8 bits their
            memory is taken at once. By default, all there is room for.

    Raises:
        CapacityError: no slots or no tokens.
        SpecError: ``kv_bits`` is neither 8 nor the dtype's own width.
    """

    def __init__(  # noqa: PLR0913  what is held, and how
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
        self._buffer: ReadBuffer | None = None
        self._layers: list[Store]
        if kv_bits == 8:
            widest = max((2 * shape.heads * shape.head_dim for shape in shapes), default=0)
            tokens = num_slots * max_tokens if read_tokens is None else read_tokens
            self._buffer = ReadBuffer(widest * tokens, dtype, self.device)
            self._layers = [Int8Store(shape, size, self._buffer, self.device) for shape in shapes]
        else:
            self._layers = [PlainStore(shape, size, dtype, self.device) for shape in shapes]

    @property
    def nbytes(self) -> int:
        """Bytes of the slots: of each layer ``2 * slots * h * max_tokens`` times a head's.

        A head takes ``d`` values; at 8 bits ``d`` bytes and a scale of two.
        """
        return sum(layer.nbytes for layer in self._layers)

    @property
    def buffer_bytes(self) -> int:
        """Bytes that 8-bit keys and values are read into, once for all layers; 0 at full width."""
        return 0 if self._buffer is None else self._buffer.nbytes

    def view(self, batch: MicroBatch) -> SlotView:
        """Open the slots of ``batch`` for one forward pass.

        Raises:
            CapacityError: a row is longer than ``max_tokens``.
            StageError: a slot that does not exist or is named twice, for two rows would mix.
        """
        self.check(batch)
        return SlotView(self, Rows.of(batch, self.device))

    def view_of_places(
        self, slots: Tensor, positions: Tensor, longest: int, block: slice | None
    ) -> SlotView:
        """Open slots that tensors on the device name: see ``Rows.of_places``.

        Whoever fills those has had every batch :meth:`check`-ed.
        """
        return SlotView(self, Rows.of_places(slots, positions, longest, block))

    def attending_view(self, batch: MicroBatch) -> SlotAttention | None:
        """Open the slots of a decode micro-batch for attention where they lie.

        ``None`` where that has no kernel: not on a CPU, no compiler, heads of an odd size.

        Raises:
            CapacityError: a row is longer than ``max_tokens``.
            StageError: a slot that does not exist or is named twice.
        """
        stored, dtype = self._layers[0].slot_heads.keys, self._dtype
        if self.device.type != "cpu" or not can_attend(dtype, stored.dtype, stored.shape[-1]):
            return None
        self.check(batch)
        return SlotAttention(self, SlotCall(batch.slots, batch.lengths))

    def check(self, batch: MicroBatch) -> None:
        """Make sure that the rows have slots of their own, and fit them.

        Raises:
            CapacityError: a row is longer than ``max_tokens``.
            StageError: a slot that does not exist or is named twice, for two rows would mix.
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

    def pack(self, layer_idx: int, places: Places) -> Tensor:
        """Return what a layer keeps of some tokens, as bytes: uint8 ``[N, B]``.

        For the cache of the same layer on another rank (:meth:`unpack`), which then reads the very
        values that this one does, 8-bit ones included.
        """
        return self._layers[layer_idx - self.first_layer].pack(places)

    def unpack(self, layer_idx: int, places: Places, data: Tensor) -> None:
        """Keep what another cache has packed. Who reads those tokens must wait for it."""
        self._layers[layer_idx - self.first_layer].unpack(places, data)

    def clear(self, slots: Sequence[int]) -> None:
        """Zero the slots.

        Stale values of an earlier owner are masked, yet zero weight times infinity is not zero:
        whoever ends a request whose numbers overflowed clears its slot.
        """
        for layer in self._layers:
            layer.clear(list(slots))

    def _update(
        self, layer_idx: int, key: Tensor, value: Tensor, rows: Rows
    ) -> tuple[Tensor, Tensor]:
        return self._layer(layer_idx, key, value).update(rows, key, value)

    def _layer(self, layer_idx: int, key: Tensor, value: Tensor) -> Store:
        """Return the store of a layer that made ``[R, h, T, d]``."""
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
class SlotView:
    """One micro-batch's window on a cache, in the form transformers' attention calls."""

    cache: KVCache
    rows: Rows

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Store ``[R, h, T, d]`` of one layer and return its rows so far, ``[R, h, S, d]``."""
        return self.cache._update(layer_idx, key, value, self.rows)


class SlotAttention:
    """One decode micro-batch's attention on a cache: what ``update`` is given waits for ``attend``.

    Args:
        cache: holds the keys and values.
        call: the rows.
    """

    def __init__(self, cache: KVCache, call: SlotCall) -> None:
        self._cache = cache
        self._call = call
        self._pending: tuple[Store, Tensor, Tensor] | None = None

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Take ``[R, h, 1, d]`` of one layer, and give it back."""
        self._pending = (self._cache._layer(layer_idx, key, value), key, value)
        return key, value

    def attend(
        self, query: Tensor, scaling: float, window: int | None, bias: Tensor | None = None
    ) -> Tensor:
        """Keep what ``update`` was given last; return ``[R, 1, H, d]`` for its layer.

        ``bias``, float32 ``[H, S]``, is added to the scaled scores.
        """
        assert self._pending is not None, "a layer attends to what it has put into the cache"
        layer, key, value = self._pending
        self._pending = None
        new, heads = (key, value), layer.slot_heads
        return self._call.attend(query, new, heads, scaling=scaling, window=window, bias=bias)
