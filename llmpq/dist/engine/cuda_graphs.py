"""DecodeGraphs: decode steps of a stage as CUDA graphs.

**Experimental: written without a GPU.** The tests replace the capture by a function that calls the
work again; the capture itself has not been run.

A decode step of a few rows is hundreds of small kernels, and the GPU waits for Python to launch
them. A CUDA graph launches all of them at once, with fixed shapes and addresses. So steps are
grouped by shape (rows and tokens read, rounded up), inputs are copied to fixed buffers, and a shape
is captured once it is likely to come again. Layers that synchronize with the host (LLM.int8()
looks for outliers, transformers' experts route there) run uncaptured between the captured ones.

Shapes: R rows, H hidden size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from llmpq.dist.kv.blocks import blocks_of
from llmpq.dist.kv.cache import KVCache
from llmpq.logging import get_logger
from llmpq.models import DecoderStage, PackedBatch
from llmpq.models.host_sync import host_syncs
from llmpq.models.stage import LayerArguments

logger = get_logger(__name__)

Work = Callable[[], None]
Capture = Callable[[Work], Work]
"""Captures work on fixed buffers; returns a function that replays it."""

MOST_GRAPHS = 64
"""Most graphs at a time: each keeps memory on the device, and capturing takes a step or two."""
STALE_STEPS = 4 * MOST_GRAPHS
"""A graph unused for so many steps may be replaced: sequences have grown past its shape."""
_LEAST_READ = 128
_SHARE = 8
"""For long sequences, at most one token in so many is read without need."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """The shape of the steps that a graph runs.

    Attributes:
        rows: R.
        tokens: tokens read from the blocks of each row.
    """

    rows: int
    tokens: int

    @classmethod
    def of(cls, batch: PackedBatch, full_rows: int) -> StepShape:
        """Round a decode step up to the shape of the graph that can run it.

        Args:
            batch: one new token a row.
            full_rows: rows of a full micro-batch, which are never rounded.
        """
        rows = batch.rows
        padded = rows if rows >= full_rows else min(full_rows, _rounded_rows(rows))
        return cls(rows=padded, tokens=_rounded_tokens(batch.longest))


def _rounded_rows(rows: int) -> int:
    return 1 << (rows - 1).bit_length() if rows <= 8 else -(-rows // 8) * 8


def _rounded_tokens(tokens: int) -> int:
    step = max(_LEAST_READ, (1 << (tokens - 1).bit_length()) // (2 * _SHARE))
    return -(-tokens // step) * step


class DecodeGraphs:
    """The layers of a stage, with recurring decode steps captured.

    Args:
        layers: of the stage.
        cache: of their keys and values; on the same device.
        full_rows: rows of a full decode micro-batch.
        capture: captures the work of a step.
    """

    def __init__(
        self, layers: DecoderStage, cache: KVCache, *, full_rows: int, capture: Capture
    ) -> None:
        self._layers = layers
        self._cache = cache
        self._full_rows = full_rows
        self._capture: Capture | None = capture
        self._seen: set[StepShape] = set()
        self._graphs: dict[StepShape, _Graph] = {}  # the one used last is last
        self._steps = 0
        self._waits: list[bool] | None = None

    @property
    def takes_prompts(self) -> bool:
        """No: prompts are not captured."""
        return False

    @property
    def shapes(self) -> tuple[StepShape, ...]:
        """The captured shapes."""
        return tuple(self._graphs)

    @torch.inference_mode()
    def forward(self, hidden: Tensor, batch: PackedBatch) -> Tensor:
        """Run the layers over one step, as ``DecoderStage.forward`` does with the cache."""
        graph = self._graph(hidden, batch)
        if graph is None:
            output: Tensor = self._layers(hidden, batch, self._cache)
            return output
        return graph.run(hidden, batch)

    def _graph(self, hidden: Tensor, batch: PackedBatch) -> _Graph | None:
        """Return the graph of this step; ``None`` if the layers run uncaptured."""
        if self._capture is None or not batch.is_decode:
            return None
        self._cache.check(batch)  # before anything is written
        self._steps += 1
        shape = StepShape.of(batch, self._full_rows)
        found = self._graphs.pop(shape, None)
        if found is None and self._comes_again(shape) and self._has_room():
            found = self._captured(shape, hidden, batch)
        if found is not None:
            found.used_at = self._steps
            self._graphs[shape] = found
        return found

    def _comes_again(self, shape: StepShape) -> bool:
        """Whether to expect the shape again: a full micro-batch, or one seen before."""
        if shape.rows >= self._full_rows or shape in self._seen:
            return True
        self._seen.add(shape)
        return False

    def _has_room(self) -> bool:
        if len(self._graphs) < MOST_GRAPHS:
            return True
        oldest = next(iter(self._graphs))
        is_stale = self._steps - self._graphs[oldest].used_at > STALE_STEPS
        if is_stale:
            self._graphs.pop(oldest).drop()
        return is_stale

    def _captured(self, shape: StepShape, hidden: Tensor, batch: PackedBatch) -> _Graph | None:
        assert self._capture is not None
        try:
            graph = _Graph(self._layers, self._cache, shape, hidden)
            graph.fill(hidden, batch)
            if self._waits is None:
                self._waits = graph.find_waits()
            graph.capture(self._capture, self._waits)
        except RuntimeError as error:  # CUDA fails in ways that cannot be listed; memory may be out
            logger.warning("decoding continues without CUDA graphs: %s", error)
            self._capture = None
            self._graphs.clear()
            return None
        return graph


class _Piece:
    """Layers ``[first, end)`` of a graph, from one fixed buffer to another."""

    def __init__(self, graph: _Graph, first: int, end: int) -> None:
        self._graph = graph
        self._range = range(first, end)
        self.hidden = torch.zeros_like(graph.hidden)
        self.output = self.hidden
        self.work: Work = self.run_layers

    def run_layers(self) -> None:
        """Run the layers; this is what is captured."""
        hidden = self.hidden
        for index in self._range:
            hidden = self._graph.run_layer(index, hidden)
        self.output = hidden


class _Graph:
    """Decode steps of one shape.

    Attributes:
        hidden: ``[1, R, H]``, the buffer for a step's hidden states.
        used_at: number of the last step that ran here.
    """

    def __init__(
        self, layers: DecoderStage, cache: KVCache, shape: StepShape, like: Tensor
    ) -> None:
        self.used_at = 0
        self._layers = layers
        self._cache = cache
        self._shape = shape
        self.hidden = like.new_zeros(1, shape.rows, like.shape[2])
        self._width = blocks_of(shape.tokens, cache.block_size)
        # Of each row its blocks, then its position.
        self._places = torch.zeros(
            shape.rows, self._width + 1, dtype=torch.int64, device=like.device
        )
        self._positions = self._places[:, -1]
        self._view = cache.view_of_tensors(self._places[:, :-1], self._positions)
        self._arguments: list[LayerArguments] = []
        self._prepare: Work = self._make_arguments
        self._pieces: list[_Piece] = []

    def fill(self, hidden: Tensor, batch: PackedBatch) -> None:
        """Copy a step into the buffers; copies of the last row fill the missing ones.

        The copies write equal values to the same block.
        """
        rows, missing = batch.rows, self._shape.rows - batch.rows
        places = []
        for table, start, length in zip(
            batch.block_tables, batch.starts, batch.lengths, strict=True
        ):
            own = list(table[: blocks_of(length, self._cache.block_size)])
            places.append([*own, *[own[-1]] * (self._width - len(own)), start])
        self._places.copy_(torch.tensor([*places, *places[-1:] * missing]))
        self.hidden[:, :rows] = hidden
        self.hidden[:, rows:] = hidden[:, -1:]

    def find_waits(self) -> list[bool]:
        """Run the step once; return for each layer whether it synchronizes with the host."""
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
            piece.hidden.copy_(current)
            piece.work()
            current = piece.output
        return current[:, : batch.rows].clone()

    def run_layer(self, index: int, hidden: Tensor) -> Tensor:
        """Run one layer with the step's arguments."""
        return self._layers.run_layer(index, hidden, self._arguments[index])

    def _make_arguments(self) -> None:
        longest = self._width * self._cache.block_size
        self._arguments = self._layers.decode_arguments(
            self.hidden, self._positions, self._view, longest
        )


def graphs_of(layers: DecoderStage, cache: KVCache, full_rows: int) -> DecodeGraphs | None:
    """Return a stage's decode graphs; ``None`` where they are not possible.

    That is on a CPU, where positions depend on the length of a row, which the host reads in every
    step, where a layer changes its cached keys and values, and where layers pass more to each other
    than hidden states.
    """
    depends_on_length = layers.rotary is not None and layers.rotary.depends_on_length
    is_fixed = layers.attends_to_cache and layers.layout is None and not depends_on_length
    if cache.device.type != "cuda" or not is_fixed:
        return None
    capture = CudaCapture(cache.device)
    return DecodeGraphs(layers, cache, full_rows=full_rows, capture=capture)


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
