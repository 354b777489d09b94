"""llmpq-profile memory: run a plan at its full size and compare its memory with the forecast."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from llmpq.assigner.planner import even_plan
from llmpq.cli.common import print_json, require
from llmpq.cli.run_options import run_progress
from llmpq.dist.metrics.report import memory_parts
from llmpq.errors import SpecError
from llmpq.options.declare import add_options
from llmpq.options.measure import MeasuredModel, MemoryOptions
from llmpq.profiler.memory import measure_memory
from llmpq.spec.model_files.config import absolute_model_path
from llmpq.spec.plan import read_plan
from llmpq.units import format_bytes


def add_parser(commands: Any) -> None:
    """Add ``memory`` to the commands of ``llmpq-profile``."""
    memory = commands.add_parser(
        "memory", help="the peak memory of a plan's stages on this machine, and its forecast"
    )
    add_options(memory, MeasuredModel, "model")
    add_options(memory, MemoryOptions, "strategy")
    bits = {"default": [16], "help": "bitwidths, repeated over the layers"}
    add_options(memory, MeasuredModel, "bits", bits=bits)
    add_options(memory, MemoryOptions, "stages")
    add_options(memory, MeasuredModel, "dtype")
    add_options(memory, MemoryOptions, "kv_bits", "shape", "micro_batch")
    memory.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure and print; see ``add_parser``."""
    require("torch", "transformers")
    folder = Path(options.model)
    if options.stages < 1 or min(*options.shape, *options.micro_batch) < 1:
        raise SpecError("--stages, --shape, --micro_batch: expected numbers of at least 1")
    if options.strategy is not None:
        plan = read_plan(options.strategy)
    else:
        plan = even_plan(
            folder,
            bits=tuple(options.bits),
            stages=options.stages,
            shape=tuple(options.shape),
            micro_batch=tuple(options.micro_batch),
            kv_bits=options.kv_bits,
            dtype=None if options.dtype == "auto" else options.dtype,
        )
    with run_progress(plan.model.num_layers) as progress:
        measured = measure_memory(plan, absolute_model_path(folder), progress=progress)
    stages = []
    for stats in measured:
        predicted = plan.estimate.stages[stats.rank].memory.total
        stages.append(
            {
                "rank": stats.rank,
                "memory_bytes": {"predicted": predicted, "measured": stats.memory_bytes},
                "error": predicted / stats.memory_bytes - 1,
                "memory_parts": memory_parts(plan, stats),
            }
        )
    if options.json:
        print_json({"stages": stages})
    else:
        print("\n".join(_line(stage) for stage in stages))
    return 0


def _line(stage: dict[str, Any]) -> str:
    total, parts = stage["memory_bytes"], stage["memory_parts"]
    cells = [f"{name} {format_bytes(pair['measured'])}" for name, pair in parts.items()]
    return (
        f"rank {stage['rank']}: predicted {format_bytes(total['predicted'])}, measured "
        f"{format_bytes(total['measured'])} ({stage['error']:+.1%}); held: {', '.join(cells)}"
    )
