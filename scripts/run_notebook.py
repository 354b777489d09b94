#!/usr/bin/env python3
"""Run a notebook from top to bottom and keep what it prints and draws, without Jupyter.

    scripts/run_notebook.py notebooks/indicators.ipynb            # writes its outputs into it
    scripts/run_notebook.py notebooks/indicators.ipynb --small --output out.ipynb

Cells run in one namespace, in the notebook's folder. Standard output and every figure of matplotlib
become the cell's outputs, and nothing else: no magics, no last expression. ``--small`` sets
``LLMPQ_NOTEBOOK_SMALL=1``, by which a notebook chooses its smallest settings.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DPI = 110


def main(argv: Sequence[str] | None = None) -> int:
    """Run; return 1 when a cell failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--output", type=Path, help="default: the notebook itself")
    parser.add_argument("--small", action="store_true", help="the notebook's smallest settings")
    options = parser.parse_args(argv)
    if options.small:
        os.environ["LLMPQ_NOTEBOOK_SMALL"] = "1"
    notebook = json.loads(options.notebook.read_text(encoding="utf-8"))
    with contextlib.chdir(options.notebook.resolve().parent):
        failure = run_cells(notebook["cells"])
    if failure is not None:
        print(failure, file=sys.stderr)
        return 1
    text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    (options.output or options.notebook).write_text(text, encoding="utf-8")
    return 0


def run_cells(cells: Sequence[dict[str, Any]]) -> str | None:
    """Run all code cells, their outputs replaced; return what went wrong, or ``None``."""
    import matplotlib as mpl  # noqa: PLC0415  the backend is chosen before pyplot is imported

    mpl.use("Agg")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    count = 0
    for number, cell in enumerate(cells):
        if cell["cell_type"] != "code":
            continue
        count += 1
        printed = io.StringIO()
        source = "".join(cell["source"])
        try:
            with contextlib.redirect_stdout(printed):
                exec(compile(source, f"cell {number}", "exec"), namespace)
        except Exception:
            return (
                f"{printed.getvalue()}\ncell {number} failed:\n{source}\n{traceback.format_exc()}"
            )
        cell["execution_count"] = count
        cell["outputs"] = [*_text(printed.getvalue()), *_figures()]
    return None


def _text(printed: str) -> list[dict[str, Any]]:
    if not printed:
        return []
    lines = printed.splitlines(keepends=True)
    return [{"output_type": "stream", "name": "stdout", "text": lines}]


def _figures() -> list[dict[str, Any]]:
    import matplotlib.pyplot as plt  # noqa: PLC0415

    outputs = []
    for number in plt.get_fignums():
        picture = io.BytesIO()
        # No software version and date: the same notebook gives the same file.
        plt.figure(number).savefig(
            picture, format="png", dpi=DPI, bbox_inches="tight", metadata={"Software": None}
        )
        data = {
            "image/png": base64.b64encode(picture.getvalue()).decode(),
            "text/plain": ["figure"],
        }
        outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
    plt.close("all")
    return outputs


if __name__ == "__main__":
    sys.exit(main())
