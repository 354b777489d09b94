"""Options that say what a run does when something fails or someone ends it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from llmpq.dist import Supervision
from llmpq.dist.launch.supervisor import DRAIN_TIMEOUT_S
from llmpq.dist.metrics.measurement import Measurement
from llmpq.errors import SpecError, StoppedError

DEFAULT_MAX_RESTARTS = 3
MAX_TOLD = 10
"""Refused prompts that are named one by one; --json names all."""


def add_fault_options(parser: argparse.ArgumentParser) -> None:
    """Add the options as a group of their own."""
    faults = parser.add_argument_group("when something fails")
    faults.add_argument(
        "--max_restarts",
        type=int,
        default=DEFAULT_MAX_RESTARTS,
        metavar="N",
        help="start all ranks anew, up to N times, after one died or hung; what was answered "
        f"stays answered (default {DEFAULT_MAX_RESTARTS})",
    )
    faults.add_argument(
        "--drain_timeout",
        type=float,
        default=DRAIN_TIMEOUT_S,
        metavar="SECONDS",
        help="after SIGTERM or Ctrl-C, requests that have begun may take so long to finish; a "
        f"second one ends the run at once (default {DRAIN_TIMEOUT_S:g})",
    )
    faults.add_argument(
        "--bad_prompts",
        choices=("skip", "refuse"),
        default="skip",
        help="skip: answer the others, then exit with 2; refuse: answer none (default skip)",
    )
    faults.add_argument(
        "--health", metavar="FILE.json", help="keep a file that says how the run is"
    )


def supervision_of(options: argparse.Namespace) -> Supervision:
    """Return how the run is looked after.

    Raises:
        SpecError: a number is out of range.
    """
    return Supervision(
        max_restarts=options.max_restarts,
        drain_timeout_s=options.drain_timeout,
        health=None if options.health is None else Path(options.health).resolve(),
    )


def outcome(measurement: Measurement) -> int:
    """Say what was left undone, and return the exit status that says so too."""
    if measurement.not_served:
        print(
            f"llmpq-dist: stopped before {measurement.not_served} requests were begun; "
            "--resume serves them",
            file=sys.stderr,
        )
        return StoppedError.exit_status
    if not measurement.refused:
        return 0
    for text in measurement.refused[:MAX_TOLD]:
        print(f"llmpq-dist: error: not served: {text}", file=sys.stderr)
    if len(measurement.refused) > MAX_TOLD:
        print(f"llmpq-dist: error: {len(measurement.refused)} in all", file=sys.stderr)
    return SpecError.exit_status
