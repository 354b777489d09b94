"""Shared parts of all commands: parsers, errors, exit statuses, JSON, progress.

Standard output carries the result only; progress, logs and errors go to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from llmpq import __version__
from llmpq.errors import LlmpqError, SpecError
from llmpq.logging import configure_logging
from llmpq.options.declare import add_options
from llmpq.options.run import CommandOptions

INTERRUPTED = 130
QUIET_S = 2.0
"""Work shorter than this shows no progress."""
FIRST_SHARE = 0.02
"""Share of the work after which a bar shows the remaining time; earlier steps are preparation."""
LONGEST_START_S = 60.0
"""A process older than this when a command begins was not started for that command alone."""

_UNWRITABLE = frozenset((errno.ENOSPC, errno.EROFS, errno.EDQUOT))

EXTRAS = {
    "torch": "runtime",
    "transformers": "runtime",
    "safetensors": "runtime",
    "tokenizers": "runtime",
    "huggingface_hub": "runtime",
    "filelock": "runtime",
    "fastapi": "server",
    "uvicorn": "server",
    "httptools": "server",
    "prometheus_client": "server",
    "ray": "ray",
    "jinja2": "server",
    "matplotlib": "plot",
    "aiconfigurator_core": "profiles",
    "pyarrow": "profiles",
}
"""Packages that only some commands need, and the extra that installs each."""


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one line: usage is in ``--help``.

    Among the options that it reads, ``given_words`` has the name and the words of each.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._given_words: list[tuple[str, list[str]]] = []
        self.set_defaults(given_words=self._given_words)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        words = list(arg_strings)
        if action.option_strings:
            flag = action.option_strings[0]
            joined = len(words) == 1 and words[0].startswith("-")
            words = [f"{flag}={words[0]}"] if joined else [flag, *words]
        self._given_words.append((action.dest, words))
        return super()._get_values(action, arg_strings)

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with status 2."""
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            message += self._meant(unknown)
        self.exit(SpecError.exit_status, f"{self.prog}: error: {message}; see {self.prog} --help\n")

    def _meant(self, unknown: str) -> str:
        """Return what unknown arguments might be meant to be."""
        known = [name for action in self._actions for name in action.option_strings]
        words = (word.partition("=")[0] for word in unknown.split() if word.startswith("--"))
        near = [name for word in words for name in get_close_matches(word, known, 1)]
        return f" (did you mean {', '.join(near)}?)" if near else ""


def make_parser(name: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with the options every command has."""
    parser = CommandParser(prog=name, description=description)
    version = {"action": "version", "version": f"{name} {__version__}"}
    add_options(parser, CommandOptions, version=version)
    return parser


def add_json(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Let ``--json`` stand after a verb, too."""
    for verb in verbs.choices.values():
        add_options(verb, CommandOptions, "json", json={"default": argparse.SUPPRESS})


def words_without(options: argparse.Namespace, left_out: Collection[str]) -> list[str]:
    """Return the words of a command, names in full, without the options of these names."""
    return [word for name, words in options.given_words if name not in left_out for word in words]


def run_command(
    parser: argparse.ArgumentParser,
    body: Callable[[argparse.Namespace], int],
    argv: Sequence[str] | None,
) -> int:
    """Parse the options, run ``body``, and report an error as one line.

    ``options.argv`` has the words of the command, ``options.command`` the command as typed.

    Returns:
        The exit status: 0 done, 1 a bug of llmpq, 2 bad input, 3 no plan exists, 4 a stage failed.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        options = parser.parse_args(words)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2
    options.argv, options.command = words, " ".join([parser.prog, *words])
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # letters that a locale lacks
    configure_logging(logging.INFO if options.verbose else logging.WARNING)
    try:
        return body(options)
    except LlmpqError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return error.exit_status
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRAS:
            raise
        print(
            f"{parser.prog}: error: found no package '{missing}', which this command needs; "
            f"install llmpq[{EXTRAS[missing]}]",
            file=sys.stderr,
        )
        return SpecError.exit_status
    except BrokenPipeError:
        # The reader of standard output has closed it, which is not an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if (problem := _disk_problem(error)) is None:
            raise
        print(f"{parser.prog}: error: {problem}", file=sys.stderr)
        return SpecError.exit_status
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _disk_problem(error: OSError) -> str | None:
    """Return what to say of a disk that is full or cannot be written, ``None`` of other errors."""
    if error.errno in _UNWRITABLE:
        return f"{error.filename or 'a file'}: cannot be written: {error.strerror}"
    if error.errno == errno.ENOENT and error.filename is None:  # of tempfile, which names folders
        return f"{error.strerror}; set TMPDIR to a folder that can be written"
    return None


def require(*packages: str) -> None:
    """Check that packages are installed, before a process is started that needs them.

    Raises:
        SpecError: models are planned on any system, and run on Linux.
    """
    if sys.platform != "linux" and "torch" in packages:
        raise SpecError(
            f"found {sys.platform}, expected linux, on which models run; here llmpq plan, check, "
            "sim and apps plan work"
        )
    for package in packages:
        if find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named '{package}'", name=package)


@contextlib.contextmanager
def progress_bar(name: str, *, delay_s: float = QUIET_S) -> Iterator[Callable[..., None]]:
    """Show a progress bar on standard error, for work that takes longer than ``delay_s``.

    Yields:
        A function of the work done, all work (default 1), and a text.
    """
    from tqdm import tqdm

    with tqdm(
        desc=name,
        delay=delay_s,
        file=sys.stderr,
        leave=False,
        bar_format=bar_format(0.0),
        # A log file gets a line now and then, a terminal a live bar.
        mininterval=0.1 if sys.stderr.isatty() else 10.0,
    ) as bar:

        def show(done: float, total: float = 1.0, text: str = "") -> None:
            bar.total = total
            bar.bar_format = bar_format(done / (total or 1.0))
            bar.set_postfix_str(text, refresh=False)
            bar.update(done - bar.n)

        yield show


def bar_format(share: float) -> str:
    """Return the format of a progress bar (tqdm's) after a share of the work."""
    left = ", {remaining} left" if share >= FIRST_SHARE else ""
    return f"{{l_bar}}{{bar}}| {{elapsed}}{left}{{postfix}}"


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object on standard output."""
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def print_points(options: argparse.Namespace, points: int, summary: str) -> int:
    """Report a table of so many points, written to ``--output``; return the exit status."""
    if options.json:
        print_json({"output": str(options.output), "points": points})
    else:
        print(summary)
        print(f"{points} points written to {options.output}")
    return 0


def command_start_s(argv: Sequence[str] | None) -> float:
    """Return the start of a command, by ``time.monotonic``.

    That is the start of its process, because users wait for imports too. A command called with
    ``argv``, or on a system without ``/proc``, starts now.
    """
    age_s = _process_age_s() if argv is None else 0.0
    return time.monotonic() - (age_s if 0 <= age_s <= LONGEST_START_S else 0.0)


def _process_age_s() -> float:
    """Return the age of this process (``man 5 proc``, field 22), 0 if unknown."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
