"""The stage's loop and the rounds it takes part in, and what a failing rank makes of the others."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from helpers.clocks import PATIENCE_S
from helpers.in_process_ring import in_process_ring
from helpers.ranks import make_plan, run_threads

from llmpq.dist.engine.executor import StageRunner, StageWorker, micro_batch_frame
from llmpq.dist.io.prompts import Request
from llmpq.dist.metrics.stats import StageClock, tokens_read
from llmpq.dist.transport.communicator import (
    Communicator,
    as_llmpq_error,
    error_frame,
    error_from_frame,
    shut_down,
    wait_until_ready,
)
from llmpq.dist.transport.errors import PeerLostError
from llmpq.dist.transport.frames import Frame, FrameKind, FrameLimits, Row
from llmpq.errors import CapacityError, SpecError, StageError
from llmpq.spec.plan import MicroBatching
from llmpq.spec.precision import Phase

LIMITS = FrameLimits(
    digest=b"12345678",
    num_blocks=4,
    max_context=8,
    prefill_rows=2,
    prefill_tokens=4,
    decode_rows=2,
    hidden_size=3,
    dtype=torch.float32,
)
ROWS = (Row(blocks=(0,), first=0, length=4), Row(blocks=(2,), first=0, length=2))
REQUESTS = [
    Request(id=number, prompt_token_ids=(number + 1,) * 3, max_new_tokens=6) for number in range(5)
]


def _runner(*, is_last: bool) -> StageRunner:
    """A stage without layers hands hidden states on."""
    return StageRunner(layers=None, cache=None, device=torch.device("cpu"), is_last=is_last)


def test_a_last_stage_returns_the_last_token_of_each_row():
    hidden = torch.randn(1, 6, 3)
    out = _runner(is_last=True).run(hidden, ROWS)
    assert torch.equal(out, hidden[:, [3, 5]])
    frame = micro_batch_frame(FrameKind.PREFILL, 5, ROWS, out)
    assert frame.rows == (
        Row(blocks=(0,), first=3, length=4),
        Row(blocks=(2,), first=1, length=2),
    )
    assert micro_batch_frame(FrameKind.PREFILL, 5, ROWS, hidden).rows == ROWS


def test_a_worker_is_ready_computes_and_reports():
    ring = in_process_ring(2, LIMITS)
    ticks = iter(range(100))
    clock = StageClock(
        micro_batching=MicroBatching(prefill=2, decode=1), now=lambda: float(next(ticks))
    )
    worker = StageWorker(runner=_runner(is_last=True), communicator=ring[1], clock=clock)
    thread = threading.Thread(target=worker.run)
    thread.start()
    master = ring[0]
    wait_until_ready(master)
    hidden = torch.randn(1, 6, 3)
    master.send(Frame(kind=FrameKind.PREFILL, micro_batch=7, rows=ROWS, hidden=hidden))
    answer = master.recv()
    assert (answer.micro_batch, answer.kind) == (7, FrameKind.PREFILL)
    assert answer.hidden is not None
    assert answer.hidden.shape == (1, 2, 3)
    (stats,) = shut_down(master)
    thread.join(timeout=PATIENCE_S)
    assert (stats.rank, stats.prefill_s, stats.decode_s, stats.busy_s) == (1, 1.0, None, 1.0)
    assert stats.memory_bytes > 0


@pytest.mark.parametrize(
    ("phase", "device", "tokens"),
    [
        (Phase.DECODE, "cpu", 3.0),
        (Phase.DECODE, "cuda", 3.0),
        (Phase.DECODE, "xpu", 4),
        (Phase.PREFILL, "cpu", 3.0),
    ],
)
def test_work_is_told_by_the_tokens_that_a_forecast_charges(phase, device, tokens):
    assert tokens_read(phase, [row.length for row in ROWS], torch.device(device)) == tokens


@pytest.mark.parametrize(
    "error",
    [
        SpecError("a"),
        CapacityError("b"),
        StageError("stage 1: c"),
        StageError("stage 1: d", is_permanent=True),
    ],
)
def test_errors_keep_their_kind_on_the_way(error):
    found = error_from_frame(error_frame(error))
    assert (type(found), str(found)) == (type(error), str(error))
    assert found.is_permanent == error.is_permanent


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"\xff"])
def test_an_unreadable_error_is_an_error(text):
    assert isinstance(error_from_frame(Frame(kind=FrameKind.ERROR, text=text)), StageError)


class Disturbed:
    """A communicator that changes one of the frames it receives."""

    def __init__(self, inner: Communicator, **changes: object) -> None:
        self._inner = inner
        self._changes = changes
        self.rank, self.ranks, self.names = inner.rank, inner.ranks, inner.names
        self.send, self.close, self.has_frame = inner.send, inner.close, inner.has_frame
        self.await_frame = inner.await_frame
        self._decodes = 0

    def recv(self) -> Frame:
        frame = self._inner.recv()
        self._decodes += frame.kind is FrameKind.DECODE
        return replace(frame, **self._changes) if self._decodes == 3 else frame


@pytest.mark.parametrize(
    ("rank", "changes", "names"),
    [
        (0, {"micro_batch": 99}, r"stage 2 .*found step 99"),
        (0, {"kind": FrameKind.PREFILL}, r"stage 2 .*PREFILL"),
        (2, {"hidden": torch.zeros(1, 1, 3)}, r"stage 2 \(rank 2\): .*Error"),
        (1, {"rows": (Row(blocks=(99,), first=3, length=4),)}, r"stage 1 \(rank 1\): .*blocks"),
    ],
)
def test_a_stage_that_fails_ends_the_run_with_its_name(tiny_model, rank, changes, names):
    def wrap(communicator: Communicator) -> Communicator:
        return Disturbed(communicator, **changes) if communicator.rank == rank else communicator

    plan = make_plan((0, 1, 2, 3), prefill=2, decode=1)
    with pytest.raises(StageError, match=names):
        run_threads(plan, tiny_model("llama", seed=1), REQUESTS, wrap=wrap)


def test_a_stage_that_cannot_load_says_why(tiny_model, tmp_path):
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    for file in tiny_model("llama", seed=1, max_shard_size="20KB").iterdir():
        (model_dir / file.name).write_bytes(file.read_bytes())
    plan = make_plan((0, 1, 3), prefill=2, decode=1)
    run_threads(plan, model_dir, REQUESTS)
    shard = sorted(model_dir.glob("*.safetensors"))[-2]
    shard.write_bytes(b"\xff" * 100)
    with pytest.raises(SpecError, match=shard.name):
        run_threads(plan, model_dir, REQUESTS)


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (MemoryError("x"), CapacityError, "stage 1: out of memory: x"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9"), CapacityError, "stage 1"),
        (torch.OutOfMemoryError("x"), CapacityError, "stage 1: out of memory"),
        (ValueError("x"), StageError, "stage 1: ValueError: x"),
        (StageError("frame refused"), StageError, "stage 1: frame refused"),
        (StageError("stage 2: gone"), StageError, "stage 2: gone"),
        (SpecError("file"), SpecError, "file"),
    ],
)
def test_whatever_goes_wrong_is_one_of_our_errors(error, kind, text):
    found = as_llmpq_error(error, "stage 1")
    assert type(found) is kind
    assert str(found).startswith(text)


def test_a_lost_peer_stays_one():
    lost = PeerLostError("stage 2: closed", 2)
    assert as_llmpq_error(lost, "stage 1") is lost
