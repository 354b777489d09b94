"""Teacher forcing: hidden states of given tokens, through the pipeline that serves.

Stages, frames, blocks and kernels are those of generation; the last stage returns every token of a
row instead of its last one. Every micro-batch is a prefill into the same blocks; a stage computes
them in order.

Shapes: R rows (sequences), T tokens a row, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import numpy as np
from torch import Tensor

from llmpq.dist.engine.executor import PipelineExecutor
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
from llmpq.dist.metrics.stats import StageClock
from llmpq.dist.transport.communicator import Communicator, shut_down, wait_until_ready
from llmpq.errors import SpecError
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
        self._executor = PipelineExecutor(
            master=load_master_of(context, self._device),
            runner=load_runner(context, self._device),
            communicator=self._communicator,
            clock=self._clock,
        )
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
        waiting = enumerate(micro_batches(sequences, self._context.plan.micro_batching.prefill))
        rows_of: dict[int, int] = {}  # of the micro-batches in flight, by number
        tokens = 0
        total = sum(len(sequence) for sequence in sequences)
        while True:
            for number, group in islice(waiting, self._max_in_flight - len(rows_of)):
                rows_of[number] = len(group)
                self._dispatch(number, group)
            if not rows_of:
                break
            number, hidden = self._executor.collect_hidden()
            self._executor.end_step()
            states = hidden.clone().view(rows_of.pop(number), -1, hidden.shape[2])  # [R, T, H]
            on_hidden(number, states)
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

    def _dispatch(self, number: int, group: list[tuple[int, ...]]) -> None:
        count, most = len(group[0]), self._context.plan.workload.max_context_tokens
        rows = [
            slot_row(place, (0, count), most, window=self._window) for place in range(len(group))
        ]
        self._executor.dispatch(number, Phase.PREFILL, np.array(group).reshape(-1), rows, [])
