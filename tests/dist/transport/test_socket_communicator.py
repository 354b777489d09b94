"""The ring over sockets: order, sizes, silent and ended peers, and frames that are refused."""

from __future__ import annotations

import dataclasses
import os
import random
import socket
import struct
import zlib
from collections.abc import Iterator

import pytest
from helpers.clocks import PATIENCE_S
from helpers.frames import LARGE, decode, large_prefill

from llmpq.dist.transport.channels import RingCommunicator
from llmpq.dist.transport.communicator import LinkClosedError
from llmpq.dist.transport.errors import PeerLostError
from llmpq.dist.transport.frames import (
    Frame,
    FrameKind,
    FrameLimits,
    encode_header,
    encode_tables,
)
from llmpq.dist.transport.socket_links import SocketReader, SocketWriter
from llmpq.errors import StageError

NAMES = ["stage 0 (rank 0)", "stage 1 (rank 1)"]


class Ends:
    """Two ranks' sockets, and the communicators made of them."""

    def __init__(self) -> None:
        self.forth = socket.socketpair()
        self.back = socket.socketpair()
        self.made: list[RingCommunicator] = []

    def rank(self, rank: int, timeout_s: float = PATIENCE_S) -> RingCommunicator:
        pairs = (self.forth, self.back) if rank == 0 else (self.back, self.forth)
        one = RingCommunicator(
            rank=rank,
            names=NAMES,
            writer=SocketWriter(pairs[0][0], LARGE, is_shared=True),
            reader=SocketReader(pairs[1][1], LARGE, timeout_s, is_shared=True),
            timeout_s=timeout_s,
        )
        self.made.append(one)
        return one

    def close(self) -> None:
        for one in self.made:
            one.close()
        for sock in (*self.forth, *self.back):
            sock.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def wire(frame: Frame, sequence: int, limits: FrameLimits = LARGE) -> bytes:
    payload = frame.payload
    data = b"" if payload is None else payload.numpy().tobytes()
    return encode_header(frame, limits, sequence) + encode_tables(frame) + data


@pytest.mark.parametrize("cut", [0, 1, 30, 200])
def test_a_peer_that_ends_within_a_frame_is_named(ends, cut):
    second = ends.rank(1)
    ends.forth[0].sendall(wire(decode(0), 0)[:cut])
    ends.forth[0].close()
    with pytest.raises(PeerLostError, match=r"rank 0.*closed"):
        second.recv()


def test_sending_to_an_ended_peer_is_an_error_that_names_it(ends):
    first = ends.rank(0)
    ends.forth[1].close()
    with pytest.raises(PeerLostError, match=r"rank 1.*closed") as caught:
        first.send(decode(0))
    assert caught.value.rank == 1


def forged(frame: Frame, offset: int, layout: str, value: object) -> bytes:
    """A frame with one field of its header changed and the checksum made right."""
    raw = bytearray(wire(frame, 0))
    end = LARGE.header_bytes - 4
    struct.pack_into(layout, raw, offset, value)
    struct.pack_into("<I", raw, end, zlib.crc32(raw[:end]))
    return bytes(raw)


@pytest.mark.parametrize(
    ("data", "names"),
    [
        (forged(decode(0), 48, "<Q", 2**40), "payload bytes"),
        (forged(decode(0), 48, "<Q", 2 * 256 * 4 + 4), "payload bytes"),
        (forged(decode(0), 48, "<Q", 2 * 256 * 4 - 4), "payload bytes"),
        (forged(decode(0), 6, "<B", 2), "dtype"),
        (forged(large_prefill(0), 36, "<I", 2049), "shape"),
        (wire(decode(0), 1), "sequence number"),
        (wire(decode(0), 0)[:-4] + wire(decode(1), 1), "checksum|magic"),
        (wire(decode(0), 0) + b"\0" * 4 + wire(decode(1), 1), "checksum"),
        (wire(decode(0), 0) + wire(decode(0), 0), "sequence number"),
        (wire(decode(0), 0) + wire(decode(2), 2), "sequence number"),
        (wire(decode(0), 0, dataclasses.replace(LARGE, digest=b"other...")), "plan digest"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 20, "checksum"),
        (os.urandom(4096), "checksum"),
        (b"\xff" * 4096, "checksum"),
    ],
)
def test_a_frame_that_is_not_the_next_one_of_this_run_is_refused(ends, data, names):
    second = ends.rank(1)
    ends.forth[0].sendall(data[:50_000])  # what the kernel takes without a reader
    with pytest.raises(StageError, match=names):
        _receive(second, 2)


@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=pytest.mark.slow)])
def test_damaged_streams_raise_typed_errors_or_give_the_frames_sent(count):
    """Three frames with bits flipped, bytes lost, doubled or swapped, over a live socket."""
    rng = random.Random(count)
    sent = [
        decode(0),
        Frame(kind=FrameKind.STATS, text=b"[1, 2]"),
        large_prefill(2, rows=1, tokens=2),
    ]
    parts = [wire(frame, number) for number, frame in enumerate(sent)]
    for _ in range(count):
        data = _damaged(rng, parts)
        into, out = socket.socketpair()
        reader = SocketReader(out, LARGE, timeout_s=PATIENCE_S)
        into.sendall(data)
        into.close()
        try:
            for expected in sent:
                got = reader.read(is_waiting=True)
                assert got is not None
                assert (got.kind, got.micro_batch, got.rows) == (
                    expected.kind,
                    expected.micro_batch,
                    expected.rows,
                )
        except (StageError, LinkClosedError):
            pass
        finally:
            reader.close()


def _damaged(rng: random.Random, parts: list[bytes]) -> bytes:
    header = LARGE.header_bytes
    kind = rng.randrange(5)
    if kind == 0:  # bits of a header
        raw = [bytearray(part) for part in parts]
        chosen = rng.choice(raw)
        chosen[rng.randrange(header)] ^= 1 << rng.randrange(8)
        return b"".join(raw)
    if kind == 1:  # an order that is not the order
        return b"".join(rng.sample(parts, len(parts)))
    if kind == 2:  # one of them twice
        at = rng.randrange(len(parts))
        return b"".join(parts[: at + 1] + parts[at:])
    whole = b"".join(parts)
    at = rng.randrange(len(whole))
    if kind == 3:  # the end is missing
        return whole[:at]
    return whole[:at] + rng.randbytes(rng.randint(1, 64)) + whole[at:]


def test_an_announced_size_allocates_no_memory(ends):
    second = ends.rank(1)
    data = forged(decode(0), 48, "<Q", 2**40)
    before = _resident_bytes()
    ends.forth[0].sendall(data)
    with pytest.raises(StageError, match="payload bytes"):
        second.recv()
    assert _resident_bytes() - before < 1 << 20


def _receive(communicator: RingCommunicator, count: int) -> None:
    for _ in range(count):
        communicator.recv()


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123  one line
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
