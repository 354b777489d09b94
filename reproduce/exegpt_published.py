"""What ExeGPT prints as numbers: its tasks (Table 3), Tables 5 and 6. Its figures are pictures."""

from __future__ import annotations

from dataclasses import dataclass

TASKS = {
    "S": ((256, 252, 512), (32, 13, 80)),
    "T": ((128, 81, 256), (128, 68, 320)),
    "G": ((64, 23, 128), (192, 93, 480)),
    "C1": ((256, 115, 512), (64, 30, 160)),
    "C2": ((512, 252, 1024), (256, 134, 640)),
}
"""Mean, standard deviation and longest of prompts and answers (Table 3)."""

Falls = tuple[float, float]
"""Percent of steps in which latency, throughput fall although the variable rises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """A row of Table 6: OPT-13B, task S, four A40.

    Attributes:
        bound_s: latency bound, ``None`` without one.
        policy: the schedule that was selected.
        variables: its control variables.
        latency_s: what it takes.
        requests_per_s: what it answers.
    """

    bound_s: float | None
    policy: str
    variables: str
    latency_s: float
    requests_per_s: float


TABLE_6 = (
    Selected(
        bound_s=3.1, policy="WAA", variables="B_E 4, T_P 2", latency_s=3.01, requests_per_s=22.41
    ),
    Selected(
        bound_s=5.9, policy="WAA", variables="B_E 10, T_P 2", latency_s=4.11, requests_per_s=23.76
    ),
    Selected(
        bound_s=11.5,
        policy="RRA",
        variables="B_E 52, N_D 13, T_P 4",
        latency_s=10.23,
        requests_per_s=25.23,
    ),
    Selected(
        bound_s=None,
        policy="RRA",
        variables="B_E 49, N_D 7, T_P 4",
        latency_s=16.87,
        requests_per_s=26.15,
    ),
)

TABLE_5: dict[str, dict[int, dict[str, Falls]]] = {
    "S": {
        2: {"B_E": (0.6, 2.3), "N_D": (0.0, 0.0), "WAA B_E": (0.0, 0.0), "B_m": (0.8, 0.0)},
        5: {"B_E": (0.6, 0.3), "N_D": (0.0, 0.0), "WAA B_E": (0.0, 0.0), "B_m": (0.5, 0.0)},
        10: {"B_E": (0.3, 0.0), "N_D": (0.0, 0.0), "WAA B_E": (0.0, 0.0), "B_m": (0.4, 0.0)},
    },
    "T": {
        2: {"B_E": (0.2, 0.1), "N_D": (0.0, 0.0), "WAA B_E": (0.1, 0.0), "B_m": (10.9, 0.0)},
        5: {"B_E": (0.2, 0.0), "N_D": (0.0, 0.0), "WAA B_E": (0.0, 0.0), "B_m": (10.6, 0.0)},
        10: {"B_E": (0.2, 0.0), "N_D": (0.0, 0.0), "WAA B_E": (0.0, 0.0), "B_m": (10.4, 0.0)},
    },
}
"""By task, tolerance in percent and variable: GPT-3 39B on sixteen A40. Its fifth is T_P."""
