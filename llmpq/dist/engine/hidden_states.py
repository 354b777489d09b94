"""Teacher forcing: hidden states of given tokens, through the pipeline that serves.

Stages, frames, blocks and kernels are those of generation; the last stage returns every token of a
row instead of its last one. Every micro-batch is a prefill into the same blocks; a stage computes
them in order.

Shapes: R rows (sequences), T tokens a row, H hidden size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from llmpq.dist.engine.stage import slot_row
from llmpq.dist.launch.rank import (
    RankContext,
    load_master_of,
    load_runner,
    ring_errors,
    torch_device,
    window_of,
)
from llmpq.dist.metrics.measurement import Measurement
from llmpq.dist.metrics.progress import Event
from llmpq.dist.metrics.stats import StageClock, synchronize
from llmpq.dist.transport.communicator import (
    Communicator,
    error_from_frame,
    shut_down,
    wait_until_ready,
)
from llmpq.dist.transport.frames import Frame, FrameKind
from llmpq.errors import SpecError, StageError
from llmpq.models import load_config
from llmpq.spec.precision import Phase

OnHidden = Callable[[int, Tensor], None]


def run_teacher_forcing(
    context: RankContext, sequences: Sequence[tuple[int, ...]], on_hidden: OnHidden
) -> Measurement:
    """Run the master: pass sequences through all layers and report their hidden states.

    Args:
        context: of rank 0 of a job with the task ``hidden``.
        sequences: tokens of each; neighbours of one length share a micro-batch, as many as the
            plan's prefill micro-batch holds.
        on_hidden: called with the number of each micro-batch and its states ``[R, T, H]``.

    Raises:
        LlmpqError: what went wrong here or on any other rank.
    """
    with ring_errors(context):
        return _TeacherForcing(context).run(sequences, on_hidden)


def micro_batches(
    sequences: Sequence[tuple[int, ...]], rows: int
) -> Iterator[list[tuple[int, ...]]]:
    """Gather neighbours of one length, at most ``rows`` of them."""
    group: list[tuple[int, ...]] = []
    for sequence in sequences:
        if group and (len(group) == rows or len(group[0]) != len(sequence)):
            yield group
            group = []
        group.append(sequence)
    if group:
        yield group


class _TeacherForcing:
    """The loaded master of a run with teacher forcing."""

    def __init__(self, context: RankContext) -> None:
        plan = context.plan
        if plan.is_split:
            raise SpecError(
                "plan: found separate stages for prefill and for decode, expected stages that do "
                "both: evaluate the plan it was made from"
            )
        self._context = context
        self._clock = StageClock(micro_batching=plan.micro_batching)
        self._device = torch_device(plan, 0)
        self._communicator: Communicator | None = context.communicator
        start = self._clock.now()
        self._master = load_master_of(context, self._device)
        self._runner = load_runner(context, self._device)
        self._window = window_of(plan, load_config(context.job.model_dir))
        self._clock.load_s = self._clock.now() - start
        if self._communicator is not None:
            wait_until_ready(self._communicator)
        self._load_s = self._clock.now() - start
        # As in generation: one micro-batch in every stage and one between stages.
        self._max_in_flight = len(plan.stages) + 1

    def run(self, sequences: Sequence[tuple[int, ...]], on_hidden: OnHidden) -> Measurement:
        """Run all sequences, a few micro-batches in flight at a time."""
        start = self._clock.now()
        waiting = micro_batches(sequences, self._context.plan.micro_batching.prefill)
        in_flight: deque[tuple[int, Tensor | None]] = deque()  # rows, and states if they are here
        dispatched = completed = tokens = 0
        total = sum(len(sequence) for sequence in sequences)
        while True:
            room = self._max_in_flight - len(in_flight)
            for group in islice(waiting, room):
                in_flight.append((len(group), self._dispatch(dispatched, group)))
                dispatched += 1
            if not in_flight:
                break
            rows, hidden = in_flight.popleft()
            if hidden is None:
                hidden = self._receive(completed)
            on_hidden(completed, hidden.view(rows, -1, hidden.shape[2]))  # [R, T, H]
            completed += 1
            tokens += hidden.shape[1]
            event = Event(rank=0, kind="tokens", done=tokens, total=total)
            self._context.progress.report(event)
        elapsed_s = self._clock.now() - start
        stages = [self._clock.stats(0, self._device)]
        if self._communicator is not None:
            stages += shut_down(self._communicator)
        return Measurement(
            requests=len(sequences),
            generated_tokens=0,
            latency_s=elapsed_s,
            load_s=self._load_s,
            stages=tuple(stages),
        )

    def _dispatch(self, number: int, group: list[tuple[int, ...]]) -> Tensor | None:
        """Run the master's own layers; return their output if there are no other stages."""
        start = self._clock.now()
        count = len(group[0])
        token_ids = torch.tensor(group, device=self._device).view(1, -1)  # [1, N]
        positions = torch.arange(count).repeat(len(group))[None]
        most = self._context.plan.workload.max_context_tokens
        rows = tuple(
            slot_row(number, (0, count), most, window=self._window) for number in range(len(group))
        )
        hidden = self._master.embed(token_ids, positions)
        hidden = self._runner.run(hidden, rows)  # [1, N, H]
        synchronize(self._device)
        self._clock.record(Phase.PREFILL, len(rows), self._clock.now() - start)
        if self._communicator is None:
            return hidden
        self._communicator.send(
            Frame(kind=FrameKind.PREFILL, micro_batch=number, rows=rows, hidden=hidden)
        )
        return None

    def _receive(self, number: int) -> Tensor:
        assert self._communicator is not None
        frame = self._communicator.recv()
        if frame.kind is FrameKind.ERROR:
            raise error_from_frame(frame)
        if (frame.kind, frame.micro_batch) != (FrameKind.PREFILL, number) or frame.hidden is None:
            raise StageError(
                f"{self._communicator.names[-1]}: found micro-batch {frame.micro_batch} "
                f"({frame.kind.name}), expected {number} (PREFILL)"
            )
        return frame.hidden.clone()  # the next frame is received into the same buffer
