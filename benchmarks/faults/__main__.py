"""Faults, played on real runs: of a cluster's ranks, of a server under load, of a fleet.

    python benchmarks/faults matrix --only kill stop           # or scripts/fault_matrix
    python benchmarks/faults server --seconds 120 --connections 200
    python benchmarks/faults agents --seconds 1800 --kill_every_s 180
    python benchmarks/faults fleet --folder DIR --case kill stop

Each has a --help of its own. Exit status 1 when something was not as required.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

WHAT = ("matrix", "server", "agents", "fleet")
"""Modules of this folder; one is imported, so that a fleet needs none of what a matrix needs."""


def main() -> int:
    """Run what the first word names with the others."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=WHAT)
    parser.add_argument("options", nargs=argparse.REMAINDER, help="of that")
    found = parser.parse_args()
    status: int = import_module(found.what).main(found.options)
    return status


if __name__ == "__main__":
    sys.exit(main())
