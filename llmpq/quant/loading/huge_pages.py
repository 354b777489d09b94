"""Large pages for loaded weights, on Linux.

A decode step reads every weight once. With pages of 4 KiB the processor looks up each page on the
way, which takes up to half of the time inside a virtual machine; with pages of 2 MiB it seldom
does. Weights that are mapped from the store are left to the file system.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from llmpq.quant.modules.linear import DenseLinear, QuantLinear
from llmpq.units import MIB

PAGE_BYTES = 2 * MIB
_MADV_COLLAPSE = 25  # Linux 6.1; at once, the memory is copied
_MADV_HUGEPAGE = 14  # older ones; by a thread of the kernel, in its own time
_GAP_BYTES = 2 * mmap.PAGESIZE
"""Between blocks that malloc mapped one after the other."""


def use_huge_pages(module: nn.Module) -> None:
    """Ask for pages of ``PAGE_BYTES`` for the weights of a module that lie in memory.

    Only pages that weights fill are asked for, so that no memory is added. Nothing happens where
    the system has no such pages, or a weight is mapped from a file.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "madvise"):
        return
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for first, end in huge_ranges(_spans(module)):
        for advice in (_MADV_COLLAPSE, _MADV_HUGEPAGE):
            if libc.madvise(first, end - first, advice) == 0:
                break


def huge_ranges(spans: Iterator[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges of whole large pages within spans of addresses, joined where they meet.

    Args:
        spans: first address and the one after the last, in any order.
    """
    joined: list[tuple[int, int]] = []
    for first, end in sorted(spans):
        if joined and first - joined[-1][1] <= _GAP_BYTES:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((first, end))
    whole = [
        (-(-first // PAGE_BYTES) * PAGE_BYTES, end // PAGE_BYTES * PAGE_BYTES)
        for first, end in joined
    ]
    return [(first, end) for first, end in whole if first < end]


def _spans(module: nn.Module) -> Iterator[tuple[int, int]]:
    for tensor in _weights(module):
        if tensor.device.type == "cpu" and tensor.layout == torch.strided:
            yield tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def _weights(module: nn.Module) -> Iterator[Tensor]:
    for part in module.modules():
        yield from part.parameters(recurse=False)
        if isinstance(part, (QuantLinear, DenseLinear)):
            yield from part.prepared.tensors
