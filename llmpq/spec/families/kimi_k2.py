"""Kimi K2: DeepSeek-V3 under its own name."""

from __future__ import annotations

from llmpq.spec.families import deepseek_v3

FAMILY = deepseek_v3.FAMILY
