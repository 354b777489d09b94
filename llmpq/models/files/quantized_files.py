"""QuantizedFiles: safetensors of codes and scales under the names of the weights they stand for.

Reads FP8 with block, channel or tensor scales (DeepSeek's layout and compressed-tensors'), the
integer formats of compressed-tensors, AWQ's GEMM layout and MXFP4 experts. Layouts are recognised
by the names, dtypes and shapes of tensors; the configuration gives bits and block sizes.

Shape legend: E experts, N output features, K input features.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from llmpq.errors import SpecError
from llmpq.models.files.decoded import DecodedSource, Encoded
from llmpq.models.files.scaled import Awq, Mxfp4Expert, Scaled
from llmpq.models.files.sources import TensorSource
from llmpq.models.files.tensor_files import TensorFiles
from llmpq.spec.huggingface.quantization import CodesConfig

_CODES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
_SCALES = ("weight_scale_inv", "weight_scale")
_PARTS = (
    *(f".{scale}" for scale in _SCALES),
    ".weight_packed",
    ".weight_shape",
    ".weight_zero_point",
    ".weight_g_idx",
    ".qweight",
    ".qzeros",
    ".scales",
    ".input_scale",
    ".input_zero_point",
    ".activation_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    "_blocks",
    "_scales",
)
"""Endings of tensors that belong to others, or that only 8-bit products would use."""


class QuantizedFiles(TensorFiles):
    """The tensors of a quantized model directory, decoded to float32 when they are read.

    Args:
        model_dir: directory with safetensors.
        quantization: from its ``config.json``.

    Raises:
        SpecError: as ``TensorFiles``, or codes without scales or in an unknown layout.
    """

    def __init__(self, model_dir: Path | str, quantization: CodesConfig) -> None:
        super().__init__(model_dir)
        self._quantization = quantization
        self._decoded: dict[str, tuple[tuple[Encoded, ...], tuple[int, ...]]] = {}
        for name in super().names:
            self._recognise(name)
        plain = [name for name in super().names if not name.endswith(_PARTS)]
        self._visible = list(dict.fromkeys([*plain, *self._decoded]))

    @property
    def names(self) -> Iterable[str]:
        """Every tensor of the model, codes under the name of their weight."""
        return self._visible

    @property
    def decodes(self) -> bool:
        """Whether matrices are decoded to float32 when they are read."""
        return True

    def __contains__(self, name: object) -> bool:
        return name in self._decoded or super().__contains__(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Dimensions of a tensor once decoded."""
        return self._decoded[name][1] if name in self._decoded else super().shape(name)

    def where(self, name: str) -> str:
        """File and tensor, for messages."""
        return super().where(self._decoded[name][0][0].name if name in self._decoded else name)

    def source(self, name: str) -> TensorSource:
        """Return the location of a tensor, without reading it; errors as ``TensorFiles``."""
        if name not in self._decoded:
            return super().source(name)
        return DecodedSource.of(*self._decoded[name])

    def _recognise(self, name: str) -> None:
        module, _, part = name.rpartition(".")
        if part == "weight" and super().source(name).dtype in _CODES:
            codes = super().source(name)
            scaled = self._scaled(module, codes, columns=codes.shape[-1], bits=None)
            self._decoded[name] = ((scaled,), scaled.shape)
        elif part == "weight_packed":
            self._recognise_packed(module, super().source(name))
        elif part == "qweight":
            codes, zeros, scales = (
                super(QuantizedFiles, self).source(f"{module}.{one}")
                for one in ("qweight", "qzeros", "scales")
            )
            self._check_awq(codes, zeros, scales)
            awq = Awq(codes=codes, zeros=zeros, scales=scales)
            self._decoded[f"{module}.weight"] = ((awq,), awq.shape)
        elif name.endswith("_blocks"):
            self._recognise_mxfp4(name.removesuffix("_blocks"))

    def _recognise_packed(self, module: str, codes: TensorSource) -> None:
        bits = self._quantization.bits(module)
        name = f"{module}.weight_packed"
        if codes.dtype != torch.int32 or len(codes.shape) != 2 or bits is None:
            raise SpecError(
                f"{super().where(name)}: found {codes.dtype} {list(codes.shape)}, expected int32 "
                "words of integers whose bits config.json states"
            )
        shape = self.load(super().source(f"{module}.weight_shape")).tolist()
        rows, columns = codes.shape[0], int(shape[-1])
        packed = {-(-columns * bits // 32), -(-columns // (32 // bits))}
        if len(shape) != 2 or shape[0] != rows or codes.shape[1] not in packed:
            raise SpecError(
                f"{super().where(name)}: found shape {list(codes.shape)} for a weight {shape} of "
                f"{bits} bits"
            )
        scaled = self._scaled(module, codes, columns=columns, bits=bits)
        self._decoded[f"{module}.weight"] = ((scaled,), (rows, columns))

    def _scaled(
        self, module: str, codes: TensorSource, *, columns: int, bits: int | None
    ) -> Scaled:
        where = super().where(codes.name)
        found = [
            name for name in _SCALES if super(QuantizedFiles, self).__contains__(f"{module}.{name}")
        ]
        if len(codes.shape) != 2 or not found:
            raise SpecError(f"{where}: found codes without a scale, expected a matrix with one")
        scales = super().source(f"{module}.{found[0]}")
        grid = (*scales.shape, 1, 1)[:2]
        rows = codes.shape[0]
        block = _block(grid, (rows, columns), self._quantization.block)
        if block is None:
            raise SpecError(
                f"{super().where(scales.name)}: found shape {list(scales.shape)}, expected scales "
                f"of blocks {self._quantization.block} of a weight {[rows, columns]}"
            )
        return Scaled(
            codes=codes,
            scales=scales,
            columns=columns,
            block=block,
            bits=bits,
            zeros=self._optional(f"{module}.weight_zero_point"),
            groups=self._optional(f"{module}.weight_g_idx"),
        )

    def _optional(self, name: str) -> TensorSource | None:
        return super().source(name) if super().__contains__(name) else None

    def _check_awq(self, codes: TensorSource, zeros: TensorSource, scales: TensorSource) -> None:
        shapes = [len(one.shape) == 2 for one in (codes, zeros, scales)]
        fits = all(shapes) and (
            zeros.shape == (scales.shape[0], codes.shape[1])
            and scales.shape[1] == codes.shape[1] * 8
            and codes.shape[0] % scales.shape[0] == 0
        )
        if not fits or codes.dtype != torch.int32 or zeros.dtype != torch.int32:
            raise SpecError(
                f"{super().where(codes.name)}: found shapes {list(codes.shape)}, "
                f"{list(zeros.shape)} and {list(scales.shape)}, expected AWQ's layout of 4 bits"
            )

    def _recognise_mxfp4(self, name: str) -> None:
        blocks, scales = super().source(f"{name}_blocks"), super().source(f"{name}_scales")
        shape = blocks.shape
        dtypes = (blocks.dtype, scales.dtype)
        if (
            len(shape) != 4
            or scales.shape != shape[:3]
            or shape[3] != 16
            or set(dtypes) != {torch.uint8}
        ):
            raise SpecError(
                f"{super().where(blocks.name)}: found shape {list(shape)} with scales "
                f"{list(scales.shape)}, expected blocks of 16 bytes with a scale each"
            )
        pairs = zip(blocks.rows(), scales.rows(), strict=True)
        experts = tuple(Mxfp4Expert(blocks=block, scales=scale) for block, scale in pairs)
        self._decoded[name] = (experts, (shape[0], shape[1], shape[2] * 32))


def _block(
    grid: tuple[int, ...], shape: tuple[int, int], stated: tuple[int, int] | None
) -> tuple[int, int] | None:
    """Return the rows and columns that share a scale, 0 for all rows; ``None`` if none fit."""
    rows, columns = shape
    is_stated = stated is not None and grid == (-(-rows // stated[0]), -(-columns // stated[1]))
    if is_stated and grid[0] != rows:
        return stated
    if columns % grid[1] or grid[0] not in (1, rows):
        return None
    return (1 if grid[0] == rows else 0), columns // grid[1]
