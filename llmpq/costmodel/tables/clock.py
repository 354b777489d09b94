"""Clock: what a coarse tick does to a measured second.

Some tables are rounded to whole milliseconds, some only from a size on. Such a sample is uncertain
by a share of its tick whatever the run-to-run noise, so a fit must not follow it closer than that.
"""

from __future__ import annotations

import numpy as np

from llmpq.costmodel.tables.nnls import Array

RUN_NOISE = 0.01
"""Relative deviation of one measurement from the next: 0.3 to 1.1 % in public tables."""
_TICKS = tuple(10.0**power for power in range(-8, 1))
_WITNESSES = 8
"""Samples that must all be whole ticks before the tick is believed."""
_WHOLE = 1e-6


def tick_of(seconds: Array) -> Array:
    """Return the tick behind each sample ``[P]``, 0 where none coarser than its digits shows.

    A table may change its tick once, for all larger samples: a sample's tick is the coarsest power
    of ten that divides it and every larger one.
    """
    order = np.argsort(seconds, kind="stable")
    ticks = np.zeros(len(seconds))
    sizes = seconds[order]
    for tick in _TICKS:
        counts = sizes / tick
        whole = np.abs(counts - np.round(counts)) <= _WHOLE * np.maximum(1.0, counts)
        first = len(sizes) - int(np.argmin(whole[::-1])) if not whole.all() else 0
        if len(sizes) - first >= _WITNESSES:
            ticks[order[first:]] = tick
    return ticks


def relative_noise(seconds: Array) -> Array:
    """Return the relative deviation of each sample ``[P]``: noise of a run and rounding."""
    # A value rounded to a tick is off by a uniform error: a twelfth of its square.
    rounding = tick_of(seconds) / seconds / np.sqrt(12.0)
    result: Array = np.hypot(RUN_NOISE, rounding)
    return result
