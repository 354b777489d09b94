"""Loader: reads, quantizes and places a checkpoint one matrix at a time.

``load_stage`` is one loop. A thread reads the tensors of the layers to come, in order
(:func:`_read_layers`); the calling thread casts, quantizes and places what has been read. A piece
holds a slot from before it is read until it is placed, so at most ``SLOTS`` 16-bit matrices are
held in addition to the result. Layers quantized by earlier runs are mapped from the cache
(``quant.loading.weight_cache``). ``quant.loading.master`` loads the head so, in blocks of rows.

On Linux loaded weights lie on large pages. A decode step reads every weight once: with pages of 4
KiB the processor looks up each page on the way, which takes up to half of the time inside a virtual
machine. Weights that are mapped from the store are left to the file system.

Shape legend: E experts, V vocabulary, N output features, K input features.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from llmpq.errors import SpecError
from llmpq.kernels.base import KernelBackend, PackedWeight, open_device, packed_row_bytes
from llmpq.kernels.cpu.dense import goes_in_panels, panel_rows_of
from llmpq.kernels.cpu.experts import HostPool
from llmpq.kernels.cpu.native import TILE_ROWS, TiledWeight
from llmpq.kernels.registry import TileBackend, choose_backend
from llmpq.models import Checkpoint, DecoderStage
from llmpq.models.states import COMPILED
from llmpq.models.tensor_files import TensorSource
from llmpq.quant.checkpoint.format import concatenate_rows
from llmpq.quant.checkpoint.reader import GptqCheckpoint, is_as_stored, read_as_stored
from llmpq.quant.loading.streaming import MappedFile, StreamedWeights, madvise
from llmpq.quant.loading.weight_cache import (
    BackgroundWriter,
    CacheEntry,
    WeightCache,
    dense_weight_of,
    entry_key,
    entry_layout,
    finish_entry,
    weight_of,
)
from llmpq.quant.modules.experts import use_host_
from llmpq.quant.modules.latent import EXPANDING, absorb_latents_
from llmpq.quant.modules.layer import (
    DenseLinear,
    LayerVariant,
    Matrix,
    QuantLinear,
    dense_linear,
    dense_weight,
    expert_keys,
    experts_of,
    fuse_norms_,
    matrices_of,
    operator_of,
    quantize_layer_,
    set_bias_,
)
from llmpq.quant.modules.mixers import compile_mixers_
from llmpq.quant.quantizers.rtn import quantize
from llmpq.spec.huggingface.quantization import is_gptq
from llmpq.spec.precision import Precision, StageExperts, default_precision
from llmpq.units import MIB

T = TypeVar("T")

SLOTS = 2
"""16-bit matrices held at once: one is being read, one quantized; only one of a checkpoint of wider
numbers. The cost model counts ``MATRICES_UNDER_WAY``, which includes temporaries."""

BLOCK_WEIGHTS = 1 << 21
"""Weights read and quantized at once; their codes stay in a core's cache until they are tiled."""

_HOST = torch.device("cpu")
PAGE_BYTES = 2 * MIB
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
    on_disk: Collection[int] = (),
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
        on_disk: layers of the stage (from 0) whose weights stay in files of the cache, from which
            they are read as they are needed.
        experts: bits and place of routed experts that are not as the rest of their layer.
        host: computes those in the host's memory; ``None`` leaves them to the calling thread.

    Raises:
        SpecError: no such layers or experts, a bitwidth missing or unknown, other bits than a
            GPTQ checkpoint holds, or as ``Checkpoint`` and the quantizers.
    """
    load = opened(model_dir, dtype, device, backend, weight_cache, checkpoint)
    checkpoint = load.checkpoint
    widths = [16] * (end_layer - first_layer) if bits is None else bits
    _check_range(checkpoint, first_layer, end_layer, widths)
    if load.gptq is not None and bits is not None:
        load.gptq.check_bits(first_layer, bits)
    variants = _variants(load, first_layer, widths, experts)
    layers = list[nn.Module]()
    with torch.no_grad(), on_device(load.device):
        files = _layers_on_disk(
            load, {first_layer + index: variants[index] for index in sorted(on_disk)}
        )
        for layer in _loaded_layers(load, first_layer, variants, files):
            layers.append(layer.module)
            if progress is not None:
                progress(len(layers), len(widths), layer.description)
            del layer  # before the next one is waited for
    stage = DecoderStage(checkpoint.config, layers, first_layer, checkpoint.skeleton)
    if any(one.resident is not None for one in variants):
        use_host_(stage, [one.resident for one in variants], load.device, host)
    else:
        stage.to(load.device)
    use_huge_pages(*(part for place, part in enumerate(layers) if place not in on_disk))
    if any(hasattr(part, COMPILED) for part in stage.modules()):
        compile_mixers_(stage, dtype)
    if load.device.type == "cpu" and any(hasattr(part, EXPANDING) for part in stage.modules()):
        stage.absorbs_latents = not files and absorb_latents_(stage, dtype)
    if files:
        stage.streamed = StreamedWeights(
            {index - first_layer: _mapped_file(layer) for index, layer in files.items()}
        )
    return stage


def _loaded_layers(
    load: Load,
    first_layer: int,
    variants: Sequence[LayerVariant],
    prepared: Mapping[int, LayerLoad],
) -> Iterator[LayerLoad]:
    """Yield layers that are whole; ``prepared`` are some of them by their index in the model."""
    checkpoint = load.checkpoint
    is_wide = checkpoint.dtype.itemsize > 2 or checkpoint.tensors.decodes
    prefetcher: Prefetcher[Piece | LayerLoad] = Prefetcher(
        1 if is_wide else SLOTS, is_pinned=load.device.type == "cuda"
    )
    read = _read_layers(load, prefetcher, first_layer, variants, prepared)
    quantizer = RowQuantizer(load)
    with (
        nullcontext() if load.cache is None else BackgroundWriter() as writer,
        closing(prefetcher.iterate(read)) as ahead,
    ):
        for item in ahead:
            if isinstance(item, Piece):
                _place(item, quantizer, writer, load)
            else:
                _finish_(item, load)
                yield item
            del item  # before the next one is waited for


def _layers_on_disk(load: Load, variants: Mapping[int, LayerVariant]) -> dict[int, LayerLoad]:
    """Prepare layers whose weights rest on disk, by their index in the model.

    Those that are not in the cache yet are made, one at a time, and written to it.

    Raises:
        SpecError: there is no cache, it cannot hold a layer, or the device cannot read from it.
    """
    found: dict[int, LayerLoad] = {}
    for index, variant in variants.items():
        where = f"layer {index}: its weights rest on disk, but"
        if load.device.type != "cpu":
            raise SpecError(
                f"{where} found device '{load.device}', expected a CPU: other devices do not "
                "stream yet; plan with --no_streaming"
            )
        if load.cache is None:
            raise SpecError(
                f"{where} found no store of weights, expected one: name a folder by --store"
            )
        if load.gptq is not None:
            raise SpecError(
                f"{where} found a checkpoint in GPTQ's format, which is not streamed yet; plan "
                "with --no_streaming, or serve the model it was made from"
            )
        layer = _prepared(load, index, variant, on_disk=True)
        (matrices,) = layer.matrices
        if matrices.file is None:
            raise SpecError(
                f"{where} found files in {load.checkpoint.directory} that are being written, or "
                "were a moment ago; try again"
            )
        if matrices.cached is None:
            for made in _loaded_layers(load, index, [variant], {}):
                if matrices.precision.bits == 16:
                    _write_dense(matrices, made.module)
                del made
            layer = _prepared(load, index, variant, on_disk=True)
            (matrices,) = layer.matrices
        if matrices.cached is None:
            raise SpecError(
                f"{where} {load.cache.directory} cannot hold it; raise --store_limit, or give "
                "--store a folder with room"
            )
        found[index] = layer
    return found


def _write_dense(matrices: MatrixSet, layer: nn.Module) -> None:
    """Write the unquantized matrices of a layer to their entry of the cache."""
    assert matrices.file is not None
    writer = matrices.file.write()
    if writer is None:
        return
    for name, matrix in ((one.name, one) for one in matrices.members):
        writer.add(f"{name}.tiles", dense_weight(operator_of(layer, matrix)))
    finish_entry(writer, matrices.file)


def _mapped_file(layer: LayerLoad) -> MappedFile:
    """Return the file that a layer's weights lie in.

    Raises:
        SpecError: a kernel has made a copy of them, or the file is gone.
    """
    (matrices,) = layer.matrices
    assert matrices.file is not None
    assert matrices.cached is not None
    descriptor = matrices.file.open()
    if descriptor is None:
        raise SpecError(
            f"layer {layer.index}: found its file in {matrices.file.cache.directory} deleted by "
            "another run; raise --store_limit"
        )
    file = MappedFile(
        tensors=tuple(matrices.cached.values()),
        descriptor=descriptor,
        name=f"the weights of layer {layer.index}",
    )
    for matrix in matrices.members:
        operator = operator_of(layer.module, matrix)
        weights = (
            operator.prepared.tensors
            if isinstance(operator, (QuantLinear, DenseLinear))
            else (dense_weight(operator),)
        )
        if not all(map(file.holds, weights)):
            raise SpecError(
                f"layer {layer.index}: '{matrix.name}' "
                f"[{matrix.out_features}, {matrix.in_features}] at {matrices.precision} has no "
                "kernel here that reads it in place; plan with --no_streaming"
            )
    return file


def _place(
    piece: Piece, quantizer: RowQuantizer, writer: BackgroundWriter | None, load: Load
) -> None:
    """Put a tensor into its layer, or a matrix once all of its rows are quantized."""
    layer, into, weight = piece.layer, piece.into, piece.weight
    if isinstance(into, Matrix):
        matrices = piece.matrices
        assert matrices is not None
        if isinstance(weight, Tensor) and matrices.cached is not None:
            layer.install(into, dense_linear(weight, is_ordered=into.name in matrices.tiled))
        elif (whole := quantizer.add(matrices, into, piece.first_row, weight)) is not None:
            if writer is not None and matrices.entry is not None:
                writer.add(matrices.entry, into.name, whole)
                if into is matrices.members[-1]:
                    writer.end()
            layer.install(into, load.on(matrices.device).linear(whole))
    else:
        assert isinstance(weight, Tensor)
        device = layer.device_of(into, load.device)
        layer.fill({into: cast_to(weight.to(device), load.dtype)})
    if piece.slot is not None:
        piece.slot.release()


def _finish_(layer: LayerLoad, load: Load) -> None:
    """Finish a layer whose tensors have all been placed."""
    module, resident = layer.finish(), layer.variant.resident
    if 16 in layer.variant.widths:
        # Stacks of which a part is on the host were read into its memory.
        is_apart = resident is not None and load.device != _HOST
        places = dict.fromkeys(resident or (), load.device) if is_apart else None
        quantize_layer_(module, 16, load.dtype, backend=load.backend, resident=places)
    fuse_norms_(module)


def _variants(
    load: Load, first_layer: int, bits: Sequence[int], experts: StageExperts | None
) -> list[LayerVariant]:
    """Return the variant of each layer.

    Raises:
        SpecError: a GPTQ checkpoint has experts of one width with the rest of their layer.
    """
    found = []
    for layer, width in enumerate(bits, first_layer):
        found.append(LayerVariant.of(width, None if experts is None else experts.of(layer)))
        dense, other = found[-1].widths
        if load.gptq is not None and other != dense:
            raise SpecError(
                f"layer {layer}: found experts at {other} bits beside {dense}, expected those of "
                f"the checkpoint {load.checkpoint.directory}"
            )
    return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Load:
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

    def on(self, device: torch.device) -> Load:
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
        tiled = self._tiled([one for one in members if one.name in weights], precision, reads_rows)
        entry = self._entry(members, weights, precision, tiled)
        cached = None if entry is None else entry.read()
        return MatrixSet(
            precision=precision,
            members=members,
            weights=weights,
            tiled=tiled,
            cached=cached,
            entry=entry if cached is None and precision.bits != 16 else None,
            file=entry,
            device=self.device,
        )

    def _tiled(
        self, members: Sequence[Matrix], precision: Precision, reads_rows: bool
    ) -> frozenset[str]:
        """Return the names of those matrices that are kept in tiles, or in panels if 16 bits."""

        def is_tiled(one: Matrix) -> bool:
            shape = one.out_features, one.in_features
            if precision.bits == 16:
                return goes_in_panels(*shape, self.dtype)
            kernel = self.kernel(precision, *shape, reads_rows=reads_rows)
            return isinstance(kernel, TileBackend)

        return frozenset(one.name for one in members if is_tiled(one))

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
        if precision.bits == 16 and tiled:
            forms.append(f"panels of {panel_rows_of(self.dtype)}")
        return CacheEntry(
            cache=self.cache,
            key=entry_key(fingerprint, [str(precision), str(self.dtype), *forms]),
            layout=entry_layout(members, precision, self.dtype, tiled),
            is_valid=lambda: fingerprint == tensors.fingerprint(sources),
        )


def opened(
    model_dir: Path | str,
    dtype: torch.dtype,
    device: torch.device | str,
    backend: str | None,
    cache: WeightCache | None,
    checkpoint: Checkpoint | None = None,
) -> Load:
    """Open a model directory; arguments are those of :func:`load_stage`."""
    gptq = None if checkpoint is not None or not is_gptq(model_dir) else GptqCheckpoint(model_dir)
    if checkpoint is None:
        checkpoint = Checkpoint(model_dir) if gptq is None else gptq.checkpoint
    return Load(
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
        tiled: names of those whose kernels read tiles, or panels of 16-bit numbers.
        cached: tensors of the entry, mapped; ``None`` if there is none.
        entry: a new one, to be written; ``None`` if nothing is.
        file: the entry, written or not; ``None`` without a cache.
        device: where they go.
    """

    precision: Precision
    members: Sequence[Matrix]
    weights: Mapping[str, TensorSource]
    tiled: frozenset[str]
    cached: Mapping[str, Tensor] | None
    entry: CacheEntry | None
    file: CacheEntry | None
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

    def install(self, matrix: Matrix, linear: nn.Module) -> None:
        """Put in the operator of one matrix.

        A bias must be there already. Experts are replaced once all of their matrices are there.
        """
        module = self.module.get_submodule(matrix.module)
        if matrix.expert is None:
            assert isinstance(module, nn.Linear)
            set_bias_(linear, module.bias)
            self.module.set_submodule(matrix.module, linear)
            return
        stacks = self._experts.setdefault(matrix.module, {key: {} for key in expert_keys(module)})
        key = matrix.key.rpartition(".")[2]
        biases = getattr(module, f"{key}_bias", None)  # [E, N]
        place = _HOST if self.variant.is_on_host(matrix.expert) else None
        set_bias_(linear, None if biases is None else biases[matrix.expert].to(place))
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
    load: Load,
    prefetcher: Prefetcher[Piece | LayerLoad],
    first_layer: int,
    variants: Sequence[LayerVariant],
    prepared: Mapping[int, LayerLoad],
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

    def prepare(index: int, variant: LayerVariant) -> LayerLoad:
        return prepared[index] if index in prepared else _prepared(load, index, variant)

    try:
        for layer in pool.map(prepare, count(first_layer), variants):
            yield from _read_layer(load, layer, prefetcher)
            yield layer
    finally:
        pool.shutdown(cancel_futures=True)


def _prepared(load: Load, index: int, variant: LayerVariant, *, on_disk: bool = False) -> LayerLoad:
    """Build a layer on the meta device, find its tensors and check its entries of the cache.

    Unquantized weights have one if they rest on disk.

    Raises:
        SpecError: it has no such experts.
    """
    layer = load.checkpoint.empty_layer(index).requires_grad_(False).eval()
    members: Sequence[Matrix] = ()
    if load.gptq is not None or not variant.is_plain or on_disk:
        members = matrices_of(layer)
    variant.check(index, members)
    if load.gptq is not None:
        keys = load.gptq.packed_keys(index)
        members = [matrix for matrix in members if matrix.key in keys]
    without = () if load.gptq is None else {matrix.key for matrix in members}
    sources = load.checkpoint.layer_sources(index, layer, without=without)
    if load.gptq is None and not on_disk:
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
    load: Load, layer: LayerLoad, prefetcher: Prefetcher[Piece | LayerLoad]
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
    load: Load, layer: LayerLoad, matrices: MatrixSet, prefetcher: Prefetcher[Piece | LayerLoad]
) -> Iterator[Piece]:
    for matrix in matrices.members:
        if load.gptq is not None:
            slot = prefetcher.acquire()
            packed = load.gptq.packed(layer.index, matrix.name, load.dtype)
            assert packed is not None
            yield Piece(layer=layer, into=matrix, matrices=matrices, weight=packed, slot=slot)
            del packed
        elif matrices.cached is not None:
            mapped = (
                dense_weight_of(matrix, matrices.cached)
                if matrices.precision.bits == 16
                else weight_of(matrix, matrices.precision, matrices.cached)
            )
            yield Piece(layer=layer, into=matrix, matrices=matrices, weight=mapped, slot=None)
        else:
            yield from _read_rows(load, layer, (matrices, matrix), prefetcher.acquire())


def _read_rows(
    load: Load, layer: LayerLoad, place: tuple[MatrixSet, Matrix], slot: Slot
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
        rows = block_rows(matrix.in_features, TILE_ROWS)
    for weight in tensors.load_blocks(source, slot.allocate, rows):
        end = first + len(weight)
        own = slot if end == matrix.out_features else None
        yield Piece(
            layer=layer, into=matrix, matrices=matrices, first_row=first, weight=weight, slot=own
        )
        first = end
        del weight


def block_rows(columns: int, multiple: int) -> int:
    """Return how many rows to read and quantize at once."""
    return max(1, BLOCK_WEIGHTS // (columns * multiple)) * multiple


class RowQuantizer:
    """Quantizes the rows of one matrix after the other.

    Args:
        load: dtype and place.
    """

    def __init__(self, load: Load) -> None:
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
        weight = cast_to(weight.to(matrices.device), self._load.dtype)
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
    if nbytes > PAGE_BYTES:  # Linux aligns only maps of whole huge pages to them
        nbytes = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
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


def use_huge_pages(*modules: nn.Module) -> None:
    """Ask for pages of ``PAGE_BYTES`` for the weights of modules that lie in memory.

    Only pages that weights fill are asked for, so that no memory is added. Nothing happens where
    the system has no such pages, or a weight is mapped from a file.
    """
    for first, end in huge_ranges(_spans(modules)):
        for advice in (_MADV_COLLAPSE, _MADV_HUGEPAGE):
            if madvise(first, end - first, advice):
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


def _spans(modules: Iterable[nn.Module]) -> Iterator[tuple[int, int]]:
    for tensor in (weight for module in modules for weight in _weights(module)):
        if tensor.device.type == "cpu" and tensor.layout == torch.strided:
            yield tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def _weights(module: nn.Module) -> Iterator[Tensor]:
    for part in module.modules():
        yield from part.parameters(recurse=False)
        if isinstance(part, (QuantLinear, DenseLinear)):
            yield from part.prepared.tensors


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which kernels run on a GPU; nothing for other devices."""
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


def cast_to(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor, of floats in ``dtype``."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
