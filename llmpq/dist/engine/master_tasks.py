"""What a loaded master does beside answering a file of prompts.

``serve`` answers batches of requests from the control channel of a session. ``run_teacher_forcing``
passes given tokens through the pipeline that serves: stages, frames, blocks and kernels are those
of generation, but the last stage returns every token of a row instead of its last one. Every
micro-batch is a prefill into the same blocks; a stage computes them in order.

Shapes: R rows (sequences), T tokens a row, H hidden size.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import numpy as np
from torch import Tensor

from llmpq.dist.engine.batch_run import FinishedAnswer, result_of
from llmpq.dist.engine.engine import MAX_IDLE_WAIT_S
from llmpq.dist.engine.executor import PipelineExecutor, slot_row
from llmpq.dist.io.control_channel import ControlChannel, Message
from llmpq.dist.io.detokenizer import IncrementalDecoder
from llmpq.dist.io.prompts import (
    Request,
    RequestId,
    RequestLimits,
    Tokenizer,
    make_request,
    prompt_from_fields,
)
from llmpq.dist.io.results import result_to_json
from llmpq.dist.launch.rank import (
    MasterRank,
    RankContext,
    load_master_of,
    load_runner,
    master_rank,
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
from llmpq.spec.fields import Fields
from llmpq.spec.precision import Phase

CANCEL_POLL_S = 0.02
"""How often a running batch looks for ``cancel``."""


def serve(
    context: RankContext,
    channel: ControlChannel,
    tokenizer: Tokenizer | None,
    limits: RequestLimits,
) -> Measurement:
    """Answer batches of requests until the other end closes the channel.

    Args:
        context: of rank 0.
        channel: where the requests come from.
        tokenizer: of the model, ``None`` when it has none.
        limits: limits and defaults of requests.

    Raises:
        LlmpqError: what went wrong here or on any other rank.
    """
    with master_rank(context) as master:
        with contextlib.suppress(EOFError):
            channel.send(
                "ready",
                max_model_len=limits.context_tokens,
                vocab_size=limits.vocab_size,
                start_s=dict(context.recorder.start.seconds),
            )
            while True:
                message = channel.receive(MAX_IDLE_WAIT_S)
                if message is None:
                    master.check_stages()
                elif message["kind"] == "batch":
                    _Batch(channel, tokenizer, message).run(master, limits)
        return master.finish()


class _Batch:
    """The messages of one batch while the engine answers it."""

    def __init__(
        self, channel: ControlChannel, tokenizer: Tokenizer | None, message: Message
    ) -> None:
        self._channel = channel
        self._tokenizer = tokenizer
        self._message = message
        self._decoders: defaultdict[RequestId, IncrementalDecoder] = defaultdict(
            lambda: IncrementalDecoder(None if tokenizer is None else tokenizer.decode)
        )
        self._is_cancelled = False
        self._poll_s = 0.0

    def run(self, master: MasterRank, limits: RequestLimits) -> None:
        """Answer the batch, or refuse it whole."""
        try:
            requests = [
                make_request(
                    prompt_from_fields(Fields(line, f"prompt {line['id']}")),
                    limits,
                    self._tokenizer,
                )
                for line in self._message["prompts"]
            ]
        except SpecError as error:
            self._send(error=str(error))
            return
        on_tokens = self._send_tokens if self._message["streams"] else None
        master.answer(requests, self._send_result, on_tokens, self._should_abort)
        self._send(is_done=True)

    def _send_tokens(self, tokens: Sequence[tuple[Request, int]]) -> None:
        lines = [
            [request.id, token, self._decoders[request.id].add(token)] for request, token in tokens
        ]
        if lines:
            self._send(tokens=lines)

    def _send_result(self, answer: FinishedAnswer) -> None:
        self._send(result=result_to_json(result_of(answer, self._tokenizer)))

    def _send(self, **fields: object) -> None:
        # The batch ends in an orderly way also when no one reads its answers any more.
        try:
            self._channel.send("batch", id=self._message["id"], **fields)
        except EOFError:
            self._is_cancelled = True

    def _should_abort(self) -> bool:
        now_s = time.monotonic()
        if not self._is_cancelled and now_s >= self._poll_s:
            self._poll_s = now_s + CANCEL_POLL_S
            try:
                self._is_cancelled = self._channel.receive(0.0) is not None
            except EOFError:
                self._is_cancelled = True
        return self._is_cancelled


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
