"""The ring between threads: order, checks, and peers that end or hang."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from helpers.frames import SMALL, small_decode
from helpers.in_process_ring import InProcessCommunicator, in_process_ring

from llmpq.dist.transport.errors import PeerLostError
from llmpq.dist.transport.frames import Frame, FrameKind
from llmpq.errors import StageError


def _ring(timeout_s: float = 0.05) -> list[InProcessCommunicator]:
    return in_process_ring(2, SMALL, timeout_s)


def test_frames_arrive_in_order():
    first, second = _ring()
    assert not second.has_frame()
    for number in range(3):
        first.send(small_decode(number))
    assert second.has_frame()
    got = [second.recv() for _ in range(3)]
    assert [frame.micro_batch for frame in got] == [0, 1, 2]
    assert all(torch.equal(f.hidden, small_decode(n).hidden) for n, f in enumerate(got))


def test_a_wait_ends_with_a_frame_or_with_its_time():
    first, second = _ring()
    assert not second.await_frame(0.01)
    first.send(small_decode(1))
    assert second.await_frame(60.0)
    assert second.await_frame(60.0)
    assert second.has_frame()
    assert second.recv().micro_batch == 1
    assert not second.has_frame()


def test_the_ring_closes():
    first, second = _ring()
    second.send(Frame(kind=FrameKind.READY))
    assert first.recv().kind is FrameKind.READY


def test_a_silent_peer_is_named():
    _, second = _ring()
    with pytest.raises(PeerLostError, match=r"stage 0 \(rank 0\).*sign of life") as caught:
        second.recv()
    assert (caught.value.rank, caught.value.exit_status) == (0, 4)


def test_a_closed_peer_is_named():
    first, second = _ring()
    second.close()
    with pytest.raises(PeerLostError, match=r"stage 1 \(rank 1\).*closed"):
        first.recv()


def test_a_frame_of_another_plan_is_refused():
    first, _ = _ring()
    _, second = in_process_ring(2, dataclasses.replace(SMALL, digest=b"another."))
    first._writer = second._reader
    first.send(small_decode(0))
    with pytest.raises(StageError, match="plan digest"):
        second.recv()
