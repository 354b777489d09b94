"""Every notebook runs from top to bottom, and is committed as it ran."""

from helpers.clocks import PATIENCE_S
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

pytest.importorskip("matplotlib")


def cells(path, kind):
    return [
        cell
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == kind
    ]


@pytest.mark.dist
@pytest.mark.nightly
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path, tmp_path):
    output = tmp_path / "ran.ipynb"
    script = ROOT / "scripts" / "run_notebook.py"
    done = subprocess.run(
        [sys.executable, str(script), str(path), "--small", "--output", str(output)],
        env={
            **os.environ,
            "LLMPQ_NOTEBOOK_FOLDER": str(tmp_path),
            "OMP_WAIT_POLICY": "PASSIVE",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    committed = cells(path, "code")
    assert [cell["source"] for cell in cells(output, "code")] == [c["source"] for c in committed]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_with_its_outputs_and_pictures(path):
    code = cells(path, "code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    text = json.dumps([output for output in outputs if "text" in output])
    assert str(ROOT) not in text
    assert "Traceback" not in text


def test_there_are_notebooks():
    assert {path.stem for path in NOTEBOOKS} == {"first_steps", "indicators"}
