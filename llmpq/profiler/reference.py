"""The reference: a loop of the interpreter whose processor time tells how fast a core is now."""

from __future__ import annotations

import time

REFERENCE_TURNS = 10_000
"""Of the loop: 0.2 ms on a calm core of the machine of ``docs/evidence/index.md``."""
DISTURBED = 1.35
"""A loop that takes this many times the calm loop's time tells of a disturbed core: 1.85 is usual,
and a calm core's loops differ by a tenth."""


def reference_s() -> float:
    """Time the loop on the core of this thread."""
    start_s = time.thread_time()  # a preemption is no slower core
    total = 0
    for turn in range(REFERENCE_TURNS):
        total += turn
    return time.thread_time() - start_s
