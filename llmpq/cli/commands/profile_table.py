"""A summary of a latency table."""

from __future__ import annotations

from llmpq.spec.tables import LatencyTable
from llmpq.units import format_seconds


def table_summary(table: LatencyTable) -> str:
    """Return one line per phase and bitwidth with the smallest and the largest shape."""
    lines = ["phase    bits  smallest shape            largest shape"]
    seen: dict[tuple[str, int], list[str]] = {}
    for sample in sorted(table.samples, key=lambda one: one.batch * one.tokens):
        text = f"{sample.batch} x {sample.tokens}: {format_seconds(sample.seconds)}"
        seen.setdefault((sample.phase.value, sample.bits), []).append(text)
    for (phase, bits), texts in sorted(seen.items()):
        what = str(bits) if bits else "master"
        lines.append(f"{phase:8} {what:>6}  {texts[0]:24}  {texts[-1]}")
    return "\n".join(lines)
