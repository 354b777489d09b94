"""Trace: when requests come, how long their prompts are and how many tokens they get.

Two CSV layouts are read: our own, ``arrival_s,prompt_tokens,new_tokens`` (``#`` lines above carry
provenance), and that of the public Azure traces, ``TIMESTAMP,ContextTokens,GeneratedTokens``.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from llmpq.errors import SpecError
from llmpq.spec.fields import write_text
from llmpq.spec.lengths import LengthDistribution

HEADER = ("arrival_s", "prompt_tokens", "new_tokens")
AZURE_HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MAX_TOKENS = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request.

    Attributes:
        arrival_s: seconds after the start of the trace.
        prompt_tokens, new_tokens: at least one each.
    """

    arrival_s: float
    prompt_tokens: int
    new_tokens: int

    def __post_init__(self) -> None:
        if not (self.arrival_s >= 0 and self.prompt_tokens >= 1 and self.new_tokens >= 1):
            raise SpecError(
                f"trace: found a request at {self.arrival_s} s with {self.prompt_tokens} prompt "
                f"and {self.new_tokens} new tokens, expected at least 0 s, 1 and 1"
            )


def draw_trace(
    count: int,
    prompt_tokens: LengthDistribution,
    new_tokens: LengthDistribution,
    *,
    requests_per_s: float | None = None,
    seed: int = 0,
) -> tuple[TraceRequest, ...]:
    """Draw requests with independent lengths.

    Args:
        count: how many.
        prompt_tokens: law of the prompts' lengths.
        new_tokens: law of the answers' lengths.
        requests_per_s: rate of Poisson arrivals; ``None`` is all at once.
        seed: of the chance.
    """
    if count < 1 or (requests_per_s is not None and not requests_per_s > 0):
        raise SpecError(
            f"trace: found {count} requests at {requests_per_s} a second, expected at least one "
            "and a positive rate"
        )
    chance = random.Random(seed)
    prompts = prompt_tokens.sample(count, chance)
    answers = new_tokens.sample(count, chance)
    now_s = 0.0
    trace = []
    for prompt, answer in zip(prompts, answers, strict=True):
        if requests_per_s is not None:
            now_s += chance.expovariate(requests_per_s)
        trace.append(TraceRequest(arrival_s=now_s, prompt_tokens=prompt, new_tokens=answer))
    return tuple(trace)


def load_trace(path: str | Path) -> tuple[TraceRequest, ...]:
    """Read a trace, in order of arrival.

    Raises:
        SpecError: the file cannot be read, has another header, no rows, or a row that is none.
    """
    path = Path(path)
    try:
        with path.open(newline="", encoding="utf-8") as file:
            requests = list(_rows(path, file))
    except FileNotFoundError:
        raise SpecError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SpecError(f"{path}: cannot be read: {error}") from None
    if not requests:
        raise SpecError(f"{path}: found no requests, expected at least one")
    return tuple(sorted(requests, key=lambda request: request.arrival_s))


def write_trace(
    path: str | Path, trace: Sequence[TraceRequest], provenance: Sequence[str] = ()
) -> None:
    """Write a trace in our own layout; :func:`load_trace` reads it back."""
    lines = [f"# {line}" for line in provenance]
    lines.append(",".join(HEADER))
    lines += [f"{item.arrival_s!r},{item.prompt_tokens},{item.new_tokens}" for item in trace]
    write_text(path, "\n".join(lines) + "\n")


def _rows(path: Path, lines: Iterable[str]) -> Iterator[TraceRequest]:
    header: tuple[str, ...] = ()
    first: datetime | None = None
    for number, row in enumerate(csv.reader(lines), start=1):
        if not row or row[0].startswith("#"):
            continue
        where = f"{path}: line {number}"
        if not header:
            header = _checked_header(where, row)
            continue
        if len(row) != len(header):
            raise SpecError(f"{where}: found {len(row)} columns, expected {len(header)}")
        if header == AZURE_HEADER:
            moment = _moment(where, row[0])
            first = first or moment
            arrival_s = (moment - first).total_seconds()
        else:
            arrival_s = _seconds(where, row[0])
        yield TraceRequest(
            arrival_s=arrival_s,
            prompt_tokens=_tokens(where, header[1], row[1]),
            new_tokens=_tokens(where, header[2], row[2]),
        )


def _checked_header(where: str, row: Sequence[str]) -> tuple[str, ...]:
    header = tuple(cell.strip() for cell in row)
    if header not in (HEADER, AZURE_HEADER):
        raise SpecError(
            f"{where}: found the header {','.join(header)[:80]}, expected {','.join(HEADER)} or "
            f"{','.join(AZURE_HEADER)}"
        )
    return header


def _tokens(where: str, field: str, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= MAX_TOKENS:
        raise SpecError(
            f"{where}: field '{field}': found '{text}', "
            f"expected a whole number in [1, {MAX_TOKENS}]"
        )
    return value


def _seconds(where: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e12:
        raise SpecError(f"{where}: field 'arrival_s': found '{text}', expected seconds from 0 on")
    return value


def _moment(where: str, text: str) -> datetime:
    # Azure writes seven digits of a second, one more than datetime keeps.
    whole, _, fraction = text.strip().partition(".")
    try:
        return datetime.fromisoformat(f"{whole}.{fraction[:6]:0<6}")
    except ValueError:
        raise SpecError(
            f"{where}: field 'TIMESTAMP': found '{text}', expected a date and a time"
        ) from None
