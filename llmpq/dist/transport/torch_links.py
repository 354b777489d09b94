"""Links over torch.distributed: every link has a process group of its two ranks.

Headers, block tables and texts always travel over gloo, which notices at once when a peer ends.
Hidden states and keys and values travel over NCCL where the two ends have different GPUs, else over
gloo too; ``payload_backend`` alone decides. NCCL receives nothing that a header has not announced,
so an idle link occupies no GPU.

An operation of gloo that times out closes its group for good. So operations have no time limit
here: a thread waits for their ends, and a wait for that thread has one. The connections are not
authenticated; ``transport.rendezvous`` has compared tokens and plans before.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]  # torch lists no exports
    FileStore,
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
    Work,
)
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

from llmpq.dist.io.job import START_TIMEOUT_S, Rendezvous
from llmpq.dist.transport.communicator import LinkClosedError
from llmpq.dist.transport.endpoint import is_loopback
from llmpq.dist.transport.frames import (
    TENSOR_KINDS,
    Frame,
    FrameKind,
    FrameLimits,
    assemble,
    decode_header,
    encode_header,
    encode_tables,
)
from llmpq.dist.transport.topology import Link, Topology
from llmpq.errors import StageError

LINK_TIMEOUT: Final = timedelta(seconds=30)
"""Time limit for one link to connect, once all ranks are known."""
CLOSE_TIMEOUT_S: Final = 1.0
"""How long a closing end waits for its thread, which a GPU may hold."""
PIECE_BYTES: Final = 4 << 20
"""A payload is sent in pieces, each of which is a sign of life."""
MAX_READ_AHEAD: Final = 4
"""Frames that are received before they are read; the next ones stay with their sender."""
CPU: Final = torch.device("cpu")
_FOREVER: Final = timedelta(days=3650)
_TAG: Final = 0
_CLOSE_TAG: Final = 1
"""Of an operation that no peer answers."""
_MS: Final = 1000.0
_PAYLOAD_KINDS: Final = (*TENSOR_KINDS, FrameKind.KV)


def payload_backend(source_gpu: str | None, target_gpu: str | None) -> Literal["gloo", "nccl"]:
    """Return what carries tensors between two ranks, given the identifiers of their GPUs.

    A rank without a GPU, or whose torch has no NCCL, has none. NCCL cannot connect two ranks of one
    GPU.
    """
    if source_gpu is None or target_gpu is None or source_gpu == target_gpu:
        return "gloo"
    return "nccl"


def gpu_of(device: torch.device) -> str | None:
    """Return the identifier of a GPU that NCCL can use, ``None`` for any other device."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return None
    return str(torch.cuda.get_device_properties(device).uuid)


class Group(Protocol):
    """What a link uses of a backend of torch.distributed; its errors are ``RuntimeError``."""

    def send(self, tensors: list[Tensor], target: int, tag: int, /) -> Work:
        """Start sending one tensor, uint8 ``[B]``."""
        ...

    def recv(self, tensors: list[Tensor], source: int, tag: int, /) -> Work:
        """Start receiving into one tensor, uint8 ``[B]``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TorchLink:
    """One rank's end of a link: its process groups, in which the other rank is ``peer``.

    Attributes:
        frames: gloo, for all that is in host memory.
        payloads: for tensors on ``device``; the same as ``frames`` for the CPU.
    """

    frames: Group
    payloads: Group
    device: torch.device
    peer: int

    def close(self) -> None:
        """End every operation of both ranks on ``frames`` with an error."""
        with contextlib.suppress(RuntimeError):  # that it times out closes the connection
            nothing = torch.empty(1, dtype=torch.uint8)
            self.frames.recv([nothing], self.peer, _CLOSE_TAG).wait(timedelta(milliseconds=1))

    def watch(self, on_closed: Callable[[], None]) -> None:
        """Call ``on_closed`` in a thread of its own when either rank has closed the link.

        gloo may forget an operation that starts while the other rank closes: it never ends then.
        The operation here starts before that.
        """
        nothing = torch.empty(1, dtype=torch.uint8)
        try:
            work = self.frames.recv([nothing], self.peer, _CLOSE_TAG)
        except RuntimeError:  # closed already
            on_closed()
            return

        def wait() -> None:
            with contextlib.suppress(RuntimeError):
                work.wait(_FOREVER)
            on_closed()

        threading.Thread(target=wait, daemon=True, name="link watcher").start()


class TorchLinks:
    """The :class:`Links` of rank ``rank``, which connect here, in the same order on all ranks.

    Args:
        rank: whose links are opened.
        topology: of the run.
        store: of :func:`open_store`, with a name of the run as prefix.
        host: address of this host that gloo listens on.
        gpus: of every rank, as :func:`gpu_of` returns them.
        device: of this rank.

    Raises:
        StageError: a peer did not connect in time.
    """

    def __init__(
        self,
        *,
        rank: int,
        topology: Topology,
        store: Store,
        host: str,
        gpus: Sequence[str | None],
        device: torch.device,
    ) -> None:
        self._links: dict[Link, TorchLink] = {}
        own = [link for link in topology.links if rank in (link.source, link.target)]
        backends = {link: payload_backend(gpus[link.source], gpus[link.target]) for link in own}
        next_links = [link for link in own if link.source == rank and link.ring is not None]
        self.transport: str = backends[next_links[0]] if next_links else "gloo"
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in stubs
        options._timeout, options._threads = LINK_TIMEOUT, 1
        # torch's own choice would be the address of the host's name, which others may reach.
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        if is_loopback(host):  # so NCCL's would be, that of the first other interface
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        for link in own:
            end = int(rank == link.target)
            group = PrefixStore(f"{link.name} {link.source} {link.target}", store)
            try:
                frames: Any = ProcessGroupGloo(PrefixStore("frames", group), end, 2, options)
            except RuntimeError as error:
                peer = link.source if end else link.target
                raise StageError(f"could not connect to rank {peer}: {error}") from None
            payloads: Any = frames
            if backends[link] == "nccl":
                payloads = _open_nccl(PrefixStore("payloads", group), end)
            self._links[link] = TorchLink(
                frames=frames,
                payloads=payloads,
                device=CPU if payloads is frames else device,
                peer=1 - end,
            )

    def writer(self, link: Link, limits: FrameLimits) -> TorchWriter:
        """Return the sending end of a link."""
        return TorchWriter(self._links.pop(link), limits)

    def reader(self, link: Link, limits: FrameLimits, timeout_s: float) -> TorchReader:  # noqa: ARG002  a thread waits
        """Return the receiving end of a link."""
        return TorchReader(self._links.pop(link), limits)


def _open_nccl(store: Store, end: int) -> Any:
    """Return NCCL's group of a link, which connects with its first payload."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _FOREVER  # an idle link is no fault
    return dist.ProcessGroupNCCL(store, end, 2, options)


class TorchWriter:
    """A :class:`FrameWriter` over a process group.

    The calling thread starts every operation; a thread waits for their ends.
    """

    def __init__(self, link: TorchLink, limits: FrameLimits) -> None:
        self._link = link
        self._limits = limits
        self._num_written = 0
        self._started: queue.SimpleQueue[tuple[Work, Tensor, torch.device] | None]
        self._started = queue.SimpleQueue()
        self._finished = threading.Condition()  # of the two below
        self._num_left = 0
        self._is_lost = False
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="link sender")
        self._thread.start()
        link.watch(self._lose)

    def write(self, frame: Frame) -> None:
        """Start sending a frame."""
        link = self._link
        header, payload = encode_header(frame, self._limits, self._num_written), frame.payload
        self._num_written += 1
        self._send(link.frames, _as_tensor(header))
        if tables := encode_tables(frame):
            self._send(link.frames, _as_tensor(tables))
        if payload is None:
            return
        if frame.kind not in _PAYLOAD_KINDS:
            self._send(link.frames, payload)
            return
        for piece in torch.split(payload.to(link.device), PIECE_BYTES):
            self._send(link.payloads, piece)

    def flush(self) -> bool:
        """Return true: what was started needs no more calls."""
        if self._is_lost:
            raise LinkClosedError("closed by the peer")
        return True

    def wait(self, timeout_s: float | None, wake: int, *, for_room: bool) -> None:  # noqa: ARG002
        """Wait until the descriptor ``wake`` is readable; there is always room."""
        poll = select.poll()
        poll.register(wake, select.POLLIN)
        poll.poll(None if timeout_s is None else timeout_s * _MS)

    def drain(self, timeout_s: float, limit_s: float = math.inf) -> bool:
        """Wait until the peer has taken everything; return whether it has."""
        deadline_s = time.monotonic() + limit_s
        with self._finished:
            while self._num_left and not self._is_lost:
                wait_s = min(timeout_s, deadline_s - time.monotonic())
                if wait_s <= 0 or not self._finished.wait(wait_s):
                    return False
            return self.flush()

    def close(self, timeout_s: float) -> None:
        """Give the peer ``timeout_s`` seconds to take the rest, and close the link."""
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(LinkClosedError):
            self.drain(timeout_s, timeout_s)
        self._link.close()
        self._started.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _send(self, group: Group, data: Tensor) -> None:
        try:
            work = group.send([data], self._link.peer, _TAG)
        except RuntimeError as error:
            raise LinkClosedError(str(error)) from None
        with self._finished:
            self._num_left += 1
        self._started.put((work, data, data.device))

    def _lose(self) -> None:
        with self._finished:
            self._is_lost = True
            self._finished.notify_all()

    def _run(self) -> None:
        """Wait for the end of every operation, and keep its tensor until then."""
        while (item := self._started.get()) is not None:
            try:
                _complete(item[0], item[2])
            except RuntimeError:
                self._is_lost = True
            del item
            with self._finished:
                self._num_left -= 1
                self._finished.notify_all()


class TorchReader:
    """A :class:`FrameReader` over a process group: a thread receives ahead."""

    def __init__(self, link: TorchLink, limits: FrameLimits) -> None:
        self.last_received_s = 0.0
        self._receiving_s: float | None = None  # since when the operation in flight is
        self._link = link
        self._limits = limits
        self._arrived: queue.Queue[Frame | Exception] = queue.Queue(MAX_READ_AHEAD)
        self._failure: Exception | None = None
        self._is_closed = False
        self._lock = threading.Lock()  # of the descriptor
        self._ready = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC | os.EFD_SEMAPHORE)
        self._thread = threading.Thread(target=self._run, daemon=True, name="link receiver")
        self._thread.start()
        link.watch(self._lose)

    def read(self, *, is_waiting: bool = False) -> Frame | None:  # noqa: ARG002  frames are whole
        """Return the next frame if it is here."""
        if self._failure is not None:
            raise self._failure
        try:
            os.eventfd_read(self._ready)
        except BlockingIOError:
            return None
        item = self._arrived.get()  # is there: the descriptor is written after it
        if isinstance(item, Exception):
            self._failure = item  # nothing follows
            raise item
        return item

    def fileno(self) -> int:
        """Return the descriptor that counts the frames."""
        return self._ready

    def close(self) -> None:
        """Close the link."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            os.close(self._ready)
        with contextlib.suppress(queue.Empty):
            self._arrived.get_nowait()  # the thread may wait for room
        self._link.close()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        """Receive frames until the link or this end of it is closed."""
        try:
            for number in itertools.count():
                frame = self._receive_frame(number)
                if frame.kind is not FrameKind.HEARTBEAT and not self._put(frame):
                    return
        except (LinkClosedError, StageError) as error:
            self._put(error)
        except Exception as error:  # who reads must see every end of this thread
            self._put(StageError(f"receiving failed: {type(error).__name__}: {error}"))

    def _lose(self) -> None:
        """Report the loss where an operation of the receiver does not end."""
        while self._thread.is_alive():
            self._thread.join(CLOSE_TIMEOUT_S)
            begin_s = self._receiving_s  # none while it waits for who reads
            if begin_s is not None and time.monotonic() - begin_s >= CLOSE_TIMEOUT_S:
                self._put(LinkClosedError("closed by the peer"))
                return

    def _put(self, item: Frame | Exception) -> bool:
        """Hand a frame or an error over; return whether this end is still open."""
        if not self._is_closed:
            self._arrived.put(item)
        with self._lock:
            if not self._is_closed:
                os.eventfd_write(self._ready, 1)
        return not self._is_closed

    def _receive_frame(self, number: int) -> Frame:
        data = self._receive(self._limits.header_bytes)
        header = decode_header(data.numpy().tobytes(), self._limits, number)
        tables = b""
        if header.tables_bytes:
            tables = self._receive(header.tables_bytes).numpy().tobytes()
        payload, size = None, header.payload_bytes
        if size:
            payload = self._receive(size, is_tensor=header.frame.kind in _PAYLOAD_KINDS)
        return assemble(header, tables, payload, self._limits)

    def _receive(self, count: int, *, is_tensor: bool = False) -> Tensor:
        group, device = self._link.frames, CPU
        if is_tensor:
            group, device = self._link.payloads, self._link.device
        data = torch.empty(count, dtype=torch.uint8, device=device)
        for piece in torch.split(data, PIECE_BYTES):
            self._receiving_s = time.monotonic()
            try:
                _complete(group.recv([piece], self._link.peer, _TAG), device)
            except RuntimeError as error:
                raise LinkClosedError(str(error)) from None
            self._receiving_s = None
            self.last_received_s = time.monotonic()
        return data


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _complete(work: Work, device: torch.device) -> None:
    """Wait for the end of an operation on memory of ``device``; ``RuntimeError`` if it failed."""
    if device.type == "cpu":
        work.wait(_FOREVER)
        return
    # NCCL's wait returns at once and makes the current stream wait: one without other work.
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        work.wait()
    stream.synchronize()


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
