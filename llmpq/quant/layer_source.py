"""Where the pieces of a layer come from: a plain checkpoint, or the store of what was quantized.

A source turns a layer into pieces in the order in which the layer wants them. It runs in the
loader's reading thread, takes the bytes of every piece from the budget before it reads it, and
does no arithmetic. This module refuses to quantize and to place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from llmpq.kernels.packed import PackedWeight
from llmpq.kernels.tiled import TILE_ROWS, TiledWeight
from llmpq.models import Checkpoint
from llmpq.models.sources import TensorSource
from llmpq.quant.assembly import LayerAssembly, Matrix, matrices_of
from llmpq.quant.buffers import fresh
from llmpq.quant.entries import entry_layout, matrices_in, tiled_names
from llmpq.quant.entry_file import EntryLayout, EntryWriter
from llmpq.quant.pipeline import Budget
from llmpq.quant.store import Store, entry_key
from llmpq.quant.transfer import Sent, Transfer
from llmpq.spec.precision import Precision, linear_bytes

_BLOCK_BYTES = 8 << 20
"""What is read at once of a large matrix: enough for a disk, and little to wait for."""


@dataclass(slots=True, kw_only=True, eq=False)
class LayerJob:
    """One layer on its way.

    Attributes:
        index: its place in the model.
        precision: of its matrices.
        assembly: where its pieces go.
        origin: words for a progress line, when it was not quantized here.
        begin_entry: opens its entry in the store, when it is to be quantized for the first time.
    """

    index: int
    precision: Precision
    assembly: LayerAssembly
    origin: str = ""
    begin_entry: Callable[[], EntryWriter | None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """A layer of which nothing has been read: made ahead, so that the disk never waits for it.

    Attributes:
        index: its place in the model.
        precision: of its matrices.
        layer: on the meta device.
        sources: where its tensors are, by their names in it; without those of codes.
        matrices: to be quantized, or stored as codes.
        fingerprint: of the stored bytes of all matrices; ``None`` where nothing is to be kept.
    """

    index: int
    precision: Precision
    layer: nn.Module
    sources: Mapping[str, TensorSource]
    matrices: list[Matrix]
    fingerprint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plain:
    """A tensor that only has to be cast and placed."""

    job: LayerJob
    key: str
    sent: Sent
    held_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Raw:
    """A matrix that has to be quantized, or some of its rows.

    Attributes:
        job: its layer.
        matrix: which.
        first_row: of the block of rows; ``None`` when this is all of it, for a kernel of no tiles.
        sent: the weights.
        where: names the matrix in messages.
        held_bytes: to be given back.
    """

    job: LayerJob
    matrix: Matrix
    first_row: int | None
    sent: Sent
    where: str
    held_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ready:
    """A quantized matrix, or the rows of one that go into tiles from ``first_row`` on."""

    job: LayerJob
    matrix: Matrix
    packed: PackedWeight | TiledWeight
    held_bytes: int
    first_row: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerEnd:
    """Follows the last piece of a layer; ``keep`` says whether the store may keep what was made."""

    job: LayerJob
    held_bytes: int = 0
    keep: bool = True


Piece = Plain | Raw | Ready | LayerEnd


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reader:
    """What sources read with.

    Attributes:
        budget: bounds what is under way.
        transfer: the way to the device.
        device: where layers go.
        dtype: of the run.
        backend: kernel backend asked for.
    """

    budget: Budget
    transfer: Transfer
    device: torch.device
    dtype: torch.dtype
    backend: str | None

    def job(self, layer: Prepared) -> LayerJob:
        """Begin a layer."""
        assembly = LayerAssembly(layer.layer, self.dtype, self.backend)
        return LayerJob(index=layer.index, precision=layer.precision, assembly=assembly)

    def plain(self, job: LayerJob, key: str, tensor: Tensor, held_bytes: int) -> Plain:
        """Make a piece of a tensor whose bytes the budget has given."""
        return Plain(job=job, key=key, sent=self.transfer.send(tensor), held_bytes=held_bytes)


class PlainSource:
    """A checkpoint of 16 or 32-bit weights, and the store beside it.

    Args:
        checkpoint: the weights.
        store: quantized layers of earlier runs; ``None`` keeps none.
    """

    def __init__(self, checkpoint: Checkpoint, store: Store | None) -> None:
        self._checkpoint = checkpoint
        self._store = store

    def prepare(self, index: int, precision: Precision) -> Prepared:
        """Make a layer ready to be read; may run in another thread.

        Raises:
            SpecError: what ``Checkpoint`` refuses.
        """
        layer = self._checkpoint.empty_layer(index)
        sources = self._checkpoint.layer_sources(index, layer)
        matrices = [] if precision.bits == 16 else matrices_of(layer)
        return Prepared(
            index=index,
            precision=precision,
            layer=layer,
            sources=sources,
            matrices=matrices,
            fingerprint=self._fingerprint(_weights(matrices, sources)),
        )

    def pieces(self, layer: Prepared, reader: Reader) -> Iterator[Piece]:
        """Yield what fills a layer, reading each piece when it is asked for.

        Raises:
            SpecError: what ``Checkpoint`` refuses.
        """
        matrices, fingerprint = layer.matrices, layer.fingerprint
        weights = _weights(matrices, layer.sources)
        job = reader.job(layer)
        for key, source in layer.sources.items():
            if key not in {matrix.key for matrix in matrices}:
                held = held_bytes(source, reader.dtype)
                reader.budget.take(held)
                tensor = self._checkpoint.tensors.load(source, reader.transfer.allocate)
                yield reader.plain(job, key, tensor, held)
        tiled = self._tiled(job, matrices, reader)
        if fingerprint is not None and self._store is not None:
            entry = _Entry(job, matrices, reader, tiled, fingerprint)
            found = entry.read(self._store)
            if found is not None:
                job.origin = "from the store"
                yield from found
                return
            job.begin_entry = partial(self._store.writer, entry.key, entry.layout)
        for matrix in matrices:
            yield from self._raw(job, matrix, weights[matrix.name], tiled, reader)
        # Only bytes that were those of the fingerprint all the while may go by its name.
        yield LayerEnd(job=job, keep=fingerprint == self._fingerprint(weights))

    def _raw(
        self,
        job: LayerJob,
        matrix: Matrix,
        source: TensorSource,
        tiled: Collection[str],
        reader: Reader,
    ) -> Iterator[Raw]:
        """Read a matrix; where it goes into tiles, a block of rows at a time."""
        tensors = self._checkpoint.tensors
        rows = matrix.out_features
        step = _block_rows(source) if matrix.name in tiled else rows
        for first in range(0, rows, step):
            block = source.block(first, min(first + step, rows))
            held = held_bytes(block, reader.dtype) + _packed_bytes(
                block.shape, job.precision, reader.dtype
            )
            reader.budget.take(held)
            read = tensors.load(block, reader.transfer.borrow, is_temporary=True)
            sent = reader.transfer.send(read)
            del read
            yield Raw(
                job=job,
                matrix=matrix,
                first_row=first if matrix.name in tiled else None,
                sent=sent,
                where=tensors.where(source.name),
                held_bytes=held,
            )

    def _tiled(self, job: LayerJob, matrices: list[Matrix], reader: Reader) -> frozenset[str]:
        """Return the names of the matrices whose kernels keep tiles."""
        ask = partial(
            job.assembly.keeps_tiles, precision=job.precision, device_type=reader.device.type
        )
        return frozenset(matrix.name for matrix in matrices if ask(matrix))

    def _fingerprint(self, weights: Mapping[str, TensorSource]) -> str | None:
        if self._store is None or not weights:
            return None
        return self._checkpoint.tensors.fingerprint(weights.values())


class _Entry:
    """A layer's entry, as this run would write it, and as it may find it."""

    def __init__(
        self,
        job: LayerJob,
        matrices: list[Matrix],
        reader: Reader,
        tiled: frozenset[str],
        fingerprint: str,
    ) -> None:
        self._job = job
        self._matrices = matrices
        self._reader = reader
        names = [matrix.name for matrix in matrices]
        self.key = entry_key(fingerprint, [str(job.precision), str(reader.dtype), *names])
        self._fitting = tiled_names(matrices, job.precision)
        # All that can be or none: then there are two kinds of entries to look for, not many.
        self._adopts = bool(tiled) and tiled == self._fitting
        self.layout = self._layout(self._fitting if self._adopts else frozenset())

    def read(self, store: Store) -> Iterator[Piece] | None:
        """Return the pieces of the layer, ``None`` when the store has it not.

        Tiles that stay where they are read take nothing of the budget: they are part of the result.
        """
        reader = self._reader
        layouts = (self.layout, self._layout(frozenset() if self._adopts else self._fitting))
        held = 0

        def lend(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            nonlocal held
            if not held:  # once for the layer: whoever waits with a part of it may wait for ever
                nbytes = max(layout.file_bytes for layout in layouts)
                reader.budget.take(nbytes)
                held = nbytes
            return reader.transfer.borrow(shape, dtype)

        tensors = store.read(self.key, layouts, stay=fresh if self._adopts else lend, lend=lend)
        if tensors is None:
            reader.budget.give(held)
            return None
        return self._pieces(tensors, held)

    def _pieces(self, tensors: dict[str, Tensor], held: int) -> Iterator[Piece]:
        job = self._job
        for matrix, packed in matrices_in(tensors, self._matrices, job.precision):
            yield Ready(job=job, matrix=matrix, packed=packed, held_bytes=0)
        yield LayerEnd(job=job, held_bytes=held)

    def _layout(self, tiled: frozenset[str]) -> EntryLayout:
        return entry_layout(self._matrices, self._job.precision, self._reader.dtype, tiled)


def _block_rows(source: TensorSource) -> int:
    """Return how many rows of a matrix to read at once: whole rows of tiles, in equal blocks."""
    rows = source.shape[0]
    blocks = -(-source.nbytes // _BLOCK_BYTES)
    return -(-rows // (blocks * TILE_ROWS)) * TILE_ROWS


def _weights(
    matrices: list[Matrix], sources: Mapping[str, TensorSource]
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


def held_bytes(source: TensorSource, dtype: torch.dtype) -> int:
    """Return the bytes of a tensor as read, and of its cast when it needs one."""
    if source.dtype == dtype or not source.dtype.is_floating_point:
        return source.nbytes
    return source.nbytes + torch.Size(source.shape).numel() * dtype.itemsize


def _packed_bytes(shape: tuple[int, ...], precision: Precision, dtype: torch.dtype) -> int:
    rows, columns = shape
    return linear_bytes(rows, columns, precision, dtype.itemsize)
