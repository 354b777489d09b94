"""Results of benchmarks are complete, and the documentation shows all of them."""

from __future__ import annotations

import io
import json
import re

import pytest
from helpers.docs_pages import PAGES, ROOT

from scripts.docs_site import catalogue, cli_reference, evidence

PRINTED_NUMBER = re.compile(r"[-+]?\d[\d,.]*(-\d[\d,.]*)?( \(\d[\d,.]*-\d[\d,.]*\))?( ?[%x])?")


@pytest.mark.parametrize("topic", evidence.topics())
def test_results_are_complete(topic):
    result = evidence.load(topic)
    for item in result["tables"]:
        columns = evidence.columns_of(item)
        assert all(len(row) >= len(columns) for row in item["rows"])
    assert re.match(r"20\d\d-\d\d-\d\d", result["date"])


@pytest.mark.parametrize("topic", evidence.topics())
def test_results_hold_numbers(topic):
    found = json.loads((evidence.RESULTS / f"{topic}.json").read_text(encoding="utf-8"))
    runs = found["runs"] if isinstance(found.get("runs"), list) else [found]
    cells = [
        value
        for run in runs
        for item in run.get("tables", [])
        for row in item["rows"]
        for value in (row if isinstance(row, list) else row.values())
    ]
    assert not [cell for cell in cells if isinstance(cell, str) and PRINTED_NUMBER.fullmatch(cell)]


def test_every_topic_is_shown():
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert {found[0] for found in evidence.MARKER.findall(text)} == set(evidence.topics())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_markers_of_a_page_can_be_replaced(page):
    text = evidence.expand(catalogue.expand(page.read_text(encoding="utf-8")))
    assert "<!-- evidence:" not in text.replace("<!-- end of evidence -->", "")


def test_tables_of_the_readme_are_those_of_the_results():
    """``python -m scripts.docs_site.evidence write`` renews them."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert evidence.renewed(text) == text


def test_printed_tables_become_results():
    text = "## Title\n\n| a | b |\n| --- | --- |\n| 1 | x \\| y |\n\n"
    text += "**Other**\n\n| c |\n|---|\n| 2 |\n\nOne note,\nof two lines.\n\n## Third\n\nText.\n"
    assert evidence.tables_of(text) == [
        {"title": "Title", "columns": ["a", "b"], "rows": [["1", "x \\| y"]]},
        {
            "title": "Other",
            "columns": ["c"],
            "rows": [["2"]],
            "note": "One note, of two lines.",
        },
    ]


def test_printed_numbers_become_numbers_that_are_shown_as_before():
    text = "| a | b | c | d | e | f |\n|---|---|---|---|---|---|\n"
    text += "| +1.5% | 1,024 | x | 0.5 | 2.50x | 9.5 (9-12) |\n| -0.5% | 7 | 3 | 12 | - | - |\n"
    item = evidence.with_numbers(evidence.tables_of(text)[0])
    assert item["rows"] == [
        [1.5, 1024, "x", 0.5, 2.5, [9.5, 9, 12]],
        [-0.5, 7, "3", 12, None, None],
    ]
    assert evidence.table(item, with_title=False).splitlines()[2:] == text.splitlines()[2:]
    assert evidence.with_numbers(item) == item
    ranges = evidence.with_numbers({"columns": ["a"], "rows": [["1.50-2.00 %"], ["3.00-10.00 %"]]})
    assert ranges["formats"] == ["{:.2f}-{:.2f} %"]
    assert ranges["rows"] == [[[1.5, 2.0]], [[3.0, 10.0]]]


def test_cells_are_shown_in_the_format_of_their_column():
    assert evidence.cell(0.5, "{:.2f}x") == "0.50x"
    assert evidence.cell([1.5, 1.0, 2.0], "{:.1f} ({:.1f}-{:.1f})") == "1.5 (1.0-2.0)"
    assert evidence.cell([1.5, 2.0], "{:.2f}") == "1.50, 2.00"
    assert evidence.cell("OOM", "{:.2f}x") == "OOM"
    assert evidence.cell(None, "{:.2f}x") == "-"
    assert evidence.cell(0.123456, "{:.1f} of {:.1f}") == "0.1235"


def test_a_record_is_shown_by_the_report_of_its_script(tmp_path, monkeypatch):
    monkeypatch.setattr(evidence, "RESULTS", tmp_path)
    record = {"measured": {"first_token_s": 4.0, "per_token_s": 0.02, "makespan_s": 65.0}}
    record |= {"simulated": record["measured"], "theirs": record["measured"]}
    record |= {"iterations": 7, "preemptions": 0}
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(record)))
    options = ["record", "one", "--command", "c", "--date", "2026-01-01", "--machine", "m"]
    assert evidence.main([*options, "--report", "reproduce.vllm_run"]) == 0
    assert json.loads((tmp_path / "one.json").read_text())["record"] == record
    (item,) = evidence.load("one")["tables"]
    assert ["makespan, s", "65.00", "65.00", "+0.0%", "65.00", "+0.0%"] in item["rows"]
    assert item["note"].startswith("7 iterations")


def test_a_result_file_is_the_same_json_on_fewer_lines():
    value = {"rows": [[1, "a"], [2, [3.5] * 60]], "none": None, "empty": {}, "é": "ü"}
    text = evidence.lines_of(value)
    assert json.loads(text) == value
    assert ' [1, "a"],' in text.splitlines()[2]


def test_rows_may_be_objects_with_numbers():
    item = {"title": "t", "rows": [{"what": "x", "seconds": 0.123456}]}
    assert "| x | 0.1235 |" in evidence.table(item, with_title=True)


def run_on(name, isa, rows, **fields):
    item = {"title": "T", "columns": ["bits", "ms", "ratio"], "keys": 1, "rows": rows, **fields}
    return {
        "processor": name, "cpu_isa": isa, "date": "2026-01-01", "command": f"run on {name}",
        "versions": {}, "tables": [item],
    }  # fmt: skip


def test_runs_of_processors_stand_side_by_side():
    fields = {"beside": ["ms", "ratio"], "ranges": {"of": "ratio", "by": "bits"}}
    runs = [
        run_on("A", "native", [[8, 1.5, 0.5], [4, 1.0, 0.25]], **fields),
        run_on("B", "avx2", [[4, 2.0, 1.25], [3, 9.0, None]], **fields),
    ]
    lines = evidence.by_processor(runs, ["T"]).splitlines()
    assert "| bits | A | B, held to AVX2 |" in lines
    assert "| 4 | 0.25 to 0.25 | 1.25 to 1.25 |" in lines
    assert "| 4 | 1; 0.25 | 2; 1.25 |" in lines
    assert "| 8 | 1.5; 0.5 | - |" in lines
    assert "| 3 | - | 9; - |" in lines
    assert "*`run on A`, 2026-01-01, A.*" in lines
    assert "*`run on B`, 2026-01-01, B, held to AVX2.*" in lines


def test_numbers_that_are_compared_have_the_formats_of_their_columns():
    fields = {"beside": ["ms", "ratio"], "formats": ["{:,.0f}", "{:.1f} ({:.1f}-{:.1f})", "{:.2f}"]}
    fields["ranges"] = {"of": "ms", "by": "bits"}
    runs = [run_on(name, "native", [[1024, [2.0, 1.5, 3.0], 0.5]], **fields) for name in ("A", "B")]
    lines = evidence.by_processor(runs, ["T"]).splitlines()
    assert "| 1,024 | 2.0 (1.5-3.0); 0.50 | 2.0 (1.5-3.0); 0.50 |" in lines
    assert "| 1024 | 1.50 to 3.00 | 1.50 to 3.00 |" in lines


def test_runs_that_are_not_compared_have_a_table_each():
    runs = [run_on(name, "native", [[8, 1.5, 0.5]]) for name in ("A", "B")]
    lines = evidence.by_processor(runs, ["T"]).splitlines()
    assert lines.count("| 8 | 1.5 | 0.5 |") == 2
    assert {"**T: A**", "**T: B**"} <= set(lines)


@pytest.mark.parametrize("topic", evidence.topics())
def test_runs_name_their_processor_and_are_kept_once(topic):
    runs = evidence.load(topic).get("runs", [])
    names = [(run["processor"], run["cpu_isa"]) for run in runs]
    assert len(set(names)) == len(names)
    for run in runs:
        shown = evidence.render(topic)
        assert evidence.label(run) in shown
        assert {"date", "command", "versions", "tables"} <= run.keys()


def test_a_recorded_table_joins_those_of_other_processors(tmp_path, monkeypatch):
    monkeypatch.setattr(evidence, "RESULTS", tmp_path)
    for name, value in (("A", 1), ("B", 2), ("A", 3)):
        monkeypatch.setattr("sys.stdin", io.StringIO(f"**T**\n\n| a |\n|---|\n| {value} |\n"))
        words = ["record", "x", "--command", "c", "--date", "2026-01-01", "--processor", name]
        assert evidence.main(words) == 0
    runs = evidence.load("x")["runs"]
    assert [(run["processor"], run["tables"][0]["rows"]) for run in runs] == [
        ("A", [[3]]),
        ("B", [[2]]),
    ]


def test_reference_of_the_commands_has_every_option():
    text = cli_reference.reference()
    surface = (ROOT / "tests" / "architecture" / "cli_surface.txt").read_text(encoding="utf-8")
    for line in surface.splitlines():
        option = line.split()[-1]
        if option.startswith("--") and option.removeprefix("--") not in cli_reference.COMMON:
            assert option in text, line
