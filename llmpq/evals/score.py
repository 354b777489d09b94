"""Perplexity of a model, and the divergence of its predictions from those of another.

Input are the hidden states after the last layer. The head is applied to a chunk of tokens at a
time, so that the logits of the whole text are never in memory. Terms are float32, sums float64.

Shapes: R windows, T tokens of each, H hidden size, C tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import repeat
from typing import TypeVar

import torch
from torch import Tensor

from llmpq.errors import LlmpqError, SpecError
from llmpq.evals.windows import Windows
from llmpq.kernels.base import exact_dtype
from llmpq.models import Master

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
