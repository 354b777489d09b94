"""HostWaits: which operators make the host wait for a device, or bring it something from memory.

Neither may stand in a CUDA graph, which replays kernels without asking the host again. A run under
this mode tells before anything is captured, for a capture that fails leaves a stream in doubt; and
it tells on any device, so that a machine without a GPU can test for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_WAITS = frozenset(
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
"""Their result, or its size, is read by the host."""
_COPIES = frozenset(("_to_copy", "copy_", "_copy_from"))
_INDEXES = frozenset(("index", "index_put", "index_put_", "_unsafe_index"))


class HostWaits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Run operators as ever, and keep the names of those no graph can hold.

    Attributes:
        found: names, in order; an operator of another library than torch is one of them, since
            its effect is unknown. Triton's kernels are no operators, and fit a graph.
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
        if func._can_decompose():  # in inference mode operators made of others come whole
            with self:
                return func.decompose(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        namespace, _, name = func._schema.name.partition("::")
        if namespace not in ("aten", "prim", "prims") or _waits(name, args, kwargs or {}, result):
            self.found.append(func._schema.name)
        return result


def waits_of(work: Callable[[], object]) -> list[str]:
    """Run ``work`` once and return the operators in it that no graph can hold."""
    mode = HostWaits()
    with mode:
        work()
    return mode.found


def _waits(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: object) -> bool:
    if name in _WAITS:
        return True
    if name == "repeat_interleave":  # of a tensor of counts, unless told how many come out
        return kwargs.get("output_size") is None and isinstance(args[-1], Tensor)
    if name in _INDEXES:  # a mask becomes as many indices as it has ones
        return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])
    if name in _COPIES:
        tensors = [one for one in (*args, result) if isinstance(one, Tensor)]
        return len({one.device.type for one in tensors}) > 1
    return False
