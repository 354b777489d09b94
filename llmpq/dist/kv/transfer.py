"""Transfer of keys and values from the stages that prefill to those that decode (WAA).

Experimental: runs on CPUs only.

A prefill stage computes into one of two buffers of transient blocks while a thread sends the other.
A decode stage's thread stores what arrives while the stage decodes other rows. So a stage waits
only if a link is slower than the stages: prefill for a free buffer, decode for the keys and values
of its own rows.

Every row has an ``origin``, the prefill micro-batch that fills its blocks. A layer of a row, which
its first block names, is complete if it came from the origin that the decode step names, so a new
owner of blocks never reads values of the previous one. Blocks are reused only after the last step
of their owner came back from all stages.
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

from llmpq.batching.blocks import blocks_of
from llmpq.dist.kv.cache import KVCache, TokenIndex
from llmpq.dist.transport.communicator import FrameReader, FrameWriter, LinkClosedError
from llmpq.dist.transport.errors import peer_closed, peer_silent
from llmpq.dist.transport.frames import Frame, FrameKind, Row
from llmpq.errors import StageError
from llmpq.spec.plan import PREFILL_BUFFERS, Handover, Plan


class KVConnector(Protocol):
    """Called before and after a stage's layers run, where keys and values are transferred."""

    def acquire(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Wait until the layers may run; return the rows with their blocks on this rank."""
        ...

    def release(self, rows: Sequence[Row]) -> None:
        """Report that the layers have run over the rows given to :meth:`acquire`."""
        ...

    def close(self) -> None:
        """End the thread and close the connections."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KVSendLink:
    """The link of one handover to the rank that decodes."""

    handover: Handover
    name: str
    writer: FrameWriter


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KVReceiveLink:
    """The link of one handover from the rank that prefills."""

    handover: Handover
    name: str
    reader: FrameReader


def kv_connector(
    plan: Plan,
    cache: KVCache,
    links: tuple[Sequence[KVSendLink], Sequence[KVReceiveLink]],
    *,
    timeout_s: float,
) -> KVConnector | None:
    """Return the connector of a stage with these links, ``None`` without any."""
    send_links, receive_links = links
    if send_links:
        size = plan.micro_batching.prefill * blocks_of(plan.workload.max_prompt_tokens)
        return KVSender(cache, buffer_blocks=size, send_links=send_links, timeout_s=timeout_s)
    if receive_links:
        return KVReceiver(cache, receive_links=receive_links, timeout_s=timeout_s)
    return None


def _prompts(cache: KVCache, rows: Sequence[Row]) -> TokenIndex:
    """Return where the prompts of the rows lie."""
    lengths = [row.length for row in rows]
    return cache.index_of([row.blocks for row in rows], [0] * len(rows), lengths)


class KVSender:
    """The connector of a prefill stage.

    Args:
        cache: its transient blocks, ``PREFILL_BUFFERS`` times ``buffer_blocks`` of them.
        buffer_blocks: most blocks of a prefill micro-batch.
        send_links: together they take each of its layers once.
        timeout_s: longest time in which a peer takes nothing.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        buffer_blocks: int,
        send_links: Sequence[KVSendLink],
        timeout_s: float,
    ) -> None:
        self._cache = cache
        self._buffer_blocks = buffer_blocks
        self._send_links = send_links
        self._timeout_s = timeout_s
        self._failure: StageError | None = None
        self._buffer = 0
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for buffer in range(PREFILL_BUFFERS):
            self._free.put(buffer)
        self._filled: queue.SimpleQueue[tuple[int, Sequence[Row]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name="kv sender")
        self._thread.start()

    def acquire(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Wait for a free buffer; return the rows with their blocks in it."""
        self._buffer = self._free.get()
        if self._failure is not None:
            self._free.put(self._buffer)  # the next call raises it again
            raise self._failure
        return self._local_rows(rows, self._buffer)

    def release(self, rows: Sequence[Row]) -> None:
        """Queue the micro-batch's keys and values for sending."""
        self._filled.put((self._buffer, rows))

    def close(self) -> None:
        """Send what is queued, as long as the peers take it, and close the connections."""
        self._filled.put(None)
        self._thread.join()
        for link in self._send_links:
            link.writer.close(0.0)

    def _local_rows(self, rows: Sequence[Row], buffer: int) -> list[Row]:
        first, found = buffer * self._buffer_blocks, []
        for row in rows:
            end = first + len(row.blocks)
            found.append(replace(row, blocks=tuple(range(first, end))))
            first = end
        return found

    def _run(self) -> None:
        try:
            while (item := self._filled.get()) is not None:
                self._send(*item)
                self._free.put(item[0])
        except StageError as error:
            self._failure = error
        except Exception as error:  # a waiting ``acquire`` must see it
            self._failure = StageError(f"keys and values: {type(error).__name__}: {error}")
        self._free.put(0)  # wakes a waiting ``acquire``

    @torch.inference_mode()
    def _send(self, buffer: int, rows: Sequence[Row]) -> None:
        tokens = _prompts(self._cache, self._local_rows(rows, buffer))
        for link in self._send_links:
            handover = link.handover
            for layer in range(handover.first_layer, handover.end_layer):
                frame = Frame(
                    kind=FrameKind.KV,
                    micro_batch=rows[0].origin,
                    rows=tuple(rows),
                    layer=layer,
                    cached=self._cache.pack(layer, tokens),
                )
                try:
                    link.writer.write(frame)
                    is_sent = link.writer.drain(self._timeout_s)
                except LinkClosedError:
                    raise peer_closed(link.name, handover.target) from None
                if not is_sent:
                    raise peer_silent(link.name, handover.target, self._timeout_s)


class KVReceiver:
    """The connector of a decode stage.

    Args:
        cache: its blocks.
        receive_links: together they bring each of its layers once.
        timeout_s: longest silence of a peer during a wait for it.
    """

    def __init__(
        self, cache: KVCache, *, receive_links: Sequence[KVReceiveLink], timeout_s: float
    ) -> None:
        self._cache = cache
        self._receive_links = receive_links
        self._timeout_s = timeout_s
        self._failure: StageError | None = None
        self._closed_ranks: set[int] = set()
        self._origins: dict[
            tuple[int, int], int
        ] = {}  # of the last values, by first block and layer
        self._changed = threading.Condition()  # of the three above
        self._complete: dict[
            int, int
        ] = {}  # by first block, the origin of which every layer is there
        self._is_closing = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, daemon=True, name="kv receiver")
        self._thread.start()

    def acquire(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Wait until the keys and values of every row's own prompt are in its blocks."""
        if all(self._complete.get(row.blocks[0]) == row.origin for row in rows):
            return rows
        with self._changed:
            start_s = time.monotonic()
            while (missing := self._missing(rows)) is not None:
                if self._failure is not None:
                    raise self._failure
                source = missing.handover.source
                if source in self._closed_ranks:
                    raise peer_closed(missing.name, source)
                last_s = max(start_s, missing.reader.last_received_s)
                left_s = last_s + self._timeout_s - time.monotonic()
                if left_s <= 0:
                    raise peer_silent(missing.name, source, self._timeout_s)
                self._changed.wait(left_s)
        self._complete.update((row.blocks[0], row.origin) for row in rows)
        return rows

    def release(self, rows: Sequence[Row]) -> None:
        """Do nothing: the decoded tokens stay in the cache."""

    def close(self) -> None:
        """Stop receiving and close the connections."""
        self._is_closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)
        for link in self._receive_links:
            link.reader.close()

    def _missing(self, rows: Sequence[Row]) -> KVReceiveLink | None:
        """Return a link that has yet to bring a layer of these rows."""
        for link in self._receive_links:
            handover = link.handover
            for layer in range(handover.first_layer, handover.end_layer):
                if any(self._origins.get((row.blocks[0], layer)) != row.origin for row in rows):
                    return link
        return None

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        links = {link.reader.fileno(): link for link in self._receive_links}
        for descriptor in links:
            poll.register(descriptor, select.POLLIN)
        try:
            while not self._is_closing:
                for descriptor, _ in poll.poll():
                    if descriptor in links and not self._read(links[descriptor]):
                        poll.unregister(descriptor)
        except StageError as error:
            self._fail(error)
        except Exception as error:  # a waiting ``acquire`` must see it
            self._fail(StageError(f"keys and values: {type(error).__name__}: {error}"))

    def _read(self, link: KVReceiveLink) -> bool:
        """Read and store what has arrived; return whether the link is still open."""
        try:
            while (frame := link.reader.read(is_waiting=True)) is not None:
                self._store(frame, link.handover)
        except LinkClosedError:
            with self._changed:
                self._closed_ranks.add(link.handover.source)
                self._changed.notify_all()
            return False
        return True

    @torch.inference_mode()
    def _store(self, frame: Frame, handover: Handover) -> None:
        layer = frame.layer
        if frame.kind is not FrameKind.KV or not (
            handover.first_layer <= layer < handover.end_layer
        ):
            raise StageError(
                f"found a frame {frame.kind.name} of layer {layer}, expected keys and values of "
                f"layers [{handover.first_layer}, {handover.end_layer})"
            )
        assert frame.cached is not None
        self._cache.unpack(layer, _prompts(self._cache, frame.rows), frame.cached)
        with self._changed:
            self._origins.update(((row.blocks[0], layer), row.origin) for row in frame.rows)
            self._changed.notify_all()

    def _fail(self, error: StageError) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()
