"""The runner keeps what cells print and draw, and says which cell failed."""

import importlib.util
import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

pytest.importorskip("matplotlib")
SCRIPT = Path(__file__).parents[2] / "scripts" / "run_notebook.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("run_notebook", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def notebook(tmp_path, *sources):
    cells = [
        {"cell_type": "code", "metadata": {}, "execution_count": None, "outputs": [], "source": [s]}
        for s in sources
    ]
    path = tmp_path / "some.ipynb"
    path.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4}))
    return path


def test_cells_share_names_and_keep_their_output(script, tmp_path):
    path = notebook(tmp_path, "value = 3", "print(value + 1)")
    assert script.main([str(path)]) == 0
    first, second = json.loads(path.read_text())["cells"]
    assert first["outputs"] == []
    assert second["outputs"][0]["text"] == ["4\n"]
    assert (first["execution_count"], second["execution_count"]) == (1, 2)


def test_a_figure_becomes_a_picture(script, tmp_path):
    path = notebook(tmp_path, "import matplotlib.pyplot as plt\nplt.plot([1, 2])")
    assert script.main([str(path)]) == 0
    (output,) = json.loads(path.read_text())["cells"][0]["outputs"]
    assert output["data"]["image/png"].startswith("iVBOR")


def test_a_failing_cell_is_named_and_nothing_is_written(script, tmp_path, capsys):
    path = notebook(tmp_path, "pass", "1 / 0")
    before = path.read_text()
    assert script.main([str(path)]) == 1
    assert "cell 1 failed" in capsys.readouterr().err
    assert path.read_text() == before
