"""Score a model with some of its layers replaced by the same layers at other bits.

The base model's hidden states at every layer boundary are kept, so that only the layers after a
replacement run again; the reference's logits are computed once for all replacements. Memory holds
the layers and the boundaries of one micro-batch.

Shapes: R windows, T tokens of each, H hidden size, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic

import torch
from torch import Tensor

from llmpq.errors import SpecError
from llmpq.evals.evaluate import K, Quality, Tally, add_states
from llmpq.evals.windows import Windows
from llmpq.models import DecoderStage, Master

_BASE = object()

Progress = Callable[[int, int], None]
"""Called with the micro-batches done and their total."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep(Generic[K]):
    """Results of a sweep.

    Attributes:
        base: quality of the base model, with its divergence from the reference.
        changed: quality with each replacement.
    """

    base: Quality
    changed: dict[K, Quality]


def sweep_layers(
    base: DecoderStage,
    replacements: Mapping[K, DecoderStage],
    master: Master,
    windows: Windows,
    *,
    reference: DecoderStage | None = None,
    progress: Progress | None = None,
) -> Sweep[K]:
    """Score the base model, and the base model with each replacement.

    Args:
        base: all layers of the model.
        replacements: layers ``[i, j)`` at other bits, such as ``load_stage(dir, i, i + 1, (4,))``,
            by any key. All of them stay in memory.
        master: the model's embedding, norm and head.
        windows: the text.
        reference: all layers at 16 bits; by default ``base``.
        progress: called after each micro-batch.

    Raises:
        SpecError: ``base`` or ``reference`` is incomplete, or a replacement is outside of it.
    """
    _check(base, replacements, reference)
    own = Tally()
    tallies = {key: Tally() for key in replacements}
    device = _device_of(base)
    parts = _Parts(base)
    for number, batch in enumerate(windows.batches(), start=1):
        hidden = master.embed(batch.inputs.to(device), batch.positions)
        boundaries = parts.boundaries(hidden)
        expected = boundaries[-1]
        if reference is not None:
            expected = reference.run_whole(hidden)
        finals = {key: parts.finish(new, boundaries) for key, new in replacements.items()}
        add_states(
            master,
            batch.targets,
            {**finals, _BASE: boundaries[-1]},
            (master, expected),
            {**tallies, _BASE: own},
        )
        if progress is not None:
            progress(number, windows.num_batches)
    return Sweep(
        base=own.quality(), changed={key: tally.quality() for key, tally in tallies.items()}
    )


class _Parts:
    """Each layer of the base model, and the layers from each to the end; weights are shared."""

    def __init__(self, base: DecoderStage) -> None:
        self._end = base.end_layer
        self._single = [part_of(base, i, i + 1) for i in range(self._end)]
        self._tail = [part_of(base, i, self._end) for i in range(self._end)]

    def boundaries(self, hidden: Tensor) -> list[Tensor]:
        """Return the input of every layer and the output of the last, ``L + 1`` tensors."""
        states = [hidden]
        for layer in self._single:
            states.append(layer.run_whole(states[-1]))
        return states

    def finish(self, new: DecoderStage, boundaries: list[Tensor]) -> Tensor:
        """Run a replacement and the layers after it, ``[R, T, H]``."""
        hidden: Tensor = new.run_whole(boundaries[new.first_layer])
        if new.end_layer < self._end:
            hidden = self._tail[new.end_layer].run_whole(hidden)
        return hidden


def part_of(stage: DecoderStage, first_layer: int, end_layer: int) -> DecoderStage:
    """Return layers ``[first_layer, end_layer)`` of ``stage`` as a stage, sharing their weights."""
    begin, end = first_layer - stage.first_layer, end_layer - stage.first_layer
    return DecoderStage(stage.config, list(stage.layers)[begin:end], first_layer)


def _device_of(base: DecoderStage) -> torch.device:
    return next(base.parameters()).device


def _check(
    base: DecoderStage, replacements: Mapping[K, DecoderStage], reference: DecoderStage | None
) -> None:
    num_layers = base.config.num_hidden_layers
    for name, whole in (("base", base), ("reference", reference)):
        if whole is not None and (whole.first_layer, whole.end_layer) != (0, num_layers):
            raise SpecError(
                f"sweep: found layers [{whole.first_layer}, {whole.end_layer}) as the {name}, "
                f"expected all {num_layers}"
            )
    for key, new in replacements.items():
        if not 0 <= new.first_layer < new.end_layer <= num_layers:
            raise SpecError(
                f"sweep: replacement {key}: found layers [{new.first_layer}, {new.end_layer}), "
                f"expected a part of [0, {num_layers})"
            )
