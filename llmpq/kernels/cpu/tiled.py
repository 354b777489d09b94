"""TiledWeight: a quantized matrix in tiles, filled a block of rows at a time, and read back.

``csrc/kernels.h`` draws the tiles. They are the same on every machine, weigh what the codes weigh,
and hold them all: what was stored in tiles can be multiplied where it is, or brought back into rows
where another kernel wants those. This module refuses to multiply (``llmpq.kernels.cpu.tiles``).

Shape legend: N output features, K input features, G groups of a row, b bits, R rows of a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from llmpq.kernels.cpu.native import library
from llmpq.kernels.packed import PackedWeight, pack_codes, row_blocks
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
    """A weight ``[N, K]`` in tiles; means what a ``PackedWeight`` of the same codes means.

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
        """Bring rows ``[first_row, first_row + R)`` into tiles; the compiled library must be there.

        Args:
            first_row: a multiple of ``TILE_ROWS``, as R is.
            block: those rows, as a weight of their own.
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

    def clone(self) -> TiledWeight:
        """Return a copy in memory of its own."""
        parts = {name: tensor.clone() for name, tensor in self.parts.items()}
        return self.of_parts(self.out_features, self.in_features, self.precision, parts)

    def to(self, device: torch.device | str) -> TiledWeight:
        """Return the weight on ``device``, to be brought into rows there."""
        parts = {name: tensor.to(device) for name, tensor in self.parts.items()}
        return self.of_parts(self.out_features, self.in_features, self.precision, parts)

    def packed(self) -> PackedWeight:
        """Return the same codes in rows, on the same device; needs no compiled library."""
        rows, columns, bits = self.out_features, self.in_features, self.precision.bits
        codes = torch.empty(
            (rows, columns * bits // 8), dtype=torch.uint8, device=self.tiles.device
        )
        for block in row_blocks(rows, columns, multiple=TILE_ROWS):
            tiles = self.tiles.view(rows // TILE_ROWS, -1)[
                block.start // TILE_ROWS : block.stop // TILE_ROWS
            ]
            codes[block] = _in_rows(tiles, bits)
        return PackedWeight(
            out_features=rows,
            in_features=columns,
            precision=self.precision,
            codes=codes,
            scales=self.scales.t().contiguous(),
            zeros=None if self.zeros is None else self.zeros.t().contiguous(),
        )


def _in_rows(tiles: Tensor, bits: int) -> Tensor:
    """Return the packed rows ``[R, K b / 8]`` of tiles ``[R / 16, K b / 2 * 4]``, both of bytes."""
    blocks = tiles.shape[0]
    if bits == 3:
        return _three_in_rows(tiles)
    lanes = tiles.view(blocks, -1, TILE_ROWS, 4)  # [R/16, vectors, lane, byte]
    if bits == 4:
        low, high = lanes[..., :2], lanes[..., 2:]  # nibbles of even columns, of odd ones
        pairs = torch.stack(
            ((low & 0x0F) | (high << 4), (low >> 4) | (high & 0xF0)), dim=-1
        )  # [R/16, vectors, lane, 2, 2]
        lanes = pairs.view(lanes.shape)
    return lanes.transpose(1, 2).reshape(blocks * TILE_ROWS, -1)


def _three_in_rows(tiles: Tensor) -> Tensor:
    blocks = tiles.shape[0]
    vectors = tiles.clone().view(torch.int32).view(blocks, -1, 3, TILE_ROWS)  # [R/16, tiles, 3, 16]
    codes = torch.empty(
        (blocks, vectors.shape[1], TILE_ROWS, TILE_COLUMNS), dtype=torch.uint8, device=tiles.device
    )
    for column in range(TILE_COLUMNS):
        pair, half = column // 2, column % 2 * 16
        if pair < 15:
            code = vectors[:, :, pair // 5] >> (half + 3 * (pair % 5)) & 7
        else:  # the pair whose bits fill what the others leave over
            bit = vectors >> (half + 15) & 1
            code = bit[:, :, 0] | bit[:, :, 1] << 1 | bit[:, :, 2] << 2
        codes[..., column] = code
    rows = codes.transpose(1, 2).reshape(blocks * TILE_ROWS, -1)  # [R, K]
    return pack_codes(rows, 3)
