"""StoredLayer: one layer's entry in the store, as this run would write it and as it may find it.

A damaged entry is removed once a matrix shows it; what was read and right stays in use. This module
refuses to quantize.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from llmpq.errors import SpecError
from llmpq.kernels.cpu.tiled import TiledWeight
from llmpq.kernels.packed import PackedWeight
from llmpq.models.files.sources import Allocate
from llmpq.quant.loading.assembly import Matrix
from llmpq.quant.loading.entries import entry_layout, mapped_matrices, matrix_in, tiled_names
from llmpq.quant.loading.entry_file import EntryWriter
from llmpq.quant.loading.store import Store, entry_key
from llmpq.spec.precision import Precision, linear_bytes


class StoredLayer:
    """A layer's entry.

    Args:
        store: where it is, or would go.
        fingerprint: of the layer's weights.
        matrices: of the layer.
        precision: of all of them.
        dtype: of the run.
        tiled: names of the matrices whose kernels keep tiles.

    Attributes:
        keeps_tiles: whether tiles of the entry can be multiplied as they are.
    """

    def __init__(
        self,
        store: Store,
        fingerprint: str,
        matrices: Sequence[Matrix],
        precision: Precision,
        dtype: torch.dtype,
        tiled: frozenset[str],
    ) -> None:
        self._store = store
        self._precision = precision
        self._itemsize = dtype.itemsize
        self._matrices = matrices
        names = [matrix.name for matrix in matrices]
        self._key = entry_key(fingerprint, [str(precision), str(dtype), *names])
        fitting = tiled_names(matrices, precision)
        # All that can be or none: then there are two kinds of entries to look for, not many.
        self.keeps_tiles = bool(tiled) and tiled == fitting
        rows = entry_layout(matrices, precision, dtype, frozenset())
        tiles = entry_layout(matrices, precision, dtype, fitting) if fitting else rows
        self._layout, other = (tiles, rows) if self.keeps_tiles else (rows, tiles)
        self._is_damaged = False
        self._telling = threading.Lock()
        self._entry = store.find(self._key, (self._layout, other))

    @property
    def is_found(self) -> bool:
        """Whether the store has the layer."""
        return self._entry is not None

    def begin(self) -> EntryWriter | None:
        """Begin to write the entry; ``None`` when the store will not have it."""
        return self._store.writer(self._key, self._layout)

    def held_bytes(self, matrix: Matrix) -> int:
        """Return what reading a matrix holds: twice as much where it comes in another form."""
        assert self._entry is not None
        nbytes = linear_bytes(
            matrix.out_features, matrix.in_features, self._precision, self._itemsize
        )
        return nbytes if self._entry.layout is self._layout else 2 * nbytes

    def read(self, matrix: Matrix, lend: Allocate) -> PackedWeight | TiledWeight | None:
        """Return a matrix in memory that ``lend`` made; ``None`` from the first damage on."""
        assert self._entry is not None
        if self._is_damaged:
            return None
        try:
            return matrix_in(self._entry, matrix, self._precision, lend)
        except (SpecError, OSError) as error:
            self._discard(error)
            return None

    def map(self) -> bool:
        """Map the entry, if all of its matrices are in tiles that can be multiplied there."""
        assert self._entry is not None
        names = {f"{matrix.name}.tiles" for matrix in self._matrices}
        return self.keeps_tiles and names <= self._entry.layout.tensors.keys() and self._entry.map()

    def mapped(self, lend: Allocate) -> list[TiledWeight | None]:
        """Return all matrices where they lie in the mapped entry, ``None`` for each damaged one.

        Args:
            lend: makes memory to read through.
        """
        assert self._entry is not None
        try:
            found = mapped_matrices(self._entry, self._matrices, self._precision, lend)
        except (SpecError, OSError) as error:
            self._discard(error)
            return [None] * len(self._matrices)
        if None in found:
            self._discard(self._entry.damage())
        return found

    def _discard(self, error: Exception) -> None:
        with self._telling:
            if not self._is_damaged:
                self._store.discard(self._key, error)
            self._is_damaged = True
