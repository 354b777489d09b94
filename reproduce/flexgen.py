"""FlexGen's rows of LLM-PQ's Tables 4, 5 and 7: offloading to host memory and disk, priced.

python -m reproduce.flexgen

FlexGen (Sheng et al., arXiv 2303.06865) keeps shares of weights and of keys and values on the GPU,
in host memory and on disk; all GPUs have the same. Its authors choose the shares by a cost model,
a linear program over one layer (their Section 4.3; ``experimental/cost_model.py`` of their code).
Here every choice in steps of ``STEP`` percent is compared, with their equations, links and hosts.
Products on the GPUs take what ``llm_pq_kernels`` says of the paper's devices. The pipeline is that
of ``dist_flex_opt.py``: even splits, as many micro-batches as stages, and each of them reads the
weights that are not on the GPU again.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2

import numpy as np

from llmpq.assigner.heuristics.baselines import proportional_split
from llmpq.costmodel.roofline import RooflineLatencyModel
from llmpq.spec import catalog
from llmpq.spec.model import ModelSpec
from llmpq.spec.precision import Phase
from llmpq.spec.workload import Workload
from llmpq.units import GIB
from reproduce import llm_pq_kernels
from reproduce.output import Record, number, run, say, table, times
from reproduce.run_all import LONG, SHORT, Case

# --- What LLM-PQ publishes of FlexGen and FlexGen-int8: perplexity, seconds ---

Published = tuple[float, float] | None
"""``None``: it ran out of memory."""
FLEXGEN, INT8 = "FlexGen", "FlexGen-int8"
TABLE_4: dict[int, tuple[Published, Published]] = {
    1: ((11.22, 174.88), (11.23, 50.20)),
    2: ((11.22, 71.09), (11.23, 31.11)),
    3: ((10.70, 820.72), (10.70, 309.95)),
    4: ((10.70, 1348.16), (10.70, 448.18)),
    5: (None, (10.34, 704.93)),
    6: ((10.33, 279.05), (10.34, 202.32)),
}
TABLE_5: dict[int, tuple[Published, Published]] = {
    9: ((10.70, 1033.39), (10.70, 313.46)),
    10: ((10.33, 433.99), (10.34, 206.93)),
}
TABLE_7: dict[int, tuple[Published, Published]] = {
    1: ((11.22, 119.24), (11.23, 80.35)),
    4: ((10.70, 2147.03), (10.70, 681.78)),
    6: ((10.33, 408.19), (10.34, 376.69)),
}
TABLES = {"4": (TABLE_4, LONG), "5": (TABLE_5, LONG), "7": (TABLE_7, SHORT)}

# --- Hosts, links and shares ---

HOST_GB = {"P100": 64, "V100": 128, "T4": 108, "A100": 256, "A800": 450}
"""Memory of a node by its GPUs (LLM-PQ, Sec. 6.1)."""
LINK_GIB = {"P100": 12.89, "V100": 12.89, "T4": 12.89, "A100": 25.78, "A800": 25.78}
"""Of a second, host to GPU. T4: fitted by FlexGen's authors; P100 and V100 have its PCIe 3, the
others PCIe 4, twice as fast."""
STORED_CACHE_GIB, STORED_HIDDEN_GIB = 0.97, 4.82
"""Of a second, GPU to host: keys and values of prompts, and hidden states, as they fitted."""
DISK_GIB, TO_DISK_CACHE_GIB, TO_DISK_GIB = 0.473, 0.746, 2.015
"""Of a second, disk to host, and keys and values of prompts and of a step to the disk: likewise.
What LLM-PQ says of its disks is not printed."""
HOST_FLOPS = 12.3e9
ROWS_LOSS = 0.0328
"""Attention over keys and values in host memory is computed by the host, at so many operations a
second for 64 sequences, and less by this share with every halving of them: likewise."""
USED = 0.8
"""Share of each memory that their cost model plans with."""
STEP = 5
"""Percent: the steps of all shares. FlexGen's option takes whole percents."""
INT8_BYTES = 1 + 4 / 64
"""Of a weight in groups of 64, each with a scale and a least value in float16."""
INT8_TRAFFIC = 11
"""Bytes of memory traffic for a weight of 8 bits before its product: it is widened, divided and
added to, each a pass over the tensor (``compression.py``)."""
SLOWER = 2.0
"""Published over priced seconds, from which shares of the disk are sought that explain them."""
FLOAT16 = 2
HEAD_FEATURES = 128
"""Of OPT-13b, 30b and 66b."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One GPU of the pipeline.

    Attributes:
        layers: it has.
        gpu_bytes: that FlexGen may use.
        link_bytes_per_s: from its host.
        prefill_s, decode_s: of a layer and a micro-batch, weights on the GPU; without attention in
            decode.
        attention_s: of a decode step.
    """

    layers: int
    gpu_bytes: float
    link_bytes_per_s: float
    prefill_s: float
    decode_s: float
    attention_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One of LLM-PQ's clusters with its model and workload, for FlexGen or FlexGen-int8.

    Attributes:
        hosts: numbers of the stages on every host, and its memory in bytes.
        weight_bytes: of a layer.
        rows: sequences of a micro-batch.
    """

    stages: tuple[Stage, ...]
    hosts: tuple[tuple[tuple[int, ...], float], ...]
    model: ModelSpec
    workload: Workload
    weight_bytes: float
    rows: int


def problem_of(case: Case, *, is_int8: bool) -> Problem:
    """Return a case of LLM-PQ's tables as FlexGen sees it."""
    request = llm_pq_kernels.with_kernels(case.request())
    model, workload, cluster = request.model, request.workload, request.cluster
    devices = cluster.devices
    places = proportional_split(model.num_layers, [1.0] * len(devices))
    rows = ceil(workload.batch / len(devices))
    weights = 12 * model.hidden_size**2
    context = workload.prompt_tokens + workload.new_tokens / 2
    stages = []
    for place, device in enumerate(devices):
        spec = catalog.device(device.type, cluster)
        roof = RooflineLatencyModel(model=model, device=spec, dtype="float16", kv_bits=16)
        widening_s = 0.0
        if is_int8:
            rate = spec.memory_bytes_per_s * spec.memory_efficiency
            widening_s = INT8_TRAFFIC * weights / rate
        one_s = roof.layer_s(Phase.DECODE, 16, rows, 1, 0)
        stages.append(
            Stage(
                layers=places.count(place),
                gpu_bytes=USED * spec.memory_bytes,
                link_bytes_per_s=LINK_GIB[_kind(device.type)] * GIB,
                prefill_s=widening_s
                + roof.layer_s(Phase.PREFILL, 16, rows, workload.prompt_tokens, 0),
                decode_s=widening_s + one_s,
                attention_s=roof.layer_s(Phase.DECODE, 16, rows, context, 0) - one_s,
            )
        )
    hosts: dict[str, list[int]] = {}
    for place, device in enumerate(devices):
        hosts.setdefault(device.node, []).append(place)
    return Problem(
        stages=tuple(stages),
        hosts=tuple(
            (tuple(own), USED * 1e9 * HOST_GB[_kind(devices[own[0]].type)])
            for own in hosts.values()
        ),
        model=model,
        workload=workload,
        weight_bytes=weights * (INT8_BYTES if is_int8 else FLOAT16),
        rows=rows,
    )


def _kind(type_name: str) -> str:
    return type_name.partition("-")[0]


def shares() -> np.ndarray:
    """Return ``[P, 6]`` all policies: of weights, and of keys and values, on GPU, host and disk."""
    levels = range(0, 101, STEP)
    splits = [
        (gpu, host, 100 - gpu - host)
        for gpu, host in itertools.product(levels, levels)
        if gpu + host <= 100
    ]
    both = [(*weights, *cache) for weights, cache in itertools.product(splits, splits)]
    return np.array(both) / 100.0


def seconds_of(problem: Problem, policies: np.ndarray) -> np.ndarray:
    """Return ``[P]`` the seconds of a batch; infinity where a memory is too small.

    Args:
        problem: what runs.
        policies: ``[P, 6]``, as :func:`shares` returns them.
    """
    hidden, workload, rows = problem.model.hidden_size, problem.workload, problem.rows
    prompt, new = workload.prompt_tokens, workload.new_tokens
    _, w_host, w_disk, c_gpu, c_host, c_disk = policies.T
    w_away, c_away = w_host + w_disk, c_host + c_disk
    weights = problem.weight_bytes
    token_cache = 2 * FLOAT16 * hidden  # of a layer and a sequence
    # Hidden states stay on the GPU: a pipeline sends them on.
    prefill, decode = [], []
    for stage in problem.stages:
        from_host_s = weights * w_away / stage.link_bytes_per_s
        from_disk_s = weights * w_disk / (DISK_GIB * GIB)
        prompts = token_cache * (prompt + 1) * rows
        stored_s = prompts * (c_away / STORED_CACHE_GIB + c_disk / TO_DISK_CACHE_GIB) / GIB
        prefill.append(
            stage.layers
            * np.maximum(stage.prefill_s, np.maximum(from_host_s + from_disk_s, stored_s))
        )
        context = token_cache * (prompt + new / 2) * rows
        on_host_s = context * c_away / (HOST_FLOPS * (1 - ROWS_LOSS * max(0.0, log2(64 / rows))))
        compute_s = stage.decode_s + stage.attention_s * c_gpu + on_host_s
        read_s = from_disk_s / 0.95 + context * c_disk / (DISK_GIB * GIB)
        written_s = token_cache * rows * c_disk / (TO_DISK_GIB * GIB)
        slowest_s = np.maximum(compute_s, np.maximum(read_s, written_s))
        decode.append(stage.layers * (from_host_s + slowest_s))
    stages = len(problem.stages)
    first, later = np.array(prefill), np.array(decode)
    seconds = first.sum(0) + (stages - 1) * first.max(0)
    seconds += (new - 1) * np.maximum(stages * later.max(0), later.sum(0))
    fits = np.ones(len(policies), dtype=bool)
    for stage in problem.stages:
        fits &= _gpu_bytes(problem, stage, policies) <= stage.gpu_bytes
    caches = workload.batch * (prompt + new) * token_cache
    for own, memory in problem.hosts:
        layers = sum(problem.stages[place].layers for place in own)
        # A layer that comes from disk, and the next one, pass through host memory.
        held = layers * (weights * w_host + caches * c_host) + 2 * len(own) * weights * w_disk
        fits &= held <= memory
    found: np.ndarray = np.where(fits, seconds, np.inf)
    return found


def _gpu_bytes(problem: Problem, stage: Stage, policies: np.ndarray) -> np.ndarray:
    """Return ``[P]`` the most memory of a GPU: what is kept there, and what a layer works with."""
    hidden, workload, rows = problem.model.hidden_size, problem.workload, problem.rows
    prompt, tokens = workload.prompt_tokens, workload.prompt_tokens + workload.new_tokens
    heads = hidden // HEAD_FEATURES
    w_gpu, c_gpu = policies[:, 0], policies[:, 3]
    kept = stage.layers * problem.weight_bytes * w_gpu
    kept += stage.layers * workload.batch * tokens * 2 * FLOAT16 * hidden * c_gpu
    buffers = 2 * problem.weight_bytes * (1 - w_gpu)
    # Query, key, value, scores, output, and four times as many features between.
    worked = rows * (FLOAT16 * prompt * hidden * 13 + FLOAT16 * heads * prompt**2)
    read = 2 * rows * tokens * FLOAT16 * hidden * c_gpu
    working: np.ndarray = kept + buffers + np.maximum(worked, read)
    return working


def priced(case: Case, *, is_int8: bool) -> Record | None:
    """Return the best policy of a case and its seconds, ``None`` where none fits."""
    policies = shares()
    seconds = seconds_of(problem_of(case, is_int8=is_int8), policies)
    best = int(seconds.argmin())
    if np.isinf(seconds[best]):
        return None
    return {
        "latency_s": float(seconds[best]),
        "percent": [round(100 * share) for share in policies[best]],
    }


def disk_percent(case: Case, seconds: float, *, is_int8: bool) -> float | None:
    """Return the percent of weights on disk with which a case takes so long, ``None`` if none does.

    All other shares are the best ones for it, between the steps by interpolation.
    """
    policies = shares()
    priced_s = seconds_of(problem_of(case, is_int8=is_int8), policies)
    on_disk = np.rint(100 * policies[:, 2])
    levels = np.unique(on_disk)
    least = np.array([priced_s[on_disk == level].min() for level in levels])
    if not least[0] <= seconds <= least[np.isfinite(least)].max():
        return None
    return float(np.interp(seconds, least[np.isfinite(least)], levels[np.isfinite(least)]))


def rows_of(name: str) -> list[Record]:
    """Return FlexGen's rows of one of LLM-PQ's tables, published and priced."""
    published, workload = TABLES[name]
    found = []
    for cluster, both in published.items():
        case = Case(cluster=cluster, workload=workload)
        say(f"cluster {cluster}, {workload}: FlexGen, and LLM-PQ with the paper's kernels")
        ours = llm_pq_kernels.plan_of(case, llm_pq_kernels.LLM_PQ, today=False)
        for scheme, paper in zip((FLEXGEN, INT8), both, strict=True):
            is_int8 = scheme == INT8
            own, on_disk = priced(case, is_int8=is_int8), None
            if paper is not None and own is not None and paper[1] > SLOWER * own["latency_s"]:
                on_disk = disk_percent(case, paper[1], is_int8=is_int8)
            found.append(
                {
                    "table": f"table {name}",
                    "cluster": cluster,
                    "workload": workload,
                    "scheme": scheme,
                    "paper_s": None if paper is None else paper[1],
                    "paper_llm_pq_s": _published_s(name, cluster),
                    "priced": own,
                    "disk_percent": on_disk,
                    "llm_pq_s": None if ours is None else ours.estimate.latency_s,
                }
            )
    return found


def _published_s(name: str, cluster: int) -> float | None:
    row = llm_pq_kernels.SERVING_TABLES[name][1][cluster]["llmpq"]
    return row.latency_s


def main(argv: Sequence[str] | None = None) -> int:
    """Price and print."""
    return run("flexgen", __doc__, collect, report, argv)


def collect() -> Record:
    """Return the rows of all tables."""
    return {"rows": [row for name in TABLES for row in rows_of(name)]}


def report(record: Record) -> str:
    """Return the rows as a table."""
    head = ["cluster", "prompt", "scheme", "paper s", "priced s", "paper / priced"]
    head += ["weights on GPU, host, disk %", "keys and values %"]
    head += ["weights on disk for the paper's s, %", "over LLM-PQ, paper", "over LLM-PQ, priced"]
    lines = []
    for row in record["rows"]:
        found = row["priced"] or {"latency_s": None, "percent": None}
        percent = found["percent"]
        lines.append(
            [
                str(row["cluster"]),
                "512" if row["workload"] == LONG else "128",
                row["scheme"],
                number(row["paper_s"], missing="OOM"),
                number(found["latency_s"], missing="OOM"),
                times(_over(row["paper_s"], found["latency_s"])),
                "-" if percent is None else ", ".join(map(str, percent[:3])),
                "-" if percent is None else ", ".join(map(str, percent[3:])),
                number(row["disk_percent"], 1),
                times(_over(row["paper_s"], row["paper_llm_pq_s"])),
                times(_over(found["latency_s"], row["llm_pq_s"])),
            ]
        )
    return f"## FlexGen's rows of Tables 4, 5 and 7\n\n{table(head, lines)}"


def _over(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None else above / below


if __name__ == "__main__":
    raise SystemExit(main())
