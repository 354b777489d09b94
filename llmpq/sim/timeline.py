"""A simulated run as a Chrome trace: open the file in Perfetto or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Sequence

from llmpq.sim.report import SimReport
from llmpq.units import US


def chrome_trace(report: SimReport, names: Sequence[str]) -> str:
    """Return the JSON text of every block of work, one track a stage.

    Args:
        report: of a run that kept its activities.
        names: what to call each stage.
    """
    events: list[dict[str, object]] = [
        {"ph": "M", "pid": 0, "tid": rank, "name": "thread_name", "args": {"name": name}}
        for rank, name in enumerate(names)
    ]
    events += [
        {
            "ph": "X",
            "pid": 0,
            "tid": block.stage,
            "name": f"{block.phase} x{block.rows}",
            "cat": str(block.phase),
            "ts": block.start_s / US,
            "dur": (block.end_s - block.start_s) / US,
            "args": {"micro_batch": block.micro_batch, "rows": block.rows},
        }
        for block in report.activities
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"
