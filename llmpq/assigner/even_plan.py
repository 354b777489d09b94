"""Even plans: equal stages on CPU workers of this machine, with a forecast of memory only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from llmpq import __version__
from llmpq.assigner.plan_estimate import empty_estimate, stage_memory
from llmpq.costmodel import build_costs
from llmpq.errors import SpecError
from llmpq.spec.cluster import Cluster, DeviceGroup, Node
from llmpq.spec.facts.model_fields import absolute_model_path
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.plan import MicroBatching, ModelRef, Plan, Provenance, Search, StageAssignment
from llmpq.spec.precision import DTYPE_BYTES, Dtype
from llmpq.spec.workload import Workload


def even_plan(  # noqa: PLR0913  keywords
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
        bits: bitwidths, repeated over the layers.
        stages: CPU workers, of one thread each.
        shape: sequences, prompt tokens and new tokens.
        micro_batch: sequences of a prefill and of a decode micro-batch.
        kv_bits: bits of cached values, ``None`` for the dtype's.
        dtype: number format, ``None`` for the checkpoint's.
        cuts: first layer of every stage and end of the last, ``None`` for even stages.

    Raises:
        SpecError: more stages than layers, or an invalid ``Plan``.
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
    plan = Plan(
        model=ModelRef(
            name=model.name, source=str(absolute_model_path(folder)), num_layers=model.num_layers
        ),
        cluster=cluster,
        workload=workload,
        dtype=form,
        kv_bits=width,
        micro_batching=sizes,
        stages=assignments,
        dropped_devices=(),
        estimate=empty_estimate(stages, quality=0.0),
        search=Search(method="even"),
        provenance=Provenance(command="llmpq-profile memory", version=__version__),
    )
    estimates = tuple(
        replace(
            estimate,
            memory=stage_memory(plan, costs, stage),
            capacity_bytes=costs.capacity_bytes(plan.device_of(stage)),
        )
        for estimate, stage in zip(plan.estimate.stages, plan.stages, strict=True)
    )
    return replace(plan, estimate=replace(plan.estimate, stages=estimates))
