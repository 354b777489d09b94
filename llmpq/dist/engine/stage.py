"""StageWorker: the loop of a stage: receive, run layers, send.

Shapes: R rows (sequences), N tokens of a step, H hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from llmpq.batching.blocks import slot_blocks, slot_window_blocks
from llmpq.dist.engine.compiled_steps import StepRunner
from llmpq.dist.kv.cache import KVCache
from llmpq.dist.kv.transfer import KVConnector
from llmpq.dist.metrics.stats import StageClock, synchronize, tokens_read
from llmpq.dist.transport.communicator import Communicator, error_from_frame
from llmpq.dist.transport.frames import Frame, FrameKind, Row
from llmpq.errors import StageError
from llmpq.models import DecoderStage, PackedBatch
from llmpq.spec.fields import to_json
from llmpq.spec.precision import Phase
from llmpq.spec.runtime_constants import PROMPT_CHUNK_TOKENS

STEP_KINDS = (FrameKind.PREFILL, FrameKind.DECODE, FrameKind.MIXED)
"""Frames that the layers compute."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageRunner:
    """The layers of a stage with their cache, on their device.

    Attributes:
        layers: decoder layers, ``None`` for a master without any.
        cache: their keys and values, ``None`` without layers.
        device: where both are.
        is_last: whether the projection to the vocabulary follows this stage.
        kv_connector: transfers keys and values from or to other ranks (WAA).
        steps: the layers with captured or compiled steps, where possible.
        dtype: number format of the layers, ``None`` for that of any hidden states.
        chunk_tokens: most tokens of a row that the layers compute at a time.
    """

    layers: DecoderStage | None
    cache: KVCache | None
    device: torch.device
    is_last: bool
    kv_connector: KVConnector | None = None
    steps: StepRunner | None = None
    dtype: torch.dtype | None = None
    chunk_tokens: int = PROMPT_CHUNK_TOKENS

    def close(self) -> None:
        """Close the links for keys and values."""
        if self.kv_connector is not None:
            self.kv_connector.close()

    def acquire(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Wait until the layers may run; return the rows as :meth:`run` wants them."""
        return rows if self.kv_connector is None else self.kv_connector.acquire(rows)

    def release(self, rows: Sequence[Row]) -> None:
        """Declare that :meth:`run` is done with the rows given to :meth:`acquire`."""
        if self.kv_connector is not None:
            self.kv_connector.release(rows)

    def run(self, hidden: Tensor, rows: Sequence[Row], only: Sequence[int] | None = None) -> Tensor:
        """Run the layers over the tokens of one step, of long rows ``chunk_tokens`` at a time.

        Args:
            hidden: ``[1, N, H]``.
            rows: its sequences, one after the other.
            only: layers of the stage to run (from 0), operator by operator; by default all.

        Returns:
            ``[1, N, H]``; from the last stage ``[1, R, H]``, the last token of each row.
        """
        hidden = cast_hidden_states(hidden, self.device, self.dtype)
        batch = packed_batch_of(rows)
        if self.layers is not None and max(batch.counts) > self.chunk_tokens:
            return self._run_chunks(hidden, rows, only)
        hidden = self._run_layers(hidden, batch, only)
        if self.is_last and not batch.is_decode:
            hidden = hidden[:, batch.last_tokens.to(self.device)]
        return hidden

    def _run_layers(self, hidden: Tensor, batch: PackedBatch, only: Sequence[int] | None) -> Tensor:
        if self.layers is None:
            return hidden
        if self.steps is not None and only is None:
            return self.steps.forward(hidden, batch)
        output: Tensor = self.layers(hidden, batch, self.cache, only)
        return output

    def _run_chunks(
        self, hidden: Tensor, rows: Sequence[Row], only: Sequence[int] | None
    ) -> Tensor:
        """Run the layers over chunks of rows, one after the other.

        The keys and values of earlier chunks are in the blocks. The last chunks of all rows run
        together: a row may be the next token of another one.
        """
        offsets = packed_batch_of(rows).offsets
        width = len(rows) if self.is_last else hidden.shape[1]
        output = hidden.new_empty(1, width, hidden.shape[2])
        chunks = [_chunks(row, self.chunk_tokens) for row in rows]
        most = max(map(len, chunks))
        for number in range(most):
            places = [place for place, own in enumerate(chunks) if number >= most - len(own)]
            parts = [chunks[place][number - most] for place in places]
            batch = packed_batch_of(parts)
            firsts = [
                offsets[place] + part.first - rows[place].first
                for place, part in zip(places, parts, strict=True)
            ]
            spans = [
                slice(first, first + count)
                for first, count in zip(firsts, batch.counts, strict=True)
            ]
            inputs = [hidden[:, span] for span in spans]
            made = self._run_layers(torch.cat(inputs, dim=1), batch, only)
            if self.is_last:
                output[:, places] = made[:, batch.last_tokens.to(self.device)]
                continue
            for span, part in zip(spans, torch.split(made, list(batch.counts), dim=1), strict=True):
                output[:, span] = part
        return output


def _chunks(row: Row, tokens: int) -> list[Row]:
    """Return a row in chunks of ``tokens``; their rotary angles are those of the row."""
    length = row.rope_length or row.length
    return [
        replace(row, first=first, length=min(row.length, first + tokens), rope_length=length)
        for first in range(row.first, row.length, tokens)
    ]


def cast_hidden_states(hidden: Tensor, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    """Return hidden states ``[..., H]`` of another stage on ``device``, rounded to ``dtype``.

    Stages may compute in different number formats. A state travels in the format of its sender and
    is rounded once, on arrival (``llmpq.spec.devices.formats`` has what is exact).

    Args:
        hidden: the states.
        device: of this stage.
        dtype: of its layers; ``None`` for that of the states.

    Raises:
        StageError: a finite number of them is larger than the format's largest.
    """
    if dtype is None or hidden.dtype == dtype:
        return hidden.to(device)
    found = hidden.to(dtype)
    if bool((found.isinf() & hidden.isfinite()).any()):
        largest = hidden.abs().masked_fill(hidden.isinf(), 0).max().item()
        name = str(dtype).removeprefix("torch.")
        raise StageError(
            f"hidden states of another stage: found up to {largest:.3g} in {hidden.dtype}, "
            f"expected at most {torch.finfo(dtype).max:.3g}, the largest {name}; give this device "
            "another format in the cluster file ('dtype': 'float32') or leave it out"
        )
    return found.to(device)


def packed_batch_of(rows: Sequence[Row]) -> PackedBatch:
    """Return the rows as the layers want them."""
    return PackedBatch(
        block_tables=[row.blocks for row in rows],
        starts=[row.first for row in rows],
        counts=[row.length - row.first for row in rows],
        rope_lengths=[row.rope_length or row.length for row in rows],
        window_tables=[row.window_blocks for row in rows if row.window_blocks],
    )


def slot_row(
    slot: int,
    tokens: tuple[int, int],
    max_tokens: int,
    *,
    window: int | None,
    origin: int = 0,
) -> Row:
    """Return the row of a sequence that has the blocks of a slot.

    Args:
        slot: its number.
        tokens: the first one of the step, and their number after it.
        max_tokens: tokens of every slot.
        window: largest window of the model, if layers with windows have blocks of their own.
        origin: as in ``Row``.
    """
    first, length = tokens
    return Row(
        blocks=slot_blocks(slot, max_tokens, length),
        window_blocks=()
        if window is None
        else slot_window_blocks(slot, max_tokens, length, window),
        first=first,
        length=length,
        origin=origin,
    )


def phase_of(kind: FrameKind, rows: Sequence[Row]) -> Phase:
    """Return the phase whose times a step counts for: a mixed one with a chunk is a prefill."""
    if kind is FrameKind.MIXED:
        has_chunk = any(row.length > row.first + 1 for row in rows)
        return Phase.PREFILL if has_chunk else Phase.DECODE
    return Phase.PREFILL if kind is FrameKind.PREFILL else Phase.DECODE


class StageWorker:
    """The loop of every rank but the master's.

    Args:
        runner: the loaded layers.
        communicator: the ring.
        clock: collects busy times.
    """

    def __init__(
        self, *, runner: StageRunner, communicator: Communicator, clock: StageClock
    ) -> None:
        self._runner = runner
        self._communicator = communicator
        self._clock = clock

    def run(self) -> None:
        """Say that the stage is ready, then serve until the master ends the run.

        Raises:
            StageError: a peer is gone, or a stage before this one reports that it failed.
        """
        self._communicator.send(Frame(kind=FrameKind.READY))
        while True:
            frame = self._communicator.recv()
            if frame.kind in STEP_KINDS:
                self._communicator.send(self._compute(frame))
            elif frame.kind is FrameKind.SHUTDOWN:
                self._communicator.send(self._stats())
                self._communicator.send(frame)
                return
            elif frame.kind is FrameKind.ERROR:
                raise error_from_frame(frame)
            else:
                self._communicator.send(frame)

    def _compute(self, frame: Frame) -> Frame:
        assert frame.hidden is not None
        waiting_s = self._clock.now()
        rows = self._runner.acquire(frame.rows)
        start = self._clock.now()
        self._clock.wait_s += start - waiting_s
        hidden = self._runner.run(frame.hidden, rows)
        synchronize(self._runner.device)
        self._runner.release(frame.rows)
        answer = micro_batch_frame(frame.kind, frame.micro_batch, frame.rows, hidden)
        spent_s = self._clock.now() - start
        phase = phase_of(frame.kind, frame.rows)
        tokens = tokens_read(phase, [row.length for row in frame.rows], self._runner.device)
        self._clock.record(phase, len(frame.rows), spent_s, tokens)
        return answer

    def _stats(self) -> Frame:
        stats = self._clock.stats(self._communicator.rank, self._runner.device)
        return Frame(kind=FrameKind.STATS, text=json.dumps(to_json(stats)).encode())


def micro_batch_frame(
    kind: FrameKind, micro_batch: int, rows: Sequence[Row], hidden: Tensor
) -> Frame:
    """Return the frame of a stage's output; a last stage's rows shrink to their last token."""
    if hidden.shape[1] < sum(row.length - row.first for row in rows):
        rows = [replace(row, first=row.length - 1) for row in rows]
    return Frame(kind=kind, micro_batch=micro_batch, rows=tuple(rows), hidden=hidden)
