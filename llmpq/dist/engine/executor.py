"""StepExecutor: computes the steps of an engine, over the stages of a plan.

A step is a flat list of the tokens of several sequences. Several steps are in flight, one in every
stage and one between two stages. Where prefill and decode have stages of their own (WAA), the
master's layers only decode, and the steps of each phase come back in order.

Shapes: R rows with an output, V vocabulary, N tokens of all rows, H hidden size.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmpq.dist.engine.stage import StageRunner, cast_hidden_states, packed_batch_of, phase_of
from llmpq.dist.metrics.stats import StageClock, synchronize, tokens_read
from llmpq.dist.transport.communicator import Communicator, error_from_frame
from llmpq.dist.transport.frames import Frame, FrameKind, Row
from llmpq.errors import StageError
from llmpq.models import Master
from llmpq.spec.plan import MicroBatching
from llmpq.spec.precision import Phase

Ids = NDArray[np.int64]
FRAME_KINDS = {
    Phase.PREFILL: FrameKind.PREFILL,
    Phase.DECODE: FrameKind.DECODE,
    None: FrameKind.MIXED,
}


class StepExecutor(Protocol):
    """Computes steps; those of one phase come back in the order in which they are dispatched."""

    def dispatch(
        self,
        number: int,
        phase: Phase | None,
        token_ids: Ids,
        rows: Sequence[Row],
        outputs: Sequence[int],
    ) -> None:
        """Start a step.

        Args:
            number: of the step.
            phase: of the step; ``None`` for one that mixes both.
            token_ids: of all rows, one after the other.
            rows: of the step.
            outputs: rows whose last token's scores are wanted.

        Raises:
            StageError: a stage failed.
        """
        ...

    def has_result(self) -> bool:
        """Return whether :meth:`collect` would return or raise at once."""
        ...

    def await_result(self, longest_s: float) -> bool:
        """Wait until :meth:`collect` would return or raise at once; return whether it would."""
        ...

    def collect(self) -> tuple[int, Tensor | None]:
        """Return the number of the next complete step, and the scores ``[R, V]`` of its outputs.

        The scores are ``None`` where no row has an output. :meth:`end_step` follows.

        Raises:
            StageError: a stage failed or hangs, or returned another step.
        """
        ...

    def end_step(self) -> None:
        """Declare that the tokens of the step collected last are chosen: its work ends now."""
        ...

    def check(self) -> None:
        """Look whether all stages still work, while no step is in flight.

        Raises:
            StageError: why one of them does not.
        """
        ...


class _SentStep(NamedTuple):
    """A step in flight; ``hidden`` where the master alone computes it."""

    kind: FrameKind
    rows: tuple[Row, ...]
    outputs: Sequence[int]
    hidden: Tensor | None
    dispatch_s: float
    embed_s: float


class PipelineExecutor:
    """Computes steps over the stages of a pipeline, as the master.

    Args:
        master: the two ends of the model.
        runner: the first stage's own layers.
        communicator: the ring, or both; ``None`` when there is only one stage.
        clock: collects the master's busy times; ``None`` for none.
        prefill_runner: the master's part of a prefill where prefill has stages of its own.
        local_phases: phases that the master computes alone although there is a communicator.
    """

    def __init__(
        self,
        *,
        master: Master,
        runner: StageRunner,
        communicator: Communicator | None,
        clock: StageClock | None = None,
        prefill_runner: StageRunner | None = None,
        local_phases: Collection[Phase] = (),
    ) -> None:
        self._master = master
        self._runner = runner
        self._prefill_runner = prefill_runner
        self._communicator = communicator
        self._clock = clock or StageClock(micro_batching=MicroBatching(prefill=1, decode=1))
        self._local_phases = local_phases
        self._in_flight: dict[int, _SentStep] = {}  # by number, in order
        self._collected: tuple[_SentStep, float] | None = None

    def dispatch(
        self,
        number: int,
        phase: Phase | None,
        token_ids: Ids,
        rows: Sequence[Row],
        outputs: Sequence[int],
    ) -> None:
        """Embed the tokens, run the first stage and send the step on."""
        clock, runner, packed = self._clock, self._runner, tuple(rows)
        if phase is Phase.PREFILL and self._prefill_runner is not None:
            runner = self._prefill_runner
        waiting_s = clock.now()
        own_rows = runner.acquire(packed)
        start = clock.now()
        clock.wait_s += start - waiting_s
        ids = torch.from_numpy(token_ids)[None].to(runner.device)  # [1, N]
        hidden = self._master.embed(ids, packed_batch_of(packed).positions)
        embed_s = clock.now() - start
        hidden = runner.run(hidden, own_rows)  # [1, N, H]
        if phase is not None:  # its seconds are compared with a forecast by phase
            synchronize(runner.device)
        runner.release(packed)
        kind = FRAME_KINDS[phase]
        is_local = self._communicator is None or phase in self._local_phases
        self._in_flight[number] = _SentStep(
            kind, packed, outputs, hidden if is_local else None, clock.now() - start, embed_s
        )
        if not is_local:
            assert self._communicator is not None
            self._communicator.send(
                Frame(kind=kind, micro_batch=number, rows=packed, hidden=hidden)
            )

    def has_result(self) -> bool:
        """Return whether :meth:`collect` would return or raise at once."""
        return self._local() is not None or (
            self._communicator is not None and self._communicator.has_frame()
        )

    def await_result(self, longest_s: float) -> bool:
        """Wait until :meth:`collect` would return or raise at once; return whether it would."""
        if self._local() is not None or self._communicator is None:
            return True
        return self._communicator.await_frame(longest_s)

    def collect(self) -> tuple[int, Tensor | None]:
        """Return the number and the scores of the next complete step; see the protocol."""
        number, hidden = self.collect_hidden()
        assert self._collected is not None
        step, _ = self._collected
        if not step.outputs:
            return number, None
        rows = cast_hidden_states(hidden[0], self._runner.device, self._runner.dtype)  # [R, H]
        if len(step.outputs) < len(step.rows):
            rows = rows[list(step.outputs)]
        return number, self._master.logits(rows)

    def collect_hidden(self) -> tuple[int, Tensor]:
        """Return the number of the next complete step, and what its last stage returned.

        The hidden states are ``[1, R, H]``, of the last token of each row, or ``[1, N, H]`` from a
        stage that returns all; the next call of this executor may overwrite them.
        """
        number, hidden = self._local() or self._receive()
        self._collected = self._in_flight.pop(number), self._clock.now()
        return number, hidden

    def end_step(self) -> None:
        """Record the master's work on the step collected last."""
        assert self._collected is not None
        step, start_s = self._collected
        spent_s = self._clock.now() - start_s
        phase, lengths = phase_of(step.kind, step.rows), [row.length for row in step.rows]
        self._clock.record(
            phase,
            len(lengths),
            step.dispatch_s + spent_s,
            tokens_read(phase, lengths, self._runner.device),
            step.embed_s + spent_s,
        )

    def check(self) -> None:
        """Raise the error of a stage that has ended; see :class:`StepExecutor`."""
        if self._communicator is not None and self._communicator.has_frame():
            raise error_from_frame(self._communicator.recv())

    def _local(self) -> tuple[int, Tensor] | None:
        """Return the oldest step that the master alone computed."""
        for number, step in self._in_flight.items():
            if step.hidden is not None:
                return number, step.hidden
        return None

    def _receive(self) -> tuple[int, Tensor]:
        """Receive the next step; those of two rings come back in the order of each."""
        assert self._communicator is not None
        frame = self._communicator.recv()
        if frame.kind is FrameKind.ERROR:
            raise error_from_frame(frame)
        sent = [(number, step) for number, step in self._in_flight.items() if step.hidden is None]
        is_split = self._prefill_runner is not None
        own = [one for one in sent if not is_split or one[1].kind is frame.kind]
        number, step = (own or sent)[0]
        expected = [(row.blocks, row.length) for row in step.rows]
        found = [(row.blocks, row.length) for row in frame.rows]
        is_right = (frame.kind, frame.micro_batch, found) == (step.kind, number, expected)
        if not is_right or frame.hidden is None:
            name = self._communicator.names[self._communicator.ranks[-1]]
            raise StageError(
                f"{name}: found step {frame.micro_batch} ({frame.kind.name}), "
                f"expected {number} ({step.kind.name})"
            )
        return number, frame.hidden
