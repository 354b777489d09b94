"""Loader: reads, quantizes and places a checkpoint one matrix at a time.

One thread reads ahead (``quant.loading.layer_reader``) while the calling thread quantizes and
places. At most two 16-bit matrices are held in addition to the result. Layers quantized by earlier
runs come from the cache (``quant.loading.weight_cache``).

On Linux loaded weights lie on large pages. A decode step reads every weight once: with pages of 4
KiB the processor looks up each page on the way, which takes up to half of the time inside a virtual
machine. Weights that are mapped from the store are left to the file system.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from llmpq.errors import SpecError
from llmpq.kernels.cpu.tiles import TiledWeight
from llmpq.kernels.packed import PackedWeight, packed_row_bytes
from llmpq.models import Checkpoint, DecoderStage, Master
from llmpq.quant.checkpoint.reader import GptqCheckpoint, is_gptq
from llmpq.quant.loading.assembly import Matrix
from llmpq.quant.loading.head import (
    HeadLoad,
    head_key,
    install_head_,
    install_stored_head_,
    order_head_,
)
from llmpq.quant.loading.layer_reader import (
    Item,
    LayerEnd,
    LayerLoad,
    LayerReader,
    Prefetcher,
    ReadMatrix,
    ReadRows,
    ReadTensor,
)
from llmpq.quant.loading.weight_cache import BackgroundWriter, WeightCache
from llmpq.quant.modules.layer import fuse_norms_, prepack_, quantize_layer_
from llmpq.quant.modules.linear import DenseLinear, QuantLinear
from llmpq.quant.quantizers.rtn import quantize
from llmpq.spec.huggingface.gptq import stored_head
from llmpq.spec.precision import default_precision
from llmpq.units import MIB

PAGE_BYTES = 2 * MIB
_MADV_COLLAPSE = 25  # Linux 6.1; at once, the memory is copied
_MADV_HUGEPAGE = 14  # older ones; by a thread of the kernel, in its own time
_GAP_BYTES = 2 * mmap.PAGESIZE
"""Between blocks that malloc mapped one after the other."""


def use_huge_pages(module: nn.Module) -> None:
    """Ask for pages of ``PAGE_BYTES`` for the weights of a module that lie in memory.

    Only pages that weights fill are asked for, so that no memory is added. Nothing happens where
    the system has no such pages, or a weight is mapped from a file.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "madvise"):
        return
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for first, end in huge_ranges(_spans(module)):
        for advice in (_MADV_COLLAPSE, _MADV_HUGEPAGE):
            if libc.madvise(first, end - first, advice) == 0:
                break


def huge_ranges(spans: Iterator[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges of whole large pages within spans of addresses, joined where they meet.

    Args:
        spans: first address and the one after the last, in any order.
    """
    joined: list[tuple[int, int]] = []
    for first, end in sorted(spans):
        if joined and first - joined[-1][1] <= _GAP_BYTES:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((first, end))
    whole = [
        (-(-first // PAGE_BYTES) * PAGE_BYTES, end // PAGE_BYTES * PAGE_BYTES)
        for first, end in joined
    ]
    return [(first, end) for first, end in whole if first < end]


def _spans(module: nn.Module) -> Iterator[tuple[int, int]]:
    for tensor in _weights(module):
        if tensor.device.type == "cpu" and tensor.layout == torch.strided:
            yield tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def _weights(module: nn.Module) -> Iterator[Tensor]:
    for part in module.modules():
        yield from part.parameters(recurse=False)
        if isinstance(part, (QuantLinear, DenseLinear)):
            yield from part.prepared.tensors


SLOTS = 2
"""16-bit matrices held at once: one is being read, one quantized; only one of a checkpoint of wider
numbers. The cost model counts ``MATRICES_UNDER_WAY``, which includes temporaries."""

Progress = Callable[[int, int, str], None]
"""Called after each layer with the number of layers loaded, their total, and a description."""


def load_stage(  # noqa: PLR0913  the stage, and where it goes; a worker has all of it apart
    model_dir: Path | str,
    first_layer: int,
    end_layer: int,
    bits: Sequence[int] | None,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress | None = None,
    backend: str | None = None,
    weight_cache: WeightCache | None = None,
) -> DecoderStage:
    """Load decoder layers ``[first_layer, end_layer)``, each at its own bitwidth.

    Args:
        model_dir: directory with ``config.json`` and safetensors weights, plain or GPTQ.
        first_layer: index of the first layer in the whole model.
        end_layer: index after the last.
        bits: 3, 4, 8 or 16 for each of these layers, in order; ``None`` leaves them as stored.
        dtype: dtype of the run; what is not quantized is cast to it.
        device: where the layers are quantized and stay.
        progress: called after each layer.
        backend: kernel backend to prefer; ``None`` leaves it to the registry.
        weight_cache: of quantized layers, read and written; ``None`` for none.

    Raises:
        SpecError: no such layers, a bitwidth missing or unknown, other bits than a GPTQ
            checkpoint holds, or as ``Checkpoint`` and the quantizers.
    """
    device = torch.device(device)
    gptq = GptqCheckpoint(model_dir) if is_gptq(model_dir) else None
    checkpoint = Checkpoint(model_dir) if gptq is None else gptq.checkpoint
    widths = [16] * (end_layer - first_layer) if bits is None else bits
    _check_range(checkpoint, first_layer, end_layer, widths)
    if gptq is not None and bits is not None:
        gptq.check_bits(first_layer, bits)
    is_wide = checkpoint.dtype.itemsize > 2 or checkpoint.tensors.decodes
    num_slots = 1 if is_wide else SLOTS
    prefetcher: Prefetcher[Item] = Prefetcher(num_slots, is_pinned=device.type == "cuda")
    reader = LayerReader(
        checkpoint=checkpoint,
        gptq=gptq,
        cache=weight_cache,
        prefetcher=prefetcher,
        device=device,
        dtype=dtype,
        backend=backend,
    )
    builder = _StageBuilder(
        device=device, dtype=dtype, backend=backend, total=len(widths), progress=progress
    )
    items = reader.layers(first_layer, [default_precision(width) for width in widths])
    with torch.no_grad(), _on(device), builder.writer, closing(prefetcher.iterate(items)) as ahead:
        for item in ahead:
            builder.add(item)
            del item
    stage = DecoderStage(checkpoint.config, builder.layers, first_layer, checkpoint.skeleton)
    stage.to(device)
    use_huge_pages(stage)
    return stage


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

    Args:
        model_dir: directory of the weights.
        dtype: of whatever is not quantized.
        device: where they go.
        head_bits: of the head's matrix, which is the token embedding's if they are tied;
            ``None`` for those of the checkpoint.
        backend: kernel backend to prefer for a quantized head.
        weight_cache: of quantized weights; ``None`` for none.

    Raises:
        SpecError: as ``Checkpoint`` and ``install_head_``, or the head is stored at other bits.
    """
    checkpoint = Checkpoint(model_dir)
    master = Master(checkpoint.config)
    load = HeadLoad(
        bits=head_bits or 16,
        dtype=dtype,
        device=torch.device(device),
        backend=backend,
        cache=weight_cache,
    )
    stored = _stored_head(model_dir, master, head_bits, dtype)
    sources = checkpoint.master_sources(without=() if stored is None else (head_key(master),))
    head = sources.pop(head_key(master)) if stored is None and load.bits != 16 else None
    state = {
        key: _cast(checkpoint.tensors.load(source).to(device), dtype)
        for key, source in sources.items()
    }
    master.load_state_dict(state, assign=True, strict=head is None and stored is None)
    with torch.no_grad(), _on(load.device):
        if stored is not None:
            install_stored_head_(master, stored, load)
        elif head is not None:
            install_head_(master, checkpoint, head, load)
    left = [name for name, buffer in master.named_buffers() if buffer.is_meta]
    if left:
        raise SpecError(f"{type(master).__name__}: buffer '{left[0]}' is neither stored nor known")
    fuse_norms_(master)
    order_head_(master)
    prepack_(master)
    master.to(device)
    use_huge_pages(master)
    return master


def _stored_head(
    model_dir: Path | str, master: Master, head_bits: int | None, dtype: torch.dtype
) -> PackedWeight | None:
    """Read the head of a checkpoint in GPTQ's format; ``None`` if it is not quantized."""
    precision = stored_head(model_dir) if is_gptq(model_dir) else None
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
    return GptqCheckpoint(model_dir).packed_head(shape, dtype)


@dataclass(slots=True, kw_only=True, eq=False)
class _StageBuilder:
    """Turns what was read into layers on the device, and writes new layers to the cache."""

    device: torch.device
    dtype: torch.dtype
    backend: str | None
    total: int
    progress: Progress | None
    layers: list[nn.Module] = field(default_factory=list)
    writer: BackgroundWriter = field(default_factory=BackgroundWriter)
    tiles: TiledWeight = field(init=False)
    room: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    def add(self, item: Item) -> None:
        """Place a tensor or a matrix, or finish a layer."""
        if isinstance(item, LayerEnd):
            self._finish(item)
        elif isinstance(item, ReadRows):
            self._quantize(item)
        elif isinstance(item, ReadMatrix):
            weight = item.weight
            on_device = weight.to(self.device) if isinstance(weight, PackedWeight) else weight
            self._install(item.layer, item.matrix, on_device)
            if item.slot is not None:
                item.slot.release()
        else:
            self._fill(item)

    def _fill(self, item: ReadTensor) -> None:
        tensor = _cast(item.tensor.to(self.device), self.dtype)
        item.layer.assembly.fill({item.key: tensor})
        item.slot.release()

    def _quantize(self, item: ReadRows) -> None:
        load, matrix = item.layer, item.matrix
        if isinstance(item.weight, PackedWeight):
            rows = item.weight.to(self.device)
        else:
            rows = self._rounded(item, item.weight)
        whole: PackedWeight | TiledWeight = rows
        if matrix.name in load.tiled:
            if item.first_row == 0:
                shape = (matrix.out_features, matrix.in_features)
                self.tiles = TiledWeight.empty(*shape, load.precision, self.dtype)
            self.tiles.put_rows(item.first_row, rows)
            whole = self.tiles
        if item.first_row + rows.out_features == matrix.out_features:
            self._install(load, matrix, whole)
            item.slot.release()

    def _rounded(self, item: ReadRows, weight: Tensor) -> PackedWeight:
        weight = _cast(weight.to(self.device), self.dtype)
        precision = item.layer.precision
        is_tiled = item.matrix.name in item.layer.tiled
        rows, columns = weight.shape
        room = self._room(rows, columns, precision.bits) if is_tiled else None
        try:
            return quantize(weight, precision, self.dtype, room)
        except SpecError as error:
            raise SpecError(f"{item.where}: {error}") from error

    def _room(self, rows: int, columns: int, bits: int) -> Tensor:
        """Return memory for codes that are copied into tiles, the same for all that fit."""
        nbytes = rows * packed_row_bytes(columns, bits)
        if self.room.nbytes < nbytes:
            self.room = torch.empty(nbytes, dtype=torch.uint8)
        return self.room

    def _install(self, load: LayerLoad, matrix: Matrix, weight: PackedWeight | TiledWeight) -> None:
        if load.begin_entry is not None:  # the first matrix of a new entry
            self.writer.begin(load.begin_entry())
            load.begin_entry = None
        self.writer.add(matrix.name, weight)
        load.assembly.install(matrix, weight)

    def _finish(self, end: LayerEnd) -> None:
        load = end.layer
        self.writer.end(load.is_valid)
        layer = load.assembly.finish()
        if load.precision.bits == 16:
            quantize_layer_(layer, 16, self.dtype, backend=self.backend)
        fuse_norms_(layer)
        self.layers.append(layer)
        if self.progress is not None:
            origin = f", {load.origin}" if load.origin else ""
            text = f"layer {load.index} at {load.precision}{origin}"
            self.progress(len(self.layers), self.total, text)


def _on(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _check_range(
    checkpoint: Checkpoint, first_layer: int, end_layer: int, bits: Sequence[int]
) -> None:
    num_layers = checkpoint.config.num_hidden_layers
    if not 0 <= first_layer < end_layer <= num_layers:
        raise SpecError(
            f"stage: found layers [{first_layer}, {end_layer}), "
            f"expected a part of [0, {num_layers}) of {checkpoint.directory}"
        )
    if len(bits) != end_layer - first_layer:
        raise SpecError(
            f"stage [{first_layer}, {end_layer}): found {len(bits)} bitwidths, "
            f"expected {end_layer - first_layer}"
        )
    for width in bits:
        default_precision(width)  # raises for an unknown one before any layer is read


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
