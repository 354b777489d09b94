"""Deadline: the moment by which a plan is needed.

A moment and not a duration, so that the start of the command, fits, arrays and search all count.
After it every part continues with the best result so far.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment in the seconds of a clock; never by default."""

    at_s: float = math.inf
    clock: Callable[[], float] = field(default=time.monotonic, compare=False, repr=False)

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; not positive once it has passed."""
        return self.at_s - self.clock() if math.isfinite(self.at_s) else math.inf

    @property
    def has_passed(self) -> bool:
        """Whether the deadline is over."""
        return self.left_s <= 0

    def within(self, seconds: float | None) -> Deadline:
        """Return the earlier of this and ``seconds`` from now; ``None`` adds no limit."""
        if seconds is None:
            return self
        return Deadline(min(self.at_s, self.clock() + seconds), self.clock)


NEVER = Deadline()
