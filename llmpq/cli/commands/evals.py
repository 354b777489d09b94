"""llmpq-eval: perplexity of a model at fewer bits, and its divergence from the 16-bit model.

Runs one layer after the other in this process, or, with ``--pipeline``, the ranks of a strategy.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmpq.cli.common import (
    check_least,
    make_parser,
    print_json,
    progress_bar,
    require,
    run_command,
)
from llmpq.cli.options import add_kernel_option, add_step_timeout_option
from llmpq.cli.run_options import run_progress
from llmpq.dist import model_dir_of
from llmpq.dist.launch.process_environment import cpu_environment
from llmpq.errors import SpecError, bad_field
from llmpq.spec.fields import read_json
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.plan import Plan, read_plan
from llmpq.spec.precision import BITS, DTYPE_BYTES


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_command(_parser(), _run, argv)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "llmpq-eval", "Perplexity of a model at fewer bits, and its divergence from 16 bits."
    )
    parser.add_argument("--model", metavar="DIR", help="weights (default: the strategy's own)")
    parser.add_argument("--text", required=True, metavar="FILE", help="text to predict (UTF-8)")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--bits", type=int, choices=BITS, help="all layers at one bitwidth")
    what.add_argument("--strategy", metavar="FILE", help="layers at the bits of a strategy file")
    what.add_argument(
        "--layer_bits", metavar="FILE.json", help="a JSON list with one bitwidth for every layer"
    )
    what.add_argument(
        "--quantized", metavar="DIR", help="a GPTQ checkpoint of the model in --model"
    )
    how = parser.add_argument_group("running")
    how.add_argument(
        "--pipeline",
        action="store_true",
        help="run the ranks of the strategy instead of one process",
    )
    how.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", *DTYPE_BYTES],
        help="number format (default: that of the weights or the strategy)",
    )
    how.add_argument("--kv_bits", type=int, choices=[8], help="keys and values at 8 bits")
    how.add_argument("--window", type=int, default=512, help="tokens per window (default 512)")
    how.add_argument("--rows", type=int, default=8, help="windows run together (default 8)")
    how.add_argument("--max_tokens", type=int, help="tokens of the text to use (default all)")
    how.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default cpu)")
    how.add_argument("--threads", type=int, help="CPU threads (default: all cores)")
    add_kernel_option(how)
    add_step_timeout_option(how)
    return parser


def _run(options: argparse.Namespace) -> int:
    arguments = _arguments(options)
    require("torch", "transformers")
    threads = options.threads or len(os.sched_getaffinity(0))
    # Before torch is imported, which reads them once.
    os.environ.update(cpu_environment(threads))
    import torch

    from llmpq.evals.evaluate import EvalTask, evaluate

    torch.set_num_threads(threads)
    task = EvalTask(**arguments)
    with run_progress(len(task.bits)) as progress:
        report = evaluate(task, progress_bar, progress)
    _print(report, as_json=options.json)
    return 0


def _arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of the task, checked before torch is imported."""
    plan = None if options.strategy is None else read_plan(options.strategy)
    if options.pipeline and plan is None:
        raise SpecError("--pipeline: found no --strategy, expected one whose ranks to run")
    if plan is None and options.model is None:
        raise SpecError("--model: found none, expected the directory of the weights")
    check_least(options, 2, "window", "max_tokens")
    check_least(options, 1, "rows", "threads")
    common = {
        "text": Path(options.text),
        "kernel": options.kernel,
        "device": options.device,
        "window": options.window,
        "rows": options.rows,
        "max_tokens": options.max_tokens,
        "step_timeout_s": options.step_timeout,
    }
    if plan is None:
        model_dir = Path(options.model)
        return common | {
            "model_dir": model_dir,
            "bits": _uniform_or_listed(options, load_model_dir(model_dir).num_layers),
            "dtype": options.dtype,
            "kv_bits": options.kv_bits,
            "quantized": None if options.quantized is None else Path(options.quantized),
        }
    _check_against(plan, options)
    return common | {
        "model_dir": model_dir_of(plan, options.model),
        "bits": plan.bits,
        "dtype": plan.dtype if options.dtype == "auto" else options.dtype,
        "kv_bits": 8 if 8 in (plan.kv_bits, options.kv_bits) else None,
        "plan": plan if options.pipeline else None,
    }


def _check_against(plan: Plan, options: argparse.Namespace) -> None:
    """Check that the options of a pipeline match its plan."""
    if not options.pipeline:
        return
    if options.dtype not in ("auto", plan.dtype):
        raise SpecError(f"--dtype: found {options.dtype}, the strategy runs in {plan.dtype}")
    if options.kv_bits not in (None, plan.kv_bits):
        raise SpecError(f"--kv_bits: found {options.kv_bits}, the strategy says {plan.kv_bits}")


def _uniform_or_listed(options: argparse.Namespace, num_layers: int) -> tuple[int, ...]:
    if options.layer_bits is None:
        # The bits of --quantized are in its files.
        return (options.bits or 16,) * num_layers
    found = read_json(options.layer_bits)
    is_list = isinstance(found, list) and all(type(width) is int for width in found)
    if not is_list or len(found) != num_layers or not set(found) <= set(BITS):
        raise bad_field(
            options.layer_bits, "(whole file)", found, f"a list of {num_layers} of {BITS}"
        )
    return tuple(found)


def _print(report: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(report)
        return
    loss = report["perplexity"] / report["perplexity_16bit"] - 1
    print(
        f"perplexity   {report['perplexity']:.4f}  (16 bit {report['perplexity_16bit']:.4f}, "
        f"{loss:+.2%})"
    )
    print(f"KL to 16 bit {report['kl_to_16bit']:.6f} nats a token")
    print(f"tokens       {report['tokens']}")
