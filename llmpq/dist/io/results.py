"""Results: JSON lines, one a request, appended when it finishes and never twice.

A line is ``{"id", "token_ids", "text", "finish_reason"}``, with ``"logprobs"`` and
``"prompt_logprobs"`` if a request asked for them. Needs no torch.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal, Self, cast

from llmpq.dist.io.prompts import RequestId, parse_line, request_id, token_ids_of
from llmpq.dist.io.sampling_params import MIN_LOGPROB, TokenLogprobs
from llmpq.errors import SpecError, StageError
from llmpq.spec.fields import Fields, encode_text

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The answer to a request.

    Attributes:
        id: as in the prompt file.
        token_ids: the new tokens, a stop token included.
        text: the new tokens as text, empty without a tokenizer.
        finish_reason: ``stop`` by a stop token, ``length`` by reaching ``max_new_tokens``.
        logprobs: of each new token, ``None`` where they were not asked for.
        prompt_logprobs: of each token of the prompt, ``None`` for the first; likewise.
    """

    id: RequestId
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


class LineWriter:
    """Appends JSON objects to a file; each is handed to the operating system before the next.

    The file keeps its lines, except a last one that was cut short.

    Args:
        path: the file, in an existing or a new directory.
        done: ids of the lines that it holds.
    """

    def __init__(self, path: str | Path, done: Iterable[Hashable] = ()) -> None:
        self._path = Path(path)
        self.done: frozenset[Hashable] = frozenset(done)
        self._written = set(self.done)
        self._error: StageError | None = None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = self._path.open("ab", buffering=0)
            self._end = len(_whole_lines(self._path))
            self._file.truncate(self._end)
        except OSError as error:
            raise SpecError(f"{path}: cannot be written: {error.strerror}") from None

    def write_line(self, id: Hashable, value: dict[str, Any]) -> None:
        """Append one line; ``StageError`` if the file cannot grow, which then takes no other."""
        assert id not in self._written, f"request {id!r} was answered twice"
        if self._error is not None:
            raise self._error
        text = json.dumps(value, ensure_ascii=False)
        line = encode_text(text) + b"\n"
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._error = StageError(
                f"{self._path}: cannot be written: {error.strerror}; it holds "
                f"{len(self._written)} answers, --resume goes on from there",
                is_permanent=True,
            )
            with contextlib.suppress(OSError):  # else the next reader drops the part of a line
                self._file.truncate(self._end)
            raise self._error from None
        self._end += len(line)
        self._written.add(id)

    def __enter__(self) -> Self:
        """Return itself; the file is open since construction."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the file."""
        self._file.close()


class ResultWriter(LineWriter):
    """Appends results to a file; with ``resume`` it keeps what an earlier run wrote."""

    def __init__(self, path: str | Path, *, resume: bool = False) -> None:
        super().__init__(path, finished_ids(path, resume=resume))

    def write(self, result: Result) -> None:
        """Append one result, as :meth:`LineWriter.write_line`."""
        self.write_line(result.id, result_to_json(result))


def finished_ids(path: str | Path, *, resume: bool, id_field: str = "id") -> list[RequestId]:
    """Return the ids of a result file; ``SpecError`` if it holds some and is not to resume.

    Args:
        path: of results, or of other lines with an id.
        resume: whether the file may hold something.
        id_field: name of the field with the id; results have ``id``.
    """
    path = Path(path)
    if not path.exists() or (path.is_file() and path.stat().st_size == 0):
        return []
    if not resume:
        raise SpecError(f"{path}: already exists; expected a new file, or --resume to continue it")
    if id_field == "id":
        return [result.id for result in read_results(path)]
    return [fields.text(id_field) for fields in read_lines(path)]


def read_results(path: str | Path) -> list[Result]:
    """Read a result file; a last line without its end is left out."""
    return [result_from_fields(fields) for fields in read_lines(path)]


def read_lines(path: str | Path) -> Iterator[Fields]:
    """Yield the objects of a file of JSON lines; a last line without its end is left out."""
    path = Path(path)
    for number, line in enumerate(_whole_lines(path).split(b"\n"), start=1):
        if line.strip():
            yield parse_line(path, number, line)


def result_to_json(result: Result) -> dict[str, Any]:
    """Return the JSON object of a result; :func:`result_from_fields` reads it back."""
    found = asdict(replace(result, logprobs=None, prompt_logprobs=None))
    for name, values in (
        ("logprobs", result.logprobs),
        ("prompt_logprobs", result.prompt_logprobs),
    ):
        del found[name]
        if values is not None:
            found[name] = [one and _logprobs_to_json(one) for one in values]
    return found


def _logprobs_to_json(one: TokenLogprobs) -> dict[str, Any]:
    return {
        "token_id": one.token_id,
        "logprob": _finite(one.logprob),
        "top": [[token, _finite(logprob)] for token, logprob in one.top],
    }


def _finite(logprob: float) -> float:
    """Return a number that JSON has."""
    return max(logprob, MIN_LOGPROB)


def result_from_fields(fields: Fields) -> Result:
    """Build a result from its JSON object, strictly."""
    logprobs, prompt_logprobs = _logprobs(fields, "logprobs"), _logprobs(fields, "prompt_logprobs")
    if logprobs is not None and None in logprobs:
        raise fields.error("logprobs", None, "the log probabilities of every token")
    result = Result(
        id=request_id(fields),
        token_ids=token_ids_of(fields, "token_ids"),
        text=str(fields.take("text")),
        finish_reason=cast(FinishReason, fields.text("finish_reason", ("stop", "length"))),
        logprobs=cast("tuple[TokenLogprobs, ...] | None", logprobs),
        prompt_logprobs=prompt_logprobs,
    )
    fields.done()
    return result


def _logprobs(fields: Fields, name: str) -> tuple[TokenLogprobs | None, ...] | None:
    """Take a field of log probabilities, ``None`` without one."""
    if not fields.has(name):
        return None
    value = fields.take(name)
    try:
        return tuple(None if one is None else _logprobs_from_json(one) for one in value)
    except (KeyError, TypeError, ValueError):
        expected = "objects of 'token_id', 'logprob' and 'top', pairs of token and log probability"
        raise fields.error(name, value, expected) from None


def _logprobs_from_json(one: Any) -> TokenLogprobs:
    return TokenLogprobs(
        int(one["token_id"]),
        float(one["logprob"]),
        tuple((int(token), float(logprob)) for token, logprob in one["top"]),
    )


def _whole_lines(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}") from None
    return data[: data.rfind(b"\n") + 1]
