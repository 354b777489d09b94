"""A link is timed through the runtime's own frames, both directions apart."""

from __future__ import annotations

import threading
from queue import SimpleQueue

import pytest
from helpers.in_process_ring import in_process_ring

from llmpq.costmodel.tables.profiles import fit_links
from llmpq.errors import SpecError, StageError
from llmpq.profiler.link import UNIT_BYTES, LinkJob, _CacheEviction, measure_link
from llmpq.spec.tables import ends_of

JOB = LinkJob(between=("old", "desk"), sizes=(512, 4096, 65_536), budget_s=1e-3)


SEND_S = 0.02
"""Seconds of a slow send."""
TICK_S = 1e-6
"""Time that passes while an end reads its clock."""


class VirtualTime(threading.local):
    """The clock of each end: only what a test says takes time, however busy the machine is."""

    def __init__(self):
        self.now_s = 0.0

    def perf_counter(self):
        self.now_s += TICK_S
        return self.now_s


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    clock = VirtualTime()
    monkeypatch.setattr("llmpq.profiler.link.time", clock)
    return clock


class Slow:
    """A communicator whose sends take a time by their size; a frame arrives when it was sent."""

    def __init__(self, inner, seconds_of, clock, sent_s):
        self._inner, self._seconds_of = inner, seconds_of
        self._clock, self._sent_s = clock, sent_s
        self.rank, self.names = inner.rank, inner.names

    def send(self, frame):
        self._clock.now_s += self._seconds_of(0 if frame.hidden is None else frame.hidden.nbytes)
        self._sent_s[self.rank].put(self._clock.now_s)
        self._inner.send(frame)

    def recv(self):
        frame = self._inner.recv()
        self._clock.now_s = max(self._clock.now_s, self._sent_s[1 - self.rank].get())
        return frame


def takes(seconds, above=-1):
    """Return the time of a send: ``seconds`` for messages of more than ``above`` bytes."""
    return lambda size: seconds if size > above else 0.0


@pytest.fixture
def measured(clock):
    def measure(first=takes(0.0), second=takes(0.0), wrapper=Slow):  # noqa: B008  never changed
        ends, sent_s = in_process_ring(2, JOB.limits), (SimpleQueue(), SimpleQueue())
        other = wrapper(ends[1], second, clock, sent_s)
        answering = threading.Thread(target=measure_link, args=(other, JOB))
        answering.start()
        table = measure_link(wrapper(ends[0], first, clock, sent_s), JOB)
        answering.join()
        return table

    return measure


def test_both_directions_and_every_size_are_in_the_table(measured):
    table = measured()
    found = {(one.source, one.target, one.size_bytes) for one in table.samples}
    assert found == {
        (source, target, size)
        for source, target in (("old", "desk"), ("desk", "old"))
        for size in JOB.sizes
    }
    assert all(one.seconds > 0 for one in table.samples)
    assert dict(table.provenance)["noise"]


def test_a_direction_that_is_slow_for_large_messages_is_found_so(measured):
    table = measured(second=takes(SEND_S, above=10_000))
    seconds = {(one.source, one.size_bytes): one.seconds for one in table.samples}
    assert seconds["desk", 65_536] == pytest.approx(SEND_S, rel=0.01)
    assert seconds["old", 65_536] < 0.01 * SEND_S


def test_the_planner_reads_latency_and_bandwidth_out_of_it(measured):
    table = measured(takes(SEND_S), takes(SEND_S))
    (link,) = fit_links(table.samples)
    assert link.latency_s == pytest.approx(SEND_S, rel=0.01)


def test_too_few_or_odd_sizes_are_rejected():
    with pytest.raises(SpecError, match="different multiples"):
        LinkJob(between=("a", "b"), sizes=(UNIT_BYTES,))
    with pytest.raises(SpecError, match="different multiples"):
        LinkJob(between=("a", "b"), sizes=(UNIT_BYTES, UNIT_BYTES + 1))


def test_three_ranks_are_refused():
    with pytest.raises(SpecError, match="found 3 ranks"):
        measure_link(in_process_ring(3, JOB.limits)[0], JOB)


def test_an_end_that_goes_away_is_an_error():
    first, second = in_process_ring(2, JOB.limits)
    second.close()
    with pytest.raises(StageError):
        measure_link(first, JOB)


def test_what_a_message_costs_more_after_other_memory_was_read_is_added(
    measured, clock, monkeypatch
):
    cold = threading.local()
    real = _CacheEviction.__call__

    def evict(self, after=0.0):
        real(self, after)
        cold.is_now = True

    class Cooled(Slow):
        """The first call of either end after its caches were emptied takes ``SEND_S`` longer."""

        def _warm(self):
            if getattr(cold, "is_now", False):
                clock.now_s += SEND_S
                cold.is_now = False

        def send(self, frame):
            self._warm()
            super().send(frame)

        def recv(self):
            frame = super().recv()
            self._warm()
            return frame

    monkeypatch.setattr(_CacheEviction, "__call__", evict)
    table = measured(wrapper=Cooled)
    assert all(one.seconds == pytest.approx(SEND_S, rel=0.01) for one in table.samples)
    ends = ends_of("links", table, ("desk", "old"))
    assert ends.send_s == pytest.approx(SEND_S, rel=0.01)
    assert ends.receive_s == pytest.approx(SEND_S, rel=0.01)


def test_what_the_other_end_takes_is_no_work_of_this_one(measured):
    ends = ends_of("links", measured(second=takes(SEND_S)), ("old", "desk"))
    assert 0 < ends.send_s < 0.01 * SEND_S
    assert 0 < ends.receive_s < 0.01 * SEND_S
