"""Gated DeltaNet layers of transformers with a compiled recurrence between their projections.

The form of a mixer is known by the names of its parts, as the classes of Qwen3-Next and Qwen3.5
have them, and is proven once: one that does not compute what transformers' own code does keeps that
code.

Shapes: N tokens of a step, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from llmpq.kernels.cpu.gated_delta import DeltaInputs, DeltaRow, GatedDelta
from llmpq.logging import get_logger
from llmpq.models.attention import PackedBatch
from llmpq.models.states import COMPILED, CONVOLUTION, RECURRENCE, code_of

_logger = get_logger(__name__)
_PARTS = ("conv1d", "A_log", "dt_bias", "norm", "out_proj")
_APART = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
_TOGETHER = ("in_proj_qkvz", "in_proj_ba", "fix_query_key_value_ordering")
_PROOF_TOKENS = 5
_PROOF_ERROR = 0.05
"""Largest error of a proof over the size of the output: formats of 16 bits round on the way."""
Projections = Callable[[Any, Tensor], DeltaInputs]


def compile_deltas_(stage: nn.Module, dtype: torch.dtype) -> None:
    """Give the mixers of a stage that are Gated DeltaNet their compiled form.

    Args:
        stage: loaded, and quantized.
        dtype: of hidden states.
    """
    for mixer in stage.modules():
        project = _projections(mixer)
        if project is None:
            continue
        delta = _delta_of(mixer)
        if delta.fits(dtype):
            found = DeltaMixer(mixer, delta, project)
            if found.is_proven(dtype):
                setattr(mixer, COMPILED, found)


class DeltaMixer:
    """The compiled form of a mixer.

    Args:
        mixer: of transformers, whose projections are called.
        delta: computes the rest.
        project: the projections.
    """

    def __init__(self, mixer: nn.Module, delta: GatedDelta, project: Projections) -> None:
        self._mixer: Any = mixer
        self._delta = delta
        self._project = project

    def __call__(
        self, hidden: Tensor, batch: PackedBatch, states: dict[str, Tensor]
    ) -> Tensor | None:
        """Return ``[1, N, H]`` for ``[1, N, H]``, as :data:`llmpq.models.states.CompiledRows`."""
        rows = delta_rows(batch)
        if rows is None:
            return None
        found = self._project(self._mixer, hidden[0])
        mixed = self._delta(found, rows, states[CONVOLUTION], states[RECURRENCE])
        out: Tensor = self._mixer.out_proj(mixed[None])
        return out

    def is_proven(self, dtype: torch.dtype) -> bool:
        """Return whether a few tokens have the output of transformers' code; log it if not."""
        mixer = self._mixer
        generator = torch.Generator().manual_seed(0)
        size = (1, _PROOF_TOKENS, mixer.hidden_size)
        sample = torch.randn(size, generator=generator).to(dtype)
        states = {
            CONVOLUTION: torch.zeros(1, *mixer.conv1d.weight.shape[::2]),
            RECURRENCE: torch.zeros(1, mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim),
        }
        batch = PackedBatch(block_tables=[()], starts=[0], counts=[_PROOF_TOKENS], slots=[0])
        with torch.inference_mode():
            expected = code_of(mixer)(mixer, sample).float()
            found = self(sample, batch, states)
        assert found is not None
        is_proven = bool((found.float() - expected).norm() <= _PROOF_ERROR * expected.norm())
        if not is_proven:
            _logger.warning(
                "%s: found another recurrence than that of Gated DeltaNet: transformers' code runs",
                type(mixer).__name__,
            )
        return is_proven


def delta_rows(batch: PackedBatch) -> list[DeltaRow] | None:
    """Return the rows of a step, those of one sequence joined; ``None`` where they lie apart."""
    found: list[DeltaRow] = []
    for first, count, start, slot in zip(
        batch.offsets, batch.counts, batch.starts, batch.slots, strict=True
    ):
        last = found[-1] if found else None
        if last is not None and last.slot == slot:
            tokens = last.tokens + count
            found[-1] = DeltaRow(first=last.first, tokens=tokens, slot=slot, is_new=last.is_new)
        else:
            found.append(DeltaRow(first=first, tokens=count, slot=slot, is_new=start == 0))
    is_apart = len({row.slot for row in found}) == len(found)
    return found if is_apart else None


def _delta_of(mixer: Any) -> GatedDelta:
    return GatedDelta(
        mixer.conv1d.weight,
        mixer.A_log,
        mixer.dt_bias,
        mixer.norm.weight,
        mixer.norm.variance_epsilon,
        key_heads=mixer.num_k_heads,
        key_dim=mixer.head_k_dim,
    )


def _projections(mixer: Any) -> Projections | None:
    if not all(hasattr(mixer, name) for name in _PARTS) or mixer.conv1d.bias is not None:
        return None
    if all(hasattr(mixer, name) for name in _APART):
        return _project_apart
    return _project_together if all(hasattr(mixer, name) for name in _TOGETHER) else None


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
