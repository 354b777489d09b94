"""The variance indicator: the variance that rounding adds to the output of each operator.

LLM-PQ, Theorem 1 and Proposition 2: ``omega = sum_o D_o S_o(b)^2 G(X_o)``. The published code
omits ``D`` and the mean of the input and uses the last batch only; this module uses every factor
and the moments of all calibration tokens, in one pass.

An expert is weighted by the share of tokens that the router sends to it. The paper covers dense
layers only, where that share is 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import Tensor

from llmpq.calibration import Moments
from llmpq.calibration.walk import Progress
from llmpq.indicator.base import IndicatorInput, Scores
from llmpq.indicator.rounding import mean_squared_step
from llmpq.models import Checkpoint
from llmpq.quant.modules.layer import matrices_of

Rounding = Literal["deterministic", "stochastic"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variance:
    """Proposition 2; without calibration tokens ``G(X) = 1``.

    Attributes:
        rounding: ``deterministic`` (to nearest): ``G = Var[X] / 4``; ``stochastic``:
            ``G = (E[X]^2 + Var[X]) / 6``.
    """

    rounding: Rounding = "deterministic"

    def score(self, subject: IndicatorInput, progress: Progress | None = None) -> Scores:
        """Sum over the operators of every layer."""
        if subject.calibration is None:
            rows = list(_by_weights(subject, progress))
        else:
            rows = list(self._by_moments(subject, progress))
        return {width: tuple(row[width] for row in rows) for width in subject.bits}

    def _by_moments(
        self, subject: IndicatorInput, progress: Progress | None
    ) -> Iterator[dict[int, float]]:
        tokens = subject.tokens_for("variance")
        for layer in subject.walk("variance", progress):
            row = dict.fromkeys(subject.bits, 0.0)
            seen = layer.collect(partial(Moments, device=subject.device), advance=True)
            for name, moments in seen.items():
                share = moments.tokens / tokens.tokens
                _add(
                    row, layer.operators[name].weight, share * input_spread(moments, self.rounding)
                )
            del layer  # free it before the next one is loaded
            yield row


def input_spread(moments: Moments, rounding: Rounding) -> float:
    """Return ``G(X)`` over all entries of an operator's inputs (LLM-PQ, Theorem 1)."""
    if rounding == "deterministic":
        return moments.variance / 4
    return moments.second_moment / 6  # E[X]^2 + Var[X]


def _by_weights(subject: IndicatorInput, progress: Progress | None) -> Iterator[dict[int, float]]:
    checkpoint = Checkpoint(subject.model_dir)
    count = checkpoint.config.num_hidden_layers
    for index in range(count):
        row = dict.fromkeys(subject.bits, 0.0)
        state = checkpoint.layer_state_dict(index)
        for matrix in matrices_of(checkpoint.empty_layer(index)):
            weight = state[matrix.key]
            _add(row, weight if matrix.expert is None else weight[matrix.expert], 1.0)
        if progress is not None:
            progress(index + 1, count, f"layer {index}")
        yield row


def _add(row: dict[int, float], weight: Tensor, factor: float) -> None:
    for width in row:
        row[width] += weight.numel() * mean_squared_step(weight, width) * factor
