"""Run the checks one after the other, each apart, and keep what they find.

A run of all checks takes three calls of less than ten minutes each, for machines that end a command
after ten minutes: ``--call 1``, ``--call 2``, ``--call 3``. ``--report DIR [DIR ...]`` prints what
runs have written, finished or not, as Markdown.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from llmpq.kernels.base import open_device
from scripts.gpu_checks import kernels, machine, recurrences, runtime, sizes
from scripts.gpu_checks.harness import (
    SYNCHRONOUS,
    Check,
    Finding,
    Setting,
    run_apart,
    run_here,
)
from scripts.gpu_checks.report import report


class Planned(NamedTuple):
    """A check: its function, the seconds that it may take on a GPU, and its call."""

    check: Check
    limit_s: float
    call: int


# In the order of what is worth most when time runs out.
CHECKS: dict[str, Planned] = {
    "environment": Planned(machine.environment, 60, 1),
    "compile": Planned(kernels.compile_all, 135, 1),
    "kernel_times": Planned(kernels.times, 110, 1),
    "kv8": Planned(runtime.kv8, 45, 1),
    "decode_graphs": Planned(runtime.decode_graphs, 90, 1),
    "prompts": Planned(sizes.prompts, 60, 1),
    "kernel_errors": Planned(kernels.errors, 120, 2),
    "attention": Planned(sizes.attention, 45, 1),
    "step": Planned(sizes.step, 150, 2),
    "growth": Planned(sizes.growth, 60, 2),
    "mixed": Planned(sizes.mixed, 45, 2),
    "sampling": Planned(sizes.sampling, 45, 2),
    "quantized_stage": Planned(runtime.quantized_stage, 45, 2),
    "stage_memory": Planned(runtime.stage_memory, 45, 2),
    "tokens": Planned(runtime.tokens, 90, 3),
    "mixed_pipeline": Planned(runtime.mixed_pipeline, 120, 3),
    "two_stages": Planned(runtime.two_stages, 90, 3),
    "loading": Planned(sizes.loading, 80, 3),
    "recurrences": Planned(recurrences.recurrences, 60, 2),
    "kernel_memory": Planned(kernels.memory, 40, 3),
    "profile_layer": Planned(runtime.profile_layer, 90, 3),
    "nccl": Planned(machine.nccl, 40, 3),
}
CALL_S = 570.0
"""Most seconds of a call: the sum of its checks' limits is no more."""
LEAST_S = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is asked for; 1 when any check fails."""
    options = _parser().parse_args(argv)
    if options.report:
        print(report(options.report, list(CHECKS)), end="")
        return 0
    names = _names(options)
    if options.dry_run:
        print(_listing(names), end="")
        return 0
    device = _device("cpu" if options.try_on_cpu else options.device)
    is_quick = options.quick or options.try_on_cpu
    if options.file is not None:
        _here(names[0], device, is_quick, options.file)
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    if options.try_on_cpu:
        findings = [
            _here(name, device, is_quick, options.output / f"{name}.jsonl") for name in names
        ]
    else:
        passed_on = ["--device", str(device), *(["--quick"] if is_quick else [])]
        findings = _run(names, passed_on, options.output)
    print(report([options.output], list(CHECKS)), end="")
    return 1 if any(finding.status == "failed" for finding in findings) else 0


def _run(names: Sequence[str], options: Sequence[str], folder: Path) -> list[Finding]:
    """Run checks apart within the time of a call; run a failed one again, synchronously."""
    findings: list[Finding] = []
    end = time.monotonic() + CALL_S
    for name in names:
        left = end - time.monotonic()
        if left < LEAST_S:
            findings.append(Finding(name=name, status="skipped", reason="no time left"))
            continue
        limit_s = min(left, CHECKS[name].limit_s)
        finding = run_apart(name, options, folder, limit_s)
        findings.append(finding)
        print(f"{name}: {finding.status} ({finding.seconds:g} s)", file=sys.stderr, flush=True)
        left = end - time.monotonic() - _limits(names[len(findings) :])
        if finding.status == "failed" and finding.seconds < limit_s and left > LEAST_S:
            again = run_apart(name, options, folder, min(left, limit_s), SYNCHRONOUS)
            print(f"{name}, synchronously: {again.status}", file=sys.stderr, flush=True)
    return findings


def _limits(names: Sequence[str]) -> float:
    """Return the seconds that checks take, should each take a third of its limit."""
    return sum(CHECKS[name].limit_s for name in names) / 3


def _names(options: argparse.Namespace) -> list[str]:
    if options.only:
        return list(options.only)
    calls = [options.call] if options.call else [1, 2, 3]
    return [
        name
        for name, planned in CHECKS.items()
        if planned.call in calls and name not in options.skip
    ]


def _listing(names: Sequence[str]) -> str:
    """Return what would run, by call, and the most seconds that it takes."""
    lines = []
    for call in sorted({CHECKS[name].call for name in names}):
        own = [name for name in names if CHECKS[name].call == call]
        total_s = sum(CHECKS[name].limit_s for name in own)
        lines.append(f"call {call}: at most {total_s:g} s")
        for name in own:
            what = (CHECKS[name].check.__doc__ or "").strip().splitlines()[0]
            lines.append(f"  {name:16} {CHECKS[name].limit_s:4g} s  {what}")
    return "\n".join(lines) + "\n"


def _device(name: str) -> torch.device:
    """Return the device, with the number that some of torch's functions want to see."""
    device = torch.device(name)
    return torch.device("cuda", 0) if str(device) == "cuda" else device


def _here(name: str, device: torch.device, is_quick: bool, file: Path) -> Finding:
    if device.type == "cuda" and torch.cuda.is_available():
        open_device(device)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        setting = Setting(device=device, is_quick=is_quick, folder=Path(folder))
        return run_here(name, CHECKS[name].check, setting, file)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, default=Path("runs/gpu_check"), metavar="DIR")
    parser.add_argument("--device", default="cuda", help="what to check (default cuda)")
    parser.add_argument("--call", type=int, choices=(1, 2, 3), help="the checks of one call")
    parser.add_argument("--only", nargs="+", choices=CHECKS, help="these checks alone")
    parser.add_argument("--skip", nargs="+", choices=CHECKS, default=[], help="all but these")
    parser.add_argument(
        "--dry_run", action="store_true", help="list what would run and for how long"
    )
    parser.add_argument("--report", type=Path, nargs="+", metavar="DIR", help="print a report")
    parser.add_argument("--quick", action="store_true", help="small shapes, and few of them")
    parser.add_argument(
        "--try_on_cpu", action="store_true", help="try the checks themselves: quick, on the CPU"
    )
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
