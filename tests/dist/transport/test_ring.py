"""A ring over each transport: order, silent and ended peers, and an end that leaves nothing."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from helpers.clocks import PATIENCE_S
from helpers.frames import LARGE, decode, large_prefill
from helpers.links import TRANSPORTS, open_links

from llmpq.dist.transport import channels, socket_links, torch_links
from llmpq.dist.transport.channels import make_rank_channels
from llmpq.dist.transport.communicator import Communicator
from llmpq.dist.transport.errors import PeerLostError
from llmpq.dist.transport.frames import Frame, FrameKind
from llmpq.dist.transport.topology import one_ring

NAMES = ["stage 0 (rank 0)", "stage 1 (rank 1)"]


class Ends:
    """The links of two ranks, and the communicators made of them."""

    def __init__(self, transport: str) -> None:
        self.links = open_links(one_ring(2), 2, transport)
        self.made: dict[int, Communicator] = {}

    def rank(self, rank: int, timeout_s: float = PATIENCE_S) -> Communicator:
        links = self.links[rank]
        made = make_rank_channels(rank, NAMES, LARGE, one_ring(2), links, timeout_s).communicator
        assert made is not None
        self.made[rank] = made
        return made

    def close(self) -> None:
        """Close both ends of every link, also those of a rank that was not made."""
        for rank in range(2):
            (self.made.get(rank) or self.rank(rank)).close()


@pytest.fixture(params=TRANSPORTS)
def ends(request) -> Iterator[Ends]:
    made = Ends(request.param)
    yield made
    made.close()


def test_large_and_small_frames_arrive_whole_and_in_order(ends):
    first, second = ends.rank(0), ends.rank(1)
    sent = [
        large_prefill(0),
        decode(1),
        large_prefill(2),
        large_prefill(3, rows=1, tokens=3),
        decode(4),
    ]
    for frame in sent:
        first.send(frame)
    for frame in sent:
        got = second.recv()
        assert (got.kind, got.micro_batch, got.rows) == (frame.kind, frame.micro_batch, frame.rows)
        assert torch.equal(got.hidden, frame.hidden)


def test_has_frame_leaves_the_frame_to_recv(ends):
    first, second = ends.rank(0), ends.rank(1)
    assert not first.has_frame()
    second.send(Frame(kind=FrameKind.STATS, text=b"{}"))
    assert first.await_frame(PATIENCE_S)
    assert first.has_frame()
    assert first.has_frame()
    assert first.recv().text == b"{}"
    assert not first.has_frame()


def test_await_frame_ends_with_a_frame_or_at_its_limit(ends):
    first, second = ends.rank(0), ends.rank(1)
    assert not second.await_frame(0.01)
    timer = threading.Timer(0.1, first.send, [decode(1)])
    timer.start()
    assert second.await_frame(60.0)
    timer.join()
    assert second.recv().micro_batch == 1
    assert not second.await_frame(0.0)


def test_heartbeats_keep_a_computing_rank_alive(ends):
    first, second = ends.rank(0, timeout_s=2.0), ends.rank(1, timeout_s=2.0)
    timer = threading.Timer(4.0, first.send, [decode(1)])
    timer.start()
    assert second.recv().micro_batch == 1
    timer.join()


def test_a_silent_peer_is_named_in_time(ends):
    second = ends.rank(1, timeout_s=0.2)  # nothing runs on rank 0
    start = time.monotonic()
    for _ in range(2):  # the next call raises it again
        with pytest.raises(PeerLostError, match=r"rank 0.*no sign of life for 0.2 s") as caught:
            second.recv()
    assert caught.value.rank == 0
    assert time.monotonic() - start >= 0.2


class FastClock:
    """The monotonic clock, ``ahead_s`` in advance."""

    ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


def test_a_peer_that_is_silent_while_the_master_is_idle_is_lost(ends, monkeypatch):
    second, clock = ends.rank(1), FastClock()  # nothing runs on rank 0
    monkeypatch.setattr(channels, "time", clock)
    for _ in range(2):  # silence does not count where it was not looked for
        assert not second.has_frame()
        clock.ahead_s += 2 * PATIENCE_S
    assert not second.has_frame()
    for _ in range(5):
        clock.ahead_s += PATIENCE_S / 6
        assert not second.has_frame()
    clock.ahead_s += PATIENCE_S / 6
    assert second.has_frame()
    with pytest.raises(PeerLostError, match=r"rank 0.*no sign of life"):
        second.recv()


def test_what_arrives_ends_the_silence_of_an_idle_wait(ends, monkeypatch):
    first, second, clock = ends.rank(0), ends.rank(1), FastClock()
    for module in (channels, socket_links, torch_links):
        monkeypatch.setattr(module, "time", clock)
    for number in range(8):
        assert not second.has_frame()
        clock.ahead_s += PATIENCE_S / 6
        first.send(decode(number))
        assert second.recv().micro_batch == number


def test_what_was_sent_before_the_end_still_arrives(ends):
    first, second = ends.rank(0), ends.rank(1)
    first.send(large_prefill(7))
    closing = threading.Thread(target=first.close)
    closing.start()
    assert torch.equal(second.recv().hidden, large_prefill(7).hidden)
    closing.join()
    with pytest.raises(PeerLostError):
        second.recv()


def test_an_ended_peer_is_named_by_who_receives_and_who_sends(ends):
    first, second = ends.rank(0), ends.rank(1)
    second.close()
    with pytest.raises(PeerLostError, match=r"rank 1.*closed") as caught:
        first.recv()
    assert caught.value.rank == 1
    with pytest.raises(PeerLostError, match=r"rank 1.*closed") as caught:
        _send_for(first, PATIENCE_S)  # an operation that has begun fails later
    assert caught.value.rank == 1


def _send_for(communicator: Communicator, longest_s: float) -> None:
    end_s = time.monotonic() + longest_s
    while time.monotonic() < end_s:
        communicator.send(decode(0))


def test_closing_does_not_wait_for_a_peer_that_reads_nothing(ends):
    first = ends.rank(0)
    first.send(large_prefill(0))
    first.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_close_leaves_no_descriptor_and_no_thread(transport):
    Ends(transport).close()  # what a library opens once
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208  names are all that counts
    threads = set(threading.enumerate())  # a test that kills a rank leaves its threads
    Ends(transport).close()
    assert set(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208
    assert set(threading.enumerate()) <= threads
