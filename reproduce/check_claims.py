"""Make a random third of the recorded figures again, and compare.

    python -m reproduce.check_claims --data FOLDER --seed 20261128

``reproduce.claims`` lists the claims, each a part of a result file with the functions that made it.
A draw is the same for the same seed. Claims are made until the minutes are over; those that the
expected seconds leave no time for are named. External data (SamuLLM's tables, the Azure traces,
LLMServingSim's run, Helix's tables) is read from ``FOLDER/samullm``, ``azure``, ``llmservingsim``
and ``helix``; claims of a folder that is not there are skipped, and so are seconds that were
measured on another kind of processor.

Exit status: 0 if every claim that was made agrees, 1 if one differs, 2 if the options are wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fractions import Fraction
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from llmpq.cli.common import progress_bar
from llmpq.errors import InfeasibleError, LlmpqError
from reproduce.claims import Claim, Json, Spread, claims, document
from reproduce.output import Record, emit, table
from scripts.docs_site import evidence

TOPIC = "check-claims"
AGREES, DIFFERS, SKIPPED = "agrees", "differs", "skipped"
NO_TIME = "no time"
ABSOLUTE = 1e-9
"""Largest difference of figures near zero, such as a proven gap."""
ARCHITECTURES = ("Zen 5", "Zen 4", "Zen 3", "Xeon")
"""Kinds of processors that results name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The figure of a claim that differs most.

    Attributes:
        where: keys and indices within the claim.
        recorded: value of the result file.
        now: value of today.
        share: relative difference, infinite where they are no numbers.
        agrees: whether all figures of the claim are within its spread.
        figures: how many were compared.
    """

    where: str
    recorded: Json
    now: Json
    share: float
    agrees: bool
    figures: int


def main(argv: Sequence[str] | None = None) -> int:
    """Draw, make again, compare and print."""
    parser = argparse.ArgumentParser(prog="reproduce.check_claims", description=__doc__)
    today = int(datetime.now(UTC).strftime("%Y%m%d"))
    parser.add_argument("--seed", type=int, default=today, help="of the draw (default: the date)")
    parser.add_argument("--share", type=Fraction, default=Fraction(1, 3), help="of the claims")
    parser.add_argument("--minutes", type=float, default=60.0, help="at most")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="of external data")
    parser.add_argument("--only", metavar="TOPIC", nargs="+", help="result files")
    parser.add_argument("--list", action="store_true", help="print the drawn claims only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcome here")
    options = parser.parse_args(argv)
    if not 0 < options.share <= 1:
        parser.error(f"--share: found {options.share}, expected more than 0 and at most 1")
    every = [one for one in claims() if options.only is None or one.topic in options.only]
    drawn = draw(every, options.seed, options.share)
    expected_s = sum(map(expected_seconds, drawn))
    print(
        f"{len(drawn)} of {len(every)} claims, seed {options.seed}, expected "
        f"{expected_s / 60:.0f} minutes",
        file=sys.stderr,
    )
    if options.list:
        emit("\n".join(claim.title for claim in drawn), {}, as_json=False)
        return 0
    outcomes: list[Record] = []
    done_s = 0.0
    with progress_bar("claims") as show:
        for claim, one in zip(drawn, check(drawn, options.data, 60 * options.minutes), strict=True):
            outcomes.append(one)
            done_s += expected_seconds(claim)
            show(done_s, expected_s, claim.topic)
    record = {
        "seed": options.seed,
        "share": str(options.share),
        "claims": len(every),
        "minutes": options.minutes,
        "outcomes": outcomes,
    }
    if options.json is not None:
        options.json.write_text(evidence.lines_of(record) + "\n", encoding="utf-8")
    emit(f"{details(outcomes)}\n\n{report(record)}", record, as_json=False)
    return 1 if any(one["verdict"] == DIFFERS for one in outcomes) else 0


def draw(every: Sequence[Claim], seed: int, share: Fraction) -> list[Claim]:
    """Return a random share of the claims, in random order; the same for the same seed."""
    count = max(1, round(len(every) * share)) if every else 0
    return random.Random(seed).sample(list(every), count)


@cache
def recorded_seconds() -> Mapping[tuple[str, str], float]:
    """Return the mean seconds of the claims of a kind, by topic and kind, of the last record."""
    if not (evidence.RESULTS / f"{TOPIC}.json").exists():
        return {}
    found: dict[tuple[str, str], list[float]] = {}
    for one in document(TOPIC)["record"]["outcomes"]:
        if one["verdict"] != SKIPPED:
            found.setdefault((one["topic"], one["kind"]), []).append(one["seconds"])
    return {key: fmean(seconds) for key, seconds in found.items()}


def expected_seconds(claim: Claim) -> float:
    """Return the seconds that claims of a kind took, or those stated where none was recorded."""
    return recorded_seconds().get((claim.topic, claim.kind), claim.seconds)


def check(
    drawn: Sequence[Claim],
    data: Path | None,
    limit_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Record]:
    """Yield the outcome of each claim.

    Args:
        drawn: in this order.
        data: folder of external data.
        limit_s: seconds after which no claim begins, and which none is expected to exceed.
        clock: of the seconds.
    """
    start_s = clock()
    for claim in drawn:
        begun_s = clock()
        reason = why_not(claim, data)
        if not reason and begun_s - start_s + expected_seconds(claim) > limit_s:
            reason = NO_TIME
        outcome = skipped(claim, reason) if reason else made(claim, data or Path())
        yield outcome | {"seconds": round(clock() - begun_s, 2)}


def why_not(claim: Claim, data: Path | None) -> str:
    """Return why a claim cannot be made here, empty if it can."""
    missing = [name for name in claim.data if data is None or not (data / name).is_dir()]
    if missing:
        return f"needs {', '.join(missing)} in the folder of --data"
    measured_on, here = architecture(claim.spread.processor), architecture(this_processor())
    if claim.spread.processor and measured_on != here:
        return f"measured on {measured_on}, this is {here}"
    return ""


@cache
def this_processor() -> str:
    """Return the name of this processor, with its architecture."""
    from benchmarks.workbench import processor  # noqa: PLC0415  an evaluation of its own

    return processor()


def architecture(text: str) -> str:
    """Return the kind of processor that a text names, or the text."""
    return next((name for name in ARCHITECTURES if name in text), text)


def skipped(claim: Claim, reason: str) -> Record:
    """Return the outcome of a claim that was not made."""
    return _outcome(claim, SKIPPED) | {"reason": reason}


def made(claim: Claim, data: Path) -> Record:
    """Return the outcome of a claim, made again."""
    recorded = at(document(claim.topic), claim.path)
    try:
        # What the scripts say about their own progress would break the bar.
        with contextlib.redirect_stderr(io.StringIO()):
            now = claim.compute(data)
    except InfeasibleError as error:
        return _outcome(claim, DIFFERS) | {"reason": f"no plan: {error}"}
    except subprocess.CalledProcessError as error:
        return _outcome(claim, DIFFERS) | {"reason": f"a command failed: {error.stderr[-200:]}"}
    except LlmpqError as error:
        return skipped(claim, str(error))
    found = compare(recorded, now, claim.spread)
    return _outcome(claim, AGREES if found.agrees else DIFFERS) | {
        "figures": found.figures,
        "where": found.where,
        "recorded": found.recorded,
        "now": found.now,
        "difference": None if found.share == float("inf") else float(f"{found.share:.2g}"),
    }


def _outcome(claim: Claim, verdict: str) -> Record:
    return {"topic": claim.topic, "kind": claim.kind, "name": claim.name, "verdict": verdict}


def at(found: Json, path: Sequence[str | int]) -> Json:
    """Return what keys and indices lead to."""
    for step in path:
        found = found[step]
    return found


def compare(recorded: Json, now: Json, spread: Spread) -> Difference:
    """Return the figure that differs most; what is not made again is not compared."""
    pairs = list(leaves(recorded, now))
    worst: tuple[bool, float, str, Json, Json] = (False, -1.0, "", recorded, now)
    for where, before, after in pairs:
        share = distance(before, after)
        key = not within(before, after, spread), share
        if key > worst[:2]:
            worst = (*key, where, before, after)
    differs, share, where, before, after = worst
    return Difference(
        where=where, recorded=before, now=after, share=max(0.0, share), agrees=not differs,
        figures=len(pairs),
    )  # fmt: skip


MISSING = "missing"


def leaves(recorded: Json, now: Json, where: str = "") -> Iterator[tuple[str, Json, Json]]:
    """Yield the figures that were made again, each with its place and the recorded one.

    Of a measured figure the recorded one may be several: a median with its range, or samples.
    """
    if isinstance(now, tuple | list):
        if not isinstance(recorded, list) or len(recorded) != len(now):
            yield where, recorded, list(now)
            return
        now = dict(enumerate(now))
    if isinstance(now, dict) and isinstance(recorded, dict | list):
        for key, value in now.items():
            place = f"{where} / {key}" if where else str(key)
            try:
                before = recorded[key]
            except (LookupError, TypeError):
                before = MISSING
            yield from leaves(before, value, place)
        return
    yield where, recorded, now


def distance(recorded: Json, now: Json) -> float:
    """Return the relative difference; infinite between different values that are no numbers.

    Of several recorded numbers the nearest counts.
    """
    known = recorded if isinstance(recorded, list) else [recorded]
    if not (known and all(map(is_number, (*known, now)))):
        return 0.0 if recorded == now else float("inf")
    return float(min(abs(now - one) / max(abs(one), ABSOLUTE) for one in known))


def within(recorded: Json, now: Json, spread: Spread) -> bool:
    """Return whether a figure is within the spread of the recorded one."""
    known = recorded if isinstance(recorded, list) else [recorded]
    if not (known and all(map(is_number, (*known, now)))):
        return bool(recorded == now)
    if spread.processor:
        return bool(min(known) / spread.factor <= now <= max(known) * spread.factor)
    if recorded is known:
        return False
    allowed = max(spread.relative * abs(recorded), ABSOLUTE)
    if spread.is_rounded and isinstance(recorded, float):
        decimals = len(repr(recorded).partition(".")[2])
        allowed = max(allowed, 0.5000001 * 10.0**-decimals)
    return bool(abs(now - recorded) <= allowed)


def is_number(value: Json) -> bool:
    """Return whether a value is a number, not a truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def details(outcomes: Sequence[Record]) -> str:
    """Return a row for each claim that was made."""
    head = ("claim", "figure", "recorded", "now", "difference", "verdict")
    return table(head, [_row(one) for one in outcomes if one["verdict"] != SKIPPED])


def _row(one: Record) -> list[str]:
    name = f"{one['topic']}: {one['kind']}, {one['name']}"
    if "figures" not in one:
        return [name, one["reason"], "", "", "", one["verdict"]]
    share = "-" if one["difference"] is None else f"{one['difference']:.2g}"
    return [name, one["where"], _short(one["recorded"]), _short(one["now"]), share, one["verdict"]]


def _short(value: Any) -> str:
    text = f"{value:.7g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def report(record: Record) -> str:
    """Return a row for each result file, and the claims that differ."""
    rows = []
    outcomes = record["outcomes"]
    for topic in dict.fromkeys(
        one["topic"] for one in sorted(outcomes, key=lambda one: one["topic"])
    ):
        own = [one for one in outcomes if one["topic"] == topic]
        counts = [sum(one["verdict"] == verdict for one in own) for verdict in (AGREES, DIFFERS)]
        reasons = {one["reason"] for one in own if one["verdict"] == SKIPPED}
        skipped_ = f"{len(own) - sum(counts)} ({'; '.join(sorted(reasons))})" if reasons else "0"
        figures = sum(one.get("figures", 0) for one in own)
        seconds = sum(one["seconds"] for one in own)
        rows.append(
            [topic, str(len(own)), *map(str, counts), skipped_, str(figures), f"{seconds:.0f}"]
        )
    head = ("result file", "drawn", "agree", "differ", "skipped", "figures", "seconds")
    tail = f"{len(outcomes)} of {record['claims']} claims, seed {record['seed']}."
    parts = [table(head, rows), tail]
    differing = [_row(one)[:-1] for one in outcomes if one["verdict"] == DIFFERS]
    if differing:
        heads = ("claim", "figure", "recorded", "now", "difference")
        parts = ["## Claims", *parts, "## Differences", table(heads, differing)]
    return "\n\n".join(parts)


if __name__ == "__main__":
    raise SystemExit(main())
