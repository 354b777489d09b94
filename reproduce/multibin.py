"""Multi-bin batching's figures and its predictor, in simulation.

    python -m reproduce.multibin --data FOLDER

The paper's numbers stand in pictures and its text leaves the parameters out, so that only what it
says in words can be put beside ours. Here: batches of 8, service times uniform on 1 to 20 s
(Figures 3, 4, 8), exponential with mean 1 s (Figure 9), or a line in answers of GSM8K's lengths
(Figure 6; a truncated normal of mean 130 tokens stands for them). Requests arrive by a Poisson
process, full batches wait in one queue, and a batch is served as long as its longest member.

Figures 1(a), 5, 7, 10 and 11 and Table 1 take the shipped policy, predictor and simulator: batches
of 8 on rooflines of an A100-80G, Phi-3-mini and Llama-2-13b for the paper's Phi-3.5-mini and
Vicuna-13b, which have the same shapes. FOLDER holds pairs of prompts' and answers' lengths:
``azure/`` the Azure traces of 2023 (CC-BY-4.0; Splitwise), ``helix/lengths_alpaca.csv`` those of
Alpaca (Helix, Apache-2.0). The paper's texts (GSM8K, LMSYS-Chat-1M) are not at hand, so the
predictor learns from lengths alone. One half of the requests teaches, the other is served.

The theory (Sec. 4 and Appendix A.4) is in closed form: the throughput of batches of ``B`` requests
of one bin is ``B / E[T_k]``.
"""

from __future__ import annotations

import csv
import heapq
import math
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean, linear_regression
from typing import NamedTuple

from llmpq.assigner import PlanRequest, make_plan
from llmpq.assigner.request import costs_of
from llmpq.batching import PipelineShape, make_policy
from llmpq.batching.length import EmpiricalPredictor, LengthPredictor
from llmpq.batching.length.learned import (
    Answered,
    FitReport,
    LengthModel,
    fit_length_model,
)
from llmpq.batching.policies.multibin import quantile_boundaries
from llmpq.errors import SpecError
from llmpq.sim import simulate
from llmpq.sim.costs import PlanCosts
from llmpq.spec.catalog import resolve_model
from llmpq.spec.cluster import Cluster, DeviceGroup, Node
from llmpq.spec.plan import MicroBatching, Schedule, default_schedule
from llmpq.spec.workload import TraceRequest, Workload, load_trace
from reproduce.output import Record, number, run_on_data, say, table

# --- Theory ---


def uniform_boundaries(shortest: float, longest: float, bins: int) -> tuple[float, ...]:
    """Return the boundaries of k bins of equal width, optimal for uniform lengths (Lemma 4.1)."""
    _check(1, bins)
    width = (longest - shortest) / bins
    return tuple(shortest + index * width for index in range(1, bins))


def uniform_service_s(shortest_s: float, longest_s: float, batch: int, bins: int) -> float:
    """Return ``E[T_k]`` for service times uniform on an interval (Theorem 4.2).

    ``(l_min + l_max) / 2 + (l_max - l_min) / (2 k) * (B - 1) / (B + 1)``.
    """
    _check(batch, bins)
    spread = longest_s - shortest_s
    return (shortest_s + longest_s) / 2 + spread / (2 * bins) * (batch - 1) / (batch + 1)


def uniform_throughput(shortest_s: float, longest_s: float, batch: int, bins: int) -> float:
    """Return requests a second ``B / E[T_k]``; without end as k grows it is ``B / E[T]``."""
    return batch / uniform_service_s(shortest_s, longest_s, batch, bins)


def bins_needed(shortest_s: float, longest_s: float, batch: int, throughput: float) -> int:
    """Return the fewest bins that reach a throughput (Theorem 4.3).

    Raises:
        SpecError: no number of bins does, because the throughput is that of perfect batches or
            above.
    """
    _check(batch, 1)
    mean_s = (shortest_s + longest_s) / 2
    left_s = batch / throughput - mean_s  # what waiting for the longest member may cost
    most_s = (longest_s - shortest_s) / 2 * (batch - 1) / (batch + 1)
    if most_s == 0 and left_s >= 0:
        return 1
    if left_s <= 0:
        raise SpecError(
            f"multi-bin batching: found a wanted throughput of {throughput:g} requests a second, "
            f"expected less than {batch / mean_s:g}, which no number of bins reaches"
        )
    return max(1, math.ceil(most_s / left_s * (1 - 1e-12)))


def uniform_bin_mix_service_s(edges_s: Sequence[float], batch: int) -> float:
    """Return ``E[T]`` of uniform service times under any bins (Eq. 9).

    Args:
        edges_s: ends of the bins, rising, from the shortest service time to the longest.
        batch: requests of a batch.
    """
    _check(batch, len(edges_s) - 1)
    whole = edges_s[-1] - edges_s[0]
    return math.fsum(
        (high - low) / whole * (low + (high - low) * batch / (batch + 1))
        for low, high in pairwise(edges_s)
    )


def exponential_boundaries(mean_s: float, batch: int, bins: int) -> tuple[float, ...]:
    """Return the boundaries that minimise the bound of :func:`exponential_service_bound_s`.

    Args:
        mean_s: mean service time.
        batch: requests of a batch.
        bins: how many; the last is open.

    Returns:
        the k - 1 boundaries, rising (Lemma A.1). In units of the mean, setting the derivatives of
        the bound to zero gives for the gaps between boundaries ``gap[k-1] = ln H_B`` and
        ``gap[i] = ln(1 + gap[i+1])``.
    """
    _check(batch, bins)
    gap = math.log(max(1.0, _harmonic(batch)))
    gaps = []
    for _ in range(bins - 1):
        gaps.append(gap)
        gap = math.log1p(gap)
    boundaries, edge = [], 0.0
    for gap in reversed(gaps):
        edge += gap
        boundaries.append(edge * mean_s)
    return tuple(boundaries)


def exponential_service_bound_s(mean_s: float, batch: int, boundaries_s: Sequence[float]) -> float:
    """Return an upper bound of ``E[T]`` for exponential service times (Eq. 27).

    A batch of a closed bin takes at most the bin's upper end; one of the open bin takes its lower
    end and ``H_B`` means, ``H_B`` the B-th harmonic number.
    """
    _check(batch, len(boundaries_s) + 1)
    edges = [0.0, *boundaries_s]
    closed = math.fsum(
        (math.exp(-low / mean_s) - math.exp(-high / mean_s)) * high for low, high in pairwise(edges)
    )
    last = edges[-1]
    return closed + math.exp(-last / mean_s) * (last + _harmonic(batch) * mean_s)


def _harmonic(count: int) -> float:
    return math.fsum(1 / number for number in range(1, count + 1))


def _check(batch: int, bins: int) -> None:
    if batch < 1 or bins < 1:
        raise SpecError(
            f"multi-bin batching: found a batch of {batch} and {bins} bins, expected at least 1"
        )


# --- The evaluation ---


BATCH, SHORTEST_S, LONGEST_S = 8, 1.0, 20.0
MEAN_S = 1.0
BINS = (1, 2, 4, 8, 16, 32)
REQUESTS, SEEDS = 32_000, 3
"""The paper: 128,000 requests, ten times."""
LOADS = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.2)
"""Arrival rates, as shares of what batches without waste could serve."""
ERRORS = (0.01, 0.1, 0.2, 0.3, 0.4, 0.5)
SERVERS = 8
ACCURACY = {2: 0.8614, 4: 0.6297, 8: 0.4229}
"""Of the paper's predictor (Table 1 there)."""
PAPER_GAINS = {"oracle, 32 bins": 1.70, "oracle, 4 bins": 1.45, "predictor, 4 bins": 1.08}
Draw = Callable[[random.Random], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """What serves batches.

    Attributes:
        draw: draws a service time.
        boundaries: of the bins.
        error: probability of a neighbouring bin.
        servers: batches served at once.
        batch: requests of a batch.
    """

    draw: Draw
    boundaries: tuple[float, ...]
    error: float = 0.0
    servers: int = 1
    batch: int = BATCH

    def play(self, rate: float, seed: int, requests: int = REQUESTS) -> tuple[float, float]:
        """Return requests a second and mean latency; batches that never fill are left out.

        Args:
            rate: arrivals a second; infinity puts all of them there at once.
            seed: of the chance.
            requests: how many.
        """
        chance = random.Random(seed)
        bins: list[list[tuple[float, float]]] = [[] for _ in range(len(self.boundaries) + 1)]
        free_s = [0.0] * self.servers
        now_s = last_s = waited_s = 0.0
        served = 0
        for _ in range(requests):
            now_s += chance.expovariate(rate) if rate < float("inf") else 0.0
            service_s = self.draw(chance)
            members = bins[self._bin_of(service_s, chance)]
            members.append((now_s, service_s))
            if len(members) == self.batch:
                # Batches enter the queue in the order they fill, which is the order of time.
                start_s = max(now_s, heapq.heappop(free_s))
                end_s = start_s + max(service for _, service in members)
                heapq.heappush(free_s, end_s)
                waited_s += sum(end_s - arrival_s for arrival_s, _ in members)
                served += len(members)
                last_s = max(last_s, end_s)
                members.clear()
        return served / last_s, waited_s / served

    def _bin_of(self, service_s: float, chance: random.Random) -> int:
        own = bisect_right(self.boundaries, service_s)
        if not self.error or not self.boundaries or chance.random() >= self.error:
            return own
        return chance.choice(
            [one for one in (own - 1, own + 1) if 0 <= one <= len(self.boundaries)]
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Play and print."""
    return run_on_data("multibin", __doc__, collect, report, _draw, argv)


def collect(data: Path) -> Record:
    """Return the points of every figure."""
    return theory() | engine() | predicted(data)


def theory() -> Record:
    """Return what the paper's own queue plays."""
    best = BATCH / ((SHORTEST_S + LONGEST_S) / 2)
    record: Record = {
        "figures 3, 4": [
            {"bins": bins, **_curve(_uniform(bins), best), "theorem": _theorem(bins)}
            for bins in BINS
        ],
        "figure 6": [{"bins": bins, **_curve(_tokens(bins), _tokens_best())} for bins in BINS],
        "figure 8": [
            {"bins": bins, "error": error, "rate": _rate(_uniform(bins, error))}
            for bins in BINS[1:]
            for error in ERRORS
        ],
        "figure 9": [
            {
                "bins": bins,
                **_curve(_exponential(bins), BATCH / MEAN_S),
                "bound": BATCH / exponential_service_bound_s(MEAN_S, BATCH, _edges(bins)),
            }
            for bins in BINS
        ],
        "table 1": [
            {"bins": bins, "accuracy": share, "rate": _rate(_uniform(bins, 1 - share)),
             "oracle": _rate(_uniform(bins))}
            for bins, share in ACCURACY.items()
        ],
        "one bin": _rate(_uniform(1)),
        "bins for 95 %": bins_needed(SHORTEST_S, LONGEST_S, BATCH, 0.95 * best),
    }  # fmt: skip
    return record


# --- The shipped policy, predictor and simulator ---

PHI, VICUNA = "microsoft/Phi-3-mini-4k-instruct", "meta-llama/Llama-2-13b-hf"
ENGINE_PROMPT, ENGINE_ANSWER = 128, 512
BATCHES = (1, 2, 4, 8, 16, 32, 64)
LONGEST_PROMPT, LONGEST_ANSWER = 3000, 512
SERVED = 4800
"""Requests of a run: six times the paper's, so that the last batches, not full, weigh little."""
DATA = ("Azure, conversation", "Azure, code", "Alpaca")
MODELS = {name: (PHI,) for name in DATA} | {DATA[0]: (PHI, VICUNA)}
"""Gains hardly depend on the model."""
PREDICTORS = ("oracle", "learned")
MEAN_BINS = 4
"""Where the mean of all answers is the prediction, which is one bin whatever the number."""


def engine() -> Record:
    """Return tokens a second by batch (Figure 1a) and seconds by answer (Figure 5)."""
    return {"figure 1a": batch_rates(), "figure 5": answer_seconds()}


def batch_rates() -> list[Record]:
    """Return tokens a second by batch."""
    prices = _prices(PHI, max(BATCHES))
    return [
        {
            "batch": batch,
            "tokens_per_s": batch * ENGINE_ANSWER / _static_s(prices, batch, ENGINE_ANSWER),
        }
        for batch in BATCHES
    ]


def answer_seconds() -> Record:
    """Return the seconds of single answers, and how far they are from a line."""
    prices = _prices(PHI, max(BATCHES))
    answers = [64, 128, 192, 256, 320, 384, 448, 512]
    seconds = [_static_s(prices, 1, count) for count in answers]
    slope, intercept = linear_regression(answers, seconds)
    misses = [
        abs(intercept + slope * count - found) / found
        for count, found in zip(answers, seconds, strict=True)
    ]
    return {
        "answers": answers,
        "seconds": seconds,
        "token_s": slope,
        "largest_error": max(misses),
    }


def predicted(folder: Path) -> Record:
    """Return throughput by bins and predictor (Figures 7 and 11), and the predictor's bins."""
    rows, scores = [], []
    for name in DATA:
        scores.append({"data": name, **score_of(folder, name)})
        for model in MODELS[name]:
            say(f"{name}, {model}")
            rows += [
                {
                    "data": name,
                    "model": model,
                    "bins": bins,
                    "rates": rates_of(folder, name, model, bins),
                }
                for bins in BINS
            ]
    return {"figures 7, 11": rows, "figure 10": scores}


class Lesson(NamedTuple):
    """What one half of a data set teaches, and the other half.

    Attributes:
        model: the predictor.
        report: on its held-out fifths.
        truth: lengths of the answers that it learned from.
        served: pairs of lengths of the other half.
    """

    model: LengthModel
    report: FitReport
    truth: list[int]
    served: list[tuple[int, int]]


@cache
def lesson(folder: Path, name: str) -> Lesson:
    """Learn from one half of a data set."""
    taught, served = halves(lengths_of(folder, name))
    model, report = fit_length_model([Answered(*pair) for pair in taught])
    return Lesson(model, report, [new for _, new in taught], served)


def score_of(folder: Path, name: str) -> Record:
    """Return how well lengths are predicted, and the bins of Figure 10."""
    model, report, truth, served = lesson(folder, name)
    return {
        "samples": report.samples,
        "explained": report.explained,
        "rank_correlation": report.rank_correlation,
        "bins": [confusion(model, truth, served, bins) for bins in ACCURACY],
    }


def rates_of(folder: Path, name: str, model_name: str, bins: int) -> dict[str, float]:
    """Return requests a second by what is known of lengths."""
    model, _, truth, served = lesson(folder, name)
    costs = _prices(model_name, BATCH)
    edges = quantile_boundaries(truth, bins)
    schedule = Schedule(policy="multibin", decode_batch=BATCH, boundaries=edges)
    trace = [
        TraceRequest(arrival_s=0.0, prompt_tokens=prompt, new_tokens=new)
        for prompt, new in served[:SERVED]
    ]
    found = {"oracle": _play(costs, schedule, trace, None)}
    if bins > 1:
        found["learned"] = _play(costs, schedule, trace, _by_length(model))
    if bins == MEAN_BINS:
        found["mean"] = _play(costs, schedule, trace, EmpiricalPredictor(truth))
    return found


def lengths_of(folder: Path, name: str) -> list[tuple[int, int]]:
    """Return pairs of prompt and answer lengths that the models have room for."""
    if name == "Alpaca":
        with (folder / "helix" / "lengths_alpaca.csv").open(encoding="utf-8") as file:
            found = [
                (int(row["input_len"]), int(row["output_len"])) for row in csv.DictReader(file)
            ]
    else:
        kind = {"Azure, conversation": "conv", "Azure, code": "code"}[name]
        path = folder / "azure" / f"AzureLLMInferenceTrace_{kind}.csv"
        found = [(one.prompt_tokens, one.new_tokens) for one in load_trace(path)]
    return [
        (max(1, prompt), min(LONGEST_ANSWER, max(1, new)))
        for prompt, new in found
        if prompt <= LONGEST_PROMPT
    ]


def halves(
    pairs: Sequence[tuple[int, int]],
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return two random halves."""
    mixed = random.Random(0).sample(list(pairs), len(pairs))
    return mixed[: len(mixed) // 2], mixed[len(mixed) // 2 :]


def _by_length(model: LengthModel) -> LengthPredictor:
    return lambda request: model.predict(request.prompt_tokens)


def confusion(
    model: LengthModel, taught: Sequence[int], served: Sequence[tuple[int, int]], bins: int
) -> Record:
    """Return the shares of requests by true and predicted bin, of equal probability (Figure 10)."""
    edges = quantile_boundaries(taught, bins)
    counts = [[0] * bins for _ in range(bins)]
    for prompt, new in served:
        counts[bisect_right(edges, new)][bisect_right(edges, model.predict(prompt))] += 1
    return {
        "bins": bins,
        "shares": [[count / len(served) for count in row] for row in counts],
        "right": sum(counts[one][one] for one in range(bins)) / len(served),
        "near": sum(
            counts[one][other]
            for one in range(bins)
            for other in range(max(0, one - 1), min(bins, one + 2))
        ) / len(served),
    }  # fmt: skip


@cache
def _prices(name: str, batch: int) -> PlanCosts:
    cluster = Cluster(
        name="A100", nodes=(Node(name="n", devices=(DeviceGroup(type="A100-80G", count=1),)),)
    )
    work = Workload(batch=batch, prompt_tokens=ENGINE_PROMPT, new_tokens=ENGINE_ANSWER)
    request = PlanRequest(
        model=resolve_model(name)[0],
        cluster=cluster,
        workload=work,
        dtype="float16",
        kv_bits=16,
        bits=(16,),
    )
    plan = make_plan(request, "llmpq")
    sizes = MicroBatching(prefill=batch, decode=batch)
    return PlanCosts(replace(plan, micro_batching=sizes), costs_of(request, plan.cluster))


def _static_s(prices: PlanCosts, batch: int, answer: int) -> float:
    one = TraceRequest(arrival_s=0.0, prompt_tokens=ENGINE_PROMPT, new_tokens=answer)
    shape = PipelineShape(
        micro_batching=MicroBatching(prefill=batch, decode=batch), num_slots=batch, num_stages=1
    )
    policy = make_policy(default_schedule("static", batch), shape)
    return simulate(prices, policy, [one] * batch, num_slots=batch).makespan_s


def _play(
    prices: PlanCosts,
    schedule: Schedule,
    trace: Sequence[TraceRequest],
    predictor: LengthPredictor | None,
) -> float:
    """Return answered requests a second."""
    shape = PipelineShape(
        micro_batching=MicroBatching(prefill=BATCH, decode=BATCH), num_slots=BATCH, num_stages=1
    )
    report = simulate(
        prices, make_policy(schedule, shape), trace, num_slots=BATCH, predictor=predictor
    )
    return report.throughput_requests_per_s


# --- The report ---


def report(record: Record) -> str:
    """Return the tables."""
    one = record["one bin"]
    full = [
        [str(row["bins"]), number(row["most"], 3), number(row["theorem"], 3),
         f"{row['most'] / row['theorem'] - 1:+.2%}", number(row["latency_s"][0], 1),
         number(row["lower_s"], 1)]
        for row in record["figures 3, 4"]
    ]  # fmt: skip
    six = [
        [
            str(row["bins"]),
            number(row["most"], 2),
            number(row["most"] / record["figure 6"][0]["most"]),
        ]
        for row in record["figure 6"]
    ]
    eight = [
        [
            str(bins),
            *(number(row["rate"] / one) for row in record["figure 8"] if row["bins"] == bins),
        ]
        for bins in BINS[1:]
    ]
    nine = [
        [str(row["bins"]), number(row["most"]), number(row["bound"]), number(row["latency_s"][0])]
        for row in record["figure 9"]
    ]
    first = [
        [str(row["bins"]), f"{row['accuracy']:.1%}", number(row["oracle"] / one),
         number(row["rate"] / one)]
        for row in record["table 1"]
    ]  # fmt: skip
    gains = ", ".join(f"{name} {gain:.2f}x" for name, gain in PAPER_GAINS.items())
    return "\n\n".join([
        "## Figures 3 and 4: uniform service times",
        table(("bins", "most requests/s", "theorem 4.2", "difference",
               "latency at 10 % load, s", "Lemma 5.1, s"), full),
        f"95 % of the throughput without waste takes {record['bins for 95 %']} bins (Theorem 4.3).",
        "## Figure 6: times linear in answers, 8 servers",
        table(("bins", "most requests/s", "over one bin"), six),
        f"The paper measures on a model of its own: {gains}.",
        "## Figure 8: neighbouring bins by mistake, throughput over one bin",
        table(("bins", *(f"p = {error:g}" for error in ERRORS)), eight),
        "## Figure 9: exponential service times",
        table(("bins", "most requests/s", "lower bound", "latency at 10 % load, s"), nine),
        "## The paper's predictor's accuracies, throughput over one bin (mistakes into neighbours)",
        table(("bins", "accuracy, paper", "oracle", "predictor"), first),
        *_engine_tables(record),
    ])  # fmt: skip


def _engine_tables(record: Record) -> Iterator[str]:
    yield "## Figure 1(a): Phi-3-mini on an A100-80G, tokens/s by batch"
    batches = record["figure 1a"]
    yield table(
        [str(row["batch"]) for row in batches],
        [[number(row["tokens_per_s"], 0) for row in batches]],
    )
    five = record["figure 5"]
    yield (
        f"Figure 5: an answer takes {1000 * five['token_s']:.2f} ms a token, a line within "
        f"{five['largest_error']:.1%}."
    )
    yield "## Figures 7 and 11: throughput over one bin, by what is known of lengths"
    rows = []
    for name in DATA:
        for model in MODELS[name]:
            for kind in PREDICTORS:
                gains = gains_of(record, name, model, kind)
                rows.append([name, model.rpartition("/")[2], kind, *map(number, gains)])
    yield table(("lengths", "model", "known", *map("{} bins".format, BINS[1:])), rows)
    yield "## Table 1 and Figure 10: the learned predictor's bins (lengths of prompts alone)"
    found = [
        [
            score["data"], f"{score['rank_correlation']:.2f}",
            *(f"{one['right']:.1%}, {one['near']:.1%}" for one in score["bins"]),
        ]
        for score in record["figure 10"]
    ]  # fmt: skip
    head = [
        f"{bins} bins: right, next to it (paper {share:.1%})" for bins, share in ACCURACY.items()
    ]
    yield table(("lengths", "rank correlation", *head), found)


def gains_of(record: Record, data: str, model: str, kind: str) -> list[float]:
    """Return throughput over one bin, for every number of bins from two on."""
    rows = [row for row in record["figures 7, 11"] if (row["data"], row["model"]) == (data, model)]
    one = next(row["rates"]["oracle"] for row in rows if row["bins"] == 1)
    return [row["rates"][kind] / one for row in rows if row["bins"] > 1]


def _uniform(bins: int, error: float = 0.0) -> Queue:
    return Queue(
        draw=lambda chance: chance.uniform(SHORTEST_S, LONGEST_S),
        boundaries=uniform_boundaries(SHORTEST_S, LONGEST_S, bins),
        error=error,
    )


def _edges(bins: int) -> tuple[float, ...]:
    return exponential_boundaries(MEAN_S, BATCH, bins)


def _exponential(bins: int) -> Queue:
    return Queue(draw=lambda chance: chance.expovariate(1 / MEAN_S), boundaries=_edges(bins))


def _token_s(chance: random.Random) -> float:
    return 0.1 + 0.02 * max(10.0, min(512.0, chance.gauss(130.0, 60.0)))


def _tokens(bins: int) -> Queue:
    chance = random.Random(0)
    known = [_token_s(chance) for _ in range(20_000)]
    return Queue(draw=_token_s, boundaries=quantile_boundaries(known, bins), servers=SERVERS)


def _tokens_best() -> float:
    chance = random.Random(0)
    return SERVERS * BATCH / fmean(_token_s(chance) for _ in range(20_000))


def _theorem(bins: int) -> float:
    return uniform_throughput(SHORTEST_S, LONGEST_S, BATCH, bins)


def _rate(queue: Queue) -> float:
    """Return the throughput when everyone is there from the start."""
    return fmean(queue.play(float("inf"), seed)[0] for seed in range(SEEDS))


def _curve(queue: Queue, best: float) -> Record:
    """Return throughput and latency over load, and the most that is served."""
    points = [
        [queue.play(load * best, seed, REQUESTS // 2) for seed in range(SEEDS)] for load in LOADS
    ]
    bins, rate = len(queue.boundaries) + 1, LOADS[0] * best
    forming_s = (queue.batch - 1) * bins / (2 * rate)
    return {
        "rate": [fmean(point[0] for point in found) for found in points],
        "latency_s": [fmean(point[1] for point in found) for found in points],
        "most": _rate(queue),
        "lower_s": forming_s + uniform_service_s(SHORTEST_S, LONGEST_S, queue.batch, bins),
    }


def _draw(record: Record, path: Path) -> None:
    from reproduce.pictures import draw_multibin  # noqa: PLC0415  matplotlib is extra

    draw_multibin(record, LOADS, path)


if __name__ == "__main__":
    raise SystemExit(main())
