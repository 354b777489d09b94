"""Every public class of the rooms below stands in the glossary or has a self-explaining name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GLOSSARY = ROOT / "docs" / "reference" / "glossary.md"
ROOMS = ("dist", "batching", "costmodel", "assigner")
SELF_EXPLAINING = """
    BatchingPolicy CommModel Decode ErrorRecord ErrorReport Event FrameReader FrameWriter
    Health HybridPolicy IterationPolicy KVCache LatencyModel MasterEngine Measurement
    NewToken PlanRequest Prefill Prompt Request RequestLimits Result ResultWriter
    RraPolicy Sampler SamplingParams Scheduler SharedMemoryReader SharedMemoryWriter
    SlotAllocator SocketCommunicator SolverResult StageStats StaticPolicy StopRequest
    TokenCounter Tokenizer TorchCommunicator WaaPolicy Wait WaitingRequest
"""
"""Names that say all in plain English, or are those of the field."""


def public_classes(room: str) -> set[str]:
    """Return the public classes of a room; an exception says what it is in its message."""
    found = set()
    for path in (ROOT / "llmpq" / room).rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found |= {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    return {name for name in found if not name.startswith("_") and not name.endswith("Error")}


def entries() -> set[str]:
    """Return the names that the tables of the glossary explain."""
    rows = [row for row in GLOSSARY.read_text(encoding="utf-8").splitlines() if row[:2] == "| "]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_class_is_explained(room):
    assert not public_classes(room) - entries() - set(SELF_EXPLAINING.split())
