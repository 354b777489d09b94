"""KVCache: keys and values of a stage's layers, preallocated; SlotPool: who owns which slot.

All memory is taken when the stage starts, so a plan that fits goes on fitting. A slot holds one
sequence; a micro-batch names its slots in any order and its rows may have any lengths. Only the
two private functions that write and read a layer know how values are stored.

Shapes: R rows, T new tokens per row, S cached tokens read, h KV heads, d head_dim.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmpq.errors import CapacityError, LlmpqError, SpecError, StageError
from llmpq.models import KVShape, MicroBatch


class KVCache:
    """Preallocated keys and values, ``[slots, h, max_tokens, d]`` twice for each layer.

    Args:
        shapes: of each layer, in order, from ``kv_shapes``.
        first_layer: index of the first of them in the whole model.
        num_slots: sequences held at once.
        max_tokens: longest sequence, prompt and generated tokens together.
        dtype: number format of keys and values.
        device: where they live.

    Raises:
        CapacityError: no slots or no tokens.
    """

    def __init__(
        self,
        shapes: Sequence[KVShape],
        first_layer: int,
        *,
        num_slots: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        if num_slots < 1 or max_tokens < 1:
            raise CapacityError(f"KV cache: found {num_slots} slots of {max_tokens} tokens")
        self.first_layer = first_layer
        self.num_slots = num_slots
        self.max_tokens = max_tokens
        self.device = torch.device(device)
        sizes = [(num_slots, shape.heads, max_tokens, shape.head_dim) for shape in shapes]
        self._keys = [torch.zeros(size, dtype=dtype, device=device) for size in sizes]
        self._values = [torch.zeros(size, dtype=dtype, device=device) for size in sizes]

    @property
    def nbytes(self) -> int:
        """Bytes held: ``2 * slots * h * max_tokens * d`` values for each layer."""
        return sum(tensor.nbytes for tensor in (*self._keys, *self._values))

    def view(self, batch: MicroBatch) -> SlotView:
        """Open the slots of ``batch`` for one forward pass.

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
        return SlotView(self, _Rows.of(batch, self.device))

    def clear(self, slots: Sequence[int]) -> None:
        """Zero the slots.

        Stale values of an earlier owner are masked, yet zero weight times infinity is not zero:
        whoever ends a request whose numbers overflowed clears its slot.
        """
        for tensor in (*self._keys, *self._values):
            tensor[list(slots)] = 0

    def _update(
        self, layer_idx: int, key: Tensor, value: Tensor, rows: _Rows
    ) -> tuple[Tensor, Tensor]:
        layer = layer_idx - self.first_layer
        if not 0 <= layer < len(self._keys):
            raise StageError(f"KV cache: found layer {layer_idx}, which is not of this stage")
        heads, head_dim = self._keys[layer].shape[1], self._keys[layer].shape[3]
        for new in (key, value):
            if (new.shape[1], new.shape[3]) != (heads, head_dim):
                raise SpecError(
                    f"KV cache: layer {layer_idx} makes {new.shape[1]} heads of {new.shape[3]}, "
                    f"its configuration says {heads} of {head_dim}"
                )
        rows.write(self._keys[layer], key)
        rows.write(self._values[layer], value)
        # Attention runs in the layer's own number format, whatever the store's.
        keys = rows.read(self._keys[layer]).to(key.dtype)
        return keys, rows.read(self._values[layer]).to(value.dtype)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Rows:
    """Where the rows of one micro-batch lie in every layer's tensors.

    Attributes:
        slots: of each row, ``[R]``, on the cache's device.
        longest: tokens read of each slot.
        block: the slots as a slice when they lie side by side in order: reading copies nothing.
        span: the new tokens' positions when they are the same in every row and none is padding.
        row: row, and
        column: column of each valid new token when there is no such span, ``[n]``.
        slot: slot, and
        position: position of each valid new token, ``[n]``.
    """

    slots: Tensor
    longest: int
    block: slice | None
    span: slice | None
    row: Tensor
    column: Tensor
    slot: Tensor
    position: Tensor

    @classmethod
    def of(cls, batch: MicroBatch, device: torch.device) -> _Rows:
        slots = batch.slots.tolist()
        first = int(batch.positions[0, 0])
        is_block = slots == list(range(slots[0], slots[0] + len(slots)))
        is_flush = bool((batch.lengths == first + batch.width).all())
        is_level = bool((batch.positions[:, 0] == first).all())
        row, column = (batch.positions < batch.lengths[:, None]).nonzero(as_tuple=True)
        return cls(
            slots=batch.slots.to(device),
            longest=batch.longest,
            block=slice(slots[0], slots[0] + len(slots)) if is_block else None,
            span=slice(first, first + batch.width) if is_flush and is_level else None,
            row=row.to(device),
            column=column.to(device),
            slot=batch.slots[row].to(device),
            position=batch.positions[row, column].to(device),
        )

    def write(self, store: Tensor, new: Tensor) -> None:
        """Put ``new [R, h, T, d]`` into ``store [slots, h, max_tokens, d]``, padding left out."""
        if self.block is not None and self.span is not None:
            store[self.block, :, self.span] = new
        else:
            store[self.slot, :, self.position] = new[self.row, :, self.column].to(store.dtype)

    def read(self, store: Tensor) -> Tensor:
        """The rows' tokens so far, ``[R, h, S, d]``: a view when the slots lie side by side."""
        if self.block is not None:
            return store[self.block, :, : self.longest]
        return store[:, :, : self.longest].index_select(0, self.slots)


@dataclass(frozen=True, slots=True, eq=False)
class SlotView:
    """One micro-batch's window on a cache, in the form transformers' attention calls."""

    cache: KVCache
    rows: _Rows

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Store ``[R, h, T, d]`` of one layer and return its rows so far, ``[R, h, S, d]``."""
        return self.cache._update(layer_idx, key, value, self.rows)


class SlotPool:
    """Hands out KV slots; the lowest free one first, so that rows tend to lie side by side.

    Args:
        num_slots: slots ``[0, num_slots)``.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots))
        self._owned: set[int] = set()

    @property
    def in_use(self) -> int:
        """Slots that have an owner."""
        return len(self._owned)

    def acquire(self) -> int:
        """Take the lowest free slot.

        Raises:
            CapacityError: every slot has an owner.
        """
        if not self._free:
            raise CapacityError(f"KV slots: all {self.num_slots} are in use")
        slot = heapq.heappop(self._free)
        self._owned.add(slot)
        return slot

    def release(self, slot: int) -> None:
        """Give a slot back.

        Raises:
            LlmpqError: nobody owns it, so releasing it again could give it two owners.
        """
        if slot not in self._owned:
            raise LlmpqError(f"KV slots: slot {slot} is released but nobody owns it")
        self._owned.remove(slot)
        heapq.heappush(self._free, slot)
