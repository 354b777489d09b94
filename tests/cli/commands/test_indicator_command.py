"""llmpq-indicator writes what llmpq-algo plans with, and a table of another model is refused."""

import json
import re

import pytest
import torch
from helpers.tiny_models import save_tiny_model

from llmpq.cli.commands import algo, indicator
from llmpq.spec.tables import read_sensitivity

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Prompts as tokens: tiny models have no tokenizer."""
    path = tmp_path_factory.mktemp("text") / "prompts.jsonl"
    lines = [{"prompt_token_ids": [(7 * i + j) % 90 for j in range(16)]} for i in range(8)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def run(capsys, *arguments):
    status = indicator.main([*map(str, arguments), "--threads", "1"])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def measure(capsys, model_dir, text, output, *more):
    sizes = "--calibration_tokens", 16
    status, out, err = run(
        capsys, "--model", model_dir, "--calibration", text, *sizes, "--output", output, *more
    )
    assert status == 0, err
    return out


@pytest.mark.parametrize("method", ["divergence", "variance", "hessian", "random"])
def test_json_has_a_value_for_every_layer_and_bitwidth(capsys, tiny_model, text, tmp_path, method):
    model_dir, output = tiny_model("llama", seed=1), tmp_path / "omega.json"
    out = measure(capsys, model_dir, text, output, "--method", method, "--json")
    record = json.loads(out)
    table = read_sensitivity(output)
    assert record["method"] == table.method == method
    assert record["elapsed_s"] >= 0
    assert record["omega"] == {str(width): list(column) for width, column in table.omega}
    assert sum(record["omega"]["4"]) == pytest.approx(1)
    if method == "divergence":
        assert record["head"] == {str(width): loss for width, loss in table.head}
        assert record["head"]["3"] > record["head"]["4"] > record["head"]["8"] >= 0
    else:
        assert record["head"] is table.head is None
    for low, middle, high in zip(*(record["omega"][key] for key in "348"), strict=True):
        assert low >= middle >= high >= 0


def test_a_table_says_where_it_comes_from(capsys, tiny_model, text, tmp_path):
    output = tmp_path / "omega.json"
    measure(capsys, tiny_model("llama", seed=1), text, output)
    table = read_sensitivity(output)
    known = dict(table.provenance)
    assert table.method == "divergence"
    assert {"shapes_sha256", "weights_sha256", "calibration_sha256", "command"} <= set(known)
    assert known["calibration"] == "prompts.jsonl (8 x 16 tokens)"


def test_without_a_text_the_weights_alone_are_told(capsys, tiny_model):
    status, out, _ = run(capsys, "--model", tiny_model("llama", seed=1), "--json")
    record = json.loads(out)
    assert status == 0
    assert record["method"] == "variance"
    assert "weights alone" in record["calibration"]


def test_bits_for_an_average_use_what_the_average_allows(capsys, tiny_model):
    model_dir = tiny_model("llama", seed=1)
    status, out, _ = run(capsys, "--model", model_dir, "--average_bits", 6, "--json")
    record = json.loads(out)
    assert status == 0
    assert sum(record["bits"]) / len(record["bits"]) <= 6
    assert 0 < record["quality"] <= 1


def test_text_output_has_a_line_for_every_layer(capsys, tiny_model):
    status, out, _ = run(capsys, "--model", tiny_model("llama", seed=1), "--average_bits", 8)
    assert status == 0
    lines = out.splitlines()
    assert lines[0].split() == ["layer", "3", "bits", "4", "bits", "8", "bits"]
    assert lines[1].split()[0] == "0"
    assert "weights alone" in out
    assert any(line.startswith("bits ") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "hessian"], "expected a text to calibrate on"),
        (["--calibration_tokens", "0"], "--calibration_tokens: found 0"),
        (["--average_bits", "2"], "expected at least 3"),
        (["--output", "no/such/folder/omega.json"], "no such folder"),
        (["--bits", "5"], "invalid choice"),
    ],
)
def test_what_cannot_be_is_one_clear_line(capsys, tiny_model, arguments, message):
    status, out, err = run(capsys, "--model", tiny_model("llama", seed=1), *arguments)
    assert status in (2, 3)
    assert message in err
    assert not out


def plan(capsys, model_dir, omega, *more):
    status = algo.main(
        [
            *("--model", str(model_dir), "--omega_file", str(omega), "--json", "--no_explain"),
            *("--device_names", "T4-16G", "--device_numbers", "2"),
            *("--global_bz", "2", "--s", "4", "--n", "4"),
            *("--output", str(omega.with_name("plan.json"))),
            *map(str, more),
        ]
    )
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_algo_plans_with_the_table(capsys, tiny_model, text, tmp_path):
    model_dir, omega = tiny_model("llama", seed=1), tmp_path / "omega.json"
    measure(capsys, model_dir, text, omega)
    status, out, err = plan(capsys, model_dir, omega, "--average_bits", 6)
    assert status == 0, err
    bits = [width for stage in json.loads(out)["stages"] for width in stage["bits"]]
    assert sum(bits) / len(bits) <= 6


def test_algo_takes_one_answer_about_bits(capsys, tiny_model, text, tmp_path):
    model_dir, omega = tiny_model("llama", seed=1), tmp_path / "omega.json"
    measure(capsys, model_dir, text, omega)
    status, _, err = plan(capsys, model_dir, omega, "--average_bits", 6, "--quality_budget", 1)
    assert status == 2
    assert "--average_bits: found together with --quality_budget" in err


@pytest.mark.parametrize(
    ("seed", "shape", "message"),
    [
        (2, {}, "expected .*, those in"),
        (1, {"layers": 2}, "found 3 layers of"),
        (1, {"intermediate": 96}, "other shapes"),
    ],
)
def test_algo_refuses_the_table_of_another_model(
    capsys, tiny_model, text, tmp_path, seed, shape, message
):
    omega = tmp_path / "omega.json"
    measure(capsys, tiny_model("llama", seed=1), text, omega)
    other = save_tiny_model("llama", tmp_path / "other", seed=seed, shape=shape)
    capsys.readouterr()  # what transformers says while it saves
    status, out, err = plan(capsys, other, omega)
    assert status == 2
    assert not out
    assert len(err.strip().splitlines()) == 1
    assert re.search(message, err)
    assert "measure this model with llmpq-indicator" in err
