"""Small valid problems, built by keyword or drawn from a seeded generator."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from llmpq.assigner import PlanRequest
from llmpq.assigner.objective import AssignmentProblem, PairCosts
from llmpq.spec import catalog
from llmpq.spec.cluster import Cluster, DeviceGroup, LinkSpec, Node
from llmpq.spec.model import LayerSpec, LinearSpec, ModelSpec
from llmpq.spec.plan import MicroBatching
from llmpq.spec.tables import SensitivityTable
from llmpq.spec.workload import LengthDistribution, TraceRequest, Workload


def pair_costs(
    *,
    prefill_s,
    decode_s,
    layer_bytes,
    capacity_bytes,
    master_bytes=0,
    kv_bytes=0,
    master_prefill_s=0.0,
    master_decode_s=0.0,
    send_s=(0.0, 0.0),
    return_s=(0.0, 0.0),
    prefill_batches=1,
    decode_batches=1,
    new_tokens=2,
    stream_s=(0.0, 0.0),
    streams=False,
) -> PairCosts:
    """Costs of ``[T, K, B]`` layers; everything per group may be a number or a list of ``T``."""
    prefill = np.asarray(prefill_s, dtype=np.float64)
    groups, kinds, _ = prefill.shape

    def per_group(value, dtype):
        return np.broadcast_to(np.asarray(value, dtype=dtype), (groups,)).copy()

    def square(value):
        return np.broadcast_to(np.asarray(value, dtype=np.float64), (groups, groups)).copy()

    return PairCosts(
        micro_batching=MicroBatching(prefill=1, decode=1),
        prefill_batches=prefill_batches,
        decode_batches=decode_batches,
        new_tokens=new_tokens,
        prefill_s=prefill,
        decode_s=np.asarray(decode_s, dtype=np.float64),
        layer_bytes=np.asarray(layer_bytes, dtype=np.int64),
        host_bytes=np.zeros(prefill.shape, dtype=np.int64),
        host_capacity_bytes=per_group(0, np.int64),
        stream_bytes=np.maximum(
            0, np.asarray(layer_bytes, dtype=np.int64) - np.asarray(kv_bytes).max()
        )
        * np.broadcast_to(np.asarray(streams, dtype=np.int64), (groups,))[:, None, None],
        stream_prefill_s=per_group(stream_s[0], np.float64),
        stream_decode_s=per_group(stream_s[1], np.float64),
        kv_bytes=np.broadcast_to(np.asarray(kv_bytes, dtype=np.int64), (kinds,)).copy(),
        total_bytes=per_group(capacity_bytes, np.int64),
        runtime_bytes=per_group(0, np.int64),
        temporary_bytes=per_group(0, np.int64),
        master_bytes=per_group(master_bytes, np.int64),
        master_prefill_s=per_group(master_prefill_s, np.float64),
        master_decode_s=per_group(master_decode_s, np.float64),
        send_prefill_s=square(send_s[0]),
        send_decode_s=square(send_s[1]),
        return_prefill_s=square(return_s[0]),
        return_decode_s=square(return_s[1]),
    )


def random_problem(
    seed: int, *, max_layers: int = 4, max_positions: int = 3, **overrides
) -> AssignmentProblem:
    """Draw a tiny problem: any omega, costs and links, several kinds, tight memory."""
    rng = np.random.default_rng(seed)
    layers = int(rng.integers(1, max_layers + 1))
    positions = int(rng.integers(1, max_positions + 1))
    groups = int(rng.integers(1, positions + 1))
    kinds = int(rng.integers(1, 3))
    bits = ((16, 4), (16, 8, 4), (8, 4, 3))[int(rng.integers(3))]
    shape = (groups, kinds, len(bits))
    equal_links = rng.random() < 0.3
    size = () if equal_links else (groups, groups)
    widths = np.array(bits)
    layer_bytes = np.maximum(1, rng.integers(1, 4, size=shape) * widths // 2)
    typical = int(layer_bytes.min() * layers / positions)
    omega = rng.random((layers, len(bits))) * (17 - widths) ** 2
    if rng.random() < 0.3:
        omega[:] = omega[0]
    omega = omega / omega.sum()
    values = {
        "costs": pair_costs(
            prefill_s=rng.random(shape),
            decode_s=rng.random(shape) * 0.3,
            layer_bytes=layer_bytes,
            kv_bytes=rng.integers(0, 2, size=kinds),
            capacity_bytes=rng.integers(typical, 4 * typical + 12, size=groups),
            master_bytes=rng.integers(0, typical + 4, size=groups),
            master_prefill_s=rng.random(groups) * 0.5,
            master_decode_s=rng.random(groups) * 0.1,
            send_s=(rng.random(size) * 0.8, rng.random(size) * 0.3),
            return_s=(rng.random(size) * 0.4, rng.random(size) * 0.3),
            prefill_batches=int(rng.integers(1, 5)),
            decode_batches=int(rng.integers(1, 5)),
            new_tokens=int(rng.integers(1, 8)),
        ),
        "kinds": rng.integers(0, kinds, size=layers),
        "bits": bits,
        "omega": omega,
        "theta_s": float(rng.choice([0.0, 1.0, 10.0, 100.0])),
        "quality_budget": float(rng.random()) if rng.random() < 0.4 else None,
        "formula": str(rng.choice(["steady", "paper"])),
        "order": tuple(int(group) for group in rng.integers(0, groups, size=positions)),
    }
    return AssignmentProblem(**(values | overrides))


tiny_problems = st.integers(min_value=0, max_value=10**6).map(random_problem)
"""Problems that brute force settles in milliseconds; the seed shrinks, the problem replays."""


def layer_spec(hidden: int = 1024, window: int | None = None, wide: int = 4) -> LayerSpec:
    """One decoder layer of the OPT shape; ``wide`` times ``hidden`` in the feed-forward."""
    projections = [
        LinearSpec(name=f"self_attn.{name}_proj", out_features=hidden, in_features=hidden)
        for name in ("q", "k", "v", "out")
    ]
    up = LinearSpec(name="fc1", out_features=wide * hidden, in_features=hidden)
    down = LinearSpec(name="fc2", out_features=hidden, in_features=wide * hidden)
    return LayerSpec(
        linears=(*projections, up, down),
        norm_parameters=4 * hidden,
        num_heads=8,
        num_kv_heads=8,
        head_dim=hidden // 8,
        sliding_window=window,
    )


def model_spec(*, layers: int = 6, kinds: int = 1, hidden: int = 1024) -> ModelSpec:
    """A small model; with several kinds, the feed-forward differs and kinds alternate."""
    return ModelSpec(
        name="small",
        family="opt",
        hidden_size=hidden,
        vocab_size=2000,
        head_in_features=hidden,
        max_positions=2048,
        layer_types=tuple(layer_spec(hidden, wide=4 + 2 * kind) for kind in range(kinds)),
        layer_kinds=tuple(layer % kinds for layer in range(layers)),
        embedding_parameters=2000 * hidden,
        final_parameters=2 * hidden,
        head_parameters=0,
        dtype="float16",
    )


def cluster_of(*groups: tuple[str, int, int], links: tuple[LinkSpec, ...] = ()) -> Cluster:
    """One node for each ``(type, count, megabytes)``: the memory beyond the process's own."""
    nodes = tuple(
        Node(
            name=f"node{index}",
            devices=(
                DeviceGroup(
                    type=type_name,
                    count=count,
                    memory_bytes=catalog.device(type_name).runtime_bytes + megabytes * 10**6,
                ),
            ),
        )
        for index, (type_name, count, megabytes) in enumerate(groups)
    )
    return Cluster(name="small", nodes=nodes, links=links)


def plan_request(**overrides) -> PlanRequest:
    """A request that takes milliseconds: six small layers on one V100 and one T4."""
    values = {
        "model": model_spec(),
        "cluster": cluster_of(("V100-32G", 1, 150), ("T4-16G", 1, 100)),
        "workload": Workload(batch=4, prompt_tokens=64, new_tokens=16),
        "dtype": "float16",
        "kv_bits": 16,
        "gap": 0.0,
    }
    return PlanRequest(**(values | overrides))


def sensitivity(model: ModelSpec, seed: int = 0) -> SensitivityTable:
    """A seeded measured-looking table: layers differ, more bits never lose more."""
    rng = np.random.default_rng(seed)
    weight = rng.uniform(0.2, 3.0, size=model.num_layers)
    columns = []
    for width in (3, 4, 8):
        noise = rng.uniform(0.9, 1.1, size=model.num_layers)
        columns.append((width, tuple((weight * noise / (2**width - 1) ** 2).tolist())))
    return SensitivityTable(model=model.name, method="seeded", omega=tuple(columns))


def write_trace(path: Path, trace: Sequence[TraceRequest], provenance: Sequence[str] = ()) -> None:
    """Write a trace that ``load_trace`` reads back."""
    lines = [f"# {line}" for line in provenance]
    lines.append("arrival_s,prompt_tokens,new_tokens")
    lines += [f"{item.arrival_s!r},{item.prompt_tokens},{item.new_tokens}" for item in trace]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def uniform(shortest: int, longest: int) -> LengthDistribution:
    """Return equal probabilities for every length in ``[shortest, longest]``."""
    lengths = tuple(range(shortest, longest + 1))
    share = 1.0 / len(lengths)
    return LengthDistribution(lengths=lengths, probabilities=(share,) * len(lengths))
