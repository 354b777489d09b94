"""CompiledSteps: steps of a stage as calls of compiled code, on CPUs; fused layers on GPUs.

The layers of transformers stay the definition: when a stage is loaded, some layers of every kind
are computed both ways on random numbers, and a stage with a layer that differs runs operator by
operator, with a logged reason. So does a stage whose layers the compiled step does not know. Layers
of one kind run the same code on weights of the same shapes and precisions. How the modules of a
layer are combined is in the record of the family, and the scores of attention are as transformers
asks for them. Prompts run in parts of ``STEP_ROWS`` tokens, each through all layers.

On a GPU the same trial decides which layers are replaced by a ``FusedLayer``; others of the stage
keep transformers' code.

Shapes: N tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import NoneType
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from llmpq.dist.engine.cuda_graphs import graphs_of
from llmpq.dist.kv.cache import KVCache
from llmpq.kernels.cpu.native import has_steps, instruction_set
from llmpq.kernels.cpu.paged_attention import PagedTokens
from llmpq.kernels.cpu.step import StepProgram, StepScores, UnsupportedStepError
from llmpq.logging import get_logger
from llmpq.models import DecoderStage, PackedBatch, kv_shapes
from llmpq.models.attention import Attention, LayerAttention, ScoreOptions
from llmpq.models.stage import LayerWeights
from llmpq.models.states import COMPILED
from llmpq.quant.modules.experts import HostExperts
from llmpq.quant.modules.fused_layer import FusedLayer
from llmpq.quant.modules.layer import QuantExperts
from llmpq.quant.modules.step_compiler import (
    LayerParts,
    LayerStep,
    RotaryRows,
    append_layer,
    parts_of,
    stored_positions,
)
from llmpq.spec.families import LayerForm, family_of
from llmpq.spec.precision import Precision

logger = get_logger(__name__)

LIMITS = {torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 0.0025}
"""Largest difference of what a layer adds to its input, relative to it (norms)."""
_FEWEST_BIASED = 1024
_FAR = 1 << 20
"""A position at which layers that scale by positions show it."""
_PLAIN = (bool, int, float, str, torch.dtype, Precision, NoneType)
"""Types of attributes that are compared by value."""
_NUMBERS = ("layer_idx", "_layer", COMPILED)
"""Attributes with the number of a layer, and with what its weights were compiled to."""
_TRIED_SIZE = 0.05
"""Size of the random input: that of embeddings, so that rounding hides no part of a layer."""
_TRIED_CONTEXT = (17, 3)
"""Tokens before the compared one in each row: in its first block, and in another."""
_TRIED_DRAFTS = 6
"""More tokens of the first row where layers have experts: a row may have none that are compared."""

LayerChoice = tuple[LayerForm, StepScores]
"""How the modules of a layer are combined, and the scores of its attention."""


class StepRunner(Protocol):
    """Runs the layers of a stage, steps in a faster way where possible."""

    @property
    def takes_prompts(self) -> bool:
        """Whether prompts of any length run in that way."""
        ...

    def forward(self, hidden: Tensor, batch: PackedBatch) -> Tensor:
        """Run the layers over one step, as ``DecoderStage.forward`` does with the cache."""
        ...


def step_runner_of(layers: DecoderStage, cache: KVCache) -> StepRunner | None:
    """Return decode graphs or compiled steps; ``None`` where neither is possible.

    Decode graphs have yet to be captured (``DecodeGraphs.capture``).

    Args:
        layers: of the stage; on a GPU, those that have a fused form are replaced by it.
        cache: of their keys and values.
    """
    if cache.device.type != "cpu":
        fuse_layers(layers, cache)
        reason = _not_captured(layers, cache)
        if reason is None:
            return graphs_of(layers, cache)
        logger.info("steps run operator by operator: %s", reason)
        return None
    try:
        is_compiled = cache.attends and has_steps(instruction_set())
        if not (is_compiled and layers.attends_to_cache and layers.layout is None):
            raise UnsupportedStepError("its attention has no compiled kernel here")
        trial = _Trial(layers, cache)
        return CompiledSteps(layers, cache, trial.choices(), trial.longest)
    except UnsupportedStepError as error:
        logger.info("steps run operator by operator: %s", error)
        return None


def fuse_layers(layers: DecoderStage, cache: KVCache) -> None:
    """Replace the layers of a stage on a GPU that have a fused form (``FusedLayer``).

    Some layers of every kind are computed both ways on random numbers first. What is not known, or
    differs, keeps the code of transformers, with a logged reason.

    Args:
        layers: of the stage.
        cache: of their keys and values.
    """
    reason = _not_fused(layers, cache)
    if reason is None:
        try:
            trial = _Trial(layers, cache)
        except UnsupportedStepError as error:
            reason = str(error)
        else:
            for kind in _kinds(layers):
                _fuse_kind(trial, layers, cache, kind)
            return
    logger.info("layers are not fused: %s", reason)


def _fuse_kind(trial: _Trial, layers: DecoderStage, cache: KVCache, kind: Sequence[int]) -> None:
    """Replace layers of one kind, one after the other: the weights are never there twice."""
    form, checked = _form_of(layers, kind[0]), _checked(kind)
    scores: StepScores | None = None
    first = layers.first_layer
    for index in [*checked, *(index for index in kind if index not in checked)]:
        try:
            fused, scores = trial.fused(index, form, scores, is_checked=index in checked)
        except UnsupportedStepError as error:
            logger.info("layer %d and those like it are not fused: %s", first + index, error)
            return
        # Triton and the libraries fail in ways that cannot be listed; transformers' code runs.
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            logger.warning("layer %d and those like it are not fused: %s", first + index, text)
            return
        fused.heads = cache.heads_of(first + index)
        layers.layers[index] = fused
        if cache.device.type == "cuda":
            torch.cuda.empty_cache()  # what was joined has other sizes than what is freed


def _not_fused(layers: DecoderStage, cache: KVCache) -> str | None:
    """Return why no layer of a stage is fused."""
    if not cache.attends_rows or not layers.attends_to_cache or layers.layout is not None:
        return "no kernel attends to their blocks in place"
    if layers.streamed is not None:
        return "weights are read from disk"
    return None if cache.states is None else "layers have a recurrent state"


def _not_captured(layers: DecoderStage, cache: KVCache) -> str | None:
    """Return why the decode steps of a stage on an accelerator are not captured."""
    if cache.states is not None:
        return "layers have a recurrent state"
    if any(isinstance(part, HostExperts) for part in layers.modules()):
        return "experts are in the host's memory"
    return None


class CompiledSteps:
    """The layers of a stage, compiled.

    Args:
        layers: of the stage.
        cache: of their keys and values.
        choices: of the layers that are run, by their index in the stage, in order.
        longest: tokens of the longest sequence of a compiled step; ``None`` for any.

    Attributes:
        takes_prompts: whether prompts of any length are compiled.

    Raises:
        UnsupportedStepError: a layer has no compiled step.
    """

    def __init__(
        self,
        layers: DecoderStage,
        cache: KVCache,
        choices: Mapping[int, LayerChoice],
        longest: int | None = None,
    ) -> None:
        self._layers = layers
        self._cache = cache
        self._longest = longest
        self._program = StepProgram(cache.dtype)
        self._hidden = self._program.buffer("hidden", layers.config.hidden_size)
        is_short = any(form.rotation == "short" for form, _ in choices.values())
        self._rotary = RotaryRows(layers, self._program, self._hidden, is_short=is_short)
        self._biased_tokens = 0
        ends = [0]
        for index, choice in choices.items():
            self._append(index, choice)
            ends.append(len(self._program))
        self._runs_of_layers = _runs_of_layers(list(choices), ends, layers.streamed)
        self.takes_prompts = self._program.few_rows is None

    def forward(self, hidden: Tensor, batch: PackedBatch) -> Tensor:
        """Run the layers over one step; see :class:`StepRunner`."""
        if not self._runs(hidden, batch):
            output: Tensor = self._layers(hidden, batch, self._cache)
            return output
        self._cache.check(batch)
        return self.run(hidden, batch)

    @torch.inference_mode()
    def run(self, hidden: Tensor, batch: PackedBatch) -> Tensor:
        """Run compiled steps on ``[1, N, H]``; return the same shape."""
        if self._layers.has_alibi and batch.longest > self._biased_tokens:
            self._biased_tokens = max(_FEWEST_BIASED, 2 * batch.longest)
            self._program.set_bias(self._layers.score_bias(self._biased_tokens, self._hidden).bias)
        tokens = PagedTokens(batch.block_tables, batch.starts, batch.counts, batch.window_tables)
        sequences = None if self._cache.states is None else batch.sequence_rows
        output = torch.empty_like(hidden)
        streamed = self._layers.streamed
        for index, operators in self._runs_of_layers:
            if streamed is not None and index is not None:
                streamed.acquire(index)
            for first in range(0, len(tokens), self._program.most_rows):
                end = min(first + self._program.most_rows, len(tokens))
                self._hidden[: end - first] = hidden[0, first:end]
                self._rotary.fill(batch.positions[0, first:end], batch.longest)
                part = None if sequences is None else _part_of(sequences, first, end)
                self._program.run(tokens.part(first, end), part, operators)
                output[0, first:end] = self._hidden[: end - first]
            if streamed is not None and index is not None:
                streamed.release(index)
            hidden = output
        return output

    def margins(self, rows: int) -> Tensor:
        """Return how clearly experts were chosen for ``rows`` tokens of the last run, ``[N]``.

        The least of all layers, in standard deviations of a router's scores.
        """
        found = [margins(rows) for margins in self._program.margins]
        return torch.stack([torch.full((rows,), torch.inf), *found]).amin(0)

    def _runs(self, hidden: Tensor, batch: PackedBatch) -> bool:
        """Whether the tokens are not too many, and not too far."""
        few_rows = self._program.few_rows
        if few_rows is not None and hidden.shape[1] > few_rows:
            return False
        if self._longest is not None and batch.longest > self._longest:
            return False
        if self._cache.states is not None and batch.sequence_rows is None:
            return False
        return self._rotary.is_alone(batch) and hidden.dtype == self._cache.dtype

    def _append(self, index: int, choice: LayerChoice) -> None:
        number, (form, scores) = self._layers.first_layer + index, choice
        if form.rotation is not None and not self._rotary.buffers:
            raise UnsupportedStepError("no rotary embedding")
        parts, states = _parts_of(self._layers, index, form), self._cache.states
        step = LayerStep(
            hidden=self._hidden,
            rotary=None if form.rotation is None else self._rotary.buffers[number],
            heads=None if parts.mixer is not None else self._cache.heads_of(number),
            scores=scores,
            parts=parts,
            states={} if states is None else states.of_layer(number),
        )
        append_layer(self._program, self._layers.layers[index], step)


def _runs_of_layers(
    layers: Sequence[int], ends: Sequence[int], streamed: LayerWeights | None
) -> list[tuple[int | None, range]]:
    """Return the operators that run together: of a layer with weights on disk, of other layers.

    All parts of a prompt run through the first before the second, so that weights are read once.

    Args:
        layers: by their index in the stage, in order.
        ends: first operator of each, and the one after the last.
        streamed: weights that rest on disk.

    Returns:
        The index of a layer with weights on disk, or ``None``, and the operators.
    """
    on_disk = () if streamed is None else streamed.layers
    found: list[tuple[int | None, range]] = []
    for place, index in enumerate(layers):
        own = index if index in on_disk else None
        first, end = ends[place : place + 2]
        if own is None and found and found[-1][0] is None:
            first = found.pop()[1].start
        found.append((own, range(first, end)))
    return found


def _part_of(sequences: Tensor, first: int, end: int) -> Tensor:
    """Return the rows of sequences (``PackedBatch.sequence_rows``) among tokens of a step."""
    begin, count, slots, is_new, kept, draft_slots = sequences.unbind(1)
    start, last, drafts = begin.clamp(min=first), (begin + count).clamp(max=end), begin + kept
    # What follows draft tokens goes on from their state.
    is_draft = start > drafts
    slots = torch.where(is_draft, draft_slots, slots)
    kept = torch.where(is_draft, last, drafts.clamp(start, last)) - start
    draft_slots = torch.where(kept == last - start, slots, draft_slots)
    is_new = is_new * (begin >= first)
    part = torch.stack((start - first, last - start, slots, is_new, kept, draft_slots), dim=1)
    return part[last > start].contiguous()


def checked_layers(layers: DecoderStage) -> list[int]:
    """Return the first two layers and the last one of every kind, by their index in the stage."""
    return sorted({index for kind in _kinds(layers) for index in _checked(kind)})


def _checked(kind: Sequence[int]) -> list[int]:
    return sorted({*kind[:2], kind[-1]})


def _kinds(layers: DecoderStage) -> list[list[int]]:
    kinds: dict[Hashable, list[int]] = {}
    for index, layer in enumerate(layers.layers):
        kind = layers.span_of(index), _form_of(layers, index), _kind_of(layer)
        kinds.setdefault(kind, []).append(index)
    return list(kinds.values())


def _form_of(layers: DecoderStage, index: int) -> LayerForm:
    """Return how the modules of a layer are combined, as the record of the family says."""
    family = family_of(layers.config.model_type)
    return family.form_of(layers.config, layers.first_layer + index)


def _parts_of(layers: DecoderStage, index: int, form: LayerForm) -> LayerParts:
    """Return the modules of a layer, which the record of the family names."""
    family = family_of(layers.config.model_type)
    return parts_of(layers.layers[index], family, form, layers.config)


def _kind_of(layer: nn.Module) -> Hashable:
    """Return all that decides what a layer computes, but the values of its weights.

    A function that one object has in place of its class's is a form of its own.
    """
    found: list[Hashable] = []
    for name, part in layer.named_modules():
        own = (
            (key, _mark(value))
            for key, value in vars(part).items()
            if key not in _NUMBERS and (isinstance(value, _PLAIN) or callable(value))
        )
        tensors = (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
        shapes = ((key, value.shape, value.dtype) for key, value in tensors)
        found.append((name, type(part), *own, *shapes))
    return tuple(found)


def _mark(value: object) -> Hashable:
    if isinstance(value, partial):
        return (id(value.func), *map(_mark, value.args))
    return value if isinstance(value, _PLAIN) else id(value)


class _Trial:
    """A step on random numbers, in which layers are computed both ways.

    Args:
        layers: of the stage.
        cache: whose formats the keys and values of the trial have.

    Attributes:
        longest: tokens of the longest sequence for which choices hold; ``None`` for any.

    Raises:
        UnsupportedStepError: no step computes in the format of the stage.
    """

    def __init__(self, layers: DecoderStage, cache: KVCache) -> None:
        if cache.dtype not in LIMITS:
            raise UnsupportedStepError(f"numbers of {cache.dtype}")
        self.longest: int | None = None
        config, generator = layers.config, torch.Generator().manual_seed(0)

        def random_rows(tokens: int) -> Tensor:
            rows = torch.randn(1, tokens, config.hidden_size, generator=generator)
            return (_TRIED_SIZE * rows).to(cache.device, cache.dtype)

        has_experts = any(isinstance(part, QuantExperts) for part in layers.modules())
        drafts = _TRIED_DRAFTS if has_experts else 1
        contexts: tuple[int, ...] = _TRIED_CONTEXT
        if cache.states is not None:  # no row follows another of its sequence
            drafts, contexts = 0, contexts + _TRIED_CONTEXT[1:] * (drafts - 1)
        tables, next_block = [], 0
        for context in contexts:
            blocks = (context + drafts) // cache.block_size + 1
            tables.append(range(next_block, next_block + blocks))
            next_block += blocks
        self._layers = layers
        self._has_positions = stored_positions(layers) is not None
        self._cache = KVCache(
            kv_shapes(config, layers.first_layer, layers.end_layer),
            layers.first_layer,
            num_blocks=next_block,
            dtype=cache.dtype,
            block_size=cache.block_size,
            device=cache.device,
            kv_bits=cache.kv_bits,
            states=layers.new_states(len(contexts)),
        )
        starts: Sequence[int] = [0] * len(tables)
        slots = range(len(contexts))
        layers(
            random_rows(sum(contexts)),
            PackedBatch(block_tables=tables, starts=starts, counts=contexts, slots=slots),
            self._cache,
            checked_layers(layers),
        )
        # The last rows are the next tokens of the first sequence, as where drafts are verified.
        first = contexts[0]
        tables = [*tables, *[tables[0]] * drafts]
        starts = [*contexts, *range(first + 1, first + 1 + drafts)]
        counts = [1] * len(tables)
        self._batch = PackedBatch(
            block_tables=tables, starts=starts, counts=counts, slots=[*slots, *[0] * drafts]
        )
        self._hidden = random_rows(self._batch.rows)
        self._arguments = layers.step_arguments(self._hidden, self._batch, self._cache)

    def choices(self) -> dict[int, LayerChoice]:
        """Return the choice of every layer, by its index in the stage.

        Raises:
            UnsupportedStepError: a layer has no compiled step, or one of :func:`checked_layers`
                differs from its definition by more than rounding.
        """
        found: dict[int, LayerChoice] = {}
        for kind in _kinds(self._layers):
            form = _form_of(self._layers, kind[0])
            scores: StepScores | None = None
            for index in _checked(kind):
                try:
                    scores = self._check(index, form)
                except UnsupportedStepError as error:
                    number = self._layers.first_layer + index
                    raise UnsupportedStepError(f"layer {number}: {error}") from None
            assert scores is not None
            found |= dict.fromkeys(kind, (form, scores))
        return {index: found[index] for index in sorted(found)}

    @torch.inference_mode()
    def _check(self, index: int, form: LayerForm) -> StepScores:
        """Return the scores with which the compiled step computes what a layer does.

        Args:
            index: of the layer in the stage.
            form: of the layer.

        Raises:
            UnsupportedStepError: the layer has no compiled step, or computes something else.
        """
        parts = _parts_of(self._layers, index, form)
        steps: CompiledSteps
        if parts.mixer is None:
            expected, scores = self._expected(index, parts)
            steps = CompiledSteps(self._layers, self._cache, {index: (form, scores)})
            found = steps.run(self._hidden, self._batch)
        else:
            scores = StepScores(scaling=1.0)
            steps = CompiledSteps(self._layers, self._cache, {index: (form, scores)})
            expected, found = self._both_mixed(index, steps)
        # Where two experts are as good but for rounding, the layer may choose another one.
        is_clear = ~(steps.margins(self._batch.rows) < LIMITS[self._cache.dtype])
        if not is_clear.any():
            raise UnsupportedStepError("experts that are equally good")
        difference = self._difference(found, expected, is_clear)
        if not difference <= LIMITS[self._cache.dtype]:
            raise UnsupportedStepError(
                f"computes something else (relative difference {difference:.2g})"
            )
        return scores

    @torch.inference_mode()
    def fused(
        self, index: int, form: LayerForm, scores: StepScores | None, *, is_checked: bool
    ) -> tuple[FusedLayer, StepScores]:
        """Return the fused form of a layer on the blocks of the trial, and its scores.

        Args:
            index: of the layer in the stage.
            form: of the layer.
            scores: of layers of its kind; ``None`` for the first of them.
            is_checked: whether it is compared with the layer.

        Raises:
            UnsupportedStepError: there is none, or it computes something else.
        """
        number = self._layers.first_layer + index
        parts, expected = _parts_of(self._layers, index, form), None
        if is_checked or scores is None:
            expected, scores = self._expected(index, parts)
            if scores.has_bias or self.longest is not None:
                raise UnsupportedStepError("scores or positions of their own")
        options = ScoreOptions(
            scaling=scores.scaling,
            window=scores.window,
            softcap=scores.softcap,
            sinks=parts.sinks if scores.has_sinks else None,
        )
        heads, dtype = self._cache.heads_of(number), self._cache.dtype
        layer = self._layers.layers[index]
        fused = FusedLayer(layer, parts, options, heads, layer_idx=number, dtype=dtype)
        self._check_fused(fused, index, expected)
        try:
            fused.join()
        except torch.OutOfMemoryError as error:
            logger.info("products of layer %d stay apart: %s", number, error)
        self._check_fused(fused, index, expected)
        return fused, scores

    def _check_fused(self, fused: FusedLayer, index: int, expected: Tensor | None) -> None:
        """Raise an error if a fused layer computes something else than is expected, if that is."""
        if expected is None:
            return
        difference = self._difference(fused(self._hidden, **self._arguments[index]), expected)
        if not difference <= LIMITS[self._cache.dtype]:
            raise UnsupportedStepError(
                f"computes something else (relative difference {difference:.2g})"
            )

    def _both_mixed(self, index: int, steps: CompiledSteps) -> tuple[Tensor, Tensor]:
        """Return what a layer with a state computes, and what steps do, from the same state.

        Raises:
            UnsupportedStepError: their states differ after it.
        """
        assert self._cache.states is not None
        states = self._cache.states.of_layer(self._layers.first_layer + index)
        before = {kind: state.clone() for kind, state in states.items()}
        expected = self._layers.run_layer(index, self._hidden, self._arguments[index])
        after = {kind: state.clone() for kind, state in states.items()}
        for kind, state in before.items():
            states[kind].copy_(state)
        found = steps.run(self._hidden, self._batch)
        for kind, state in after.items():
            added = (state - before[kind]).norm()
            if not (states[kind] - state).norm() <= LIMITS[self._cache.dtype] * added:
                raise UnsupportedStepError(f"another state ({kind})")
        return expected, found

    def _expected(self, index: int, parts: LayerParts) -> tuple[Tensor, StepScores]:
        """Return what a layer computes, and the scores of its attention."""
        attention = self._layers.layers[index].get_submodule(parts.attention)
        arguments = self._arguments[index]
        mask = cast("LayerAttention", arguments["attention_mask"])
        recorder = _Recorder(mask.step)
        recorded = arguments | {"attention_mask": replace(mask, step=recorder)}
        expected = self._layers.run_layer(index, self._hidden, recorded)
        options = recorder.options
        assert options is not None, "every layer attends"
        if options.chunk is not None:
            raise UnsupportedStepError("attention in chunks")
        if not self._has_positions:
            self._check_positions(index, expected)
        scaling = options.scaling
        if scaling == 1:  # OPT multiplies the queries instead
            scaling = float(getattr(attention, "scaling", scaling))
        scores = StepScores(
            scaling=scaling,
            window=options.window,
            softcap=options.softcap,
            has_bias=options.alibi is not None,
            has_sinks=options.sinks is not None,
        )
        return expected, scores

    def _check_positions(self, index: int, expected: Tensor) -> None:
        """Bound the positions of a layer that scales by them beyond a length (Ministral 3)."""
        if self._is_at(index, _FAR, expected):
            return
        parameters = getattr(self._layers.config, "rope_parameters", None) or {}
        longest = parameters.get("original_max_position_embeddings")
        last = self._batch.longest
        if not isinstance(longest, int) or not self._is_at(index, longest - last, expected):
            raise UnsupportedStepError("positions that do more than rotate")
        self.longest = longest

    def _is_at(self, index: int, shift: int, expected: Tensor) -> bool:
        """Whether a layer computes the same at later positions, rotated as before."""
        arguments = self._arguments[index]
        positions = cast("Tensor", arguments["position_ids"]) + shift
        found = self._layers.run_layer(index, self._hidden, arguments | {"position_ids": positions})
        return self._difference(found, expected) <= LIMITS[self._cache.dtype]

    def _difference(self, found: Tensor, expected: Tensor, compared: Tensor | None = None) -> float:
        """Return the relative difference of rows, all but for a mask ``[R]``."""
        rows = slice(None) if compared is None else compared
        added = (expected - self._hidden)[:, rows].float().norm()
        return float((found - expected)[:, rows].float().norm() / added)


class _Recorder:
    """Attention that keeps how the scores of a layer become weights.

    Args:
        step: computes it.

    Attributes:
        options: of the last call.
    """

    def __init__(self, step: Attention) -> None:
        self._step = step
        self.options: ScoreOptions | None = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: ScoreOptions) -> Tensor:
        """Return ``[1, N, H, d]``; see ``Attention``."""
        self.options = options
        return self._step.attend(query, key, value, options)
