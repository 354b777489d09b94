"""llmpq-apps: plan, simulate and run applications of several models."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from llmpq.cli.apps import plan, run
from llmpq.cli.common import add_json, make_parser, run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``llmpq-apps``."""
    return run_command(_parser(), lambda options: int(options.run(options)), argv)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("llmpq-apps", __doc__ or "")
    verbs = parser.add_subparsers(dest="what", required=True, metavar="plan|simulate|run")
    plan.add_plan(verbs)
    plan.add_simulate(verbs)
    run.add_run(verbs)
    add_json(verbs)
    return parser


if __name__ == "__main__":
    sys.exit(main())
