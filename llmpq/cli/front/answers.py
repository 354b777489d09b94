"""Answers on a terminal: options, the loaded plan, and text as it is made."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmpq.cli.common import check_least
from llmpq.dist.io.sampling_params import SamplingParams
from llmpq.dist.metrics.progress import BarProgress, Event, SilentProgress
from llmpq.units import format_number, format_seconds

if TYPE_CHECKING:
    from llmpq.api import Pipeline
    from llmpq.cli.front.host_plan import HostPlan

MAX_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """An answer that was printed.

    Attributes:
        text: of the answer.
        tokens: how many it has.
        finish_reason: why it ended; ``cancelled`` where the user ended it.
        first_token_s: from the question to the first token; ``None`` without one.
        tokens_per_s: after the first token; ``None`` with fewer than two.
    """

    text: str
    tokens: int
    finish_reason: str
    first_token_s: float | None
    tokens_per_s: float | None


def add_answer_options(parser: argparse.ArgumentParser) -> None:
    """Add how answers are made."""
    parser.add_argument(
        "--max_tokens",
        type=int,
        metavar="N",
        help=f"most tokens of an answer (default {MAX_TOKENS}, or what the context leaves)",
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="of random choices")


def sampling_of(options: argparse.Namespace, most: int) -> SamplingParams:
    """Return how the tokens of an answer are chosen, at most ``most`` by default.

    Raises:
        SpecError: an option cannot be used.
    """
    check_least(options, 1, "max_tokens")
    return SamplingParams(
        temperature=options.temperature,
        max_tokens=options.max_tokens or min(MAX_TOKENS, most),
        seed=options.seed,
    )


class LoadProgress:
    """Draws a bar of the layers that are loaded, and nothing of the answers, which are printed."""

    def __init__(self, bar: BarProgress) -> None:
        self._bar = bar

    def report(self, event: Event) -> None:
        """Draw an event of loading."""
        if event.kind == "load":
            self._bar.report(event)

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()


@contextlib.contextmanager
def loaded(found: HostPlan) -> Iterator[Pipeline]:
    """Load a plan, with a bar on a terminal; the ranks end with the context."""
    from llmpq.api import Pipeline

    bar = LoadProgress(BarProgress(sys.stderr, len(found.plan.bits)))
    progress = bar if sys.stderr.isatty() else SilentProgress()
    with Pipeline(found.plan, model=found.model.path, progress=progress) as pipeline:
        progress.close()
        yield pipeline


def show_answer(
    pipeline: Pipeline,
    prompt: str | tuple[int, ...],
    sampling: SamplingParams,
    *,
    is_quiet: bool = False,
) -> Shown:
    """Print an answer while it is made, then its speed on standard error; Ctrl-C ends it.

    Args:
        pipeline: answers.
        prompt: text or tokens.
        sampling: how tokens are chosen.
        is_quiet: print nothing.

    Raises:
        LlmpqError: the prompt cannot be served, or a rank failed.
    """
    start_s = time.monotonic()
    first_s, last_s, count, reason, parts = None, start_s, 0, "cancelled", []
    chunks = pipeline.stream([prompt] if isinstance(prompt, tuple) else prompt, sampling)
    try:
        for chunk in chunks:
            last_s = time.monotonic()
            if chunk.token_ids and first_s is None:
                first_s = last_s
            count += len(chunk.token_ids)
            parts.append(chunk.text)
            if not is_quiet:
                print(chunk.text, end="", flush=True)
            reason = chunk.finish_reason or reason
    except KeyboardInterrupt:
        pass  # the pipeline goes on
    shown = Shown(
        text="".join(parts),
        tokens=count,
        finish_reason=reason,
        first_token_s=None if first_s is None else first_s - start_s,
        tokens_per_s=(count - 1) / (last_s - first_s)
        if first_s is not None and count > 1 and last_s > first_s
        else None,
    )
    if not is_quiet:
        print(flush=True)
        print(speed_text(shown), file=sys.stderr)
    return shown


def speed_text(shown: Shown) -> str:
    """Return how fast an answer was, in brackets."""
    parts = [f"{shown.tokens} token{'s' * (shown.tokens != 1)}"]
    if shown.first_token_s is not None:
        parts.append(f"the first after {format_seconds(shown.first_token_s)}")
    if shown.tokens_per_s is not None:
        parts.append(f"{format_number(shown.tokens_per_s)} tokens/s")
    if shown.finish_reason != "stop":
        parts.append(f"ended by {shown.finish_reason}")
    return f"[{', '.join(parts)}]"
