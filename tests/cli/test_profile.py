import json
from dataclasses import replace

import pytest

from llmpq.cli.commands.profile import main
from llmpq.cli.render import table_summary
from llmpq.spec.precision import Phase
from llmpq.spec.tables import (
    LatencySample,
    LatencyTable,
    read_latency_table,
    write_latency_table,
)

HELIX = "model,machine,phase,batch_tokens,layer_ms\nm,t4,prompt,250,18.0\nm,t4,decode,2,7.1\n"


@pytest.fixture
def table(tmp_path):
    samples = tuple(
        LatencySample(
            phase=phase, bits=16, batch=batch, tokens=tokens,
            seconds=1e-4 + 1e-6 * batch * tokens,
        )
        for phase in Phase
        for batch in (1, 2, 4, 8)
        for tokens in (16, 64, 256, 1024)
    )  # fmt: skip
    file = tmp_path / "table.csv"
    write_latency_table(file, LatencyTable(samples=samples))
    return file


def test_fit_prints_one_object_of_errors_by_phase(table, capsys):
    assert main(["fit", "--table", str(table), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"prefill", "decode"}
    assert all(set(one) == {"mean", "median", "p95", "points"} for one in found.values())
    assert found["decode"]["points"] == 5
    assert found["decode"]["mean"] < 0.02


def test_rows_of_other_bits_are_bad_input(table, capsys):
    text = table.read_text()
    table.write_text(text + "decode,-8,1,1,0.001\n")
    assert main(["fit", "--table", str(table)]) == 0
    table.write_text(text + "decode,-5,1,1,0.001\n")
    assert main(["fit", "--table", str(table)]) == 2
    assert "'bits': found -5, expected one of" in capsys.readouterr().err


def test_fit_compares_with_a_hold_out(table, capsys):
    assert main(["--json", "fit", "--table", str(table), "--holdout", str(table)]) == 0
    assert json.loads(capsys.readouterr().out)["prefill"]["points"] == 16


def test_fit_in_words_has_a_line_a_phase(table, capsys):
    assert main(["fit", "--table", str(table), "--law", "paper"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "prefill", "decode",
    ]  # fmt: skip


@pytest.mark.parametrize("factor", [5.0, 0.2])
def test_a_sample_that_forecasts_leave_out_is_named(table, capsys, factor):
    found = read_latency_table(table)
    wrong = next(one for one in found.samples if (one.batch, one.tokens) == (4, 64))
    samples = (
        replace(one, seconds=factor * one.seconds) if one is wrong else one for one in found.samples
    )
    write_latency_table(table, LatencyTable(samples=tuple(samples)))
    assert main(["fit", "--table", str(table)]) == 0
    text = "prefill      16  4 x 64 is left out of forecasts: its "
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "left out" in line]
    assert line.startswith(text)
    assert f"{factor:.2g} times" in line
    assert line in table_summary(read_latency_table(table))


def test_fit_of_no_file_is_bad_input(tmp_path, capsys):
    assert main(["fit", "--table", str(tmp_path / "none.csv")]) == 2
    assert "none.csv" in capsys.readouterr().err


def test_import_writes_a_table_with_its_provenance(tmp_path, capsys):
    source, output = tmp_path / "helix.csv", tmp_path / "t4.csv"
    source.write_text(HELIX)
    words = ["import", "--from", "helix", "--device", "m/t4", "--device_type", "T4-16G", "--json"]
    words += ["--model", "meta-llama/Llama-2-70b-hf", "--dtype", "float16"]
    assert main([*words, "--path", str(source), "--output", str(output)]) == 0
    assert json.loads(capsys.readouterr().out) == {"output": str(output), "points": 2}
    table = read_latency_table(output)
    origin = dict(table.provenance)
    assert origin["device"] == "T4-16G"
    assert origin["dtype"] == "float16"
    assert origin["imported_from"] == "helix"
    assert origin["command"].startswith("llmpq-profile import --from helix")


def test_import_of_an_unknown_model_is_bad_input(tmp_path, capsys):
    words = ["import", "--from", "helix", "--device", "x", "--output", str(tmp_path / "o.csv")]
    assert main([*words, "--model", "no-one/nothing"]) == 2
    assert "no-one/nothing" in capsys.readouterr().err
