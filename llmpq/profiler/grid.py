"""The shapes to time: few points that cover what a plan may ask for, spread evenly in octaves.

Candidates are the sizes 1, 2, 4, 6, 8, 12, 16, 24 ... of batch and tokens. The smallest and the
largest are taken first, then repeatedly the candidate farthest from all that were taken, in octaves
of rows and of length in prefill, of batch (with a weight of 1.5) and of context in decode.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from llmpq.errors import SpecError
from llmpq.options.measure import LayerOptions
from llmpq.spec.precision import Phase

MIN_TOKENS = 16
_BATCH_WEIGHT = 1.5
_DEFAULTS = LayerOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One point of a grid: a phase, sequences, and tokens of a prompt or of a context."""

    phase: Phase
    batch: int
    tokens: int

    @property
    def rows(self) -> int:
        """Rows of the matrix products: tokens of all prompts, or one of each sequence."""
        return self.batch * self.tokens if self.phase is Phase.PREFILL else self.batch


@dataclass(frozen=True, slots=True, kw_only=True)
class GridLimits:
    """The largest sizes a plan is expected to ask for; ``prefill_tokens`` are of a micro-batch."""

    batch: int = _DEFAULTS.max_batch
    prompt_tokens: int = _DEFAULTS.max_prompt
    context_tokens: int = 1024
    prefill_tokens: int = _DEFAULTS.max_prefill

    def __post_init__(self) -> None:
        for field in ("batch", "prompt_tokens", "context_tokens", "prefill_tokens"):
            if getattr(self, field) < 1:
                raise SpecError(f"grid: {field}: found {getattr(self, field)}, expected at least 1")


def planned_grid(limits: GridLimits, points: int) -> tuple[Shape, ...]:
    """Return at most ``points`` (2 or more) shapes a phase, spread over all within the limits."""
    if points < 2:
        raise SpecError(f"grid: points: found {points}, expected at least 2 a phase")
    found: list[Shape] = []
    for phase, longest in (
        (Phase.PREFILL, limits.prompt_tokens),
        (Phase.DECODE, limits.context_tokens),
    ):
        candidates = [
            Shape(phase=phase, batch=batch, tokens=tokens)
            for batch in _sizes(1, limits.batch)
            for tokens in _sizes(min(MIN_TOKENS, longest), longest)
            if phase is Phase.DECODE or batch * tokens <= max(limits.prefill_tokens, longest)
        ]
        found += _farthest_points(candidates, points)
    return tuple(found)


def product_grid(
    batches: tuple[int, ...],
    prompt_tokens: tuple[int, ...],
    context_tokens: tuple[int, ...],
    prefill_tokens: int = 8192,
) -> tuple[Shape, ...]:
    """Return every combination, without prefill micro-batches above ``prefill_tokens``."""
    prefill = [
        Shape(phase=Phase.PREFILL, batch=batch, tokens=tokens)
        for batch in batches
        for tokens in prompt_tokens
        if batch * tokens <= prefill_tokens
    ]
    decode = [
        Shape(phase=Phase.DECODE, batch=batch, tokens=tokens)
        for batch in batches
        for tokens in context_tokens
    ]
    return (*prefill, *decode)


def _sizes(low: int, high: int) -> list[int]:
    """Return ``low``, the powers of two and half as much again, and ``high``."""
    powers = [2**power for power in range(high.bit_length())]
    halves = [3 * power // 2 for power in powers if power >= 4]
    return sorted({low, high, *(size for size in powers + halves if low <= size <= high)})


def _position(shape: Shape) -> tuple[float, float]:
    if shape.phase is Phase.PREFILL:
        return math.log2(shape.batch * shape.tokens), math.log2(shape.tokens)
    return _BATCH_WEIGHT * math.log2(shape.batch), math.log2(shape.tokens)


def _farthest_points(candidates: list[Shape], points: int) -> list[Shape]:
    order = sorted(candidates, key=lambda shape: (shape.batch * shape.tokens, shape.batch))
    positions = {shape: _position(shape) for shape in order}
    chosen = list(dict.fromkeys((order[0], order[-1])))
    gaps = {s: min(math.dist(positions[s], positions[one]) for one in chosen) for s in order}
    while len(chosen) < min(points, len(order)):
        farthest = max(order, key=lambda shape: gaps[shape])
        chosen.append(farthest)
        for shape in order:
            gaps[shape] = min(gaps[shape], math.dist(positions[shape], positions[farthest]))
    return sorted(chosen, key=lambda shape: (shape.batch, shape.tokens))
