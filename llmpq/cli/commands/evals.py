"""llmpq-eval: perplexity of a model at fewer bits, and its divergence from the 16-bit model.

Runs one layer after the other in this process, or, with ``--pipeline``, the ranks of a strategy.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmpq.cli.common import make_parser, print_json, require, run_command
from llmpq.cli.options import add_kernel_option
from llmpq.dist import model_dir_of
from llmpq.dist.launch.process_environment import cpu_environment
from llmpq.errors import SpecError, bad_field
from llmpq.spec.fields import read_json
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.plan import Plan, read_plan
from llmpq.spec.precision import BITS, DTYPE_BYTES

if TYPE_CHECKING:
    from torch import Tensor

    from llmpq.evals import Layers, Quality, Windows
    from llmpq.models import Master


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
        "--layer_bits", metavar="FILE.json", help="a JSON list of one bitwidth for every layer"
    )
    what.add_argument(
        "--quantized", metavar="DIR", help="a GPTQ checkpoint of the model in --model"
    )
    how = parser.add_argument_group("running")
    how.add_argument(
        "--pipeline", action="store_true", help="run the strategy's ranks, not this process alone"
    )
    how.add_argument("--dtype", default="auto", choices=["auto", *DTYPE_BYTES])
    how.add_argument("--kv_bits", type=int, choices=[8], help="keys and values at 8 bits")
    how.add_argument("--window", type=int, default=512, help="tokens of a window (default 512)")
    how.add_argument("--rows", type=int, default=8, help="windows run together (default 8)")
    how.add_argument("--max_tokens", type=int, help="tokens of the text to use (default all)")
    how.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default cpu)")
    how.add_argument("--threads", type=int, help="CPU threads (default: all cores)")
    add_kernel_option(how)
    how.add_argument(
        "--step_timeout",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="a rank that gives no sign of life for so long has failed (default 10)",
    )
    return parser


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """What is evaluated, as the options and the strategy file say."""

    model_dir: Path
    bits: tuple[int, ...]
    dtype: str
    kv_bits: int | None
    plan: Plan | None = None
    quantized: Path | None = None
    kernel: str | None = None


def _run(options: argparse.Namespace) -> int:
    task = _task(options)
    require("torch", "transformers")
    threads = options.threads or len(os.sched_getaffinity(0))
    # Before torch is imported, which reads them once.
    os.environ.update(cpu_environment(threads))
    import torch

    torch.set_num_threads(threads)
    _print(_evaluate(options, task), as_json=options.json)
    return 0


def _task(options: argparse.Namespace) -> _Task:
    """Check what can be checked before torch is imported."""
    plan = None if options.strategy is None else read_plan(options.strategy)
    if options.pipeline and plan is None:
        raise SpecError("--pipeline: found no --strategy, expected one whose ranks to run")
    if plan is None and options.model is None:
        raise SpecError("--model: found none, expected the directory of the weights")
    for name, least in (("window", 2), ("rows", 1), ("max_tokens", 2), ("threads", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise SpecError(f"--{name}: found {value}, expected at least {least}")
    if plan is None:
        model_dir, kv_bits = Path(options.model), options.kv_bits
        bits = _uniform_or_listed(options, load_model_dir(model_dir).num_layers)
        quantized = None if options.quantized is None else Path(options.quantized)
        return _Task(
            model_dir=model_dir,
            bits=bits,
            dtype=options.dtype,
            kv_bits=kv_bits,
            quantized=quantized,
            kernel=options.kernel,
        )
    _check_against(plan, options)
    bits = plan.bits
    return _Task(
        model_dir=model_dir_of(plan, options.model),
        bits=bits,
        dtype=plan.dtype if options.dtype == "auto" else options.dtype,
        kv_bits=8 if 8 in (plan.kv_bits, options.kv_bits) else None,
        plan=plan,
        kernel=options.kernel,
    )


def _check_against(plan: Plan, options: argparse.Namespace) -> None:
    """What runs in the plan's ranks is the plan's to say."""
    if not options.pipeline:
        return
    if options.dtype not in ("auto", plan.dtype):
        raise SpecError(f"--dtype: found {options.dtype}, the strategy runs in {plan.dtype}")
    if options.kv_bits not in (None, plan.kv_bits):
        raise SpecError(f"--kv_bits: found {options.kv_bits}, the strategy says {plan.kv_bits}")


def _uniform_or_listed(options: argparse.Namespace, num_layers: int) -> tuple[int, ...]:
    if options.layer_bits is None:
        # A checkpoint knows its own bits; the model beside it is the one at 16.
        return (options.bits or 16,) * num_layers
    found = read_json(options.layer_bits)
    is_list = isinstance(found, list) and all(type(width) is int for width in found)
    if not is_list or len(found) != num_layers or not set(found) <= set(BITS):
        raise bad_field(
            options.layer_bits, "(whole file)", found, f"a list of {num_layers} of {BITS}"
        )
    return tuple(found)


def _evaluate(options: argparse.Namespace, task: _Task) -> dict[str, Any]:
    """Run the model and its 16-bit self over the text and compare them."""
    import torch

    from llmpq.evals import perplexity_and_kl, read_windows
    from llmpq.models import Checkpoint
    from llmpq.quant.loading.loader import load_master

    windows = read_windows(
        task.model_dir,
        options.text,
        window=options.window,
        rows=options.rows,
        max_tokens=options.max_tokens,
    )
    checkpoint = Checkpoint(task.model_dir)
    dtype = checkpoint.dtype if task.dtype == "auto" else getattr(torch, task.dtype)
    device = torch.device(options.device)
    master = load_master(task.model_dir, dtype=dtype, device=device)
    runs = _Runs(task=task, master=master, windows=windows, dtype=dtype, device=device)
    reference = runs.stream(runs.layers((16,) * len(task.bits)), None, "16 bit")
    own = perplexity_and_kl(master, windows, reference)
    if task.quantized is not None:
        return _report(_of_checkpoint(runs, task.quantized, reference), own)
    if options.pipeline:
        states = runs.pipeline(options.step_timeout)
    elif set(task.bits) == {16} and task.kv_bits is None:
        states = reference
    else:
        states = runs.stream(runs.layers(task.bits), task.kv_bits, "model")
    return _report(perplexity_and_kl(master, windows, states, reference), own)


def _of_checkpoint(runs: _Runs, folder: Path, reference: list[Tensor]) -> Quality:
    """Score a quantized checkpoint, which has an embedding and a head of its own."""
    from llmpq.evals import perplexity_and_kl
    from llmpq.evals.checkpoint import GptqLayers
    from llmpq.quant.checkpoint.reader import GptqCheckpoint
    from llmpq.quant.loading.loader import load_master

    checkpoint = GptqCheckpoint(folder)
    layers = GptqLayers(
        checkpoint=checkpoint, dtype=runs.dtype, device=runs.device, backend=runs.task.kernel
    )
    if layers.num_layers != len(runs.task.bits):
        raise SpecError(
            f"{folder}: found {layers.num_layers} layers, expected the {len(runs.task.bits)} of "
            f"{runs.task.model_dir}"
        )
    master = load_master(folder, dtype=runs.dtype, device=runs.device)
    own = replace(runs, master=master)
    states = own.stream(layers, runs.task.kv_bits, "model")
    return perplexity_and_kl(master, runs.windows, states, reference, reference_master=runs.master)


def _report(found: Quality, reference: Quality) -> dict[str, Any]:
    return {**found.to_json(), "perplexity_16bit": reference.perplexity}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Runs:
    """Ways to run the text, each with its progress bar."""

    task: _Task
    master: Master
    windows: Windows
    dtype: Any
    device: Any

    def layers(self, bits: tuple[int, ...]) -> Layers:
        """Return the model's layers, quantized while they are loaded."""
        from llmpq.evals import LayerSource

        return LayerSource(
            model_dir=self.task.model_dir,
            bits=bits,
            dtype=self.dtype,
            device=self.device,
            backend=self.task.kernel,
        )

    def stream(self, layers: Layers, kv_bits: int | None, label: str) -> list[Tensor]:
        """Run layer by layer in this process."""
        from tqdm import tqdm

        from llmpq.evals import stream_hidden

        total = layers.num_layers
        with tqdm(total=total, desc=label, unit="layer", file=sys.stderr, disable=None) as bar:

            def progress(done: int, _: int) -> None:
                bar.update(done - bar.n)

            return stream_hidden(
                layers, self.master, self.windows, kv_bits=kv_bits, progress=progress
            )

    def pipeline(self, step_timeout_s: float) -> list[Tensor]:
        """Run the strategy's ranks."""
        from llmpq.dist.metrics.progress import BarProgress, SilentProgress
        from llmpq.evals import pipeline_hidden

        plan = self.task.plan
        assert plan is not None
        bar = BarProgress(sys.stderr, len(self.task.bits)) if sys.stderr.isatty() else None
        progress = bar or SilentProgress()
        try:
            states = pipeline_hidden(
                plan,
                self.task.model_dir,
                self.windows,
                step_timeout_s=step_timeout_s,
                progress=progress,
                kernel=self.task.kernel,
            )
        finally:
            progress.close()
        return [state.to(self.device) for state in states]


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


if __name__ == "__main__":
    sys.exit(main())
