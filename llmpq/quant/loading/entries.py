"""A layer's entry in the store: which tensors it holds, and the matrices made of them again.

Where the kernels of a run keep tiles, its entries hold those tiles: the next start multiplies them
where they lie in the file, and has nothing else to do. Other kernels' runs store packed
rows. Either kind of run reads either kind of entry, at the price of bringing the codes into its own
order. This module refuses to open files (``quant.entry_file``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from llmpq.kernels.cpu.tiled import TiledWeight, fits_tiles, tiled_shapes
from llmpq.kernels.packed import PackedWeight, packed_row_bytes
from llmpq.models.files.sources import Allocate
from llmpq.quant.loading.assembly import Matrix
from llmpq.quant.loading.entry_file import Entry, EntryLayout
from llmpq.spec.precision import Precision

_PARTS = ("tiles", "codes", "scales", "zeros")


def tiled_names(matrices: Iterable[Matrix], precision: Precision) -> frozenset[str]:
    """Return the names of the matrices that tiles can hold."""
    return frozenset(
        matrix.name
        for matrix in matrices
        if fits_tiles(
            matrix.out_features, matrix.in_features, precision.effective_group(matrix.in_features)
        )
    )


def entry_layout(
    matrices: Sequence[Matrix], precision: Precision, dtype: torch.dtype, tiled: Collection[str]
) -> EntryLayout:
    """Return the layout of a layer's entry.

    Args:
        matrices: of the layer, in its order.
        precision: of all of them.
        dtype: of the run, and so of scales and zeros.
        tiled: names of the matrices that are in tiles; the others are in rows.
    """
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for matrix in matrices:
        rows, columns = matrix.out_features, matrix.in_features
        if matrix.name in tiled:
            parts = tiled_shapes(rows, columns, precision, dtype)
        else:
            groups = (rows, columns // precision.effective_group(columns))
            row_bytes = packed_row_bytes(columns, precision.bits)
            parts = {"codes": (torch.uint8, (rows, row_bytes)), "scales": (dtype, groups)}
            if not precision.symmetric:
                parts["zeros"] = (dtype, groups)
        tensors |= {f"{matrix.name}.{part}": item for part, item in parts.items()}
    # Tiles first: their sizes are multiples of a cache line, those of scales need not be.
    return EntryLayout(dict(sorted(tensors.items(), key=lambda item: not _is_tiles(item[0]))))


def _is_tiles(name: str) -> bool:
    return name.endswith(".tiles")


def matrix_in(
    entry: Entry, matrix: Matrix, precision: Precision, lend: Allocate
) -> PackedWeight | TiledWeight:
    """Read a matrix of an entry; codes or tiles are in memory that ``lend`` made.

    Raises:
        SpecError: what ``Entry.read`` refuses.
        OSError: the file is gone.
    """
    found = entry.read(_names(entry, matrix), lend)
    return _matrix(matrix, precision, found)


def mapped_matrices(
    entry: Entry, matrices: Iterable[Matrix], precision: Precision, lend: Allocate
) -> list[TiledWeight | None]:
    """Return matrices in tiles where they lie in the entry's file, ``None`` for a damaged one.

    Raises:
        SpecError: what ``Entry.mapped`` refuses.
        OSError: the file is gone.
    """
    sound = entry.mapped(lend)
    found: list[TiledWeight | None] = []
    for matrix in matrices:
        names = _names(entry, matrix)
        whole = all(name in sound for name in names)
        made = _matrix(matrix, precision, {name: sound[name] for name in names}) if whole else None
        assert not isinstance(made, PackedWeight)
        found.append(made)
    return found


def _names(entry: Entry, matrix: Matrix) -> list[str]:
    return [name for part in _PARTS if (name := f"{matrix.name}.{part}") in entry.layout.tensors]


def _matrix(
    matrix: Matrix, precision: Precision, tensors: Mapping[str, Tensor]
) -> PackedWeight | TiledWeight:
    parts = {name.rpartition(".")[2]: tensor for name, tensor in tensors.items()}
    shape = (matrix.out_features, matrix.in_features)
    if "tiles" in parts:
        return TiledWeight.of_parts(*shape, precision, parts)
    return PackedWeight(
        out_features=shape[0],
        in_features=shape[1],
        precision=precision,
        codes=parts["codes"],
        scales=parts["scales"],
        zeros=parts.get("zeros"),
    )


def parts_of(packed: PackedWeight | TiledWeight) -> dict[str, Tensor]:
    """Return the tensors of a matrix by the names that its entry gives them."""
    if isinstance(packed, TiledWeight):
        return packed.parts
    parts = {"codes": packed.codes, "scales": packed.scales}
    return parts if packed.zeros is None else parts | {"zeros": packed.zeros}
