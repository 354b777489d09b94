"""Where the pieces of a layer come from: a plain checkpoint, or the store of what was quantized.

A source turns a layer into pieces in the order in which the layer wants them. It runs in the
loader's reading thread, takes the bytes of every piece from the budget before it reads it, and
does no arithmetic. This module refuses to quantize and to place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from llmpq.kernels.packed import PackedWeight, packed_row_bytes
from llmpq.models import Checkpoint
from llmpq.models.sources import TensorSource
from llmpq.quant.assembly import LayerAssembly, Matrix, matrices_of
from llmpq.quant.pipeline import Budget
from llmpq.quant.store import EntryWriter, Layout, Store, entry_key
from llmpq.quant.transfer import Sent, Transfer
from llmpq.spec.precision import Precision, linear_bytes


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
    """A matrix that has to be quantized; ``where`` names it in messages."""

    job: LayerJob
    matrix: Matrix
    sent: Sent
    where: str
    held_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ready:
    """A quantized matrix."""

    job: LayerJob
    matrix: Matrix
    packed: PackedWeight
    held_bytes: int


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
        dtype: of the run.
        backend: kernel backend asked for.
    """

    budget: Budget
    transfer: Transfer
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
        entry = self._begin(job, fingerprint, matrices, reader)
        if entry is not None:
            job.origin = "from the store"
            yield from _stored(job, matrices, entry)
            yield LayerEnd(job=job, held_bytes=entry.held_bytes)
            return
        yield from self._raw(job, matrices, weights, reader)
        # Only bytes that were those of the fingerprint all the while may go by its name.
        yield LayerEnd(job=job, keep=fingerprint == self._fingerprint(weights))

    def _raw(
        self,
        job: LayerJob,
        matrices: list[Matrix],
        weights: Mapping[str, TensorSource],
        reader: Reader,
    ) -> Iterator[Raw]:
        tensors = self._checkpoint.tensors
        for matrix in matrices:
            source = weights[matrix.name]
            held = held_bytes(source, reader.dtype) + _packed_bytes(
                matrix, job.precision, reader.dtype
            )
            reader.budget.take(held)
            read = tensors.load(source, reader.transfer.borrow, is_temporary=True)
            sent = reader.transfer.send(read)
            del read
            where = tensors.where(source.name)
            yield Raw(job=job, matrix=matrix, sent=sent, where=where, held_bytes=held)

    def _fingerprint(self, weights: Mapping[str, TensorSource]) -> str | None:
        if self._store is None or not weights:
            return None
        return self._checkpoint.tensors.fingerprint(weights.values())

    def _begin(
        self, job: LayerJob, fingerprint: str | None, matrices: list[Matrix], reader: Reader
    ) -> _Entry | None:
        """Read the layer from the store, or begin its entry there."""
        if self._store is None or fingerprint is None:
            return None
        names = [matrix.name for matrix in matrices]
        key = entry_key(fingerprint, [str(job.precision), str(reader.dtype), *names])
        layout = entry_layout(matrices, job.precision, reader.dtype)
        held = sum(_packed_bytes(matrix, job.precision, reader.dtype) for matrix in matrices)
        reader.budget.take(held)
        tensors = self._store.read(key, layout, reader.transfer.borrow)
        if tensors is not None:
            return _Entry(tensors=tensors, held_bytes=held)
        reader.budget.give(held)
        job.begin_entry = partial(self._store.writer, key, layout)
        return None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Entry:
    """A layer as the store had it; emptied while its matrices are handed on."""

    tensors: dict[str, Tensor]
    held_bytes: int


def _stored(job: LayerJob, matrices: list[Matrix], entry: _Entry) -> Iterator[Ready]:
    for matrix in matrices:
        packed = PackedWeight(
            out_features=matrix.out_features,
            in_features=matrix.in_features,
            precision=job.precision,
            codes=entry.tensors.pop(f"{matrix.name}.codes"),
            scales=entry.tensors.pop(f"{matrix.name}.scales"),
            zeros=entry.tensors.pop(f"{matrix.name}.zeros", None),
        )
        yield Ready(job=job, matrix=matrix, packed=packed, held_bytes=0)


def entry_layout(matrices: list[Matrix], precision: Precision, dtype: torch.dtype) -> Layout:
    """Return the tensors of a layer's entry in the store, in the order of its matrices."""
    layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for matrix in matrices:
        rows, columns = matrix.out_features, matrix.in_features
        groups = columns // precision.effective_group(columns)
        row_bytes = packed_row_bytes(columns, precision.bits)
        layout[f"{matrix.name}.codes"] = (torch.uint8, (rows, row_bytes))
        layout[f"{matrix.name}.scales"] = (dtype, (rows, groups))
        if not precision.symmetric:
            layout[f"{matrix.name}.zeros"] = (dtype, (rows, groups))
    return layout


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


def _packed_bytes(matrix: Matrix, precision: Precision, dtype: torch.dtype) -> int:
    return linear_bytes(matrix.out_features, matrix.in_features, precision, dtype.itemsize)
