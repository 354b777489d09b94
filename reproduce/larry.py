"""LARRY's single-server evaluation (GPU Half-Empty or Half-Full, Sec. 6), simulated.

    python -m reproduce.larry --traces FOLDER [--picture FILE.png]

FOLDER holds the Azure traces of 2023, ``AzureLLMInferenceTrace_{conv,code}.csv`` (CC-BY-4.0): the
lengths of SW-Chat and SW-Code. Every seed is simulated at a rate where FCFS's 95th percentile of
the time to first token is 5 to 10 times its unloaded value. Figures are means over seeds.

The servers are rooflines of the catalogue. Two H100 with tensor parallelism are one device with
twice the figures and two all-reduces of the hidden states in every layer; 8-bit floating-point
products are native: weights of one byte, and 1.6 times the arithmetic rate of bfloat16.

Lengths are pairs drawn from the Azure traces. The arrivals of the paper (Azure Functions) are not
public here: arrivals switch between a calm and a busy rate.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from math import log
from pathlib import Path
from statistics import fmean
from typing import Any

from llmpq.batching.engine_step import EngineLimits
from llmpq.batching.queue_order import QueueOrder, queue_order
from llmpq.costmodel.memory import layer_weight_bytes, master_bytes, token_kv_bytes
from llmpq.costmodel.roofline import RooflineLatencyModel
from llmpq.sim.costs import StageLaw, StepSize
from llmpq.sim.engine import simulate_engine
from llmpq.spec import catalog
from llmpq.spec.devices.figures import DeviceSpec, PrecisionCost
from llmpq.spec.precision import Phase
from llmpq.spec.runtime_constants import KV_BLOCK_SIZE
from llmpq.spec.workload import (
    TraceRequest,
    draw_arrivals,
    load_trace,
    scale_rate,
    slice_trace,
    with_arrivals,
)
from reproduce.output import Record, run_on_data, say, table
from reproduce.worker_costs import WorkerCosts

# --- Servers and requests ---


KV_SHARE = 0.9
"""Part of the memory that weights, activations and blocks may take (vLLM's default)."""
FP8 = PrecisionCost(bits=8, compute=0.625, stream=0.9, overhead=1.0, dequantize=0.0)
BF16_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A model on a server.

    Attributes:
        name: of both.
        costs: seconds of a step.
        num_blocks: KV blocks of 16 tokens.
    """

    name: str
    costs: WorkerCosts
    num_blocks: int


def a100_server() -> Server:
    """Return Llama-3-8B in bfloat16 on one A100 with 40 GB."""
    return llama_8b_server("A100-40G")


def llama_8b_server(device_name: str) -> Server:
    """Return Llama-3-8B in bfloat16 on one device of the catalogue."""
    device = catalog.device(device_name)
    return _server(f"Llama-3-8B, {device_name}", "meta-llama/Meta-Llama-3-8B", device, 16, 1)


def h100_server() -> Server:
    """Return Llama-3-70B in FP8 on two H100 with tensor parallelism."""
    one = catalog.device("H100")
    two = replace(
        one,
        memory_bytes=2 * one.memory_bytes,
        runtime_bytes=2 * one.runtime_bytes,
        flops=tuple((name, 2 * rate) for name, rate in one.flops),
        memory_bytes_per_s=2 * one.memory_bytes_per_s,
        precision_costs=(FP8,),
    )
    return _server("Llama-3-70B FP8, 2 x H100", "meta-llama/Meta-Llama-3-70B", two, 8, 2)


def _server(name: str, model_name: str, device: DeviceSpec, bits: int, members: int) -> Server:
    model = catalog.model(model_name)
    latency = RooflineLatencyModel(model=model, device=device, dtype="bfloat16", kv_bits=16)
    layers = len(model.layer_kinds)

    def send_s(rows: float) -> float:
        if members == 1:
            return 0.0
        size = rows * model.hidden_size * BF16_BYTES
        return 2.0 * (device.link_latency_s + size / device.link_bytes_per_s)

    def prefill_s(rows: int, tokens: float) -> float:
        layer_s = latency.layer_s(Phase.PREFILL, bits, rows, tokens, 0)
        return layers * (layer_s + send_s(rows * tokens))

    def decode_s(rows: int, tokens: float) -> float:
        return layers * (latency.layer_s(Phase.DECODE, bits, rows, tokens, 0) + send_s(rows))

    law = StageLaw(prefill_s, decode_s)
    master_s = cache(latency.master_s)

    def seconds(shape: StepSize) -> float:
        phase = Phase.PREFILL if shape.prompts else Phase.DECODE
        return law(shape) + master_s(phase, shape.rows, shape.tokens / shape.rows)

    weights = layers * layer_weight_bytes(model, 0, bits, "bfloat16")
    ends = master_bytes(model, "bfloat16")
    room = KV_SHARE * device.memory_bytes - device.runtime_bytes - weights - ends
    token_bytes = layers * token_kv_bytes(model, 0, 1, 16)
    blocks = int(room / (token_bytes * KV_BLOCK_SIZE))
    return Server(name=name, costs=WorkerCosts(seconds), num_blocks=blocks)


def draw_requests(
    trace: Sequence[TraceRequest], count: int, seed: int, arrivals: str, servers: int = 1
) -> tuple[TraceRequest, ...]:
    """Return requests with a mean rate of 1 a second for each server.

    Args:
        trace: an Azure trace.
        count: number of requests.
        seed: of lengths and arrivals.
        arrivals: a name of ``draw_arrivals``, or ``trace`` for consecutive requests of the trace
            with its own arrivals.
        servers: number of servers; the busy and calm times do not depend on it.
    """
    chance = random.Random(seed)
    if arrivals == "trace":
        first = chance.randrange(len(trace) - count)
        part = slice_trace(trace, first, first + count)
        mean = servers * part[-1].arrival_s / count
        return with_arrivals(part, [item.arrival_s / mean for item in part])
    chosen = chance.choices(trace, k=count)
    return with_arrivals(chosen, draw_arrivals(arrivals, count, float(servers), seed=seed))


# --- The evaluation ---


SEEDS = 5
REQUESTS = 800
PRESSURE = 5.0, 10.0
ALPHA = 1.0
ALPHAS = (0.0, 0.3, 1.0, 3.0, 10.0, 20.0, 30.0, 50.0, 100.0, 1000.0)
ALPHA_SEEDS = 3
CURVE = (0.6, 0.75, 0.9, 1.05, 1.2, 1.35)
"""Rates of the curves, relative to that of the comparison."""
CURVE_SEEDS = 2
BOUND = 7.0
"""Capacity: p95 of the time to first token over its unloaded value."""
LIMITS = EngineLimits(
    token_budget=1024,
    max_sequences=256,
    num_blocks=1,
    block_size=KV_BLOCK_SIZE,
    prefix_caching=False,
)


def larry_order(alpha: float = ALPHA, unit: float | None = None) -> QueueOrder:
    """Return LARRY with waits in seconds: its alpha is then that of one server."""
    return queue_order("larry", alpha=alpha, unit=unit, unit_s=1.0)


ORDERS = {
    "LARRY": larry_order(),
    "FCFS": queue_order("fcfs"),
    "TRAIL+": queue_order("trail"),
    "No-Preempt": queue_order("no_preempt"),
    "SPF": queue_order("spf"),
    "HRRN": queue_order("hrrn"),
}
RIVALS = ("FCFS", "TRAIL+", "No-Preempt")
LAWS = {"SW-Chat": "conv", "SW-Code": "code"}
METRICS = ("time_to_first_token_s", "normalized_ttft_s", "total_generation_time_s")
KEPT = (*METRICS, "preemption_rate")
"""What is kept of a simulation."""
Figures = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A server, a law of lengths and a seed.

    Attributes:
        server: the server.
        law: name of the law.
        seed: of lengths and arrivals.
        requests: at a mean rate of 1 a second.
        longest: longest answer of the law, which No-Preempt reserves.
        limits: of the engine.
    """

    server: Server
    law: str
    seed: int
    requests: tuple[TraceRequest, ...]
    longest: int
    limits: EngineLimits

    def play(self, order: QueueOrder, rate: float) -> Figures:
        """Simulate at a mean rate."""
        return self._simulate(order, scale_rate(self.requests, rate))

    def _simulate(self, order: QueueOrder, trace: Sequence[TraceRequest]) -> Figures:
        longest = self.longest if order.reserves_answer else None
        report = simulate_engine(self.server.costs, self.limits, order, trace, max_tokens=longest)
        found = report.engine_json()
        return {name: found[name] for name in KEPT}

    @cached_property
    def unloaded_s(self) -> float:
        """95th percentile of the time to first token when every request is alone."""
        alone = [replace(item, new_tokens=1) for item in scale_rate(self.requests, 1e-3)]
        return p95(self._simulate(queue_order("fcfs"), alone))

    @cached_property
    def rate(self) -> float:
        """Rate at which FCFS's p95 is between the values of ``PRESSURE`` times the unloaded one."""
        return rate_of_pressure(self.pressure, 4.0)

    def pressure(self, rate: float) -> float:
        """Return FCFS's 95th percentile of the time to first token over the unloaded value."""
        return p95(self.play(queue_order("fcfs"), rate)) / self.unloaded_s


def rate_of_pressure(pressure: Callable[[float], float], start: float) -> float:
    """Return a rate whose pressure is between the values of ``PRESSURE``; from ``start`` on."""
    rate, step, last = start, 1.4, 0.0
    low, high = PRESSURE
    while not low <= (found := pressure(rate)) <= high:
        sign = 1.0 if found < low else -1.0
        step = step if sign != -last else step**0.5
        rate, last = rate * step**sign, sign
    return rate


def p95(figures: Figures) -> float:
    """Return the 95th percentile of the time to first token."""
    value: float = figures["time_to_first_token_s"]["p95"]
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate and print the tables."""
    return run_on_data("larry", __doc__, collect, report, _draw, argv, option="--traces")


def _draw(record: Record, path: Path) -> None:
    from reproduce.pictures import draw_larry  # noqa: PLC0415  matplotlib is extra

    draw_larry(record, path)


def collect(folder: Path) -> Record:
    """Return all figures."""
    traces = {
        law: load_trace(folder / f"AzureLLMInferenceTrace_{name}.csv") for law, name in LAWS.items()
    }
    servers = (a100_server(), h100_server())
    record: Record = {
        "alpha": ALPHA,
        "seeds": SEEDS,
        "requests": REQUESTS,
        "curve": CURVE,
        "cases": [],
    }
    groups = {
        (server.name, law): [make_case(server, law, trace, seed) for seed in range(SEEDS)]
        for server in servers
        for law, trace in traces.items()
    }
    for (server, law), cases in groups.items():
        say(f"{server}, {law}: rates")
        entry: dict[str, Any] = {
            "server": server,
            "law": law,
            "unloaded_s": [case.unloaded_s for case in cases],
            "rate": [case.rate for case in cases],
            "pressure": [case.pressure(case.rate) for case in cases],
        }
        for name, order in ORDERS.items():
            say(f"{server}, {law}: {name}")
            entry.setdefault("orders", {})[name] = [case.play(order, case.rate) for case in cases]
        record["cases"].append(entry)
        say(f"{server}, {law}: alpha")
        entry["alphas"] = {
            str(alpha): [
                case.play(larry_order(alpha=alpha), case.rate) for case in cases[:ALPHA_SEEDS]
            ]
            for alpha in ALPHAS
        }
        say(f"{server}, {law}: curves")
        entry["curves"] = {
            name: [
                [case.play(ORDERS[name], share * case.rate) for case in cases[:CURVE_SEEDS]]
                for share in CURVE
            ]
            for name in ("LARRY", *RIVALS)
        }
    first = {law: groups[servers[0].name, law] for law in traces}
    record["choices"] = [
        {"choice": title, "law": law, **compared(cases, change)}
        for title, change in choices(traces).items()
        for law, cases in first.items()
    ]
    return record


def make_case(
    server: Server,
    law: str,
    trace: Sequence[TraceRequest],
    seed: int,
    arrivals: str = "two_state",
) -> Case:
    """Return the case of a seed."""
    limits = replace(LIMITS, num_blocks=server.num_blocks)
    requests = draw_requests(trace, REQUESTS, seed, arrivals)
    longest = max(item.new_tokens for item in trace)
    return Case(
        server=server, law=law, seed=seed, requests=requests, longest=longest, limits=limits
    )


Change = Callable[[Case], tuple[Case, QueueOrder]]


def choices(traces: Mapping[str, Sequence[TraceRequest]]) -> dict[str, Change]:
    """Return the free choices of the reconstruction and of the servers, one changed at a time."""
    default = larry_order()

    def with_order(order: QueueOrder) -> Change:
        return lambda case: (case, order)

    def with_limits(**changed: Any) -> Change:
        return lambda case: (replace(case, limits=replace(case.limits, **changed)), default)

    def with_memory(share: float) -> Change:
        return lambda case: (
            replace(
                case,
                limits=replace(case.limits, num_blocks=int(share * case.server.num_blocks)),
            ),
            default,
        )

    def with_arrivals(name: str) -> Change:
        return lambda case: (
            make_case(case.server, case.law, traces[case.law], case.seed, name),
            default,
        )

    def with_all_memory(case: Case) -> tuple[Case, QueueOrder]:
        tokens = case.limits.num_blocks * case.limits.block_size
        return case, larry_order(unit=float(tokens))

    return {
        "as above": with_order(default),
        "unit: 256 tokens": with_order(larry_order(unit=256.0)),
        "unit: 1024 tokens": with_order(larry_order(unit=1024.0)),
        "unit: 4096 tokens": with_order(larry_order(unit=4096.0)),
        "unit: all tokens of the KV memory": with_all_memory,
        "watermark 0": with_limits(watermark=0.0),
        "watermark 5 %": with_limits(watermark=0.05),
        "token budget 512": with_limits(token_budget=512),
        "token budget 2048": with_limits(token_budget=2048),
        "60 % of the KV memory": with_memory(0.6),
        "Poisson arrivals": with_arrivals("poisson"),
        "gamma arrivals, CV 2": with_arrivals("gamma"),
        "the trace's own arrivals": with_arrivals("trace"),
    }


def compared(cases: Sequence[Case], change: Change) -> Figures:
    """Return LARRY's figures relative to FCFS under a change, at the rate of pressure under it."""
    ratios: dict[str, list[float]] = {}
    preemptions = []
    for case in cases[:CURVE_SEEDS]:
        changed, order = change(case)
        ours, theirs = (changed.play(one, changed.rate) for one in (order, queue_order("fcfs")))
        preemptions.append(ours["preemption_rate"])
        for metric in METRICS:
            for place in ("p50", "p95", "p99"):
                ratio = ours[metric][place] / theirs[metric][place]
                ratios.setdefault(f"{metric} {place}", []).append(ratio)
    say(f"{cases[0].law}: {ratios['time_to_first_token_s p95']}")
    return {
        "ratios": {name: fmean(values) for name, values in ratios.items()},
        "preemption_rate": fmean(preemptions),
    }


def mean_of(runs: Sequence[Figures], metric: str, place: str) -> float:
    """Return the mean over seeds."""
    return fmean(run[metric][place] for run in runs)


def report(record: Record) -> str:
    """Return the tables."""
    parts = [_orders(entry) for entry in record["cases"]]
    parts += [_claims(record), _capacities(record), _alphas(record), _alpha_claims(record)]
    parts.append(_choices(record))
    return "\n\n".join(parts)


def _orders(entry: Figures) -> str:
    head = (
        "order", "TTFT p50, s", "p95", "p99", "TTFT a prompt token p50, ms", "p95", "p99",
        "TGT p50, s", "p95", "p99", "preempted",
    )  # fmt: skip
    rows = []
    for name, runs in entry["orders"].items():
        row = [name]
        for metric, unit in zip(METRICS, (1.0, 1e3, 1.0), strict=True):
            row += [f"{unit * mean_of(runs, metric, p):.3g}" for p in ("p50", "p95", "p99")]
        row.append(f"{fmean(run['preemption_rate'] for run in runs):.2%}")
        rows.append(row)
    rates, pressure = entry["rate"], entry["pressure"]
    title = (
        f"### {entry['server']}, {entry['law']}: {min(rates):.2f} to {max(rates):.2f} requests/s "
        f"(FCFS: {min(pressure):.1f} to {max(pressure):.1f} times unloaded)"
    )
    return f"{title}\n\n{table(head, rows)}"


def _claims(record: Record) -> str:
    """Count in how many runs (case and seed) a claim of the paper holds."""
    rows = []
    for metric, title in zip(METRICS[:2], ("TTFT", "TTFT a prompt token"), strict=True):
        for place in ("p50", "p95", "p99"):
            row = [f"LARRY's {title} {place} below that of"]
            for rival in RIVALS:
                row.append(_count(record, rival, lambda a, b, m=metric, p=place: a[m][p] < b[m][p]))
            rows.append(row)
    for place in ("p50", "p95"):
        row = [f"LARRY's TGT {place} at most 1.05 times that of"]
        for rival in RIVALS:
            metric = METRICS[2]
            row.append(
                _count(record, rival, lambda a, b, m=metric, p=place: a[m][p] <= 1.05 * b[m][p])
            )
        rows.append(row)
    rows.append(
        ["preempted: fewer than 0.1 %"]
        + [_count(record, rival, lambda _, b: b["preemption_rate"] < 1e-3) for rival in RIVALS]
    )
    return f"### Claims: runs in which they hold\n\n{table(('claim', *RIVALS), rows)}"


def _count(record: Record, rival: str, holds: Callable[[Figures, Figures], bool]) -> str:
    found = [
        holds(ours, theirs)
        for entry in record["cases"]
        for ours, theirs in zip(entry["orders"]["LARRY"], entry["orders"][rival], strict=True)
    ]
    return f"{sum(found)} of {len(found)}"


def _capacities(record: Record) -> str:
    names = list(record["cases"][0]["curves"])
    rows = []
    for entry in record["cases"]:
        bound_s = BOUND * fmean(entry["unloaded_s"][:CURVE_SEEDS])
        found = [capacity(record["curve"], entry["curves"][name], bound_s) for name in names]
        mean_rate = fmean(entry["rate"][:CURVE_SEEDS])
        cells = [value if isinstance(value, str) else f"{value * mean_rate:.2f}" for value in found]
        rows.append([f"{entry['server']}, {entry['law']}", *cells])
    title = f"### Capacity: requests/s at which p95 TTFT is {BOUND:g} times its unloaded value"
    return f"{title}\n\n{table(('server and lengths', *names), rows)}"


def capacity(
    shares: Sequence[float], curve: Sequence[Sequence[Figures]], bound_s: float
) -> float | str:
    """Return the share of the rate at which the mean p95 passes a bound, between two points.

    Outside of the points the answer is a text with the nearest one.
    """
    heights = [mean_of(runs, METRICS[0], "p95") for runs in curve]
    if heights[0] > bound_s:
        return f"less than {shares[0]:g} of the rate"
    points = list(zip(shares, heights, strict=True))
    for (low, below_s), (high, above_s) in pairwise(points):
        if above_s > bound_s:
            share = log(bound_s / below_s) / log(above_s / below_s)
            return float(low + share * (high - low))
    return f"more than {shares[-1]:g} of the rate"


def _alphas(record: Record) -> str:
    rows = []
    for entry in record["cases"]:
        for alpha, runs in entry["alphas"].items():
            found = [f"{mean_of(runs, METRICS[0], p):.3g}" for p in ("p50", "p95", "p99")]
            norm = [f"{1e3 * mean_of(runs, METRICS[1], p):.3g}" for p in ("p50", "p95")]
            rows.append([f"{entry['server']}, {entry['law']}", f"{float(alpha):g}", *found, *norm])
    head = (
        "server and lengths",
        "alpha",
        "TTFT p50, s",
        "p95",
        "p99",
        "a prompt token p50, ms",
        "p95",
    )
    return f"### LARRY's alpha\n\n{table(head, rows)}"


def _alpha_claims(record: Record) -> str:
    """Count for each alpha in how many runs it is below its rivals at once."""
    rows = []
    for alpha in record["cases"][0]["alphas"]:
        found = alpha_claims(record, alpha)
        cells = [f"{sum(column)} of {len(column)}" for column in zip(*found, strict=True)]
        rows.append([f"{float(alpha):g}", *cells, f"{sum(map(all, found))} of {len(found)}"])
    head = ("alpha", "below FCFS at p50, p95 and p99", "below TRAIL+ at p50 and p95", "both")
    return f"### LARRY's alpha: runs in which TTFT is below that of rivals\n\n{table(head, rows)}"


def alpha_claims(record: Record, alpha: str) -> list[tuple[bool, bool]]:
    """Return for each run whether TTFT is below FCFS's at p50, p95 and p99, TRAIL+'s but at p99."""
    return [
        (
            is_below(ours, entry["orders"]["FCFS"][seed], ("p50", "p95", "p99")),
            is_below(ours, entry["orders"]["TRAIL+"][seed], ("p50", "p95")),
        )
        for entry in record["cases"]
        for seed, ours in enumerate(entry["alphas"][alpha])
    ]


def is_below(ours: Figures, theirs: Figures, places: Sequence[str]) -> bool:
    """Return whether the time to first token of a run is lower at all these places."""
    metric = METRICS[0]
    return all(ours[metric][place] < theirs[metric][place] for place in places)


def _choices(record: Record) -> str:
    keys = [f"{METRICS[0]} {p}" for p in ("p50", "p95", "p99")]
    keys += [f"{METRICS[1]} {p}" for p in ("p50", "p95")] + [f"{METRICS[2]} p50"]
    rows = [
        [
            row["choice"],
            row["law"],
            *(f"{row['ratios'][key]:.2f}" for key in keys),
            f"{row['preemption_rate']:.2%}",
        ]
        for row in record["choices"]
    ]
    head = (
        "choice",
        "lengths",
        "TTFT p50",
        "p95",
        "p99",
        "a prompt token p50",
        "p95",
        "TGT p50",
        "preempted",
    )
    return (
        f"### Free choices: LARRY over FCFS, {record['cases'][0]['server']}\n\n{table(head, rows)}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
