"""HostSyncDetector: find operators that synchronise host and device or copy between them.

A CUDA graph cannot contain them. The detector runs before the capture, because a failed capture can
leave its stream unusable, and works on any device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_SYNCS = frozenset(
    (
        "_local_scalar_dense",
        "_unique",
        "_unique2",
        "bincount",
        "equal",
        "is_nonzero",
        "masked_select",
        "nonzero",
        "unique_consecutive",
        "unique_dim",
    )
)
"""Operators whose result, or its size, is read by the host."""
_COPIES = frozenset(("_to_copy", "copy_", "_copy_from"))
_INDEXES = frozenset(("index", "index_put", "index_put_", "_unsafe_index"))


class HostSyncDetector(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Run operators and record those that a CUDA graph cannot contain.

    Attributes:
        found: names of the operators, in order; includes all operators of other libraries, whose
            effect is unknown. Triton kernels are not operators.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operator."""
        if func._can_decompose():  # inference mode does not decompose composite operators
            with self:
                return func.decompose(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        namespace, _, name = func._schema.name.partition("::")
        if namespace not in ("aten", "prim", "prims") or _syncs(name, args, kwargs or {}, result):
            self.found.append(func._schema.name)
        return result


def host_syncs(work: Callable[[], object]) -> list[str]:
    """Run ``work`` once and return the operators that a CUDA graph cannot contain."""
    mode = HostSyncDetector()
    with mode:
        work()
    return mode.found


def _syncs(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: object) -> bool:
    if name in _SYNCS:
        return True
    if name == "repeat_interleave":  # of a tensor of counts without the output size
        return kwargs.get("output_size") is None and isinstance(args[-1], Tensor)
    if name in _INDEXES:  # the number of indices of a mask is read by the host
        return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])
    if name in _COPIES:
        tensors = [one for one in (*args, result) if isinstance(one, Tensor)]
        return len({one.device.type for one in tensors}) > 1
    return False
