"""LayerReader: the tensors of decoder layers, in the order in which the loader wants them.

Reads from a plain checkpoint, a GPTQ checkpoint or the cache of quantized layers. Runs in the
loader's reading thread and takes a slot before it reads a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count

import torch
from torch import Tensor, nn

from llmpq.kernels.cpu.tiles import TILE_ROWS, TiledWeight
from llmpq.kernels.gpu.device import open_device
from llmpq.kernels.packed import PackedWeight
from llmpq.models import Checkpoint
from llmpq.models.files.sources import TensorSource
from llmpq.quant.checkpoint.reader import GptqCheckpoint
from llmpq.quant.loading.as_stored import is_as_stored, read_as_stored
from llmpq.quant.loading.assembly import LayerAssembly, Matrix, matrices_of
from llmpq.quant.loading.prefetch import Prefetcher, Slot
from llmpq.quant.loading.weight_cache import (
    EntryWriter,
    WeightCache,
    entry_key,
    entry_layout,
    weight_of,
)
from llmpq.spec.precision import Precision


@dataclass(slots=True, kw_only=True, eq=False)
class LayerLoad:
    """One layer that is being loaded.

    Attributes:
        index: its place in the model.
        precision: of its matrices.
        assembly: the layer that is being filled.
        tiled: names of the matrices whose kernels read tiles.
        origin: source of the weights for the progress line; empty if they are quantized here.
        begin_entry: opens a new entry of the cache; ``None`` if nothing is to be written.
        is_valid: whether the weights read are still those that the entry's key names.
    """

    index: int
    precision: Precision
    assembly: LayerAssembly
    tiled: frozenset[str]
    origin: str = ""
    begin_entry: Callable[[], EntryWriter | None] | None = None
    is_valid: Callable[[], bool] = bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReadTensor:
    """A tensor that is cast and placed; in memory of its own."""

    layer: LayerLoad
    key: str
    tensor: Tensor
    slot: Slot


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReadRows:
    """Rows of a matrix to quantize: all of them, or a block if the kernel reads tiles.

    Attributes:
        layer: that it belongs to.
        matrix: its name and shape.
        first_row: of the block.
        weight: 16 or 32-bit weights in the slot's memory, or stored codes that are kept.
        where: file and tensor, for messages.
        slot: to release after the last block.
    """

    layer: LayerLoad
    matrix: Matrix
    first_row: int
    weight: Tensor | PackedWeight
    where: str
    slot: Slot


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReadMatrix:
    """A matrix that a worker has quantized, ready to be placed.

    Attributes:
        layer: that it belongs to.
        matrix: its name and shape.
        weight: its codes.
        slot: to release; ``None`` if the weight lies in a mapped file.
    """

    layer: LayerLoad
    matrix: Matrix
    weight: PackedWeight | TiledWeight
    slot: Slot | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerEnd:
    """Follows the last tensor of a layer."""

    layer: LayerLoad


BLOCK_WEIGHTS = 1 << 21
"""Weights read and quantized at once; their codes stay in a core's cache until they are tiled."""

Item = ReadTensor | ReadRows | ReadMatrix | LayerEnd


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Prepared:
    """A layer before its tensors are read; ``cached`` is its entry of the cache."""

    load: LayerLoad
    matrices: Sequence[Matrix]
    sources: Mapping[str, TensorSource]
    weights: Mapping[str, TensorSource]
    cached: Mapping[str, Tensor] | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerReader:
    """Reads layers for one run.

    Attributes:
        checkpoint: the weights.
        gptq: the same directory if it holds GPTQ codes, else ``None``.
        cache: of quantized layers; ``None`` reads and writes none.
        prefetcher: whose slots bound what is read ahead.
        device: where layers go.
        dtype: of the run.
        backend: kernel backend to prefer; ``None`` leaves it to the registry.
    """

    checkpoint: Checkpoint
    gptq: GptqCheckpoint | None
    cache: WeightCache | None
    prefetcher: Prefetcher[Item]
    device: torch.device
    dtype: torch.dtype
    backend: str | None

    def layers(self, first_layer: int, precisions: Sequence[Precision]) -> Iterator[Item]:
        """Yield the tensors of consecutive layers, each read when it is asked for.

        Two threads prepare the layers to come, so that the disk does not wait for modules to be
        built and two entries of the cache are checked at once.

        Raises:
            SpecError: as ``Checkpoint`` and ``GptqCheckpoint``.
        """
        open_device(self.device)  # of the thread that reads: it allocates pinned memory
        pool = ThreadPoolExecutor(
            max_workers=4,
            thread_name_prefix="load-prepare",
            initializer=open_device,  # choosing a kernel may launch one
            initargs=(self.device,),
        )
        try:
            for prepared in pool.map(self._prepare, count(first_layer), precisions):
                yield from self._items(prepared)
        finally:
            pool.shutdown(cancel_futures=True)

    def _prepare(self, index: int, precision: Precision) -> _Prepared:
        """Build a layer on the meta device, find its tensors and check its entry of the cache."""
        layer = self.checkpoint.empty_layer(index)
        matrices = self._matrices(index, layer, precision)
        assembly = LayerAssembly(layer, self.dtype, self.backend)
        tiled = frozenset(
            matrix.name
            for matrix in matrices
            if self.gptq is None and assembly.reads_tiles(matrix, precision, self.device)
        )
        load = LayerLoad(index=index, precision=precision, assembly=assembly, tiled=tiled)
        stored_as_codes = {matrix.key for matrix in matrices} if self.gptq is not None else ()
        sources = self.checkpoint.layer_sources(index, layer, without=stored_as_codes)
        weights = {} if self.gptq is not None else _weights(matrices, sources)
        return _Prepared(
            load=load,
            matrices=matrices,
            sources=sources,
            weights=weights,
            cached=self._cached(load, matrices, weights),
        )

    def _items(self, prepared: _Prepared) -> Iterator[Item]:
        load, matrices = prepared.load, prepared.matrices
        keys = {matrix.key for matrix in matrices}
        for key, source in prepared.sources.items():
            if key not in keys:
                slot = self.prefetcher.acquire()
                tensor = self.checkpoint.tensors.load(source)
                yield ReadTensor(layer=load, key=key, tensor=tensor, slot=slot)
                del tensor
        if self.gptq is not None:
            yield from self._gptq_codes(self.gptq, load, matrices)
        elif prepared.cached is not None:
            load.origin = "from the store"
            for matrix in matrices:
                weight = weight_of(matrix, load.precision, prepared.cached)
                yield ReadMatrix(layer=load, matrix=matrix, weight=weight)
        else:
            for matrix in matrices:
                yield from self._rows(load, matrix, prepared.weights[matrix.name])
        yield LayerEnd(layer=load)

    def _matrices(self, index: int, layer: nn.Module, precision: Precision) -> list[Matrix]:
        """Return the matrices that are stored as codes or are to be quantized."""
        if self.gptq is None and precision.bits == 16:
            return []
        matrices = matrices_of(layer)
        if self.gptq is None:
            return matrices
        keys = self.gptq.packed_keys(index)
        return [matrix for matrix in matrices if matrix.key in keys]

    def _gptq_codes(
        self, gptq: GptqCheckpoint, load: LayerLoad, matrices: Sequence[Matrix]
    ) -> Iterator[Item]:
        load.origin = "as stored" if matrices else ""
        for matrix in matrices:
            slot = self.prefetcher.acquire()
            packed = gptq.packed(load.index, matrix.name, self.dtype)
            assert packed is not None
            yield ReadMatrix(layer=load, matrix=matrix, weight=packed, slot=slot)
            del packed

    def _rows(self, load: LayerLoad, matrix: Matrix, source: TensorSource) -> Iterator[Item]:
        """Read a matrix into one slot; quantizing its first rows overlaps with reading the next."""
        slot, tensors, first = self.prefetcher.acquire(), self.checkpoint.tensors, 0
        where = tensors.where(source.name)
        if is_as_stored(source, load.precision):
            kept = read_as_stored(source, load.precision, self.dtype, tensors.load)
            if kept is not None:
                load.origin = "as stored"
                yield ReadRows(
                    layer=load, matrix=matrix, first_row=0, weight=kept, where=where, slot=slot
                )
                return
        rows = _block_rows(matrix) if matrix.name in load.tiled else matrix.out_features
        for weight in tensors.load_blocks(source, slot.allocate, rows):
            yield ReadRows(
                layer=load,
                matrix=matrix,
                first_row=first,
                weight=weight,
                where=where,
                slot=slot,
            )
            first += len(weight)
            del weight

    def _cached(
        self, load: LayerLoad, matrices: Sequence[Matrix], weights: Mapping[str, TensorSource]
    ) -> dict[str, Tensor] | None:
        """Return the entry of a layer; if there is none, note how to write it."""
        if self.cache is None or not weights:
            return None
        fingerprint = self.checkpoint.tensors.fingerprint(weights.values())
        if fingerprint is None:
            return None
        forms = [
            f"{name} {name in load.tiled}{' as stored' * is_as_stored(source, load.precision)}"
            for name, source in weights.items()
        ]
        key = entry_key(fingerprint, [str(load.precision), str(self.dtype), *forms])
        layout = entry_layout(matrices, load.precision, self.dtype, load.tiled)
        cached = self.cache.read(key, layout)
        if cached is None:
            load.begin_entry = partial(self.cache.write, key, layout)
            load.is_valid = partial(self._is_unchanged, weights, fingerprint)
        return cached

    def _is_unchanged(self, weights: Mapping[str, TensorSource], fingerprint: str) -> bool:
        return fingerprint == self.checkpoint.tensors.fingerprint(weights.values())


def _block_rows(matrix: Matrix) -> int:
    """Return how many rows to read and quantize at once: whole tiles."""
    return max(1, BLOCK_WEIGHTS // (matrix.in_features * TILE_ROWS)) * TILE_ROWS


def _weights(
    matrices: Sequence[Matrix], sources: Mapping[str, TensorSource]
) -> dict[str, TensorSource]:
    """Return the source of every matrix by its name; experts are slices of one parameter."""
    slices = {
        matrix.key: list(sources[matrix.key].rows()) for matrix in matrices if matrix.expert == 0
    }
    return {
        matrix.name: sources[matrix.key]
        if matrix.expert is None
        else slices[matrix.key][matrix.expert]
        for matrix in matrices
    }
