"""A layer's entry in the store: which tensors it holds, and the matrices made of them again.

Where the kernels of a run keep tiles, its entries hold those tiles: the next start reads them to
where they are multiplied and has nothing else to do. Other kernels' runs store packed rows. Either
kind of run reads either kind of entry, at the price of bringing the codes into its own order. This
module refuses to read files (``quant.entry_file``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from llmpq.kernels.packed import PackedWeight, packed_row_bytes
from llmpq.kernels.tiled import TiledWeight, fits_tiles, tiled_shapes
from llmpq.quant.assembly import Matrix
from llmpq.quant.entry_file import CODES, EntryLayout
from llmpq.spec.precision import Precision


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
    lasting: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    passing: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for matrix in matrices:
        rows, columns = matrix.out_features, matrix.in_features
        if matrix.name in tiled:
            parts = tiled_shapes(rows, columns, precision, dtype)
            lasting |= {f"{matrix.name}.{part}": item for part, item in parts.items()}
            continue
        groups = columns // precision.effective_group(columns)
        row_bytes = packed_row_bytes(columns, precision.bits)
        passing[matrix.name + CODES] = (torch.uint8, (rows, row_bytes))
        passing[f"{matrix.name}.scales"] = (dtype, (rows, groups))
        if not precision.symmetric:
            passing[f"{matrix.name}.zeros"] = (dtype, (rows, groups))
    # Tiles are whole lines of 64 bytes, scales may be half ones: behind them, none is torn.
    tiles = {name: item for name, item in lasting.items() if name.endswith(".tiles")}
    return EntryLayout(tiles | lasting, passing)


def matrices_in(
    entry: dict[str, Tensor], matrices: Iterable[Matrix], precision: Precision
) -> Iterator[tuple[Matrix, PackedWeight | TiledWeight]]:
    """Yield the matrices of an entry, which is emptied meanwhile."""
    for matrix in matrices:
        shape = (matrix.out_features, matrix.in_features)
        names = ("tiles", "codes", "scales", "zeros")
        held = {name: f"{matrix.name}.{name}" for name in names}
        parts = {name: entry.pop(key) for name, key in held.items() if key in entry}
        if "tiles" in parts:
            yield matrix, TiledWeight.of_parts(*shape, precision, parts)
        else:
            yield matrix, _in_rows(shape, precision, parts)


def parts_of(packed: PackedWeight | TiledWeight) -> dict[str, Tensor]:
    """Return the tensors of a matrix by the names that its entry gives them."""
    if isinstance(packed, TiledWeight):
        return packed.parts
    parts = {"codes": packed.codes, "scales": packed.scales}
    return parts if packed.zeros is None else parts | {"zeros": packed.zeros}


def _in_rows(
    shape: tuple[int, int], precision: Precision, parts: Mapping[str, Tensor]
) -> PackedWeight:
    return PackedWeight(
        out_features=shape[0],
        in_features=shape[1],
        precision=precision,
        codes=parts["codes"],
        scales=parts["scales"],
        zeros=parts.get("zeros"),
    )
