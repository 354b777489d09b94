"""Evaluate a model at given bits and compare it with the model at 16 bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmpq.dist.metrics.progress import RunProgress
from llmpq.errors import SpecError
from llmpq.evals.pipeline import pipeline_hidden
from llmpq.evals.score import Quality, perplexity_and_kl
from llmpq.evals.stream import LayerSource, stream_hidden
from llmpq.evals.windows import Windows, read_windows
from llmpq.kernels.gpu.device import open_device
from llmpq.models import Checkpoint, Master
from llmpq.quant.checkpoint.reader import GptqCheckpoint
from llmpq.quant.loading.loader import load_master
from llmpq.spec.plan import Plan

Bars = Callable[[str], AbstractContextManager[Callable[..., None]]]
"""Creates the progress bar of one pass over the text, from its label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalTask:
    """Arguments of an evaluation.

    Attributes:
        model_dir: directory of the weights.
        text: file with the text to predict.
        bits: bitwidth of every layer.
        dtype: dtype of the run, or ``auto`` for the dtype of the weights.
        kv_bits: 8 for an 8-bit KV cache.
        plan: plan whose ranks run the model; ``None`` runs it in this process.
        quantized: GPTQ checkpoint to evaluate instead.
        kernel: preferred kernel.
        device: device of this process.
        window: tokens of a window.
        rows: windows of a batch.
        max_tokens: maximum tokens of the text.
        step_timeout_s: seconds without a message after which a rank has failed.
    """

    model_dir: Path
    text: Path
    bits: tuple[int, ...]
    dtype: str = "auto"
    kv_bits: int | None = None
    plan: Plan | None = None
    quantized: Path | None = None
    kernel: str | None = None
    device: str = "cpu"
    window: int = 512
    rows: int = 8
    max_tokens: int | None = None
    step_timeout_s: float = 10.0


def evaluate(task: EvalTask, bars: Bars, progress: RunProgress) -> dict[str, Any]:
    """Return perplexity, divergence from 16 bits, and the perplexity at 16 bits.

    Args:
        task: the arguments.
        bars: progress bars of the passes in this process.
        progress: called with the events of the plan's ranks.

    Raises:
        SpecError: the text or the checkpoint does not match the model.
        StageError: a rank failed.
    """
    windows = read_windows(
        task.model_dir,
        task.text,
        window=task.window,
        rows=task.rows,
        max_tokens=task.max_tokens,
    )
    is_auto = task.dtype == "auto"
    dtype = Checkpoint(task.model_dir).dtype if is_auto else getattr(torch, task.dtype)
    device = open_device(torch.device(task.device))
    master = load_master(task.model_dir, dtype=dtype, device=device)
    run = _Run(task=task, windows=windows, dtype=dtype, device=device, bars=bars)
    reference = run.stream(
        run.layers(task.model_dir, (16,) * len(task.bits)), master, None, "16 bit"
    )
    if task.quantized is not None:
        found = _of_checkpoint(run, task.quantized, master, reference)
    else:
        if task.plan is not None:
            states = run.pipeline(task.plan, progress)
        elif set(task.bits) == {16} and task.kv_bits is None:
            states = reference
        else:
            states = run.stream(
                run.layers(task.model_dir, task.bits), master, task.kv_bits, "model"
            )
        bits = 16 if task.plan is None else task.plan.head_width
        head = (
            master
            if bits == 16
            else load_master(
                task.model_dir, dtype=dtype, device=device, head_bits=bits, backend=task.kernel
            )
        )
        found = perplexity_and_kl(head, windows, states, reference, reference_master=master)
    own = perplexity_and_kl(master, windows, reference)
    return {**found.to_json(), "perplexity_16bit": own.perplexity}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    task: EvalTask
    windows: Windows
    dtype: torch.dtype
    device: torch.device
    bars: Bars

    def layers(self, model_dir: Path, bits: Sequence[int | None]) -> LayerSource:
        return LayerSource(
            model_dir=model_dir,
            bits=bits,
            dtype=self.dtype,
            device=self.device,
            backend=self.task.kernel,
        )

    def stream(
        self, layers: LayerSource, master: Master, kv_bits: int | None, label: str
    ) -> list[Tensor]:
        with self.bars(label) as show:
            return stream_hidden(layers, master, self.windows, kv_bits=kv_bits, progress=show)

    def pipeline(self, plan: Plan, progress: RunProgress) -> list[Tensor]:
        states = pipeline_hidden(
            plan,
            self.task.model_dir,
            self.windows,
            step_timeout_s=self.task.step_timeout_s,
            progress=progress,
            kernel=self.task.kernel,
        )
        return [state.to(self.device) for state in states]


def _of_checkpoint(
    run: _Run, folder: Path, reference_master: Master, reference: list[Tensor]
) -> Quality:
    """Score a quantized checkpoint, which has its own embedding and head."""
    num_layers = GptqCheckpoint(folder).config.num_hidden_layers
    if num_layers != len(run.task.bits):
        raise SpecError(
            f"{folder}: found {num_layers} layers, expected the {len(run.task.bits)} of "
            f"{run.task.model_dir}"
        )
    master = load_master(folder, dtype=run.dtype, device=run.device)
    layers = run.layers(folder, (None,) * num_layers)
    states = run.stream(layers, master, run.task.kv_bits, "model")
    return perplexity_and_kl(
        master, run.windows, states, reference, reference_master=reference_master
    )
