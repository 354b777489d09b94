"""Keys and values on their way from the stages that prefill to those that decode (WAA).

A prefill stage computes into one half of its transient slots while a thread sends what it has left
in the other half; a decode stage's thread puts what comes into the slots it belongs to while the
stage goes on decoding others. So neither waits, unless a link is slower than the stages: a prefill
stage waits for a half to be free, a decode step for the keys and values of its own slots.

Every row carries its ``origin``, the prefill micro-batch that fills its slot. A layer of a slot is
there when it came from the origin that a decode step names; so a slot's new owner never reads what
an earlier one has left. A slot is only given away after its owner's last step came back from all
stages: nobody reads what is overwritten.
"""

from __future__ import annotations

import os
import queue
import select
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from llmpq.dist.kv.cache import KVCache
from llmpq.dist.kv.storage import Places
from llmpq.dist.transport.errors import peer_closed, peer_silent
from llmpq.dist.transport.frames import Frame, FrameKind, Row
from llmpq.dist.transport.socket_communicator import FrameReader, FrameWriter, LinkClosedError
from llmpq.errors import StageError
from llmpq.spec.plan import PREFILL_BUFFERS, Handover, Plan


class KVConnector(Protocol):
    """What rows pass before and after a stage's layers where keys and values travel."""

    def acquire(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Wait until the layers may run; return the rows with the slots they have here."""
        ...

    def release(self, rows: Sequence[Row]) -> None:
        """Say that the layers have run over what ``acquire`` was given."""
        ...

    def close(self) -> None:
        """End the thread and hang up."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KVSendLink:
    """Where one handover goes: the link to the rank that decodes."""

    handover: Handover
    name: str
    writer: FrameWriter


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KVReceiveLink:
    """Where one handover comes from: the link of the rank that prefills."""

    handover: Handover
    name: str
    reader: FrameReader


def kv_connector(
    plan: Plan,
    cache: KVCache,
    ends: tuple[Sequence[KVSendLink], Sequence[KVReceiveLink]],
    *,
    timeout_s: float,
) -> KVConnector | None:
    """Return what keys and values pass at a stage with these ends of links; usually nothing."""
    send_links, receive_links = ends
    if send_links:
        rows = plan.micro_batching.prefill
        return KVSender(cache, rows=rows, send_links=send_links, timeout_s=timeout_s)
    return (
        KVReceiver(cache, receive_links=receive_links, timeout_s=timeout_s)
        if receive_links
        else None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """A micro-batch to send: its rows, and the half it was computed in."""

    half: int
    rows: tuple[Row, ...]


class KVSender:
    """A prefill stage's side.

    Args:
        cache: its transient slots, ``PREFILL_BUFFERS`` times ``rows`` of them.
        rows: most sequences of a prefill micro-batch.
        send_links: where its layers' keys and values go, together each of them once.
        timeout_s: how long a peer may take nothing.
    """

    def __init__(
        self, cache: KVCache, *, rows: int, send_links: Sequence[KVSendLink], timeout_s: float
    ) -> None:
        self._cache = cache
        self._rows = rows
        self._send_links = send_links
        self._timeout_s = timeout_s
        self._failure: StageError | None = None
        self._half = 0
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for half in range(PREFILL_BUFFERS):
            self._free.put(half)
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, daemon=True, name="keys and values")
        self._thread.start()

    def acquire(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Wait for a free half; return the rows with the slots they have in it."""
        self._half = self._free.get()
        if self._failure is not None:
            self._free.put(self._half)  # whoever asks again hears the same
            raise self._failure
        return self._here(rows, self._half)

    def release(self, rows: Sequence[Row]) -> None:
        """Have the micro-batch's keys and values sent."""
        self._tasks.put(_Task(half=self._half, rows=tuple(rows)))

    def close(self) -> None:
        """Send what is left, as long as the peers take it, and hang up."""
        self._tasks.put(None)
        self._thread.join()
        for send_link in self._send_links:
            send_link.writer.close(0.0)

    def _here(self, rows: Sequence[Row], half: int) -> list[Row]:
        first = half * self._rows
        return [replace(row, slot=first + place) for place, row in enumerate(rows)]

    def _serve(self) -> None:
        try:
            while (task := self._tasks.get()) is not None:
                self._send(task)
                self._free.put(task.half)
        except StageError as error:
            self._failure = error
        except Exception as error:  # whoever waits for a half must hear of it
            self._failure = StageError(f"keys and values: {type(error).__name__}: {error}")
        self._free.put(0)  # nobody waits for a half that will never be free

    @torch.inference_mode()
    def _send(self, task: _Task) -> None:
        slots = [row.slot for row in self._here(task.rows, task.half)]
        places = Places.of(slots, [row.length for row in task.rows], self._cache.device)
        for send_link in self._send_links:
            handover = send_link.handover
            for layer in range(handover.first_layer, handover.end_layer):
                frame = Frame(
                    kind=FrameKind.KV,
                    micro_batch=task.rows[0].origin,
                    rows=task.rows,
                    layer=layer,
                    cached=self._cache.pack(layer, places),
                )
                try:
                    send_link.writer.write(frame)
                    is_sent = send_link.writer.drain(self._timeout_s)
                except LinkClosedError:
                    raise peer_closed(send_link.name, handover.target) from None
                if not is_sent:
                    raise peer_silent(send_link.name, handover.target, self._timeout_s)


class KVReceiver:
    """A decode stage's side.

    Args:
        cache: its slots.
        receive_links: where its layers' keys and values come from, together each of them once.
        timeout_s: how long a peer may send nothing of what is waited for.
    """

    def __init__(
        self, cache: KVCache, *, receive_links: Sequence[KVReceiveLink], timeout_s: float
    ) -> None:
        self._cache = cache
        self._receive_links = receive_links
        self._timeout_s = timeout_s
        self._failure: StageError | None = None
        self._ended: set[int] = set()  # ranks that hung up
        self._origins: dict[tuple[int, int], int] = {}  # by slot and layer, what came last
        self._news = threading.Condition()  # of the three above
        self._whole: dict[int, int] = {}  # by slot, the origin of which every layer is there
        self._is_closing = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._serve, daemon=True, name="keys and values")
        self._thread.start()

    def acquire(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Wait until the keys and values of every row's own prompt are in its slot."""
        if all(self._whole.get(row.slot) == row.origin for row in rows):
            return rows
        with self._news:
            start_s = time.monotonic()
            while (missing := self._missing(rows)) is not None:
                if self._failure is not None:
                    raise self._failure
                source = missing.handover.source
                if source in self._ended:
                    raise peer_closed(missing.name, source)
                last_received_s = max(start_s, missing.reader.last_received_s)
                left_s = last_received_s + self._timeout_s - time.monotonic()
                if left_s <= 0:
                    raise peer_silent(missing.name, source, self._timeout_s)
                self._news.wait(left_s)
        self._whole.update((row.slot, row.origin) for row in rows)
        return rows

    def release(self, rows: Sequence[Row]) -> None:
        """Nothing is to be done: what was decoded stays."""

    def close(self) -> None:
        """Stop receiving and hang up."""
        self._is_closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)
        for receive_link in self._receive_links:
            receive_link.reader.close()

    def _missing(self, rows: Sequence[Row]) -> KVReceiveLink | None:
        """Return a link that has yet to bring something of these rows."""
        for receive_link in self._receive_links:
            handover = receive_link.handover
            for layer in range(handover.first_layer, handover.end_layer):
                if any(self._origins.get((row.slot, layer)) != row.origin for row in rows):
                    return receive_link
        return None

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        receive_links = {link.reader.fileno(): link for link in self._receive_links}
        for descriptor in receive_links:
            poll.register(descriptor, select.POLLIN)
        try:
            while not self._is_closing:
                for descriptor, _ in poll.poll():
                    if descriptor in receive_links and not self._take(receive_links[descriptor]):
                        poll.unregister(descriptor)
        except StageError as error:
            self._fail(error)
        except Exception as error:  # a decode step must not wait for what never comes
            self._fail(StageError(f"keys and values: {type(error).__name__}: {error}"))

    def _take(self, receive_link: KVReceiveLink) -> bool:
        """Take in what is here; tell whether more may come."""
        try:
            while (frame := receive_link.reader.read(is_waiting=True)) is not None:
                self._keep(frame, receive_link.handover)
        except LinkClosedError:
            with self._news:
                self._ended.add(receive_link.handover.source)
                self._news.notify_all()
            return False
        return True

    @torch.inference_mode()
    def _keep(self, frame: Frame, handover: Handover) -> None:
        layer = frame.layer
        if frame.kind is not FrameKind.KV or not (
            handover.first_layer <= layer < handover.end_layer
        ):
            raise StageError(
                f"found a frame {frame.kind.name} of layer {layer}, expected keys and values of "
                f"layers [{handover.first_layer}, {handover.end_layer})"
            )
        assert frame.cached is not None
        slots = [row.slot for row in frame.rows]
        places = Places.of(slots, [row.length for row in frame.rows], self._cache.device)
        self._cache.unpack(layer, places, frame.cached)
        with self._news:
            self._origins.update(((row.slot, layer), row.origin) for row in frame.rows)
            self._news.notify_all()

    def _fail(self, error: StageError) -> None:
        with self._news:
            self._failure = error
            self._news.notify_all()
