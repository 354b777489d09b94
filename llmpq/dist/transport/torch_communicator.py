"""TorchCommunicator: the ring over a process group of torch.distributed.

The ranks find each other by ``transport.rendezvous``, which proves the token and compares plans;
gloo's own connections are not authenticated. An operation of gloo that times out closes the pair
for good: a thread always receives, with the longest silence of a peer as its timeout, and a rank
without frames to send sends heartbeats.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]  # torch lists no exports
    FileStore,
    PrefixStore,
    Store,
    TCPStore,
)
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

from llmpq.dist.io.job import BEATS_PER_TIMEOUT, START_TIMEOUT_S, Rendezvous
from llmpq.dist.transport.errors import peer_closed, peer_silent
from llmpq.dist.transport.frames import (
    LAST_KINDS,
    Frame,
    FrameKind,
    FrameLimits,
    assemble,
    decode_header,
    encode_header,
    encode_tables,
)
from llmpq.errors import StageError

BACKEND = "gloo"
"""Moves host memory: the payload of a stage on a GPU is copied to the host first."""


class TorchCommunicator:
    """One rank's part of the ring; ``store`` is that of :func:`open_store`."""

    def __init__(
        self,
        *,
        rank: int,
        names: Sequence[str],
        limits: FrameLimits,
        store: Store,
        timeout_s: float,
    ) -> None:
        self.rank = rank
        self.names = names
        self.ranks: Sequence[int] = range(len(names))
        self._limits = limits
        self._timeout_s = timeout_s
        timeout = timedelta(seconds=timeout_s)
        try:
            dist.init_process_group(
                BACKEND, store=store, rank=rank, world_size=len(names), timeout=timeout
            )
        except RuntimeError as error:
            raise StageError(f"{names[rank]}: could not connect to its peers: {error}") from None
        self._next = (rank + 1) % len(names)
        self._previous = (rank - 1) % len(names)
        self._arrived: queue.SimpleQueue[Frame | StageError] = queue.SimpleQueue()
        self._peeked: Frame | StageError | None = None
        self._num_sent = 0
        self._lock = threading.Lock()  # held while a frame is sent
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=target, daemon=True) for target in (self._receive, self._beat)
        ]
        for thread in self._threads:
            thread.start()

    def send(self, frame: Frame) -> None:
        """Send to the next rank."""
        payload = frame.payload
        with self._lock:
            if self._closed.is_set() and frame.kind is FrameKind.HEARTBEAT:
                return
            header = encode_header(frame, self._limits, self._num_sent)
            self._num_sent += 1
            data = torch.frombuffer(bytearray(header), dtype=torch.uint8)
            self._transfer(dist.send, data, self._next)
            if tables := encode_tables(frame):
                data = torch.frombuffer(bytearray(tables), dtype=torch.uint8)
                self._transfer(dist.send, data, self._next)
            if payload is not None:
                self._transfer(dist.send, payload, self._next)
            if frame.kind in LAST_KINDS:
                self._closed.set()

    def has_frame(self) -> bool:
        """Return whether ``recv`` would return or raise at once."""
        return self.await_frame(0.0)

    def await_frame(self, longest_s: float) -> bool:
        """Wait until ``recv`` would return or raise at once; return whether it would."""
        if self._peeked is None:
            with contextlib.suppress(queue.Empty):
                self._peeked = self._arrived.get(timeout=longest_s)
        return self._peeked is not None

    def recv(self) -> Frame:
        """Return the next frame; the receiving thread's timeout bounds the wait."""
        item = self._peeked or self._arrived.get()
        if isinstance(item, StageError):
            self._peeked = item  # raised again by the next call
            raise item
        self._peeked = None
        return item

    def close(self) -> None:
        """Leave the process group."""
        self._closed.set()
        for thread in self._threads:
            thread.join(timeout=0.2)
        # A thread still inside gloo, whose peer lives on, ends with the process.
        if not any(thread.is_alive() for thread in self._threads):
            dist.destroy_process_group()

    def _transfer(
        self, operation: Callable[[Tensor, int], object], tensor: Tensor, peer: int
    ) -> Tensor:
        try:
            operation(tensor, peer)
        except RuntimeError as error:
            if "timed out" in str(error).lower() or "timeout" in str(error).lower():
                raise peer_silent(self.names[peer], peer, self._timeout_s) from None
            raise peer_closed(self.names[peer], peer) from None
        return tensor

    def _receive(self) -> None:
        """Receive frames until the last one or an error."""
        try:
            for number in itertools.count():
                data = self._receive_bytes(self._limits.header_bytes).numpy().tobytes()
                header = decode_header(data, self._limits, number)
                size, tables = header.payload_bytes, b""
                if header.tables_bytes:
                    tables = self._receive_bytes(header.tables_bytes).numpy().tobytes()
                payload = self._receive_bytes(size) if size else None
                frame = assemble(header, tables, payload, self._limits)
                if frame.kind is not FrameKind.HEARTBEAT:
                    self._arrived.put(frame)
                if frame.kind in LAST_KINDS:
                    return
        except StageError as error:
            self._arrived.put(error)
        except Exception as error:  # the main thread must see every end of this one
            self._arrived.put(StageError(f"receiving failed: {type(error).__name__}: {error}"))

    def _receive_bytes(self, count: int) -> Tensor:
        return self._transfer(dist.recv, torch.empty(count, dtype=torch.uint8), self._previous)

    def _beat(self) -> None:
        """Send a heartbeat several times within every timeout, until the last frame."""
        with contextlib.suppress(StageError):  # the receiving thread reports a lost ring
            while not self._closed.wait(self._timeout_s / BEATS_PER_TIMEOUT):
                self.send(Frame(kind=FrameKind.HEARTBEAT))


def open_store(rendezvous: Rendezvous, rank: int, world_size: int) -> PrefixStore:
    """Return torch.distributed's store: a private file, rank 0's address, or torchrun's."""
    timeout = timedelta(seconds=START_TIMEOUT_S)
    try:
        if rendezvous.file is not None:
            store: Store = FileStore(str(rendezvous.file.with_name("torch-store")), world_size)
        elif rendezvous.address is not None:
            host, port = rendezvous.address
            # Without a socket of its own the store would listen on every address of the host.
            listener = socket.create_server((host, port)).detach() if rank == 0 else None
            store = TCPStore(
                host,
                port,
                world_size,
                is_master=rank == 0,
                timeout=timeout,
                wait_for_workers=False,
                master_listen_fd=listener,
            )
        else:
            store, _, _ = next(torch_rendezvous("env://", rank, world_size, timeout=timeout))
    except (RuntimeError, ValueError, OSError) as error:
        raise StageError(f"rank {rank}: could not reach the store: {error}") from None
    store.set_timeout(timeout)
    return PrefixStore("llmpq", store)
