"""How much a latency fit needs: errors on unseen shapes of public tables, by law.

Three laws learn from 12, 20, 36 and all shapes that are not held out (30 %, seeds 0-4):

- ``paper``: the regression of LLM-PQ, Sec. 4.1, by plain least squares;
- ``interpolated``: its features with non-negative coefficients, times a smooth interpolation of the
  logarithm of what is left, kept between the measured shapes around it;
- the law that plans are priced with, recorded as ``--label``. Other labels in the file stay, so
  that laws of several commits are compared in one table.

Then one in twenty of the samples that are learned from is made 1.5 to 5 times as slow, or as fast,
with the seed of the split; what is asked stays as measured. Whole iterations on one, two and four
GPUs are learned by ``llmpq.multillm.engine.law``, from all but three tenths of the batch sizes.
Steps of an RTX 4090 are the sums of LLMServingSim's operators. The samples of the file are the mean
errors of every split.

Run ``OMP_NUM_THREADS=1 python -m benchmarks.fit_ablation --label NAME``; the tables are those of
``benchmarks/fidelity.py``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.fidelity import (
    PAPERS_RANGE,
    RESULTS,
    SEEDS,
    add_data_options,
    tables,
    write_tables,
)
from benchmarks.iteration_costs import forecast, least_errors, split_batches
from benchmarks.rooflines import rows as rows_of
from llmpq.costmodel.tables.fidelity import split_shapes, summarise
from llmpq.costmodel.tables.latency import LawName, RegressionLatencyModel, solve_nnls
from llmpq.multillm.engine.law import IterationModel, read_iterations
from llmpq.sim.engine_costs import StepSize
from llmpq.spec.precision import Phase
from llmpq.spec.tables import LatencySample, LatencyTable
from scripts.reproduce.vllm_run import Costs

TITLE, ROBUST_TITLE, REPEATED_TITLE = "By law", "With outliers", "Repeated iterations"
FIGURES = ("mean", "median", "p95")
CHANGES = {"none": 0, "slow": 1, "fast": -1}
"""Powers of the factor of an outlier."""
OUTLIERS = (1.5, 5.0)
"""Least and largest factor of an outlier."""
COUNTS = (12, 20, 36)
"""Shapes learned from, in the one-layer tables at 16 bits; all tables are also learned whole."""

Array = npt.NDArray[np.float64]
Errors = tuple[Array, Array]
"""Errors of a forecast, and the least of any forecast."""
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
    errors: dict[tuple[str, str, str, Phase, str], list[list[float]]] = {}
    for group, table in known_tables(options.database, options.data):
        for learned, kept, held, seed in _splits(group, table):
            for name, power in CHANGES.items():
                if power and (learned != "all" or group == PAPERS_RANGE):
                    continue
                changed = planted(kept, seed, power)
                for law, fit in laws.items():
                    answer = fit(changed)
                    key = (group, learned, name, held[0].phase, law)
                    errors.setdefault(key, []).append(
                        [abs(answer(one.batch, one.tokens) / one.seconds - 1.0) for one in held]
                    )
    repeated: dict[tuple[str, Phase], list[Errors]] = {}
    for group, file in iteration_files(options.data):
        for phase, parts in repetitions(file).items():
            repeated.setdefault((group, phase), []).append(parts)
        for (name, phase), found in iterations(file).items():
            errors.setdefault((group, "all", name, phase, options.label), []).append(found)
    rows = [
        {"tables": group, "learned from": int(learned) if learned.isdigit() else learned}
        | {"outliers": name, "phase": phase.value, "law": law}
        | {figure: round(100 * getattr(summary, figure), 2) for figure in FIGURES}
        for (group, learned, name, phase, law), found in errors.items()
        for summary in [summarise([error for split in found for error in split])]
    ]
    for row in rows:
        print(*row.values(), sep="\t")
    command = f"python -m benchmarks.fit_ablation --label {options.label}"
    known = json.loads(options.output.read_text()) if options.output.exists() else {}
    old = {one["title"]: one["rows"] for one in known.get("tables", [])}
    clean = [
        {key: value for key, value in row.items() if key != "outliers"}
        for row in rows
        if row["outliers"] == "none" and not str(row["tables"]).startswith("whole iterations")
    ]
    others = [row for row in old.get(TITLE, []) if row["law"] not in laws]
    robust = [row for row in rows if row["law"] == options.label and row["learned from"] == "all"]
    write_tables(
        options.output,
        command,
        [
            {
                "title": TITLE,
                "rows": [*others, *clean],
                "note": "Relative errors on held-out shapes, in percent.",
            },
            {
                "title": ROBUST_TITLE,
                "rows": [
                    {key: row[key] for key in ("tables", "outliers", "phase", *FIGURES)}
                    for row in robust
                    if row["tables"] != PAPERS_RANGE
                ],
                "note": "The same errors where one sample in twenty that was learned from is made "
                f"{OUTLIERS[0]:g} to {OUTLIERS[1]:g} times as slow or as fast.",
            },
            {
                "title": REPEATED_TITLE,
                "rows": [
                    {"tables": group, "phase": phase.value} | means_of(parts)
                    for (group, phase), parts in repeated.items()
                ],
                "note": "Mean errors of held-out iterations whose shape was measured twice, in "
                "percent, and the least that a forecast with one answer to a shape can have.",
            },
        ],
        [
            {"tables": group, "learned from": learned, "outliers": name}
            | {"phase": phase.value, "law": law}
            | {"mean_percent": [round(100 * float(np.mean(split)), 3) for split in found]}
            for (group, learned, name, phase, law), found in errors.items()
        ],
    )
    return 0


def iteration_files(data: Path) -> Iterator[tuple[str, Path]]:
    """Yield group and file of the tables of whole iterations."""
    for file in sorted((data / "samullm" / "iterations").glob("*.csv.gz")):
        degree = int(file.name.split("_tp")[1][0])
        yield f"whole iterations, {degree} GPU{'s' * (degree > 1)}", file


def known_tables(database: Path | None, data: Path) -> Iterator[tuple[str, LatencyTable]]:
    """Yield group and table of everything that is there."""
    for group, _, table in tables(database, data):
        yield group, table
    if (folder := data / "llmservingsim").is_dir():
        yield "RTX 4090", rtx_4090(folder)
    else:
        print(f"left out: RTX 4090: found no {folder}", file=sys.stderr)


def rtx_4090(folder: Path) -> LatencyTable:
    """Return steps of Llama-3.1-8B at the sizes of LLMServingSim's operators.

    Attention of a prompt is linear between the eight lengths at which it was measured.
    """
    costs = Costs(folder)
    stem = folder / "profile_RTX4090_Llama-3.1-8B_tp1"
    prompts = sorted({int(row["tokens"]) for row in rows_of(Path(f"{stem}_dense.csv"))})
    attention = [
        [int(row[name]) for name in ("prefill_chunk", "n_decode", "kv_decode")]
        for row in rows_of(Path(f"{stem}_attention.csv"))
    ]
    measured = sorted({chunk for chunk, batch, _ in attention if chunk and not batch})
    shapes = [(Phase.PREFILL, 1, one) for one in prompts if measured[0] <= one <= measured[-1]]
    shapes += [
        (Phase.DECODE, batch, context) for chunk, batch, context in attention if batch and not chunk
    ]
    return LatencyTable(
        samples=tuple(
            LatencySample(
                phase=phase, bits=16, batch=batch, tokens=tokens,
                seconds=costs(
                    StepSize(1, tokens, 0, 0, ((0, tokens),))
                    if phase is Phase.PREFILL
                    else StepSize(batch, batch, batch, batch * tokens, ())
                ),
            )
            for phase, batch, tokens in shapes
        )
    )  # fmt: skip


def planted(samples: Sequence[LatencySample], seed: int, power: int) -> list[LatencySample]:
    """Return samples of which one in twenty is slower (1), faster (-1) or as it was (0)."""
    chance = np.random.default_rng(seed)
    count = max(1, len(samples) // 20)
    chosen = chance.permutation(len(samples))[:count].tolist()
    factors = dict(zip(chosen, chance.uniform(*OUTLIERS, count).tolist(), strict=True))
    return [
        replace(one, seconds=one.seconds * factors.get(place, 1.0) ** power)
        for place, one in enumerate(samples)
    ]


def iterations(file: Path) -> dict[tuple[str, Phase], list[float]]:
    """Return errors at batch sizes that were held out, by change of what was learned and phase."""
    result = {}
    for name, power in CHANGES.items():
        learned, held = split_batches(read_iterations(file))
        count = max(1, len(learned.seconds) // 20)
        chance = np.random.default_rng(0)
        chosen = chance.permutation(len(learned.seconds))[:count]
        learned.seconds[chosen] *= chance.uniform(*OUTLIERS, count) ** power
        model = IterationModel(learned)
        for phase in Phase:
            own = held.select(held.is_prefill == (phase is Phase.PREFILL))
            found = np.abs(forecast(model, phase, own) / own.seconds - 1.0)
            result[name, phase] = found.tolist()
    return result


def repetitions(file: Path) -> dict[Phase, Errors]:
    """Return the errors of held-out iterations with a repetition, and their least errors."""
    learned, held = split_batches(read_iterations(file))
    model, result = IterationModel(learned), {}
    for phase in Phase:
        own = held.select(held.is_prefill == (phase is Phase.PREFILL))
        found = np.abs(forecast(model, phase, own) / own.seconds - 1.0)
        least = least_errors(own, phase)
        is_repeated = ~np.isnan(least)
        result[phase] = (found[is_repeated], least[is_repeated])
    return result


def means_of(parts: Sequence[Errors]) -> dict[str, float]:
    """Return the mean errors of tables together, in percent."""
    pooled = zip(("mean", "least"), zip(*parts, strict=True), strict=True)
    return {name: round(100 * float(np.concatenate(found).mean()), 2) for name, found in pooled}


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
) -> list[tuple[str, list[LatencySample], list[LatencySample], int]]:
    """Return what is learned from and what is asked, by phase and bitwidth, and the seed."""
    found = []
    for phase in Phase:
        own = [one for one in table.samples if one.phase is phase]
        for seed in range(SEEDS):
            for bits in sorted({one.bits for one in own}):
                parts = split_shapes(table, seed)
                kept, held = ([one for one in part.select(phase, bits)] for part in parts)
                if held:
                    found.append(("all", kept, held, seed))
            if group != "one layer":
                continue
            one_width = LatencyTable(samples=tuple(one for one in own if one.bits == 16))
            left, asked = split_shapes(one_width, seed)
            order = np.random.default_rng(seed).permutation(len(left.samples))
            for count in COUNTS:
                few = [left.samples[index] for index in order[:count]]
                found.append((str(count), few, list(asked.samples), seed))
    return found


if __name__ == "__main__":
    sys.exit(main())
