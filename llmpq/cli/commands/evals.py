"""llmpq-eval: perplexity of a model at fewer bits, and its divergence from the 16-bit model.

Runs one layer after the other in this process, or, with ``--pipeline``, the ranks of a strategy.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmpq.cli.common import (
    make_parser,
    print_json,
    progress_bar,
    require,
    run_command,
)
from llmpq.cli.render import aligned
from llmpq.cli.run_options import run_progress
from llmpq.dist import model_dir_of
from llmpq.dist.launch.process_environment import cpu_environment
from llmpq.errors import SpecError, bad_field
from llmpq.options.declare import add_options, read_options
from llmpq.options.quality import EvalOptions
from llmpq.options.run import RunOptions
from llmpq.spec.fields import read_json
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.huggingface.quantization import find_config
from llmpq.spec.plan import Plan, read_plan
from llmpq.spec.precision import BITS, DTYPE_BYTES
from llmpq.spec.runtime_constants import KV_CODE_BITS
from llmpq.units import GIB

if TYPE_CHECKING:
    from llmpq.evals.evaluate import Compared, ComparedModel


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_command(_parser(), _run, argv)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "llmpq-eval", "Perplexity of a model at fewer bits, and its divergence from 16 bits."
    )
    add_options(parser, EvalOptions, "model", "text")
    what = parser.add_mutually_exclusive_group(required=True)
    add_options(what, EvalOptions, "bits", "strategy", "layer_bits", "quantized", "compare")
    how = parser.add_argument_group("running")
    names = ("pipeline", "dtype", "kv_bits", "window", "rows", "max_tokens", "device", "threads")
    add_options(how, EvalOptions, *names)
    add_options(how, RunOptions, "kernel", "step_timeout_s")
    return parser


def _run(options: argparse.Namespace) -> int:
    variants = None if options.compare is None else _variants(options)
    arguments = _arguments(options)
    require("torch", "transformers")
    threads = options.threads or len(os.sched_getaffinity(0))
    # Before torch is imported, which reads them once.
    os.environ.update(cpu_environment(threads))
    import torch

    from llmpq.evals.evaluate import ComparedModel, EvalTask, compare, evaluate

    torch.set_num_threads(threads)
    task = EvalTask(**arguments)
    if variants is not None:
        asked = [ComparedModel(**fields) for fields in variants]
        rows = _rows(task.model_dir, asked, compare(task, asked, progress_bar))
        print_json({"compared": rows}) if options.json else print(_table(rows))
        return 0
    with run_progress(len(task.bits)) as progress:
        report = evaluate(task, progress_bar, progress)
    _print(report, as_json=options.json)
    return 0


def _variants(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the fields of what to compare, checked before torch is imported."""
    if options.model is None:
        raise SpecError("--model: found none, expected the directory of the weights")
    num_layers = load_model_dir(Path(options.model)).num_layers
    return [_variant(what, num_layers) for what in options.compare]


def _variant(what: str, num_layers: int) -> dict[str, Any]:
    kind, _, path = what.partition(":")
    if what in map(str, BITS):
        return {"name": what, "bits": (int(what),) * num_layers}
    if kind == "gptq" and path:
        if find_config(Path(path)) is None:
            raise SpecError(f"--compare: {path}: found no GPTQ checkpoint")
        return {"name": what, "bits": (16,) * num_layers, "quantized": Path(path)}
    if kind == "layer_bits" and path:
        return {"name": what, "bits": _listed(path, num_layers)}
    if kind == "strategy" and path:
        bits = read_plan(path).whole_bits
        if len(bits) != num_layers:
            raise SpecError(f"--compare: {path}: found {len(bits)} layers, expected {num_layers}")
        return {"name": what, "bits": bits}
    raise SpecError(
        f"--compare: found '{what}', expected one of {', '.join(map(str, BITS))}, gptq:DIR, "
        "layer_bits:FILE.json, strategy:FILE"
    )


def _rows(
    model_dir: Path, variants: Sequence[ComparedModel], compared: Iterable[Compared]
) -> list[dict[str, Any]]:
    """Return bits, size and quality of the model at 16 bits and of every variant."""
    model = load_model_dir(model_dir)
    whole = [(None, (16,) * model.num_layers)]
    rows = []
    for (folder, bits), found in zip(
        [*whole, *((one.quantized, one.bits) for one in variants)], compared, strict=True
    ):
        one = model if folder is None else load_model_dir(folder)
        precisions = one.stored or tuple(one.precision(width) for width in bits)
        bytes_each = DTYPE_BYTES[one.dtype]
        pairs = list(zip(one.layers, precisions, strict=True))
        weights = [sum(op.weight_parameters for op in layer.linears) for layer, _ in pairs]
        total = sum(count * item.bits for count, (_, item) in zip(weights, pairs, strict=True))
        size = one.master_parameters * bytes_each
        size += sum(layer.weight_bytes(item, bytes_each) for layer, item in pairs)
        rows.append(
            {
                "name": found.name,
                "bits": total / sum(weights),
                "weight_bytes": size,
                **found.quality.to_json(),
                "seconds": found.seconds,
            }
        )
    return rows


def _table(rows: Sequence[dict[str, Any]]) -> str:
    first = rows[0]
    lines = [("", "bits", "GiB", "perplexity", "change", "KL, nats", "seconds")]
    lines += [
        (
            row["name"],
            f"{row['bits']:.2f}",
            f"{row['weight_bytes'] / GIB:.3f}",
            f"{row['perplexity']:.4f}",
            f"{row['perplexity'] / first['perplexity'] - 1:+.2%}",
            f"{row['kl_to_16bit']:.6f}",
            f"{row['seconds']:.1f}",
        )
        for row in rows
    ]
    return "\n".join([*aligned(lines, numbers=True), f"\ntokens {first['tokens']}"])


def _arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of the task, checked before torch is imported."""
    plan = None if options.strategy is None else read_plan(options.strategy)
    if options.pipeline and plan is None:
        raise SpecError("--pipeline: found no --strategy, expected one whose ranks to run")
    if plan is None and options.model is None:
        raise SpecError("--model: found none, expected the directory of the weights")
    read_options(EvalOptions, options)  # checks the numbers
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
        "bits": plan.bits if options.pipeline else plan.whole_bits,
        "dtype": plan.dtype if options.dtype == "auto" else options.dtype,
        "kv_bits": options.kv_bits or (plan.kv_bits if plan.kv_bits in KV_CODE_BITS else None),
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
    return _listed(options.layer_bits, num_layers)


def _listed(file: str, num_layers: int) -> tuple[int, ...]:
    """Return the bits of a file that lists them."""
    found = read_json(file)
    is_list = isinstance(found, list) and all(type(width) is int for width in found)
    if not is_list or len(found) != num_layers or not set(found) <= set(BITS):
        raise bad_field(file, "(whole file)", found, f"a list of {num_layers} of {BITS}")
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
