"""Evaluate a model at given bits, or several variants, against the model at 16 bits.

A model runs layer by layer in this process, with one layer and the hidden states of all windows in
memory, or on the ranks of a plan. Both return the hidden states after the last layer. The head is
applied to a chunk of tokens at a time, so that the logits of the whole text are never in memory.
Terms are float32, sums float64.

Shapes: R windows, T tokens of each, H hidden size, C tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor

from llmpq.batching.blocks import blocks_of
from llmpq.dist import Job, Prompt, run_job
from llmpq.dist.io.prompts import write_prompts
from llmpq.dist.kv.cache import KVCache
from llmpq.dist.metrics.progress import RunProgress, SilentProgress
from llmpq.errors import LlmpqError, SpecError, StageError
from llmpq.evals.windows import Windows, read_windows
from llmpq.kernels.base import exact_dtype, open_device
from llmpq.models import Checkpoint, DecoderStage, Master, kv_shapes
from llmpq.quant.checkpoint.reader import GptqCheckpoint
from llmpq.quant.loading.loader import load_stage
from llmpq.quant.loading.master import load_master
from llmpq.spec.model_files.config import absolute_model_path
from llmpq.spec.plan import MicroBatching, Plan, write_plan
from llmpq.spec.workload import Workload

Progress = Callable[[int, int], None]
"""Called with the layers done and their total."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSource:
    """The layers of a checkpoint, one at a time; a plain one is quantized while it is loaded.

    Attributes:
        model_dir: directory with ``config.json`` and safetensors weights, plain or GPTQ.
        bits: bitwidth of every layer; 16 is not quantized, ``None`` is as stored.
        dtype: dtype of the run.
        device: device of the run.
        backend: preferred kernel; ``None`` for the default.
    """

    model_dir: Path
    bits: Sequence[int | None]
    dtype: torch.dtype
    device: torch.device
    backend: str | None = None

    def each(self) -> Iterator[DecoderStage]:
        """Load the layers in order; the caller drops each one before it requests the next."""
        for index, width in enumerate(self.bits):
            yield load_stage(
                self.model_dir,
                index,
                index + 1,
                None if width is None else [width],
                dtype=self.dtype,
                device=self.device,
                backend=self.backend,
            )


def stream_hidden(
    source: LayerSource,
    master: Master,
    windows: Windows,
    *,
    kv_bits: int | None = None,
    progress: Progress | None = None,
) -> list[Tensor]:
    """Run all windows through all layers, one layer at a time.

    Args:
        source: the layers.
        master: the model's embedding.
        windows: the text.
        kv_bits: 8 or 4 for a KV cache of so few bits, ``None`` for one in the dtype of the run.
        progress: called after each layer.

    Returns:
        Hidden states after the last layer, ``[R, T, H]`` for each micro-batch of ``windows``.
    """
    states = [
        master.embed(batch.inputs.to(source.device), batch.positions) for batch in windows.batches()
    ]
    for done, layer in enumerate(source.each(), start=1):
        cache = None if kv_bits is None else _cache(layer, windows, states[0], kv_bits)
        for number, hidden in enumerate(states):
            states[number] = layer.run_whole(hidden, cache)
        if progress is not None:
            progress(done, len(source.bits))
    return states


def _cache(layers: DecoderStage, windows: Windows, hidden: Tensor, kv_bits: int) -> KVCache:
    return KVCache(
        kv_shapes(layers.config, layers.first_layer, layers.end_layer),
        layers.first_layer,
        num_blocks=windows.rows * blocks_of(windows.longest),
        dtype=hidden.dtype,
        device=hidden.device,
        kv_bits=kv_bits,
        states=layers.new_states(windows.rows),
    )


def pipeline_hidden(
    plan: Plan,
    model_dir: Path,
    windows: Windows,
    *,
    step_timeout_s: float = 10.0,
    progress: RunProgress | None = None,
    kernel: str | None = None,
) -> list[Tensor]:
    """Run all windows through the ranks of ``plan``.

    Args:
        plan: the plan.
        model_dir: directory with the weights.
        windows: the text.
        step_timeout_s: seconds without a message after which a rank has failed.
        progress: called with the events of the ranks: layers loaded, then tokens done.
        kernel: preferred kernel; ``None`` for the default.

    Returns:
        Hidden states after the last layer, ``[R, T, H]`` for each micro-batch of ``windows``.

    Raises:
        LlmpqError: ``SpecError`` when the plan is for another model, ``CapacityError`` when memory
            is exhausted, ``StageError`` when a rank dies, hangs or fails.
    """
    with tempfile.TemporaryDirectory(prefix="llmpq-eval-") as name:
        folder = Path(name)
        job = Job(
            strategy=folder / "strategy.json",
            model_dir=absolute_model_path(model_dir),
            prompts=folder / "windows.jsonl",
            output=folder / "hidden.safetensors",
            task="hidden",
            step_timeout_s=step_timeout_s,
            kernel=kernel,
        )
        write_plan(job.strategy, evaluation_plan(plan, windows))
        write_prompts(job.prompts, list(_prompts(windows)))
        run_job(job, progress=progress)
        return _read(job.output, windows)


def evaluation_plan(plan: Plan, windows: Windows) -> Plan:
    """Return ``plan`` with the windows as its workload and the same devices, layers and bits."""
    workload = Workload(batch=windows.rows, prompt_tokens=windows.longest, new_tokens=1)
    sizes = MicroBatching(prefill=windows.rows, decode=1)
    return replace(plan, workload=workload, micro_batching=sizes)


def _prompts(windows: Windows) -> Iterator[Prompt]:
    rows = (row for batch in windows.batches() for row in batch.inputs.tolist())
    for number, row in enumerate(rows):
        yield Prompt(id=number, where="windows", token_ids=tuple(row), max_new_tokens=1)


def _read(path: Path, windows: Windows) -> list[Tensor]:
    states = []
    with safe_open(path, framework="pt") as file:
        for number, batch in enumerate(windows.batches()):
            state: Tensor = file.get_tensor(str(number)).clone()  # [R, T, H]
            if state.shape[:2] != batch.inputs.shape:
                raise StageError(
                    f"micro-batch {number}: found states {list(state.shape)} for windows "
                    f"{list(batch.inputs.shape)}"
                )
            states.append(state)
    return states


K = TypeVar("K", bound=Hashable)

CHUNK_VALUES = 1 << 22
"""Logits of a chunk ``C x V``: 16 MiB in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Quality of a model on a text.

    Attributes:
        perplexity: ``exp`` of the mean of ``-ln p(token)``.
        tokens: number of predicted tokens.
        kl_to_16bit: mean over tokens of ``sum p16 ln(p16 / p)`` in nats, ``p16`` the reference's
            distribution; ``None`` without a reference.
    """

    perplexity: float
    tokens: int
    kl_to_16bit: float | None = None

    def to_json(self) -> dict[str, float | int | None]:
        """Return the JSON object."""
        return asdict(self)


@dataclass(slots=True)
class Tally:
    """Sums over the tokens of one model."""

    loss: float = 0.0
    divergence: float | None = None
    tokens: int = 0

    def add(self, scores: Tensor, targets: Tensor, reference: Tensor | None) -> None:
        """Add a chunk of tokens.

        Args:
            scores: log-probabilities ``[C, V]`` float32.
            targets: ``[C]`` int64.
            reference: log-probabilities of the reference ``[C, V]``.
        """
        chosen = scores.gather(1, targets[:, None])
        exact = exact_dtype(scores.device)
        self.loss -= float(chosen.sum(dtype=exact))
        self.tokens += targets.numel()
        if reference is not None:
            ratio = (reference - scores).mul_(reference.exp()).sum(dim=1)  # [C]
            # Rounding can make the divergence of two nearly equal rows negative.
            near = float(ratio.clamp_(min=0).sum(dtype=exact))
            self.divergence = near + (self.divergence or 0.0)

    def quality(self) -> Quality:
        """Return the means.

        Raises:
            LlmpqError: the model's scores are not numbers.
        """
        if math.isnan(self.loss):
            raise LlmpqError(
                "evaluation: found scores that are not numbers (NaN), expected finite ones; an "
                "overflow in the layers, perhaps: try --dtype bfloat16 or float32"
            )
        mean = self.loss / self.tokens
        return Quality(
            # exp overflows above 709.
            perplexity=math.exp(min(mean, 700.0)),
            tokens=self.tokens,
            kl_to_16bit=None if self.divergence is None else self.divergence / self.tokens,
        )


def perplexity_and_kl(
    master: Master,
    windows: Windows,
    states: Iterable[Tensor],
    reference: Iterable[Tensor] | None = None,
    *,
    reference_master: Master | None = None,
) -> Quality:
    """Return the perplexity of a run, and its divergence from a reference if one is given.

    Args:
        master: embedding, final norm and head of the model.
        windows: the text.
        states: hidden states after the last layer, ``[R, T, H]`` for each micro-batch.
        reference: hidden states of the 16-bit model.
        reference_master: master of the 16-bit model; by default ``master``.

    Raises:
        SpecError: the number of states differs from the number of micro-batches.
    """
    tally = Tally()
    others: Iterable[Tensor | None] = repeat(None) if reference is None else reference
    found = 0
    for batch, state, other in zip(windows.batches(), states, others, strict=False):
        expected = None if other is None else (reference_master or master, other)
        add_states(master, batch.targets, {0: state}, expected, {0: tally})
        found += 1
    if found != windows.num_batches:
        raise SpecError(
            f"evaluation: found hidden states of {found} micro-batches, "
            f"expected {windows.num_batches}"
        )
    return tally.quality()


@torch.inference_mode()
def add_states(
    master: Master,
    targets: Tensor,
    states: Mapping[K, Tensor],
    reference: tuple[Master, Tensor] | None,
    tallies: Mapping[K, Tally],
) -> None:
    """Add one micro-batch of several models; the logits of the reference are computed once.

    Args:
        master: master of all models.
        targets: ``[R, T]``.
        states: hidden states of each model, ``[R, T, H]``.
        reference: master and hidden states ``[R, T, H]`` of the 16-bit model.
        tallies: sums of each model.
    """
    wanted = targets.reshape(-1)
    flat = {key: state.flatten(0, 1) for key, state in states.items()}  # [R T, H]
    for chunk in _chunks(wanted.numel(), master.config.get_text_config().vocab_size):
        expected = None
        if reference is not None:
            ends, other = reference
            expected = torch.log_softmax(ends.logits(other.flatten(0, 1)[chunk]), dim=-1)  # [C, V]
        for key, tally in tallies.items():
            scores = torch.log_softmax(master.logits(flat[key][chunk]), dim=-1)
            tally.add(scores, wanted[chunk].to(scores.device), expected)


def _chunks(tokens: int, vocab_size: int) -> Iterator[slice]:
    step = max(1, CHUNK_VALUES // vocab_size)
    return (slice(first, first + step) for first in range(0, tokens, step))


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
        kv_bits: 8 or 4 for a KV cache of so few bits.
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
