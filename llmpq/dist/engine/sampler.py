"""Sampling the next token: greedy, or from a seeded generator.

The random numbers of a token depend on the seed, the request and the step, not on the other
sequences of its micro-batch; so a run can be resumed, regrouped or repeated.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from llmpq.dist.io.sampling_params import SamplingParams
from llmpq.errors import StageError


class Sampler:
    """Chooses the next token of each row."""

    def __init__(self, sampling: SamplingParams) -> None:
        self._sampling = sampling

    def sample(self, logits: Tensor, keys: Sequence[tuple[str, int]]) -> list[int]:
        """Return the next token of every row.

        Args:
            logits: ``[R, V]`` float32, finite (or minus infinity for a forbidden token).
            keys: for every row, the id of its request and the number of the new token.

        Raises:
            StageError: a score is not a number.
        """
        best = logits.argmax(dim=-1)  # [R]; a NaN, if there is one
        if bool(logits.gather(-1, best[:, None]).isnan().any()):
            raise StageError(
                "the model's scores are not numbers (NaN): found an overflow in the layers, "
                "expected finite values; try --dtype bfloat16 or float32 when planning",
                is_permanent=True,
            )
        if self._sampling.temperature == 0:
            return [int(token) for token in best.tolist()]
        kept = self._truncate(logits.float() / self._sampling.temperature)
        weights = torch.softmax(kept, dim=-1).cpu()  # [R, V]
        return [
            self._draw(row, request, step)
            for row, (request, step) in zip(weights, keys, strict=True)
        ]

    def _truncate(self, scores: Tensor) -> Tensor:
        """Mask what top-k and then top-p leave out; the best token always stays."""
        if 0 < self._sampling.top_k < scores.shape[-1]:
            least = scores.topk(self._sampling.top_k, dim=-1).values[:, -1:]  # [R, 1]
            scores = scores.masked_fill(scores < least, -math.inf)
        if self._sampling.top_p < 1:
            ordered, order = scores.sort(dim=-1, descending=True)  # [R, V]
            shares = torch.softmax(ordered, dim=-1)
            before = shares.cumsum(dim=-1) - shares
            ordered = ordered.masked_fill(before >= self._sampling.top_p, -math.inf)
            scores = torch.empty_like(scores).scatter_(-1, order, ordered)
        return scores

    def _draw(self, weights: Tensor, request: str, step: int) -> int:
        text = f"{self._sampling.seed}/{step}/{request}".encode()
        number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        generator = torch.Generator().manual_seed(number >> 1)
        return int(torch.multinomial(weights, 1, generator=generator).item())
