"""A link is timed through the runtime's own frames, both directions apart."""

from __future__ import annotations

import threading
import time

import pytest
from helpers.in_process_ring import in_process_ring

from llmpq.costmodel.comm import fit_links
from llmpq.errors import SpecError, StageError
from llmpq.profiler.link import UNIT_BYTES, LinkJob, _CacheEviction, measure_link
from llmpq.spec.tables import ends_of

JOB = LinkJob(between=("old", "desk"), sizes=(512, 4096, 65_536), budget_s=0.05)


SLEEP_S = 0.02
"""Long enough that what a busy machine adds does not count."""


class Slow:
    """A communicator whose sends take a time by their size."""

    def __init__(self, inner, seconds_of):
        self._inner = inner
        self._seconds_of = seconds_of
        self.rank, self.names = inner.rank, inner.names

    def send(self, frame):
        time.sleep(self._seconds_of(0 if frame.hidden is None else frame.hidden.nbytes))
        self._inner.send(frame)

    def recv(self):
        return self._inner.recv()


def takes(seconds, above=-1):
    """Return the time of a send: ``seconds`` for messages of more than ``above`` bytes."""
    return lambda size: seconds if size > above else 0.0


def measured(first=takes(0.0), second=takes(0.0)):  # noqa: B008  functions, never changed
    ends = in_process_ring(2, JOB.limits)
    other = threading.Thread(target=measure_link, args=(Slow(ends[1], second), JOB))
    other.start()
    table = measure_link(Slow(ends[0], first), JOB)
    other.join(5)
    return table


def test_both_directions_and_every_size_are_in_the_table():
    table = measured()
    found = {(one.source, one.target, one.size_bytes) for one in table.samples}
    assert found == {
        (source, target, size)
        for source, target in (("old", "desk"), ("desk", "old"))
        for size in JOB.sizes
    }
    assert all(one.seconds > 0 for one in table.samples)
    assert dict(table.provenance)["noise"]


def test_a_direction_that_is_slow_for_large_messages_is_found_so():
    table = measured(second=takes(0.02, above=10_000))
    seconds = {(one.source, one.size_bytes): one.seconds for one in table.samples}
    assert seconds["desk", 65_536] == pytest.approx(0.02, rel=0.5)
    assert seconds["old", 65_536] < 0.01


def test_the_planner_reads_latency_and_bandwidth_out_of_it():
    table = measured(takes(SLEEP_S), takes(SLEEP_S))
    (link,) = fit_links(table.samples)
    assert link.latency_s == pytest.approx(SLEEP_S, rel=0.5)


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


def test_what_a_message_costs_more_after_other_memory_was_read_is_added(monkeypatch):
    cold = threading.local()
    real = _CacheEviction.__call__

    def stir(self, after=0.0):
        real(self, after)
        cold.is_now = True

    class Cooled(Slow):
        """The first call of either end after it has stirred takes ``SLEEP_S`` longer."""

        def _warm(self):
            if getattr(cold, "is_now", False):
                time.sleep(SLEEP_S)
                cold.is_now = False

        def send(self, frame):
            self._warm()
            super().send(frame)

        def recv(self):
            frame = super().recv()
            self._warm()
            return frame

    monkeypatch.setattr(_CacheEviction, "__call__", stir)
    monkeypatch.setitem(globals(), "Slow", Cooled)
    table = measured()
    assert all(0.75 < one.seconds / SLEEP_S < 2 for one in table.samples)
    ends = ends_of("links", table, ("desk", "old"))
    assert 1 < ends.send_s / SLEEP_S < 2
    assert 1 < ends.receive_s / SLEEP_S < 2


def test_what_the_other_end_takes_is_no_work_of_this_one():
    ends = ends_of("links", measured(second=takes(0.02)), ("old", "desk"))
    assert 0 < ends.send_s < 0.01
    assert 0 < ends.receive_s < 0.01
