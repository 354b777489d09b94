"""A layer's entry in the store: which tensors it holds, and the matrices made of them again.

Where the kernels of a run keep tiles, its entries hold those tiles: the next start copies them from
the disk to where they are multiplied, and has nothing else to do. Other kernels' runs store packed
rows. Either kind of run reads either kind of entry, at the price of bringing the codes into its own
order. This module refuses to open files (``quant.entry_file``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from llmpq.kernels.packed import PackedWeight, packed_row_bytes
from llmpq.kernels.tiled import TiledWeight, fits_tiles, tiled_shapes
from llmpq.models.sources import Allocate
from llmpq.quant.assembly import Matrix
from llmpq.quant.entry_file import Entry, EntryLayout
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
    return EntryLayout(tensors)


def matrix_in(
    entry: Entry, matrix: Matrix, precision: Precision, lend: Allocate
) -> PackedWeight | TiledWeight:
    """Read a matrix of an entry; codes or tiles are in memory that ``lend`` made.

    Raises:
        SpecError: what ``Entry.read`` refuses.
        OSError: the file is gone.
    """
    names = [name for part in _PARTS if (name := f"{matrix.name}.{part}") in entry.layout.tensors]
    found = entry.read(names, lend)
    parts = {name.rpartition(".")[2]: tensor for name, tensor in found.items()}
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
