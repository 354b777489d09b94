"""Codes that are kept as they are stored; models in GPTQ's format, written by llmpq or gptqmodel.

GPTQ's format stores operators as codes, at a bitwidth that may differ between layers. They are
brought into a kernel's layout without expanding them to 16 bits.

AWQ and compressed-tensors store 3 and 4 bits in groups and 8 bits with one scale an output. Where
bits and groups are those of the plan, the codes are kept instead of rounded again: they become a
``PackedWeight`` of the same size; symmetric codes of 3 and 4 bits get zeros of 0.

Shape legend: N output features, K input features, G groups, b bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from llmpq.errors import SpecError
from llmpq.kernels.base import PackedWeight, pack_codes
from llmpq.models import Checkpoint
from llmpq.models.tensor_files import (
    Awq,
    DecodedSource,
    Encoded,
    Read,
    ScaledCodes,
    TensorSource,
    unpack_awq,
    unpack_words,
)
from llmpq.models.weights import part_spellings, stored_spellings
from llmpq.quant.checkpoint.format import PARTS, concatenate_rows, to_packed
from llmpq.quant.modules.layer import Matrix, matrices_of
from llmpq.spec.huggingface.quantization import (
    GptqConfig,
    find_config,
    is_gptq,
    parse_config,
    stored_head,
)
from llmpq.spec.precision import Precision

_LAYERS_KEPT = 4


class GptqCheckpoint:
    """A checkpoint in GPTQ's format, version 1 or 2, with any mixture of bitwidths.

    Args:
        model_dir: directory with ``config.json`` and safetensors weights.

    Attributes:
        checkpoint: reads the tensors that are not quantized.
        quantization: from ``config.json``.

    Raises:
        SpecError: as ``Checkpoint``, or ``config.json`` has no valid quantization.
    """

    def __init__(self, model_dir: Path | str) -> None:
        if not is_gptq(model_dir):
            raise SpecError(f"{model_dir}: found no quantization_config, expected one of GPTQ")
        self.directory = Path(model_dir)
        self.checkpoint = Checkpoint(model_dir)
        self.quantization: GptqConfig = parse_config(
            find_config(model_dir) or {}, str(self.directory / "config.json")
        )
        self._layer = lru_cache(maxsize=_LAYERS_KEPT)(self._find)

    @property
    def config(self) -> PreTrainedConfig:
        """Configuration of the whole model."""
        return self.checkpoint.config

    def bits(self, index: int) -> int:
        """Return the bitwidth of a layer; 16 if nothing of it is quantized.

        Raises:
            SpecError: operators of the layer have different bitwidths.
        """
        found = {precision.bits for precision, _ in self._layer(index).values()}
        if len(found) > 1:
            raise SpecError(
                f"{self.directory}: layer {index} mixes operators of {sorted(found)} bits, "
                "expected one bitwidth a layer"
            )
        return found.pop() if found else 16

    def check_bits(self, first_layer: int, bits: Sequence[int]) -> None:
        """Check that a plan has the stored bitwidths.

        Raises:
            SpecError: a layer of the plan has another bitwidth than the checkpoint's.
        """
        for index, wanted in enumerate(bits, start=first_layer):
            found = self.bits(index)
            if found != wanted:
                raise SpecError(
                    f"{self.directory}: layer {index} is stored at {found} bits and the plan "
                    f"wants {wanted}; plan for the checkpoint's own bits, or serve the model it "
                    "was made from"
                )

    def packed(self, index: int, name: str, scale_dtype: torch.dtype) -> PackedWeight | None:
        """Read one quantized matrix; ``None`` if it is stored at 16 bits.

        Args:
            index: of the layer.
            name: ``Matrix.name``: ``self_attn.q_proj``, or
                ``mlp.experts.gate_up_proj.3``.
            scale_dtype: dtype of the run.

        Raises:
            SpecError: tensors are missing or do not fit the model.
        """
        found = self._layer(index).get(name)
        if found is None:
            return None
        precision, (matrix, modules) = found
        shape = (matrix.out_features // len(modules), matrix.in_features)
        parts = [self._read(module, shape, precision, scale_dtype) for module in modules]
        try:
            return concatenate_rows(parts)
        except SpecError as error:
            raise SpecError(f"{self.directory}: {modules[0]}: {error}") from error

    def packed_head(self, shape: tuple[int, int], scale_dtype: torch.dtype) -> PackedWeight | None:
        """Read the LM head ``[V, K]``; ``None`` if it is stored at 16 bits.

        Raises:
            SpecError: tensors are missing or do not fit the model, or ``config.json`` differs.
        """
        precision = stored_head(self.directory)
        if precision is None:
            return None
        module = self.checkpoint.head_name("qweight").removesuffix(".qweight")
        return self._read(module, shape, precision, scale_dtype)

    def packed_keys(self, index: int) -> frozenset[str]:
        """Return the keys of a layer's ``state_dict`` that are stored as codes.

        Raises:
            SpecError: only some experts are quantized.
        """
        found = self._layer(index)
        keys = frozenset(matrix.key for _, (matrix, _) in found.values())
        for matrix in matrices_of(self.checkpoint.empty_layer(index)):
            if matrix.key in keys and matrix.name not in found:
                raise SpecError(
                    f"{self.directory}: layer {index}: {matrix.name} is not quantized and others "
                    f"of {matrix.key} are, expected all or none"
                )
        return keys

    def _find(self, index: int) -> dict[str, tuple[Precision, tuple[Matrix, tuple[str, ...]]]]:
        """Return every quantized matrix of a layer with the names of its stored modules."""
        prefix = self.checkpoint.layer_prefix(index)
        tensors = self.checkpoint.tensors
        found = {}
        for matrix in matrices_of(self.checkpoint.empty_layer(index)):
            for modules in stored_modules(prefix, matrix):
                if f"{modules[0]}.qweight" in tensors:
                    found[matrix.name] = (self._precision(modules), (matrix, modules))
                    break
        return found

    def _precision(self, modules: Sequence[str]) -> Precision:
        found = {self.quantization.precision(self.checkpoint.module_name(m)) for m in modules}
        precision = found.pop()
        if found or precision is None:
            raise SpecError(
                f"{self.quantization.where}: {modules[0]} is stored quantized, expected "
                "'dynamic' to say so, and the same for operators that run as one"
            )
        return precision

    def _read(
        self, module: str, shape: tuple[int, int], precision: Precision, scale_dtype: torch.dtype
    ) -> PackedWeight:
        tensors = self.checkpoint.tensors
        names = {f"{module}.{part}": part for part in PARTS}
        missing = [name for name in names if name not in tensors and not name.endswith("g_idx")]
        if missing:
            raise SpecError(f"{self.directory}: found no tensor '{missing[0]}'")
        parts: Mapping[str, Tensor] = {
            part: tensors.load(tensors.source(name))
            for name, part in names.items()
            if name in tensors
        }
        offset = self.quantization.zero_offset
        try:
            return to_packed(parts, shape, precision, scale_dtype, zero_offset=offset)
        except SpecError as error:
            raise SpecError(f"{tensors.where(f'{module}.qweight')}: {error}") from error


def stored_modules(prefix: str, matrix: Matrix) -> Iterator[tuple[str, ...]]:
    """Yield the stored names of the modules that may hold a matrix; several run as one."""
    if matrix.expert is None:
        for name in stored_spellings(prefix + matrix.name):
            yield (name,)
        return
    for spelling in part_spellings(prefix + matrix.key):
        yield tuple(part.format(matrix.expert) for part in spelling)


def is_as_stored(source: TensorSource, precision: Precision) -> bool:
    """Return whether a matrix is stored in the bits and groups of a precision."""
    if not isinstance(source, DecodedSource) or precision.bits == 16:
        return False
    return all(_fits(part, precision) for part in source.parts)


def read_as_stored(
    source: TensorSource, precision: Precision, dtype: torch.dtype, read: Read
) -> PackedWeight | None:
    """Read a matrix that is stored in the bits and groups of a precision.

    Args:
        source: of the matrix, in one part or several along its outputs.
        precision: of the plan.
        dtype: of the run, to which scales and zeros are rounded.
        read: reads stored tensors.

    Returns:
        ``None`` for a matrix that is not, or if a scale is not finite and positive in ``dtype``.
    """
    if not is_as_stored(source, precision):
        return None
    assert isinstance(source, DecodedSource)
    parts = []
    for part in source.parts:
        codes, scales, zero_points = _integers(part, precision, read)
        half = 1 << (precision.bits - 1)
        zeros = None if precision.symmetric else ((half - zero_points) * scales).to(dtype)
        rounded = scales.to(dtype)
        is_valid = torch.isfinite(rounded).all() and (rounded > 0).all()
        if not is_valid or (zeros is not None and not torch.isfinite(zeros).all()):
            return None
        parts.append(
            PackedWeight(
                out_features=codes.shape[0],
                in_features=codes.shape[1],
                precision=precision,
                codes=pack_codes(codes, precision.bits),
                scales=rounded.contiguous(),
                zeros=None if zeros is None else zeros.contiguous(),
            )
        )
    return concatenate_rows(parts)


def _fits(part: Encoded, precision: Precision) -> bool:
    columns = part.shape[1]
    group = precision.effective_group(columns)
    if isinstance(part, Awq):
        groups = part.scales.shape[0]
        return precision.bits == 4 and not precision.symmetric and columns == groups * group
    if not isinstance(part, ScaledCodes) or part.groups is not None or part.block != (1, group):
        return False
    is_symmetric = part.zeros is None
    bits = 8 if part.codes.dtype == torch.int8 else part.bits
    return bits == precision.bits and (is_symmetric or not precision.symmetric)


def _integers(part: Encoded, precision: Precision, read: Read) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes uint8 ``[N, K]``, scales float32 and zero points int32 ``[N, G]``."""
    half = 1 << (precision.bits - 1)
    if isinstance(part, Awq):
        codes = unpack_awq(read(part.codes)).T.contiguous()
        zero_points = unpack_awq(read(part.zeros)).T.to(torch.int32)
        return codes, read(part.scales).T.to(torch.float32), zero_points
    assert isinstance(part, ScaledCodes)
    rows, columns = part.shape
    stored = read(part.codes)
    if part.bits is None:
        codes = stored.view(torch.uint8).bitwise_xor(0x80)  # adds 128
    else:
        codes = unpack_words(stored, part.bits, columns)
    scales = read(part.scales).to(torch.float32).view(rows, -1)
    if part.zeros is None:
        return codes, scales, torch.full(scales.shape, half, dtype=torch.int32)
    found = read(part.zeros)
    if found.dtype == torch.int32:
        zero_points = unpack_words(found.T.contiguous(), precision.bits, rows).T.to(torch.int32)
    else:
        zero_points = found.view(rows, -1).to(torch.int32) + half
    return codes, scales, zero_points
