"""TiledWeight: a quantized matrix in tiles, filled a block of rows at a time.

``csrc/kernels.h`` defines the tiles. They are the same on every machine, take as many bytes as the
codes, and can be multiplied where they are stored.

Shape legend: N output features, K input features, G groups of a row, b bits, R rows of a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from llmpq.kernels.cpu.native import library
from llmpq.kernels.packed import PackedWeight
from llmpq.spec.precision import Precision

TILE_ROWS = 16
TILE_COLUMNS = 32


def fits_tiles(out_features: int, in_features: int, group_size: int) -> bool:
    """Return whether a weight is whole tiles, none of which spans two groups."""
    whole = out_features % TILE_ROWS == 0 and in_features % TILE_COLUMNS == 0
    return whole and group_size % TILE_COLUMNS == 0


def tiled_shapes(
    out_features: int, in_features: int, precision: Precision, dtype: torch.dtype
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and shape of what a weight in tiles consists of, by the names of its parts."""
    groups = in_features // precision.effective_group(in_features)
    parts: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "tiles": (torch.uint8, (out_features * in_features * precision.bits // 8,)),
        "scales": (dtype, (groups, out_features)),
    }
    return parts if precision.symmetric else parts | {"zeros": (dtype, (groups, out_features))}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TiledWeight:
    """A weight ``[N, K]`` in tiles, with the codes of a ``PackedWeight``.

    Attributes:
        out_features: N.
        in_features: K.
        precision: bits, group size and symmetry.
        tiles: uint8 ``[N K b / 8]``, row blocks outermost.
        scales: ``[G, N]`` in the run's dtype.
        zeros: ``[G, N]``; ``None`` exactly when the precision is symmetric.
    """

    out_features: int
    in_features: int
    precision: Precision
    tiles: Tensor
    scales: Tensor
    zeros: Tensor | None

    @classmethod
    def of_parts(
        cls,
        out_features: int,
        in_features: int,
        precision: Precision,
        parts: Mapping[str, Tensor],
    ) -> TiledWeight:
        """Take the tensors of :func:`tiled_shapes`."""
        return cls(
            out_features=out_features,
            in_features=in_features,
            precision=precision,
            tiles=parts["tiles"],
            scales=parts["scales"],
            zeros=parts.get("zeros"),
        )

    @classmethod
    def empty(
        cls, out_features: int, in_features: int, precision: Precision, dtype: torch.dtype
    ) -> TiledWeight:
        """Return a weight whose content is undefined until all its rows were put in."""
        shapes = tiled_shapes(out_features, in_features, precision, dtype)
        parts = {name: torch.empty(shape, dtype=kind) for name, (kind, shape) in shapes.items()}
        return cls.of_parts(out_features, in_features, precision, parts)

    @property
    def parts(self) -> dict[str, Tensor]:
        """The tensors by the names of :func:`tiled_shapes`."""
        parts = {"tiles": self.tiles, "scales": self.scales}
        return parts if self.zeros is None else parts | {"zeros": self.zeros}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the scales: that of the run the weight was quantized for."""
        return self.scales.dtype

    @property
    def group_size(self) -> int:
        """Inputs that share one scale."""
        return self.precision.effective_group(self.in_features)

    def put_rows(self, first_row: int, block: PackedWeight) -> None:
        """Fill the tiles of rows ``[first_row, first_row + R)``; needs the compiled library.

        Args:
            first_row: a multiple of ``TILE_ROWS``, as R is.
            block: those rows.
        """
        rows = block.out_features
        assert first_row % TILE_ROWS == rows % TILE_ROWS == 0
        loaded = library()
        assert loaded is not None, "tiles are made by the compiled kernels, and there are none"
        codes = block.codes.contiguous()
        row_bytes = codes.numel() // rows
        part = self.tiles[first_row * row_bytes : (first_row + rows) * row_bytes]
        loaded.kernels_pack(
            codes.data_ptr(),
            part.data_ptr(),
            rows,
            self.in_features,
            self.precision.bits,
            torch.get_num_threads(),
        )
        self.scales[:, first_row : first_row + rows] = block.scales.t()
        if self.zeros is not None:
            assert block.zeros is not None
            self.zeros[:, first_row : first_row + rows] = block.zeros.t()
