"""llmpq-profile: measure devices and write the tables that plans are priced with."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from llmpq.cli.commands import (
    profile_fit,
    profile_import,
    profile_layer,
    profile_link,
    profile_memory,
    profile_recalibrate,
)
from llmpq.cli.common import make_parser, run_command

NAME = "llmpq-profile"
_VERBS = {
    "layer": profile_layer,
    "link": profile_link,
    "memory": profile_memory,
    "fit": profile_fit,
    "import": profile_import,
    "recalibrate": profile_recalibrate,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``llmpq-profile``."""
    return run_command(_parser(), lambda options: _VERBS[options.what].run(options, argv), argv)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(NAME, __doc__ or "")
    commands = parser.add_subparsers(dest="what", required=True, metavar="|".join(_VERBS))
    for module in _VERBS.values():
        module.add_parser(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
