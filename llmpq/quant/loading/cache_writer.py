"""Keeper: writes finished layers to the store in a thread of its own.

Tiles stay where they are, so that their writing may lag behind without holding any memory back.
What lies in borrowed memory is waited for. This module refuses to decide what is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from llmpq.kernels.cpu.tiled import TiledWeight
from llmpq.kernels.packed import PackedWeight
from llmpq.quant.loading.entries import parts_of
from llmpq.quant.loading.entry_file import EntryWriter


class CacheWriter:
    """What goes to the store, one layer after the other.

    Leaving it as a context waits for all that was written; after an error the entry that is being
    written is removed. Its other methods are for one thread alone.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="load-keep")
        self._writer: EntryWriter | None = None
        self._written: list[Future[None]] = []

    def __enter__(self) -> CacheWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._thread.shutdown()
        if self._writer is not None:
            self._writer.abort()
        if error is None:
            for done in self._written:
                done.result()

    def begin(self, opened: Callable[[], EntryWriter | None]) -> None:
        """Begin the entry of a layer, unless the store will not have it."""
        self._writer = opened()

    def add(self, name: str, packed: PackedWeight | TiledWeight) -> None:
        """Write a matrix, where an entry was begun."""
        writer = self._writer
        if writer is None:
            return
        for part, tensor in parts_of(packed).items():
            self._written.append(self._thread.submit(writer.add, f"{name}.{part}", tensor))
        if isinstance(packed, PackedWeight):
            self._written[-1].result()  # its memory is lent to the next one soon

    def end(self, is_sound: Callable[[], bool]) -> None:
        """Give the layer's entry its name, or forget it if ``is_sound`` says no."""
        if self._writer is not None:
            self._written.append(self._thread.submit(_finish, self._writer, is_sound))
            self._writer = None


def _finish(writer: EntryWriter, is_sound: Callable[[], bool]) -> None:
    if is_sound():
        writer.commit()
    else:
        writer.abort()
