"""What benchmarks/forecast.py measured so far: errors of its forecasts, and a picture.

    python benchmarks/forecast_report.py FOLDER [--picture FILE.png]

A core of this machine runs on one of two levels (``benchmarks/cores.py``). A run is forecast with
either core calm or disturbed, and held against these in the shares of its time that it met them.
What the table says of its own minutes' mean, the forecast of a user who watches nothing, is told
beside it (``plain``).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cores import disturbed_share, state_shares
from forecast import STAGES, costs_of, priced
from leveled import State, mixed, share_of

from llmpq.costmodel import ClusterCosts
from llmpq.costmodel.tables.latency import MASTER_BITS
from llmpq.spec.plan import Plan, read_plan
from llmpq.spec.precision import BITS
from llmpq.spec.tables import LatencySample, LatencyTable, read_latency_table


def main() -> int:
    """Print the errors, and draw them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--picture", type=Path, help="scatter of predicted against measured")
    options = parser.parse_args()
    folder = options.folder.absolute()
    costs = costs_of(folder)
    held = medians(read_latency_table(folder / "held.csv"))
    for key in ("rounds", "noise", "reference_s", "disturbed", "company", "companions"):
        print(f"{key}: {dict(held.provenance).get(key)}")
    rows = [(one, predicted(costs, one)) for one in held.samples]
    print_layers(rows)
    runs = measured_runs(folder)
    print("| plan | stages | micro-batches | predicted | measured | spread | disturbed | error |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for one in runs:
        print(
            f"| {one['name']} | {one['stages']} | {one['sizes']} | {one['predicted']:.3f} | "
            f"{one['measured']:.3f} | {one['spread']:.0%} | {one['share']:.0%} | "
            f"{one['error']:+.1%} |"
        )
    for key in ("error", "plain"):
        for stages in (*range(1, STAGES + 1), None):
            errors = [abs(one[key]) for one in runs if stages in (one["stages"], None)]
            if errors:
                name = f"{stages or 'all'} stages, {key}"
                print(f"| {name} | {len(errors)} plans | {line_of(errors)} |")
    if options.picture is not None:
        draw(options.picture, rows, runs)
    return 0


def medians(table: LatencyTable) -> LatencyTable:
    """Return one sample a shape."""
    seconds: dict[LatencySample, list[float]] = {}
    for one in table.samples:
        seconds.setdefault(replace(one, seconds=0.0), []).append(one.seconds)
    samples = (replace(one, seconds=statistics.median(all_s)) for one, all_s in seconds.items())
    return replace(table, samples=tuple(samples))


def print_layers(rows: list[tuple[LatencySample, float]]) -> None:
    """Print the errors of one layer, by phase and bitwidth."""
    print("| phase | bits | shapes | mean | p95 | most |\n| --- | --- | --- | --- | --- | --- |")
    for phase in ("prefill", "decode"):
        for bits in (*BITS, None, MASTER_BITS):
            wanted = BITS if bits is None else (bits,)
            chosen = [
                abs(guess / one.seconds - 1)
                for one, guess in rows
                if one.phase == phase and one.bits in wanted
            ]
            name = {None: "all", MASTER_BITS: "master"}.get(bits, bits)
            print(f"| {phase} | {name} | {len(chosen)} | {line_of(chosen)} |")
    layers = [abs(guess / one.seconds - 1) for one, guess in rows if one.bits != MASTER_BITS]
    print(f"| both | all | {len(layers)} | {line_of(layers)} |")


def line_of(errors: list[float]) -> str:
    """Return mean, 95th percentile and maximum."""
    p95 = statistics.quantiles(errors, n=20, method="inclusive")[-1] if errors[1:] else errors[0]
    return f"{statistics.mean(errors):.1%} | {p95:.1%} | {max(errors):.1%}"


def predicted(costs: ClusterCosts, one: LatencySample) -> float:
    """Return what a plan is priced with at a shape."""
    device = costs.cluster.devices[0]
    if one.bits == MASTER_BITS:
        return costs.master_s(device, one.phase, one.batch, one.tokens)
    return costs.layer_s(device, one.phase, one.bits, one.batch, one.tokens, 0)


def measured_runs(folder: Path) -> list[dict[str, Any]]:
    """Return what was measured of every plan, beside today's forecast of it."""
    tables = [read_latency_table(file) for file in sorted(folder.glob("layers-*.csv"))]
    usual_share = statistics.mean(share_of(table) for table in tables)
    calm_s = min(float(dict(table.provenance)["reference_s"]) for table in tables)
    costs: dict[tuple[float, ...], ClusterCosts] = {}

    def predicted_s(plan: Plan, shares: Sequence[float]) -> float:
        """Price a plan on workers whose cores are disturbed for a share of the time each."""
        levels = tuple((*shares, *[0.0] * STAGES)[:STAGES])
        if levels not in costs:
            costs[levels] = costs_of(folder, levels)
        return priced(plan, costs[levels]).estimate.predicted_s

    def forecast_s(plan: Plan, loops_s: Sequence[Sequence[float]]) -> float:
        """Price a plan on the levels that its cores had in a run."""
        shares = state_shares(loops_s, calm_s)
        by_state = {
            state: {"seconds": predicted_s(plan, levels_of(plan, state))} for state in shares
        }
        return mixed(by_state, shares)["seconds"]

    found = []
    for file in sorted((folder / "runs").glob("plan-*.json")):
        number = file.stem.removeprefix("plan-")
        plan = read_plan(file)
        reports = [json.loads(one.read_text()) for one in file.parent.glob(f"{number}-[0-9].json")]
        if not reports:
            continue
        seconds = [report["latency_s"]["measured"] for report in reports]
        shares = [disturbed_share(report["loops_s"], calm_s) for report in reports]
        forecasts = [forecast_s(plan, report["loops_s"]) for report in reports]
        middle, sizes = statistics.median(seconds), plan.micro_batching
        found.append(
            {
                "name": number,
                "stages": len(plan.stages),
                "sizes": f"{plan.workload.batch}: {sizes.prefill}, {sizes.decode}",
                "predicted": statistics.median(forecasts),
                "measured": middle,
                "spread": (max(seconds) - min(seconds)) / middle,
                "share": statistics.mean(shares),
                "error": statistics.median(
                    guess / took for guess, took in zip(forecasts, seconds, strict=True)
                ) - 1,
                "plain": predicted_s(plan, [usual_share] * STAGES) / middle - 1,
            }
        )  # fmt: skip
    return found


def levels_of(plan: Plan, state: State) -> Sequence[float]:
    """Return in which share of the time each worker's core is disturbed, shared ones in turn."""
    if len(state) < len(plan.stages):
        return [statistics.mean(state)] * STAGES
    return [float(one) for one in state]


def draw(
    picture: Path, rows: list[tuple[LatencySample, float]], runs: list[dict[str, Any]]
) -> None:
    """Draw predicted against measured: layers on the left, plans on the right."""
    import matplotlib as mpl  # noqa: PLC0415  only for the picture

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.6), layout="constrained")
    for phase, marker in (("prefill", "s"), ("decode", "o")):
        for bits in BITS:
            chosen = [(one.seconds, g) for one, g in rows if (one.phase, one.bits) == (phase, bits)]
            left.scatter(
                [1e3 * x for x, _ in chosen], [1e3 * y for _, y in chosen],
                s=16, marker=marker, label=f"{phase}, {bits} bits", alpha=0.8,
            )  # fmt: skip
    for stages, marker in ((1, "o"), (2, "s"), (3, "^")):
        ran = [one for one in runs if one["stages"] == stages]
        right.scatter(
            [one["measured"] for one in ran], [one["predicted"] for one in ran],
            s=28, marker=marker, label=f"{stages} stage{'s' if stages > 1 else ''}",
        )  # fmt: skip
    for axes, unit, title in (
        (left, "ms", "One layer, shapes not in the table"),
        (right, "s", "Whole plans"),
    ):
        places = [xy for dots in axes.collections for xy in dots.get_offsets().tolist()]
        low, high = min(map(min, places)), max(map(max, places))
        axes.set(xscale="log", yscale="log", title=title)
        axes.plot([low, high], [low, high], color="black", linewidth=0.8)
        axes.fill_between([low, high], [0.95 * low, 0.95 * high], [1.05 * low, 1.05 * high],
                          color="black", alpha=0.1, label="within 5 %")  # fmt: skip
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
            if high < 10 * low:
                axis.set_minor_formatter("{x:.1g}")
        axes.set_xlabel(f"measured, {unit}")
        axes.set_ylabel(f"predicted, {unit}")
        axes.legend(fontsize=7)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
