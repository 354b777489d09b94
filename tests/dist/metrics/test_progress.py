"""Events cross a pipe whole or not at all, and become bars."""

from __future__ import annotations

import io
import os
import queue

from helpers.clocks import PATIENCE_S

from llmpq.dist.engine.batch_run import REPORT_S, TokenCounter
from llmpq.dist.metrics.progress import BarProgress, Event, EventPipe, Heartbeat


def _event(done: int, kind: str = "tokens", rank: int = 0, total: int = 10) -> Event:
    return Event(rank=rank, kind=kind, done=done, total=total)


def test_events_round_trip_and_stay_short():
    event = _event(2**40, total=2**40, rank=1023)
    assert Event.decode(event.encode()) == event
    assert len(event.encode()) < 200


def test_a_full_or_closed_pipe_does_not_stop_the_work():
    reader, writer = os.pipe()
    progress = EventPipe(writer)
    for number in range(20_000):
        progress.report(_event(number))
    lines = os.read(reader, 1 << 20).splitlines()
    assert [Event.decode(line).done for line in lines] == list(range(len(lines)))
    os.close(reader)
    progress.report(_event(1))
    os.close(writer)
    progress.report(_event(1))


def test_a_pulse_beats_until_it_stops():
    events = queue.SimpleQueue()

    class Collect:
        def report(self, event: Event) -> None:
            events.put(event)

    pulse = Heartbeat(Collect(), 3, 0.001)
    first, second = events.get(timeout=PATIENCE_S), events.get(timeout=PATIENCE_S)
    pulse.stop()
    assert first == second == _event(0, "alive", rank=3, total=0)


def test_tokens_are_told_now_and_then_and_all_in_the_end():
    told: list[tuple[int, int]] = []
    now_s = [0.0]

    class Collect:
        def report(self, event: Event) -> None:
            told.append((event.done, event.total))

    tokens = TokenCounter(Collect(), 100, lambda: now_s[0])
    assert told == [(0, 100)]  # says that serving begins
    for _ in range(10):
        tokens.add(2)
    assert told == [(0, 100)]
    now_s[0] = REPORT_S
    tokens.expect_fewer(30)
    tokens.add(2)
    tokens.add(2)
    assert told == [(0, 100), (22, 70)]
    tokens.add(0)  # nothing will come for a while
    assert told[-1] == (24, 70)
    tokens.add(0)
    assert len(told) == 3
    tokens.report()
    assert len(told) == 4


def test_bars_count_layers_of_all_ranks_and_then_tokens():
    file = io.StringIO()
    bar = BarProgress(file, num_layers=4)
    bar.report(_event(1, "load", rank=0, total=1))
    bar.report(_event(3, "load", rank=1, total=3))
    bar.report(_event(5))
    bar.report(_event(8, total=8))
    bar.close()
    bar.close()
    assert "loading: 100%" in file.getvalue()
    assert "4/4" in file.getvalue()
    assert "8/8" in file.getvalue()


def test_the_slowest_rank_and_its_time_left_are_named():
    file = io.StringIO()
    seconds = iter([0.0, 4.0, 4.0])
    bar = BarProgress(file, num_layers=12, clock=lambda: next(seconds))
    bar.report(Event(rank=0, kind="load", done=4, total=6))
    bar.report(Event(rank=1, kind="load", done=2, total=6))
    bar.close()
    assert "rank 1: 8 s left" in file.getvalue()
