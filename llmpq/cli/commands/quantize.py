"""llmpq-quantize: write a quantized checkpoint of a model, layer by layer."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llmpq.cli.common import make_parser, print_json, progress_bar, require, run_command
from llmpq.cli.options import calibration_of
from llmpq.errors import SpecError
from llmpq.options.declare import add_options
from llmpq.options.quality import CalibrationOptions, QuantizeOptions
from llmpq.spec.plan import read_plan
from llmpq.spec.precision import Precision, default_precision, unquantized
from llmpq.units import format_bytes

if TYPE_CHECKING:
    from llmpq.calibration.quantize import QuantizeJob, QuantizeReport

PER_CHANNEL = -1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    return run_command(_parser(), _run, argv)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "llmpq-quantize", "Write a quantized checkpoint for llmpq-dist and other tools."
    )
    add_options(parser, QuantizeOptions, "model")
    bits = parser.add_mutually_exclusive_group(required=True)
    add_options(bits, QuantizeOptions, "bits", "strategy")
    add_options(parser, QuantizeOptions, "head_bits", "output", "method", "format")
    add_options(parser, CalibrationOptions)
    add_options(parser, QuantizeOptions, "group_size", "sym", "act_order", "damping")
    return parser


def _run(options: argparse.Namespace) -> int:
    _check_options(options)
    require("torch", "transformers", "safetensors")
    started = time.monotonic()
    job = _job(options)
    from llmpq.calibration.quantize import quantize_checkpoint

    with progress_bar("quantize", delay_s=0) as show:
        report = quantize_checkpoint(job, options.output, show)
    elapsed_s = time.monotonic() - started
    if options.json:
        print_json(_record(job, report, options, elapsed_s))
        return 0
    print(f"checkpoint     {options.output} ({format_bytes(report.weights_bytes)})")
    print(f"layers         {_layers_text(job.precisions)}")
    if job.head is not None:
        print(f"head           {job.head}")
    if job.calibration is not None:
        print(f"calibration    {job.calibration.source}")
    print(f"time           {elapsed_s:.1f} s")
    if report.rounded:
        print(
            f"llmpq-quantize: warning: too few tokens for {len(report.rounded)} operators, which "
            f"were rounded: {', '.join(report.rounded[:8])}"
            + (" ..." if len(report.rounded) > 8 else ""),
            file=sys.stderr,
        )
    return 0


def _check_options(options: argparse.Namespace) -> None:
    """Check the options before torch is imported."""
    is_gptq = options.method == "gptq"
    if is_gptq and options.calibration is None:
        raise SpecError("--method gptq: expected a text to calibrate on, --calibration FILE")
    if not is_gptq and (options.calibration is not None or options.act_order):
        raise SpecError("--method rtn: expected neither --calibration nor --act_order")
    if options.format != "gptq" and options.act_order:
        raise SpecError(f"--format {options.format}: expected no --act_order")
    group = options.group_size
    if group is not None and group < 1 and group != PER_CHANNEL:
        raise SpecError(f"--group_size: found {group}, expected -1 or at least 1")
    if Path(options.output).exists():
        raise SpecError(f"{options.output}: exists already, expected a new directory")


def _job(options: argparse.Namespace) -> QuantizeJob:
    from llmpq.calibration.quantize import QuantizeJob
    from llmpq.models import load_config
    from llmpq.quant.quantizers.gptq import GptqOptions

    model_dir = Path(options.model)
    bits = _bits(options, load_config(model_dir).num_hidden_layers)
    head = options.head_bits
    if head is None and options.strategy is not None:
        head = read_plan(options.strategy).head_bits
    return QuantizeJob(
        model_dir=model_dir,
        precisions=tuple(_precision(width, options) for width in bits),
        head=None if head in (None, 16) else _precision(head, options),
        calibration=calibration_of(options),
        options=GptqOptions(damping=options.damping, order="full" if options.act_order else "none"),
        format=options.format,
    )


def _bits(options: argparse.Namespace, layers: int) -> tuple[int, ...]:
    if options.strategy is None:
        return (options.bits,) * layers
    bits = read_plan(options.strategy).whole_bits
    if len(bits) != layers:
        raise SpecError(
            f"{options.strategy}: found {len(bits)} layers, expected the {layers} of "
            f"{options.model}"
        )
    return bits


def _precision(bits: int, options: argparse.Namespace) -> Precision:
    """Return the precision of a bitwidth: its default, changed by the options."""
    if bits == 16:
        return unquantized()
    default = default_precision(bits)
    group = default.group_size if options.group_size is None else options.group_size
    return Precision(
        bits=bits,
        method=options.method,
        group_size=None if group == PER_CHANNEL else group,
        symmetric=default.symmetric or options.sym,
    )


def _layers_text(precisions: Sequence[Precision]) -> str:
    kinds = dict.fromkeys(precisions)
    return ", ".join(f"{precisions.count(kind)} at {kind}" for kind in kinds)


def _record(
    job: QuantizeJob, report: QuantizeReport, options: argparse.Namespace, elapsed_s: float
) -> dict[str, object]:
    calibration = job.calibration
    return {
        "output": str(options.output),
        "method": options.method,
        "format": options.format,
        "precisions": [str(precision) for precision in job.precisions],
        "head": None if job.head is None else str(job.head),
        "weights_bytes": report.weights_bytes,
        "rounded": list(report.rounded),
        "calibration": None if calibration is None else calibration.source,
        "calibration_sha256": None if calibration is None else calibration.digest,
        "elapsed_s": elapsed_s,
    }
