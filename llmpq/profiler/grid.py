"""The shapes to time: few points that cover what a plan may ask for.

A latency law bends where kernels change regime, and nobody knows beforehand where: so the points
are spread evenly in octaves, rather than put into the corners where an optimal design for one
straight law would have them. Candidates are the sizes 1, 2, 4, 6, 8, 12, 16, 24 ... of batch and
tokens; the smallest and the largest are taken first, and then again and again the candidate that is
farthest from all that were taken. Distances are measured where the time is made: prefill in
octaves of rows (tokens of the micro-batch, what matrix products see) and of length (attention);
decode in octaves of batch, which weigh half as much again, and of context.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from llmpq.errors import SpecError
from llmpq.spec.precision import Phase

MIN_TOKENS = 16
_BATCH_WEIGHT = 1.5


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
    """The largest sizes a plan is expected to ask for.

    Attributes:
        batch: sequences of a micro-batch.
        prompt_tokens, context_tokens: longest prompt and longest context.
        prefill_tokens: tokens of a prefill micro-batch; large products take long and are the easy
            part of a law.
    """

    batch: int = 32
    prompt_tokens: int = 512
    context_tokens: int = 1024
    prefill_tokens: int = 2048

    def __post_init__(self) -> None:
        for field in ("batch", "prompt_tokens", "context_tokens", "prefill_tokens"):
            if getattr(self, field) < 1:
                raise SpecError(f"grid: {field}: found {getattr(self, field)}, expected at least 1")


def planned_grid(limits: GridLimits, points: int) -> tuple[Shape, ...]:
    """Return at most ``points`` shapes a phase, spread over everything within the limits.

    Raises:
        SpecError: fewer than 2 points.
    """
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
        found += _spread(candidates, points)
    return tuple(found)


def product_grid(
    batches: tuple[int, ...],
    prompt_tokens: tuple[int, ...],
    context_tokens: tuple[int, ...],
    prefill_tokens: int = 8192,
) -> tuple[Shape, ...]:
    """Return every combination, prefill micro-batches of more than ``prefill_tokens`` left out."""
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


def _place(shape: Shape) -> tuple[float, float]:
    if shape.phase is Phase.PREFILL:
        return math.log2(shape.batch * shape.tokens), math.log2(shape.tokens)
    return _BATCH_WEIGHT * math.log2(shape.batch), math.log2(shape.tokens)


def _spread(candidates: list[Shape], points: int) -> list[Shape]:
    """Return the candidates chosen farthest first; of equals the smaller, which is cheaper."""
    order = sorted(candidates, key=lambda shape: (shape.batch * shape.tokens, shape.batch))
    places = {shape: _place(shape) for shape in order}
    chosen = list(dict.fromkeys((order[0], order[-1])))
    gaps = {s: min(math.dist(places[s], places[one]) for one in chosen) for s in order}
    while len(chosen) < min(points, len(order)):
        farthest = max(order, key=lambda shape: gaps[shape])
        chosen.append(farthest)
        for shape in order:
            gaps[shape] = min(gaps[shape], math.dist(places[shape], places[farthest]))
    return sorted(chosen, key=lambda shape: (shape.batch, shape.tokens))
