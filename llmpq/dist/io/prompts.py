"""Prompts: JSON lines, read strictly.

A line is ``{"id", "prompt"}`` or ``{"id", "prompt_token_ids"}`` with optional ``max_new_tokens``,
``stop_token_ids``, ``ignore_eos`` and ``sampling_params``. Errors name the file, the line and the
field. Needs no torch, so that a command can check prompts before it starts a rank.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from llmpq.dist.io.sampling_params import GREEDY, SamplingParams
from llmpq.dist.io.structured_outputs import grammar_of
from llmpq.errors import SpecError
from llmpq.spec.fields import Fields, decode_text, encoding_of, from_json, to_json
from llmpq.spec.model import ModelSpec
from llmpq.spec.plan import Plan

MAX_LINE_BYTES = 64 * 1024 * 1024
MAX_ARRIVAL_S = 366 * 24 * 3600.0
MAX_ID_LENGTH = 1024

RequestId = str | int


class Tokenizer(Protocol):
    """Text to tokens and back."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt, special tokens as the model expects them."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of an answer, without special tokens."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One line of a prompt file.

    Attributes:
        id: chosen by the user, unique in the file.
        where: file and line, for error messages.
        text: the prompt, or ``None`` if it was given as tokens.
        token_ids: the prompt as tokens, or ``None``.
        max_new_tokens: most new tokens; ``None`` is the plan's number.
        stop_token_ids: tokens that end the answer.
        ignore_eos: whether the answer goes on after the model's own end tokens.
        arrival_s: arrival in seconds after the start of the run.
        sampling_params: how its tokens are chosen; ``None`` is as all others.
    """

    id: RequestId
    where: str
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    max_new_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    arrival_s: float = 0.0
    sampling_params: SamplingParams | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt that fits the plan and the model.

    ``stop_token_ids`` end the answer, as its last token; ``arrival_s`` counts from the start of the
    run. Lengths and stop tokens of ``sampling_params`` are in the other fields.
    """

    id: RequestId
    prompt_token_ids: tuple[int, ...]
    max_new_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    arrival_s: float = 0.0
    sampling_params: SamplingParams = GREEDY


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Largest prompt and answer that plan and model allow, and defaults of a prompt file.

    Attributes:
        prompt_tokens: longest prompt.
        context_tokens: longest sequence.
        new_tokens: most new tokens of a prompt that asks for no number.
        max_positions: longest sequence of the model, ``None`` when unlimited.
        eos_token_ids: the model's own end tokens.
        sampling_params: those of prompts without parameters of their own.
        missing_tokenizer: what to say where the model has none.
        scores_prompts: whether log probabilities of prompts can be returned.
    """

    prompt_tokens: int
    context_tokens: int
    new_tokens: int
    max_positions: int | None
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()
    sampling_params: SamplingParams = GREEDY
    missing_tokenizer: str = "the model has no tokenizer"
    scores_prompts: bool = True


def request_limits(
    plan: Plan,
    model: ModelSpec,
    eos_token_ids: Iterable[int],
    sampling: SamplingParams = GREEDY,
) -> RequestLimits:
    """Return the limits of requests for this plan and model."""
    return RequestLimits(
        prompt_tokens=plan.workload.max_prompt_tokens if plan.is_split else plan.longest_sequence,
        context_tokens=plan.longest_sequence,
        new_tokens=plan.workload.new_tokens,
        max_positions=model.max_positions,
        vocab_size=model.vocab_size,
        eos_token_ids=frozenset(eos_token_ids),
        sampling_params=sampling,
        scores_prompts=not plan.is_split,
    )


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read a prompt file; ``SpecError`` names the first line that is not a prompt."""
    prompts, refused = sort_prompts(path)
    if refused:
        raise refused[0]
    return prompts


def sort_prompts(path: str | Path) -> tuple[list[Prompt], list[SpecError]]:
    """Read a prompt file; return its prompts, and an error for each other line."""
    path = Path(path)
    prompts: list[Prompt] = []
    refused: list[SpecError] = []
    first_line: dict[RequestId, int] = {}
    for number, line in lines_of(path):
        try:
            fields = parse_line(path, number, line)
            prompt = prompt_from_fields(fields)
            if prompt.id in first_line:
                raise fields.error(
                    "id", prompt.id, f"an id not yet used in line {first_line[prompt.id]}"
                )
        except SpecError as error:
            refused.append(error)
            continue
        first_line[prompt.id] = number
        prompts.append(prompt)
    if not (prompts or refused):
        raise SpecError(f"{path}: found no prompts, expected at least one line")
    return prompts, refused


def sort_requests(
    prompts: Iterable[Prompt], limits: RequestLimits, tokenizer: Tokenizer | None
) -> tuple[list[Request], list[SpecError]]:
    """Turn prompts into requests; return the errors of those that cannot be served."""
    requests: list[Request] = []
    refused: list[SpecError] = []
    for prompt in prompts:
        try:
            requests.append(make_request(prompt, limits, tokenizer))
        except SpecError as error:
            refused.append(error)
    return requests, refused


def make_request(prompt: Prompt, limits: RequestLimits, tokenizer: Tokenizer | None) -> Request:
    """Turn a prompt into tokens; ``SpecError`` if it does not fit the plan and the model."""
    token_ids = prompt.token_ids
    if token_ids is None:
        if tokenizer is None:
            raise SpecError(
                f"{prompt.where}: field 'prompt': found text, but {limits.missing_tokenizer}; "
                "expected 'prompt_token_ids'"
            )
        token_ids = tuple(tokenizer.encode(prompt.text or ""))
    _check_tokens(prompt.where, "prompt_token_ids", token_ids, limits.vocab_size)
    _check_tokens(prompt.where, "stop_token_ids", prompt.stop_token_ids, limits.vocab_size)
    sampling = prompt.sampling_params or limits.sampling_params
    try:
        sampling.check_tokens(limits.vocab_size)
        if sampling.prompt_logprobs is not None and not limits.scores_prompts:
            raise SpecError(
                "prompt_logprobs: found a number, expected none: this plan has stages of their own "
                "for prefill and for decode"
            )
        if sampling.structured_outputs is not None:
            grammar_of(sampling.structured_outputs)
    except SpecError as error:
        raise SpecError(f"{prompt.where}: {error}") from None
    new_tokens = prompt.max_new_tokens or sampling.max_tokens or limits.new_tokens
    _check_lengths(prompt.where, len(token_ids), new_tokens, limits)
    stops = {*prompt.stop_token_ids, *sampling.stop_token_ids}
    if not (prompt.ignore_eos or sampling.ignore_eos):
        stops |= limits.eos_token_ids
    return Request(
        id=prompt.id,
        prompt_token_ids=token_ids,
        max_new_tokens=new_tokens,
        stop_token_ids=frozenset(stops),
        arrival_s=prompt.arrival_s,
        sampling_params=sampling,
    )


def write_prompts(path: str | Path, prompts: Iterable[Prompt]) -> None:
    """Write a prompt file that :func:`read_prompts` reads back."""
    with Path(path).open("w", encoding="utf-8") as file:
        for prompt in prompts:
            file.write(json.dumps(prompt_to_json(prompt), ensure_ascii=False) + "\n")


def prompt_to_json(prompt: Prompt) -> dict[str, Any]:
    """Return the JSON object of a prompt, a line of a prompt file."""
    line: dict[str, Any] = {"id": prompt.id}
    if prompt.token_ids is None:
        line["prompt"] = prompt.text
    else:
        line["prompt_token_ids"] = list(prompt.token_ids)
    if prompt.max_new_tokens is not None:
        line["max_new_tokens"] = prompt.max_new_tokens
    if prompt.arrival_s:
        line["arrival_s"] = prompt.arrival_s
    if prompt.sampling_params is not None:
        line["sampling_params"] = to_json(prompt.sampling_params)
    return line | {
        "stop_token_ids": list(prompt.stop_token_ids),
        "ignore_eos": prompt.ignore_eos,
    }


def lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield number and bytes in UTF-8 of every line that is not blank, without a mark."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(_in_utf8(path, file), start=1):
                if line.strip():
                    yield number, line
    except FileNotFoundError:
        raise SpecError(f"{path}: no such file") from None
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}") from None


def _in_utf8(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file; only those of UTF-16 are decoded, and encoded again."""
    first = file.readline()
    if encoding_of(first) == "utf-16":
        yield from decode_text(first + file.read(), str(path)).encode().splitlines(keepends=True)
        return
    yield first.removeprefix(codecs.BOM_UTF8)
    yield from file


def parse_line(path: Path, number: int, line: bytes) -> Fields:
    """Return the object of a line; ``SpecError`` names the line."""
    if len(line) > MAX_LINE_BYTES:
        raise SpecError(f"{path}: line {number}: longer than {MAX_LINE_BYTES} bytes")
    try:
        return Fields(json.loads(line.decode("utf-8")), f"{path}: line {number}")
    except SpecError:
        raise
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{path}: line {number}: not JSON: {error}") from None


def prompt_from_fields(fields: Fields) -> Prompt:
    """Build a prompt from its JSON object, strictly."""
    name = request_id(fields)
    text, token_ids = None, None
    if fields.has("prompt_token_ids") == fields.has("prompt"):
        raise SpecError(
            f"{fields.where}: expected exactly one of the fields 'prompt' and 'prompt_token_ids'"
        )
    if fields.has("prompt_token_ids"):
        token_ids = token_ids_of(fields, "prompt_token_ids", minimum=1)
    else:
        text = _unicode(fields, "prompt", fields.text("prompt"))
    prompt = Prompt(
        id=name,
        where=fields.where,
        text=text,
        token_ids=token_ids,
        max_new_tokens=fields.optional_integer("max_new_tokens", minimum=1),
        stop_token_ids=(
            token_ids_of(fields, "stop_token_ids") if fields.has("stop_token_ids") else ()
        ),
        ignore_eos=fields.flag("ignore_eos") if fields.has("ignore_eos") else False,
        arrival_s=fields.number("arrival_s", maximum=MAX_ARRIVAL_S)
        if fields.has("arrival_s")
        else 0.0,
        sampling_params=from_json(SamplingParams, fields.child("sampling_params"))
        if fields.has("sampling_params")
        else None,
    )
    fields.done()
    return prompt


def request_id(fields: Fields) -> RequestId:
    """Take the field ``id``."""
    name: Any = fields.take("id")
    is_number = isinstance(name, int) and not isinstance(name, bool)
    if not is_number and not (isinstance(name, str) and 0 < len(name) <= MAX_ID_LENGTH):
        raise fields.error("id", name, f"a whole number or 1 to {MAX_ID_LENGTH} characters")
    return name if is_number else _unicode(fields, "id", name)


def _unicode(fields: Fields, field: str, text: str) -> str:
    """Return the text if it is valid Unicode; JSON may also hold lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise fields.error(field, text, "text without lone surrogates") from None
    return text


def token_ids_of(fields: Fields, field: str, minimum: int = 0) -> tuple[int, ...]:
    """Take a field that lists tokens."""
    values = fields.items(field, minimum)
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise fields.error(field, value, "whole numbers of tokens")
    return tuple(values)


def _check_tokens(where: str, field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise SpecError(
                f"{where}: field '{field}': found token {token}, "
                f"expected tokens below the vocabulary of {vocab_size}"
            )


def _check_lengths(where: str, prompt: int, new_tokens: int, limits: RequestLimits) -> None:
    if prompt == 0:
        raise SpecError(f"{where}: field 'prompt': found no tokens, expected at least one")
    found = f"{where}: found {prompt} prompt tokens"
    together = f"{found} and {new_tokens} new ones, expected together at most the"
    if limits.max_positions is not None and prompt + new_tokens > limits.max_positions:
        raise SpecError(f"{together} model's {limits.max_positions} positions")
    if prompt > limits.prompt_tokens:
        raise SpecError(
            f"{found}, expected at most the {limits.prompt_tokens} that the plan holds memory for"
        )
    if prompt + new_tokens > limits.context_tokens:
        raise SpecError(f"{together} {limits.context_tokens} that the plan holds memory for")
