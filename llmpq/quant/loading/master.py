"""Loads a master: the embeddings, the final norm and the head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from llmpq.errors import SpecError
from llmpq.kernels.base import PackedWeight
from llmpq.kernels.cpu.dense import can_prepack
from llmpq.kernels.cpu.native import TiledWeight
from llmpq.models import Master
from llmpq.models.tensor_files import TensorSource, on_host
from llmpq.quant.checkpoint.reader import read_as_stored
from llmpq.quant.loading.loader import (
    Load,
    MatrixSet,
    RowQuantizer,
    block_rows,
    cast_to,
    on_device,
    opened,
    use_huge_pages,
)
from llmpq.quant.loading.weight_cache import BackgroundWriter, WeightCache, weight_of
from llmpq.quant.modules.layer import (
    DenseLinear,
    Matrix,
    QuantHead,
    QuantLinear,
    TiedEmbedding,
    fuse_norms_,
    is_lookup,
    prepack_,
)
from llmpq.spec.huggingface.quantization import stored_head
from llmpq.spec.precision import Precision, default_precision
from llmpq.spec.runtime_constants import HEAD_ROW_MULTIPLE


def load_master(
    model_dir: Path | str,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    head_bits: int | None = None,
    backend: str | None = None,
    weight_cache: WeightCache | None = None,
) -> Master:
    """Load the embeddings, the final norm and the head.

    A head that is quantized and tied to the token embedding stays one matrix, whose rows the
    embedding reads.

    Args:
        model_dir: directory of the weights.
        dtype: of whatever is not quantized.
        device: where they go.
        head_bits: of the head's matrix, which is the token embedding's if they are tied;
            ``None`` for those of the checkpoint.
        backend: kernel backend to prefer for a quantized head.
        weight_cache: of quantized weights; ``None`` for none.

    Raises:
        SpecError: as ``Checkpoint`` and ``quantize``, the head is stored at other bits, or no
            backend multiplies by it.
    """
    load = opened(model_dir, dtype, device, backend, weight_cache)
    master, tensors = Master(load.checkpoint.config), load.checkpoint.tensors
    is_tied = master.lm_head is None
    stored = _stored_head(load, master, head_bits)
    sources = load.checkpoint.master_sources(without=() if stored is None else (head_key(master),))
    head = sources.pop(head_key(master)) if stored is None and head_bits not in (None, 16) else None
    state = {
        key: cast_to(tensors.load(source).to(load.device), dtype) for key, source in sources.items()
    }
    master.load_state_dict(state, assign=True, strict=head is None and stored is None)
    with torch.no_grad(), on_device(load.device):
        if stored is not None:
            rows = _filled_rows(stored.out_features)
            filled = _with_rows(stored, rows).to(load.device)
            _install_head_(master, filled, stored.out_features, load, is_tied=False)
        elif head is not None and head_bits is not None:
            made = _head_weight(head, default_precision(head_bits), load, is_tied=is_tied)
            _install_head_(master, made, head.shape[0], load, is_tied=is_tied)
    left = [name for name, buffer in master.named_buffers() if buffer.is_meta]
    if left:
        raise SpecError(f"{type(master).__name__}: buffer '{left[0]}' is neither stored nor known")
    fuse_norms_(master)
    _order_head_(master)
    prepack_(master)
    master.to(load.device)
    use_huge_pages(master)
    return master


def head_key(master: Master) -> str:
    """Return the key of the head's matrix in the master's ``state_dict``."""
    return f"{master.embedding_name}.weight" if master.lm_head is None else "lm_head.weight"


def _stored_head(load: Load, master: Master, head_bits: int | None) -> PackedWeight | None:
    """Read the head of a checkpoint in GPTQ's format; ``None`` if it is not quantized."""
    model_dir = load.checkpoint.directory
    precision = None if load.gptq is None else stored_head(model_dir)
    if precision is None:
        return None
    if head_bits not in (None, precision.bits):
        raise SpecError(
            f"{model_dir}: the head is stored at {precision.bits} bits and the plan wants "
            f"{head_bits}; plan for the checkpoint's own bits, or serve the model it was made from"
        )
    if not isinstance(master.lm_head, nn.Linear):
        raise SpecError(
            f"{model_dir}: field 'tie_word_embeddings': found a head of its own, which is "
            "quantized, expected false"
        )
    shape = master.lm_head.out_features, master.lm_head.in_features
    assert load.gptq is not None
    return load.gptq.packed_head(shape, load.dtype)


def _install_head_(
    master: Master,
    weight: PackedWeight | TiledWeight,
    vocab_size: int,
    load: Load,
    *,
    is_tied: bool,
) -> None:
    """Put a quantized head into a master, and the embedding that reads it where they are tied.

    Args:
        master: whose other weights are loaded.
        weight: of the head, its rows filled up.
        vocab_size: V.
        load: place and backend.
        is_tied: whether the embedding reads it.
    """
    shape = (weight.out_features, weight.in_features)
    kernel = load.kernel(weight.precision, *shape, reads_rows=is_tied)
    bias = getattr(master.lm_head, "bias", None)
    if bias is not None:
        bias = nn.functional.pad(bias, (0, weight.out_features - len(bias)))
    linear = QuantLinear(weight, bias, kernel)
    if is_tied:
        embedding = master.get_submodule(master.embedding_name)
        master.set_submodule(master.embedding_name, TiedEmbedding(linear, embedding))
    master.lm_head = QuantHead(linear, vocab_size)


def _head_weight(
    source: TensorSource, precision: Precision, load: Load, *, is_tied: bool
) -> PackedWeight | TiledWeight:
    """Return the matrix ``[N, K]``, from the store if it is there; else it is written there.

    At most one block of unquantized rows is held in addition to the result.
    """
    matrix = Matrix(
        name="head",
        module="",
        key="",
        expert=None,
        out_features=_filled_rows(source.shape[0]),
        in_features=source.shape[1],
    )
    matrices = load.matrix_set([matrix], {matrix.name: source}, precision, reads_rows=is_tied)
    quantizer, whole = RowQuantizer(load), None
    with BackgroundWriter() as writer:
        for first_row, rows in _head_rows(matrices, matrix, load):
            whole = quantizer.add(matrices, matrix, first_row, rows)
        assert whole is not None
        if matrices.entry is not None:
            writer.add(matrices.entry, matrix.name, whole)
            writer.end()
    return whole


def _head_rows(
    matrices: MatrixSet, matrix: Matrix, load: Load
) -> Iterator[tuple[int, Tensor | PackedWeight | TiledWeight]]:
    """Read the matrix, a block of rows at a time, filled up with rows of zeros."""
    source, tensors = matrices.weights[matrix.name], load.checkpoint.tensors
    if matrices.cached is not None:
        yield 0, weight_of(matrix, matrices.precision, matrices.cached)
        return
    kept = read_as_stored(source, matrices.precision, load.dtype, tensors.load)
    if kept is not None:
        yield 0, _with_rows(kept, matrix.out_features)
        return
    each = block_rows(matrix.in_features, HEAD_ROW_MULTIPLE)
    for first in range(0, source.shape[0], each):
        block = source.block(first, min(first + each, source.shape[0]))
        weight = cast_to(tensors.load(block, on_host).to(load.device), load.dtype)
        yield first, nn.functional.pad(weight, (0, 0, 0, -len(weight) % HEAD_ROW_MULTIPLE))


def _filled_rows(vocab_size: int) -> int:
    return -(-vocab_size // HEAD_ROW_MULTIPLE) * HEAD_ROW_MULTIPLE


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


def _order_head_(master: Master) -> None:
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
