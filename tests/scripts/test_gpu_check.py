"""scripts/gpu_check itself: what runs without a GPU, and what is kept of a run."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from llmpq.dist.launch.rank import torch_device
from llmpq.errors import SpecError
from scripts.gpu_checks import __main__ as command
from scripts.gpu_checks import kernels, runtime
from scripts.gpu_checks.__main__ import CALL_S, CHECKS, main
from scripts.gpu_checks.harness import (
    STDERR_BYTES,
    SYNCHRONOUS,
    FailedError,
    Finding,
    Setting,
    SkippedError,
    read_finding,
    run_apart,
    run_here,
)
from scripts.gpu_checks.report import report

pytestmark = pytest.mark.nightly

STARTS_PROCESSES = ("mixed_pipeline", "two_stages", "profile_layer")
NEEDS_A_GPU = {
    "compile", "growth", "stage_memory", "nccl", "attention", "kv8", "decode_graphs", "recurrences",
}  # fmt: skip
TOOL_S = 600.0  # after which a borrowed machine ends a command


@pytest.fixture
def setting(tmp_path):
    return Setting(device=torch.device("cpu"), is_quick=True, folder=tmp_path)


def test_a_dry_run_lists_every_check_and_the_seconds_of_each_call(tmp_path, capsys):
    assert main(["--dry_run", "--output", str(tmp_path)]) == 0
    listing = capsys.readouterr().out
    for call in (1, 2, 3):
        own = [planned.limit_s for planned in CHECKS.values() if planned.call == call]
        assert sum(own) <= CALL_S < TOOL_S
        assert f"call {call}: at most {sum(own):g} s" in listing
    for name, planned in CHECKS.items():
        assert (
            f"  {name:16} {planned.limit_s:4g} s  {planned.check.__doc__.splitlines()[0]}"
            in listing
        )
    assert list(tmp_path.iterdir()) == []
    main(["--dry_run", "--call", "2"])
    assert "call 1" not in capsys.readouterr().out


def test_kernels_are_compiled_before_any_is_timed():
    names = list(CHECKS)
    assert names.index("compile") < names.index("kernel_times") < names.index("kernel_errors")
    assert CHECKS["compile"].call == 1


@pytest.mark.slow
def test_every_check_that_needs_no_gpu_is_tried_on_a_cpu(tmp_path, capsys):
    status = main(["--try_on_cpu", "--skip", *STARTS_PROCESSES, "--output", str(tmp_path)])
    found = {file.stem: read_finding(file) for file in tmp_path.glob("*.jsonl")}
    assert status == 0, capsys.readouterr().out
    assert set(found) == set(CHECKS) - set(STARTS_PROCESSES)
    skipped = {name for name, finding in found.items() if finding.status == "skipped"}
    assert skipped == NEEDS_A_GPU
    assert all(found[name].reason for name in skipped)
    assert all(found[name].rows for name in set(found) - skipped)


@pytest.mark.slow
@pytest.mark.dist
def test_the_pipelines_and_the_profiler_are_tried_on_a_cpu(tmp_path):
    assert main(["--try_on_cpu", "--only", *STARTS_PROCESSES, "--output", str(tmp_path)]) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_fails(setting, tmp_path):
    there = Setting(device=torch.device("cuda", 0), is_quick=True, folder=tmp_path)
    found = run_here("environment", CHECKS["environment"].check, there, tmp_path / "one.jsonl")
    assert (found.status, found.reason) == ("failed", "torch finds no CUDA device")
    assert {"what": "torch", "found": torch.__version__} in found.rows


def test_each_row_is_in_the_file_when_the_next_one_is_made(setting, tmp_path):
    file = tmp_path / "one.jsonl"

    def check(_):
        for number in range(3):
            assert [row["n"] for row in read_finding(file).rows] == list(range(number))
            yield {"n": number}

    assert run_here("one", check, setting, file).status == "passed"
    assert len(read_finding(file).rows) == 3


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (SkippedError("no such thing"), "skipped", "no such thing"),
        (FailedError("wrong"), "failed", "wrong"),
        (RuntimeError("CUDA error"), "failed", "RuntimeError: CUDA error"),
    ],
)
def test_whatever_a_check_raises_becomes_a_finding_with_its_rows(
    setting, tmp_path, error, status, reason
):
    def check(_):
        yield {"M": 1}
        raise error

    file = tmp_path / "one.jsonl"
    finding = run_here("one", check, setting, file)
    assert finding == read_finding(file)
    assert (finding.status, finding.rows) == (status, [{"M": 1}])
    assert reason in finding.reason


def test_a_check_that_takes_too_long_is_ended_and_keeps_its_rows(tmp_path):
    file = tmp_path / "environment.jsonl"
    file.write_text('{"row": {"M": 1}}\n{"row": {"M"')  # killed while it wrote
    finding = run_apart("environment", ["--device", "cpu"], tmp_path, 0.01)
    assert (finding.status, finding.rows) == ("failed", [{"M": 1}])
    assert "longer than 0.01 s" in finding.reason


def test_the_end_of_standard_error_is_kept(tmp_path):
    finding = run_apart("no_such_check", ["x" * 3 * STDERR_BYTES], tmp_path, 120)
    assert (finding.status, finding.reason) == ("failed", "exit status 2")
    assert finding.stderr
    assert len(finding.stderr) <= STDERR_BYTES
    assert read_finding(tmp_path / "no_such_check.jsonl").stderr == finding.stderr


@pytest.mark.parametrize(
    ("seconds", "status", "again"),
    [(1.0, "failed", True), (1.0, "passed", False), (60.0, "failed", False)],
)
def test_a_failed_check_runs_again_with_synchronous_launches(
    tmp_path, monkeypatch, seconds, status, again
):
    """Unless it took all of its time."""
    calls = []

    def run(name, options, folder, limit_s, environment=None):
        calls.append(environment)
        return Finding(name=name, status=status, seconds=seconds)

    monkeypatch.setattr(command, "run_apart", run)
    command._run(["environment"], [], tmp_path)
    assert calls == [None, SYNCHRONOUS] if again else [None]


def test_the_report_of_an_unfinished_run_shows_what_there_is(tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    rows = {
        first / "environment.jsonl": [
            {"row": {"what": "gpu", "found": "NVIDIA X"}},
            {"status": "passed", "seconds": 2.0, "reason": "", "stderr": ""},
        ],
        first / "kv8.jsonl": [
            {"row": {"rows": 1, "error": 0.5}},
            {"status": "failed", "seconds": 3.0, "reason": "an error", "stderr": "CUDA error: x"},
        ],
        second / "step.jsonl": [{"row": {"bits": 3, "GB/s": 1234.5}}],
    }
    for file, lines in rows.items():
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["--report", str(first), str(second)]) == 0
    text = capsys.readouterr().out
    assert text == report([first, second], list(CHECKS))
    for part in (
        "- gpu: NVIDIA X",
        "| kv8 | **FAILED** | 3 | 1 | an error |",
        "### kv8: failed",
        "CUDA error: x",
        "| step | unfinished | 0 | 1 |  |",
        "| 3 | 1.23e+03 |",
    ):
        assert part in text
    missing = text[text.index("Not run:") :].splitlines()[0]
    assert "tokens" in missing
    assert "kv8" not in missing


def test_a_run_that_has_written_nothing_says_so(tmp_path):
    assert "anything yet" in report([tmp_path], list(CHECKS))


def test_a_wrong_product_fails_with_its_row(setting, tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "TOLERANCE", dict.fromkeys(kernels.TOLERANCE, 1e-12))
    finding = run_here("errors", kernels.errors, setting, tmp_path / "errors.jsonl")
    assert finding.status == "failed"
    assert "products are wrong" in finding.reason
    wrong = [row for row in finding.rows if "wrong" in row]
    assert {"backend", "precision", "dtype", "N", "K", "M", "error"} <= set(wrong[0])


def test_other_tokens_fail(setting, monkeypatch):
    monkeypatch.setattr(runtime, "_generated", lambda *_: [[0] * runtime.NEW_TOKENS] * 4)
    with pytest.raises(FailedError, match="tokens differ"):
        list(runtime.tokens(setting))


def test_heads_have_the_size_that_models_have(setting):
    """Torch chooses its attention by it: with 512 features neither flash nor cuDNN."""
    there = Setting(device=setting.device, is_quick=False, folder=setting.folder)
    config = runtime._graph_config(there)
    assert config["hidden"] // config["heads"] == 128


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_the_mixed_plan_puts_one_stage_on_a_gpu():
    plan = runtime._plan((0, 1, 3), ["cpu", runtime.GPU])
    assert torch_device(plan, 0) == torch.device("cpu")
    with pytest.raises(SpecError, match="CUDA devices"):
        torch_device(plan, 1)


def test_two_stages_share_the_only_gpu(monkeypatch):
    monkeypatch.setattr("llmpq.dist.launch.rank.accelerators", lambda _: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    plan = runtime._plan((0, 1, 3), [runtime.GPU] * 2, nodes=("a", "b"))
    assert [torch_device(plan, rank) for rank in (0, 1)] == [torch.device("cuda", 0)] * 2
