#!/usr/bin/env python3
"""Forecast and measured peak memory of CPU stages: families x bits x stages, as a Markdown table.

    benchmarks/memory.py --models DIR ... --bits 16 8 4 3 --stages 1 2 3

Models come from scripts/make_tiny_model.py; several hundred megabytes a stage make per cents mean
something.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from llmpq.cli.profile_memory import even_plan
from llmpq.profiler.memory import measure_memory


def main() -> int:
    """Measure every combination; print a row a stage."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", type=Path, nargs="+", required=True)
    parser.add_argument("--bits", type=int, nargs="+", default=[16, 8, 4, 3])
    parser.add_argument("--stages", type=int, nargs="+", default=[1])
    options = parser.parse_args()
    print("| model | bits | stage | predicted MB | measured MB | error | exact parts |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for folder in options.models:
        for bits in options.bits:
            for stages in options.stages:
                plan = even_plan(
                    folder, bits=(bits,), stages=stages, shape=(8, 248, 8), micro_batch=(4, 8)
                )
                for stats in measure_memory(plan, folder.resolve()):
                    memory = plan.estimate.stages[stats.rank].memory
                    held = stats.held
                    is_exact = held is not None and (
                        (held.weights, held.kv, held.master)
                        == (memory.weights, memory.kv, memory.master)
                    )
                    error = memory.total / stats.memory_bytes - 1
                    print(
                        f"| {folder.name} | {bits} | {stats.rank + 1}/{stages} "
                        f"| {memory.total / 1e6:.0f} | {stats.memory_bytes / 1e6:.0f} "
                        f"| {error:+.1%} | {'equal' if is_exact else 'DIFFER'} |",
                        flush=True,
                    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
