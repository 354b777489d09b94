"""How much a latency fit needs: errors on unseen shapes of public tables, by law.

Three laws learn from 12, 20, 36 and all shapes that are not held out (30 %, seeds 0-4):

- ``paper``: the regression of LLM-PQ, Sec. 4.1, by plain least squares;
- ``interpolated``: its features with non-negative coefficients, times a smooth interpolation of the
  logarithm of what is left, kept between the measured shapes around it;
- the law that plans are priced with, recorded as ``--label``. Other labels in the file stay, so
  that laws of several commits are compared in one table.

Run ``OMP_NUM_THREADS=1 python benchmarks/fit_ablation.py --label NAME``; the tables are those of
``benchmarks/fidelity.py``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from fidelity import RESULTS, SEEDS, add_data_options, tables, write_tables

from llmpq.costmodel.tables.fidelity import split_shapes, summarise
from llmpq.costmodel.tables.latency import LawName, RegressionLatencyModel
from llmpq.costmodel.tables.nnls import solve_nnls
from llmpq.spec.precision import Phase
from llmpq.spec.tables import LatencySample, LatencyTable

COUNTS = (12, 20, 36)
"""Shapes learned from, in the one-layer tables at 16 bits; all tables are also learned whole."""

Array = npt.NDArray[np.float64]
Answer = Callable[[float, float], float]
Fit = Callable[[Sequence[LatencySample]], Answer]


def main() -> int:
    """Compare the laws and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--label", required=True, help="name of the law that prices plans")
    add_data_options(parser)
    parser.add_argument("--output", type=Path, default=RESULTS / "fit-ablation.json")
    options = parser.parse_args()
    laws: dict[str, Fit] = {
        "paper": _product("paper"),
        "interpolated": interpolated,
        options.label: _product("hinged"),
    }
    errors: dict[tuple[str, str, Phase, str], list[float]] = {}
    seconds: dict[str, list[float]] = {law: [] for law in laws}
    for group, _, table in tables(options.database, options.data):
        for learned, kept, held in _splits(group, table):
            for law, fit in laws.items():
                started = time.perf_counter()
                answer = fit(kept)
                answer(1.0, 1.0)
                seconds[law].append(time.perf_counter() - started)
                errors.setdefault((group, learned, held[0].phase, law), []).extend(
                    abs(answer(one.batch, one.tokens) / one.seconds - 1.0) for one in held
                )
    rows = [
        {"tables": group, "learned from": learned, "phase": phase.value, "law": law}
        | {name: round(100 * getattr(figures, name), 2) for name in ("mean", "median", "p95")}
        for (group, learned, phase, law), found in errors.items()
        for figures in [summarise(found)]
    ]
    times = [
        {"law": law, "ms": round(1e3 * float(np.median(found)), 2)}
        for law, found in seconds.items()
    ]
    for row in rows:
        print(*row.values(), sep="\t")
    command = f"python benchmarks/fit_ablation.py --label {options.label}"
    kept = json.loads(options.output.read_text())["tables"] if options.output.exists() else []
    known = {one["title"]: one["rows"] for one in kept}
    renewed = []
    for title, note, own in (
        ("By law", "Relative errors on held-out shapes, in percent.", rows),
        ("Milliseconds a fit", "Median over all fits, other work on the machine.", times),
    ):
        others = [row for row in known.get(title, []) if row["law"] not in laws]
        renewed.append({"title": title, "rows": [*others, *own], "note": note})
    write_tables(options.output, command, renewed)
    return 0


def interpolated(samples: Sequence[LatencySample]) -> Answer:
    """Fit the paper's features, none negative, and interpolate the log ratio to the measured."""
    phase = samples[0].phase
    known = {(one.batch, one.tokens): one.seconds for one in samples}
    batch, tokens = np.array(list(known), dtype=float).T
    seconds = np.array(list(known.values()))

    def features(batch: Array, tokens: Array) -> Array:
        more = [batch * tokens**2] if phase is Phase.PREFILL else []
        return np.column_stack([batch * tokens, np.ones_like(batch), batch, tokens, *more])

    def octaves(batch: Array, tokens: Array) -> Array:
        rows = batch * tokens if phase is Phase.PREFILL else batch
        return np.log2(np.column_stack([rows, tokens]))

    def kernel(left: Array, right: Array) -> Array:  # Matern 3/2 over shapes, and over rows alone
        gaps = np.abs(left[:, None] - right)
        near, far = np.hypot(*np.moveaxis(gaps, 2, 0)), gaps[:, :, 0] / 0.5
        result: Array = (1 + near) * np.exp(-near) + (1 + far) * np.exp(-far)
        return result

    law = solve_nnls(features(batch, tokens) / seconds[:, None], np.ones(len(seconds)))
    ratios = np.log(seconds / (features(batch, tokens) @ law))
    places = octaves(batch, tokens)
    weights = np.linalg.solve(kernel(places, places) + 0.03 * np.eye(len(seconds)), ratios)
    low, high = places.min(axis=0), places.max(axis=0)

    def answer(at_batch: float, at_tokens: float) -> float:
        shape = np.array([float(at_batch)]), np.array([float(at_tokens)])
        near = kernel(np.clip(octaves(*shape), low, high), places)
        found = float((features(*shape) @ law * np.exp(near @ weights))[0])
        least = seconds[(batch <= at_batch) & (tokens <= at_tokens)].max(initial=0.0)
        most = seconds[(batch >= at_batch) & (tokens >= at_tokens)].min(initial=np.inf)
        return float(min(max(found, least), most))

    return answer


def _product(law: LawName) -> Fit:
    def fit(samples: Sequence[LatencySample]) -> Answer:
        model = RegressionLatencyModel(LatencyTable(samples=tuple(samples)), law)
        phase, bits = samples[0].phase, samples[0].bits
        return lambda batch, tokens: model.seconds(phase, bits, batch, tokens)

    return fit


def _splits(
    group: str, table: LatencyTable
) -> list[tuple[str, list[LatencySample], list[LatencySample]]]:
    """Return what is learned from and what is asked, by phase and bitwidth."""
    found = []
    for phase in Phase:
        own = [one for one in table.samples if one.phase is phase]
        for seed in range(SEEDS):
            for bits in sorted({one.bits for one in own}):
                parts = split_shapes(table, seed)
                kept, held = ([one for one in part.select(phase, bits)] for part in parts)
                if held:
                    found.append(("all", kept, held))
            if group != "one layer":
                continue
            one_width = LatencyTable(samples=tuple(one for one in own if one.bits == 16))
            left, asked = split_shapes(one_width, seed)
            order = np.random.default_rng(seed).permutation(len(left.samples))
            for count in COUNTS:
                few = [left.samples[index] for index in order[:count]]
                found.append((str(count), few, list(asked.samples)))
    return found


if __name__ == "__main__":
    sys.exit(main())
