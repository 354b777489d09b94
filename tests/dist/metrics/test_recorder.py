"""Traces of a run: waits of every stage, spans of every rank on one clock."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.frames import SMALL, small_decode
from helpers.in_process_ring import in_process_ring

from llmpq.dist.metrics.measurement import StartLog
from llmpq.dist.metrics.progress import Event
from llmpq.dist.metrics.stats import Recorder, RecordingCommunicator, StageClock
from llmpq.dist.transport.frames import Frame, FrameKind
from llmpq.errors import StageError
from llmpq.spec.plan import MicroBatching


class Events:
    def __init__(self) -> None:
        self.seen: list[Event] = []

    def report(self, event: Event) -> None:
        self.seen.append(event)


class Layers:
    """Something that computes."""

    def forward(self, value: int) -> int:
        return value + 1


def ranks(*, is_on: bool, offset_s: float = 0.0):
    made = []
    limits = replace(SMALL, mixed_rows=2, mixed_tokens=4)
    for rank, inner in enumerate(in_process_ring(2, limits)):
        clock = StageClock(micro_batching=MicroBatching(prefill=1, decode=1))
        recorder = Recorder(rank, is_on=is_on, clock_offset_s=rank * offset_s)
        events = Events()
        made.append(
            (RecordingCommunicator(inner, recorder, clock, events), recorder, clock, events)
        )
    return made


def run(made, kind: FrameKind = FrameKind.DECODE) -> None:
    """Two micro-batches round the ring, then the end."""
    (master, recorder, _, _), (stage, other, _, _) = made
    layers = [Layers(), Layers()]
    recorder.trace_calls(layers[0], "forward", "compute", torch.device("cpu"))
    other.trace_calls(layers[1], "forward", "compute", torch.device("cpu"))
    for number in (5, 6):
        assert layers[0].forward(1) == 2
        master.send(replace(small_decode(number), kind=kind))
        stage.send(stage.recv() if layers[1].forward(1) else small_decode(0))
        assert master.recv().micro_batch == number
    stage.send(Frame(kind=FrameKind.STATS, text=b"{}"))
    assert master.recv().kind is FrameKind.STATS


def test_every_ranks_spans_come_together_under_their_micro_batches():
    made = ranks(is_on=True)
    run(made)
    events = made[0][1].to_json(["stage 0", "stage 1"])["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"stage 0", "stage 1"}
    for rank in (0, 1):
        own = [span for span in spans if span["pid"] == rank]
        assert {span["name"] for span in own} == {"compute", "send", "wait"}
        assert {span["args"].get("micro_batch") for span in own} == {5, 6}
    assert min(span["ts"] for span in spans) == 0
    assert all(span["dur"] >= 0 for span in spans)


def test_spans_are_told_once_though_statistics_of_others_pass():
    made = ranks(is_on=True)
    run(made)
    before = made[0][1].to_json(["a", "b"])["traceEvents"]
    made[1][0].send(Frame(kind=FrameKind.STATS, text=b"{}"))  # those of the rank before it
    assert made[0][0].recv().kind is FrameKind.STATS
    assert made[0][1].to_json(["a", "b"])["traceEvents"] == before


def test_spans_are_told_in_the_clock_of_rank_0():
    made = ranks(is_on=True, offset_s=100.0)
    run(made)
    events = made[0][1].to_json(["a", "b"])["traceEvents"]
    starts = {
        rank: [event["ts"] for event in events if event["ph"] == "X" and event["pid"] == rank]
        for rank in (0, 1)
    }
    assert min(starts[1]) - max(starts[0]) > 99e6


def test_steps_of_the_start_belong_to_no_micro_batch():
    start = StartLog(1.0)
    start.mark("imports", 3.0)
    recorder = Recorder(0, is_on=True, start=start)
    recorder.add("embed", 5.0, 6.0)
    recorder.mark("first token")
    recorder.sent(7)
    (_, *events) = (e for e in recorder.to_json(["master"])["traceEvents"] if e["ph"] == "X")
    first = recorder.start.steps[-1]
    assert [step.name for step in recorder.start.steps] == ["imports", "first token"]
    assert (first.begin_s, recorder.start.seconds["imports"]) == (3.0, 2.0)
    numbers = [(event["name"], event["args"].get("micro_batch")) for event in events]
    assert numbers == [("first token", None), ("embed", 7)]


@pytest.mark.parametrize("kind", [FrameKind.DECODE, FrameKind.PREFILL, FrameKind.MIXED])
def test_without_a_trace_only_waits_are_kept(kind):
    made = ranks(is_on=False)
    run(made, kind)
    assert not made[1][1].frames()
    assert made[0][2].wait_s > 0
    assert made[1][2].send_s > 0
    assert [event.kind for event in made[1][3].seen][:1] == ["busy"]
    assert 0 <= made[1][3].seen[0].done <= made[1][3].seen[0].total


@pytest.mark.parametrize("text", [b"", b"{}", b"[0]", b'[0, [["x"]]]', b'["a", []]', b"\xff"])
def test_an_unreadable_trace_is_refused(text):
    with pytest.raises(StageError, match="trace"):
        Recorder(0, is_on=True).take(Frame(kind=FrameKind.TRACE, text=text))


def test_a_long_trace_fits_its_frames():
    recorder = Recorder(123, is_on=True)
    for number in range(1200):
        recorder.add("compute", 1e9, 2e9, number + 2**40)
    other = Recorder(0, is_on=True)
    for frame in recorder.frames():
        assert len(frame.text) <= 64 * 1024
        other.take(frame)
    assert len(other.to_json([""] * 124)["traceEvents"]) == 1200 + 3 * 124
