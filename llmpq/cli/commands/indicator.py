"""llmpq-indicator: the quality loss of a model with each layer at fewer bits."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmpq.cli.common import (
    make_parser,
    print_json,
    progress_bar,
    require,
    run_command,
)
from llmpq.cli.options import calibration_of
from llmpq.dist.launch.process_environment import cpu_environment
from llmpq.errors import SpecError
from llmpq.logging import get_logger
from llmpq.options.declare import add_options, read_options
from llmpq.options.quality import CalibrationOptions, IndicatorOptions
from llmpq.spec.fields import dump_json, to_json, write_text
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.tables import SensitivityTable, write_sensitivity

if TYPE_CHECKING:
    from llmpq.indicator import Divergence, Indicator, IndicatorInput

logger = get_logger(__name__)

NAME = "llmpq-indicator"
NEED_TEXT = ("divergence", "hessian")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    return run_command(_parser(), _run, argv)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        NAME, "Measure the quality loss of each layer at fewer bits, for llmpq-algo."
    )
    add_options(parser, IndicatorOptions, "model", "method")
    add_options(parser, CalibrationOptions)
    add_options(parser, IndicatorOptions, "bits", "output", "average_bits", "experts")
    how = parser.add_argument_group("running")
    add_options(how, IndicatorOptions, "rounding", "seed", "dtype", "device", "threads")
    return parser


def _run(options: argparse.Namespace) -> int:
    method = _method(options)
    require("torch", "transformers", "safetensors")
    threads = options.threads or os.cpu_count() or 1
    # Before torch is imported, which reads them once.
    os.environ.update(cpu_environment(threads))
    import torch

    from llmpq.indicator import Divergence, sensitivity_table

    torch.set_num_threads(threads)
    subject = _subject(options)
    if options.experts:
        _count_experts(options, subject)
        return 0
    started = time.monotonic()
    indicator = _indicator(method, options)
    with progress_bar(method) as show:
        scores = indicator.score(subject, show)
    head = _head_scores(indicator, subject) if isinstance(indicator, Divergence) else None
    elapsed_s = time.monotonic() - started
    notes = {"command": options.command, "elapsed_s": f"{elapsed_s:.2f}"}
    table = sensitivity_table(subject, method, scores, notes, head=head)
    if options.output is not None:
        write_sensitivity(options.output, table)
    bits = None if options.average_bits is None else _at_average(options, table)
    _report(options, table, elapsed_s, bits)
    return 0


def _count_experts(options: argparse.Namespace, subject: IndicatorInput) -> None:
    """Print how often the text visits each routed expert, and write it to ``--output``."""
    from llmpq.indicator import expert_use

    with progress_bar("experts") as show:
        found = to_json(expert_use(subject, show))
    if options.output is not None:
        write_text(options.output, dump_json(found))
    print_json(found)


def _method(options: argparse.Namespace) -> str:
    """Check what can be checked before torch is imported."""
    if options.experts and options.calibration is None:
        raise SpecError("--experts: expected a text to count on, --calibration FILE")
    method = options.method or ("variance" if options.calibration is None else "divergence")
    if method in NEED_TEXT and options.calibration is None:
        raise SpecError(
            f"--method {method}: expected a text to calibrate on, --calibration FILE; "
            "--method variance can go by the weights alone"
        )
    read_options(IndicatorOptions, options)  # checks the numbers
    if options.output is not None and not Path(options.output).resolve().parent.is_dir():
        raise SpecError(f"--output: {options.output}: no such folder")
    load_model_dir(options.model)
    return str(method)


def _subject(options: argparse.Namespace) -> IndicatorInput:
    import torch

    from llmpq.indicator import IndicatorInput
    from llmpq.models import Checkpoint

    model_dir = Path(options.model)
    is_auto = options.dtype == "auto"
    dtype = Checkpoint(model_dir).dtype if is_auto else getattr(torch, options.dtype)
    return IndicatorInput(
        model_dir=model_dir,
        calibration=calibration_of(options),
        bits=tuple(width for width in options.bits if width != 16),
        dtype=dtype,
        device=options.device,
    )


def _indicator(method: str, options: argparse.Namespace) -> Indicator:
    from llmpq.indicator import INDICATORS, Random, Variance

    if method == "variance":
        return Variance(rounding=options.rounding)
    return Random(seed=options.seed) if method == "random" else INDICATORS[method]


def _head_scores(indicator: Divergence, subject: IndicatorInput) -> Mapping[int, float] | None:
    """Return the scores of the head, ``None`` with a warning for one that cannot be quantized."""
    try:
        with progress_bar("head") as show:
            return indicator.score_head(subject, show)
    except SpecError as error:
        logger.warning("the head is not measured: %s", error)
        return None


def _at_average(options: argparse.Namespace, table: SensitivityTable) -> tuple[int, ...]:
    import numpy as np

    from llmpq.assigner.constraints.fixed_bits import bits_at_average, quantizable_weights

    widths = tuple(sorted({16, *options.bits}, reverse=True))
    omega = np.array(table.normalised(widths))
    weights = quantizable_weights(load_model_dir(options.model))
    return bits_at_average(omega, widths, weights, options.average_bits)


def _report(
    options: argparse.Namespace,
    table: SensitivityTable,
    elapsed_s: float,
    bits: tuple[int, ...] | None,
) -> None:
    provenance = dict(table.provenance)
    columns = dict(table.omega)
    if options.json:
        record: dict[str, Any] = {
            "method": table.method,
            "elapsed_s": elapsed_s,
            "omega": {str(width): list(column) for width, column in columns.items()},
            "head": None if table.head is None else {str(b): loss for b, loss in table.head},
            "calibration": provenance.get("calibration"),
            "output": options.output,
        }
        if bits is not None:
            chosen = table.normalised(bits)
            quality = sum(row[layer] for layer, row in enumerate(chosen))
            record |= {"average_bits": options.average_bits, "bits": bits, "quality": quality}
        print_json(record)
        return
    head = "".join(f"{f'{width} bits':>12}" for width in columns)
    print(f"layer{head}")
    for layer, values in enumerate(zip(*columns.values(), strict=True)):
        print(f"{layer:>5}" + "".join(f"{value:>12.3g}" for value in values))
    if table.head is not None:
        print(" head" + "".join(f"{value:>12.3g}" for _, value in table.head))
    print("unit           the loss of all layers at 4 bits together; 16 bits lose 0")
    print(f"calibration    {provenance.get('calibration', 'none')}")
    print(f"time           {elapsed_s:.1f} s")
    if bits is not None:
        print(f"bits           {' '.join(map(str, bits))}")
    if options.output is not None:
        print(f"written        {options.output}")
