"""TorchCommunicator: the ring over torch.distributed's gloo, between processes and hosts.

What gloo was measured to do, and not to do, shapes this module:

- An operation that times out closes the pair for good, so a timeout is the end, never a poll. A
  thread is always receiving; its timeout bounds how long a peer may be silent.
- A rank with nothing to say sends a heartbeat, so that silence means a hung peer and not a long
  step, and exactly the rank after the silent one blames it.
- A killed peer closes its pair within milliseconds, which the receiving thread sees at once.
- ``is_completed`` of a send says nothing before ``wait``: finished sends are reaped in order.

The store is only for meeting: it is unauthenticated, so for ranks of one host it is a file in a
private folder, and between hosts it listens on the one address it was given.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
from collections import deque
from collections.abc import Sequence
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
from llmpq.dist.transport.failures import peer_closed, peer_silent
from llmpq.dist.transport.frames import (
    Frame,
    FrameKind,
    FrameLimits,
    assemble,
    decode_header,
    encode_header,
)
from llmpq.errors import SpecError, StageError

FAREWELL_S = 1.0
"""How long a closing rank waits for a peer to take what was sent to it."""
MAX_UNREAPED_SENDS = 4
"""A frame is two sends, so as many hidden states as ``costmodel.cpu_memory`` counts are held."""
_LAST_KINDS = (FrameKind.SHUTDOWN, FrameKind.ERROR)


class TorchCommunicator:
    """One process's place in the ring.

    Args:
        rank: of this process.
        world_size: number of ranks, at least 2.
        name: what messages call this rank.
        limits: of this run's frames.
        rendezvous: where the others are.
        timeout_s: how long a peer may be silent.

    Raises:
        StageError: not all ranks came.
        SpecError: the ranks were started for different plans or models.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        name: str,
        limits: FrameLimits,
        rendezvous: Rendezvous,
        timeout_s: float,
    ) -> None:
        self.rank = rank
        self._limits = limits
        self._timeout_s = timeout_s
        self._timeout = timedelta(seconds=timeout_s)
        store = _open_store(rendezvous, rank, world_size)
        self.ranks: Sequence[int] = range(world_size)
        self.names: Sequence[str] = _exchange(store, rank, world_size, name, limits)
        try:
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world_size, timeout=self._timeout
            )
        except RuntimeError as error:
            raise StageError(f"{name}: could not connect to its peers: {error}") from None
        self._next = (rank + 1) % world_size
        self._previous = (rank - 1) % world_size
        self._arrived: queue.SimpleQueue[Frame | StageError] = queue.SimpleQueue()
        self._held: Frame | StageError | None = None  # taken out by who only waited for it
        self._sends: deque[tuple[dist.Work, Tensor]] = deque()
        self._sent = 0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=target, daemon=True, name=target.__name__)
            for target in (self._receive, self._beat)
        ]
        for thread in self._threads:
            thread.start()

    def send(self, frame: Frame) -> None:
        """Start sending to the next rank."""
        payload = frame.payload
        with self._lock:
            header = encode_header(frame, self._limits, self._sent)
            self._sent += 1
            self._start(torch.frombuffer(bytearray(header), dtype=torch.uint8))
            if payload is not None:
                self._start(payload)
            if frame.kind in _LAST_KINDS:
                self._closed.set()
            self._reap(MAX_UNREAPED_SENDS)

    def has_frame(self) -> bool:
        """Tell whether something arrived."""
        return self._held is not None or not self._arrived.empty()

    def await_frame(self, longest_s: float) -> bool:
        """Wait for so long until ``recv`` would return or raise at once."""
        if self._held is None:
            with contextlib.suppress(queue.Empty):
                self._held = self._arrived.get(timeout=longest_s)
        return self._held is not None

    def recv(self) -> Frame:
        """Return the next frame; the receiving thread's own timeout bounds the wait."""
        item = self._arrived.get() if self._held is None else self._held
        self._held = None
        if isinstance(item, StageError):
            self._arrived.put(item)  # whoever asks again hears the same
            raise item
        return item

    def close(self) -> None:
        """Finish what is being sent and let go."""
        self._closed.set()
        with self._lock, contextlib.suppress(RuntimeError):
            while self._sends:
                self._sends.popleft()[0].wait(timedelta(seconds=FAREWELL_S))
        # The receiving thread ends by itself after a last frame or an error; a thread still inside
        # gloo (its peer lives on) ends with the process.
        for thread in self._threads:
            thread.join(timeout=0.2)
        if not any(thread.is_alive() for thread in self._threads):
            dist.destroy_process_group()

    def _start(self, tensor: Tensor) -> None:
        try:
            work = dist.isend(tensor, self._next)
        except RuntimeError as error:
            raise self._lost(error, self._next) from None
        assert work is not None
        self._sends.append((work, tensor))

    def _reap(self, most: int) -> None:
        """Wait for the oldest sends until at most ``most`` are left; usually they are done."""
        while len(self._sends) > most:
            work, _ = self._sends.popleft()
            self._wait(work, self._next)

    def _wait(self, work: dist.Work, peer: int) -> None:
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            raise self._lost(error, peer) from None

    def _lost(self, error: RuntimeError, peer: int) -> StageError:
        name = self.names[peer]
        if "timed out" in str(error).lower():
            return peer_silent(name, peer, self._timeout_s)
        return peer_closed(name, peer)

    def _receive(self) -> None:
        """Receive frames one after the other, until the last one or a failure."""
        received = 0
        try:
            while True:
                header = decode_header(
                    self._get(self._limits.header_bytes).numpy().tobytes(), self._limits, received
                )
                received += 1
                size = header.payload_bytes
                frame = assemble(header, self._get(size) if size else None, self._limits)
                if frame.kind is not FrameKind.HEARTBEAT:
                    self._arrived.put(frame)
                if frame.kind in _LAST_KINDS:
                    return
        except StageError as error:
            self._arrived.put(error)
        except Exception as error:  # nothing may end this thread without the main one knowing
            self._arrived.put(StageError(f"receiving failed: {type(error).__name__}: {error}"))

    def _get(self, size: int) -> Tensor:
        buffer = torch.empty(size, dtype=torch.uint8)
        work = dist.irecv(buffer, self._previous)
        assert work is not None
        self._wait(work, self._previous)
        return buffer

    def _beat(self) -> None:
        """Send a heartbeat several times within every timeout, until the last frame."""
        while not self._closed.wait(self._timeout_s / BEATS_PER_TIMEOUT):
            try:
                with self._lock:
                    if self._closed.is_set():
                        return
                    header = encode_header(
                        Frame(kind=FrameKind.HEARTBEAT), self._limits, self._sent
                    )
                    self._sent += 1
                    self._start(torch.frombuffer(bytearray(header), dtype=torch.uint8))
                    self._reap(MAX_UNREAPED_SENDS)
            except StageError as error:
                self._arrived.put(error)
                return


def _open_store(rendezvous: Rendezvous, rank: int, world_size: int) -> Store:
    timeout = timedelta(seconds=START_TIMEOUT_S)
    try:
        if rendezvous.file is not None:
            store: Store = FileStore(str(rendezvous.file), world_size)
        elif rendezvous.address is not None:
            store = _tcp_store(rendezvous.address, rank, world_size, timeout)
        else:
            store, _, _ = next(torch_rendezvous("env://", rank, world_size, timeout=timeout))
    except (RuntimeError, ValueError, OSError) as error:
        raise StageError(f"rank {rank}: could not meet the other ranks: {error}") from None
    store.set_timeout(timeout)
    return PrefixStore("llmpq", store)


def _tcp_store(
    address: tuple[str, int], rank: int, world_size: int, timeout: timedelta
) -> TCPStore:
    host, port = address
    if rank != 0:
        return TCPStore(host, port, world_size, False, timeout, wait_for_workers=False)
    # Left alone, the store would listen on every address of the host; it takes over this socket.
    listener = socket.create_server((host, port), backlog=world_size)
    return TCPStore(
        host,
        port,
        world_size,
        True,
        timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _exchange(
    store: Store, rank: int, world_size: int, name: str, limits: FrameLimits
) -> list[str]:
    """Tell every rank this one's name and plan; return all names."""
    digest = limits.digest.hex()
    store.set(f"rank/{rank}", json.dumps([name, digest]))
    names = []
    for other in range(world_size):
        try:
            text = store.get(f"rank/{other}")
        except RuntimeError:
            raise StageError(
                f"rank {other} did not start within {START_TIMEOUT_S:g} s (seen from {name})"
            ) from None
        found_name, found_digest = json.loads(text)
        if found_digest != digest:
            raise SpecError(
                f"{name}: found that {found_name} runs another plan or model, "
                "expected the same strategy file and configuration on every host"
            )
        names.append(str(found_name))
    return names
