"""Run the checks one after the other, each apart, and write what they found."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from scripts.gpu_checks import kernels, machine, runtime
from scripts.gpu_checks.harness import Check, Finding, Setting, run_apart, run_here, write_report

# In the order of what is worth most when time runs out; seconds each may take on a GPU.
CHECKS: dict[str, tuple[Check, float]] = {
    "environment": (machine.environment, 60),
    "triton": (machine.triton_runs, 60),
    "kernel_errors": (kernels.errors, 200),
    "kernel_memory": (kernels.memory, 60),
    "quantized_stage": (runtime.quantized_stage, 60),
    "decode_graphs": (runtime.decode_graphs, 90),
    "stage_memory": (runtime.stage_memory, 60),
    "tokens": (runtime.tokens, 90),
    "mixed_pipeline": (runtime.mixed_pipeline, 120),
    "kernel_times": (kernels.times, 150),
    "profile_layer": (runtime.profile_layer, 90),
    "nccl": (machine.nccl, 60),
}
TOTAL_S = 570.0
LEAST_S = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is asked for; 1 when any check fails."""
    options = _parser().parse_args(argv)
    device = _device("cpu" if options.dry_run else options.device)
    is_quick = options.quick or options.dry_run
    names = options.only or [name for name in CHECKS if name not in options.skip]
    if options.note is not None:
        finding = _here(names[0], device, is_quick)
        options.note.write_text(json.dumps(asdict(finding)), encoding="utf-8")
        return 0
    passed_on = ["--device", str(device), *(["--quick"] if is_quick else [])]
    findings: list[Finding] = []
    end = time.monotonic() + TOTAL_S
    for name in names:
        left = end - time.monotonic()
        if options.dry_run:
            finding = _here(name, device, is_quick)
        elif left < LEAST_S:
            finding = Finding(name=name, status="skipped", reason="no time left")
        else:
            finding = run_apart(name, passed_on, min(left, CHECKS[name][1]))
        findings.append(finding)
        print(f"{name}: {finding.status} ({finding.seconds:g} s)", file=sys.stderr, flush=True)
        text = write_report(options.output, findings)  # each time, in case we are stopped
    print(text, end="")
    return 1 if any(finding.status == "failed" for finding in findings) else 0


def _device(name: str) -> torch.device:
    """Return the device, with the number that some of torch's functions want to see."""
    device = torch.device(name)
    return torch.device("cuda", 0) if device.type == "cuda" and device.index is None else device


def _here(name: str, device: torch.device, is_quick: bool) -> Finding:
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        setting = Setting(device=device, is_quick=is_quick, folder=Path(folder))
        return run_here(name, CHECKS[name][0], setting)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/gpu_check", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("runs/gpu_check"), metavar="DIR")
    parser.add_argument("--device", default="cuda", help="what to check (default cuda)")
    parser.add_argument("--quick", action="store_true", help="small shapes, and few of them")
    parser.add_argument(
        "--dry_run", action="store_true", help="try the checks themselves: quick, on the CPU"
    )
    parser.add_argument("--only", nargs="+", choices=CHECKS, help="these checks alone")
    parser.add_argument("--skip", nargs="+", choices=CHECKS, default=[], help="all but these")
    parser.add_argument("--note", type=Path, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
