"""The master of a session: loads once, then answers batches of requests from a control channel."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Sequence

from llmpq.dist.engine.batch_run import MAX_IDLE_WAIT_S, FinishedAnswer, result_of
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
from llmpq.dist.launch.rank import MasterRank, RankContext, master_rank
from llmpq.dist.metrics.measurement import Measurement
from llmpq.errors import SpecError
from llmpq.spec.fields import Fields

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
            channel.send("ready")
            while True:
                message = channel.receive(MAX_IDLE_WAIT_S)
                if message is None:
                    master.check_stages()
                elif message["kind"] == "batch":
                    _Batch(channel, tokenizer, streams=message["streams"]).run(
                        master, message, limits
                    )
        return master.finish()


class _Batch:
    """The messages of one batch while the engine answers it."""

    def __init__(
        self, channel: ControlChannel, tokenizer: Tokenizer | None, *, streams: bool
    ) -> None:
        self._channel = channel
        self._tokenizer = tokenizer
        self._streams = streams
        self._decoders: defaultdict[RequestId, IncrementalDecoder] = defaultdict(
            lambda: IncrementalDecoder(None if tokenizer is None else tokenizer.decode)
        )
        self._is_cancelled = False
        self._poll_s = 0.0

    def run(self, master: MasterRank, message: Message, limits: RequestLimits) -> None:
        """Answer the batch, or refuse it whole.

        Raises:
            EOFError: the other end is closed.
        """
        try:
            requests = [
                make_request(
                    prompt_from_fields(Fields(line, f"prompt {line['id']}")),
                    limits,
                    self._tokenizer,
                )
                for line in message["prompts"]
            ]
        except SpecError as error:
            self._channel.send("refused", message=str(error))
            return
        on_tokens = self._send_tokens if self._streams else None
        master.answer(requests, self._send_result, on_tokens, self._should_abort)
        self._channel.send("done")

    def _send_tokens(self, tokens: Sequence[tuple[Request, int]]) -> None:
        lines = [
            [request.id, token, self._decoders[request.id].add(token)] for request, token in tokens
        ]
        if lines:
            self._send("tokens", tokens=lines)

    def _send_result(self, answer: FinishedAnswer) -> None:
        self._send("result", result=result_to_json(result_of(answer, self._tokenizer)))

    def _send(self, kind: str, **fields: object) -> None:
        # The batch ends in an orderly way also when no one reads its answers any more.
        try:
            self._channel.send(kind, **fields)
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
