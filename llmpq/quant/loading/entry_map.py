"""FileMap: an entry's file used where it lies, in the system's own pages of it.

Fresh memory has to be cleared, filled and, by another core, faulted in; the pages that a file was
read into have all that behind them, are shared by the workers of a host, and are still there when
one starts again. Their bytes are copied once, through memory that stays in a core's cache, to be
summed; what is mapped is never touched before.

What is trusted: that nobody writes to the file or truncates it, as ``models.sources`` refuses to
trust anyone's checkpoint. It lies in a folder of this user alone, nobody opens it for writing once
it has its name, and one that is removed or replaced stays whole for as long as it is mapped. Pages
that the system drops when memory is short come from the disk again, which no sum covers: then the
disk is trusted as swap would be, and fails as swap does.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch
from torch import Tensor

ALIGNMENT = 64
"""Of numbers in the file, and so in memory: what kernels load at once lies in one cache line."""

_MADV_POPULATE_READ = 22  # <linux/mman.h>, from 5.14 on


class FileMap:
    """A whole file, mapped for as long as a tensor of it lives.

    Args:
        descriptor: of the file, which may be closed afterwards.
        nbytes: of the file.

    Raises:
        OSError: the file system does not map files.
        ValueError: the file is empty, or shorter than ``nbytes``.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        # Writable for torch's sake, to which a tensor is; private, so that no write, which none of
        # the kernels does, could reach the file.
        flags, access = mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
        self._memory = mmap.mmap(descriptor, nbytes, flags=flags, prot=access)
        self._address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        self._nbytes = nbytes

    def tensor(self, begin: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Return what lies in the file from ``begin`` on, with a storage of its own."""
        count = torch.Size(shape).numel()
        if not count:  # frombuffer refuses
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=begin).view(shape)

    def populate(self, begin: int, end: int) -> None:
        """Map the pages of bytes ``[begin, end)``, in one call and without copying any.

        Mapping them as ``MAP_POPULATE`` does would copy them, for it means to write. Where the
        system is older, each is mapped when it is first read.
        """
        first = begin // mmap.PAGESIZE * mmap.PAGESIZE
        address, nbytes = ctypes.c_void_p(self._address + first), ctypes.c_size_t(end - first)
        if sys.platform == "linux":  # elsewhere the number means nothing, or something else
            _madvise(address, nbytes, _MADV_POPULATE_READ)


_madvise = ctypes.CDLL(None).madvise
