"""ControlChannel: JSON objects, one a line, between a client and the master's process.

Messages have a ``kind``. From the master: ``ready`` once all ranks are loaded, with ``start_s``,
the seconds of each step of the start, and limits of requests.

To a master with the task ``serve``: ``batch`` (``id``, ``prompts``, ``streams``) starts a batch,
``abort`` ends it early. From it: ``batch`` (``id``) with ``tokens`` after each step of one that
streams, with the ``result`` of each finished request, and at last with ``is_done``, or with an
``error`` when a request cannot be served.

To a master with the task ``online``: ``add`` (a request, with the tokens that its client has) and
``abort`` (``id``). From it: ``refused`` (``id``, ``message``) for a request that cannot be served,
``started`` (``ids``) before requests are computed or their forms compiled, ``tokens`` (``outputs``)
after a step, ``stats`` (``stats``) many times a second. Needs no torch.
"""

from __future__ import annotations

import base64
import json
import select
import socket
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

from llmpq.dist.io.generation import GenerationRequest, TokenOutput
from llmpq.dist.io.sampling_params import (
    SamplingParams,
    TokenLogprobs,
    logprobs_from_json,
    logprobs_to_json,
)
from llmpq.errors import LlmpqError, SpecError
from llmpq.spec.fields import Fields, from_json, to_json

CHUNK_BYTES = 1 << 18
Message = dict[str, Any]


class ControlChannel:
    """One end of a channel; owns its connected stream.

    Raises:
        EOFError: by ``send`` and ``receive``, once the other end is closed.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lines: deque[bytes] = deque()
        self._rest: list[bytes] = []  # of a line whose end has not arrived

    def send(self, kind: str, **fields: object) -> None:
        """Send a message; blocks while the other end does not read."""
        line = json.dumps({"kind": kind, **fields}).encode()
        try:
            self._sock.sendall(line + b"\n")
        except OSError as error:
            raise EOFError(str(error)) from None

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """Return the next message, ``None`` when none arrives within ``timeout_s``."""
        while not self._lines:
            if not select.select([self._sock], [], [], timeout_s)[0]:
                return None
            self._read()
        message: Message = json.loads(self._lines.popleft())
        return message

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()

    def _read(self) -> None:
        try:
            data = self._sock.recv(CHUNK_BYTES)
        except OSError as error:
            raise EOFError(str(error)) from None
        if not data:
            raise EOFError("end of stream")
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = b"".join([*self._rest, lines[0]])
            self._rest = []
        self._lines.extend(lines)
        self._rest.append(rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What the model and the plan allow a request.

    Attributes:
        max_model_len: most tokens of prompt and answer together.
        vocab_size: tokens are below this number.
        eos_token_ids: the model's end tokens.
        max_tokens: most new tokens of a request that asks for no number; ``None`` for as many as
            fit.
    """

    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedRequest:
    """A request, and where its answer goes on.

    Attributes:
        request: as the client made it.
        token_ids: tokens of the answer that the client has; none but after a restart.
        needs_prompt_logprobs: whether the client has not got the log probabilities of the prompt.
        arrival_s: when the client made it, in seconds on the monotonic clock of the host that both
            ends share; ``None`` for when the engine receives it.
    """

    request: GenerationRequest
    token_ids: tuple[int, ...] = ()
    needs_prompt_logprobs: bool = False
    arrival_s: float | None = None


def added_to_json(added: AddedRequest) -> dict[str, Any]:
    """Return the fields of a message ``add``."""
    request = added.request
    return {
        "id": request.id,
        "prompt_token_ids": request.prompt_token_ids,
        "sampling_params": to_json(request.sampling),
        "priority": request.priority,
        "cache_salt": request.cache_salt,
        "group": request.group,
        "pooling": request.pooling,
        "token_ids": added.token_ids,
        "needs_prompt_logprobs": added.needs_prompt_logprobs,
        "arrival_s": added.arrival_s,
    }


def added_from_json(fields: dict[str, Any]) -> AddedRequest:
    """Return the request of a message ``add``.

    Raises:
        SpecError: its sampling parameters are not acceptable.
    """
    sampling = Fields(fields["sampling_params"], "sampling_params")
    return AddedRequest(
        request=GenerationRequest(
            id=fields["id"],
            prompt_token_ids=tuple(fields["prompt_token_ids"]),
            sampling=from_json(SamplingParams, sampling),
            priority=fields["priority"],
            cache_salt=fields["cache_salt"],
            group=fields["group"],
            pooling=fields["pooling"],
        ),
        token_ids=tuple(fields["token_ids"]),
        needs_prompt_logprobs=fields["needs_prompt_logprobs"],
        arrival_s=fields["arrival_s"],
    )


def output_to_json(id: str, output: TokenOutput) -> list[Any]:
    """Return an item of a message ``tokens``."""
    return [
        id,
        output.token_ids,
        output.logprobs and logprobs_to_json(output.logprobs),
        output.prompt_logprobs and logprobs_to_json(output.prompt_logprobs),
        output.finish_reason,
        output.stop_reason,
        output.num_cached_tokens,
        output.is_form_complete,
        output.embedding and base64.b64encode(output.embedding).decode(),
    ]


def output_from_json(item: Sequence[Any]) -> tuple[str, TokenOutput]:
    """Return the request's id and the output of an item of a message ``tokens``."""
    id, token_ids, logprobs, prompt_logprobs, finish_reason, stop_reason, cached, *rest = item
    is_form_complete, embedding = rest
    return id, TokenOutput(
        token_ids=tuple(token_ids),
        logprobs=logprobs and cast("tuple[TokenLogprobs, ...]", logprobs_from_json(logprobs)),
        prompt_logprobs=prompt_logprobs and logprobs_from_json(prompt_logprobs),
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        num_cached_tokens=cached,
        is_form_complete=is_form_complete,
        embedding=embedding and base64.b64decode(embedding),
    )


def new_tokens_of(added: AddedRequest, model: ModelLimits) -> int:
    """Return the most new tokens of a request, those that it has included.

    Raises:
        SpecError: it is not acceptable: no prompt, too long, or tokens outside the vocabulary.
    """
    request = added.request
    request.sampling.check_tokens(model.vocab_size)
    _check_prompt(request.prompt_token_ids, model)
    room = model.max_model_len - len(request.prompt_token_ids)
    asked = request.sampling.max_tokens or model.max_tokens or room
    if request.sampling.max_tokens is None:
        asked = min(asked, room)
    if asked > room:
        raise SpecError(
            f"prompt: found {len(request.prompt_token_ids)} prompt tokens and {asked} new ones, "
            f"expected together at most {model.max_model_len}"
        )
    if len(added.token_ids) >= asked:
        raise LlmpqError(f"request {request.id}: found {len(added.token_ids)} of {asked} tokens")
    return asked


def _check_prompt(token_ids: Collection[int], model: ModelLimits) -> None:
    if not 0 < len(token_ids) < model.max_model_len:
        raise SpecError(
            f"prompt: found {len(token_ids)} tokens, expected 1 to {model.max_model_len - 1}"
        )
    for token in token_ids:
        if not 0 <= token < model.vocab_size:
            raise SpecError(
                f"prompt: found token {token}, expected tokens below the vocabulary of "
                f"{model.vocab_size}"
            )
