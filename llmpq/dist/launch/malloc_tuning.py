"""How a worker's C library hands out memory: so that what a stage holds is what a plan counted.

glibc's defaults suit neither half of a worker's life. While weights load, matrices that come and go
leave holes that later ones do not fit, and the process stays larger than what it holds. While it
serves, giving every temporary back to the system and taking it again costs more than the arithmetic
on it: 143 instead of 100 ms for one decoder layer's prefill of 992 tokens. So the two functions
here are called one after the other.

Elsewhere than under glibc they do nothing.
"""

from __future__ import annotations

import ctypes

from llmpq.units import MIB

# <malloc.h>
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

LOADING_THRESHOLD_BYTES = 2 * MIB
SERVING_THRESHOLD_BYTES = 16 * MIB
"""Larger temporaries lie apart: in the heap, holes of that size made one plan's peak
differ by 190 MB from run to run. glibc would take up to 32 MiB."""
_NEVER = 2**31 - 1


def give_memory_back() -> None:
    """From now on, give what is freed back at once; all threads share one heap.

    For the time of loading. Whatever is larger than ``LOADING_THRESHOLD_BYTES`` lies apart: every
    large matrix, but no block of one that a quantizer works on.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_ARENA_MAX, 1)
        libc.mallopt(_M_MMAP_THRESHOLD, LOADING_THRESHOLD_BYTES)


def keep_memory() -> None:
    """Give back what loading left, and from now on keep what is freed for the next step."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.malloc_trim(0)
        libc.mallopt(_M_MMAP_THRESHOLD, SERVING_THRESHOLD_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)
