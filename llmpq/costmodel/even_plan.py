"""Even plans: equal stages on CPU workers of this machine, with a forecast of memory only."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from llmpq import __version__
from llmpq.costmodel.costs import ClusterCosts, build_costs
from llmpq.errors import SpecError
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
)
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
        dtype: number format of the run, ``None`` for the checkpoint's.
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
    """Return the forecast of a stage's memory, without times."""
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
