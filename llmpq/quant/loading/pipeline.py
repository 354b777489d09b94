"""Threads in a row - read, work, place - with a bound on the bytes between them.

The reading threads wait for the disk, the calling thread computes with the worker's threads, the
placing thread gives kernels their layouts; each hands its result on and drops it. A worker of one
thread gains the time of the disk, one with more cores that of placing too. This module refuses to
know what flows through it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

In = TypeVar("In")
Out = TypeVar("Out")

_READERS = 2  # one waits for the disk while the other prepares its next reading


class Cancelled(Exception):  # noqa: N818  not an error: another thread has the reason
    """The pipeline ends because some other part of it failed."""


class Budget:
    """Bytes that may be under way; whoever would exceed them waits (back-pressure).

    A piece larger than the whole budget goes through alone, for it has to be read some day.

    Args:
        limit_bytes: how much at once.

    Attributes:
        high_water_bytes: the most that was ever under way.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        self._is_closed = False
        self._changed = threading.Condition()
        self.high_water_bytes = 0

    def take(self, nbytes: int) -> None:
        """Wait until ``nbytes`` more may be under way.

        Raises:
            Cancelled: the pipeline ended meanwhile.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._fits(nbytes))
            if self._is_closed:
                raise Cancelled
            self._used_bytes += nbytes
            self.high_water_bytes = max(self.high_water_bytes, self._used_bytes)

    def give(self, nbytes: int) -> None:
        """Tell that ``nbytes`` have been freed, or reached their place."""
        with self._changed:
            self._used_bytes -= nbytes
            assert self._used_bytes >= 0
            self._changed.notify_all()

    def close(self) -> None:
        """Let nobody wait any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _fits(self, nbytes: int) -> bool:
        return self._used_bytes == 0 or self._used_bytes + nbytes <= self._limit_bytes


class _End:
    """Follows the last piece."""


class _Channel(Generic[In]):
    """A queue whose reader learns of the end, and whom a failure wakes."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[In | _End] = queue.SimpleQueue()

    def put(self, piece: In) -> None:
        self._queue.put(piece)

    def close(self) -> None:
        self._queue.put(_End())

    def __iter__(self) -> Iterator[In]:
        while not isinstance(piece := self._queue.get(), _End):
            yield piece
            del piece  # or it would live until the next one comes


class _Failure:
    """The first error of any thread; the others end because of it."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._lock = threading.Lock()
        self.error: BaseException | None = None

    @contextlib.contextmanager
    def noted(self) -> Generator[None, None, None]:
        """Keep what goes wrong inside, and stop everybody."""
        try:
            yield
        except Cancelled:
            return
        except BaseException as error:  # handed to the calling thread, which raises it
            with self._lock:
                self.error = self.error or error
            self._budget.close()

    def check(self) -> None:
        if self.error is not None:
            raise Cancelled


def run_pipeline(
    pieces: Iterator[Callable[[], In]],
    work: Callable[[In, bool], Out],
    place: Callable[[Out], None],
    *,
    budget: Budget,
    scope: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> None:
    """Pull every piece through ``work`` and ``place``, in order, all at the same time.

    Args:
        pieces: yields what reads each piece, having taken its bytes from ``budget``; runs in a
            thread of its own. The readings themselves run in two threads, each begun in order.
        work: runs in the calling thread; told whether no other piece has been read by now, so that
            it has time to do what could be left to ``place``.
        place: runs in a thread of its own; gives the bytes back.
        budget: closed when anything fails.
        scope: entered by each thread: the device that is its current one.

    Raises:
        BaseException: what any of the threads raised first. No thread outlives the call.
    """
    read: _Channel[Future[In]] = _Channel()
    worked: _Channel[Out] = _Channel()
    failure = _Failure(budget)
    reading = ThreadPoolExecutor(max_workers=_READERS, thread_name_prefix="load-disk")

    waiting: deque[None] = deque()  # as many as there are pieces read and not worked on

    def scoped(piece: Callable[[], In]) -> In:
        with scope():
            found = piece()
        waiting.append(None)
        return found

    def begin_all() -> None:
        with failure.noted(), scope():
            for piece in pieces:
                failure.check()
                read.put(reading.submit(scoped, piece))
                del piece
        read.close()

    def place_all() -> None:
        with failure.noted(), scope():
            for piece in worked:
                failure.check()
                place(piece)
                del piece

    threads = [
        threading.Thread(target=target, name=f"load-{name}", daemon=True)
        for name, target in (("read", begin_all), ("place", place_all))
    ]
    for thread in threads:
        thread.start()
    with failure.noted(), scope():
        for future in read:
            failure.check()
            piece = future.result()
            waiting.pop()
            worked.put(work(piece, not waiting))
            del future, piece
    worked.close()
    for thread in threads:
        thread.join()
    reading.shutdown(cancel_futures=True)
    if failure.error is not None:
        raise failure.error
