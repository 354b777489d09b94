"""On-the-fly loader: read, quantize and place a checkpoint one matrix at a time, all three at once.

While a matrix is quantized the next ones are read and the last ones get their kernels' layout
(``quant.pipeline``), and what is under way is bounded by three 16-bit matrices: with a quantizer's
temporaries, a stage loads in little more than the memory of its result. What was quantized before
comes from the store. This module refuses to decide bitwidths: they come from a plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn

from llmpq.errors import SpecError
from llmpq.kernels.cpu.tiled import TiledWeight
from llmpq.kernels.packed import PackedWeight
from llmpq.models import Checkpoint, DecoderStage, Master
from llmpq.quant.checkpoint.gptq_source import GptqSource
from llmpq.quant.checkpoint.reader import GptqCheckpoint, is_gptq
from llmpq.quant.loading.assembly import Matrix, matrices_of
from llmpq.quant.loading.cache_writer import CacheWriter
from llmpq.quant.loading.layer_source import PlainSource, Reader
from llmpq.quant.loading.pieces import (
    LayerEnd,
    LayerJob,
    Mapped,
    MissingEntry,
    Piece,
    Plain,
    Raw,
    Reading,
    Ready,
)
from llmpq.quant.loading.pipeline import Budget, run_pipeline
from llmpq.quant.loading.store import Store
from llmpq.quant.loading.transfer import Transfer, transfer_to
from llmpq.quant.modules.layer import prepack_, quantize_layer_
from llmpq.quant.modules.linear import QuantLinear
from llmpq.quant.modules.norms import fuse_norms_
from llmpq.quant.quantizers.methods import quantize
from llmpq.spec.precision import default_precision

MATRICES_UNDER_WAY = 3
"""16-bit matrices that are held at once, as large as the layer's largest: one being read, one being
quantized, one getting its kernel's layout. ``costmodel.cpu_memory`` counts on it."""
Progress = Callable[[int, int, str], None]
"""Called after each layer with the layers done, the layers in all, and what was done."""


def load_stage(  # noqa: PLR0913  what a stage is, and where it goes; a worker has all of it apart
    model_dir: Path | str,
    first_layer: int,
    end_layer: int,
    bits: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress | None = None,
    backend: str | None = None,
    store: Store | None = None,
) -> DecoderStage:
    """Load decoder layers ``[first_layer, end_layer)``, each at its own bitwidth.

    Args:
        model_dir: directory with ``config.json`` and safetensors weights, plain or GPTQ.
        first_layer: index of the first layer in the whole model.
        end_layer: index after the last.
        bits: 3, 4, 8 or 16 for each of these layers, in order.
        dtype: dtype of the run; what is not quantized is cast to it.
        device: where the layers are quantized and stay.
        progress: called after each layer, from a thread of the loader's own.
        backend: kernel backend to use wherever it can run; ``None`` leaves it to the registry.
        store: layers quantized by earlier runs, and the place for these; ``None`` keeps none.

    Raises:
        SpecError: no such layers, a bitwidth missing or unknown, other bits than a GPTQ
            checkpoint holds, or what ``Checkpoint`` and the quantizers refuse.
    """
    gptq = GptqCheckpoint(model_dir) if is_gptq(model_dir) else None
    checkpoint = Checkpoint(model_dir) if gptq is None else gptq.checkpoint
    _check_range(checkpoint, first_layer, end_layer, bits)
    source: PlainSource | GptqSource = PlainSource(checkpoint, store)
    if gptq is not None:
        gptq.check_bits(first_layer, bits)
        source = GptqSource(gptq)
    held_bytes = budget_bytes(checkpoint.empty_layer(first_layer))
    transfer, budget = transfer_to(device, reused_bytes=held_bytes), Budget(held_bytes)
    reader = Reader(
        budget=budget,
        transfer=transfer,
        device=torch.device(device),
        dtype=dtype,
        backend=backend,
    )

    def pieces() -> Iterator[Reading]:
        # A layer is made ready while the one before is read: the disk never waits for it.
        layers = zip(range(first_layer, end_layer), map(default_precision, bits), strict=True)
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="load-prepare") as preparing:
            ahead = deque([preparing.submit(source.prepare, *next(layers))])
            while ahead:
                layer = ahead.popleft().result()
                ahead.extend(preparing.submit(source.prepare, *one) for one in islice(layers, 1))
                yield from source.pieces(layer, reader)

    bench = _LoadStages(reader=reader, total=len(bits), progress=progress)
    with bench.keeper:
        run_pipeline(pieces(), bench.work, bench.place, budget=budget, scope=transfer.scope)
    stage = DecoderStage(checkpoint.config, bench.layers, first_layer, checkpoint.skeleton)
    return stage.to(device)


def load_master(model_dir: Path | str, *, dtype: torch.dtype, device: torch.device | str) -> Master:
    """Load the embeddings, the final norm and the head, in ``dtype``; they are never quantized.

    Raises:
        SpecError: what ``Checkpoint`` refuses.
    """
    checkpoint = Checkpoint(model_dir)
    transfer = transfer_to(device)
    master = Master(checkpoint.config)
    state: dict[str, Tensor] = {}
    with transfer.scope():
        for key, source in checkpoint.master_sources().items():
            sent = transfer.send(checkpoint.tensors.load(source, transfer.allocate))
            state[key] = _cast(transfer.receive(sent), dtype)
    master.load_state_dict(state, assign=True)
    left = [name for name, buffer in master.named_buffers() if buffer.is_meta]
    if left:
        raise SpecError(f"{type(master).__name__}: buffer '{left[0]}' is neither stored nor known")
    fuse_norms_(master)
    prepack_(master)
    return master.to(device)


@dataclass(slots=True, kw_only=True, eq=False)
class _LoadStages:
    """The work of two threads: ``work`` runs in one, ``place`` and all it touches in the other.

    Either may bring rows into the tiles of ``filling``, never the same.
    """

    reader: Reader
    total: int
    progress: Progress | None
    layers: list[nn.Module] = field(default_factory=list)
    keeper: CacheWriter = field(default_factory=CacheWriter)
    filling: TiledWeight | None = None
    stored: int = 0

    def work(self, piece: Piece, has_time: bool) -> Piece | _Placeable | _Installable | _Rows:
        """Cast what stays, quantize what does not; ``has_time`` when nothing else is waiting."""
        if isinstance(piece, Mapped):
            return replace(piece, matrices=[self._sound(one) for one in piece.matrices])
        if isinstance(piece, Plain):
            tensor = _cast(self._transfer.receive(piece.sent), self.reader.dtype)
            return _Placeable(
                job=piece.job, key=piece.key, tensor=tensor, held_bytes=piece.held_bytes
            )
        if isinstance(piece, MissingEntry):
            piece = piece.read()
        if isinstance(piece, Raw):
            ready = self._quantized(piece)
            if piece.first_row is None:
                return ready
            return self._rows(ready, piece.first_row, has_time)
        if isinstance(piece, Ready) and not piece.is_lasting:
            piece = replace(piece, packed=piece.packed.to(self.reader.device))
            self.stored += 1
            # Nothing to quantize: this thread takes half of what the other would have to do.
            if self.stored % 2:
                linear = piece.job.assembly.linear(piece.packed)
                return _Installable(
                    job=piece.job, matrix=piece.matrix, linear=linear, held_bytes=piece.held_bytes
                )
        return piece

    def place(self, piece: Piece | _Placeable | _Installable | _Rows) -> None:
        """Put a piece where it belongs, and its bytes back into the budget."""
        if isinstance(piece, _Placeable):
            piece.job.assembly.fill({piece.key: piece.tensor})
        elif isinstance(piece, Ready):
            self._install(piece)
        elif isinstance(piece, _Rows):
            self._bring(piece)
            if piece.is_last:
                self._install(piece.whole())
        elif isinstance(piece, Mapped):
            for one in piece.matrices:
                assert isinstance(one, Ready)
                self._install(one)
                self.reader.budget.give(one.held_bytes)
        elif isinstance(piece, _Installable):
            self._put(piece, piece.linear)
        elif isinstance(piece, LayerEnd):
            self._end(piece)
        self.reader.budget.give(piece.held_bytes)

    @property
    def _transfer(self) -> Transfer:
        return self.reader.transfer

    def _sound(self, piece: Ready | MissingEntry) -> Ready:
        if isinstance(piece, Ready):
            return piece
        return self._quantized(piece.read())

    def _quantized(self, piece: Raw) -> Ready:
        weight = _cast(self._transfer.receive(piece.sent), self.reader.dtype)  # [N, K]
        try:
            packed = quantize(
                weight, piece.job.precision, self.reader.dtype, self._transfer.workspace
            )
        except SpecError as error:
            raise SpecError(f"{piece.where}: {error}") from error
        del weight  # before its bytes are given back
        self.reader.budget.give(piece.held_bytes - packed.nbytes)
        return Ready(job=piece.job, matrix=piece.matrix, packed=packed, held_bytes=packed.nbytes)

    def _rows(self, ready: Ready, first_row: int, has_time: bool) -> _Rows:
        """Bring a block of rows into tiles, unless another one waits for this thread.

        Whoever does it all has its codes in his core's cache, and a core that does nothing
        meanwhile is one that the disk's answers need not wait for.
        """
        matrix, block = ready.matrix, ready.packed
        assert isinstance(block, PackedWeight)
        if first_row == 0:
            shape = (matrix.out_features, matrix.in_features)
            self.filling = TiledWeight.empty(*shape, block.precision, block.dtype)
        assert self.filling is not None
        rows = _Rows(
            job=ready.job,
            matrix=matrix,
            tiled=self.filling,
            first_row=first_row,
            is_last=first_row + block.out_features == matrix.out_features,
            block=block,
            held_bytes=ready.held_bytes,
        )
        if has_time:
            self._bring(rows)
        return rows

    def _bring(self, rows: _Rows) -> None:
        """Bring rows into tiles, if nobody has done so."""
        if rows.block is not None:
            rows.tiled.put_rows(rows.first_row, rows.block)
            rows.block = None
            self.reader.budget.give(rows.held_bytes)
            rows.held_bytes = 0

    def _install(self, piece: Ready) -> None:
        matrix, job, packed = piece.matrix, piece.job, piece.packed
        if job.begin_entry is not None:  # the first matrix of a new entry
            self.keeper.begin(job.begin_entry)
            job.begin_entry = None
        self.keeper.add(matrix.name, packed)
        if isinstance(packed, TiledWeight) and piece.is_lasting:
            self._put(piece, job.assembly.adopt(packed))
        else:
            self._put(piece, job.assembly.linear(packed))

    def _put(self, piece: Ready | _Installable, linear: QuantLinear) -> None:
        piece.job.made[piece.matrix.name] = linear
        piece.job.assembly.install(piece.matrix, linear)

    def _repair(self, job: LayerJob) -> None:
        """Write an entry anew that was found damaged; rows are dropped already, tiles are here."""
        tiled = {name: linear.tiled for name, linear in job.made.items()}
        if job.repair is not None and all(tiled.values()):
            self.keeper.begin(job.repair)
            for name, weight in tiled.items():
                assert weight is not None
                self.keeper.add(name, weight)

    def _end(self, piece: LayerEnd) -> None:
        job = piece.job
        if job.repair is not None:
            self._repair(job)
        self.keeper.end(piece.keep)
        layer = job.assembly.finish()
        if job.precision.bits == 16:
            quantize_layer_(layer, 16, self.reader.dtype, backend=self.reader.backend)
        fuse_norms_(layer)
        self.layers.append(layer)
        if self.progress is not None:
            origin = f", {job.origin}" if job.origin else ""
            text = f"layer {job.index} at {job.precision}{origin}"
            self.progress(len(self.layers), self.total, text)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Placeable:
    """A tensor as it stays."""

    job: LayerJob
    key: str
    tensor: Tensor
    held_bytes: int


@dataclass(slots=True, kw_only=True, eq=False)
class _Rows:
    """Rows of a matrix on their way into its tiles, or there already.

    Attributes:
        job: the layer.
        matrix: whose rows they are.
        tiled: all of it, for good.
        first_row: of these.
        is_last: whether the matrix is whole with them.
        block: their codes; ``None`` once they are in tiles.
        held_bytes: to be given back.
    """

    job: LayerJob
    matrix: Matrix
    tiled: TiledWeight
    first_row: int
    is_last: bool
    block: PackedWeight | None
    held_bytes: int

    def whole(self) -> Ready:
        return Ready(
            job=self.job, matrix=self.matrix, packed=self.tiled, held_bytes=0, is_lasting=True
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Installable:
    """A matrix in its kernel's layout."""

    job: LayerJob
    matrix: Matrix
    linear: QuantLinear
    held_bytes: int


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
        default_precision(width)  # refuses an unknown one before any layer is read


def budget_bytes(layer: nn.Module) -> int:
    """Return what may be under way: enough for all three threads, however large the layer is.

    A layer of many experts is mostly small matrices: a bound of one layer would only buy memory.
    """
    largest = max(matrix.out_features * matrix.in_features for matrix in matrices_of(layer))
    layer_bytes = sum(2 * tensor.numel() for tensor in layer.parameters())
    return min(layer_bytes, MATRICES_UNDER_WAY * 2 * largest)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
