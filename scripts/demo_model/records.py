"""What a step writes down about itself, without the folders of the machine it ran on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON with sorted keys."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", "utf-8")


def public_command(argv: Sequence[str]) -> str:
    """Spell a command without the folders of the machine it ran on."""
    hidden = {"--work", "--out"}
    words = [
        "DIR" if before in hidden else word for before, word in zip(["", *argv], argv, strict=False)
    ]
    return "python scripts/train_demo_model.py " + " ".join(words[1:])


def loss_curve(losses: Sequence[Sequence[float]], points: int = 20) -> list[dict[str, float]]:
    """Average the losses of all updates into `points` equal stretches of the run."""
    parts = np.array_split(np.asarray(losses), min(points, len(losses)))
    return [{"tokens": int(p[-1, 1]), "loss": round(float(p[:, 2].mean()), 4)} for p in parts]
