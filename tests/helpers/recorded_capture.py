"""A capture for tests that replays operators at the addresses of the capture, as CUDA does.

A CUDA graph does not hold the memory that it reads and writes. What was allocated inside the
capture belongs to the pool of the graph and stays; memory from outside is another matter: once its
tensor is gone, the allocator gives it to others, and a replay reads and writes what they put there.
So tensors from outside are referred to weakly here, and a replay whose memory is gone fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

Work = Callable[[], None]


class GivenAwayError(AssertionError):
    """A kept graph uses memory that has been given away."""


@dataclass(frozen=True, slots=True)
class _Outside:
    """A tensor whose memory was allocated before the capture."""

    storage: StorageWeakRef
    address: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _Outside:
        storage = tensor.untyped_storage()
        return cls(
            StorageWeakRef(storage),
            storage.data_ptr(),
            tensor.shape,
            tensor.stride(),
            tensor.storage_offset(),
            tensor.dtype,
        )

    def tensor(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None or storage.data_ptr() != self.address:
            raise GivenAwayError(f"{self.dtype} {list(self.size)} has been given away")
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


class _Recorder(TorchDispatchMode):
    """Runs operators and keeps them with their operands."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any]] = []
        self._pool: dict[int, Tensor] = {}  # by address, what was allocated inside

    @property
    def pool_bytes(self) -> int:
        """Bytes that were allocated inside."""
        return sum(one.untyped_storage().nbytes() for one in self._pool.values())

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)
        operands = tree_map(self._operand, (tuple(args), dict(kwargs)))
        result = func(*args, **kwargs)
        known = {_address(one) for one in _tensors((args, kwargs))}
        made = [one for one in _tensors(result) if _address(one) not in known]
        self._pool |= {_address(one): one for one in made}
        self.calls.append((func, operands, result if made else None))
        return result

    def replay(self) -> None:
        """Run the operators again, into the memory of the first time."""
        for func, operands, result in self.calls:
            args, kwargs = tree_map(_resolved, operands)
            again = func(*args, **kwargs)
            if result is not None:
                for kept, new in zip(_tensors(result), _tensors(again), strict=True):
                    kept.copy_(new)

    def _operand(self, one: object) -> object:
        is_outside = isinstance(one, Tensor) and _address(one) not in self._pool
        return _Outside.of(one) if is_outside else one


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _resolved(one: object) -> object:
    return one.tensor() if isinstance(one, _Outside) else one


@dataclass
class RecordedCapture:
    """Stands in for ``CudaCapture``.

    Attributes:
        room: bytes of the device before any capture; each of ``costs`` takes some of them.
        costs: bytes that the captures take, in order; none when there are no more.
        made: captures so far.
        replayed: replays so far.
        pool_bytes: that were allocated in captures, all told.
    """

    room: int = 1 << 40
    costs: list[int] = field(default_factory=list)
    made: int = 0
    replayed: int = 0
    pool_bytes: int = 0

    def __call__(self, work: Work) -> Work:
        work()
        recorder = _Recorder()
        with torch.inference_mode(), recorder:
            work()
        self.pool_bytes += recorder.pool_bytes
        self.room -= self.costs[self.made] if self.made < len(self.costs) else 0
        self.made += 1

        def replay() -> None:
            self.replayed += 1
            with torch.inference_mode():
                recorder.replay()

        return replay

    def free_bytes(self) -> int:
        """Return what is left of ``room``."""
        return self.room


class CalledAgain(RecordedCapture):
    """Replays by calling the work again: for compiled CPU kernels, which no recorder sees."""

    def __call__(self, work: Work) -> Work:
        self.made += 1

        def replay() -> None:
            self.replayed += 1
            work()

        return replay
