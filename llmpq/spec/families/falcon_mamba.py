"""Falcon Mamba: Mamba whose time steps, B and C are normed without weights."""

from __future__ import annotations

from dataclasses import replace

from llmpq.spec.families import mamba

FAMILY = replace(mamba.FAMILY, name="falcon_mamba")
