"""llmpq-profile: measure devices and write the tables that plans are priced with."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from llmpq.cli.common import add_json, make_parser, run_command
from llmpq.cli.measuring import device, layer, lengths, link, memory, tables

_VERBS = "layer|device|link|memory|lengths|fit|import|recalibrate|describe"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``llmpq-profile``."""
    return run_command(_parser(), lambda options: int(options.run(options)), argv)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("llmpq-profile", __doc__ or "")
    verbs = parser.add_subparsers(dest="what", required=True, metavar=_VERBS)
    for module in (layer, device, link, memory, lengths):
        module.add_parser(verbs)
    tables.add_fit(verbs)
    tables.add_import(verbs)
    tables.add_recalibrate(verbs)
    tables.add_describe(verbs)
    add_json(verbs)
    return parser


if __name__ == "__main__":
    sys.exit(main())
