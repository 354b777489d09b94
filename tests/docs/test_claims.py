"""Sentences with figures say what the results hold.

``CLAIMS`` names a sentence by a phrase of it, and has a function that writes its figures, in their
order, from the results; or the reason why they cannot be recomputed. On the pages of the evidence
it names every sentence that has a figure. A change of the results or of a sentence fails here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from functools import cache, partial
from math import ceil
from statistics import fmean
from typing import Any

import pytest
from helpers.docs_pages import ROOT

from reproduce import exegpt, larry, llm_pq_kernels, multibin, run_all, sal, samullm
from scripts.docs_site import evidence

Record = dict[str, Any]

EVIDENCE = "evidence/"
NOT_PROSE = re.compile(r"^```.*?^```$|<!--.*?-->|^#.*?$|^!\[.*?$|^\| ---.*?$", re.M | re.S)
ITEM = re.compile(r"^(?:-|\d+\.) ")
BLOCK = re.compile(r"\n\s*\n|\n(?=\s*(?:[-|]|\d+\.) ?)")
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
END = re.compile(r"(?<=[.!?:;])\s+(?=[A-Z*`(])")
NAMED = r"\d+(?:\.\d+)*[a-z]?(?: \([a-z, ]+\))?"
REFERENCE = re.compile(
    r"(?:arXiv|Algorithm|Tables?|Figures?|Sec\.|Section|Theorem|Lemma|Gaps?) "
    rf"{NAMED}(?:(?:,| and| to) {NAMED})*"
)
FIGURE = re.compile(r"(?<![\w.])(?<![A-Za-z]-)\d+(?:,\d{3})*(?:\.\d+)?x?(?!\w)")


def sentences(page: str) -> list[str]:
    """Return what has a figure of a page: sentences of its prose and lists, rows of its tables."""
    text = NOT_PROSE.sub("", (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"))
    blocks = (" ".join(LINK.sub(r"\1", block).split()) for block in BLOCK.split(text))
    found = (
        part
        for block in blocks
        for part in ([block] if block.startswith("|") else END.split(ITEM.sub("", block)))
    )
    return [sentence for sentence in found if figures(sentence)]


def figures(text: str) -> list[str]:
    """Return the figures of a text; numbers of tables, figures and sections are none."""
    return FIGURE.findall(REFERENCE.sub("", text))


@cache
def record(topic: str) -> Record:
    """Return the numbers that a script recorded."""
    found: Record = evidence.load(topic)["record"]
    return found


def rows(topic: str, title: str) -> list[list[Any]]:
    """Return the rows of a table whose cells are numbers."""
    (found,) = (item["rows"] for item in evidence.load(topic)["tables"] if item["title"] == title)
    return found


def between(values: Iterable[float], form: str = ".2f") -> str:
    """Return the least and the largest."""
    found = sorted(values)
    return f"{found[0]:{form}} to {found[-1]:{form}}"


# --- SamuLLM ---


def overheads() -> str:
    shares: dict[str, list[float]] = {}
    for name, found in record("iteration-costs")["tables"].items():
        shares.setdefault(name[-1], []).append(100 * found["decode overhead share"])
    assert list(map(len, shares.values())) == [8, 9, 9]
    return " ".join(between(values, ".0f") for values in shares.values())


def whole_iterations() -> str:
    found = record("iteration-costs")
    for table in found["tables"].values():
        for phase in ("prefill", "decode"):
            assert table[f"{phase} whole"]["mean"] < table[f"{phase} paper"]["mean"]
    return f"{100 * found['all']['whole']['median']:.0f}"


def below_published() -> str:
    cases = record("samullm")["cases"]
    gains = {
        rival: [(samullm.gain(case, rival), samullm.published(case, rival)) for case in cases]
        for rival in samullm.RIVALS
    }
    assert all(gain <= high for found in gains.values() for gain, (_, high) in found)
    below = {rival: sum(gain < low for gain, (low, _) in gains[rival]) for rival in gains}
    slower = sum(gain < 1 for gain, _ in gains["min"])
    return f"{below['max']} {len(cases)} {below['min']} {len(cases)} {slower}"


def below_as_planned() -> str:
    cases = record("samullm")["cases"]
    below = {
        rival: sum(
            samullm.predicted_gains(case)[rival] < samullm.published(case, rival)[0]
            for case in cases
        )
        for rival in samullm.RIVALS
    }
    return f"{below['max']} {below['min']}"


def mended_by_the_scheduler() -> str:
    first = record("samullm")["cases"][0]
    assert round(first["samullm"]["predicted_s"]) == round(first["samullm"]["played_s"])
    seconds = first["min"]["predicted_s"], first["min"]["played_s"], first["samullm"]["played_s"]
    return " ".join(f"{one:.0f}" for one in seconds)


def code_searches() -> dict[str, dict[str, Record]]:
    return record("samullm")["searches"]


def gains_a_device() -> str:
    found, longer = {case["name"]: case for case in record("samullm")["cases"]}, []
    for documents in (300, 500):
        name = f"chain, {documents} documents, 4 evaluations"
        case, code = found[name], code_searches()[name]
        assert round(code["1"]["predicted_s"]) == round(case["max"]["predicted_s"])
        longer.append(case["samullm"]["predicted_s"] / case["max"]["predicted_s"] - 1)
    assert f"{100 * longer[0]:.0f}" == f"{100 * longer[1]:.0f}"
    return f"300 500 {100 * longer[0]:.0f}"


def code_over_algorithm_1() -> str:
    cases = record("samullm")["cases"]
    of = [
        [code_searches()[case["name"]][str(number)]["predicted_s"] / case["samullm"]["predicted_s"]
         for case in cases]
        for number in samullm.SEQUENCES
    ]  # fmt: skip
    return f"{max(of[0]):.2f} {between(of[1][1:])} 21"


def ours_over_the_best() -> str:
    over = []
    for case in record("samullm")["cases"]:
        code = [one["predicted_s"] for one in code_searches()[case["name"]].values()]
        best = min(*code, *(case[method]["predicted_s"] for method in samullm.METHODS[1:]))
        over.append(100 * (case["greedy"]["predicted_s"] / best - 1))
    return f"{max(over):.1f}"


def our_search() -> str:
    cases = record("samullm")["cases"]
    over = {
        rival: between(case[rival]["played_s"] / case["greedy"]["played_s"] for case in cases)
        for rival in samullm.RIVALS
    }
    return f"{over['max']} {over['min']}"


def apart() -> str:
    shares = rows("samullm", "Parts one after the other, over mixed")
    return f"{between(float(row[2]) for row in shares)} 1.0 1.2"


def placed_last_first() -> str:
    mixed = [case for case in record("samullm")["cases"] if case["name"].startswith("mixed")]
    return between(
        (case["samullm"]["played_s"] / case["greedy"]["played_s"] for case in mixed), ".1f"
    )


def estimates() -> str:
    errors = {
        case["name"]: abs(case["greedy"]["played_s"] / case["greedy"]["predicted_s"] - 1)
        for case in record("samullm")["cases"]
    }
    assert errors.pop("routing, lengths sampled") > 0.4
    return f"{ceil(100 * max(errors.values()))}"


def ablated(variant: str, method: str) -> list[float]:
    return [
        found[method][variant]["played_s"] / found[method][samullm.AS_PLANNED]["played_s"]
        for found in record("samullm")["ablations"].values()
    ]


def without_preemption() -> str:
    ours, least = (sorted(ablated("no preemption", method)) for method in ("samullm", "min"))
    return f"{ours[0]:.2f} {ours[1]:.2f} {least[0]:.2f} {least[1]:.2f}"


def with_known_lengths() -> str:
    gains = (
        1 / share for method in ("samullm", "min") for share in ablated("lengths known", method)
    )
    return f"0.9 1.0 {between(gains)}"


# --- Multi-bin batching ---


def theorems() -> str:
    found = record("multibin")
    uniform = found["figures 3, 4"]
    rates = max(abs(row["most"] / row["theorem"] - 1) for row in uniform)
    times = max(abs(row["latency_s"][0] / row["lower_s"] - 1) for row in uniform)
    return f"{ceil(1000 * rates) / 10:.1f} {ceil(100 * times)} 95 {found['bins for 95 %']}"


def bins_of_a_model() -> str:
    most = {row["bins"]: row["most"] for row in record("multibin")["figure 6"]}
    return f"1.70x 32 1.45x 4 {most[32] / most[1]:.2f}x {most[4] / most[1]:.2f}x"


def bins_of_the_predictor() -> str:
    found = record("multibin")
    (row,) = (row for row in found["table 1"] if row["bins"] == 4)
    return f"4 {row['rate'] / found['one bin']:.2f}x {row['oracle'] / found['one bin']:.2f}x 1.08x"


def learned_bins() -> str:
    found = record("multibin")
    conversations, *_ = found["figure 10"]
    right = [f"{100 * one['right']:.0f}" for one in conversations["bins"]]
    paper = [f"{100 * share:.0f}" for share in multibin.ACCURACY.values()]
    gains = [
        multibin.gains_of(found, conversations["data"], multibin.PHI, kind)[1]
        for kind in ("learned", "oracle")
    ]
    return " ".join([*right, *paper, "4", *(f"{gain:.2f}x" for gain in gains)])


def unpredictable_lengths() -> str:
    found = record("multibin")
    _, *others = multibin.DATA
    learned, known = (
        [gain for name in others for gain in multibin.gains_of(found, name, multibin.PHI, kind)]
        for kind in ("learned", "oracle")
    )
    return f"{min(learned):.2f}x {max(learned):.2f}x {max(known):.2f}x"


def seconds_of_answers() -> str:
    return f"{100 * record('multibin')['figure 5']['largest_error']:.1f}"


# --- Forecasts, index ---


def memory_errors() -> str:
    short = "Forecast error of a stage's peak memory, percent"
    long = "The same with prompts of 3,000 tokens, computed in chunks"
    table = [row for title in (short, long) for row in rows("memory", title)]
    errors = [error for row in table for cell in row[3:] for error in cell]
    return f"{len(errors)} {-min(errors):.1f} {max(errors):.1f} {fmean(errors):.1f}"


def plan_errors() -> str:
    errors = [abs(row[7]) for row in rows("different-devices", "All plans")]
    return f"{fmean(errors):.1f} {max(errors)}"


def indicator_losses() -> str:
    found = rows("indicators", "Plans chosen by each indicator")
    return f"{max(100 * (cell[0] / row[1][0] - 1) for row in found for cell in row[2:4]):.1f}"


def versions() -> str:
    found = {row[0]: row[1:] for row in rows("versions", "0.1 and 0.2")}

    def shares(kind: str) -> str:
        return between(row[2] for name, row in found.items() if kind in name)

    first = found["load at 4 bits, seconds"]
    return (
        f"{shares('one sequence')} {shares('ragged')} {shares('kernel')} {first[2]:.1f} "
        f"{first[1] - first[0]:.2f}"
    )


# --- LARRY ---

TTFT, PER_TOKEN, TGT = larry.METRICS


def larry_pairs(rival: str, law: str = "") -> list[tuple[Record, Record]]:
    """Return each run of LARRY with the rival's."""
    return [
        pair
        for case in record("larry")["cases"]
        if case["law"] in (law, law or case["law"])
        for pair in zip(case["orders"]["LARRY"], case["orders"][rival], strict=True)
    ]


def lower(rival: str, metric: str, place: str) -> str:
    found = [ours[metric][place] < theirs[metric][place] for ours, theirs in larry_pairs(rival)]
    return f"{sum(found)} {len(found)}"


def larry_is_lower() -> str:
    places = (TTFT, "p50"), (TTFT, "p95"), (PER_TOKEN, "p95")
    (every,) = {lower(rival, *place) for rival in larry.RIVALS for place in places}
    assert lower("FCFS", PER_TOKEN, "p50") == lower("No-Preempt", PER_TOKEN, "p50") == every
    shares = [
        100
        * (
            1
            - larry.mean_of(orders["LARRY"], TTFT, "p95")
            / larry.mean_of(orders["FCFS"], TTFT, "p95")
        )
        for orders in (case["orders"] for case in record("larry")["cases"])
    ]
    return f"1 {every} {lower('TRAIL+', PER_TOKEN, 'p50')} {between(shares, '.0f')}"


def preempted() -> str:
    runs = [
        run for case in record("larry")["cases"] for runs in case["orders"].values() for run in runs
    ]
    assert max(run["preemption_rate"] for run in runs) < 1e-3
    return "0.1"


def no_alpha() -> str:
    found = record("larry")
    claims = {
        float(alpha): larry.alpha_claims(found, alpha) for alpha in found["cases"][0]["alphas"]
    }
    most = max(sum(map(all, runs)) for runs in claims.values())
    return f"{most} {len(claims[1.0])}"


def alphas_and_p99() -> str:
    runs = larry_pairs("FCFS")
    higher = sum(ours[TTFT]["p99"] > theirs[TTFT]["p99"] for ours, theirs in runs)
    found = larry.alpha_claims(record("larry"), "50.0")
    return f"1 {higher} {len(runs)} 50 {sum(below for below, _ in found)} {len(found)}"


def generation_times() -> str:
    code, chat = (
        [ours[TGT]["p95"] / theirs[TGT]["p95"] for ours, theirs in larry_pairs("FCFS", law)]
        for law in ("SW-Code", "SW-Chat")
    )
    assert max(chat) < 1.01
    longer = sum(ratio > 1.05 for ratio in code)
    return f"{100 * (max(code) - 1):.0f} {longer} {len(code)} 5 1"


def memory_never_binds() -> str:
    runs = [
        run
        for case in record("larry")["cases"]
        if case["law"] == "SW-Code"
        for run in zip(case["orders"]["FCFS"], case["orders"]["No-Preempt"], strict=True)
    ]
    assert all(fcfs == reserving for fcfs, reserving in runs)
    return f"{len(runs)}"


def rates_of_lower_p95() -> str:
    found = record("larry")
    for case in found["cases"]:
        if case["law"] == "SW-Chat":
            ours, theirs = (
                [larry.mean_of(runs, TTFT, "p95") for runs in case["curves"][name]]
                for name in ("LARRY", "FCFS")
            )
            higher = [one > two for one, two in zip(ours, theirs, strict=True)]
            assert higher.index(True) == len(higher) - 1
    return f"{found['curve'][-1]} {found['curve'][-2]}"


def units() -> str:
    found = {(row["choice"], row["law"]): row["ratios"] for row in record("larry")["choices"]}
    p50 = f"{TTFT} p50"

    def ratios(*names: str) -> list[float]:
        return [found[name, law][p50] for name in names for law in larry.LAWS]

    few = ratios("unit: 256 tokens", "unit: 1024 tokens", "unit: 4096 tokens", "as above")
    return f"256 4,096 {between(few)} {between(ratios('unit: all tokens of the KV memory'))}"


def worse_choices() -> str:
    (worse,) = (row for row in record("larry")["choices"] if row["ratios"][f"{TTFT} p95"] > 1)
    assert (worse["choice"], worse["law"]) == ("Poisson arrivals", "SW-Code")
    return f"{worse['ratios'][f'{TTFT} p95']:.2f}"


def preempted_choices() -> str:
    found = {
        (row["choice"], row["law"]): 100 * row["preemption_rate"]
        for row in record("larry")["choices"]
    }
    return (
        f"{found['watermark 0', 'SW-Chat']:.2f} 60 {found['60 % of the KV memory', 'SW-Chat']:.2f}"
    )


# --- SAL ---


def sal_ratios(
    ours: str, order: str, rival: str, metric: str, place: str, kind: str = "cases", law: str = ""
) -> list[float]:
    """Return a figure of one balancer over that of another, in each run."""
    return [
        run["figures"][order][ours][metric][place] / run["figures"][order][rival][metric][place]
        for case in record("sal")[kind]
        if law in ("", case["law"])
        for run in case["runs"]
    ]


def first_tokens_p50() -> str:
    for order in sal.SCHEDULERS:
        for rival in set(sal.PAPERS) - {"SAL"}:
            for place in ("mean", "p95"):
                assert fmean(sal_ratios("SAL", order, rival, TTFT, place)) < 1
    means, counts = [], []
    for metric in sal.METRICS[:2]:
        for rival in ("P2C", "Random"):
            ratios = sal_ratios("SAL", "LARRY", rival, metric, "p50")
            means.append(f"{fmean(ratios):.2f}")
            counts.append(f"{sum(ratio < 1 for ratio in ratios)}")
    return " ".join([*means[:2], *counts[:2], f"{len(ratios)}", *means[2:]])


def lowest() -> str:
    runs = sal._runs(record("sal"))
    counts = [
        sum(sal._best_of(run["figures"], metric, place) == ("LARRY", "SAL") for run in runs)
        for metric in (TTFT, TGT)
        for place in ("mean", "p95")
    ]
    return f"{counts[0]} {len(runs)} {' '.join(map(str, counts[1:]))}"


def with_trail() -> str:
    ratios = sal_ratios("SAL", "TRAIL+", "P2C", TTFT, "mean")
    longer = [
        100 * (fmean(sal_ratios("SAL", "TRAIL+", "P2C", TGT, place)) - 1)
        for place in ("mean", "p95")
    ]
    assert min(longer) > 0
    return f"{sum(r < 1 for r in ratios)} {len(ratios)} {max(longer):.0f}"


def orders_on_code() -> str:
    (case,) = (
        case
        for case in record("sal")["cases"]
        if (case["fleet"], case["law"]) == ("Llama-3-8B, 8 A100-40G", "SW-Code")
    )
    return " ".join(
        f"{fmean(run['figures'][order]['SAL'][TTFT]['p95'] for run in case['runs']):.2f}"
        for order in ("FCFS", "LARRY")
    )


def in_seconds() -> str:
    found = [
        fmean(sal_ratios("SAL in seconds", order, rival, TTFT, "mean"))
        for order in sal.SCHEDULERS
        for rival in set(sal.PAPERS) - {"SAL"}
    ]
    same = sal_ratios("SAL in seconds", "FCFS", "LMetric", TTFT, "mean")
    assert all(abs(ratio - 1) < 0.005 for ratio in same)
    return between(found)


def in_steps() -> str:
    chat_mean, *parts = (
        [
            fmean(sal_ratios("SAL in seconds", order, "SAL", TTFT, place, "unequal", law))
            for order in sal.UNEQUAL_SCHEDULERS
        ]
        for law in larry.LAWS
        for place in ("mean", "p95")
    )
    (mean,) = {f"{ratio:.2f}" for ratio in chat_mean}
    return f"{mean} {' '.join(map(between, parts))}"


# --- LLM-PQ ---


def served(scheme: str, *tables: str) -> list[Record]:
    """Return a scheme's rows of the paper's tables of seconds, in one order for all schemes."""
    parts = record("llm-pq")["serving"]
    return [row for name in tables or parts for row in parts[name] if row["scheme"] == scheme]


def gains(scheme: str, field: str, *tables: str) -> list[float]:
    return [row[field] for row in served(scheme, *tables)]


def faster_than_pipeedge() -> str:
    equal = gains(run_all.OURS_AT_EQUAL_QUALITY, "gain")
    faster = [
        ours["omega"] > theirs["omega"]
        for ours, theirs in zip(served(run_all.OURS), served(run_all.RIVAL), strict=True)
        if ours["gain"] > 1
    ]
    (last,) = (row for row in served(run_all.OURS_AT_EQUAL_QUALITY) if row["gain"] < 1.001)
    best = sum(gain > 1.001 for gain in gains(run_all.OURS_AT_BEST, "gain_over_best"))
    return (
        f"{sum(gain > 1.001 for gain in equal)} {len(equal)} {last['cluster']} {len(faster)} "
        f"{sum(faster)} {best} 0.1"
    )


def mean_and_most(scheme: str, field: str) -> str:
    found = gains(scheme, field, "table 4")
    return f"{fmean(found):.2f}x {max(found):.2f}x"


def throughput_gains() -> str:
    return (
        f"2.26x 2.88x {mean_and_most(run_all.OURS_AT_EQUAL_QUALITY, 'gain')} "
        f"{mean_and_most(run_all.OURS_AT_BEST, 'gain_over_best')} "
        f"{mean_and_most(run_all.OURS, 'gain')}"
    )


def other_gains(name: str, published: str, digits: int) -> str:
    equal = fmean(gains(run_all.OURS_AT_EQUAL_QUALITY, "gain", name))
    best = fmean(gains(run_all.OURS_AT_BEST, "gain_over_best", name))
    theirs = fmean(gains(run_all.OURS, "paper_gain", name))
    assert f"{theirs:.2f}x" == published
    return f"{published} {equal:.2f}x {best:.{digits}f}x"


def reversed_gains() -> str:
    found = [
        row["gain"]
        for row in served(run_all.OURS_AT_EQUAL_QUALITY, "table 4", "table 7")
        if row["cluster"] == 4
    ]
    return f"4 {found[0]:.2f}x {found[1]:.2f}x"


def out_of_memory() -> str:
    found = served("Uniform", "table 4", "table 5")
    theirs = [str(row["cluster"]) for row in found if row["paper_latency_s"] is None]
    ours = [str(row["cluster"]) for row in found if row["latency_s"] is None]
    with_theirs = [
        str(row["cluster"])
        for row in kernels_of_2023()
        if row["scheme"] == llm_pq_kernels.UNIFORM and row["ours"] is None
    ]
    assert with_theirs == theirs
    return " ".join([*theirs, *ours])


def solving_seconds(solver: str) -> list[float]:
    return [
        row["ours"][f"llmpq by {solver}, different layers"]["solving_s"]
        for row in record("llm-pq")["solving"]["table 10"]
    ]


def solving() -> str:
    paper = [row["paper_s"] for row in record("llm-pq")["solving"]["table 10"]]
    ours = [solving_seconds(solver) for solver in ("exact", "highs")]
    seconds = " ".join(f"{fmean(found):.2f} {max(found):.2f}" for found in ours)
    three = record("llm-pq")["solving"]["three nodes"]["llmpq by exact"]["solving_s"]
    nodes = f"{three:.2f} {run_all.THREE_NODES_S:.0f}"
    return f"{fmean(paper):.1f} {max(paper):.0f} {seconds} {nodes}"


def layer_divergences() -> list[float]:
    """Return the divergence of each layer at 4 bits, measured by ``benchmarks/indicator.py``."""
    kept = json.loads((ROOT / "notebooks" / "data" / "truth.json").read_text(encoding="utf-8"))
    pieces = list(kept["pieces"].values())
    tokens = sum(piece["tokens"] for piece in pieces)
    return [
        sum(piece["tokens"] * piece["changed"][f"{layer} 4"][1] for piece in pieces) / tokens
        for layer in range(12)
    ]


def thirds_at_4_bits() -> str:
    found = layer_divergences()
    return " ".join(["4", *(f"{sum(found[first : first + 4]):.4f}" for first in (0, 4, 8))])


def first_layer_at_4_bits() -> str:
    found = layer_divergences()
    assert found[1] < found[6] < found[11] < found[0]
    return f"{found[0]:.4f}"


def over_adabits() -> str:
    found = record("llm-pq")["adaptive_only"]["rows"]
    (same,) = (row for row in found if row["llmpq_omega"] <= row["adabits_omega"])
    assert same["llmpq_tokens_per_s"] == same["adabits_tokens_per_s"]
    ratios = (
        row["llmpq_tokens_per_s"] / row["adabits_tokens_per_s"] for row in found if row is not same
    )
    return " to ".join(f"{ratio}x" for ratio in between(ratios).split(" to ")) + (
        f" {same['cluster']}"
    )


def measured_pipeedge() -> str:
    found = {row[0]: row[3] for row in rows("different-devices", "Other planners over llmpq")}
    return f"{found['pipeedge'][0]}"


def indicator_costs() -> str:
    seconds = {row[0]: row[1] for row in rows("indicators", "Cost")}
    return f"{seconds['Hessian'] / seconds['variance']:.1f} 58 73"


def kernels_of_2023() -> list[Record]:
    return list(record("llm-pq-kernels")["serving"])


def few_bit_rows() -> str:
    low, high = llm_pq_kernels.WITHIN
    ours, today = (
        llm_pq_kernels.few_bit_ratios(kernels_of_2023(), key).values() for key in ("ours", "today")
    )
    met = [ratio for ratio in ours if low <= ratio <= high]
    within = " ".join(f"{ratio}x" for ratio in between(met).split(" to "))
    return f"{len(met)} {len(ours)} 3 4 {within} {between(today, '.0f')}"


def gains_of_kernels() -> str:
    means = (
        fmean(
            llm_pq_kernels.gains(
                kernels_of_2023(), llm_pq_kernels.NO_WORSE_AT_BEST, key, llm_pq_kernels.AT_BEST
            )
        )
        for key in ("ours", "today")
    )
    return " ".join(f"{mean:.2f}x" for mean in means)


def flexgen_ratios() -> dict[int, float]:
    return {
        at: row["paper_s"] / row["priced"]["latency_s"]
        for at, row in enumerate(record("flexgen")["rows"])
        if row["paper_s"] is not None
    }


def flexgen_rows() -> str:
    found = flexgen_ratios().values()
    met = [ratio for ratio in found if 0.7 < ratio < 1.5]
    return f"{len(found)} {len(met)} {min(met):.2f}x {max(met):.2f}x"


def slower_flexgen_rows() -> str:
    rows_, found = record("flexgen")["rows"], flexgen_ratios()
    slower = [at for at, ratio in found.items() if ratio > 2]
    assert {(rows_[at]["cluster"], rows_[at]["scheme"]) for at in slower} == {
        (cluster, "FlexGen") for cluster in (3, 4, 9)
    }
    ratios = [found[at] for at in slower]
    on_disk = [rows_[at]["disk_percent"] for at in slower]
    return f"16 {min(ratios):.1f}x {max(ratios):.1f}x {min(on_disk):.0f} {max(on_disk):.0f}"


def flexgen_over_llm_pq() -> str:
    def faster(ours: Callable[[Record], float], theirs: str) -> set[int]:
        return {
            row["cluster"]
            for row in record("flexgen")["rows"]
            if row["paper_s"] is not None and ours(row) < row[theirs]
        }

    assert not faster(lambda row: float(row["priced"]["latency_s"]), "llm_pq_s")
    clusters = faster(lambda row: float(row["paper_s"]), "paper_llm_pq_s")
    return " ".join(map(str, sorted(clusters)))


def gains_with_kernels() -> str:
    ours, theirs = (
        fmean(llm_pq_kernels.gains(kernels_of_2023(), llm_pq_kernels.LLM_PQ, key))
        for key in ("ours", "paper")
    )
    return f"{ours:.2f}x {theirs:.2f}x"


def logged_runs() -> str:
    found = record("llm-pq-kernels")["runs"]
    ratios = between(row["logged_s"] / row["ours_s"] for row in found).split(" to ")
    return f"{len(found)} {' '.join(f'{ratio}x' for ratio in ratios)}"


def published(scheme: str) -> dict[tuple[str, int], float]:
    return llm_pq_kernels.seconds_of(kernels_of_2023(), scheme, "paper")


def logged_gains() -> str:
    found = record("llm-pq-kernels")["runs"]
    logged, ours = (llm_pq_kernels.logged_gains(found, key) for key in ("logged_s", "ours_s"))
    assert len(logged) == 6
    theirs, rival = published("LLM-PQ"), published("PipeEdge")
    paper = fmean(rival["table 4", at] / theirs["table 4", at] for at in logged)
    return f"{fmean(logged.values()):.2f}x {fmean(ours.values()):.2f}x {paper:.2f}x"


def logged_and_published() -> str:
    log = {
        (row["cluster"], row["scheme"]): row["logged_s"]
        for row in record("llm-pq-kernels")["runs"]
        if row["tokens"] == 100
    }
    both = ((at, scheme, published(scheme)["table 4", at]) for at, scheme in (
        (4, "LLM-PQ"), (6, "PipeEdge"),
    ))  # fmt: skip
    return " ".join(f"{at} {log[at, scheme]:.0f} {paper:.0f}" for at, scheme, paper in both)


def bits_of_pipeedge() -> str:
    bits = {
        row["cluster"]: row["ours"]["bits"]
        for row in kernels_of_2023()
        if row["scheme"] == llm_pq_kernels.PIPEEDGE and row["table"] != "table 7"
    }
    plans = {
        run.cluster: sorted({bits for _, runs in run.stages for bits, _ in runs})
        for run in llm_pq_kernels.RUNS
        if run.scheme == llm_pq_kernels.PIPEEDGE and run.workload == run_all.LONG
    }
    differ = [at for at, theirs in plans.items() if theirs != bits[at]]
    return " ".join(f"{at} {bits[at][0]} {plans[at][0]}" for at in differ)


def eight_bits_on_v100() -> str:
    (row,) = (
        row
        for row in record("llm-pq-kernels")["layers"]
        if (row["device"], row["phase"], row["bits"]) == (llm_pq_kernels.V100, "decode", 8)
    )
    return f"8 {row['measured_ms'][-1]:.1f} {row['today_ms'][-1]:.1f}"


def layers_of_p100() -> str:
    found = [
        row["today_ms"][-1] / row["measured_ms"][-1]
        for row in record("llm-pq-kernels")["layers"]
        if (row["device"], row["bits"]) == (llm_pq_kernels.P100, 16)
    ]
    return f"16 {between(found)}"


def published_formula() -> str:
    lost = {row["cluster"]: row["objective_lost"] for row in record("llm-pq")["formula"]["ours"]}
    assert max(lost[1], lost[2]) < 1e-3
    return f"{between((100 * lost[cluster] for cluster in range(3, 12)), '.0f')} 3 11"


# --- ExeGPT ---


def schedules(name: str = "", *, bounded: bool = False) -> list[Record]:
    """Return the schedules of Figures 6 and 8, each with its bound."""
    return [
        schedule | {"bound_s": row["bound_s"]}
        for row in record("exegpt")["bounds"]
        for policy, schedule in row["schedules"].items()
        if policy in ([name] if name else exegpt.NAMES.values())
        and (row["bound_s"] is not None or not bounded)
    ]


def table_6() -> str:
    found = list(zip(exegpt.TABLE_6, record("exegpt")["table 6"], strict=True))
    for theirs, row in found:
        assert row["ours"]["policy"] == theirs.policy
        assert theirs.bound_s is None or row["ours"]["kept_s"] <= theirs.bound_s
    ratios = [
        row["ours"]["requests_per_s"] / theirs.requests_per_s for theirs, row in found
    ]  # fmt: skip
    return between(ratios)


def bounds_of_static_batches() -> str:
    ours = [
        row["bound_s"]
        for row in record("exegpt")["bounds"]
        if (row["case"], row["task"]) == (exegpt.OPT.name, "S") and row["bound_s"]
    ]
    theirs = [one.bound_s for one in exegpt.TABLE_6 if one.bound_s]
    return " ".join(f"{one:.1f}" for one in (*ours, *theirs))


def kept_bounds() -> str:
    assert all(one["p99_s"] <= one["bound_s"] for one in schedules(bounded=True))
    return "99"


def exceeded_by_long_answers() -> str:
    over = [100 * (one["kept_s"] / one["bound_s"] - 1) for one in schedules(bounded=True)]
    return f"{max(over):.1f}"


def as_written() -> str:
    errors = (abs(one["expected"] / one["requests_per_s"] - 1) for one in schedules())
    return f"{100 * max(errors):.1f}"


def closed_form_over(name: str) -> str:
    shares = (100 * (one["closed_form"] / one["requests_per_s"] - 1) for one in schedules(name))
    return between(shares, ".0f")


# --- Speed ---


def rows_of(topic: str, cpu_isa: str, title: str, processor: str = "Intel") -> list[Record]:
    """Return the rows of a table of one processor, held to instructions, by their columns."""
    (run,) = (
        run
        for run in evidence.load(topic)["runs"]
        if run["processor"].startswith(processor) and run["cpu_isa"] == cpu_isa
    )
    (table,) = (item for item in run["tables"] if item["title"] == title)
    return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]


def servers(cpu_isa: str, title: str, **where: Any) -> list[Record]:
    return [
        row
        for row in rows_of("online", cpu_isa, title)
        if all(row[column] == value for column, value in where.items())
    ]


def over_llama(found: list[Record], form: str = ".2f") -> str:
    return between((row["over llama.cpp"] for row in found), form)


def first_tokens(found: list[Record]) -> list[float]:
    return [row["llmpq TTFT p95, ms"] / row["llama.cpp TTFT p95, ms"] for row in found]


def servers_without_amx() -> str:
    found = servers("avx2", "Requests at a time")
    loads = between((row["concurrency"] for row in found), "d")
    return f"{over_llama(found)} {loads} {between(first_tokens(found))}"


def servers_with_amx() -> str:
    whole = servers("native", "Requests at a time", bits=16)
    eight = servers("native", "Requests at a time", bits=8)
    arrivals = servers("native", "Arrivals", rate=4.0)
    assert all(1 / 15.5 < ratio < 0.5 for ratio in first_tokens(arrivals))
    return f"{over_llama(whole, '.1f')} 16 {over_llama(eight, '.1f')} 8 4"


def simulated_orders() -> str:
    columns = ["rate", "order", *("TTFT, s", "simulated", "first"), "TGT, s", "simulated", "others"]
    (run,) = (run for run in evidence.load("online")["runs"] if run["cpu_isa"] == "native")
    (table,) = (item for item in run["tables"] if item["title"] == "Queue orders")
    found = [row[columns.index(name)] for row in table["rows"] for name in ("first", "others")]
    return f"{ceil(100 * max(abs(ratio - 1) for ratio in found))}"


def decode_without_bf16() -> str:
    def ratios(
        cpu_isa: str, processor: str, *, sequences: tuple[int, ...], bits: tuple[int, ...]
    ) -> str:
        return between(
            row["llmpq / llama.cpp"]
            for row in rows_of("decode", cpu_isa, "Decode", processor)
            if row["sequences"] in sequences and row["bits"] in bits
        )

    found = ratios("avx2", "Intel", sequences=(1, 8), bits=(16, 8, 4, 3))
    zen3 = " ".join(
        ratios("native", "AMD EPYC (Zen 3", sequences=(n,), bits=(16, 8, 4, 3)) for n in (1, 8)
    )
    one, xeon = (ratios("avx512", name, sequences=(1,), bits=(16,)) for name in ("AMD", "Intel"))
    few_bits = ratios("avx512", "AMD", sequences=(1,), bits=(8, 4, 3))
    eight = ratios("avx512", "AMD", sequences=(8,), bits=(16, 8, 4, 3))
    return f"5 {found} 3 {zen3} 4 {one} 16 {xeon} {few_bits} {eight}"


def step_between_machines() -> str:
    found = rows_of("two-machines", "native", "One machine, loopback", "AMD")
    steps = [1000 * row["decode, s"] / 31 for row in found]
    return f"{min(steps):.1f} {max(steps):.0f} 5"


# --- Pages ---

SET_UP = "describes the experiment"
PAPER = "is what the paper says"
NO_CURVES = "is printed by benchmarks/fidelity.py, which keeps no figures of single curves"
CLAIMS: dict[str, dict[str, Callable[[], str] | str]] = {
    "evidence/llm-pq": {
        "added up": thirds_at_4_bits,
        "its first layer alone": first_layer_at_4_bits,
        "with the kernels of 2023": SET_UP,
        "`variance` is 2.3 times cheaper": indicator_costs,
        "faster than PipeEdge on every cluster": faster_than_pipeedge,
        "2.26x PipeEdge's throughput": throughput_gains,
        "homogeneous clusters": partial(other_gains, "table 5", "1.56x", 3),
        "gains hold for short prompts": partial(other_gains, "table 7", "1.64x", 2),
        "cluster 4 gains less": reversed_gains,
        "Uniform does not fit": out_of_memory,
        "of solving on average": solving,
        "faster than adaptive quantization alone": over_adabits,
        "Measured on CPUs": measured_pipeedge,
        "Priced so": few_bit_rows,
        "They rest on timed layers": "is a plan that reproduce/llm_pq_kernels.py holds",
        "The gain is the kernels'": gains_of_kernels,
        "It exceeds the published one": gains_with_kernels,
        "Plan by plan": logged_runs,
        "On six clusters of Table 4": logged_gains,
        "took 138 s in the log": logged_and_published,
        "430 MiB of context": "is what the authors' code says",
        "PipeEdge differs": bits_of_pipeedge,
        "V100's decode layer": eight_bits_on_v100,
        "layers of 16 bits take": layers_of_p100,
        "Planning with it costs": published_formula,
        "its authors' cost model": flexgen_rows,
        "of OPT-30b at 16 bits take": slower_flexgen_rows,
        "Its gain over LLM-PQ": flexgen_over_llm_pq,
    },
    "evidence/exegpt": {
        "Ours answer": table_6,
        "Static batches give bounds": bounds_of_static_batches,
        "of other requests than": kept_bounds,
        "exceed them by": exceeded_by_long_answers,
        "Rates as written": as_written,
        "`--sla length` expects": lambda: f"{closed_form_over('RRA')} {closed_form_over('WAA')}",
        "64 slots": SET_UP,
        "at most 128 sequences": SET_UP,
        "Percentile lengths are computed": "the published ones are not kept",
    },
    "evidence/multibin": {
        "32,000 requests": SET_UP,
        "Throughput agrees with": theorems,
        "oracle lengths": bins_of_a_model,
        "accuracy of the paper's predictor": bins_of_the_predictor,
        "For Azure's conversations": learned_bins,
        "Prompts of Azure's code": unpredictable_lengths,
        "are a line within": seconds_of_answers,
    },
    "evidence/larry": {
        "Azure traces of 2023": SET_UP,
        "800 requests": SET_UP,
        "the rate changes between two values": SET_UP,
        "p50 and p95 of TTFT": larry_is_lower,
        "Preemptions below": preempted,
        "in at most": no_alpha,
        "p99 is higher than FCFS's": alphas_and_p99,
        "p95 of TGT": generation_times,
        "No-Preempt equals FCFS": memory_never_binds,
        "LARRY's p95 exceeds FCFS's": rates_of_lower_p95,
        "Units of 256 to 4,096": units,
        "Poisson arrivals": worse_choices,
        "Without a watermark": preempted_choices,
    },
    "evidence/sal": {
        "The multi-server evaluation": SET_UP,
        "The paper's p50": first_tokens_p50,
        "of twenty combinations": lowest,
        "with TRAIL+": with_trail,
        "lower with FCFS than with LARRY": orders_on_code,
        "of the others'": in_seconds,
        "Over SAL in steps": in_steps,
    },
    "evidence/samullm": {
        "Fang et al.": SET_UP,
        "they leave out": overheads,
        "the median is": whole_iterations,
        "below the published range in": below_published,
        "it is below in": below_as_planned,
        "mends Min's plan": mended_by_the_scheduler,
        "compares whole stages": "is the authors' code",
        "Gains a device": gains_a_device,
        "Elsewhere the code": code_over_algorithm_1,
        "Ours is at most": ours_over_the_best,
        "Our search starts from": our_search,
        "one after the other": apart,
        "Placing first the model": placed_last_first,
        "of the other sample": estimates,
        "without preemption 1.0-1.2": PAPER,
        "1.73 and 1.85": without_preemption,
        "With known lengths": with_known_lengths,
    },
    "evidence/vllm": {"300 requests": SET_UP},
    "evidence/online": {
        "A random Llama": SET_UP,
        "Held to AVX2": servers_without_amx,
        "With AMX": servers_with_amx,
        "`vllm bench serve` finds": lambda: over_llama(
            servers("native", "Timed by vllm bench serve"), ".1f"
        ),
        "60 requests": SET_UP,
        "Simulated means": simulated_orders,
    },
    "evidence/speed": {
        "A figure holds": decode_without_bf16,
        "Ratios are times": "explains a table",
        "Ratios are tokens a second": "explains a table",
        "The shipped model drafts": SET_UP,
        "hold 512 tokens at a time": "is a limit of the code",
        "Shares above 100": "explains a table",
        "A step takes": step_between_machines,
    },
    "evidence/forecasts": {
        "Three of 48 curves": NO_CURVES,
        "24 measured points": SET_UP,
        "The goal for plans": "is a goal, and a figure of an earlier run",
        "All 80 stages": memory_errors,
    },
    "evidence/index": {
        "**Machine A**": SET_UP,
        "**Machine B**": SET_UP,
        "shared virtual machines": "was seen while measuring, and is not kept",
        "200 random clusters": "is what tests/assigner/heuristics/test_baselines.py checks",
        "CPU workers of a whole": SET_UP,
        "Forecasts of these plans": plan_errors,
        "prompts divided by 16": SET_UP,
        "Bounds are those": SET_UP,
        "bound24 and bound16": SET_UP,
        "cost up to": indicator_losses,
        "One sequence takes": versions,
    },
    "how/batching": {},
    "how/costs": {
        "forecasts of peak memory": lambda: " ".join(memory_errors().split()[1:3]),
    },
}


@pytest.mark.parametrize("page", [page for page in CLAIMS if page.startswith(EVIDENCE)])
def test_every_sentence_with_a_figure_is_listed_once(page):
    for sentence in sentences(page):
        found = [phrase for phrase in CLAIMS[page] if phrase in sentence]
        assert len(found) == 1, f"{page}.md: {sentence!r} has the phrases {found}"


@pytest.mark.parametrize(
    ("page", "phrase"), [(page, phrase) for page, claims in CLAIMS.items() for phrase in claims]
)
def test_a_sentence_says_what_the_results_hold(page, phrase):
    (sentence,) = (sentence for sentence in sentences(page) if phrase in sentence)
    claim = CLAIMS[page][phrase]
    if callable(claim):
        assert figures(sentence) == figures(claim()), sentence


def test_figures_of_a_text():
    text = "Table 6 and Figure 8 (p95, OPT-13B): 1.13x, 19 of 20, 0.9-1.0 and 1,024 %; Llama-2-70b"
    assert figures(text) == ["1.13x", "19", "20", "0.9", "1.0", "1,024"]
