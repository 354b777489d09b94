"""Evaluate a model at given bits, or several variants, against the model at 16 bits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmpq.dist.metrics.progress import RunProgress, SilentProgress
from llmpq.errors import SpecError
from llmpq.evals.pipeline import pipeline_hidden
from llmpq.evals.score import Quality, perplexity_and_kl
from llmpq.evals.stream import LayerSource, stream_hidden
from llmpq.evals.windows import Windows, read_windows
from llmpq.kernels.base import open_device
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedModel:
    """A model to compare: bits of every layer, or a GPTQ checkpoint instead."""

    name: str
    bits: tuple[int, ...]
    quantized: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Quality of a variant, and the seconds that it took, with loading."""

    name: str
    quality: Quality
    seconds: float


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
    reference = _Reference.of(task, bars)
    found = reference.quality_of(task, progress)
    return {**found.to_json(), "perplexity_16bit": reference.own_quality().perplexity}


def compare(
    task: EvalTask,
    variants: Sequence[ComparedModel],
    bars: Bars,
    now: Callable[[], float] = time.monotonic,
) -> Iterator[Compared]:
    """Evaluate variants of a model on one text; the model at 16 bits is computed once.

    Args:
        task: the arguments; bits and checkpoint are those of each variant.
        variants: in the order of the results.
        bars: progress bars of the passes.
        now: the clock, in seconds.

    Yields:
        The model at 16 bits, then every variant.

    Raises:
        SpecError: the text or a checkpoint does not match the model.
    """
    start_s = now()
    reference = _Reference.of(task, bars)
    own = replace(reference.own_quality(), kl_to_16bit=0.0)
    yield Compared(name="reference", quality=own, seconds=now() - start_s)
    for variant in variants:
        start_s = now()
        one = replace(task, bits=variant.bits, quantized=variant.quantized)
        found = reference.quality_of(one, SilentProgress())
        yield Compared(name=variant.name, quality=found, seconds=now() - start_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reference:
    """The text, and the hidden states of the model at 16 bits."""

    windows: Windows
    dtype: torch.dtype
    device: torch.device
    bars: Bars
    master: Master
    states: list[Tensor]

    @classmethod
    def of(cls, task: EvalTask, bars: Bars) -> _Reference:
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
        bits = (16,) * len(task.bits)
        layers = LayerSource(
            model_dir=task.model_dir, bits=bits, dtype=dtype, device=device, backend=task.kernel
        )
        with bars("16 bit") as show:
            states = stream_hidden(layers, master, windows, progress=show)
        return cls(
            windows=windows, dtype=dtype, device=device, bars=bars, master=master, states=states
        )

    def own_quality(self) -> Quality:
        return perplexity_and_kl(self.master, self.windows, self.states)

    def quality_of(self, task: EvalTask, progress: RunProgress) -> Quality:
        """Return the quality of what a task asks for."""
        if task.quantized is not None:
            return self._of_checkpoint(task, task.quantized)
        if task.plan is not None:
            states = self._pipeline(task, task.plan, progress)
        elif set(task.bits) == {16} and task.kv_bits is None:
            states = self.states
        else:
            states = self._stream(task, task.model_dir, task.bits, self.master)
        bits = 16 if task.plan is None else task.plan.head_width
        head = (
            self.master
            if bits == 16
            else load_master(
                task.model_dir,
                dtype=self.dtype,
                device=self.device,
                head_bits=bits,
                backend=task.kernel,
            )
        )
        return self._scored(head, states)

    def _of_checkpoint(self, task: EvalTask, folder: Path) -> Quality:
        """Score a quantized checkpoint, which has its own embedding and head."""
        num_layers = GptqCheckpoint(folder).config.num_hidden_layers
        if num_layers != len(task.bits):
            raise SpecError(
                f"{folder}: found {num_layers} layers, expected the {len(task.bits)} of "
                f"{task.model_dir}"
            )
        master = load_master(folder, dtype=self.dtype, device=self.device)
        return self._scored(master, self._stream(task, folder, (None,) * num_layers, master))

    def _scored(self, master: Master, states: list[Tensor]) -> Quality:
        return perplexity_and_kl(
            master, self.windows, states, self.states, reference_master=self.master
        )

    def _stream(
        self, task: EvalTask, folder: Path, bits: Sequence[int | None], master: Master
    ) -> list[Tensor]:
        layers = LayerSource(
            model_dir=folder,
            bits=bits,
            dtype=self.dtype,
            device=self.device,
            backend=task.kernel,
        )
        with self.bars("model") as show:
            return stream_hidden(layers, master, self.windows, kv_bits=task.kv_bits, progress=show)

    def _pipeline(self, task: EvalTask, plan: Plan, progress: RunProgress) -> list[Tensor]:
        states = pipeline_hidden(
            plan,
            task.model_dir,
            self.windows,
            step_timeout_s=task.step_timeout_s,
            progress=progress,
            kernel=task.kernel,
        )
        return [state.to(self.device) for state in states]
