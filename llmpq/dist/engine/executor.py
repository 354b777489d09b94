"""StepExecutor: computes the steps of an engine, over the stages of a plan.

A step is a flat list of the tokens of several sequences. A ``StageRunner`` runs the layers of one
stage; the master's ``PipelineExecutor`` embeds the tokens and sends a step from stage to stage,
each of which has a ``StageWorker``: receive, run layers, send. Several steps are in flight, one in
every stage and one between two stages. Where prefill and decode have stages of their own (WAA), the
master's layers only decode, and the steps of each phase come back in order.

Before a run, ``warm_up`` computes a micro-batch of each phase. First calls choose kernels and
allocate memory: on a CPU, the first prefill of a stage took 10 to 15 ms longer than the second.
Layers of the same bits have the same kernels, so one of them is enough for a prefill on a CPU, and
none where prompts run as compiled steps.

Shapes: R rows (sequences) with an output, V vocabulary, N tokens of all rows, H hidden size.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmpq.batching.blocks import BlockCopy, slot_blocks, slot_window_blocks
from llmpq.dist.engine.compiled_steps import StepRunner
from llmpq.dist.engine.cuda_graphs import DecodeGraphs, DecodeSizes
from llmpq.dist.kv.cache import KVCache
from llmpq.dist.kv.offload import MAX_COPIES, OffloadedKV, copies_of_frame, copy_frame
from llmpq.dist.kv.transfer import KVConnector
from llmpq.dist.metrics.stats import DeviceMarks, StageClock, synchronize, tokens_read
from llmpq.dist.transport.communicator import Communicator, error_from_frame
from llmpq.dist.transport.frames import Frame, FrameKind, Row
from llmpq.errors import StageError
from llmpq.kernels.cpu.experts import HostPool
from llmpq.models import DecoderStage, Master, PackedBatch
from llmpq.models.attention import on_device
from llmpq.spec.fields import to_json
from llmpq.spec.plan import MicroBatching, Plan, StageAssignment
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
        offload: host memory and files for blocks of the cache, ``None`` without any.
        returns_all: whether a last stage returns the hidden states of all tokens, which a layer for
            multi-token prediction reads.
        host: threads that compute experts in the host's memory, ``None`` without any.
    """

    layers: DecoderStage | None
    cache: KVCache | None
    device: torch.device
    is_last: bool
    kv_connector: KVConnector | None = None
    steps: StepRunner | None = None
    dtype: torch.dtype | None = None
    chunk_tokens: int = PROMPT_CHUNK_TOKENS
    offload: OffloadedKV | None = None
    returns_all: bool = False
    host: HostPool | None = None

    @property
    def returns_last(self) -> bool:
        """Whether only the last token of each row is returned."""
        return self.is_last and not self.returns_all

    def close(self) -> None:
        """Close links and files, write what waits to be written, end threads for experts."""
        if self.kv_connector is not None:
            self.kv_connector.close()
        if self.offload is not None:
            self.offload.close()
        if self.layers is not None and self.layers.streamed is not None:
            self.layers.streamed.close()
        if self.host is not None:
            self.host.close()

    def acquire(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Wait until the layers may run; return the rows as :meth:`run` wants them."""
        return rows if self.kv_connector is None else self.kv_connector.acquire(rows)

    def release(self, rows: Sequence[Row]) -> None:
        """Declare that :meth:`run` is done with the rows given to :meth:`acquire`."""
        if self.kv_connector is not None:
            self.kv_connector.release(rows)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> list[int]:
        """Make copies of blocks in order; return the places of those that could not be read."""
        return [] if self.offload is None else self.offload.copy(copies)

    def run(self, hidden: Tensor, rows: Sequence[Row], only: Sequence[int] | None = None) -> Tensor:
        """Run the layers over the tokens of one step, of long rows ``chunk_tokens`` at a time.

        Args:
            hidden: ``[1, N, H]``.
            rows: its sequences, one after the other.
            only: layers of the stage to run (from 0), operator by operator; by default all.

        Returns:
            ``[1, N, H]``; where ``returns_last``, ``[1, R, H]``, the last token of each row.
        """
        hidden = cast_hidden_states(hidden, self.device, self.dtype)
        self._copy_states([(row.from_slot, row.slot) for row in rows if row.from_slot >= 0])
        made = self._run_rows(hidden, rows, only)
        self._copy_states([(row.slot, row.to_slot) for row in rows if row.to_slot >= 0])
        return made

    def _copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        if copies and self.cache is not None and self.cache.states is not None:
            self.cache.states.copy(copies)

    def _run_rows(self, hidden: Tensor, rows: Sequence[Row], only: Sequence[int] | None) -> Tensor:
        batch = packed_batch_of(rows)
        if self.layers is not None and max(batch.counts) > self.chunk_tokens:
            return self._run_chunks(hidden, rows, only)
        hidden = self._run_layers(hidden, batch, only)
        if self.returns_last and not batch.is_decode:
            hidden = hidden[:, on_device(batch.last_tokens.numpy(), self.device)]
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
        width = len(rows) if self.returns_last else hidden.shape[1]
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
            if self.returns_last:
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
    is rounded once, on arrival (``llmpq.spec.devices.figures`` has what is exact).

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
        slots=[row.slot for row in rows],
        parent_slots=[row.parent_slot for row in rows],
    )


def slot_row(slot: int, tokens: tuple[int, int], max_tokens: int, *, window: int | None) -> Row:
    """Return the row of a sequence that has the blocks of a slot.

    Args:
        slot: its number.
        tokens: the first one of the step, and their number after it.
        max_tokens: tokens of every slot.
        window: largest window of the model, if layers with windows have blocks of their own.
    """
    first, length = tokens
    return Row(
        blocks=slot_blocks(slot, max_tokens, length),
        window_blocks=()
        if window is None
        else slot_window_blocks(slot, max_tokens, length, window),
        first=first,
        length=length,
        slot=slot,
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
            elif frame.kind is FrameKind.COPY:
                self._copy(frame)
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

    def _copy(self, frame: Frame) -> None:
        """Copy blocks; only what is read from files goes back to the master."""
        copies, unread = copies_of_frame(frame)
        unread = sorted({*unread, *self._runner.copy_blocks(copies)})
        if not self._runner.is_last or _reads_files(copies):
            self._communicator.send(copy_frame(copies, unread))

    def _stats(self) -> Frame:
        stats = self._clock.stats(self._communicator.rank, self._runner.device)
        return Frame(kind=FrameKind.STATS, text=json.dumps(to_json(stats)).encode())


def _reads_files(copies: Sequence[BlockCopy]) -> bool:
    """Return whether some of the copies may fail."""
    return any(copy.source == "disk" for copy in copies)


def micro_batch_frame(
    kind: FrameKind, micro_batch: int, rows: Sequence[Row], hidden: Tensor
) -> Frame:
    """Return the frame of a stage's output; a last stage's rows shrink to their last token."""
    if hidden.shape[1] < sum(row.length - row.first for row in rows):
        rows = [replace(row, first=row.length - 1) for row in rows]
    return Frame(kind=kind, micro_batch=micro_batch, rows=tuple(rows), hidden=hidden)


Ids = NDArray[np.int64]
FRAME_KINDS = {
    Phase.PREFILL: FrameKind.PREFILL,
    Phase.DECODE: FrameKind.DECODE,
    None: FrameKind.MIXED,
}


class StepResult(NamedTuple):
    """What a complete step made.

    ``scores`` are those of its outputs, ``[R, V]``, and ``states`` the final hidden states of its
    pooled rows, ``[R, H]``; ``None`` where it has no such row. ``all_states`` are those of all
    tokens, ``[N, H]``, from a last stage that returns them.
    """

    number: int
    scores: Tensor | None
    states: Tensor | None = None
    all_states: Tensor | None = None


class StepExecutor(Protocol):
    """Computes steps; those of one phase come back in the order in which they are dispatched."""

    def dispatch(
        self,
        number: int,
        phase: Phase | None,
        token_ids: Ids,
        rows: Sequence[Row],
        outputs: Sequence[int],
        pooled: Sequence[int] = (),
    ) -> None:
        """Start a step.

        Args:
            number: of the step.
            phase: of the step; ``None`` for one that mixes both.
            token_ids: of all rows, one after the other.
            rows: of the step.
            outputs: rows whose last token's scores are wanted.
            pooled: rows whose last token's final hidden state is wanted.

        Raises:
            StageError: a stage failed.
        """
        ...

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> Collection[int]:
        """Copy blocks on all stages, in order: after the steps before, before the next one.

        Returns:
            Places in ``copies`` of those that a stage could not read from a file.

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

    def collect(self) -> StepResult:
        """Return the next complete step. :meth:`end_step` follows.

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
    """A step in flight; ``hidden`` where the master alone computes it.

    ``marks`` are around the layers on a device that the host does not wait for.
    """

    kind: FrameKind
    rows: tuple[Row, ...]
    outputs: Sequence[int]
    pooled: Sequence[int]
    hidden: Tensor | None
    dispatch_s: float
    embed_s: float
    marks: DeviceMarks | None


class PipelineExecutor:
    """Computes steps over the stages of a pipeline, as the master.

    Args:
        master: the two ends of the model.
        runner: the first stage's own layers.
        communicator: the ring, or both; ``None`` when there is only one stage.
        clock: collects the master's busy times; ``None`` for none.
        prefill_runner: the master's part of a prefill where prefill has stages of its own.
        local_phases: phases that the master computes alone although there is a communicator.
        returns_all: whether the last stage returns the hidden states of all tokens.
    """

    def __init__(  # noqa: PLR0913  the parts of a pipeline
        self,
        *,
        master: Master,
        runner: StageRunner,
        communicator: Communicator | None,
        clock: StageClock | None = None,
        prefill_runner: StageRunner | None = None,
        local_phases: Collection[Phase] = (),
        returns_all: bool = False,
    ) -> None:
        self._returns_all = returns_all
        self._master = master
        self._runner = runner
        self._prefill_runner = prefill_runner
        self._communicator = communicator
        self._clock = clock or StageClock(micro_batching=MicroBatching(prefill=1, decode=1))
        self._local_phases = local_phases
        self._in_flight: dict[int, _SentStep] = {}  # by number, in order
        self._collected: tuple[_SentStep, float] | None = None
        self._arrived: deque[Frame] = deque()  # steps that came back while files were read

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> Collection[int]:
        """Copy blocks on all stages; wait for the other stages only where files are read."""
        unread = set(self._runner.copy_blocks(copies))
        if self._communicator is None:
            return unread
        for first in range(0, len(copies), MAX_COPIES):
            part = copies[first : first + MAX_COPIES]
            self._communicator.send(copy_frame(part))
            if _reads_files(part):
                unread.update(first + place for place in self._unread_elsewhere())
        return unread

    def _unread_elsewhere(self) -> list[int]:
        """Wait until a frame of copies is back; return what the other stages could not read."""
        assert self._communicator is not None
        while (frame := self._communicator.recv()).kind is not FrameKind.COPY:
            if frame.kind is FrameKind.ERROR:
                raise error_from_frame(frame)
            if frame.hidden is not None:  # a step, in memory that the next frame may be put into
                frame = replace(frame, hidden=frame.hidden.clone())
            self._arrived.append(frame)
        return copies_of_frame(frame)[1]

    def dispatch(
        self,
        number: int,
        phase: Phase | None,
        token_ids: Ids,
        rows: Sequence[Row],
        outputs: Sequence[int],
        pooled: Sequence[int] = (),
    ) -> None:
        """Embed the tokens, run the first stage and send the step on."""
        clock, runner, packed = self._clock, self._runner, tuple(rows)
        if phase is Phase.PREFILL and self._prefill_runner is not None:
            runner = self._prefill_runner
        waiting_s = clock.now()
        own_rows = runner.acquire(packed)
        start = clock.now()
        clock.wait_s += start - waiting_s
        ids = on_device(token_ids, runner.device)[None]  # [1, N]
        hidden = self._master.embed(ids, packed_batch_of(packed).positions)
        embed_s = clock.now() - start
        is_local = self._communicator is None or phase in self._local_phases
        # The host waits for a step that it computes alone when it reads the tokens, and only then.
        marks = DeviceMarks.of(runner.device) if is_local and outputs else None
        hidden = runner.run(hidden, own_rows)  # [1, N, H]
        if marks is not None:
            marks.end()
        elif phase is not None:  # its seconds are compared with a forecast by phase
            synchronize(runner.device)
        runner.release(packed)
        kind = FRAME_KINDS[phase]
        own_hidden = hidden if is_local else None
        self._in_flight[number] = _SentStep(
            kind, packed, outputs, pooled, own_hidden, clock.now() - start, embed_s, marks
        )
        if not is_local:
            assert self._communicator is not None
            self._communicator.send(
                Frame(kind=kind, micro_batch=number, rows=packed, hidden=hidden)
            )

    def has_result(self) -> bool:
        """Return whether :meth:`collect` would return or raise at once."""
        return (
            self._local() is not None
            or bool(self._arrived)
            or (self._communicator is not None and self._communicator.has_frame())
        )

    def await_result(self, longest_s: float) -> bool:
        """Wait until :meth:`collect` would return or raise at once; return whether it would."""
        if self._local() is not None or self._arrived or self._communicator is None:
            return True
        return self._communicator.await_frame(longest_s)

    def collect(self) -> StepResult:
        """Return the next complete step; see the protocol."""
        number, hidden = self.collect_hidden()
        assert self._collected is not None
        step, _ = self._collected
        if self._returns_all:
            return self._collect_all(number, step, hidden[0])
        if not (step.outputs or step.pooled):
            return StepResult(number, None)
        rows = cast_hidden_states(hidden[0], self._runner.device, self._runner.dtype)  # [R, H]
        states = self._master.head_inputs(rows_of(rows, step.pooled)) if step.pooled else None
        if not step.outputs:
            return StepResult(number, None, states)
        if len(step.outputs) < len(step.rows):
            rows = rows_of(rows, step.outputs)
        return StepResult(number, self._master.logits(rows), states)

    def _collect_all(self, number: int, step: _SentStep, hidden: Tensor) -> StepResult:
        """Return what a step made of the hidden states ``[N, H]`` of all its tokens."""
        tokens = cast_hidden_states(hidden, self._runner.device, self._runner.dtype)
        states = self._master.head_inputs(tokens)
        last = packed_batch_of(step.rows).last_tokens.to(states.device)
        scores = self._master.scores(states[last[list(step.outputs)]]) if step.outputs else None
        pooled = states[last[list(step.pooled)]] if step.pooled else None
        return StepResult(number, scores, pooled, states)

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
        seconds, master_s = step.dispatch_s + spent_s, step.embed_s + spent_s
        if step.marks is not None:  # the rest of the layers' time was spent waiting for tokens
            master_s = max(0.0, seconds - step.marks.seconds())
        tokens = tokens_read(phase, lengths, self._runner.device)
        self._clock.record(phase, len(lengths), seconds, tokens, master_s)

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
        frame = self._arrived.popleft() if self._arrived else self._communicator.recv()
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


def rows_of(values: Tensor, rows: Sequence[int]) -> Tensor:
    """Return rows in their order; without a copy where they follow each other."""
    if list(rows) == [*range(rows[0], rows[0] + len(rows))]:
        return values[rows[0] : rows[0] + len(rows)]
    return values.index_select(0, on_device(np.array(rows), values.device))


WARM_UP_TOKENS = 4096
"""Most tokens of a prefill to warm up with."""


@torch.inference_mode()
def warm_up(
    plan: Plan,
    stage: StageAssignment,
    runner: StageRunner,
    hidden_size: int,
    dtype: torch.dtype,
    window: int | None = None,
) -> None:
    """Run a stage's layers on zeros, at the plan's sizes, in the phases that it computes.

    On a CPU, prefill runs one layer of each variant, or none where prompts are compiled.

    What it writes to the blocks is overwritten or masked later. ``window`` is the model's largest,
    if layers with windows have blocks of their own.
    """
    work, sizes = plan.workload, plan.micro_batching
    if runner.layers is None:
        return
    prompt = min(work.max_prompt_tokens, PROMPT_CHUNK_TOKENS)
    rows = min(sizes.prefill, max(1, WARM_UP_TOKENS // prompt))
    one_each = None
    if runner.device.type == "cpu":
        variants = stage.variants
        one_each = [i for i, one in enumerate(variants) if one not in variants[:i]]
    is_compiled = runner.steps is not None and runner.steps.takes_prompts
    steps = []
    if stage.computes(Phase.PREFILL) and not is_compiled:
        steps.append((rows, 0, prompt, one_each))
    if work.new_tokens > 1 and stage.computes(Phase.DECODE):
        steps.append((sizes.decode, work.prompt_tokens, work.prompt_tokens + 1, None))
    _, max_tokens = plan.slots_of(stage)
    for count, first, length, only in steps:
        tokens = count * (length - first)
        hidden = torch.zeros(1, tokens, hidden_size, dtype=dtype, device=runner.device)
        micro_batch = [
            slot_row(slot, (first, length), max_tokens, window=window) for slot in range(count)
        ]
        runner.run(hidden, micro_batch, only)
    synchronize(runner.device)


def capture_decode_steps(runner: StageRunner, sizes: DecodeSizes, reserve_bytes: int) -> bool:
    """Capture a stage's decode steps as CUDA graphs; return False where it has none.

    Called last, when everything else of the process has its memory.

    Args:
        runner: of the stage.
        sizes: of its decode steps.
        reserve_bytes: memory that prompts and uncaptured steps need.
    """
    if not isinstance(runner.steps, DecodeGraphs):
        return False
    runner.steps.capture(sizes.shapes(), sizes.most_tokens, reserve_bytes=reserve_bytes)
    synchronize(runner.device)
    return True


@torch.inference_mode()
def warm_up_master(plan: Plan, master: Master, runner: StageRunner) -> None:
    """Embed and project as a micro-batch of either phase would."""
    work, sizes = plan.workload, plan.micro_batching
    for rows, tokens in ((sizes.prefill, work.max_prompt_tokens), (sizes.decode, 1)):
        count = min(tokens, WARM_UP_TOKENS)
        ids = torch.zeros(1, rows * count, dtype=torch.int64, device=runner.device)
        hidden = master.embed(ids, torch.arange(count).repeat(rows)[None])
        master.logits(hidden[0, :rows])
    synchronize(runner.device)
