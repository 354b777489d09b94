"""The bytes of tensors that are alive at once."""

from __future__ import annotations

import gc

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of all tensor memory that operators allocate, while it lives.

    Memory that comes from outside, as an operand, does not count. Nor does what only a reference
    cycle holds: on Python 3.11 SlipCover leaves cycles with the frames that it met by chance, and
    with them all variables of those frames.

    Attributes:
        peak: the most bytes alive after an operator.
    """

    def __init__(self):
        super().__init__()
        self.peak = 0
        self._depth = 0
        self._sizes = {}
        self._seen = {}  # weak references, which keep an address from being used again

    def __enter__(self):
        if self._depth == 0:
            gc.freeze()  # collections look at new objects only
        self._depth += 1
        return super().__enter__()

    def __exit__(self, *raised):
        self._depth -= 1
        if self._depth == 0:
            gc.unfreeze()
        return super().__exit__(*raised)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._overloadpacket is not torch.ops.aten.scaled_dot_product_attention:
            with self:  # a composite operator's own temporaries count too
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        for storage in _storages((args, kwargs)):
            self._see(storage, 0)
        out = func(*args, **kwargs)
        for storage in _storages(out):
            self._see(storage, storage.nbytes())
        if self._alive() > self.peak:
            gc.collect()
            self.peak = max(self.peak, self._alive())
        return out

    def _see(self, storage, size):
        if storage._cdata not in self._sizes:
            self._sizes[storage._cdata] = size
            self._seen[storage._cdata] = StorageWeakRef(storage)

    def _alive(self):
        for key in [key for key, one in self._seen.items() if one.expired()]:
            del self._seen[key], self._sizes[key]
        return sum(self._sizes.values())


def _storages(tree):
    tensors = [one for one in _pytree.tree_leaves(tree) if isinstance(one, torch.Tensor)]
    # Opaque tensors, as oneDNN's, have none.
    return [one.untyped_storage() for one in tensors if not one.is_mkldnn]
