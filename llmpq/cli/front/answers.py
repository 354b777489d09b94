"""Answers on a terminal: options, the loaded plan, and text as it is made."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llmpq.cli.front.host_plan import HostPlan, host_plan, say_plan
from llmpq.cli.run_options import store_directory
from llmpq.cli.workers.hosts import other_hosts_of
from llmpq.dist.io.sampling_params import SamplingParams
from llmpq.dist.metrics.progress import BarProgress, Event, SilentProgress
from llmpq.errors import StageError
from llmpq.options.declare import add_options, read_options
from llmpq.units import format_number, format_seconds

if TYPE_CHECKING:
    from llmpq.api import Pipeline
    from llmpq.dist import Hosts

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
    most = f"most tokens of an answer (default {MAX_TOKENS}, or what the context leaves)"
    names = ("max_tokens", "temperature", "seed")
    add_options(parser, SamplingParams, *names, max_tokens={"help": most})


def sampling_of(options: argparse.Namespace, most: int) -> SamplingParams:
    """Return how the tokens of an answer are chosen, at most ``most`` by default.

    Raises:
        SpecError: an option cannot be used.
    """
    asked = read_options(SamplingParams, options)
    return replace(asked, max_tokens=asked.max_tokens or min(MAX_TOKENS, most))


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


class LoadedModel(contextlib.AbstractContextManager["LoadedModel"]):
    """The ranks of a model, on this host and on others that lend devices.

    Args:
        model: as the user names it.
        options: of the command, with those of the plan.
        program: name of the command.

    Attributes:
        found: the plan.
        pipeline: its ranks, from :meth:`load` to the end of the context.

    Raises:
        LlmpqError: there is no plan, or another host cannot be used.
    """

    pipeline: Pipeline

    def __init__(self, model: str, options: argparse.Namespace, program: str) -> None:
        self._model = model
        self._options = options
        self._resources = contextlib.ExitStack()
        self._others = other_hosts_of(options, program)
        if self._others is not None:
            self._resources.enter_context(self._others)
        try:
            self.found = self._plan()
        except BaseException:
            self._resources.close()
            raise

    def __exit__(self, *error: object) -> None:
        """End the ranks, on all hosts."""
        self._resources.close()

    def load(self) -> None:
        """Start the ranks, with a bar of the layers on a terminal."""
        self._load(self._start())

    def _start(self) -> Hosts | None:
        """Start the ranks of the other hosts; return the place of this one."""
        words = ("--max_restarts", "0")  # an answer begins anew, perhaps with another plan
        return None if self._others is None else self._others.start(self.found, "dist", words)

    def _load(self, hosts: Hosts | None) -> None:
        from llmpq.api import Pipeline

        found = self.found
        bar = LoadProgress(BarProgress(sys.stderr, len(found.plan.bits)))
        progress = bar if sys.stderr.isatty() else SilentProgress()
        streams = any(stage.on_disk for stage in found.plan.stages)
        self.pipeline = self._resources.enter_context(
            Pipeline(
                found.plan,
                model=found.model.path,
                progress=progress,
                hosts=hosts,
                monitor=self._others,
                store=store_directory(None, os.environ) if streams else None,
            )
        )
        progress.close()

    def answer(
        self, prompt: str | tuple[int, ...], sampling: SamplingParams, *, is_quiet: bool = False
    ) -> Shown:
        """Print an answer, as :func:`show_answer`; again from its beginning if a host is lost.

        Raises:
            LlmpqError: the prompt cannot be served, a rank failed, or the model does not fit on the
                hosts that are left.
        """
        printer, is_lost = Printer(is_quiet=is_quiet), False
        while True:
            try:
                if is_lost and self._others is not None:
                    self._load(self._others.in_time(self._replan))
                return show_answer(self.pipeline, prompt, sampling, printer)
            except StageError:
                if self._others is None or not self._others.drop_lost():
                    raise
                is_lost = True

    def _replan(self) -> Hosts | None:
        self.found = self._plan()
        say_plan(self.found)
        return self._start()

    def _plan(self) -> HostPlan:
        return host_plan(self._model, self._options, self._others)


class Printer:
    """Prints an answer as it is made, and one that is made again only where it is new."""

    def __init__(self, *, is_quiet: bool = False) -> None:
        self.is_quiet = is_quiet
        self._printed = ""

    def show(self, text: str) -> None:
        """Print the answer so far."""
        if self.is_quiet or self._printed.startswith(text):
            return
        if not text.startswith(self._printed):  # made again with other bits
            print()
            self._printed = ""
        print(text[len(self._printed) :], end="", flush=True)
        self._printed = text


def show_answer(
    pipeline: Pipeline,
    prompt: str | tuple[int, ...],
    sampling: SamplingParams,
    printer: Printer,
) -> Shown:
    """Print an answer while it is made, then its speed on standard error; Ctrl-C ends it.

    Args:
        pipeline: answers.
        prompt: text or tokens.
        sampling: how tokens are chosen.
        printer: prints it.

    Raises:
        LlmpqError: the prompt cannot be served, or a rank failed.
    """
    start_s = time.monotonic()
    first_s, last_s, count, reason, text = None, start_s, 0, "cancelled", ""
    chunks = pipeline.stream([prompt] if isinstance(prompt, tuple) else prompt, sampling)
    try:
        for chunk in chunks:
            last_s = time.monotonic()
            if chunk.token_ids and first_s is None:
                first_s = last_s
            count += len(chunk.token_ids)
            text += chunk.text
            printer.show(text)
            reason = chunk.finish_reason or reason
    except KeyboardInterrupt:
        pass  # the pipeline goes on
    shown = Shown(
        text=text,
        tokens=count,
        finish_reason=reason,
        first_token_s=None if first_s is None else first_s - start_s,
        tokens_per_s=(count - 1) / (last_s - first_s)
        if first_s is not None and count > 1 and last_s > first_s
        else None,
    )
    if not printer.is_quiet:
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
