"""Time the exact search on the paper's clusters and on larger ones.

    OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 python benchmarks/exact_planner.py

Costs are the cost model's rooflines; degradations are uneven and seeded, so that all layers differ.
Every case is planned several times, each time from a new task. Reported are the medians of building
the arrays, of the search, and of both (``planning_s`` of a plan file).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from llmpq import __version__
from llmpq.assigner.exact.lattice import Orders
from llmpq.assigner.exact.search import solve_exact
from llmpq.assigner.objective import FloatArray, PairCosts, SearchSpace
from llmpq.assigner.request import PlanRequest, build_task
from llmpq.spec import catalog
from llmpq.spec.cluster import Cluster, DeviceGroup, Node, load_cluster
from llmpq.spec.workload import Workload

CLUSTERS = Path(__file__).parents[1] / "inputs" / "clusters"
PAPER_MODELS = {
    **dict.fromkeys((1, 2), "facebook/opt-13b"),
    **dict.fromkeys((3, 4, 9), "facebook/opt-30b"),
    **dict.fromkeys((5, 6, 10), "facebook/opt-66b"),
    **dict.fromkeys((7, 8, 11), "bigscience/bloom"),
}
"""The model of each cluster (LLM-PQ, Table 3)."""

THETAS = (0.03, 0.3, 3.0)
"""Low, middle and high prices of degradation, relative to the default."""

SWEEP = tuple(np.geomspace(0.01, 10.0, 20).tolist())
MIXED = ("T4-16G", "V100-32G", "A100-40G", "A800-80G")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One case; several ``thetas`` are planned one after another as a sweep."""

    name: str
    model: str
    cluster: Cluster
    batch: int = 32
    orders: Orders = "types"
    thetas: tuple[float, ...] = (1.0,)
    gap: float = 0.0
    five_widths: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Medians of one case; value, gap and pair are those of its last theta."""

    name: str
    orders: str
    theta: float
    build_s: float
    search_s: float
    planning_s: float
    objective_s: float
    gap: float
    prefill: int
    decode: int
    devices: int
    pairs: int
    ascended: int
    searched: int
    columns: int
    labels: int


def main(argv: list[str] | None = None) -> int:
    """Plan every case, print a table, and write JSON when asked."""
    options = _parse(argv)
    started = time.perf_counter()
    first = _plan(next(iter(_paper_cases())), options.seed)
    first_s = time.perf_counter() - started
    sys.stdout.write(f"first plan of this process: {first_s:.3f} s ({first.name})\n{_HEAD}")
    figures = []
    for case in _cases():
        if options.only in case.name:
            runs = [_plan(case, options.seed) for _ in range(options.repeats)]
            figures.append(_median(runs))
            sys.stdout.write(_line(figures[-1]))
            sys.stdout.flush()
    for orders in ("types", "all"):
        seconds = [f.planning_s for f in figures if f.orders == orders and "paper" in f.name]
        if seconds:
            sys.stdout.write(
                f"paper clusters, orders {orders}: mean {statistics.mean(seconds):.3f} s, "
                f"max {max(seconds):.3f} s\n"
            )
    if options.json is not None:
        document = {
            "provenance": _provenance(options, first_s),
            "figures": [asdict(f) for f in figures],
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=5, help="plans a case")
    parser.add_argument("--seed", type=int, default=0, help="of the degradations")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--json", type=Path, help="write figures and provenance here")
    return parser.parse_args(argv)


def _cases() -> Iterator[Case]:
    yield from _paper_cases()
    third, fifth = (load_cluster(CLUSTERS / f"paper-0{number}.json") for number in (3, 5))
    yield Case(name="sweep of 20", model=PAPER_MODELS[3], cluster=third, thetas=SWEEP)
    tight = Case(name="tight c5 b64", model=PAPER_MODELS[5], cluster=fifth, batch=64)
    for orders in ("types", "all"):
        yield replace(tight, orders=orders, thetas=(3.0,))
    yield Case(name="opt-175b x16", model="facebook/opt-175b", cluster=_mixed(4), five_widths=True)
    yield Case(name="405b x64", model="meta-llama/Llama-3.1-405B", cluster=_mixed(16), gap=1e-3)


def _paper_cases() -> Iterator[Case]:
    for number, model in PAPER_MODELS.items():
        name = f"paper-{number:02d}"
        cluster = load_cluster(CLUSTERS / f"{name}.json")
        for theta in THETAS:
            for orders in ("types", "all"):
                yield Case(name=name, model=model, cluster=cluster, orders=orders, thetas=(theta,))


def _mixed(count: int) -> Cluster:
    """Return a cluster with a node of ``count`` devices for each of four types."""
    return Cluster(
        name=f"mixed-{count}",
        nodes=tuple(
            Node(name=kind, devices=(DeviceGroup(type=kind, count=count),)) for kind in MIXED
        ),
    )


def _plan(case: Case, seed: int) -> Figure:
    started = time.perf_counter()
    request = PlanRequest(
        model=catalog.model(case.model),
        cluster=case.cluster,
        workload=Workload(batch=case.batch, prompt_tokens=512, new_tokens=100),
        dtype="float16",
        kv_bits=16,
        gap=case.gap,
    )
    task = build_task(request)
    space = task.space
    if case.five_widths:
        space = _with_five_bits(space)
    space = replace(space, omega=uneven(space, np.random.default_rng(seed)))
    built = time.perf_counter()
    for theta in case.thetas:
        result = solve_exact(
            replace(space, theta_s=theta * task.theta_s), orders=case.orders, gap=case.gap
        )
    ended = time.perf_counter()
    sizes, stats = result.problem.costs.micro_batching, result.stats
    return Figure(
        name=case.name,
        orders=str(case.orders),
        theta=case.thetas[-1],
        build_s=built - started,
        search_s=ended - built,
        planning_s=ended - started,
        objective_s=result.value_s,
        gap=result.gap,
        prefill=sizes.prefill,
        decode=sizes.decode,
        devices=len(result.problem.order),
        pairs=stats.pairs,
        ascended=stats.ascended,
        searched=stats.searched,
        columns=stats.columns,
        labels=stats.labels,
    )


def uneven(space: SearchSpace, rng: np.random.Generator) -> FloatArray:
    """Return degradations that rise with depth, uneven in layers and in widths.

    No rank-one table: an indicator is a sum over operators, so neither is a measured one.
    """
    layers = space.num_layers
    depth = (0.4 + 1.6 * np.arange(layers) / layers) * np.exp(rng.normal(0, 0.35, layers))
    steps = np.array([0.0 if bits == 16 else (15 / (2**bits - 1)) ** 2 for bits in space.bits])
    noise = np.exp(rng.normal(0, 0.15, (layers, len(space.bits))))
    omega: FloatArray = np.maximum.accumulate(depth[:, None] * steps * noise, axis=1)
    return omega / omega[:, space.bits.index(4)].sum()


def _with_five_bits(space: SearchSpace) -> SearchSpace:
    """Return a space with a fifth width, 5 bits, a quarter of the way from 4 to 8."""
    upper, lower = space.bits.index(8), space.bits.index(4)

    def widened(array: np.ndarray) -> np.ndarray:
        between = 0.25 * array[..., upper] + 0.75 * array[..., lower]
        return np.insert(array, lower, between.astype(array.dtype), axis=-1)

    def wider(pair: PairCosts) -> PairCosts:
        return replace(
            pair,
            prefill_s=widened(pair.prefill_s),
            decode_s=widened(pair.decode_s),
            layer_bytes=widened(pair.layer_bytes),
        )

    bits = (*space.bits[:lower], 5, *space.bits[lower:])
    return replace(
        space,
        pairs=tuple(wider(pair) for pair in space.pairs),
        bits=bits,
        omega=widened(space.omega),
    )


def _median(runs: Sequence[Figure]) -> Figure:
    medians = {
        name: statistics.median(getattr(run, name) for run in runs)
        for name in ("build_s", "search_s", "planning_s")
    }
    return replace(runs[-1], **medians)


_HEAD = (
    f"{'case':<18}{'orders':<7}{'theta':>6}{'build s':>9}{'search s':>9}{'plan s':>8}"
    f"{'objective s':>13}{'gap':>9}{'eta':>5}{'xi':>4}{'dev':>4}{'pairs':>6}{'ascended':>9}"
    f"{'searched':>9}{'columns':>9}{'labels':>9}\n"
)


def _line(f: Figure) -> str:
    return (
        f"{f.name:<18}{f.orders:<7}{f.theta:>6.2f}{f.build_s:>9.3f}{f.search_s:>9.3f}"
        f"{f.planning_s:>8.3f}{f.objective_s:>13.4f}{f.gap:>9.1e}{f.prefill:>5}{f.decode:>4}"
        f"{f.devices:>4}{f.pairs:>6}{f.ascended:>9}{f.searched:>9}{f.columns:>9}{f.labels:>9}\n"
    )


def _provenance(options: argparse.Namespace, first_s: float) -> dict[str, object]:
    return {
        "llmpq": __version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "repeats": options.repeats,
        "seed": options.seed,
        "first_plan_s": first_s,
    }


if __name__ == "__main__":
    sys.exit(main())
