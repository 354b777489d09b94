"""Results: JSON lines, one a request, appended when it finishes and never twice.

A line is ``{"id", "token_ids", "text", "finish_reason"}``. Needs no torch.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, cast

from llmpq.dist.io.prompts import RequestId, json_lines, request_id, token_ids_of
from llmpq.errors import SpecError
from llmpq.spec.fields import Fields

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of a request.

    Attributes:
        id: as in the prompt file.
        token_ids: the new tokens, a stop token included.
        text: the same as text, empty without a tokenizer.
        finish_reason: ``stop`` by a stop token, ``length`` by reaching ``max_new_tokens``.
    """

    id: RequestId
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason


class ResultWriter:
    """Appends results to a file; each reaches the disk's queue before the next is made.

    Args:
        path: the file, in an existing or a new directory.
        resume: keep what an earlier run wrote; a last line cut short by its end is dropped.

    Raises:
        SpecError: the file holds something and ``resume`` is false, or it is not a result file.
    """

    def __init__(self, path: str | Path, *, resume: bool = False) -> None:
        self._path = Path(path)
        self.done: frozenset[RequestId] = frozenset(finished_ids(self._path, resume=resume))
        self._written = set(self.done)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = self._path.open("ab")
            self._file.truncate(_end_of_last_line(self._path))
        except OSError as error:
            raise SpecError(f"{path}: cannot be written: {error.strerror}") from None

    def write(self, result: Result) -> None:
        """Append one result; a second one of the same id is our own bug."""
        assert result.id not in self._written, f"request {result.id!r} was answered twice"
        self._written.add(result.id)
        line = json.dumps(result_to_json(result), ensure_ascii=False)
        self._file.write(line.encode() + b"\n")
        self._file.flush()

    def __enter__(self) -> ResultWriter:
        """Return itself; the file is open since construction."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the file."""
        self._file.close()


def finished_ids(path: str | Path, *, resume: bool) -> list[RequestId]:
    """Return the ids of a result file's whole lines, in order.

    Raises:
        SpecError: the file holds something and ``resume`` is false, or it is not a result file.
    """
    path = Path(path)
    if not path.exists() or (path.is_file() and path.stat().st_size == 0):
        return []
    if not resume:
        raise SpecError(f"{path}: already exists; expected a new file, or --resume to continue it")
    return [result.id for result in read_results(path)]


def read_results(path: str | Path) -> list[Result]:
    """Read a result file; a last line without its end is left out."""
    path = Path(path)
    end = _end_of_last_line(path)
    return [result_from_fields(fields) for _, fields in json_lines(path, end=end)]


def result_from_fields(fields: Fields) -> Result:
    """Build a result from its JSON object, strictly."""
    result = Result(
        id=request_id(fields),
        token_ids=token_ids_of(fields, "token_ids"),
        text=str(fields.take("text")),
        finish_reason=cast(FinishReason, fields.text("finish_reason", ("stop", "length"))),
    )
    fields.done()
    return result


def result_to_json(result: Result) -> dict[str, Any]:
    """Return the JSON object of a result, a line of a result file."""
    return asdict(result)


def _end_of_last_line(path: Path) -> int:
    """Return how many bytes of the file are whole lines."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}") from None
    return data.rfind(b"\n") + 1
