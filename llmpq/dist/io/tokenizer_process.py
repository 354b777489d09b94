"""The tokenizer of a model, read by another process: transformers is not imported here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from llmpq.errors import SpecError

TIMEOUT_S = 120.0


def read_tokenizer(model_dir: Path) -> dict[str, Any] | None:
    """Return what ``export_tokenizer`` returns of a model.

    Raises:
        SpecError: as ``export_tokenizer``, or it takes too long.
    """
    command = [sys.executable, "-P", "-m", "llmpq.dist.io.export_tokenizer", str(model_dir)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise SpecError(f"{model_dir}: the tokenizer was not read within {TIMEOUT_S:g} s") from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise SpecError(lines[-1] if lines else f"{model_dir}: the tokenizer cannot be read")
    found: dict[str, Any] | None = json.loads(done.stdout)
    return found
