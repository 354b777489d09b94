"""Load the LM head quantized: read and rounded in blocks of rows, or mapped from the store.

At most one block of unquantized rows is held in addition to the result. A head that is tied to the
token embedding stays one matrix, whose rows the embedding reads.

Shape legend: V vocabulary, K inputs, N rows of the quantized weight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from llmpq.errors import SpecError
from llmpq.kernels.base import KernelBackend
from llmpq.kernels.cpu.compiled_backends import TileBackend
from llmpq.kernels.cpu.dense import can_prepack
from llmpq.kernels.cpu.tiles import TiledWeight
from llmpq.kernels.packed import PackedWeight
from llmpq.kernels.registry import choose_backend
from llmpq.models import Checkpoint, Master
from llmpq.models.files.sources import TensorSource, on_host
from llmpq.quant.checkpoint.format import concatenate_rows
from llmpq.quant.loading.assembly import Matrix
from llmpq.quant.loading.layer_reader import is_as_stored, read_as_stored
from llmpq.quant.loading.weight_cache import (
    BackgroundWriter,
    WeightCache,
    entry_key,
    entry_layout,
    weight_of,
)
from llmpq.quant.modules.linear import DenseLinear, QuantHead, QuantLinear, TiedEmbedding, is_lookup
from llmpq.quant.quantizers.rtn import quantize
from llmpq.spec.precision import Precision, default_precision
from llmpq.spec.runtime_constants import HEAD_ROW_MULTIPLE

BLOCK_WEIGHTS = 1 << 21
"""Weights read and quantized at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLoad:
    """How a head is loaded.

    Attributes:
        bits: 3, 4 or 8.
        dtype: of the run.
        device: where it goes.
        backend: kernel backend to prefer; ``None`` leaves it to the registry.
        cache: of quantized weights, read and written; ``None`` for none.
    """

    bits: int
    dtype: torch.dtype
    device: torch.device
    backend: str | None = None
    cache: WeightCache | None = None


def head_key(master: Master) -> str:
    """Return the key of the head's matrix in the master's ``state_dict``."""
    return f"{master.embedding_name}.weight" if master.lm_head is None else "lm_head.weight"


def install_head_(
    master: Master, checkpoint: Checkpoint, source: TensorSource, load: HeadLoad
) -> None:
    """Put a quantized head into a master, and the embedding that reads it where they are tied.

    Args:
        master: whose other weights are loaded.
        checkpoint: of the weights.
        source: of the head's matrix ``[V, K]``.
        load: bits, dtype and place.

    Raises:
        SpecError: no backend multiplies by such a weight, or as ``Checkpoint`` and ``quantize``.
    """
    embedding = master.get_submodule(master.embedding_name)
    is_tied = master.lm_head is None
    rows = _filled_rows(source.shape[0])
    kernel = _kernel(default_precision(load.bits), rows, source.shape[1], load, is_tied=is_tied)
    linear = _linear(master, _weight(checkpoint, source, rows, kernel, load), kernel)
    if is_tied:
        master.set_submodule(master.embedding_name, TiedEmbedding(linear, embedding))
    master.lm_head = QuantHead(linear, source.shape[0])


def install_stored_head_(master: Master, weight: PackedWeight, load: HeadLoad) -> None:
    """Put a head that is stored quantized into a master; the embedding has a matrix of its own.

    Args:
        master: whose other weights are loaded.
        weight: of the head ``[V, K]``.
        load: dtype and place.

    Raises:
        SpecError: no backend multiplies by such a weight.
    """
    vocab_size = weight.out_features
    rows = _filled_rows(vocab_size)
    kernel = _kernel(weight.precision, rows, weight.in_features, load, is_tied=False)
    filled = _with_rows(weight, rows).to(load.device)
    master.lm_head = QuantHead(_linear(master, filled, kernel), vocab_size)


def order_head_(master: Master) -> None:
    """Order the matrix of a 16-bit head for this CPU's kernels, in its own memory.

    A token embedding that is tied to the head reads its rows.
    """
    head, embedding = master.lm_head, master.get_submodule(master.embedding_name)
    is_tied = head is None
    if is_tied and not is_lookup(embedding):
        return
    plain = embedding if is_tied else head
    weight = getattr(plain, "weight", None)
    if not isinstance(plain, (nn.Linear, nn.Embedding)) or not isinstance(weight, Tensor):
        return
    if not can_prepack(weight):
        return
    linear = DenseLinear(weight.detach(), getattr(plain, "bias", None), reuse=True)
    if is_tied:
        master.set_submodule(master.embedding_name, TiedEmbedding(linear, embedding))
    master.lm_head = linear


def _filled_rows(vocab_size: int) -> int:
    return -(-vocab_size // HEAD_ROW_MULTIPLE) * HEAD_ROW_MULTIPLE


def _kernel(
    precision: Precision, rows: int, columns: int, load: HeadLoad, *, is_tied: bool
) -> KernelBackend:
    return choose_backend(
        load.device, precision, load.dtype, rows, columns, load.backend, reads_rows=is_tied
    )


def _linear(
    master: Master, weight: PackedWeight | TiledWeight, kernel: KernelBackend
) -> QuantLinear:
    """Return the operator of a filled weight, with the head's bias."""
    bias = getattr(master.lm_head, "bias", None)
    if bias is not None:
        bias = nn.functional.pad(bias, (0, weight.out_features - len(bias)))
    return QuantLinear(weight, bias, kernel)


def _with_rows(weight: PackedWeight, rows: int) -> PackedWeight:
    """Return a weight filled up with rows of zeros."""

    def filled(tensor: Tensor) -> Tensor:
        return nn.functional.pad(tensor, (0, 0, 0, rows - len(tensor)))

    return replace(
        weight,
        out_features=rows,
        codes=filled(weight.codes),
        scales=filled(weight.scales),
        zeros=None if weight.zeros is None else filled(weight.zeros),
    )


def _weight(
    checkpoint: Checkpoint, source: TensorSource, rows: int, kernel: KernelBackend, load: HeadLoad
) -> PackedWeight | TiledWeight:
    """Return the matrix ``[N, K]``, from the store if it is there; else it is written there."""
    precision, tensors = default_precision(load.bits), checkpoint.tensors
    matrix = Matrix(
        name="head", module="", key="", expert=None, out_features=rows, in_features=source.shape[1]
    )
    tiled = frozenset({matrix.name} if isinstance(kernel, TileBackend) else ())
    cache = load.cache
    fingerprint = None if cache is None else tensors.fingerprint([source])
    if cache is None or fingerprint is None:
        return _quantized(checkpoint, source, matrix, load, is_tiled=bool(tiled))
    what = f"head {bool(tiled)}{' as stored' * is_as_stored(source, precision)}"
    key = entry_key(fingerprint, [str(precision), str(load.dtype), what])
    layout = entry_layout([matrix], precision, load.dtype, tiled)
    found = cache.read(key, layout)
    if found is not None:
        kept = weight_of(matrix, precision, found)
        return kept.to(load.device) if isinstance(kept, PackedWeight) else kept
    with BackgroundWriter() as writer:
        weight = _quantized(checkpoint, source, matrix, load, is_tiled=bool(tiled))
        writer.begin(cache.write(key, layout))
        writer.add(matrix.name, weight)
        writer.end(lambda: fingerprint == tensors.fingerprint([source]))
    return weight


def _quantized(
    checkpoint: Checkpoint,
    source: TensorSource,
    matrix: Matrix,
    load: HeadLoad,
    *,
    is_tiled: bool,
) -> PackedWeight | TiledWeight:
    """Read and round the matrix, a block of rows at a time, or keep its codes as stored."""
    precision, tensors = default_precision(load.bits), checkpoint.tensors
    each = max(1, BLOCK_WEIGHTS // (matrix.in_features * HEAD_ROW_MULTIPLE)) * HEAD_ROW_MULTIPLE
    shape = matrix.out_features, matrix.in_features
    tiles = TiledWeight.empty(*shape, precision, load.dtype) if is_tiled else None
    parts: list[PackedWeight] = []
    if is_as_stored(source, precision):
        kept = read_as_stored(source, precision, load.dtype, tensors.load)
        if kept is not None:
            filled = _with_rows(kept, matrix.out_features).to(load.device)
            if tiles is None:
                return filled
            tiles.put_rows(0, filled)
            return tiles
    for first in range(0, source.shape[0], each):
        block = source.block(first, min(first + each, source.shape[0]))
        rounded = _rounded(tensors.load(block, on_host), tensors.where(source.name), load)
        if tiles is None:
            parts.append(rounded)
        else:
            tiles.put_rows(first, rounded)
    return concatenate_rows(parts) if tiles is None else tiles


def _rounded(weight: Tensor, where: str, load: HeadLoad) -> PackedWeight:
    """Round a block of rows, filled up with rows of zeros."""
    weight = weight.to(load.device).to(load.dtype)
    missing = -len(weight) % HEAD_ROW_MULTIPLE
    if missing:
        weight = nn.functional.pad(weight, (0, 0, 0, missing))
    try:
        return quantize(weight, default_precision(load.bits), load.dtype)
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from error
