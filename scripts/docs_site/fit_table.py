"""The most bits at which a device alone holds a model, as Markdown."""

from __future__ import annotations

from functools import cache

from llmpq.costmodel import ClusterCosts, build_costs
from llmpq.spec import catalog
from llmpq.spec.cluster import cluster_of_types
from llmpq.spec.plan import MicroBatching
from llmpq.spec.precision import BITS, DTYPE_BYTES
from llmpq.spec.workload import Workload

MODELS = (
    *("Qwen/Qwen3-4B", "Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-14B"),
    *("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-32B", "mistralai/Mixtral-8x7B-v0.1"),
    *("meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.1-405B"),
)
WORK = Workload(batch=1, prompt_tokens=4096, new_tokens=1024)


@cache
def fit() -> str:
    """Return the table; devices of equal memory that hold the same models share a row."""
    specs = [catalog.device(name) for name in catalog.device_types()]
    rows: dict[tuple[str, ...], list[str]] = {}
    for spec in sorted(specs, key=lambda one: (one.memory_bytes, one.type)):
        if spec.kind != "cpu":
            cells = [str(bits_of(spec.type, name) or "-") for name in MODELS]
            key = (f"{spec.memory_bytes / 2**30:.0f} GiB", *cells)
            rows.setdefault(key, []).append(f"`{spec.type}`")
    heads = [name.rpartition("/")[2] for name in MODELS]
    lines = [f"| devices | memory | {' | '.join(heads)} |", "|" + " --- |" * (len(heads) + 2)]
    lines += [f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in rows.items()]
    return "\n".join(lines)


def bits_of(device: str, name: str) -> int | None:
    """Return the most bits at which a device of the catalogue holds a model."""
    model = catalog.model(name)
    costs = build_costs(
        model, cluster_of_types({device: 1}), dtype=model.dtype,
        kv_bits=8 * DTYPE_BYTES[model.dtype], latency="roofline",
    )  # fmt: skip
    return most_bits(costs, WORK)


def most_bits(costs: ClusterCosts, workload: Workload) -> int | None:
    """Return the most bits at which the first device alone holds a model, ``None`` for none."""
    capacity = costs.capacity_bytes(costs.cluster.devices[0])
    return next((b for b in BITS if bytes_alone(costs, workload, b) <= capacity), None)


def bytes_alone(costs: ClusterCosts, workload: Workload, bits: int) -> int:
    """Return the bytes of a whole model on the first device, every layer at ``bits``.

    Micro-batches are of one sequence, which takes the least memory.
    """
    device, model = costs.cluster.devices[0], costs.model
    kinds = model.layer_kinds
    kv = sum(
        costs.layer_kv_bytes(kind, workload.batch, workload.max_context_tokens, device)
        for kind in kinds
    )
    temporary = costs.temporary_bytes(
        device, workload, MicroBatching(prefill=1, decode=1), is_master=True, is_last=True,
        kv_bytes=kv,
    )  # fmt: skip
    weights = sum(costs.layer_weight_bytes(device, kind, bits) for kind in kinds)
    return costs.runtime_bytes(device) + costs.master_bytes(device) + weights + kv + temporary
