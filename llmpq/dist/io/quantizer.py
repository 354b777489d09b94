"""Who chose the integers that a run serves: rounding while loading, or whoever made the files.

Needs no torch: the command that started the ranks says it in its report.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmpq.spec.fields import read_json


def quantizer_of(model_dir: Path) -> str:
    """Return ``rtn`` for a plain checkpoint, else the method that a quantized one names.

    A GPTQ-format file may hold rounded weights; ours say so in ``meta``, and then it is ``rtn``.

    Raises:
        SpecError: ``config.json`` cannot be read.
    """
    config = read_json(model_dir / "config.json")
    found = config.get("quantization_config") if isinstance(config, dict) else None
    if not isinstance(found, dict):
        return "gptq" if (model_dir / "quantize_config.json").is_file() else "rtn"
    meta: Any = found.get("meta")
    method = meta.get("method") if isinstance(meta, dict) else None
    return str(method or found.get("quant_method"))
