"""llmpq-eval: what it prints, and what it refuses before any weight is read."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.ranks import make_plan

from llmpq.cli.commands.evals import main
from llmpq.cli.commands.quantize import main as quantize
from llmpq.evals import evaluate
from llmpq.spec.plan import write_plan

DEMO = Path(__file__).parents[3] / "models" / "demo"
TEXT = DEMO / "heldout.txt"
WIDE = {"layers": 3, "hidden": 64, "intermediate": 96, "heads": 4, "kv_heads": 2}
FIELDS = {"perplexity", "tokens", "kl_to_16bit", "perplexity_16bit"}


def _readable(made, folder):
    """A tiny model that can read text: the demo model's tokenizer beside random weights."""
    shutil.copytree(made, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def model(tiny_model, tmp_path_factory):
    made = tiny_model("llama", seed=1, vocab_size=4096, shape=WIDE)
    return _readable(made, tmp_path_factory.mktemp("eval") / "model")


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    """The command sets the numeric libraries' variables for its own process."""
    for name in ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "1")


def _arguments(model, *more):
    sizes = ["--window", "32", "--rows", "3", "--max_tokens", "200", "--threads", "1"]
    return ["--model", str(model), "--text", str(TEXT), *sizes, *more]


def _json(capsys, arguments):
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == FIELDS
    assert found["tokens"] == 200 - 7
    return found


def test_bits_cost_what_they_cost(model, capsys):
    plain = _json(capsys, _arguments(model, "--bits", "16"))
    assert plain["kl_to_16bit"] == 0
    assert plain["perplexity"] == plain["perplexity_16bit"]
    fewer = _json(capsys, _arguments(model, "--bits", "4"))
    assert fewer["perplexity_16bit"] == plain["perplexity"]
    assert fewer["kl_to_16bit"] > 0


def test_quantized_keys_are_part_of_the_model(model, capsys):
    lost = [0.0]
    for bits in ("8", "4"):
        found = _json(capsys, _arguments(model, "--bits", "16", "--kv_bits", bits))
        lost.append(found["kl_to_16bit"])
    assert lost == sorted(set(lost))


def test_layers_may_have_bits_of_their_own(model, capsys, tmp_path):
    listed = tmp_path / "bits.json"
    listed.write_text("[4, 16, 8]")
    strategy = tmp_path / "strategy.json"
    write_plan(strategy, make_plan((0, 2, 3), bits=(4, 16, 8), source=model))
    one = _json(capsys, _arguments(model, "--layer_bits", str(listed)))
    other = _json(capsys, _arguments(model, "--strategy", str(strategy)))
    assert one == other


def test_a_quantized_checkpoint_is_held_against_its_model(model, capsys, tmp_path):
    folder = tmp_path / "w4"
    made = ["--model", str(model), "--bits", "4", "--method", "rtn", "--output", str(folder)]
    assert quantize(made) == 0
    capsys.readouterr()
    found = _json(capsys, _arguments(model, "--quantized", str(folder)))
    rounded = _json(capsys, _arguments(model, "--bits", "4"))
    assert found["perplexity_16bit"] == rounded["perplexity_16bit"]
    # The format keeps zero points as integers and scales in float16: other numbers, alike in size.
    assert found["kl_to_16bit"] == pytest.approx(rounded["kl_to_16bit"], rel=0.5)


def test_a_checkpoint_of_another_model_is_refused(model, capsys, tmp_path):
    folder = tmp_path / "w4"
    assert (
        quantize(["--model", str(model), "--bits", "4", "--method", "rtn", "--output", str(folder)])
        == 0
    )
    assert main(_arguments(DEMO, "--quantized", str(folder))) == 2
    assert "found 3 layers, expected the 12" in capsys.readouterr().err
    assert main(_arguments(model, "--quantized", str(model))) == 2


@pytest.mark.dist
@pytest.mark.slow
def test_the_pipeline_says_what_one_process_says(tiny_model, capsys, tmp_path):
    # So narrow that rows are added up alike, however many are computed at a time.
    model = _readable(tiny_model("llama", seed=1, vocab_size=4096), tmp_path / "model")
    strategy = tmp_path / "strategy.json"
    plan = replace(make_plan((0, 2, 3), bits=(4, 16, 8), source=model), kv_bits=8)
    write_plan(strategy, plan)
    alone = _json(capsys, _arguments(model, "--strategy", str(strategy)))
    piped = _json(capsys, _arguments(model, "--strategy", str(strategy), "--pipeline"))
    assert alone == piped


def test_a_person_reads_three_lines(model, capsys):
    assert main(_arguments(model, "--bits", "8")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["perplexity", "KL", "tokens"]


def test_several_are_compared_with_one_pass_at_16_bits(model, capsys, tmp_path, monkeypatch):
    folder, listed = tmp_path / "w4", tmp_path / "bits.json"
    made = ["--model", str(model), "--bits", "4", "--method", "rtn", "--output", str(folder)]
    assert quantize(made) == 0
    listed.write_text("[4, 16, 8]")
    capsys.readouterr()
    alone = {
        name: _json(capsys, _arguments(model, *words))
        for name, words in {
            "4": ["--bits", "4"],
            f"gptq:{folder}": ["--quantized", str(folder)],
            f"layer_bits:{listed}": ["--layer_bits", str(listed)],
        }.items()
    }
    passes = []
    stream = evaluate.stream_hidden
    monkeypatch.setattr(
        evaluate, "stream_hidden", lambda *a, **k: (passes.append(a[0].bits), stream(*a, **k))[1]
    )
    assert main([*_arguments(model, "--compare", *alone), "--json"]) == 0
    first, *rows = json.loads(capsys.readouterr().out)["compared"]
    assert passes == [(16,) * 3, (4,) * 3, (None,) * 3, (4, 16, 8)]
    assert (first["name"], first["bits"], first["kl_to_16bit"]) == ("reference", 16, 0)
    for row, (name, found) in zip(rows, alone.items(), strict=True):
        assert row["name"] == name
        for field in ("perplexity", "kl_to_16bit", "tokens"):
            assert row[field] == found[field]
        assert first["perplexity"] == found["perplexity_16bit"]
        assert row["weight_bytes"] < first["weight_bytes"]
    assert [row["bits"] for row in rows] == [4, 4, pytest.approx(28 / 3)]


def test_a_person_reads_one_table(model, capsys):
    assert main(_arguments(model, "--compare", "4", "8")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["bits", "GiB", "perplexity", "change", "KL,", "nats", "seconds"]
    assert [line.split()[:2] for line in lines[1:4]] == [
        ["reference", "16.00"], ["4", "4.00"], ["8", "8.00"],
    ]  # fmt: skip
    assert lines[-1] == "tokens 193"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("5", "--compare: found '5', expected one of"),
        ("gptq:nowhere", "nowhere"),
        ("layer_bits:nowhere.json", "nowhere.json: no such file"),
        ("strategy:nowhere.json", "nowhere.json: no such file"),
    ],
)
def test_what_cannot_be_compared_is_bad_input(model, capsys, what, message):
    assert main(_arguments(model, "--compare", "4", what)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--bits", "4", "--pipeline"], "expected one whose ranks to run"),
        (["--bits", "4", "--window", "1"], "--window: found 1"),
        (["--bits", "4", "--rows", "0"], "--rows: found 0"),
        (["--bits", "4", "--max_tokens", "1"], "--max_tokens: found 1"),
        (["--bits", "4", "--text", "nowhere.txt"], "nowhere.txt: cannot be read"),
        (["--bits", "4", "--window", "9999"], "found 9999 tokens, the model knows"),
        (["--layer_bits", "nowhere.json"], "nowhere.json"),
        (["--strategy", "nowhere.json"], "nowhere.json"),
    ],
)
def test_what_cannot_be_is_bad_input(model, capsys, more, message):
    assert main(_arguments(model, *more)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[4, 4]", "[4, 4, 5]", '{"bits": 4}', "[4, 4, true]"])
def test_a_list_of_bits_is_read_strictly(model, capsys, tmp_path, text):
    listed = tmp_path / "bits.json"
    listed.write_text(text)
    assert main(_arguments(model, "--layer_bits", str(listed))) == 2
    assert "expected a list of 3" in capsys.readouterr().err


@pytest.mark.parametrize("more", [["--dtype", "bfloat16"], ["--kv_bits", "8"]])
def test_the_ranks_run_as_their_plan_says(model, capsys, tmp_path, more):
    strategy = tmp_path / "strategy.json"
    write_plan(strategy, make_plan((0, 2, 3), source=model))
    options = _arguments(model, "--strategy", str(strategy), "--pipeline", *more)
    assert main(options) == 2
    assert f"{more[0]}: found {more[1]}, the strategy" in capsys.readouterr().err


def test_a_model_without_a_tokenizer_cannot_read(tiny_model, capsys):
    assert main(_arguments(tiny_model("llama", seed=1), "--bits", "16")) == 2
    assert "found no tokenizer" in capsys.readouterr().err
