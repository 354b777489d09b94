"""LLM-PQ (arXiv 2403.01136) with the kernels and the memory of its runtime, beside today's.

python -m reproduce.llm_pq_kernels

``inputs/devices/llm-pq-2023.json`` describes the paper's devices with the kernels of GPTQ and
bitsandbytes as they were in 2023. It rests on single layers that the authors timed, on two of their
runs (8 bits of the A100: clusters 2 and 6) and on their code. It is compared here with those
layers, with Tables 4, 5 and 7, and with the runs that the authors logged, each by its plan.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean

from llmpq.assigner import PlanRequest, make_plan
from llmpq.assigner.constraints.resolve import Overrides
from llmpq.costmodel.roofline import RooflineLatencyModel
from llmpq.errors import InfeasibleError
from llmpq.spec import catalog
from llmpq.spec.cluster import Cluster, DeviceGroup, LinkSpec, Node
from llmpq.spec.devices.figures import DeviceEntry, DeviceSpec
from llmpq.spec.plan import MicroBatching, Plan
from llmpq.spec.precision import Phase
from reproduce.output import ROOT, Record, number, run, say, table, times
from reproduce.run_all import LONG, SERVING_TABLES, SHORT, Case

KERNELS = ROOT / "inputs" / "devices" / "llm-pq-2023.json"
P100, T4, V100, A100, A800 = "P100-12G", "T4-16G", "V100-32G", "A100-40G", "A800-80G"
PREFILL, DECODE = Phase.PREFILL, Phase.DECODE

# --- What the authors measured, typed in from the history of tonyzhao-jt/LLM-PQ ---

LAYER_SEQUENCES, LAYER_TOKENS = (2, 4, 8), 512
"""Sequences and tokens of the layers: of the prompts, or of the context of a decode step."""
LAYERS: dict[tuple[str, Phase, int], tuple[float | None, ...]] = {
    (T4, PREFILL, 16): (67.008, 124.687, 262.595),
    (T4, PREFILL, 8): (40.584, 81.827, 173.692),
    (T4, PREFILL, 4): (2844.448, 5654.017, 11203.581),
    (T4, PREFILL, 3): (2226.459, 4468.593, 8890.640),
    (T4, DECODE, 16): (5.854, 6.477, 7.773),
    (T4, DECODE, 8): (6.062, 6.596, 7.886),
    (T4, DECODE, 4): (5.092, 12.010, 23.803),
    (T4, DECODE, 3): (4.212, 8.830, 18.772),
    (V100, PREFILL, 16): (16.057, 31.771, 75.619),
    (V100, PREFILL, 8): (21.860, 41.455, 85.117),
    (V100, PREFILL, 4): (555.613, 1112.234, 2237.721),
    (V100, PREFILL, 3): (413.013, 829.273, 1663.914),
    (V100, DECODE, 16): (2.441, 2.699, 3.183),
    (V100, DECODE, 8): (7.271, 7.519, 8.077),
    (V100, DECODE, 4): (2.044, 3.209, 5.691),
    (V100, DECODE, 3): (2.086, 2.683, 4.654),
    (P100, PREFILL, 16): (None, None, 1130.731),
    (P100, PREFILL, 4): (None, None, 6756.083),
    (P100, DECODE, 16): (None, None, 23.161),
    (P100, DECODE, 4): (None, None, 16.014),
}
"""Milliseconds of one layer of OPT-30b in float16: the numbers of Figure 5 (T4 and V100) and of
Figure 3, lower part (P100), from the notebooks ``motivations`` and ``phaseTime`` (ad783cc)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run that the authors logged, and the plan it had.

    Attributes:
        tokens: new ones of every sequence; memory was reserved for those of the workload.
        sizes: micro-batches of prefill and decode.
        stages: type of device, and bits and number of layers, in pipeline order.
        seconds: that were logged.
    """

    cluster: int
    scheme: str
    workload: str = LONG
    tokens: int = 80
    sizes: tuple[int, int]
    stages: tuple[tuple[str, tuple[tuple[int, int], ...]], ...]
    seconds: float


def _even(
    type_name: str, bits: int, *layers: int
) -> tuple[tuple[str, tuple[tuple[int, int]]], ...]:
    """Return stages of so many layers each, of one bitwidth."""
    return tuple((type_name, ((bits, count),)) for count in layers)


PIPEEDGE, UNIFORM, LLM_PQ = "PipeEdge", "Uniform", "LLM-PQ"
# fmt: off
RUNS = (
    Run(cluster=1, scheme=PIPEEDGE, sizes=(32, 32), stages=_even(V100, 4, 40), seconds=217.26),
    Run(cluster=1, scheme=LLM_PQ, sizes=(4, 32), stages=_even(V100, 8, 40), seconds=30.68),
    Run(cluster=2, scheme=PIPEEDGE, sizes=(32, 32), stages=_even(A100, 8, 40), seconds=19.61),
    Run(cluster=2, scheme=LLM_PQ, sizes=(16, 32), stages=((A100, ((8, 18), (16, 22))),),
        seconds=14.74),
    Run(cluster=3, scheme=PIPEEDGE, sizes=(8, 8), seconds=82.34,
        stages=_even(T4, 8, 8, 8, 8) + _even(V100, 8, 24)),
    Run(cluster=3, scheme=UNIFORM, sizes=(8, 8), seconds=858.52,
        stages=_even(T4, 4, 12, 12, 12) + _even(V100, 4, 12)),
    Run(cluster=3, scheme=LLM_PQ, sizes=(8, 8), seconds=80.13,
        stages=_even(T4, 8, 8, 8, 8) + _even(V100, 8, 24)),
    Run(cluster=4, scheme=PIPEEDGE, tokens=100, sizes=(8, 8), seconds=439.78,
        stages=_even(P100, 4, 8, 8, 8) + _even(V100, 4, 24)),
    Run(cluster=4, scheme=LLM_PQ, tokens=100, sizes=(2, 8), seconds=138.34,
        stages=_even(V100, 8, 24) + _even(P100, 8, 8, 8, 8)),
    Run(cluster=5, scheme=LLM_PQ, sizes=(2, 6), seconds=197.83,
        stages=_even(T4, 8, 6, 6, 6, 6) + 2 * ((V100, ((8, 10), (3, 10))),)),
    Run(cluster=6, scheme=PIPEEDGE, tokens=100, sizes=(8, 8), seconds=78.61,
        stages=_even(V100, 8, 13, 13) + _even(A100, 8, 19, 19)),
    Run(cluster=6, scheme=UNIFORM, sizes=(8, 8), seconds=419.91,
        stages=_even(V100, 4, 16, 16) + _even(A100, 4, 16, 16)),
    Run(cluster=6, scheme=LLM_PQ, tokens=100, sizes=(8, 8), seconds=70.59,
        stages=((A100, ((16, 5), (8, 12))), (A100, ((16, 4), (8, 15))),
                *2 * ((V100, ((16, 5), (8, 9))),))),
    Run(cluster=7, scheme=LLM_PQ, sizes=(1, 4), seconds=238.96,
        stages=((A100, ((8, 4), (16, 1))), *3 * ((A100, ((8, 9), (4, 1))),),
                (V100, ((8, 6), (4, 2))), *3 * ((V100, ((8, 6), (3, 3))),))),
    Run(cluster=8, scheme=PIPEEDGE, sizes=(6, 6), seconds=811.06,
        stages=_even(V100, 4, 5, 11, 11, 11) + _even(A800, 4, 16, 16)),
    Run(cluster=8, scheme=LLM_PQ, sizes=(2, 6), seconds=218.72,
        stages=(*_even(V100, 16, 2), *3 * ((V100, ((8, 7), (3, 1))),),
                *2 * ((A800, ((8, 20), (3, 2))),))),
    Run(cluster=9, scheme=PIPEEDGE, sizes=(8, 8), stages=_even(T4, 4, 12, 12, 12, 12),
        seconds=954.56),
    Run(cluster=10, scheme=PIPEEDGE, sizes=(8, 8), stages=_even(V100, 8, 13, 17, 17, 17),
        seconds=85.64),
    Run(cluster=10, scheme=UNIFORM, sizes=(8, 8), stages=_even(V100, 4, 16, 16, 16, 16),
        seconds=469.87),
    Run(cluster=10, scheme=LLM_PQ, sizes=(2, 8), stages=_even(V100, 8, 16, 16, 16, 16),
        seconds=78.20),
    Run(cluster=11, scheme=PIPEEDGE, sizes=(8, 8), stages=_even(A800, 8, 10, 20, 20, 20),
        seconds=116.95),
    Run(cluster=11, scheme=UNIFORM, sizes=(8, 8), stages=_even(A800, 4, 18, 18, 17, 17),
        seconds=854.16),
    Run(cluster=11, scheme=LLM_PQ, sizes=(4, 8), seconds=114.96,
        stages=_even(A800, 16, 10) + _even(A800, 8, 20, 20, 20)),
    Run(cluster=1, scheme=UNIFORM, workload=SHORT, tokens=160, sizes=(32, 32), seconds=37.14,
        stages=_even(V100, 8, 40)),
    Run(cluster=1, scheme=LLM_PQ, workload=SHORT, tokens=160, sizes=(16, 32), seconds=25.85,
        stages=((V100, ((8, 16), (16, 24))),)),
    Run(cluster=4, scheme=PIPEEDGE, workload=SHORT, tokens=160, sizes=(8, 8), seconds=161.60,
        stages=_even(P100, 8, 7, 7, 7) + _even(V100, 8, 27)),
    Run(cluster=4, scheme=UNIFORM, workload=SHORT, tokens=160, sizes=(8, 8), seconds=243.93,
        stages=_even(P100, 4, 12, 12, 12) + _even(V100, 4, 12)),
    Run(cluster=4, scheme=LLM_PQ, workload=SHORT, tokens=160, sizes=(4, 8), seconds=134.24,
        stages=((P100, ((16, 3), (8, 1))), *2 * ((P100, ((16, 5), (8, 1), (3, 2))),),
                (V100, ((4, 3), (8, 10), (3, 4), (16, 11))))),
    Run(cluster=6, scheme=PIPEEDGE, workload=SHORT, tokens=160, sizes=(8, 8), seconds=105.37,
        stages=_even(V100, 8, 13, 13) + _even(A100, 8, 19, 19)),
    Run(cluster=6, scheme=UNIFORM, workload=SHORT, tokens=160, sizes=(8, 8), seconds=128.16,
        stages=_even(V100, 8, 16, 16) + _even(A100, 8, 16, 16)),
    Run(cluster=6, scheme=LLM_PQ, workload=SHORT, tokens=160, sizes=(8, 8), seconds=64.56,
        stages=((V100, ((16, 10), (8, 2))), (V100, ((16, 10), (8, 4))),
                *2 * ((A100, ((16, 11), (8, 7), (4, 1))),))),
)
# fmt: on
"""Logs of May and June 2023 and the plans beside them: the folder ``result`` of f8f0257, and for
clusters 8, 9 and 11 of 3c79d9f. Their 80-GB devices of clusters 8 and 11 are named A100 there."""

FEW_BITS = (
    ("table 4", 1, PIPEEDGE), ("table 4", 2, UNIFORM), ("table 4", 3, UNIFORM),
    ("table 4", 4, PIPEEDGE), ("table 4", 5, PIPEEDGE), ("table 4", 6, UNIFORM),
    ("table 4", 7, PIPEEDGE), ("table 4", 8, PIPEEDGE), ("table 5", 9, PIPEEDGE),
    ("table 5", 10, UNIFORM), ("table 5", 11, UNIFORM), ("table 7", 4, UNIFORM),
)  # fmt: skip
"""Published rows whose perplexity is that of 3 or 4 bits; on cluster 9 both rivals are one."""
WITHIN = (0.7, 1.35)
"""Published seconds over ours that count as met."""
THREE_NODES_S = 31.0
"""Solving for OPT-66b on two each of P100, V100 and A100, by heuristic (A.2.2)."""

# --- Layers ---


@cache
def kernels() -> tuple[DeviceEntry, ...]:
    """Return the paper's devices with the kernels of its time."""
    return catalog.load_devices(KERNELS)


@cache
def _figures(type_name: str) -> DeviceSpec:
    group = DeviceGroup(type=type_name, count=1)
    alone = Cluster(name="alone", nodes=(Node(name="a", devices=(group,)),))
    return catalog.device(type_name, catalog.with_device_types(alone, kernels()))


def layer_rows() -> list[Record]:
    """Return every timed layer in milliseconds: measured, with the paper's kernels, and today's."""
    model = catalog.model("facebook/opt-30b")
    rows = []
    for (type_name, phase, bits), measured in LAYERS.items():
        row: Record = {"device": type_name, "phase": phase.value, "bits": bits}
        row["measured_ms"] = list(measured)
        for name, spec in (
            ("ours_ms", _figures(type_name)),
            ("today_ms", catalog.device(type_name)),
        ):
            roof = RooflineLatencyModel(model=model, device=spec, dtype="float16", kv_bits=16)
            row[name] = [
                1e3 * roof.layer_s(phase, bits, sequences, LAYER_TOKENS, 0)
                for sequences in LAYER_SEQUENCES
            ]
        rows.append(row)
    return rows


def layer_errors(rows: Sequence[Record], name: str) -> list[float]:
    """Return by what share the predicted layers differ from the measured ones."""
    return [
        abs(ours / measured - 1)
        for row in rows
        for ours, measured in zip(row[name], row["measured_ms"], strict=True)
        if measured is not None
    ]


# --- Tables 4, 5 and 7 ---

AT_BEST = f"{PIPEEDGE}, best micro-batches"
NO_WORSE, NO_WORSE_AT_BEST = (
    f"{LLM_PQ}, no worse than PipeEdge",
    f"{LLM_PQ}, no worse than its best",
)
BUDGET_SLACK = 1e-9
"""Keeps rounding from forbidding the rival's own bitwidths."""
SCHEMES = {
    PIPEEDGE: "pipeedge", AT_BEST: "pipeedge", UNIFORM: "uniform", LLM_PQ: "llmpq",
    NO_WORSE: "llmpq", NO_WORSE_AT_BEST: "llmpq",
}  # fmt: skip
"""The method of each."""


def with_kernels(request: PlanRequest) -> PlanRequest:
    """Return a request on devices with the paper's kernels and memory.

    Its formula of memory counts the head beside the token embedding (Sec. 4.1).
    """
    model = request.model
    untied = replace(model, head_parameters=model.head_weights)
    return replace(
        request, model=untied, cluster=catalog.with_device_types(request.cluster, kernels())
    )


def plans_of(case: Case, *, today: bool) -> dict[str, Plan | None]:
    """Return the plans of one case by scheme, with today's kernels or the paper's.

    The rivals' micro-batches are the batch over the number of devices: PipeEdge's by Sec. 6.1,
    Uniform's in every plan that the authors kept.
    """
    return {scheme: plan_of(case, scheme, today=today) for scheme in SCHEMES}


def plan_of(case: Case, scheme: str, *, today: bool) -> Plan | None:
    """Return the plan of one case by one scheme of ``plans_of``."""
    request = case.request() if today else with_kernels(case.request())
    size = math.ceil(request.workload.batch / len(request.cluster.devices))
    sizes = Overrides(micro_batching=MicroBatching(prefill=size, decode=size))
    fixed = replace(request, overrides=sizes)
    if scheme in (NO_WORSE, NO_WORSE_AT_BEST):
        rival = _planned(fixed if scheme == NO_WORSE else request, "pipeedge")
        return _no_worse(request, rival)
    asked = fixed if scheme in (PIPEEDGE, UNIFORM) else request
    return _planned(asked, SCHEMES[scheme])


def _planned(request: PlanRequest, method: str) -> Plan | None:
    try:
        return make_plan(request, method)
    except InfeasibleError:
        return None


def _no_worse(request: PlanRequest, rival: Plan | None) -> Plan | None:
    if rival is None:
        return None
    budget = rival.estimate.quality * (1 + BUDGET_SLACK)
    return _planned(replace(request, quality_budget=budget), "llmpq")


def serving_rows(name: str) -> list[Record]:
    """Return the rows of a table of the paper: its seconds, and ours with both kinds of kernels."""
    _, published, workload = SERVING_TABLES[name]
    rows = []
    for cluster, schemes in published.items():
        case = Case(cluster=cluster, workload=workload)
        paper_s = dict(zip((PIPEEDGE, UNIFORM, LLM_PQ), schemes.values(), strict=True))
        say(f"cluster {cluster}, {workload}: the paper's kernels, and today's")
        ours, today = (plans_of(case, today=is_today) for is_today in (False, True))
        for scheme, plan in ours.items():
            seconds = paper_s[scheme].latency_s if scheme in paper_s else None
            rows.append(
                {
                    "table": f"table {name}",
                    "cluster": cluster,
                    "workload": workload,
                    "scheme": scheme,
                    "in_paper": scheme in paper_s,
                    "paper_s": seconds,
                    "ours": _outcome(plan),
                    "today": _outcome(today[scheme]),
                }
            )
    return rows


def _outcome(plan: Plan | None) -> Record | None:
    if plan is None:
        return None
    return {
        "latency_s": plan.estimate.latency_s,
        "omega": plan.estimate.quality,
        "bits": sorted(set(plan.bits)),
    }


def seconds_of(rows: Sequence[Record], scheme: str, key: str) -> dict[tuple[str, int], float]:
    """Return a scheme's seconds by table and cluster, where it has some: ours, today's, theirs."""
    found = {}
    for row in rows:
        seconds = row["paper_s"] if key == "paper" else (row[key] or {}).get("latency_s")
        if row["scheme"] == scheme and seconds is not None:
            found[row["table"], row["cluster"]] = seconds
    return found


def gains(rows: Sequence[Record], scheme: str, key: str, rival: str = PIPEEDGE) -> list[float]:
    """Return the rival's seconds over the scheme's on clusters 1 to 8 (Table 4)."""
    slow, fast = (seconds_of(rows, name, key) for name in (rival, scheme))
    return [slow[case] / fast[case] for case in fast if case[0] == "table 4" and case in slow]


def few_bit_ratios(rows: Sequence[Record], key: str = "ours") -> dict[tuple[str, int, str], float]:
    """Return published seconds over ours of the published rows of 3 and 4 bits."""
    found = {}
    for name, cluster, scheme in FEW_BITS:
        theirs, ours = (seconds_of(rows, scheme, source) for source in ("paper", key))
        found[name, cluster, scheme] = theirs[name, cluster] / ours[name, cluster]
    return found


# --- Runs ---


def priced_s(logged: Run) -> float:
    """Return the seconds of an authors' plan with the paper's kernels: nothing is left to choose.

    Its memory is not checked: it ran.
    """
    request = Case(cluster=logged.cluster, workload=logged.workload).request()
    roomy = [replace(entry, runtime_bytes=0, reserve_bytes=0) for entry in kernels()]
    cluster = catalog.with_device_types(request.cluster, roomy)
    free: dict[str, list[str]] = {device.type: [] for device in cluster.devices}
    for device in cluster.devices:
        free[device.type].append(device.label)
    layers, layer_bits, first = [], [], 0
    for type_name, runs in logged.stages:
        start = first
        for bits, count in runs:
            layer_bits.append((first, first + count, bits))
            first += count
        layers.append((free[type_name].pop(0), start, first))
    prefill, decode = logged.sizes
    fixed = Overrides(
        order=tuple(label for label, _, _ in layers),
        layers=tuple(layers),
        layer_bits=tuple(layer_bits),
        micro_batching=MicroBatching(prefill=prefill, decode=decode),
    )
    workload = replace(request.workload, new_tokens=logged.tokens)
    plan = make_plan(replace(request, cluster=cluster, workload=workload, overrides=fixed))
    return plan.estimate.latency_s


def run_rows() -> list[Record]:
    """Return the logged runs with their seconds and ours."""
    say("the authors' plans")
    return [
        {
            "cluster": logged.cluster,
            "scheme": logged.scheme,
            "prompt_tokens": 512 if logged.workload == LONG else 128,
            "tokens": logged.tokens,
            "logged_s": logged.seconds,
            "ours_s": priced_s(logged),
        }
        for logged in RUNS
    ]


def logged_gains(rows: Sequence[Record], key: str) -> dict[int, float]:
    """Return PipeEdge's seconds over LLM-PQ's by cluster of Table 4 where both were logged."""
    found = {
        (row["cluster"], row["scheme"]): row[key] for row in rows if row["prompt_tokens"] == 512
    }
    return {
        cluster: found[cluster, PIPEEDGE] / found[cluster, LLM_PQ]
        for cluster in range(1, 9)
        if (cluster, PIPEEDGE) in found and (cluster, LLM_PQ) in found
    }


def three_nodes_s() -> float:
    """Return the processor seconds of planning OPT-66b on two P100, two V100 and two A100."""
    types = (P100, V100, A100)
    nodes = tuple(
        Node(name=f"node{place}", devices=(DeviceGroup(type=name, count=2),))
        for place, name in enumerate(types)
    )
    links = tuple(
        LinkSpec(between=(one.name, two.name), bytes_per_s=12.5e9, latency_s=2e-5)
        for place, one in enumerate(nodes)
        for two in nodes[place + 1 :]
    )
    request = replace(
        Case(cluster=6).request(), cluster=Cluster(name="three nodes", nodes=nodes, links=links)
    )
    before = sum(os.times()[:4])
    make_plan(with_kernels(request))
    return sum(os.times()[:4]) - before


# --- All of them ---


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, and print the tables or one JSON object."""
    return run("llm_pq_kernels", __doc__, collect, report, argv)


def collect() -> Record:
    """Return the record of layers, tables and runs."""
    return {
        "layers": layer_rows(),
        "serving": [row for name in SERVING_TABLES for row in serving_rows(name)],
        "runs": run_rows(),
        "three_nodes_s": three_nodes_s(),
    }


def report(record: Record) -> str:
    """Return the three tables and the time of the three nodes."""
    solving = (
        f"Three nodes (A.2.2): solved in {number(record['three_nodes_s'], 1)} processor seconds, "
        f"by the paper's heuristic in {number(THREE_NODES_S, 0)} s."
    )
    return "\n\n".join(
        [_layers(record["layers"]), _serving(record["serving"]), _runs(record["runs"]), solving]
    )


def _layers(rows: Sequence[Record]) -> str:
    head = ["device", "bits"]
    for phase in Phase:
        head += [f"{phase.value} ms, {by}" for by in ("authors", "paper's kernels", "today's")]
    lines = []
    for row in rows:
        if row["phase"] != PREFILL.value:
            continue
        (decode,) = (
            other for other in rows
            if other["phase"] == DECODE.value
            and (other["device"], other["bits"]) == (row["device"], row["bits"])
        )  # fmt: skip
        line = [row["device"], str(row["bits"])]
        for one in (row, decode):
            line += [number(one[name][-1], 1) for name in ("measured_ms", "ours_ms", "today_ms")]
        lines.append(line)
    means = (f"{100 * fmean(layer_errors(rows, name)):.0f} %" for name in ("ours_ms", "today_ms"))
    return (
        f"## Figures 3 and 5: a layer of OPT-30b, 8 sequences\n\n{table(head, lines)}\n\n"
        f"Mean error over 2, 4 and 8 sequences: {', today '.join(means)}."
    )


def _serving(rows: Sequence[Record]) -> str:
    head = ["cluster", "prompt", "scheme", "paper s", "paper's kernels s", "bits"]
    head += ["paper / paper's kernels", "today's kernels s", "bits, today's", "paper / today's"]
    lines = []
    for row in rows:
        if not row["in_paper"]:
            continue
        line = [str(row["cluster"]), "512" if row["workload"] == LONG else "128", row["scheme"]]
        line.append(number(row["paper_s"], missing="OOM"))
        for key in ("ours", "today"):
            found = row[key] or {"latency_s": None, "bits": []}
            line.append(number(found["latency_s"], missing="OOM"))
            line.append(", ".join(map(str, found["bits"])) or "-")
            both = row["paper_s"] is not None and found["latency_s"] is not None
            line.append(times(row["paper_s"] / found["latency_s"] if both else None))
        lines.append(line)
    parts = [
        f"{label} {times(fmean(gains(rows, *of)))}"
        for label, of in (
            ("paper", (LLM_PQ, "paper")),
            ("paper's kernels", (LLM_PQ, "ours")),
            ("no worse than PipeEdge", (NO_WORSE, "ours")),
            ("no worse than its best micro-batches", (NO_WORSE_AT_BEST, "ours", AT_BEST)),
            ("today's", (LLM_PQ, "today")),
            ("no worse", (NO_WORSE, "today")),
            ("than its best", (NO_WORSE_AT_BEST, "today", AT_BEST)),
        )
    ]
    ratios = few_bit_ratios(rows).values()
    met = sum(WITHIN[0] <= ratio <= WITHIN[1] for ratio in ratios)
    return (
        f"## Tables 4, 5 and 7 with the paper's kernels\n\n{table(head, lines)}\n\n"
        f"Mean gain over PipeEdge, clusters 1 to 8: {'; '.join(parts)}. Of the {len(ratios)} "
        f"published rows of 3 and 4 bits {met} are within {WITHIN[0]} to {WITHIN[1]}x."
    )


def _runs(rows: Sequence[Record]) -> str:
    head = ["cluster", "prompt", "new tokens", "scheme", "logged s", "paper's kernels s"]
    head.append("logged / paper's kernels")
    lines = [
        [
            str(row["cluster"]),
            str(row["prompt_tokens"]),
            str(row["tokens"]),
            row["scheme"],
            number(row["logged_s"]),
            number(row["ours_s"]),
            times(row["logged_s"] / row["ours_s"]),
        ]
        for row in rows
    ]
    return f"## The authors' runs, with their plans\n\n{table(head, lines)}"


if __name__ == "__main__":
    raise SystemExit(main())
