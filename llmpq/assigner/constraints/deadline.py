"""Deadline: the moment by which a plan is wanted, handed down to whatever may take long.

It is a moment and not a span, so that everything on the way to a plan counts: start of the command,
fits, arrays, search. Whoever sees that it has passed goes on with the best there is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment on a clock; without one, never.

    Attributes:
        at_s: the moment, in the clock's seconds.
        clock: seconds from some moment on.
    """

    at_s: float = math.inf
    clock: Callable[[], float] = field(default=time.monotonic, compare=False, repr=False)

    @property
    def left_s(self) -> float:
        """Seconds until then; not positive once it has passed."""
        return self.at_s - self.clock() if math.isfinite(self.at_s) else math.inf

    @property
    def has_passed(self) -> bool:
        """Whether it is over."""
        return self.left_s <= 0

    def within(self, seconds: float | None) -> Deadline:
        """Return the earlier of this and so many seconds from now; ``None`` adds no limit."""
        if seconds is None:
            return self
        return Deadline(min(self.at_s, self.clock() + seconds), self.clock)


NEVER = Deadline()
