"""CompiledSteps: decode steps of a stage as one call of compiled code, on CPUs.

The layers of transformers stay the definition: when a stage is loaded, some layers of every kind
are computed both ways on random numbers, and a stage with a layer that differs runs operator by
operator, with a logged reason. So does a stage whose layers the compiled step does not know. Layers
of one kind run the same code on weights of the same shapes and precisions.

Shapes: R rows, H hidden size, P positions.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from types import NoneType
from typing import Protocol

import torch
from torch import Tensor, nn

from llmpq.dist.engine.cuda_graphs import graphs_of
from llmpq.dist.kv.cache import KVCache
from llmpq.kernels.cpu.native import has_steps, instruction_set
from llmpq.kernels.cpu.step import StepProgram, UnsupportedStepError
from llmpq.logging import get_logger
from llmpq.models import DecoderStage, PackedBatch, kv_shapes
from llmpq.quant.modules.step_layer import LayerStep, append_layer
from llmpq.spec.precision import Precision

logger = get_logger(__name__)

LIMITS = {torch.float32: 1e-4, torch.bfloat16: 0.02}
"""Largest difference of what a layer adds to its input, relative to it (norms)."""
_FEWEST_POSITIONS = 1024
_PLAIN = (bool, int, float, str, torch.dtype, Precision, NoneType)
"""Types of attributes that are compared by value."""
_TRIED_SIZE = 0.05
"""Size of the random input: that of embeddings, so that rounding hides no part of a layer."""
_TRIED_CONTEXT = (17, 3)
"""Tokens before the compared one in each row: in its first block, and in another."""


class DecodeSteps(Protocol):
    """Runs the layers of a stage, decode steps in a faster way where possible."""

    def forward(self, hidden: Tensor, batch: PackedBatch) -> Tensor:
        """Run the layers over one step, as ``DecoderStage.forward`` does with the cache."""
        ...


def decode_steps_of(layers: DecoderStage, cache: KVCache, full_rows: int) -> DecodeSteps | None:
    """Return captured or compiled decode steps of a stage; ``None`` where neither is possible.

    Args:
        layers: of the stage.
        cache: of their keys and values.
        full_rows: rows of a full decode micro-batch.
    """
    if cache.device.type != "cpu":
        return graphs_of(layers, cache, full_rows)
    try:
        steps = CompiledSteps(layers, cache)
        _check(layers, cache)
    except UnsupportedStepError as error:
        logger.info("decode steps run operator by operator: %s", error)
        return None
    return steps


class CompiledSteps:
    """The layers of a stage with their decode steps compiled.

    Args:
        layers: of the stage.
        cache: of their keys and values.
        only: index of a single layer to run, from 0; by default all run.

    Raises:
        UnsupportedStepError: a layer, or the cache, has no compiled step.
    """

    def __init__(self, layers: DecoderStage, cache: KVCache, only: int | None = None) -> None:
        is_compiled = cache.attends and has_steps(instruction_set())
        if not (is_compiled and layers.attends_to_cache and layers.layout is None):
            raise UnsupportedStepError("its attention has no compiled kernel here")
        self._layers = layers
        self._cache = cache
        self._program = StepProgram(cache.dtype)
        self._hidden = self._program.buffer("hidden", layers.config.hidden_size)
        self._rotary = _RotaryRows(layers, self._program, self._hidden)
        for index in range(len(layers.layers)) if only is None else [only]:
            try:
                self._append(index)
            except UnsupportedStepError as error:
                raise UnsupportedStepError(f"layer {layers.first_layer + index}: {error}") from None

    def forward(self, hidden: Tensor, batch: PackedBatch) -> Tensor:
        """Run the layers over one step; see :class:`DecodeSteps`."""
        if not self._runs(hidden, batch):
            output: Tensor = self._layers(hidden, batch, self._cache)
            return output
        self._cache.check(batch)
        return self.run(hidden, batch)

    @torch.inference_mode()
    def run(self, hidden: Tensor, batch: PackedBatch) -> Tensor:
        """Run the compiled step on ``[1, R, H]``; return the same shape."""
        rows = batch.rows
        self._hidden[:rows] = hidden[0]
        self._rotary.fill(batch.positions[0], batch.longest)
        self._program.run(batch.block_tables, batch.starts)
        return self._hidden[None, :rows].clone()

    def _runs(self, hidden: Tensor, batch: PackedBatch) -> bool:
        """Whether the rows are single tokens, and few."""
        if not batch.is_decode or batch.rows > self._program.most_rows:
            return False
        return hidden.dtype == self._cache.dtype and hidden.shape[1] == batch.rows

    def _append(self, index: int) -> None:
        layers = self._layers
        number = layers.first_layer + index
        window, chunk = layers.span_of(index)
        if chunk is not None:
            raise UnsupportedStepError("attention in chunks")
        step = LayerStep(
            hidden=self._hidden,
            rotary=self._rotary.buffers[number],
            heads=self._cache.heads_of(number),
            window=window,
        )
        append_layer(self._program, layers.layers[index], step)


class _RotaryRows:
    """cos and sin of the rows of a step, from tables of all positions so far.

    Attributes:
        buffers: of cos and sin of every layer of the model.
    """

    def __init__(self, layers: DecoderStage, program: StepProgram, like: Tensor) -> None:
        if layers.rotary is None or layers.rotary.depends_on_length:
            raise UnsupportedStepError("its positions are not those of a rotary embedding")
        self._rotary = layers.rotary
        self._like = like
        self._tables: list[Tensor] = []
        self._length = 0
        self.buffers: list[tuple[Tensor, Tensor]] = []
        kinds = self._grow(1)
        self._places = [
            program.buffer(f"rotary {i}", t.shape[1]) for i, t in enumerate(self._tables)
        ]
        self.buffers = [(self._places[2 * kind], self._places[2 * kind + 1]) for kind in kinds]

    def fill(self, positions: Tensor, longest: int) -> None:
        """Copy the rows at ``positions`` ``[R]`` into the buffers."""
        if longest > self._length:
            self._grow(longest)
        for table, place in zip(self._tables, self._places, strict=True):
            torch.index_select(table, 0, positions, out=place[: len(positions)])

    def _grow(self, longest: int) -> list[int]:
        """Compute the tables of at least ``longest`` positions; return each layer's kind."""
        length = max(_FEWEST_POSITIONS, 2 * self._length)
        length = max(length, longest)
        made = self._rotary(self._like, torch.arange(length)[None], [length])
        kinds: dict[int, int] = {}
        tables: list[Tensor] = []
        for table in made:
            if isinstance(table, Tensor):
                raise UnsupportedStepError("its rotary embedding has complex numbers")
            if id(table) not in kinds:
                kinds[id(table)] = len(kinds)
                tables += [part[0].contiguous() for part in table]
        self._tables, self._length = tables, length
        return [kinds[id(table)] for table in made]


def checked_layers(layers: DecoderStage) -> list[int]:
    """Return the first two layers and the last one of every kind, by their index in the stage."""
    kinds: dict[Hashable, list[int]] = {}
    for index, layer in enumerate(layers.layers):
        kinds.setdefault((layers.span_of(index), _form_of(layer)), []).append(index)
    return sorted({index for kind in kinds.values() for index in (*kind[:2], kind[-1])})


def _form_of(layer: nn.Module) -> Hashable:
    """Return all that decides what a layer computes, but the values of its weights.

    A function that one object has in place of its class's is a form of its own.
    """
    found: list[Hashable] = []
    for name, part in layer.named_modules():
        own = (
            (key, value if isinstance(value, _PLAIN) else id(value))
            for key, value in vars(part).items()
            if key != "layer_idx" and (isinstance(value, _PLAIN) or callable(value))
        )
        tensors = (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
        shapes = ((key, value.shape, value.dtype) for key, value in tensors)
        found.append((name, type(part), *own, *shapes))
    return tuple(found)


@torch.inference_mode()
def _check(layers: DecoderStage, cache: KVCache) -> None:
    """Compute the layers of :func:`checked_layers` both ways on random numbers.

    Raises:
        UnsupportedStepError: a layer differs by more than rounding.
    """
    config, checked = layers.config, checked_layers(layers)
    generator = torch.Generator().manual_seed(0)

    def random_rows(tokens: int) -> Tensor:
        rows = torch.randn(1, tokens, config.hidden_size, generator=generator)
        return (_TRIED_SIZE * rows).to(cache.dtype)

    tables, next_block = [], 0
    for context in _TRIED_CONTEXT:
        blocks = context // cache.block_size + 1
        tables.append(range(next_block, next_block + blocks))
        next_block += blocks
    tried = KVCache(
        kv_shapes(config, layers.first_layer, layers.end_layer),
        layers.first_layer,
        num_blocks=next_block,
        dtype=cache.dtype,
        block_size=cache.block_size,
        kv_bits=cache.kv_bits,
    )
    starts: Sequence[int] = [0] * len(tables)
    layers(
        random_rows(sum(_TRIED_CONTEXT)),
        PackedBatch(block_tables=tables, starts=starts, counts=_TRIED_CONTEXT),
        tried,
        checked,
    )
    # The last row is the next token of the first sequence, as where drafts are verified.
    tables, starts = [*tables, tables[0]], [*_TRIED_CONTEXT, _TRIED_CONTEXT[0] + 1]
    batch = PackedBatch(block_tables=tables, starts=starts, counts=[1] * len(tables))
    hidden = random_rows(batch.rows)
    arguments = layers.step_arguments(hidden, batch, tried)
    for index in checked:
        found = CompiledSteps(layers, tried, only=index).run(hidden, batch)
        expected = layers.run_layer(index, hidden, arguments[index])
        difference = float((found - expected).float().norm() / (expected - hidden).float().norm())
        if not difference <= LIMITS[cache.dtype]:
            raise UnsupportedStepError(
                f"layer {layers.first_layer + index}: does not compute what Llama's does "
                f"(relative difference {difference:.2g})"
            )
