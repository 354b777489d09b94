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
from torch import nn

from llmpq.kernels.cpu.tiled import TILE_ROWS, TiledWeight
from llmpq.models import Checkpoint
from llmpq.models.files.sources import TensorSource
from llmpq.models.files.tensor_files import TensorFiles
from llmpq.quant.loading.assembly import LayerAssembly, Matrix, matrices_of
from llmpq.quant.loading.pieces import (
    LayerEnd,
    LayerJob,
    Mapped,
    MissingEntry,
    Plain,
    Raw,
    Reading,
    Ready,
)
from llmpq.quant.loading.pipeline import Budget
from llmpq.quant.loading.store import Store
from llmpq.quant.loading.stored_layer import StoredLayer
from llmpq.quant.loading.transfer import Transfer
from llmpq.spec.precision import Precision, linear_bytes

_BLOCK_BYTES = 8 << 20
"""What is read at once of a large matrix: enough for a disk, and little to wait for."""


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

    def plain(self, job: LayerJob, tensors: TensorFiles, key: str, source: TensorSource) -> Reading:
        """Take the bytes of a tensor from the budget, and return what reads it."""
        held = held_bytes(source, self.dtype)
        self.budget.take(held)

        def read() -> Plain:
            sent = self.transfer.send(tensors.load(source, self.transfer.allocate))
            return Plain(job=job, key=key, sent=sent, held_bytes=held)

        return read


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

    def pieces(self, layer: Prepared, reader: Reader) -> Iterator[Reading]:
        """Yield what fills a layer, reading each piece when it is asked for.

        Raises:
            SpecError: what ``Checkpoint`` refuses.
        """
        matrices, fingerprint = layer.matrices, layer.fingerprint
        weights = _weights(matrices, layer.sources)
        job = reader.job(layer)
        for key, source in layer.sources.items():
            if key not in {matrix.key for matrix in matrices}:
                yield reader.plain(job, self._checkpoint.tensors, key, source)
        tiled = self._tiled(job, matrices, reader)
        proof = partial(self._is_still, weights, fingerprint)
        stored = self._stored(job, matrices, tiled, fingerprint)
        if stored is not None and stored.is_found:
            job.origin = "from the store"
            yield from self._from_store(stored, job, matrices, weights, reader)
            yield partial(LayerEnd, job=job, keep=proof)
            return
        job.begin_entry = None if stored is None else stored.begin
        for matrix in matrices:
            yield from self._raw(job, matrix, weights[matrix.name], tiled, reader)
        # Only bytes that were those of the fingerprint all the while may go by its name.
        yield partial(LayerEnd, job=job, keep=proof)

    def _stored(
        self,
        job: LayerJob,
        matrices: list[Matrix],
        tiled: frozenset[str],
        fingerprint: str | None,
    ) -> StoredLayer | None:
        if self._store is None or fingerprint is None:
            return None
        dtype = job.assembly.dtype
        return StoredLayer(self._store, fingerprint, matrices, job.precision, dtype, tiled)

    def _from_store(
        self,
        stored: StoredLayer,
        job: LayerJob,
        matrices: list[Matrix],
        weights: Mapping[str, TensorSource],
        reader: Reader,
    ) -> Iterator[Reading]:
        """Read the matrices of an entry: all at once where they can stay in its file."""
        transfer = reader.transfer
        lost = {
            matrix.name: partial(self._lost, stored, job, matrix, weights[matrix.name], transfer)
            for matrix in matrices
        }
        if stored.map():
            yield partial(self._read_mapped, stored, job, matrices, lost, transfer)
            return
        for matrix in matrices:
            held = stored.held_bytes(matrix)
            reader.budget.take(held)
            yield partial(self._read_stored, stored, job, matrix, lost[matrix.name], transfer, held)

    def _read_mapped(
        self,
        stored: StoredLayer,
        job: LayerJob,
        matrices: list[Matrix],
        lost: Mapping[str, Callable[[int], MissingEntry]],
        transfer: Transfer,
    ) -> Mapped:
        found = zip(matrices, stored.mapped(transfer.borrow), strict=True)
        return Mapped(
            matrices=[
                lost[matrix.name](0)
                if tiled is None
                else Ready(job=job, matrix=matrix, packed=tiled, held_bytes=0, is_lasting=True)
                for matrix, tiled in found
            ]
        )

    def _read_stored(
        self,
        stored: StoredLayer,
        job: LayerJob,
        matrix: Matrix,
        lost: Callable[[int], MissingEntry],
        transfer: Transfer,
        held_bytes: int,
    ) -> Ready | MissingEntry:
        packed = stored.read(matrix, transfer.borrow)
        if packed is None:
            return lost(held_bytes)
        is_lasting = stored.keeps_tiles and isinstance(packed, TiledWeight)
        if isinstance(packed, TiledWeight) and is_lasting:
            # Here and now: what was read is in this core's cache, and its memory is lent again.
            packed = packed.clone()
        return Ready(
            job=job,
            matrix=matrix,
            packed=packed,
            held_bytes=held_bytes,
            is_lasting=is_lasting,
        )

    def _lost(
        self,
        stored: StoredLayer,
        job: LayerJob,
        matrix: Matrix,
        source: TensorSource,
        transfer: Transfer,
        held_bytes: int,
    ) -> MissingEntry:
        """Have a matrix quantized again whose entry is damaged."""
        job.origin = ""
        job.repair = stored.begin
        make = partial(
            Raw,
            job=job,
            matrix=matrix,
            first_row=None,
            where=self._checkpoint.tensors.where(source.name),
            held_bytes=held_bytes,
        )
        read = partial(self._read, source, transfer, make)
        return MissingEntry(job=job, read=read, held_bytes=held_bytes)

    def _raw(
        self,
        job: LayerJob,
        matrix: Matrix,
        source: TensorSource,
        tiled: Collection[str],
        reader: Reader,
    ) -> Iterator[Reading]:
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
            make = partial(
                Raw,
                job=job,
                matrix=matrix,
                first_row=first if matrix.name in tiled else None,
                where=tensors.where(source.name),
                held_bytes=held,
            )
            yield partial(self._read, block, reader.transfer, make)

    def _read(self, source: TensorSource, transfer: Transfer, make: Callable[..., Raw]) -> Raw:
        weights = self._checkpoint.tensors.load(source, transfer.borrow, is_temporary=True)
        return make(sent=transfer.send(weights))

    def _tiled(self, job: LayerJob, matrices: list[Matrix], reader: Reader) -> frozenset[str]:
        """Return the names of the matrices whose kernels keep tiles."""
        ask = partial(
            job.assembly.keeps_tiles, precision=job.precision, device_type=reader.device.type
        )
        return frozenset(matrix.name for matrix in matrices if ask(matrix))

    def _is_still(self, weights: Mapping[str, TensorSource], fingerprint: str | None) -> bool:
        return fingerprint is not None and fingerprint == self._fingerprint(weights)

    def _fingerprint(self, weights: Mapping[str, TensorSource]) -> str | None:
        if self._store is None or not weights:
            return None
        return self._checkpoint.tensors.fingerprint(weights.values())


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
