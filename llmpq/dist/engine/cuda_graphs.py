"""DecodeGraphs: decode steps of a stage as CUDA graphs.

**Experimental: written without a GPU.** The tests replace the capture by one that replays the same
operators at the same addresses on a CPU; CUDA's own capture has not been run.

A decode step of a few rows is hundreds of small kernels, and the GPU waits for Python to launch
them. A CUDA graph launches all of them at once, with fixed shapes and addresses. So steps are
grouped by their rows, rounded up, and inputs are copied to fixed buffers. Attention reads the
blocks of each row up to its own position, so lengths are no part of the shape, and the memory of
the graphs does not grow with the sequences. All are captured at the start, the largest first: their
memory pool cannot join small free blocks, so in ascending order each would take new memory, and a
capture during serving would delay its step. A step that fits no graph runs uncaptured. Layers that
synchronize with the host (LLM.int8() looks for outliers, transformers' experts route there) run
uncaptured between the captured ones.

Everything that a graph reads or writes is held by the graph, the layers or the blocks of the KV
cache for as long as the graph is kept: a graph writes to its addresses whatever lies there.

Shapes: R rows, H hidden size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from llmpq.dist.kv.cache import KVCache
from llmpq.dist.kv.decode_tables import DecodeTables
from llmpq.logging import get_logger
from llmpq.models import DecoderStage, PackedBatch
from llmpq.models.stage import LayerArguments

logger = get_logger(__name__)

Work = Callable[[], None]

MOST_GRAPHS = 64
"""Most graphs of a stage: each keeps memory on the device, and capturing takes a step or two."""
_SYNCS = frozenset(
    (
        "_local_scalar_dense",
        "_unique",
        "_unique2",
        "bincount",
        "equal",
        "is_nonzero",
        "masked_select",
        "nonzero",
        "unique_consecutive",
        "unique_dim",
    )
)
"""Operators whose result, or its size, is read by the host."""
_COPIES = frozenset(("_to_copy", "copy_", "_copy_from"))
_INDEXES = frozenset(("index", "index_put", "index_put_", "_unsafe_index"))


class Capture(Protocol):
    """Captures work on fixed buffers."""

    def __call__(self, work: Work) -> Work:
        """Return a function that replays the work; nothing else may have changed meanwhile."""
        ...

    def free_bytes(self) -> int:
        """Return the memory that the device has left."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSizes:
    """The decode steps that a stage will run.

    Attributes:
        rows: most rows.
        most_tokens: tokens of the longest sequence.
    """

    rows: int
    most_tokens: int

    def shapes(self) -> tuple[int, ...]:
        """Return the numbers of rows that steps are rounded up to, at most ``MOST_GRAPHS``.

        These are 1, 2, 4, then multiples of 8 and of an eighth of the power of two below: so a row
        in eight computes nothing, at most.
        """
        found = [1]
        while found[-1] < self.rows and len(found) < MOST_GRAPHS:
            last = found[-1]
            power = 1 << (last.bit_length() - 1)
            found.append(min(self.rows, last + max(min(power, 8), power // 8)))
        return tuple(found)


class DecodeGraphs:
    """The layers of a stage, with decode steps captured.

    Args:
        layers: of the stage.
        cache: of their keys and values; on the same device.
        capture: captures the work of a step.
    """

    def __init__(self, layers: DecoderStage, cache: KVCache, *, capture: Capture) -> None:
        self._layers = layers
        self._cache = cache
        self._capture: Capture | None = capture
        self._graphs: list[_Graph] = []  # the smallest first
        self._waits: list[bool] | None = None

    @property
    def takes_prompts(self) -> bool:
        """No: prompts are not captured."""
        return False

    @property
    def shapes(self) -> tuple[int, ...]:
        """The captured numbers of rows, the smallest first."""
        return tuple(graph.rows for graph in self._graphs)

    @torch.inference_mode()
    def capture(self, shapes: Collection[int], most_tokens: int, *, reserve_bytes: int = 0) -> None:
        """Capture numbers of rows, the largest first; keep those that leave enough memory.

        Called before any sequence is in the cache: it writes to block 0. One whose capture runs
        out of memory, or leaves less than ``reserve_bytes``, is dropped, and smaller ones are
        tried. All graphs share one pool, which holds the temporaries of the largest.

        Args:
            shapes: numbers of rows to be captured.
            most_tokens: of the longest sequence.
            reserve_bytes: memory that uncaptured steps need.
        """
        tables = DecodeTables(self._cache, max(shapes, default=0), most_tokens)
        for rows in sorted(shapes, reverse=True):
            if self._capture is None:
                break
            graph = self._captured(rows, tables)
            if graph is None:
                continue
            if self._capture.free_bytes() < reserve_bytes:
                graph.drop()
                if self._graphs:  # smaller ones take no less than this one added
                    break
            else:
                self._graphs.insert(0, graph)
        logger.info("captured %d shapes of decode steps", len(self._graphs))

    @torch.inference_mode()
    def forward(self, hidden: Tensor, batch: PackedBatch) -> Tensor:
        """Run the layers over one step, as ``DecoderStage.forward`` does with the cache."""
        found = None
        if batch.is_decode:
            found = next((one for one in self._graphs if one.holds(batch)), None)
        if found is None:
            output: Tensor = self._layers(hidden, batch, self._cache)
            return output
        return found.run(hidden, batch)

    def _captured(self, rows: int, tables: DecodeTables) -> _Graph | None:
        """Return the graph of so many rows, ``None`` if the capture failed."""
        assert self._capture is not None
        size = self._layers.config.hidden_size
        hidden = torch.zeros(1, 1, size, dtype=self._cache.dtype, device=self._cache.device)
        try:
            graph = _Graph(self._layers, tables, rows, hidden)
            if self._waits is None:
                self._waits = graph.find_waits()
            graph.capture(self._capture, self._waits)
        except torch.OutOfMemoryError as error:
            logger.info("no CUDA graph of %d rows: %s", rows, error)
            return None
        # CUDA, Triton and the libraries fail in ways that cannot be listed; the layers still run.
        except Exception as error:
            kind = type(error).__name__
            logger.warning("decoding continues without CUDA graphs: %s: %s", kind, error)
            self._capture = None
            self._graphs.clear()
            return None
        return graph


class _Piece:
    """Layers ``[first, end)`` of a graph, from one fixed buffer to another."""

    def __init__(self, graph: _Graph, first: int, end: int) -> None:
        self._graph = graph
        self._range = range(first, end)
        self.hidden = graph.hidden if first == 0 else torch.zeros_like(graph.hidden)
        self.output = self.hidden
        self.work: Work = self.run_layers

    def run_layers(self) -> None:
        """Run the layers; this is what is captured."""
        hidden = self.hidden
        for index in self._range:
            hidden = self._graph.run_layer(index, hidden)
        self.output = hidden


class _Graph:
    """Decode steps of one number of rows.

    Attributes:
        rows: R, of the steps.
        hidden: ``[1, R, H]``, the buffer for a step's hidden states.
    """

    def __init__(self, layers: DecoderStage, tables: DecodeTables, rows: int, like: Tensor) -> None:
        self._layers = layers
        self._tables = tables
        self.rows = rows
        self.hidden = like.new_zeros(1, rows, like.shape[2])
        self._arguments: list[LayerArguments] = []
        self._prepare: Work = self._make_arguments
        self._pieces: list[_Piece] = []

    def holds(self, batch: PackedBatch) -> bool:
        """Return whether the graph can run a decode step."""
        return batch.rows <= self.rows and batch.longest <= self._tables.most_tokens

    def fill(self, hidden: Tensor, batch: PackedBatch) -> None:
        """Copy a step into the buffers; copies of the last row fill the missing ones.

        The copies write equal values to the same block.
        """
        self._tables.place(batch, self.rows)
        self.hidden[:, : batch.rows] = hidden
        if batch.rows < self.rows:
            self.hidden[:, batch.rows :] = hidden[:, -1:]

    def find_waits(self) -> list[bool]:
        """Run the step twice; return for each layer whether it synchronizes with the host.

        First calls try kernels and compile, which synchronizes, too: the second run counts.
        """
        self._make_arguments()
        for index in range(len(self._layers.layers)):
            self.run_layer(index, self.hidden)
        found = host_syncs(self._make_arguments)
        if found:
            raise RuntimeError(f"the step's masks and positions need {found[0]}")
        hidden, waits = self.hidden, []
        for index in range(len(self._layers.layers)):
            start = hidden
            outputs: list[Tensor] = []
            ops = host_syncs(lambda: outputs.append(self.run_layer(index, start)))  # noqa: B023
            waits.append(bool(ops))
            hidden = outputs[0]
        return waits

    def capture(self, capture: Capture, waits: list[bool]) -> None:
        """Capture every range of layers that do not synchronize with the host."""
        self._prepare = capture(self._make_arguments)
        self._prepare()  # a capture runs nothing, and the next captures need these arguments
        for is_waiting, run in itertools.groupby(range(len(waits)), waits.__getitem__):
            first, *rest = run
            piece = _Piece(self, first, first + len(rest) + 1)
            if not is_waiting:
                piece.work = capture(piece.run_layers)
            self._pieces.append(piece)

    def drop(self) -> None:
        """Free the memory now: pieces and graph refer to each other."""
        self._pieces.clear()

    def run(self, hidden: Tensor, batch: PackedBatch) -> Tensor:
        """Run one step; return ``[1, R, H]`` in new memory."""
        self.fill(hidden, batch)
        self._prepare()
        current = self.hidden
        for piece in self._pieces:
            if piece.hidden is not current:
                piece.hidden.copy_(current)
            piece.work()
            current = piece.output
        return current[:, : batch.rows].clone()

    def run_layer(self, index: int, hidden: Tensor) -> Tensor:
        """Run one layer with the step's arguments."""
        return self._layers.run_layer(index, hidden, self._arguments[index])

    def _make_arguments(self) -> None:
        self._arguments = self._layers.decode_arguments(
            self.hidden, self._tables.positions(self.rows), self._tables.view(self.rows)
        )


def graphs_of(layers: DecoderStage, cache: KVCache) -> DecodeGraphs | None:
    """Return a stage's decode graphs, not yet captured; ``None`` where they are not possible.

    That is on a CPU, where no kernel reads blocks in place, where positions depend on the length of
    a row, which the host reads in every step, where a layer changes its cached keys and values, and
    where layers pass more to each other than hidden states.
    """
    depends_on_length = layers.rotary is not None and layers.rotary.depends_on_length
    is_fixed = layers.attends_to_cache and layers.layout is None and not depends_on_length
    if cache.device.type != "cuda" or not is_fixed or not cache.attends_rows:
        return None
    return DecodeGraphs(layers, cache, capture=CudaCapture(cache.device))


class CudaCapture:
    """Captures CUDA graphs in one memory pool; they never run at the same time.

    The output of a graph stays valid while it is referenced, so one graph may read the output of
    another.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        """Run ``work`` once, so that libraries initialize, then capture it."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Threads that send and receive may use the GPU meanwhile.
        mode = "thread_local"
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode=mode):
            work()
        return graph.replay

    def free_bytes(self) -> int:
        """Return the memory that the device has left once torch's unused blocks are given back."""
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self._device)[0])


class HostSyncDetector(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Run operators and record those that synchronise host and device or copy between them.

    A CUDA graph cannot contain them. It runs before the capture, because a failed capture can leave
    its stream unusable, and works on any device.

    Attributes:
        found: names of the operators, in order; includes all operators of other libraries, whose
            effect is unknown. Triton kernels are not operators.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operator."""
        if func._can_decompose():  # inference mode does not decompose composite operators
            with self:
                return func.decompose(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        namespace, _, name = func._schema.name.partition("::")
        if namespace not in ("aten", "prim", "prims") or _syncs(name, args, kwargs or {}, result):
            self.found.append(func._schema.name)
        return result


def host_syncs(work: Callable[[], object]) -> list[str]:
    """Run ``work`` once and return the operators that a CUDA graph cannot contain."""
    mode = HostSyncDetector()
    with mode:
        work()
    return mode.found


def _syncs(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: object) -> bool:
    if name in _SYNCS:
        return True
    if name == "repeat_interleave":  # of a tensor of counts without the output size
        return kwargs.get("output_size") is None and isinstance(args[-1], Tensor)
    if name in _INDEXES:  # the number of indices of a mask is read by the host
        return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])
    if name in _COPIES:
        tensors = [one for one in (*args, result) if isinstance(one, Tensor)]
        return len({one.device.type for one in tensors}) > 1
    return False
