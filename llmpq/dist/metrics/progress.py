"""Progress of a run: events of the ranks, and front ends that show them."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Literal, NoReturn, Protocol

if TYPE_CHECKING:
    from tqdm import tqdm

EventKind = Literal["load", "tokens", "alive", "busy", "ready"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Work of a rank so far: layers loaded, tokens made, busy time.

    Attributes:
        rank: the sender.
        kind: ``load`` counts layers loaded, ``tokens`` counts tokens made, ``alive`` counts
            nothing and is a sign of life. ``busy`` counts milliseconds in which the rank neither
            waited nor sent, of those since its first micro-batch. ``ready``: the rank, which is
            not the master's, has loaded its layers or its draft model.
        done: amount done.
        total: expected amount in all.
    """

    rank: int
    kind: EventKind
    done: int
    total: int

    def encode(self) -> bytes:
        """Return the event as one line, below PIPE_BUF: events of several ranks never mix."""
        return json.dumps([self.rank, self.kind, self.done, self.total]).encode() + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> Event:
        """Read a line back; it comes from our own process, so a bad line is a bug."""
        rank, kind, done, total = json.loads(line)
        return cls(rank=rank, kind=kind, done=done, total=total)


class RunProgress(Protocol):
    """Receives the events of a run."""

    def report(self, event: Event) -> None:
        """Handle an event; never fails."""
        ...


class SilentProgress:
    """Ignores all events."""

    def report(self, event: Event) -> None:
        """Ignore the event."""

    def close(self) -> None:
        """Do nothing."""


class EventPipe:
    """Passes events to the launching process, over the writing end of a pipe."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        os.set_blocking(descriptor, False)

    def report(self, event: Event) -> None:
        """Write the event; a full or closed pipe drops it."""
        try:
            os.write(self._descriptor, event.encode())
        except OSError:
            return


class Heartbeat:
    """A thread that sends signs of life of a rank every ``interval_s`` until it is stopped."""

    def __init__(self, progress: RunProgress, rank: int, interval_s: float) -> None:
        self._progress = progress
        self._event = Event(rank=rank, kind="alive", done=0, total=0)
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="pulse")
        self._thread.start()

    def stop(self) -> None:
        """Stop; no event follows."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._progress.report(self._event)
            self._stop.wait(self._interval_s)


class BarProgress:
    """Draws a bar of the ``num_layers`` of this host, then a bar of tokens.

    The remaining load time is that of the slowest rank, which the bar names.
    """

    def __init__(
        self, file: IO[str], num_layers: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._loaded: dict[int, int] = {}
        self._left_s: dict[int, float] = {}
        self._busy: dict[int, float] = {}
        self._clock = clock
        self._start_s = clock()
        self._num_layers = num_layers
        self._file = file
        self._bar: tqdm[NoReturn] | None = None
        self._kind: EventKind | None = None

    def report(self, event: Event) -> None:
        """Update the bar of the event's kind."""
        if event.kind == "load":
            self._loaded[event.rank] = event.done
            elapsed_s = self._clock() - self._start_s
            self._left_s[event.rank] = elapsed_s / max(1, event.done) * (event.total - event.done)
            self._draw("load", sum(self._loaded.values()), self._num_layers)
            slowest = max(self._left_s, key=lambda rank: self._left_s[rank])
            assert self._bar is not None
            self._bar.set_postfix_str(f"rank {slowest}: {self._left_s[slowest]:.0f} s left")
        elif event.kind == "tokens":
            self._draw("tokens", event.done, event.total)
        elif event.kind == "busy" and self._kind == "tokens" and self._bar is not None:
            self._busy[event.rank] = event.done / max(1, event.total)
            shares = " ".join(f"{self._busy[rank]:.0%}" for rank in sorted(self._busy))
            self._bar.set_postfix_str(f"stages busy {shares}", refresh=False)

    def close(self) -> None:
        """Leave the last bar as it is."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _draw(self, kind: EventKind, done: int, total: int) -> None:
        if self._kind != kind or self._bar is None:
            from tqdm import tqdm  # noqa: PLC0415  only terminals show a bar

            self.close()
            self._kind = kind
            unit, label = ("layer", "loading") if kind == "load" else ("tok", "generating")
            self._bar = tqdm(total=total, desc=label, unit=unit, file=self._file, mininterval=0.2)
        self._bar.total = total
        self._bar.update(done - self._bar.n)
