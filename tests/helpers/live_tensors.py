"""The bytes of tensors that are alive at once."""

from __future__ import annotations

import weakref

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of all tensor memory that operators allocate, while it lives."""

    def __init__(self, known):
        super().__init__()
        self.known = {one.untyped_storage()._cdata for one in known}
        self.sizes = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._overloadpacket is not torch.ops.aten.scaled_dot_product_attention:
            with self:  # a composite operator's own temporaries count too
                parts = func.decompose(*args, **(kwargs or {}))
            if parts is not NotImplemented:
                return parts
        out = func(*args, **(kwargs or {}))
        for tensor in _pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor.untyped_storage())
        return out

    def see(self, storage):
        key = storage._cdata
        if key not in self.known and key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.peak = max(self.peak, sum(self.sizes.values()))
            weakref.finalize(storage, self.sizes.pop, key, None)
