"""Packed steps: each is a flat list of the tokens of several sequences.

``PipelineSteps`` computes them over the stages of a plan, for the online engine.

Shapes: R rows with an output, V vocabulary, N tokens of all rows, H hidden size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmpq.dist.engine.handover import received
from llmpq.dist.engine.stage import StageRunner, packed_batch_of
from llmpq.dist.transport.communicator import Communicator, error_from_frame
from llmpq.dist.transport.frames import Frame, FrameKind, Row
from llmpq.errors import StageError
from llmpq.models import Master

Ids = NDArray[np.int64]


class StepRunner(Protocol):
    """Computes packed steps, in the order in which they are dispatched."""

    def dispatch(self, token_ids: Ids, rows: Sequence[Row], outputs: Sequence[int]) -> None:
        """Start a step.

        Args:
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

    def collect(self) -> Tensor | None:
        """Return the scores ``[R, V]`` of the oldest step, ``None`` where no row has an output.

        Raises:
            StageError: a stage failed or hangs.
        """
        ...

    def check(self) -> None:
        """Look whether all stages still work, while no step is in flight.

        Raises:
            StageError: why one of them does not.
        """
        ...


class _Step(NamedTuple):
    """A step in flight; ``hidden`` where the master is the only stage."""

    number: int
    rows: tuple[Row, ...]
    outputs: Sequence[int]
    hidden: Tensor | None


class PipelineSteps:
    """Computes steps over the stages of a pipeline, as the master.

    Args:
        master: the two ends of the model.
        runner: the first stage's own layers.
        communicator: the ring; ``None`` when there is only one stage.
    """

    def __init__(
        self, *, master: Master, runner: StageRunner, communicator: Communicator | None
    ) -> None:
        self._master = master
        self._runner = runner
        self._communicator = communicator
        self._next_number = 0
        self._in_flight: deque[_Step] = deque()

    def dispatch(self, token_ids: Ids, rows: Sequence[Row], outputs: Sequence[int]) -> None:
        """Embed the tokens, run the first stage and send the step on."""
        number, self._next_number = self._next_number, self._next_number + 1
        packed = tuple(rows)
        ids = torch.from_numpy(token_ids)[None].to(self._runner.device)  # [1, N]
        hidden = self._master.embed(ids, packed_batch_of(packed).positions)
        hidden = self._runner.run(hidden, packed)
        if self._communicator is None:
            self._in_flight.append(_Step(number, packed, outputs, hidden))
            return
        frame = Frame(kind=FrameKind.MIXED, micro_batch=number, rows=packed, hidden=hidden)
        self._communicator.send(frame)
        self._in_flight.append(_Step(number, packed, outputs, None))

    def has_result(self) -> bool:
        """Return whether :meth:`collect` would return or raise at once."""
        return self._communicator is None or self._communicator.has_frame()

    def await_result(self, longest_s: float) -> bool:
        """Wait until :meth:`collect` would return or raise at once; return whether it would."""
        return self._communicator is None or self._communicator.await_frame(longest_s)

    def collect(self) -> Tensor | None:
        """Return the scores of the oldest step's outputs; see :class:`StepRunner`."""
        hidden = self._in_flight[0].hidden if self._communicator is None else self._receive()
        step = self._in_flight.popleft()
        if not step.outputs:
            return None
        assert hidden is not None
        rows = received(hidden[0], self._runner.device, self._runner.dtype)  # [R, H]
        if len(step.outputs) < len(step.rows):
            rows = rows[list(step.outputs)]
        return self._master.logits(rows)

    def check(self) -> None:
        """Raise the error of a stage that has ended; see :class:`StepRunner`."""
        if self._communicator is not None and self._communicator.has_frame():
            raise error_from_frame(self._communicator.recv())

    def _receive(self) -> Tensor:
        assert self._communicator is not None
        frame, step = self._communicator.recv(), self._in_flight[0]
        if frame.kind is FrameKind.ERROR:
            raise error_from_frame(frame)
        is_right = (frame.kind, frame.micro_batch) == (FrameKind.MIXED, step.number)
        if not is_right or frame.hidden is None or len(frame.rows) != len(step.rows):
            name = self._communicator.names[self._communicator.ranks[-1]]
            raise StageError(
                f"{name}: found step {frame.micro_batch} ({frame.kind.name}), "
                f"expected {step.number} (MIXED)"
            )
        return frame.hidden
