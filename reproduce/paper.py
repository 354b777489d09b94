"""What LLM-PQ (arXiv 2403.01136) publishes, typed in from its tables. Data only.

FlexGen's rows are left out: it offloads weights to the host and to disk, which llmpq does not.
Figures 8 and 9 are pictures without numbers; only what the text says of them is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

MODELS = {
    1: "facebook/opt-13b",
    2: "facebook/opt-13b",
    3: "facebook/opt-30b",
    4: "facebook/opt-30b",
    5: "facebook/opt-66b",
    6: "facebook/opt-66b",
    7: "bigscience/bloom",
    8: "bigscience/bloom",
    9: "facebook/opt-30b",
    10: "facebook/opt-66b",
    11: "bigscience/bloom",
}
"""Table 3: the model of every cluster."""

SCHEMES = {"pipeedge": "PipeEdge", "uniform": "Uniform", "llmpq": "LLM-PQ"}
"""The method here for every scheme there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """One row of Tables 4, 5 and 7; all ``None`` where the paper reports that memory ran out."""

    perplexity: float | None
    latency_s: float | None


def _rows(
    numbers: dict[int, tuple[tuple[float, float] | None, ...]],
) -> dict[int, dict[str, Serving]]:
    found = {}
    for cluster, rows in numbers.items():
        found[cluster] = {
            method: Serving(
                perplexity=None if row is None else row[0],
                latency_s=None if row is None else row[1],
            )
            for method, row in zip(SCHEMES, rows, strict=True)
        }
    return found


# Perplexity and seconds of PipeEdge, Uniform and LLM-PQ, in that order.
TABLE_4 = _rows(
    {
        1: ((11.78, 233.77), (11.23, 57.59), (11.23, 57.59)),
        2: ((11.38, 30.84), (11.38, 30.84), (11.23, 20.63)),
        3: ((10.70, 146.40), (10.78, 948.90), (10.70, 80.60)),
        4: ((10.78, 449.55), None, (10.70, 214.19)),
        5: ((10.50, 750.84), None, (10.40, 320.84)),
        6: ((10.34, 115.03), (10.50, 431.92), (10.31, 68.67)),
        7: ((10.97, 729.91), None, (10.90, 427.76)),
        8: ((10.97, 848.98), None, (10.90, 294.68)),
    }
)
TABLE_5 = _rows(
    {
        9: ((10.78, 1045.93), (10.78, 1045.93), (10.75, 407.75)),
        10: ((10.33, 182.47), (10.50, 477.52), (10.33, 178.11)),
        11: ((10.90, 49.12), (10.97, 895.45), (10.90, 45.45)),
    }
)
TABLE_7 = _rows(
    {
        1: ((11.23, 84.80), (11.23, 84.80), (11.23, 47.63)),
        4: ((10.70, 366.54), (10.80, 281.83), (10.70, 262.34)),
        6: ((10.33, 132.34), (10.33, 298.99), (10.30, 75.98)),
    }
)

TABLE_8 = {
    3: {"group 2": (39.70, 1.07), "group 1": (39.70, 3.29), "heuristic": (35.17, 5.36)},
    6: {"group 2": (39.56, 2.70), "group 1": (44.93, 19.14), "heuristic": (28.45, 7.70)},
    4: {"group 2": (14.72, 12.29), "group 1": (13.93, 204.59), "heuristic": (14.94, 1.99)},
    10: {"group 2": (16.64, 59.27), "group 1": (17.57, 127.28), "heuristic": (17.97, 2.11)},
}
"""Tokens per second and seconds of solving, under a limit of 60 s a program."""

TABLE_10 = {
    1: 0.2977,
    2: 0.2977,
    3: 2.78127,
    4: 2.28628,
    5: 9.9239153,
    6: 115.981,
    7: 44.3031,
    8: 19.31674,
    9: 1.15838,
    10: 2.45544,
    11: 3.4,
}
"""Seconds of solving with Gurobi (Table 9: by heuristic on clusters 4, 5, 10 and 11)."""
HEURISTIC_IN_TABLE_10 = (4, 5, 10, 11)

FIGURE_8 = {9: (1.0, "a"), 5: (50.0, "b")}
"""Clusters swept, with the theta of Table 9 (the picture's "10x") and the panel."""

FIGURE_9 = {3: 39.70, 5: 9.97, 6: 46.60, 9: 7.85, 4: 24.40}
"""Clusters compared with adabits; LLM-PQ's tokens per second, from Tables 4, 5 and 7."""
SHORT_PROMPTS_IN_FIGURE_9 = (4,)

SOLVER_LOG = {"LLM-PQ": (58.8, 80.6), "PipeEdge": (104.6, 146.4), "Uniform": (919.0, 948.9)}
"""Cluster 3: seconds that the authors' solver log predicts, and seconds they measured."""
SOLVER_LOG_STEADY = {"LLM-PQ": 73.8, "PipeEdge": 134.7, "Uniform": 947.0}
"""The same plans and stage times by ``(n - 1) max(mu T_max, sum T)``."""
