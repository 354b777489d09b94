"""Reading past the page cache: the disk writes into the reader's own memory, and no core copies.

The usual way costs a core's copy of every byte, and pages of the system's for all of them. Direct
reading wants pages instead: of the file, and of memory that begins at one. This module refuses to
decide what a failure means: whatever it cannot read is left to the usual way, which can.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import sys

PAGE_BYTES = mmap.PAGESIZE
"""What file positions and memory are multiples of: at least the block of every usual disk."""

MIN_BYTES = 1 << 20
"""Less is not worth the calls."""

_PROBES = 8  # pages looked at in the page cache, where they cannot be counted


def pages_around(begin: int, nbytes: int) -> int:
    """Return the bytes of the whole pages that bytes from ``begin`` of a file lie in."""
    return -(-(begin % PAGE_BYTES + nbytes) // PAGE_BYTES) * PAGE_BYTES


def read_pages(descriptor: int, begin: int, nbytes: int, pages: memoryview) -> int:
    """Read bytes of a file with the pages that they lie in, as far as that goes.

    What is in the page cache already is not read again from the disk: then nothing is read here.

    Args:
        descriptor: of the file, read by nobody else meanwhile.
        begin: position in the file.
        nbytes: how many.
        pages: memory of :func:`pages_around`, used if it begins at a page; the first of the bytes
            goes to the place in its page that it has in the file.

    Returns:
        How many of the bytes were read: 0 where the system cannot do it, fewer than asked for where
        the file ends or the disk fails.
    """
    lead = begin % PAGE_BYTES
    if not hasattr(os, "O_DIRECT") or len(pages) < MIN_BYTES:
        return 0
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    if address % PAGE_BYTES or is_cached(descriptor, begin, nbytes):
        return 0
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    done = 0
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        while done < len(pages) and done % PAGE_BYTES == 0:
            count = os.preadv(descriptor, [pages[done:]], begin - lead + done)
            if count == 0:
                break
            done += count
    except OSError:  # a file system without it, or memory that a disk cannot reach
        pass
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    return min(nbytes, max(0, done - lead))


def is_cached(descriptor: int, begin: int, nbytes: int) -> bool:
    """Whether most of some bytes of a file are in the page cache.

    The system says yes to all about files that this user neither owns nor may write to.
    """
    pages = pages_around(begin, nbytes) // PAGE_BYTES
    counted = _cached_pages(descriptor, begin, nbytes)
    if counted is not None:
        return 2 * counted > pages
    return _are_probes_resident(descriptor, begin, pages)


def _cached_pages(descriptor: int, begin: int, nbytes: int) -> int | None:
    """Return how many pages of these bytes are in the cache; ``None`` where nobody counts them."""
    if not _CAN_COUNT:
        return None
    span, found = (ctypes.c_uint64 * 2)(begin, nbytes), (ctypes.c_uint64 * 5)()
    return None if _syscall(_CACHESTAT, descriptor, span, found, 0) else found[0]


def _are_probes_resident(descriptor: int, begin: int, pages: int) -> bool:
    """Whether most of a few pages of a file are in memory.

    The file is mapped for the question and never touched. Systems before Linux 6.5 know no other
    way; it costs a load a twelfth of its time, probably as a new map waits for threads that are
    just given memory.
    """
    pages -= 1  # the last may be beyond the file
    step = max(1, pages // _PROBES)
    probed = range(step // 3, pages, step)  # off the middle, where fingerprints read
    begin -= begin % PAGE_BYTES
    try:
        with mmap.mmap(descriptor, pages * PAGE_BYTES, mmap.MAP_PRIVATE, offset=begin) as mapped:
            first = ctypes.addressof(first_byte := ctypes.c_char.from_buffer(mapped))
            found = sum(_is_resident(first + page * PAGE_BYTES) for page in probed)
            del first_byte  # or the map could not be closed
    except (OSError, ValueError):  # what cannot be mapped has no pages there
        return False
    return 2 * found > len(probed)


def _is_resident(address: int) -> bool:
    answer = ctypes.c_ubyte()
    failed = _mincore(ctypes.c_void_p(address), ctypes.c_size_t(1), ctypes.byref(answer))
    return not failed and bool(answer.value & 1)


_mincore = ctypes.CDLL(None).mincore
# <linux/mman.h>; no C library has a function for it. The number is the same on these machines.
_CACHESTAT = 451
_CAN_COUNT = sys.platform == "linux" and platform.machine() in {"x86_64", "aarch64", "riscv64"}
# Keeps Python's lock: the call is short, and to get the lock back is not.
_syscall = ctypes.PyDLL(None).syscall
_syscall.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long)
