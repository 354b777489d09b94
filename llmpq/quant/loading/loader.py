"""Loader: reads, quantizes and places a checkpoint one matrix at a time.

``load_stage`` is one loop. A thread reads the tensors of the layers to come, in order
(:func:`_read_layers`); the calling thread casts, quantizes and places what has been read. A piece
holds a slot from before it is read until it is placed, so at most ``SLOTS`` 16-bit matrices are
held in addition to the result. Layers quantized by earlier runs are mapped from the cache
(``quant.loading.weight_cache``). The head of the model goes the same way, in blocks of rows.

On Linux loaded weights lie on large pages. A decode step reads every weight once: with pages of 4
KiB the processor looks up each page on the way, which takes up to half of the time inside a virtual
machine. Weights that are mapped from the store are left to the file system.

Shape legend: E experts, V vocabulary, N output features, K input features.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from llmpq.errors import SpecError
from llmpq.kernels.base import KernelBackend, PackedWeight, open_device, packed_row_bytes
from llmpq.kernels.cpu.dense import can_prepack
from llmpq.kernels.cpu.experts import HostPool
from llmpq.kernels.cpu.native import TILE_ROWS, TiledWeight
from llmpq.kernels.registry import TileBackend, choose_backend
from llmpq.models import Checkpoint, DecoderStage, Master
from llmpq.models.states import COMPILED
from llmpq.models.tensor_files import TensorSource, on_host
from llmpq.quant.checkpoint.format import concatenate_rows
from llmpq.quant.checkpoint.reader import GptqCheckpoint, is_as_stored, read_as_stored
from llmpq.quant.loading.prefetch import PAGE_BYTES, Prefetcher, Slot
from llmpq.quant.loading.weight_cache import (
    BackgroundWriter,
    CacheEntry,
    WeightCache,
    entry_key,
    entry_layout,
    weight_of,
)
from llmpq.quant.modules.experts import HostExperts, move_
from llmpq.quant.modules.host_link import HostLink, link_of
from llmpq.quant.modules.layer import (
    DenseLinear,
    LayerVariant,
    Matrix,
    QuantExperts,
    QuantHead,
    QuantLinear,
    TiedEmbedding,
    expert_keys,
    experts_of,
    fuse_norms_,
    is_lookup,
    matrices_of,
    prepack_,
    quantize_layer_,
)
from llmpq.quant.modules.mixers import compile_mixers_
from llmpq.quant.quantizers.rtn import quantize
from llmpq.spec.huggingface.quantization import is_gptq, stored_head
from llmpq.spec.precision import Precision, StageExperts, default_precision
from llmpq.spec.runtime_constants import HEAD_ROW_MULTIPLE

T = TypeVar("T")

SLOTS = 2
"""16-bit matrices held at once: one is being read, one quantized; only one of a checkpoint of wider
numbers. The cost model counts ``MATRICES_UNDER_WAY``, which includes temporaries."""

BLOCK_WEIGHTS = 1 << 21
"""Weights read and quantized at once; their codes stay in a core's cache until they are tiled."""

_HOST = torch.device("cpu")
_MADV_COLLAPSE = 25  # Linux 6.1; at once, the memory is copied
_MADV_HUGEPAGE = 14  # older ones; by a thread of the kernel, in its own time
_GAP_BYTES = 2 * mmap.PAGESIZE
"""Between blocks that malloc mapped one after the other."""
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
    checkpoint: Checkpoint | None = None,
    experts: StageExperts | None = None,
    host: HostPool | None = None,
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
        checkpoint: the weights, ``None`` for those of the directory. What it stores as codes is
            decoded.
        experts: bits and place of routed experts that are not as the rest of their layer.
        host: computes those in the host's memory; ``None`` leaves them to the calling thread.

    Raises:
        SpecError: no such layers or experts, a bitwidth missing or unknown, other bits than a
            GPTQ checkpoint holds, or as ``Checkpoint`` and the quantizers.
    """
    load = _opened(model_dir, dtype, device, backend, weight_cache, checkpoint)
    checkpoint = load.checkpoint
    widths = [16] * (end_layer - first_layer) if bits is None else bits
    _check_range(checkpoint, first_layer, end_layer, widths)
    if load.gptq is not None and bits is not None:
        load.gptq.check_bits(first_layer, bits)
    variants = _variants(load, first_layer, widths, experts)
    is_apart = any(one.resident is not None for one in variants)
    hosts = (host, link_of(load.device) if is_apart else None)
    is_wide = checkpoint.dtype.itemsize > 2 or checkpoint.tensors.decodes
    prefetcher: Prefetcher[Piece | LayerLoad] = Prefetcher(
        1 if is_wide else SLOTS, is_pinned=load.device.type == "cuda"
    )
    read = _read_layers(load, prefetcher, first_layer, variants)
    quantizer, layers = _Quantizer(load), list[nn.Module]()
    with (
        torch.no_grad(),
        _on(load.device),
        nullcontext() if weight_cache is None else BackgroundWriter() as writer,
        closing(prefetcher.iterate(read)) as ahead,
    ):
        for item in ahead:
            if isinstance(item, Piece):
                _place(item, quantizer, writer, load)
            else:
                layers.append(_finished(item, load, hosts))
                if progress is not None:
                    progress(len(layers), len(widths), item.description)
            del item  # before the next one is waited for
    stage = DecoderStage(checkpoint.config, layers, first_layer, checkpoint.skeleton)
    if is_apart:
        move_(stage, load.device)
    else:
        stage.to(load.device)
    use_huge_pages(stage)
    if any(hasattr(part, COMPILED) for part in stage.modules()):
        compile_mixers_(stage, dtype)
    return stage


def _place(
    piece: Piece, quantizer: _Quantizer, writer: BackgroundWriter | None, load: _Load
) -> None:
    """Put a tensor into its layer, or a matrix once all of its rows are quantized."""
    layer, into, weight = piece.layer, piece.into, piece.weight
    if piece.matrices is not None:
        assert isinstance(into, Matrix)
        matrices = piece.matrices
        whole = quantizer.add(matrices, into, piece.first_row, weight)
        if whole is not None:
            if writer is not None and matrices.entry is not None:
                writer.add(matrices.entry, into.name, whole)
                if into is matrices.members[-1]:
                    writer.end()
            linear = load.on(matrices.device).linear(whole)
            layer.install(into, linear, matrices.device)
    else:
        assert isinstance(into, str)
        assert isinstance(weight, Tensor)
        layer.fill({into: _cast(weight.to(layer.device_of(into, load.device)), load.dtype)})
    if piece.slot is not None:
        piece.slot.release()


_Hosts = tuple[HostPool | None, HostLink | None]


def _finished(layer: LayerLoad, load: _Load, hosts: _Hosts) -> nn.Module:
    """Return a layer whose tensors have all been placed."""
    module, resident = layer.finish(), layer.variant.resident
    if 16 in layer.variant.widths:
        # Stacks of which a part is on the host were read into its memory.
        is_apart = resident is not None and load.device != _HOST
        places = dict.fromkeys(resident or (), load.device) if is_apart else None
        quantize_layer_(module, 16, load.dtype, backend=load.backend, resident=places)
    if resident is not None:
        _use_host_(module, resident, load.device, hosts)
    fuse_norms_(module)
    return module


def _use_host_(
    layer: nn.Module, resident: Sequence[int], device: torch.device, hosts: _Hosts
) -> None:
    """Leave the experts of a layer to its host, but for those that are resident."""
    stacks = [(name, one) for name, one in layer.named_modules() if isinstance(one, QuantExperts)]
    for name, stack in stacks:
        if len(resident) < stack.num_experts:
            layer.set_submodule(name, HostExperts(stack, resident, *hosts))
    move_(layer, device)


def _variants(
    load: _Load, first_layer: int, bits: Sequence[int], experts: StageExperts | None
) -> list[LayerVariant]:
    """Return the variant of each layer.

    Raises:
        SpecError: a GPTQ checkpoint has experts of one width with the rest of their layer.
    """
    found = []
    for layer, width in enumerate(bits, first_layer):
        own = None if experts is None else experts.of(layer)
        other = width if own is None or own.bits is None else own.bits
        if load.gptq is not None and other != width:
            raise SpecError(
                f"layer {layer}: found experts at {other} bits beside {width}, expected those of "
                f"the checkpoint {load.checkpoint.directory}"
            )
        found.append(
            LayerVariant(
                precision=default_precision(width),
                experts=default_precision(other),
                resident=None if own is None else own.resident,
            )
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Load:
    """From where weights are loaded, and to where.

    Attributes:
        checkpoint: the weights.
        gptq: the same directory if it holds GPTQ codes, else ``None``.
        dtype: of the run.
        device: where the weights go.
        backend: kernel backend to prefer; ``None`` leaves it to the registry.
        cache: of quantized weights; ``None`` reads and writes none.
    """

    checkpoint: Checkpoint
    gptq: GptqCheckpoint | None
    dtype: torch.dtype
    device: torch.device
    backend: str | None
    cache: WeightCache | None

    def on(self, device: torch.device) -> _Load:
        """Return the same to another device."""
        return self if device == self.device else replace(self, device=device)

    def kernel(
        self, precision: Precision, rows: int, columns: int, *, reads_rows: bool = False
    ) -> KernelBackend:
        """Return the backend of a weight ``[rows, columns]``; errors as ``choose_backend``."""
        asked = (self.device, precision, self.dtype, rows, columns, self.backend)
        return choose_backend(*asked, reads_rows=reads_rows)

    def linear(self, weight: PackedWeight | TiledWeight) -> QuantLinear:
        """Return the operator of a weight, without a bias."""
        kernel = self.kernel(weight.precision, weight.out_features, weight.in_features)
        return QuantLinear(weight, None, kernel)

    def matrix_set(
        self,
        members: Sequence[Matrix],
        weights: Mapping[str, TensorSource],
        precision: Precision,
        *,
        reads_rows: bool = False,
    ) -> MatrixSet:
        """Choose the forms of matrices, and check their entry of the cache."""
        kernels = {
            one.name: self.kernel(
                precision, one.out_features, one.in_features, reads_rows=reads_rows
            )
            for one in members
            if one.name in weights
        }
        tiled = frozenset(name for name, one in kernels.items() if isinstance(one, TileBackend))
        entry = self._entry(members, weights, precision, tiled)
        cached = None if entry is None else entry.read()
        return MatrixSet(
            precision=precision,
            members=members,
            weights=weights,
            tiled=tiled,
            cached=cached,
            entry=entry if cached is None else None,
            device=self.device,
        )

    def _entry(
        self,
        members: Sequence[Matrix],
        weights: Mapping[str, TensorSource],
        precision: Precision,
        tiled: frozenset[str],
    ) -> CacheEntry | None:
        """Return the entry that holds some matrices, or would; ``None`` for none."""
        tensors, sources = self.checkpoint.tensors, list(weights.values())
        fingerprint = None if self.cache is None or not weights else tensors.fingerprint(sources)
        if self.cache is None or fingerprint is None:
            return None
        forms = [
            f"{name} {name in tiled}{' as stored' * is_as_stored(source, precision)}"
            for name, source in weights.items()
        ]
        return CacheEntry(
            cache=self.cache,
            key=entry_key(fingerprint, [str(precision), str(self.dtype), *forms]),
            layout=entry_layout(members, precision, self.dtype, tiled),
            is_valid=lambda: fingerprint == tensors.fingerprint(sources),
        )


def _opened(
    model_dir: Path | str,
    dtype: torch.dtype,
    device: torch.device | str,
    backend: str | None,
    cache: WeightCache | None,
    checkpoint: Checkpoint | None = None,
) -> _Load:
    gptq = None if checkpoint is not None or not is_gptq(model_dir) else GptqCheckpoint(model_dir)
    if checkpoint is None:
        checkpoint = Checkpoint(model_dir) if gptq is None else gptq.checkpoint
    return _Load(
        checkpoint=checkpoint,
        gptq=gptq,
        dtype=dtype,
        device=torch.device(device),
        backend=backend,
        cache=cache,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MatrixSet:
    """Matrices of one precision and device that are one entry of the cache.

    They are those of a layer, its routed experts, or the head.

    Attributes:
        precision: of all of them.
        members: in the order in which they are read.
        weights: source of each by its name; empty if they are stored as GPTQ codes.
        tiled: names of those whose kernels read tiles.
        cached: tensors of the entry, mapped; ``None`` if there is none.
        entry: a new one, to be written; ``None`` if nothing is.
        device: where they go.
    """

    precision: Precision
    members: Sequence[Matrix]
    weights: Mapping[str, TensorSource]
    tiled: frozenset[str]
    cached: Mapping[str, Tensor] | None
    entry: CacheEntry | None
    device: torch.device


@dataclass(slots=True, kw_only=True, eq=False)
class LayerLoad:
    """A decoder layer that is filled one tensor or matrix at a time.

    Attributes:
        index: its place in the model.
        module: the layer; on the meta device what has not been put in.
        sources: of its tensors, but for those stored as GPTQ codes.
        variant: how it is stored.
        matrices: that are stored as codes or are to be quantized.
        origin: of its weights, for the progress line; empty if they are quantized here.
    """

    index: int
    module: nn.Module
    sources: Mapping[str, TensorSource]
    variant: LayerVariant
    matrices: Sequence[MatrixSet]
    origin: str = ""
    _experts: dict[str, dict[str, dict[int, nn.Module]]] = field(default_factory=dict)

    @property
    def description(self) -> str:
        """What the progress line says."""
        origin = f", {self.origin}" if self.origin else ""
        return f"layer {self.index} at {self.variant.text}{origin}"

    def device_of(self, key: str, device: torch.device) -> torch.device:
        """Return where a tensor goes whose layer is on ``device``.

        Stacks of experts of which some are not resident go to the host.
        """
        is_apart = self.variant.resident is not None and key in self._stacks
        return _HOST if is_apart else device

    @property
    def _stacks(self) -> set[str]:
        """Keys of the stacks of routed experts."""
        return {one.key for one in matrices_of(self.module) if one.expert is not None}

    def fill(self, state: Mapping[str, Tensor]) -> None:
        """Put in tensors that are not quantized: norms, biases, routers, 16-bit weights."""
        unknown = self.module.load_state_dict(dict(state), strict=False, assign=True)
        if unknown.unexpected_keys:
            kind = type(self.module).__name__
            raise SpecError(f"{kind}: has no place for '{unknown.unexpected_keys[0]}'")

    def install(self, matrix: Matrix, linear: QuantLinear, device: torch.device) -> None:
        """Put in the operator of one matrix, which is on a device.

        A bias must be there already. Experts are replaced once all of their matrices are there.
        """
        module = self.module.get_submodule(matrix.module)
        if matrix.expert is None:
            assert isinstance(module, nn.Linear)
            linear.set_bias(module.bias)
            self.module.set_submodule(matrix.module, linear)
            return
        stacks = self._experts.setdefault(matrix.module, {key: {} for key in expert_keys(module)})
        key = matrix.key.rpartition(".")[2]
        biases = getattr(module, f"{key}_bias", None)  # [E, N]
        linear.set_bias(None if biases is None else biases[matrix.expert].to(device))
        stacks[key][matrix.expert] = linear
        if all(len(own) == len(module.get_parameter(key)) for key, own in stacks.items()):
            lists = {key: [own[expert] for expert in sorted(own)] for key, own in stacks.items()}
            self.module.set_submodule(matrix.module, experts_of(module, lists))
            del self._experts[matrix.module]

    def finish(self) -> nn.Module:
        """Return the layer.

        Raises:
            SpecError: a tensor is missing.
        """
        layer = self.module
        tensors = (*layer.named_parameters(), *layer.named_buffers())
        missing = [name for name, tensor in tensors if tensor.is_meta]
        if missing:
            kind = type(layer).__name__
            raise SpecError(f"{kind}: tensor '{missing[0]}' is neither stored nor known")
        return layer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """What is read at once: a tensor, or rows of a matrix.

    Attributes:
        layer: that it belongs to.
        into: the matrix, or the tensor's key in the layer's ``state_dict``.
        first_row: of the rows in their matrix.
        matrices: whose matrix it is; ``None`` for a tensor.
        weight: a tensor as it is stored, codes as they are stored, or a cached matrix.
        slot: to release once the piece is placed; ``None`` if more is read into it, or if the
            weight lies in a mapped file.
    """

    layer: LayerLoad
    into: Matrix | str
    matrices: MatrixSet | None = None
    first_row: int = 0
    weight: Tensor | PackedWeight | TiledWeight
    slot: Slot | None


def _read_layers(
    load: _Load,
    prefetcher: Prefetcher[Piece | LayerLoad],
    first_layer: int,
    variants: Sequence[LayerVariant],
) -> Iterator[Piece | LayerLoad]:
    """Yield the pieces of each layer, read when they are asked for, and then the layer.

    Threads prepare the layers to come, so that the disk does not wait for modules to be built and
    several entries of the cache are checked at once.

    Raises:
        SpecError: as ``Checkpoint`` and ``GptqCheckpoint``.
    """
    open_device(load.device)  # of the thread that reads: it allocates pinned memory
    pool = ThreadPoolExecutor(
        max_workers=4,
        thread_name_prefix="load-prepare",
        initializer=open_device,  # choosing a kernel may launch one
        initargs=(load.device,),
    )
    try:
        for layer in pool.map(partial(_prepared, load), count(first_layer), variants):
            yield from _read_layer(load, layer, prefetcher)
            yield layer
    finally:
        pool.shutdown(cancel_futures=True)


def _prepared(load: _Load, index: int, variant: LayerVariant) -> LayerLoad:
    """Build a layer on the meta device, find its tensors and check its entries of the cache.

    Raises:
        SpecError: it has no such experts.
    """
    layer = load.checkpoint.empty_layer(index).requires_grad_(False).eval()
    members: Sequence[Matrix] = ()
    if load.gptq is not None or set(variant.widths) != {16} or variant.resident is not None:
        members = matrices_of(layer)
    variant.check(index, members)
    if load.gptq is not None:
        keys = load.gptq.packed_keys(index)
        members = [matrix for matrix in members if matrix.key in keys]
    without = () if load.gptq is None else {matrix.key for matrix in members}
    sources = load.checkpoint.layer_sources(index, layer, without=without)
    if load.gptq is None:
        members = [one for one in members if variant.precision_of(one.expert).bits != 16]
    weights = {} if load.gptq is not None else _sources_of(members, sources)
    groups: dict[tuple[Precision, torch.device], list[Matrix]] = {}
    for one in members:
        place = _HOST if variant.is_on_host(one.expert) else load.device
        groups.setdefault((variant.precision_of(one.expert), place), []).append(one)
    sets = []
    for (precision, device), own in groups.items():
        named = {one.name: weights[one.name] for one in own if one.name in weights}
        sets.append(load.on(device).matrix_set(own, named, precision))
    return LayerLoad(index=index, module=layer, sources=sources, variant=variant, matrices=sets)


def _sources_of(
    matrices: Sequence[Matrix], sources: Mapping[str, TensorSource]
) -> dict[str, TensorSource]:
    """Return the source of every matrix by its name; experts are slices of one parameter."""
    stacks = {matrix.key for matrix in matrices if matrix.expert is not None}
    slices = {key: list(sources[key].rows()) for key in stacks}
    return {
        matrix.name: sources[matrix.key]
        if matrix.expert is None
        else slices[matrix.key][matrix.expert]
        for matrix in matrices
    }


def _read_layer(
    load: _Load, layer: LayerLoad, prefetcher: Prefetcher[Piece | LayerLoad]
) -> Iterator[Piece]:
    gptq = load.gptq
    keys = {matrix.key for own in layer.matrices for matrix in own.members}
    for key, source in layer.sources.items():
        if key not in keys:
            slot = prefetcher.acquire()
            yield Piece(
                layer=layer, into=key, weight=load.checkpoint.tensors.load(source), slot=slot
            )
    if gptq is not None and layer.matrices:
        layer.origin = "as stored"
    elif layer.matrices and all(own.cached is not None for own in layer.matrices):
        layer.origin = "from the store"
    for own in layer.matrices:
        yield from _read_matrices(load, layer, own, prefetcher)


def _read_matrices(
    load: _Load, layer: LayerLoad, matrices: MatrixSet, prefetcher: Prefetcher[Piece | LayerLoad]
) -> Iterator[Piece]:
    for matrix in matrices.members:
        if load.gptq is not None:
            slot = prefetcher.acquire()
            packed = load.gptq.packed(layer.index, matrix.name, load.dtype)
            assert packed is not None
            yield Piece(layer=layer, into=matrix, matrices=matrices, weight=packed, slot=slot)
            del packed
        elif matrices.cached is not None:
            mapped = weight_of(matrix, matrices.precision, matrices.cached)
            yield Piece(layer=layer, into=matrix, matrices=matrices, weight=mapped, slot=None)
        else:
            yield from _read_rows(load, layer, (matrices, matrix), prefetcher.acquire())


def _read_rows(
    load: _Load, layer: LayerLoad, place: tuple[MatrixSet, Matrix], slot: Slot
) -> Iterator[Piece]:
    """Read a matrix into one slot; quantizing its first rows overlaps with reading the next."""
    (matrices, matrix), tensors = place, load.checkpoint.tensors
    source, rows, first = matrices.weights[matrix.name], matrix.out_features, 0
    kept = read_as_stored(source, matrices.precision, load.dtype, tensors.load)
    if kept is not None:
        layer.origin = "as stored"
        yield Piece(layer=layer, into=matrix, matrices=matrices, weight=kept, slot=slot)
        return
    if matrix.name in matrices.tiled:
        rows = _block_rows(matrix.in_features, TILE_ROWS)
    for weight in tensors.load_blocks(source, slot.allocate, rows):
        end = first + len(weight)
        own = slot if end == matrix.out_features else None
        yield Piece(
            layer=layer, into=matrix, matrices=matrices, first_row=first, weight=weight, slot=own
        )
        first = end
        del weight


def _block_rows(columns: int, multiple: int) -> int:
    """Return how many rows to read and quantize at once."""
    return max(1, BLOCK_WEIGHTS // (columns * multiple)) * multiple


class _Quantizer:
    """Quantizes the rows of one matrix after the other.

    Args:
        load: dtype and place.
    """

    def __init__(self, load: _Load) -> None:
        self._load = load
        self._tiles: TiledWeight | None = None
        self._rows: list[PackedWeight] = []
        self._room = torch.empty(0, dtype=torch.uint8)

    def add(
        self,
        matrices: MatrixSet,
        matrix: Matrix,
        first_row: int,
        weight: Tensor | PackedWeight | TiledWeight,
    ) -> PackedWeight | TiledWeight | None:
        """Quantize rows, unless they are codes; return the matrix once it has its last row.

        Raises:
            SpecError: as ``quantize``, with file and tensor.
        """
        if isinstance(weight, TiledWeight):
            return weight
        is_tiled = matrix.name in matrices.tiled
        if isinstance(weight, PackedWeight):
            rows = weight.to(matrices.device)
        else:
            rows = self._rounded(matrices, matrix, weight, is_tiled=is_tiled)
        if is_tiled:
            if first_row == 0:
                shape = (matrix.out_features, matrix.in_features)
                self._tiles = TiledWeight.empty(*shape, matrices.precision, self._load.dtype)
            assert self._tiles is not None
            self._tiles.put_rows(first_row, rows)
        else:
            self._rows.append(rows)
        if first_row + rows.out_features != matrix.out_features:
            return None
        whole = self._tiles if is_tiled else concatenate_rows(self._rows)
        self._tiles, self._rows = None, []
        return whole

    def _rounded(
        self, matrices: MatrixSet, matrix: Matrix, weight: Tensor, *, is_tiled: bool
    ) -> PackedWeight:
        precision = matrices.precision
        weight = _cast(weight.to(matrices.device), self._load.dtype)
        # Codes that are copied into tiles need memory for a moment: the same for all that fit.
        nbytes = len(weight) * packed_row_bytes(matrix.in_features, precision.bits)
        if is_tiled and self._room.nbytes < nbytes:
            self._room = torch.empty(nbytes, dtype=torch.uint8)
        try:
            return quantize(weight, precision, self._load.dtype, self._room if is_tiled else None)
        except SpecError as error:
            source = matrices.weights[matrix.name]
            where = self._load.checkpoint.tensors.where(source.name)
            raise SpecError(f"{where}: {error}") from error


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
    load = _opened(model_dir, dtype, device, backend, weight_cache)
    master, tensors = Master(load.checkpoint.config), load.checkpoint.tensors
    is_tied = master.lm_head is None
    stored = _stored_head(load, master, head_bits)
    sources = load.checkpoint.master_sources(without=() if stored is None else (head_key(master),))
    head = sources.pop(head_key(master)) if stored is None and head_bits not in (None, 16) else None
    state = {
        key: _cast(tensors.load(source).to(load.device), dtype) for key, source in sources.items()
    }
    master.load_state_dict(state, assign=True, strict=head is None and stored is None)
    with torch.no_grad(), _on(load.device):
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


def _stored_head(load: _Load, master: Master, head_bits: int | None) -> PackedWeight | None:
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
    load: _Load,
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
    source: TensorSource, precision: Precision, load: _Load, *, is_tied: bool
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
    quantizer, whole = _Quantizer(load), None
    with BackgroundWriter() as writer:
        for first_row, rows in _head_rows(matrices, matrix, load):
            whole = quantizer.add(matrices, matrix, first_row, rows)
        assert whole is not None
        if matrices.entry is not None:
            writer.add(matrices.entry, matrix.name, whole)
            writer.end()
    return whole


def _head_rows(
    matrices: MatrixSet, matrix: Matrix, load: _Load
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
    each = _block_rows(matrix.in_features, HEAD_ROW_MULTIPLE)
    for first in range(0, source.shape[0], each):
        block = source.block(first, min(first + each, source.shape[0]))
        weight = _cast(tensors.load(block, on_host).to(load.device), load.dtype)
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
