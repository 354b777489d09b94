"""Read ahead: the tensors of decoder layers, in the order in which the loader wants them.

``LayerReader`` reads from a plain checkpoint, a GPTQ checkpoint or the cache of quantized layers.
It runs in the reading thread of a ``Prefetcher`` and takes a slot before it reads a tensor: while
the calling thread quantizes one matrix, the reading thread reads the next. An item holds a slot
from before it is read until the caller has used it, so at most that many are in memory.

AWQ and compressed-tensors store 3 and 4 bits in groups and 8 bits with one scale an output. Where
bits and groups are those of the plan, the codes are kept instead of rounded again: they become a
``PackedWeight`` of the same size; symmetric codes of 3 and 4 bits get zeros of 0.

Shape legend: N output features, K input features, G groups, b bits.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from llmpq.kernels.cpu.tiles import TILE_ROWS, TiledWeight
from llmpq.kernels.gpu.device import open_device
from llmpq.kernels.packed import PackedWeight, pack_codes
from llmpq.models import Checkpoint
from llmpq.models.files.sources import TensorSource
from llmpq.models.files.tensor_formats import (
    Awq,
    DecodedSource,
    Encoded,
    Read,
    ScaledCodes,
    unpack_awq,
    unpack_words,
)
from llmpq.quant.checkpoint.format import concatenate_rows
from llmpq.quant.checkpoint.reader import GptqCheckpoint
from llmpq.quant.loading.assembly import LayerAssembly, Matrix, matrices_of
from llmpq.quant.loading.weight_cache import (
    EntryWriter,
    WeightCache,
    entry_key,
    entry_layout,
    weight_of,
)
from llmpq.spec.precision import Precision

T = TypeVar("T")

_HUGE_PAGE_BYTES = 2 << 20


class Cancelled(Exception):  # noqa: N818  not an error: the caller has stopped
    """The caller does not want more items."""


class Slot:
    """The right to hold one item, with reusable host memory to read it into.

    Reading into memory that was used before saves the page faults of fresh memory; it begins at a
    page, so that a disk can write into it directly.

    Args:
        free: the queue that the slot returns to.
        is_pinned: whether the memory is pinned, for copies to a CUDA device.
    """

    def __init__(self, free: SimpleQueue[Slot | None], *, is_pinned: bool) -> None:
        self._free = free
        self._is_pinned = is_pinned
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor in the slot's memory with undefined content, valid until release."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if self._buffer.nbytes < nbytes:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # freed before it is replaced
            self._buffer = _pages(nbytes, is_pinned=self._is_pinned)
        return self._buffer[:nbytes].view(dtype).view(shape)

    def release(self) -> None:
        """Allow the next item to be read."""
        self._free.put(self)

    def close(self) -> None:
        """Give up the memory, which lives on in tensors that were made of it."""
        self._buffer = torch.empty(0, dtype=torch.uint8)


def _pages(nbytes: int, *, is_pinned: bool) -> Tensor:
    """Return memory that begins at a page, as direct reads need."""
    if is_pinned:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    if nbytes > _HUGE_PAGE_BYTES:  # Linux aligns only maps of whole huge pages to them
        nbytes = -(-nbytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # small pages make direct reads slow
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class Prefetcher(Generic[T]):
    """Iterates over a generator in a thread of its own.

    Args:
        num_slots: items that may be held at once.
        is_pinned: whether the memory of the slots is pinned.
    """

    def __init__(self, num_slots: int, *, is_pinned: bool = False) -> None:
        self._free: SimpleQueue[Slot | None] = SimpleQueue()
        self._is_cancelled = False
        self._slots = [Slot(self._free, is_pinned=is_pinned) for _ in range(num_slots)]
        for slot in self._slots:
            slot.release()

    def acquire(self) -> Slot:
        """Wait for a free slot; called by the generator before it reads an item.

        Raises:
            Cancelled: the caller has stopped.
        """
        slot = self._free.get()
        if slot is None or self._is_cancelled:
            raise Cancelled
        return slot

    def iterate(self, items: Iterator[T]) -> Generator[T, None, None]:
        """Yield the items in order; close the generator to stop the thread.

        Raises:
            BaseException: what ``items`` raised.
        """
        ready: SimpleQueue[T | _End] = SimpleQueue()

        def read() -> None:
            error: BaseException | None = None
            try:
                for item in items:
                    ready.put(item)
                    del item
            except Cancelled:
                pass
            except BaseException as raised:  # raised again by the caller's thread
                error = raised
            ready.put(_End(error))

        thread = threading.Thread(target=read, name="load-read", daemon=True)
        thread.start()
        try:
            while not isinstance(item := ready.get(), _End):
                yield item
                del item  # frees it before the next one is waited for
            if item.error is not None:
                raise item.error
        finally:
            self._is_cancelled = True
            self._free.put(None)
            thread.join()
            # Slots and their queue refer to each other, and while a rank serves, Python's garbage
            # collector seldom runs.
            for slot in self._slots:
                slot.close()


@dataclass(frozen=True)
class _End:
    """Follows the last item."""

    error: BaseException | None


def is_as_stored(source: TensorSource, precision: Precision) -> bool:
    """Return whether a matrix is stored in the bits and groups of a precision."""
    if not isinstance(source, DecodedSource) or precision.bits == 16:
        return False
    return all(_fits(part, precision) for part in source.parts)


def read_as_stored(
    source: TensorSource, precision: Precision, dtype: torch.dtype, read: Read
) -> PackedWeight | None:
    """Read a matrix for which :func:`is_as_stored` is true.

    Args:
        source: of the matrix, in one part or several along its outputs.
        precision: of the plan.
        dtype: of the run, to which scales and zeros are rounded.
        read: reads stored tensors.

    Returns:
        ``None`` if a scale is not finite and positive in ``dtype``.
    """
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
