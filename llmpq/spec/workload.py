"""Workloads: what is asked of a model.

A ``Workload`` is a number of sequences, prompt length and tokens to generate. A
``LengthDistribution`` holds prompt or answer lengths in whole tokens: schedules are searched with
them (ExeGPT's P_E and P_D), and traces are drawn from them. A trace is requests with arrival time,
prompt length and answer length.

Two CSV layouts of traces are read: our own, ``arrival_s,prompt_tokens,new_tokens`` (``#`` lines
above carry provenance), and that of the public Azure traces,
``TIMESTAMP,ContextTokens,GeneratedTokens``. A file whose name ends with ``.jsonl`` has Mooncake's
layout, with ``timestamp`` in milliseconds, ``input_length``, ``output_length`` and ``hash_ids`` of
the prompt's blocks of 512 tokens.
"""

from __future__ import annotations

import json
import math
import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from llmpq.errors import SpecError, bad_field
from llmpq.spec.fields import (
    SCHEMA,
    Fields,
    Rule,
    encoding_of_file,
    from_json,
    read_fields,
    read_json,
)
from llmpq.spec.tables import read_csv, whole_number

MAX_BATCH = 1_000_000
MAX_TOKENS = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The offline task of LLM-PQ: a batch of requests of equal size.

    Attributes:
        batch: sequences held at once ``B``.
        prompt_tokens: prompt ``s``, the longest one unless ``context_tokens`` says otherwise.
        new_tokens: tokens to generate per sequence ``n``, the first one by prefill.
        context_tokens: tokens that a sequence may reach: there is memory for them, while seconds
            are those of the usual lengths above; ``None``: ``s + n``.
    """

    SCHEMA: ClassVar[int] = SCHEMA

    batch: Annotated[int, Rule(minimum=1, maximum=MAX_BATCH)]
    prompt_tokens: Annotated[int, Rule(minimum=1, maximum=MAX_TOKENS)]
    new_tokens: Annotated[int, Rule(minimum=1, maximum=MAX_TOKENS)]
    context_tokens: Annotated[int | None, Rule(minimum=2, maximum=2 * MAX_TOKENS)] = None

    def __post_init__(self) -> None:
        limits = {"batch": MAX_BATCH, "prompt_tokens": MAX_TOKENS, "new_tokens": MAX_TOKENS}
        for field, maximum in limits.items():
            value = getattr(self, field)
            if not 1 <= value <= maximum:
                raise SpecError(
                    f"workload: field '{field}': found {value}, "
                    f"expected a whole number in [1, {maximum}]"
                )
        usual, most = self.prompt_tokens + self.new_tokens, self.context_tokens
        if most is not None and not usual <= most <= 2 * MAX_TOKENS:
            raise SpecError(
                f"workload: field 'context_tokens': found {most}, expected a whole number in "
                f"[{usual}, {2 * MAX_TOKENS}], at least prompt_tokens + new_tokens"
            )

    @property
    def name(self) -> str:
        """The name used in file names: ``s512-n100-b32``."""
        most = "" if self.context_tokens is None else f"-c{self.context_tokens}"
        return f"s{self.prompt_tokens}-n{self.new_tokens}-b{self.batch}{most}"

    @property
    def text(self) -> str:
        """The workload in words, for titles."""
        most = "" if self.context_tokens is None else f", room for {self.context_tokens:,} each"
        return (
            f"{self.batch} x {self.prompt_tokens} prompt tokens, {self.new_tokens} new tokens "
            f"each{most}"
        )

    @property
    def max_context_tokens(self) -> int:
        """Tokens a sequence may reach, which is the length of a KV slot."""
        return self.context_tokens or self.prompt_tokens + self.new_tokens

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens of the longest prompt."""
        return self.prompt_tokens if self.context_tokens is None else self.context_tokens - 1

    @property
    def mean_context_tokens(self) -> float:
        """Context of the average decode step ``s + n/2`` (LLM-PQ, Sec. 4.3)."""
        return self.prompt_tokens + self.new_tokens / 2


def load_workload(path: str | Path) -> Workload:
    """Read a workload file."""
    return from_json(Workload, read_fields(path, "workload"))


MAX_LENGTH = 10_000_000
MAX_DISTINCT = 1_000_000
_ONE = 1e-6


@dataclass(frozen=True, kw_only=True)
class LengthDistribution:
    """Probabilities of the lengths of prompts or of answers, in tokens.

    Attributes:
        lengths: whole numbers of tokens from 1 on, rising.
        probabilities: of each, positive, together 1.
    """

    SCHEMA: ClassVar[int] = SCHEMA

    lengths: tuple[Annotated[int, Rule(minimum=1, maximum=MAX_LENGTH)], ...]
    probabilities: tuple[Annotated[float, Rule(maximum=1)], ...]

    def __post_init__(self) -> None:
        if not self.lengths or len(self.lengths) != len(self.probabilities):
            raise SpecError(
                f"length distribution: found {len(self.lengths)} lengths and "
                f"{len(self.probabilities)} probabilities, expected as many of either, at least one"
            )
        if self.lengths[0] < 1 or any(low >= high for low, high in pairwise(self.lengths)):
            raise SpecError("length distribution: expected rising lengths of at least 1")
        total = math.fsum(self.probabilities)
        if min(self.probabilities) <= 0 or abs(total - 1) > _ONE:
            raise SpecError(
                f"length distribution: found probabilities that add up to {total:g}, "
                "expected positive ones that add up to 1"
            )

    @cached_property
    def _cumulated(self) -> tuple[float, ...]:
        return tuple(accumulate(self.probabilities))

    @cached_property
    def mean(self) -> float:
        """Mean length."""
        weighted = zip(self.lengths, self.probabilities, strict=True)
        return math.fsum(length * share for length, share in weighted)

    @cached_property
    def std(self) -> float:
        """Standard deviation of the length."""
        weighted = zip(self.lengths, self.probabilities, strict=True)
        return math.sqrt(math.fsum(share * (length - self.mean) ** 2 for length, share in weighted))

    @property
    def longest(self) -> int:
        """Longest length that occurs."""
        return self.lengths[-1]

    def quantile(self, share: float) -> int:
        """Return the shortest length that at least ``share`` of all do not exceed."""
        if not 0 <= share <= 1:
            raise SpecError(f"length distribution: found quantile {share}, expected 0 to 1")
        index = bisect_left(self._cumulated, share - 1e-12)
        return self.lengths[min(index, len(self.lengths) - 1)]

    def sample(self, count: int, chance: random.Random) -> list[int]:
        """Draw ``count`` lengths."""
        return chance.choices(self.lengths, cum_weights=self._cumulated, k=count)


def constant(length: int) -> LengthDistribution:
    """Return the distribution with a single length."""
    return LengthDistribution(lengths=(length,), probabilities=(1.0,))


def empirical(lengths: Iterable[int]) -> LengthDistribution:
    """Return the distribution of observed lengths.

    Raises:
        SpecError: there are none, or one is not a whole number from 1 on.
    """
    counts = Counter(lengths)
    if not counts:
        raise SpecError("length distribution: found no observed lengths, expected at least one")
    total = sum(counts.values())
    ordered = sorted(counts)
    return LengthDistribution(
        lengths=tuple(ordered), probabilities=tuple(counts[length] / total for length in ordered)
    )


def truncated_normal(
    mean: float, std: float, longest: int, shortest: int = 1
) -> LengthDistribution:
    """Return a normal distribution cut off at both ends and rounded to whole tokens.

    ``mean`` and ``std`` are those before it is cut, as in ExeGPT's Table 3.
    """
    if not (std > 0 and 1 <= shortest <= longest <= MAX_DISTINCT):
        raise SpecError(
            f"length distribution: found std {std}, shortest {shortest}, longest {longest}; "
            f"expected std > 0 and 1 <= shortest <= longest <= {MAX_DISTINCT}"
        )
    steps = [edge - 0.5 for edge in range(shortest, longest + 2)]
    below = [0.5 * math.erfc((mean - step) / std / math.sqrt(2)) for step in steps]
    shares = [high - low for low, high in pairwise(below)]
    total = math.fsum(shares)
    kept = [(low, share / total) for low, share in enumerate(shares, start=shortest) if share]
    return LengthDistribution(
        lengths=tuple(length for length, _ in kept),
        probabilities=tuple(share for _, share in kept),
    )


def load_lengths(path: str | Path) -> LengthDistribution:
    """Read a length distribution.

    A file holds ``{"schema": 1, ...}`` with either ``"lengths"`` and ``"probabilities"``,
    ``"observed": [..]``, or ``"truncated_normal": {"mean", "std", "longest"}``.
    """
    fields = Fields(read_json(path), str(path))
    if fields.has("truncated_normal"):
        law = from_json(_TruncatedNormal, fields.child("truncated_normal"))
        found = truncated_normal(law.mean, law.std, law.longest)
    elif fields.has("observed"):
        entries = fields.entries("observed", 1)
        found = empirical(entries.integer(name, 1, MAX_LENGTH) for name in entries.names())
    else:
        return from_json(LengthDistribution, fields)
    fields.schema()
    fields.done()
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _TruncatedNormal:
    """The arguments of ``truncated_normal`` in a file."""

    mean: float
    std: float
    longest: Annotated[int, Rule(minimum=1, maximum=MAX_DISTINCT)]


ARRIVALS = ("poisson", "gamma", "two_state")
BUSY_RATIO = 4.0
"""Rate of the busy state over that of the calm one."""
DWELL_S = 30.0
"""Mean seconds in a state."""
HEADER = ("arrival_s", "prompt_tokens", "new_tokens")
AZURE_HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

HASH_BLOCK_TOKENS = 512
"""Tokens of a block that Mooncake's traces hash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """Arrival and lengths of one request of a trace.

    Attributes:
        arrival_s: seconds after the start of the trace.
        prompt_tokens, new_tokens: at least one each.
        hash_ids: equal for equal blocks of ``HASH_BLOCK_TOKENS`` prompt tokens; empty if unknown.
    """

    arrival_s: float
    prompt_tokens: int
    new_tokens: int
    hash_ids: tuple[int, ...] = ()

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
    """Draw requests with independent lengths, with Poisson arrivals or all at once.

    Raises:
        SpecError: no requests, or a rate that is not positive.
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
        SpecError: the file cannot be read, has another header, no rows, or a malformed row.
    """
    if str(path).endswith(".jsonl"):
        return _load_mooncake(Path(path))
    rows, _ = read_csv(path, HEADER, AZURE_HEADER, max_bytes=math.inf)
    is_azure = "TIMESTAMP" in rows[0][1]
    arrival, prompt_tokens, new_tokens = AZURE_HEADER if is_azure else HEADER
    first = _moment(rows[0][0], rows[0][1][arrival]) if is_azure else None
    requests = []
    for where, row in rows:
        text = row[arrival]
        if first is None:
            arrival_s = _seconds(where, text)
        else:
            arrival_s = (_moment(where, text) - first).total_seconds()
        requests.append(
            TraceRequest(
                arrival_s=arrival_s,
                prompt_tokens=whole_number(
                    where, prompt_tokens, row[prompt_tokens], maximum=MAX_TOKENS
                ),
                new_tokens=whole_number(where, new_tokens, row[new_tokens], maximum=MAX_TOKENS),
            )
        )
    return tuple(sorted(requests, key=lambda request: request.arrival_s))


def scale_rate(trace: Sequence[TraceRequest], factor: float) -> tuple[TraceRequest, ...]:
    """Return the requests with arrivals at ``factor`` times their rate.

    Raises:
        SpecError: the factor is not positive.
    """
    if not 0 < factor < math.inf:
        raise SpecError(f"trace: found a rate scale of {factor}, expected a positive number")
    return tuple(replace(item, arrival_s=item.arrival_s / factor) for item in trace)


def slice_trace(
    trace: Sequence[TraceRequest], first: int, end: int | None
) -> tuple[TraceRequest, ...]:
    """Return the requests ``[first, end)``; the first one arrives at 0 s.

    Raises:
        SpecError: there are no such requests.
    """
    part = trace[first:end]
    if first < 0 or not part:
        raise SpecError(
            f"trace: found {len(trace)} requests, expected some in the slice "
            f"{first}:{'' if end is None else end}"
        )
    start_s = part[0].arrival_s
    return tuple(replace(item, arrival_s=item.arrival_s - start_s) for item in part)


def fit_trace(
    trace: Sequence[TraceRequest], work: Workload, too_long: Literal["refuse", "skip", "cut"]
) -> tuple[Sequence[TraceRequest], int]:
    """Return the requests that fit the slots of a workload, and the number of those left out.

    ``too_long`` says whether a longer request is an error, left out or shortened.

    Raises:
        SpecError: a request is too long, or none fits.
    """
    prompt, context = work.max_prompt_tokens, work.max_context_tokens
    if too_long == "cut":
        cut = [replace(item, prompt_tokens=min(item.prompt_tokens, prompt)) for item in trace]
        return [
            replace(item, new_tokens=min(item.new_tokens, context - item.prompt_tokens))
            for item in cut
        ], 0
    fitting = [
        item
        for item in trace
        if item.prompt_tokens <= prompt and item.prompt_tokens + item.new_tokens <= context
    ]
    skipped = len(trace) - len(fitting)
    if skipped and too_long == "refuse":
        first = next(item for item in trace if item not in fitting)
        raise SpecError(
            f"requests: found {skipped} of {len(trace)} too long, the first with "
            f"{first.prompt_tokens} prompt and {first.new_tokens} new tokens; the strategy has "
            f"room for prompts of {prompt} and {context} tokens in all: plan with a larger --s "
            "and --n, or give --too_long skip or cut"
        )
    if not fitting:
        raise SpecError("requests: none fits the strategy")
    return fitting, skipped


def _load_mooncake(path: Path) -> tuple[TraceRequest, ...]:
    requests = []
    try:
        with path.open(encoding=encoding_of_file(path)) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    requests.append(_mooncake_request(f"{path.name}:{number}", line))
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: cannot be read: {error}") from None
    if not requests:
        raise SpecError(f"{path.name}: found no requests")
    return tuple(sorted(requests, key=lambda request: request.arrival_s))


def _mooncake_request(where: str, line: str) -> TraceRequest:
    try:
        found = json.loads(line)
    except ValueError:
        raise SpecError(f"{where}: expected a JSON object") from None
    if not isinstance(found, dict):
        raise SpecError(f"{where}: expected a JSON object")
    time_ms = found.get("timestamp")
    if isinstance(time_ms, bool) or not isinstance(time_ms, int | float) or not 0 <= time_ms < 1e15:
        raise bad_field(where, "timestamp", time_ms, "milliseconds from 0 on")
    hash_ids = found.get("hash_ids", [])
    if not isinstance(hash_ids, list) or not all(_is_count(item, 0) for item in hash_ids):
        raise bad_field(where, "hash_ids", hash_ids, "a list of whole numbers from 0 on")
    for name in ("input_length", "output_length"):
        if not _is_count(found.get(name), 1):
            raise bad_field(where, name, found.get(name), f"1 to {MAX_TOKENS}")
    prompt = found["input_length"]
    if hash_ids and len(hash_ids) != -(-prompt // HASH_BLOCK_TOKENS):
        raise bad_field(
            where, "hash_ids", f"{len(hash_ids)} blocks", f"those of {prompt} tokens by 512"
        )
    return TraceRequest(
        arrival_s=time_ms / 1000.0,
        prompt_tokens=prompt,
        new_tokens=found["output_length"],
        hash_ids=tuple(hash_ids),
    )


def _is_count(value: Any, minimum: int) -> bool:
    most = MAX_TOKENS if minimum else 2**62
    return type(value) is int and minimum <= value <= most


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


def draw_arrivals(
    name: str, count: int, requests_per_s: float, *, cv: float = 2.0, seed: int = 0
) -> list[float]:
    """Return increasing arrival times in seconds.

    Args:
        name: ``poisson``, ``gamma`` (independent gaps with a coefficient of variation ``cv``) or
            ``two_state`` (Poisson with a rate that changes between two values, the busy one
            ``BUSY_RATIO`` times the calm one, after exponential times of mean ``DWELL_S``).
        count: number of arrivals.
        requests_per_s: mean rate.
        cv: standard deviation of the gaps over their mean, for ``gamma``; 1 is Poisson.
        seed: of the random numbers.

    Raises:
        SpecError: an unknown name, or a rate or ``cv`` that is not positive.
    """
    if not (0 < requests_per_s < math.inf and 0 < cv < math.inf):
        raise SpecError(f"arrivals: found a rate of {requests_per_s} and cv {cv}, expected above 0")
    chance = random.Random(seed)
    if name == "poisson":
        gaps = [chance.expovariate(requests_per_s) for _ in range(count)]
    elif name == "gamma":
        shape = 1.0 / cv**2
        gaps = [chance.gammavariate(shape, 1.0 / (shape * requests_per_s)) for _ in range(count)]
    elif name == "two_state":
        return _two_state(count, requests_per_s, chance)
    else:
        raise SpecError(f"arrivals: found '{name}', expected one of {', '.join(ARRIVALS)}")
    times, now_s = [], 0.0
    for gap in gaps:
        now_s += gap
        times.append(now_s)
    return times


def with_arrivals(
    trace: Sequence[TraceRequest], times: Sequence[float]
) -> tuple[TraceRequest, ...]:
    """Return the requests in their order with other arrival times."""
    return tuple(replace(item, arrival_s=time_s) for item, time_s in zip(trace, times, strict=True))


def _two_state(count: int, requests_per_s: float, chance: random.Random) -> list[float]:
    calm = 2.0 * requests_per_s / (1.0 + BUSY_RATIO)
    rates = calm, BUSY_RATIO * calm
    state, now_s = chance.randrange(2), 0.0
    change_s = chance.expovariate(1.0 / DWELL_S)
    times: list[float] = []
    while len(times) < count:
        next_s = now_s + chance.expovariate(rates[state])
        if next_s < change_s:
            now_s = next_s
            times.append(now_s)
        else:  # exponential gaps have no memory, so the next one starts at the change
            now_s, state = change_s, 1 - state
            change_s = now_s + chance.expovariate(1.0 / DWELL_S)
    return times
