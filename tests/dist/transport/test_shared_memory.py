"""Large payloads in shared memory: whole, in order, bounded, and checked by the reader."""

from __future__ import annotations

import dataclasses
import fcntl
import gc
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.frames import LARGE, large_prefill

from llmpq.dist.transport.communicator import LinkClosedError
from llmpq.dist.transport.frames import (
    Frame,
    FrameKind,
    encode_header,
    encode_tables,
)
from llmpq.dist.transport.socket_links import (
    SharedMemoryReader,
    SharedMemoryWriter,
    SocketReader,
    SocketWriter,
)
from llmpq.errors import StageError
from llmpq.spec.runtime_constants import SHARED_BUFFERS as BUFFERS
from llmpq.spec.runtime_constants import SHARED_FROM_BYTES as LEAST_BYTES

HIDDEN = LARGE.hidden_size
LEAST_TOKENS = LEAST_BYTES // (4 * HIDDEN)


class Link:
    """Both ends of one stream socket."""

    def __init__(self, family: int = socket.AF_UNIX) -> None:
        self.into, self.out = socket.socketpair() if family == socket.AF_UNIX else tcp_pair()
        self.writer = SocketWriter(self.into, LARGE, is_shared=True)
        self.reader = SocketReader(self.out, LARGE, timeout_s=1.0, is_shared=True)

    def take(self) -> Frame:
        while (frame := self.reader.read(is_waiting=True)) is None:
            self.writer.flush()
        return frame


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        into = socket.create_connection(listener.getsockname())
        return into, listener.accept()[0]


@pytest.fixture(params=[socket.AF_UNIX, socket.AF_INET], ids=["unix", "tcp"])
def any_link(request) -> Iterator[Link]:
    made = Link(request.param)
    yield made
    made.reader.close()
    made.writer.close(0.0)


@pytest.fixture
def link() -> Iterator[Link]:
    made = Link()
    yield made
    made.reader.close()
    made.writer.close(0.0)


def bytes_in_stream(sock: socket.socket) -> int:
    """Return what lies in a socket, unread."""
    return len(sock.recv(1 << 24, socket.MSG_PEEK | socket.MSG_DONTWAIT))


def same(got: Frame, sent: Frame) -> bool:
    equal = (got.kind, got.micro_batch, got.rows) == (sent.kind, sent.micro_batch, sent.rows)
    return equal and torch.equal(got.hidden, sent.hidden)


@pytest.mark.parametrize("seed", range(8))
def test_frames_arrive_whole_in_any_order_of_writing_and_reading(any_link, seed):
    rng = random.Random(seed)
    waiting: list[Frame] = []
    for number in range(40):
        tokens = rng.choice([1, LEAST_TOKENS - 1, LEAST_TOKENS, 512])
        waiting.append(large_prefill(number, tokens, rows=1))
        any_link.writer.write(waiting[-1])
        while waiting and rng.random() < 0.5:
            assert same(any_link.take(), waiting.pop(0))
    for sent in waiting:
        assert same(any_link.take(), sent)


def test_a_large_payload_leaves_only_its_header_in_the_stream(link):
    link.writer.write(large_prefill(0))
    assert bytes_in_stream(link.out) == LARGE.header_bytes
    link.take()
    link.writer.write(large_prefill(1, LEAST_TOKENS - 1, rows=1))
    assert bytes_in_stream(link.out) > LARGE.header_bytes + LEAST_BYTES // 2


def test_without_a_free_buffer_a_payload_follows_in_the_stream(link):
    sent = [large_prefill(number) for number in range(BUFFERS + 1)]
    for one in sent:
        link.writer.write(one)
    taken = [link.take() for _ in range(BUFFERS)]
    held = taken[-1].hidden.clone()
    assert same(link.take(), sent[-1])
    assert torch.equal(held, sent[BUFFERS - 1].hidden)


def test_a_payload_stays_until_the_next_read(link):
    link.writer.write(large_prefill(0))
    first = link.take()
    for number in (1, 2):
        link.writer.write(large_prefill(number))
    assert same(first, large_prefill(0))


def test_frames_sent_before_the_end_are_read_after_it(link):
    link.writer.write(large_prefill(0))
    link.into.shutdown(socket.SHUT_WR)
    assert same(link.take(), large_prefill(0))
    with pytest.raises(LinkClosedError):
        link.reader.read(is_waiting=True)


def test_no_descriptor_stays_open():
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        one = Link()
        for number in range(3):
            one.writer.write(large_prefill(number))
        one.take()
        one.reader.close()
        one.writer.close(0.0)
        unread = Link()
        unread.into.setblocking(True)
        unread.writer.write(large_prefill(0))
        unread.writer.close(0.0)
        unread.reader.close()
    del one, unread
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_reader_without_shared_memory_refuses_it():
    into, out = socket.socketpair()
    writer, reader = (
        SocketWriter(into, LARGE, is_shared=True),
        SocketReader(out, LARGE, timeout_s=1.0),
    )
    writer.write(large_prefill(0))
    with pytest.raises(StageError, match="buffer"):
        reader.read(is_waiting=True)
    reader.close()
    writer.close(0.0)


@pytest.mark.parametrize("buffer", [2, 3, 255])
def test_a_buffer_that_is_not_the_next_is_refused(link, buffer):
    link.writer.write(large_prefill(0))
    link.take()
    link.writer.write(large_prefill(1))
    link.take()  # both buffers were used once: the first comes next
    link.into.sendall(
        encode_header(large_prefill(2), LARGE, 2, buffer) + encode_tables(large_prefill(2))
    )
    with pytest.raises(StageError, match="buffer"):
        link.take()


def test_a_buffer_before_memory_was_offered_is_refused(link):
    link.into.sendall(encode_header(large_prefill(0), LARGE, 0, 1))
    with pytest.raises(StageError, match="buffer"):
        link.take()


def test_a_text_in_shared_memory_is_refused(link):
    link.writer.write(large_prefill(0))
    link.take()
    link.into.sendall(encode_header(Frame(kind=FrameKind.STATS, text=b"x"), LARGE, 1, 2))
    with pytest.raises(StageError, match="buffer"):
        link.take()


def offered(descriptor: int) -> None:
    """Offer memory with the first header of a link."""
    into, out = socket.socketpair()
    reader = SocketReader(out, LARGE, timeout_s=1.0, is_shared=True)
    header = encode_header(large_prefill(0), LARGE, 0, 1) + encode_tables(large_prefill(0))
    socket.send_fds(into, [header], [descriptor])
    try:
        reader.read(is_waiting=True)
    finally:
        reader.close()
        into.close()


def test_memory_that_could_shrink_or_has_another_size_is_refused():
    writer = SharedMemoryWriter(LARGE.max_payload_bytes)
    size = os.fstat(writer.descriptor).st_size
    offered(writer.descriptor)
    smaller = SharedMemoryWriter(LARGE.max_payload_bytes // 2)
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, size)
    with Path("/dev/null").open("rb") as null:
        for descriptor in (smaller.descriptor, unsealed, null.fileno()):
            with pytest.raises(StageError, match="shared memory refused"):
                offered(descriptor)
    os.close(unsealed)
    for one in (writer, smaller):
        one.close_descriptor()


def test_the_memory_cannot_shrink():
    writer = SharedMemoryWriter(1 << 20)
    reader = SharedMemoryReader(os.dup(writer.descriptor), 1 << 20)
    with pytest.raises(PermissionError):
        os.ftruncate(writer.descriptor, 4096)
    assert writer.write(torch.arange(256, dtype=torch.uint8)) == 1
    assert reader.view(1, 256).tolist() == list(range(256))
    assert fcntl.fcntl(writer.descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    writer.close_descriptor()


def test_pages_are_touched_as_far_as_payloads_reach():
    limits = dataclasses.replace(LARGE, prefill_tokens=1 << 16)
    writer = SharedMemoryWriter(limits.max_payload_bytes)
    writer.write(torch.ones(LEAST_BYTES, dtype=torch.uint8))
    assert os.fstat(writer.descriptor).st_size > 500 << 20
    assert os.fstat(writer.descriptor).st_blocks * 512 < 2 * LEAST_BYTES
    writer.close_descriptor()
