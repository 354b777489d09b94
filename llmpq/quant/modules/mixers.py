"""Layers of transformers with a recurrent state, compiled between their projections.

The form of a mixer is known by the names of its parts, as the classes of transformers have them,
and is proven once a kind: one that does not compute what transformers' own code does keeps that
code.

Shapes: N tokens of a step, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from llmpq.kernels.cpu.mixers import (
    DeltaInputs,
    GatedDelta,
    Mamba2,
    SelectiveScan,
    ShortConvolution,
)
from llmpq.kernels.cpu.step import StepProgram
from llmpq.kernels.gpu.triton_mixers import TritonConvolution, TritonGatedDelta, TritonMamba2
from llmpq.logging import get_logger
from llmpq.models.attention import PackedBatch
from llmpq.models.states import (
    COMPILED,
    CONVOLUTION,
    RECURRENCE,
    SELECTIVE,
    bound_copies,
    mixer_kind,
    run_alone,
    selected,
    state_shapes,
)

_logger = get_logger(__name__)
_DELTA = ("conv1d", "A_log", "dt_bias", "norm", "out_proj", "num_k_heads")
_APART = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
_TOGETHER = ("in_proj_qkvz", "in_proj_ba", "fix_query_key_value_ordering")
_MAMBA2 = ("conv1d", "A_log", "dt_bias", "D", "norm", "in_proj", "out_proj", "time_step_limit")
_CONVOLUTION = ("conv", "in_proj", "out_proj")
_PROOF_TOKENS = (5, 1)
"""Of the steps of a proof."""
_PROOF_ERROR = 0.05
"""Largest error of a proof over the size of the output: formats of 16 bits round on the way."""
States = dict[str, Tensor]
"""Of all slots, by kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerForm:
    """What a mixer computes between its projections.

    Attributes:
        run: returns what the last projection gets, for the hidden states ``[N, H]``, the rows and
            the states.
        projections: names of the first ones.
        append: appends the same to a step, for buffers of what they make; ``None`` where steps do
            not have it.
    """

    run: Callable[[Tensor, Tensor, States], Tensor]
    projections: tuple[str, ...]
    append: Callable[[StepProgram, Sequence[Tensor], States], Tensor] | None


def compile_mixers_(stage: nn.Module, dtype: torch.dtype) -> None:
    """Give the mixers of a stage that have a known form their compiled one.

    Args:
        stage: loaded, and quantized.
        dtype: of hidden states.
    """
    proven: dict[Hashable, bool] = {}
    for mixer in stage.modules():
        if not hasattr(mixer, COMPILED):
            continue
        if next(mixer.parameters()).device.type == "cpu":
            bound_copies(mixer)
        form = _form_of(mixer, dtype)
        if form is not None:
            found, kind = CompiledMixer(mixer, form), mixer_kind(mixer)
            if kind not in proven:
                proven[kind] = found.is_proven(dtype)
            if proven[kind]:
                setattr(mixer, COMPILED, found)


class CompiledMixer:
    """A layer with a recurrent state that runs in kernels between its projections.

    Attributes:
        form: what it computes between them.

    Args:
        mixer: of transformers, whose projections are called.
        form: likewise.
    """

    def __init__(self, mixer: nn.Module, form: MixerForm) -> None:
        self._mixer: Any = mixer
        self.form = form

    def __call__(
        self, hidden: Tensor, batch: PackedBatch, states: dict[str, Tensor]
    ) -> Tensor | None:
        """Return ``[1, N, H]`` for ``[1, N, H]``, as :data:`llmpq.models.states.CompiledRows`."""
        rows = batch.sequence_rows
        if rows is None:
            return None
        mixed = self.form.run(hidden[0], rows, states)
        out: Tensor = self._mixer.out_proj(mixed[None])
        return out

    @property
    def _device(self) -> torch.device:
        """Where its states are: that of its own tensors, as projections may be of other kinds."""
        part = self._mixer.conv if hasattr(self._mixer, "conv") else self._mixer.conv1d
        found: torch.device = part.weight.device
        return found

    def is_proven(self, dtype: torch.dtype) -> bool:
        """Return whether steps of a few tokens are those of transformers' code; log if not."""
        generator = torch.Generator().manual_seed(0)
        size, device = self._mixer.out_proj.out_features, self._device
        shapes = state_shapes(self._mixer, size, torch.empty(0, dtype=dtype, device=device))
        own, others = (
            {kind: torch.zeros(1, *shape, device=device) for kind, shape in shapes.items()}
            for _ in range(2)
        )
        start, is_proven = 0, True
        for tokens in _PROOF_TOKENS:
            sample = torch.randn((1, tokens, size), generator=generator).to(device, dtype)
            batch = PackedBatch(block_tables=[()], starts=[start], counts=[tokens], slots=[0])
            with torch.inference_mode():
                expected = run_alone(self._mixer, sample, others, is_new=start == 0).float()
                found = self(sample, batch, own)
            assert found is not None
            error = (found.float() - expected).norm()
            is_proven = is_proven and bool(error <= _PROOF_ERROR * expected.norm())
            start += tokens
        if not is_proven:
            _logger.warning(
                "%s: found another function than its parts say: transformers' code runs",
                type(self._mixer).__name__,
            )
        return is_proven


class _Kinds(NamedTuple):
    """The kernels of a kind of device."""

    convolution: type[ShortConvolution]
    delta: type[GatedDelta]
    mamba: type[Mamba2]


def _kinds_for(weight: Tensor) -> _Kinds:
    if weight.device.type == "cpu":
        return _Kinds(ShortConvolution, GatedDelta, Mamba2)
    return _Kinds(TritonConvolution, TritonGatedDelta, TritonMamba2)


def _form_of(mixer: Any, dtype: torch.dtype) -> MixerForm | None:
    if _has(mixer, _DELTA):
        return _gated_delta(mixer, dtype)
    if _has(mixer, _MAMBA2) and not hasattr(mixer, "mup_vector"):  # inputs without factors
        return _mamba2(mixer, dtype)
    if _has(mixer, SELECTIVE):
        return _mamba1(mixer, dtype)
    return _convolution(mixer, dtype) if _has(mixer, _CONVOLUTION) else None


def _has(mixer: Any, names: tuple[str, ...]) -> bool:
    return all(hasattr(mixer, name) for name in names)


def _convolution(mixer: Any, dtype: torch.dtype) -> MixerForm | None:
    """Of LFM2."""
    kinds = _kinds_for(mixer.conv.weight)
    convolution = kinds.convolution(mixer.conv.weight, mixer.conv.bias, is_activated=False)
    if not convolution.fits(dtype):
        return None
    return MixerForm(
        run=lambda hidden, rows, states: convolution(
            mixer.in_proj(hidden), rows, states[CONVOLUTION]
        ),
        projections=("in_proj",),
        append=lambda program, made, states: convolution.append(
            program, made[0], states[CONVOLUTION]
        ),
    )


def _mamba1(mixer: Any, dtype: torch.dtype) -> MixerForm | None:
    """Of Jamba, Mamba and Falcon Mamba; not in steps, as two projections are within."""
    if mixer.activation != "silu":
        return None
    weight, bias = mixer.conv1d.weight, mixer.conv1d.bias
    scan = SelectiveScan(ShortConvolution(weight, bias, is_activated=True), mixer.A_log, mixer.D)
    if not scan.fits(dtype):
        return None

    def run(hidden: Tensor, rows: Tensor, states: States) -> Tensor:
        joined = mixer.in_proj(hidden)
        convolved = scan.convolve(joined, rows, states[CONVOLUTION])
        return scan(joined, convolved, selected(mixer, convolved), rows, states[RECURRENCE])

    return MixerForm(run=run, projections=("in_proj",), append=None)


def _mamba2(mixer: Any, dtype: torch.dtype) -> MixerForm | None:
    """Of Granite 4, Nemotron-H and others."""
    kinds = _kinds_for(mixer.conv1d.weight)
    mamba = kinds.mamba(
        kinds.convolution(mixer.conv1d.weight, mixer.conv1d.bias, is_activated=True),
        mixer.A_log,
        mixer.dt_bias,
        mixer.D,
        mixer.norm.weight,
        mixer.norm.variance_epsilon,
        normed=getattr(mixer.norm, "group_size", len(mixer.norm.weight)),
        groups=mixer.n_groups,
        state_dim=mixer.ssm_state_size,
        limits=tuple(mixer.time_step_limit),
    )
    if not mamba.fits(dtype):
        return None
    return MixerForm(
        run=lambda hidden, rows, states: mamba(
            mixer.in_proj(hidden), rows, states[CONVOLUTION], states[RECURRENCE]
        ),
        projections=("in_proj",),
        append=lambda program, made, states: mamba.append(
            program, made[0], states[CONVOLUTION], states[RECURRENCE]
        ),
    )


def _gated_delta(mixer: Any, dtype: torch.dtype) -> MixerForm | None:
    """Of Qwen3-Next and Qwen3.5."""
    kinds = _kinds_for(mixer.conv1d.weight)
    delta = kinds.delta(
        kinds.convolution(mixer.conv1d.weight, mixer.conv1d.bias, is_activated=True),
        mixer.A_log,
        mixer.dt_bias,
        mixer.norm.weight,
        mixer.norm.variance_epsilon,
        key_heads=mixer.num_k_heads,
        key_dim=mixer.head_k_dim,
    )
    if not delta.fits(dtype):
        return None
    project: Callable[[Tensor], DeltaInputs]
    inputs: Callable[[StepProgram, Sequence[Tensor]], DeltaInputs]
    projections: tuple[str, ...]
    if _has(mixer, _APART):
        projections, project, inputs = _APART, partial(_project_apart, mixer), _inputs_apart
    elif _has(mixer, _TOGETHER):
        projections, project = _TOGETHER[:2], partial(_project_together, mixer)
        inputs = partial(_inputs_together, mixer)
    else:
        return None

    def append(program: StepProgram, made: Sequence[Tensor], states: States) -> Tensor:
        found = inputs(program, made)
        return delta.append(program, found, states[CONVOLUTION], states[RECURRENCE])

    return MixerForm(
        run=lambda hidden, rows, states: delta(
            project(hidden), rows, states[CONVOLUTION], states[RECURRENCE]
        ),
        projections=projections,
        append=append,
    )


def _project_apart(mixer: Any, hidden: Tensor) -> DeltaInputs:
    return DeltaInputs(
        mixed=mixer.in_proj_qkv(hidden),
        gate=mixer.in_proj_z(hidden),
        beta=mixer.in_proj_b(hidden),
        decay=mixer.in_proj_a(hidden),
    )


def _project_together(mixer: Any, hidden: Tensor) -> DeltaInputs:
    """Of Qwen3-Next, whose projections are in the order of the key heads."""
    parts = mixer.fix_query_key_value_ordering(
        mixer.in_proj_qkvz(hidden[None]), mixer.in_proj_ba(hidden[None])
    )
    query, key, value, gate, beta, decay = (part[0].flatten(1) for part in parts)
    mixed = torch.cat([query, key, value], dim=-1)
    return DeltaInputs(mixed=mixed, gate=gate, beta=beta, decay=decay)


def _inputs_apart(_program: StepProgram, made: Sequence[Tensor]) -> DeltaInputs:
    mixed, gate, beta, decay = made
    return DeltaInputs(mixed=mixed, gate=gate, beta=beta, decay=decay)


def _inputs_together(mixer: Any, program: StepProgram, made: Sequence[Tensor]) -> DeltaInputs:
    """Append the copies that undo the order of the key heads."""
    keys, values, heads = mixer.key_dim, mixer.value_dim, mixer.num_k_heads
    sizes = {"mixed": 2 * keys + values, "gate": values, "beta": mixer.num_v_heads}
    sizes["decay"] = sizes["beta"]
    found = {name: program.buffer(f"mixer {name}", size) for name, size in sizes.items()}
    query, key, value = torch.split(found["mixed"], [keys, keys, values], dim=1)
    for joined, targets in (
        (made[0], (query, key, value, found["gate"])),
        (made[1], (found["beta"], found["decay"])),
    ):
        shares = [one.shape[1] // heads for one in targets]
        parts = torch.split(joined.view(len(joined), heads, -1), shares, dim=2)
        for part, target, share in zip(parts, targets, shares, strict=True):
            program.copy(part, target.view(len(target), heads, share))
    return DeltaInputs(**found)
