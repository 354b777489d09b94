"""scripts/gpu_check itself: what runs without a GPU, and the report of failures."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from llmpq.dist.launch.rank import torch_device
from llmpq.errors import SpecError
from scripts.gpu_checks import kernels, runtime
from scripts.gpu_checks.__main__ import CHECKS, main
from scripts.gpu_checks.harness import (
    FailedError,
    Setting,
    SkippedError,
    run_apart,
    run_here,
    write_report,
)

STARTS_PROCESSES = ("mixed_pipeline", "profile_layer")


def findings_in(folder):
    document = json.loads((folder / "gpu_check.json").read_text())
    return {finding["name"]: finding for finding in document["findings"]}


@pytest.fixture
def setting(tmp_path):
    return Setting(device=torch.device("cpu"), is_quick=True, folder=tmp_path)


def test_a_dry_run_tries_every_check_that_needs_no_gpu(tmp_path, capsys):
    status = main(["--dry_run", "--skip", *STARTS_PROCESSES, "--output", str(tmp_path)])
    findings = findings_in(tmp_path)
    assert status == 0, capsys.readouterr().out
    assert set(findings) == set(CHECKS) - set(STARTS_PROCESSES)
    passed = {name for name, finding in findings.items() if finding["status"] == "passed"}
    assert passed - {"triton"} == {
        "decode_graphs",
        "environment",
        "kernel_errors",
        "kernel_memory",
        "kernel_times",
        "quantized_stage",
        "tokens",
    }
    assert all(f["reason"] for f in findings.values() if f["status"] == "skipped")
    assert (tmp_path / "gpu_check.txt").read_text() == capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.dist
def test_a_dry_run_tries_the_pipeline_and_the_profiler(tmp_path):
    assert main(["--dry_run", "--only", *STARTS_PROCESSES, "--output", str(tmp_path)]) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_fails(tmp_path):
    assert main(["--only", "environment", "--output", str(tmp_path)]) == 1
    assert "no CUDA device" in findings_in(tmp_path)["environment"]["reason"]


def test_a_check_that_takes_too_long_is_ended_and_reported():
    finding = run_apart("environment", ["--device", "cpu"], 0.01)
    assert finding.status == "failed"
    assert "longer than 0.01 s" in finding.reason


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (SkippedError("no such thing"), "skipped", "no such thing"),
        (FailedError("wrong", [{"M": 1}]), "failed", "wrong"),
        (RuntimeError("CUDA error"), "failed", "RuntimeError: CUDA error"),
    ],
)
def test_whatever_a_check_raises_becomes_a_finding(setting, tmp_path, error, status, reason):
    def check(_):
        raise error

    finding = run_here("one", check, setting)
    assert finding.status == status
    assert reason in finding.reason
    assert f"== one: {status}" in write_report(tmp_path, [finding])


def test_a_wrong_product_fails_with_its_row(setting, monkeypatch):
    monkeypatch.setattr(kernels, "TOLERANCE", dict.fromkeys(kernels.TOLERANCE, 1e-12))
    with pytest.raises(FailedError, match="products are wrong") as caught:
        kernels.errors(setting)
    assert {"backend", "precision", "dtype", "N", "K", "M", "error"} <= set(caught.value.rows[0])


def test_other_tokens_fail(setting, monkeypatch):
    monkeypatch.setattr(runtime, "_generated", lambda *_: [[0] * runtime.NEW_TOKENS] * 4)
    with pytest.raises(FailedError, match="tokens differ") as caught:
        runtime.tokens(setting)
    assert caught.value.rows[0]["prompts"] == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_the_mixed_plan_puts_one_stage_on_a_gpu():
    plan = runtime._plan((0, 1, 3), ["cpu", runtime.GPU])
    assert torch_device(plan, 0) == torch.device("cpu")
    with pytest.raises(SpecError, match="CUDA devices"):
        torch_device(plan, 1)
