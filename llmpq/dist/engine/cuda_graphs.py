"""DecodeGraphs: decode steps of a stage captured once and replayed, on devices that can.

A decode step of a few rows is hundreds of small kernels, and a GPU waits for Python to launch
them. A CUDA graph launches all at once, but knows only shapes and addresses: rows, tokens read and
slots must be the same kind every time. So steps are sorted by shape (rows and tokens read rounded
up), what changes from step to step is copied to fixed places, and a shape is captured when it will
come again. Layers that make the host wait (LLM.int8() looks for outliers there,
transformers' experts for who routes where) run as ever between the captured ones.

Capturing itself is a function given from outside: ``CudaCapture`` on a GPU; what a test gives
replays by calling again, which shows everything but the graph.

Shapes: R rows, H hidden size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from llmpq.dist.kv.cache import KVCache
from llmpq.logging import get_logger
from llmpq.models import DecoderStage, MicroBatch
from llmpq.models.host_waits import waits_of
from llmpq.models.stage import LayerArguments

logger = get_logger(__name__)

Work = Callable[[], None]
Capture = Callable[[Work], Work]
"""Takes work that reads and writes fixed places; returns what does it again, and faster."""

MOST_GRAPHS = 64
"""Captured at once; a graph keeps some memory on the device, and capturing takes a step or two."""
STALE_STEPS = 4 * MOST_GRAPHS
"""A graph unused for so many steps gives way to another: sequences have grown past its shape."""
MOST_BLOCKS = 16
"""Micro-batches that have graphs for their own slots; of more, each would be captured too often."""
_LEAST_READ = 128
_SHARE = 8
"""At most one token in so many is read in vain, once sequences are long."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a graph is captured for.

    Attributes:
        rows: R.
        tokens: read of every row's slot.
        first_slot: of a full micro-batch side by side; ``None`` for rows in any slots.
    """

    rows: int
    tokens: int
    first_slot: int | None

    @classmethod
    def of(
        cls, batch: MicroBatch, full_rows: int, max_tokens: int, *, has_blocks: bool = True
    ) -> StepShape:
        """Round a decode micro-batch up to the shape of the graph that can run it.

        Args:
            batch: one new token a row.
            full_rows: rows of a full micro-batch, which are never rounded.
            max_tokens: of a slot.
            has_blocks: whether full ones that lie side by side are shapes of their own.
        """
        rows, slots = batch.rows, batch.slots.tolist()
        padded = rows if rows >= full_rows else min(full_rows, _rounded_rows(rows))
        is_row = slots == list(range(slots[0], slots[0] + rows))
        is_block = has_blocks and rows >= full_rows and is_row
        return cls(
            rows=padded,
            tokens=min(max_tokens, _rounded_tokens(batch.longest)),
            first_slot=slots[0] if is_block else None,
        )

    @property
    def block(self) -> slice | None:
        """The slots as a slice, when they lie side by side."""
        if self.first_slot is None:
            return None
        return slice(self.first_slot, self.first_slot + self.rows)


def _rounded_rows(rows: int) -> int:
    return 1 << (rows - 1).bit_length() if rows <= 8 else -(-rows // 8) * 8


def _rounded_tokens(tokens: int) -> int:
    step = max(_LEAST_READ, (1 << (tokens - 1).bit_length()) // (2 * _SHARE))
    return -(-tokens // step) * step


class DecodeGraphs:
    """The layers of a stage, with the decode steps that come again captured.

    Args:
        layers: of the stage.
        cache: of their keys and values; on the same device.
        full_rows: rows of a full decode micro-batch.
        capture: how.
    """

    def __init__(
        self, layers: DecoderStage, cache: KVCache, *, full_rows: int, capture: Capture
    ) -> None:
        self._layers = layers
        self._cache = cache
        self._full_rows = full_rows
        self._has_blocks = cache.num_slots <= MOST_BLOCKS * full_rows
        self._capture: Capture | None = capture
        self._seen: set[StepShape] = set()
        self._graphs: dict[StepShape, _Graph] = {}  # the one used last is last
        self._steps = 0
        self._waits: list[bool] | None = None

    @property
    def shapes(self) -> tuple[StepShape, ...]:
        """What has been captured."""
        return tuple(self._graphs)

    @torch.inference_mode()
    def forward(self, hidden: Tensor, batch: MicroBatch) -> Tensor:
        """Run the layers over one micro-batch, as ``DecoderStage.forward`` does with the cache."""
        graph = self._graph(hidden, batch)
        if graph is None:
            output: Tensor = self._layers(hidden, batch, self._cache)
            return output
        return graph.run(hidden, batch)

    def _graph(self, hidden: Tensor, batch: MicroBatch) -> _Graph | None:
        """Return what runs this step; ``None`` where the layers themselves shall."""
        if self._capture is None or batch.width > 1:
            return None
        self._cache.check(batch)  # before anything is written
        self._steps += 1
        rows, tokens = self._full_rows, self._cache.max_tokens
        shape = StepShape.of(batch, rows, tokens, has_blocks=self._has_blocks)
        found = self._graphs.pop(shape, None)
        if found is None and self._comes_again(shape) and self._has_room():
            found = self._captured(shape, hidden, batch)
        if found is not None:
            found.used_at = self._steps
            self._graphs[shape] = found
        return found

    def _comes_again(self, shape: StepShape) -> bool:
        """Guess: a full micro-batch does; another shape when it is here for the second time."""
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

    def _captured(self, shape: StepShape, hidden: Tensor, batch: MicroBatch) -> _Graph | None:
        assert self._capture is not None
        try:
            graph = _Graph(self._layers, self._cache, shape, hidden)
            graph.fill(hidden, batch)
            if self._waits is None:
                self._waits = graph.find_waits()
            graph.capture(self._capture, self._waits)
        except RuntimeError as error:  # CUDA fails in ways that cannot be listed; memory may be out
            logger.warning("decode goes on without CUDA graphs: %s", error)
            self._capture = None
            self._graphs.clear()
            return None
        return graph


class _Piece:
    """Layers ``[first, end)`` of a graph, from one fixed place to another."""

    def __init__(self, graph: _Graph, first: int, end: int) -> None:
        self._graph = graph
        self._range = range(first, end)
        self.hidden = torch.zeros_like(graph.hidden)
        self.output = self.hidden
        self.work: Work = self.run_layers

    def run_layers(self) -> None:
        """Run them; captured, this is what the graph holds."""
        hidden = self.hidden
        for index in self._range:
            hidden = self._graph.run_layer(index, hidden)
        self.output = hidden


class _Graph:
    """Decode steps of one shape.

    Attributes:
        hidden: ``[R, 1, H]``, where a step's hidden states are put.
        used_at: the last step that ran here, for who keeps graphs.
    """

    def __init__(
        self, layers: DecoderStage, cache: KVCache, shape: StepShape, like: Tensor
    ) -> None:
        self.used_at = 0
        self._layers = layers
        self._shape = shape
        self.hidden = like.new_zeros(shape.rows, 1, like.shape[2])
        self._places = torch.zeros(2, shape.rows, dtype=torch.int64, device=like.device)
        slots, positions = self._places
        self._view = cache.view_of_tensors(slots, positions, shape.tokens, shape.block)
        self._arguments: list[LayerArguments] = []
        self._prepare: Work = self._make_arguments
        self._pieces: list[_Piece] = []

    def fill(self, hidden: Tensor, batch: MicroBatch) -> None:
        """Put a step in place; the last row stands in for those that are missing.

        It then writes the same numbers to the same slot more than once, which changes nothing.
        """
        rows, missing = batch.rows, self._shape.rows - batch.rows
        places = torch.stack((batch.slots, batch.positions[:, 0]))  # [2, R], on the host
        if missing:
            places = torch.cat((places, places[:, -1:].expand(-1, missing)), dim=1)
        self._places.copy_(places)
        self.hidden[:rows] = hidden
        self.hidden[rows:] = hidden[-1:]

    def find_waits(self) -> list[bool]:
        """Run the step in place once; tell of each layer whether it makes the host wait."""
        found = waits_of(self._make_arguments)
        if found:
            raise RuntimeError(f"the step's masks and positions need {found[0]}")
        hidden, waits = self.hidden, []
        for index in range(len(self._layers.layers)):
            start = hidden
            outputs: list[Tensor] = []
            ops = waits_of(lambda: outputs.append(self.run_layer(index, start)))  # noqa: B023
            waits.append(bool(ops))
            hidden = outputs[0]
        return waits

    def capture(self, capture: Capture, waits: list[bool]) -> None:
        """Capture every run of layers of which none waits."""
        self._prepare = capture(self._make_arguments)
        self._prepare()  # a capture runs nothing, and what follows is tried with these arguments
        for is_waiting, run in itertools.groupby(range(len(waits)), waits.__getitem__):
            first, *rest = run
            piece = _Piece(self, first, first + len(rest) + 1)
            if not is_waiting:
                piece.work = capture(piece.run_layers)
            self._pieces.append(piece)

    def drop(self) -> None:
        """Give everything back now; a piece and its graph know each other."""
        self._pieces.clear()

    def run(self, hidden: Tensor, batch: MicroBatch) -> Tensor:
        """Run one step: ``[R, 1, H]`` of its own memory."""
        self.fill(hidden, batch)
        self._prepare()
        current = self.hidden
        for piece in self._pieces:
            piece.hidden.copy_(current)
            piece.work()
            current = piece.output
        return current[: batch.rows].clone()

    def run_layer(self, index: int, hidden: Tensor) -> Tensor:
        """Run one layer with the step's arguments."""
        return self._layers.run_layer(index, hidden, self._arguments[index])

    def _make_arguments(self) -> None:
        positions = self._places[1][:, None]  # [R, 1]
        self._arguments = self._layers.decode_arguments(
            self.hidden, positions, self._view, self._shape.tokens
        )


def graphs_of(layers: DecoderStage, cache: KVCache, full_rows: int) -> DecodeGraphs | None:
    """Return a stage's decode graphs; ``None`` where there are none to be had.

    That is on a CPU, and where a layer's positions follow the length of its row, which the host
    looks at in every step.
    """
    follows_length = layers.rotary is not None and layers.rotary.follows_length
    if cache.device.type != "cuda" or follows_length:
        return None
    capture = CudaCapture(cache.device)
    return DecodeGraphs(layers, cache, full_rows=full_rows, capture=capture)


class CudaCapture:
    """Captures on a GPU, all graphs in one pool: they never run at the same time.

    What a graph leaves behind stays where it is as long as somebody holds it, so one graph may read
    what another has made.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        """Run ``work`` once, for libraries set themselves up at first; then capture it."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads, which send and receive, may use the GPU meanwhile.
        mode = "thread_local"
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode=mode):
            work()
        return graph.replay
