"""Doge: not run."""

from __future__ import annotations

from llmpq.spec.families import Family

FAMILY = Family(
    name="doge",
    unsupported="its layers build their own attention masks",
    is_tested=False,
)
