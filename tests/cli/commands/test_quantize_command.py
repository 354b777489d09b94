"""llmpq-quantize: options, output, refusals; what it makes is tested with the library."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from llmpq.cli.commands import algo
from llmpq.cli.commands.quantize import main
from llmpq.quant.checkpoint.reader import GptqCheckpoint
from llmpq.spec.huggingface.families import load_model_dir

torch.set_num_threads(1)

SHAPE = {"layers": 2, "hidden": 64, "intermediate": 128, "heads": 4, "kv_heads": 2}


@pytest.fixture
def model_dir(tiny_model):
    return tiny_model("llama", seed=1, shape=SHAPE)


@pytest.fixture
def text(tmp_path):
    lines = [{"prompt_token_ids": [(i * 7 + j) % 100 for j in range(40)]} for i in range(8)]
    path = tmp_path / "calibration.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_gptq_by_default(model_dir, text, tmp_path, capsys):
    arguments = ["--model", model_dir, "--bits", "4", "--calibration", text]
    arguments += ["--output", tmp_path / "out", "--calibration_tokens", "32", "--json"]
    assert main([str(a) for a in arguments]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["precisions"] == ["w4-gptq-g128-asym"] * 2
    assert record["calibration"] == "calibration.jsonl (10 x 32 tokens)"
    assert record["rounded"] == []
    assert GptqCheckpoint(tmp_path / "out").bits(1) == 4


def test_rounding_needs_no_text(model_dir, tmp_path, capsys):
    arguments = ["--model", model_dir, "--bits", "3", "--method", "rtn", "--sym"]
    arguments += ["--group_size", "32", "--output", tmp_path / "out"]
    assert main([str(a) for a in arguments]) == 0
    assert "2 at w3-rtn-g32" in capsys.readouterr().out
    packed = GptqCheckpoint(tmp_path / "out").packed(0, "mlp.up_proj", torch.float32)
    assert str(packed.precision) == "w3-gptq-g32"  # the format does not say who chose the codes


def test_the_script_of_an_export_runs_as_written(model_dir, tmp_path, capsys, monkeypatch):
    """The scripts have a folder of their own, and the model is named from another one."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model_dir, "my-model")
    arguments = ["--model", "my-model", "--global_bz", "1", "--s", "8", "--n", "8", "--bits", "8"]
    arguments += ["--device_names", "T4-16G", "--export", "vllm", "--output", "for-vllm"]
    assert algo.main([*arguments, "--no_explain"]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("then ")]
    assert [line.split()[1].rstrip(":") for line in told] == [
        "for-vllm/quantize.sh",
        "for-vllm/node-0.sh",
    ]
    programs = Path(sys.executable).parent
    environment = dict(os.environ) | {"PATH": f"{programs}:{os.environ['PATH']}"}
    subprocess.run(["for-vllm/quantize.sh"], env=environment, check=True, capture_output=True)
    assert GptqCheckpoint(tmp_path / "for-vllm" / "checkpoint").bits(1) == 8


def test_the_head_has_bits_of_its_own(model_dir, tmp_path, capsys):
    arguments = ["--model", model_dir, "--bits", "4", "--method", "rtn", "--head_bits", "8"]
    assert main([str(a) for a in [*arguments, "--output", tmp_path / "out"]]) == 0
    assert "head           w8-rtn-gc" in capsys.readouterr().out
    assert str(load_model_dir(tmp_path / "out").stored_head) == "w8-gptq-gc"


def test_eight_bits_are_symmetric_and_per_channel(model_dir, tmp_path, capsys):
    arguments = ["--model", model_dir, "--bits", "8", "--method", "rtn", "--json"]
    assert main([str(a) for a in [*arguments, "--output", tmp_path / "out"]]) == 0
    assert json.loads(capsys.readouterr().out)["precisions"] == ["w8-rtn-gc"] * 2


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--bits", "4"], "expected a text to calibrate on"),
        (["--bits", "4", "--method", "rtn", "--act_order"], "expected neither"),
        (["--bits", "4", "--method", "rtn", "--group_size", "0"], "found 0, expected -1"),
        (["--bits", "4", "--method", "rtn", "--group_size", "48"], "groups of 48 do not divide"),
        (["--bits", "4", "--calibration", "none.txt"], "cannot be read as text"),
    ],
)
def test_what_cannot_be_done_is_refused(model_dir, tmp_path, capsys, extra, message):
    assert main(["--model", str(model_dir), "--output", str(tmp_path / "out"), *extra]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten(model_dir, tmp_path, capsys):
    arguments = ["--model", str(model_dir), "--bits", "4", "--method", "rtn"]
    assert main([*arguments, "--output", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
