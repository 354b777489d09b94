"""Expert use: how often a text visits each routed expert of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from llmpq.errors import SpecError
from llmpq.indicator.base import IndicatorInput
from llmpq.indicator.divergence import batches_of, positions_of
from llmpq.kernels.base import open_device
from llmpq.models import load_config
from llmpq.models.adapter import accepts
from llmpq.quant.loading.loader import load_stage
from llmpq.quant.loading.master import load_master
from llmpq.spec.precision import ExpertUse

Progress = Callable[[int, int, str], None]
_CHOICES = "top_k_index"
"""Argument of experts with those of each token."""


def expert_use(subject: IndicatorInput, progress: Progress | None = None) -> ExpertUse:
    """Count the tokens of the calibration text that visit each expert, layer by layer.

    Args:
        subject: model, text, number format and device; layers are not quantized.
        progress: called after each layer.

    Raises:
        SpecError: there is no text, or the model has no routed experts.
    """
    if subject.calibration is None:
        raise SpecError("--experts: expected a text to count on, --calibration FILE")
    num_layers = load_config(subject.model_dir).num_hidden_layers
    open_device(torch.device(subject.device))
    place: dict[str, Any] = {"dtype": subject.dtype, "device": subject.device}
    batches = batches_of(subject, subject.calibration.token_ids)
    master = load_master(subject.model_dir, **place)
    states = [master.embed(ids, positions_of(ids)) for ids in batches]
    del master
    found: dict[int, tuple[int, ...]] = {}
    for index in range(num_layers):
        stage = load_stage(subject.model_dir, index, index + 1, [16], **place)
        counters = [_Counter(one) for one in stage.modules() if accepts(one.forward, _CHOICES)]
        states = [stage.run_whole(hidden) for hidden in states]
        if counters:
            found[index] = tuple(counters[0].counts.tolist())
        del stage, counters
        if progress is not None:
            progress(index + 1, num_layers, f"layer {index}")
    if not found:
        raise SpecError(f"{subject.model_dir}: found no routed experts, expected some to count")
    return ExpertUse(tokens=sum(ids.numel() for ids in batches), layers=tuple(found.items()))


class _Counter:
    """Counts the tokens of each expert of a module.

    Args:
        experts: whose calls have the experts of each token.

    Attributes:
        counts: int64 ``[E]``.
    """

    def __init__(self, experts: nn.Module) -> None:
        self._count: int = experts.num_experts  # type: ignore[assignment]
        self.counts = torch.zeros(self._count, dtype=torch.int64)
        experts.register_forward_pre_hook(self._add, with_kwargs=True)

    def _add(self, _: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        index: Tensor = named[_CHOICES] if _CHOICES in named else given[1]
        chosen = index[index < self._count].flatten().cpu()
        self.counts += torch.bincount(chosen, minlength=self._count)
