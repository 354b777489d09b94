"""Distributions of prompt and answer lengths, in whole tokens.

Schedules are searched with them (ExeGPT's P_E and P_D), and traces are drawn from them.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, ClassVar

from llmpq.errors import SpecError
from llmpq.spec.codec import Rule, from_json
from llmpq.spec.fields import SCHEMA, Fields, read_json

MAX_LENGTH = 10_000_000
MAX_DISTINCT = 1_000_000
_ONE = 1e-6


@dataclass(frozen=True, kw_only=True)
class LengthDistribution:
    """Probabilities of the lengths of prompts or of answers, in tokens.

    Attributes:
        lengths: whole numbers of tokens from 1 on, rising.
        probabilities: of each, positive, together 1.
    """

    SCHEMA: ClassVar[int] = SCHEMA

    lengths: tuple[Annotated[int, Rule(minimum=1, maximum=MAX_LENGTH)], ...]
    probabilities: tuple[Annotated[float, Rule(maximum=1)], ...]

    def __post_init__(self) -> None:
        if not self.lengths or len(self.lengths) != len(self.probabilities):
            raise SpecError(
                f"length distribution: found {len(self.lengths)} lengths and "
                f"{len(self.probabilities)} probabilities, expected as many of either, at least one"
            )
        if self.lengths[0] < 1 or any(low >= high for low, high in pairwise(self.lengths)):
            raise SpecError("length distribution: expected rising lengths of at least 1")
        total = math.fsum(self.probabilities)
        if min(self.probabilities) <= 0 or abs(total - 1) > _ONE:
            raise SpecError(
                f"length distribution: found probabilities that add up to {total:g}, "
                "expected positive ones that add up to 1"
            )

    @cached_property
    def _cumulated(self) -> tuple[float, ...]:
        return tuple(accumulate(self.probabilities))

    @cached_property
    def mean(self) -> float:
        """Mean length."""
        weighted = zip(self.lengths, self.probabilities, strict=True)
        return math.fsum(length * share for length, share in weighted)

    @cached_property
    def std(self) -> float:
        """Standard deviation of the length."""
        weighted = zip(self.lengths, self.probabilities, strict=True)
        return math.sqrt(math.fsum(share * (length - self.mean) ** 2 for length, share in weighted))

    @property
    def longest(self) -> int:
        """Longest length that occurs."""
        return self.lengths[-1]

    def quantile(self, share: float) -> int:
        """Return the shortest length that at least ``share`` of all do not exceed."""
        if not 0 <= share <= 1:
            raise SpecError(f"length distribution: found quantile {share}, expected 0 to 1")
        index = bisect_left(self._cumulated, share - 1e-12)
        return self.lengths[min(index, len(self.lengths) - 1)]

    def sample(self, count: int, chance: random.Random) -> list[int]:
        """Draw ``count`` lengths."""
        return chance.choices(self.lengths, cum_weights=self._cumulated, k=count)


def constant(length: int) -> LengthDistribution:
    """Return the distribution with a single length."""
    return LengthDistribution(lengths=(length,), probabilities=(1.0,))


def empirical(lengths: Iterable[int]) -> LengthDistribution:
    """Return the distribution of observed lengths.

    Raises:
        SpecError: there are none, or one is not a whole number from 1 on.
    """
    counts = Counter(lengths)
    if not counts:
        raise SpecError("length distribution: found no observed lengths, expected at least one")
    total = sum(counts.values())
    ordered = sorted(counts)
    return LengthDistribution(
        lengths=tuple(ordered), probabilities=tuple(counts[length] / total for length in ordered)
    )


def truncated_normal(
    mean: float, std: float, longest: int, shortest: int = 1
) -> LengthDistribution:
    """Return a normal distribution cut off at both ends and rounded to whole tokens.

    ``mean`` and ``std`` are those before it is cut, as in ExeGPT's Table 3.
    """
    if not (std > 0 and 1 <= shortest <= longest <= MAX_DISTINCT):
        raise SpecError(
            f"length distribution: found std {std}, shortest {shortest}, longest {longest}; "
            f"expected std > 0 and 1 <= shortest <= longest <= {MAX_DISTINCT}"
        )
    steps = [edge - 0.5 for edge in range(shortest, longest + 2)]
    below = [0.5 * math.erfc((mean - step) / std / math.sqrt(2)) for step in steps]
    shares = [high - low for low, high in pairwise(below)]
    total = math.fsum(shares)
    kept = [(low, share / total) for low, share in enumerate(shares, start=shortest) if share]
    return LengthDistribution(
        lengths=tuple(length for length, _ in kept),
        probabilities=tuple(share for _, share in kept),
    )


def load_lengths(path: str | Path) -> LengthDistribution:
    """Read a length distribution.

    A file holds ``{"schema": 1, ...}`` with either ``"lengths"`` and ``"probabilities"``,
    ``"observed": [..]``, or ``"truncated_normal": {"mean", "std", "longest"}``.
    """
    fields = Fields(read_json(path), str(path))
    if fields.has("truncated_normal"):
        law = from_json(_TruncatedNormal, fields.child("truncated_normal"))
        found = truncated_normal(law.mean, law.std, law.longest)
    elif fields.has("observed"):
        entries = fields.entries("observed", 1)
        found = empirical(entries.integer(name, 1, MAX_LENGTH) for name in entries.names())
    else:
        return from_json(LengthDistribution, fields)
    fields.schema()
    fields.done()
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _TruncatedNormal:
    """The arguments of ``truncated_normal`` in a file."""

    mean: float
    std: float
    longest: Annotated[int, Rule(minimum=1, maximum=MAX_DISTINCT)]
