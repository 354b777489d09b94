"""llmpq-profile memory: run a plan at its full size and compare its memory with the forecast."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from llmpq import __version__
from llmpq.cli.common import print_json, require
from llmpq.costmodel.costs import ClusterCosts, build_costs
from llmpq.dist.metrics.report import memory_parts
from llmpq.errors import SpecError
from llmpq.profiler.memory import measure_memory
from llmpq.spec.cluster import Cluster, DeviceGroup, Node
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.plan import (
    MemoryParts,
    MicroBatching,
    ModelRef,
    Plan,
    PlanEstimate,
    Provenance,
    Search,
    StageAssignment,
    StageEstimate,
    read_plan,
)
from llmpq.spec.precision import BITS, DTYPE_BYTES, Dtype
from llmpq.spec.workload import Workload
from llmpq.units import format_bytes


def add_parser(commands: Any) -> None:
    """Add ``memory`` to the commands of ``llmpq-profile``."""
    memory = commands.add_parser(
        "memory", help="the peak memory of a plan's stages on this machine, and its forecast"
    )
    memory.add_argument("--model", required=True, help="directory with config.json and weights")
    memory.add_argument("--strategy", type=Path, help="a strategy file (default: even stages)")
    memory.add_argument(
        "--bits", type=int, nargs="+", default=[16], choices=BITS, help="taken in turn by layers"
    )
    memory.add_argument("--stages", type=int, default=1, help="CPU workers (default 1)")
    memory.add_argument("--dtype", default="auto", choices=["auto", *DTYPE_BYTES])
    memory.add_argument("--kv_bits", type=int, choices=[8, 16, 32], help="default: the dtype's")
    memory.add_argument(
        "--shape", type=int, nargs=3, default=[8, 248, 8], metavar=("BATCH", "PROMPT", "NEW")
    )
    memory.add_argument(
        "--micro_batch", type=int, nargs=2, default=[4, 8], metavar=("PREFILL", "DECODE")
    )
    memory.add_argument("--json", action="store_true", default=argparse.SUPPRESS)


def run(options: argparse.Namespace, argv: Sequence[str] | None) -> int:
    """Measure and print; see ``add_parser``."""
    del argv
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
    stages = []
    for stats in measure_memory(plan, folder.resolve()):
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


def even_plan(  # noqa: PLR0913  the options of the command
    folder: Path,
    *,
    bits: Sequence[int],
    stages: int,
    shape: Sequence[int],
    micro_batch: Sequence[int],
    kv_bits: int | None = None,
    dtype: Dtype | None = None,
    cuts: Sequence[int] | None = None,
) -> Plan:
    """Return a plan of even stages on CPU workers of this machine, with its memory forecast.

    Args:
        folder: the model.
        bits: bitwidths that layers take in turn.
        stages: CPU workers, of one thread each.
        shape: sequences, prompt tokens and new tokens.
        micro_batch: sequences of a prefill and of a decode micro-batch.
        kv_bits: bits of cached values, ``None`` for the dtype's.
        dtype: number format of the run, ``None`` for the checkpoint's.
        cuts: the stages' first layers and the end of the last, where they are not to be even.

    Raises:
        SpecError: more stages than layers, or what a ``Plan`` refuses.
    """
    model = load_model_dir(folder)
    if stages > model.num_layers:
        raise SpecError(f"--stages: found {stages}, expected at most {model.num_layers} layers")
    group = DeviceGroup(type="cpu", count=stages, threads=1)
    cluster = Cluster(name="here", nodes=(Node(name="here", devices=(group,)),))
    form = dtype or model.dtype
    width = kv_bits or 8 * DTYPE_BYTES[form]
    costs = build_costs(model, cluster, dtype=form, kv_bits=width)
    workload = Workload(batch=shape[0], prompt_tokens=shape[1], new_tokens=shape[2])
    sizes = MicroBatching(prefill=micro_batch[0], decode=micro_batch[1])
    cuts = cuts or [model.num_layers * rank // stages for rank in range(stages + 1)]
    assignments = tuple(
        StageAssignment(
            rank=rank,
            device=rank,
            first_layer=first,
            end_layer=end,
            bits=tuple(bits[layer % len(bits)] for layer in range(first, end)),
        )
        for rank, (first, end) in enumerate(pairwise(cuts))
    )
    return Plan(
        model=ModelRef(name=model.name, source=str(folder.resolve()), num_layers=model.num_layers),
        cluster=cluster,
        workload=workload,
        dtype=form,
        kv_bits=width,
        micro_batching=sizes,
        stages=assignments,
        dropped_devices=(),
        estimate=PlanEstimate(
            latency_s=0.0,
            quality=0.0,
            objective_s=0.0,
            stages=tuple(_estimate(costs, stage, workload, sizes) for stage in assignments),
        ),
        search=Search(method="even"),
        provenance=Provenance(command="llmpq-profile memory", version=__version__),
    )


def _estimate(
    costs: ClusterCosts, stage: StageAssignment, workload: Workload, sizes: MicroBatching
) -> StageEstimate:
    """Return the forecast of a stage's memory; this command asks for no times."""
    device = costs.cluster.devices[stage.device]
    layers = range(stage.first_layer, stage.end_layer)
    kinds = [costs.model.layer_kinds[layer] for layer in layers]
    tokens = workload.max_context_tokens
    kv = sum(costs.layer_kv_bytes(kind, workload.batch, tokens) for kind in kinds)
    memory = MemoryParts(
        weights=sum(
            costs.layer_weight_bytes(device, kind, width)
            for kind, width in zip(kinds, stage.bits, strict=True)
        ),
        kv=kv,
        temporary=costs.temporary_bytes(
            device,
            workload,
            sizes,
            stage.rank == 0,
            is_last=stage.end_layer == costs.model.num_layers,
            dense_layers=stage.bits.count(16),
            kv_bytes=kv,
        ),
        master=costs.master_bytes() if stage.rank == 0 else 0,
        runtime=costs.runtime_bytes(device),
    )
    return StageEstimate(
        prefill_s=0.0,
        decode_s=0.0,
        send_prefill_s=0.0,
        send_decode_s=0.0,
        memory=memory,
        capacity_bytes=costs.capacity_bytes(device),
    )


def _line(stage: dict[str, Any]) -> str:
    total, parts = stage["memory_bytes"], stage["memory_parts"]
    cells = [f"{name} {format_bytes(pair['measured'])}" for name, pair in parts.items()]
    return (
        f"rank {stage['rank']}: predicted {format_bytes(total['predicted'])}, measured "
        f"{format_bytes(total['measured'])} ({stage['error']:+.1%}); held: {', '.join(cells)}"
    )
