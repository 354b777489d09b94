"""The learned predictor of answer lengths.

It is a linear model of the prompt, fitted by ridge regression. The features of a prompt are its
length, as a half octave and as an eighth, and its tokens and pairs of tokens, hashed into
``TOKEN_FEATURES`` buckets (feature hashing: Weinberger et al., 2009). The target is the
logarithm of the answer's tokens. A linear score draws all predictions to the mean, so that bins of
equal probability would be filled unevenly; predictions are therefore mapped to lengths by their
rank: as many predictions are below a length as answers were (quantile mapping, on scores of prompts
that were held out of the fit). Multi-bin batching's own predictor is BERT with a linear layer
(Appendix C.1).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmpq.errors import SpecError
from llmpq.spec.fields import (
    SCHEMA,
    Fields,
    Rule,
    dump_json,
    from_json,
    read_json,
    to_json,
    write_text,
)

Array = NDArray[np.float64]
Number = Annotated[float, Rule(minimum=-math.inf)]

OCTAVES = 20
"""Lengths of prompts are distinguished up to so many: about a million tokens."""
CLASSES = (2, 8)
"""Classes of an octave: wide ones, for lengths with few prompts, and narrow ones."""
LENGTH_FEATURES = OCTAVES * sum(CLASSES)
TOKEN_FEATURES = 1024
FOLDS = 5
RIDGES = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Strengths of the penalty that are tried, in observations."""
KNOTS = 65
"""Quantiles that map scores to lengths."""
MIN_SAMPLES = 50
MAX_TOKEN_ID = 1 << 32
_TINY = 1e-12
"""Variance of lengths that are equal but for rounding."""
_HASH = 0x9E3779B97F4A7C15
"""Golden ratio times 2^64: multiplicative hashing (Knuth)."""


class Answered(NamedTuple):
    """A prompt and the length of its answer.

    Attributes:
        prompt_tokens: length of the prompt.
        new_tokens: of the answer, at least 1.
        token_ids: the prompt; ``None`` if only its length is known.
    """

    prompt_tokens: int
    new_tokens: int
    token_ids: Sequence[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthModel:
    """Weights of the linear score, and the lengths that scores stand for.

    Attributes:
        vocab_size: tokens of the model whose prompts it was fitted to; ``None`` if only their
            lengths were known.
        intercept: of the score.
        length_weights: by class of the prompt's length, as :func:`length_classes` counts them.
        token_weights: by hashed token; none if only lengths were known.
        mean_token_score: score of the tokens of a mean prompt, where content is unknown.
        scores, lengths: ``KNOTS`` quantiles of either, from the least to the largest; a score
            between two stands for a length between theirs, equal ones for their mean.
        provenance: what it was fitted to.
    """

    SCHEMA: ClassVar[int] = SCHEMA

    vocab_size: Annotated[int | None, Rule(minimum=1)] = None
    intercept: Number
    length_weights: tuple[Number, ...]
    token_weights: tuple[Number, ...] = ()
    mean_token_score: Number = 0.0
    scores: tuple[Number, ...]
    lengths: tuple[Annotated[float, Rule(minimum=1)], ...]
    provenance: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        sizes = len(self.length_weights), len(self.token_weights)
        wanted = LENGTH_FEATURES, 0 if self.vocab_size is None else TOKEN_FEATURES
        if sizes != wanted:
            raise SpecError(
                f"length model: found {sizes[0]} length_weights and {sizes[1]} token_weights, "
                f"expected {wanted[0]} and {wanted[1]}"
            )
        if not 1 <= len(self.scores) == len(self.lengths):
            raise SpecError(
                f"length model: found {len(self.scores)} scores and {len(self.lengths)} lengths, "
                "expected as many of either, at least one"
            )
        for name in ("scores", "lengths"):
            values = getattr(self, name)
            if list(values) != sorted(values):
                raise SpecError(f"length model: field '{name}': expected rising numbers")

    def predict(self, prompt_tokens: int, token_ids: Sequence[int] | None = None) -> float:
        """Return the predicted tokens of an answer, at least 1.

        Args:
            prompt_tokens: length of the prompt.
            token_ids: the prompt; ``None`` if only its length is known.
        """
        score = self.intercept
        score += sum(self.length_weights[one] for one in length_classes(prompt_tokens))
        if self.token_weights:
            if token_ids is None:
                score += self.mean_token_score
            else:
                score += float(token_features(token_ids) @ np.array(self.token_weights))
        low, high = bisect_left(self.scores, score), bisect_right(self.scores, score)
        if low < high:
            return fmean(self.lengths[low:high])
        return float(np.interp(score, self.scores, self.lengths))

    def boundaries(self, bins: int) -> tuple[float, ...]:
        """Return the lengths between bins of equal probability."""
        shares = [number / bins for number in range(1, bins)]
        places = np.linspace(0.0, 1.0, len(self.lengths))
        return tuple(map(float, np.interp(shares, places, self.lengths)))


def read_length_model(path: str | Path) -> LengthModel:
    """Read what :func:`write_length_model` wrote; ``SpecError`` names what is wrong."""
    return from_json(LengthModel, Fields(read_json(path), str(path)))


def write_length_model(path: str | Path, model: LengthModel) -> None:
    """Write a model as JSON."""
    write_text(path, dump_json(to_json(model)))


def length_classes(prompt_tokens: int) -> tuple[int, ...]:
    """Return the classes of a prompt's length, one of each width, below ``LENGTH_FEATURES``."""
    octave = math.log2(max(1, prompt_tokens)) + 1e-9
    first, found = 0, []
    for count in CLASSES:
        found.append(first + min(OCTAVES * count - 1, int(count * octave)))
        first += OCTAVES * count
    return tuple(found)


def token_features(token_ids: Sequence[int]) -> Array:
    """Return the hashed tokens and pairs of tokens of a prompt, ``[TOKEN_FEATURES]``.

    Counts are damped by a square root, and the whole has length 1: prompts of all lengths weigh as
    much.
    """
    ids = np.asarray(token_ids, dtype=np.uint64)
    pairs = ids[:-1] * np.uint64(MAX_TOKEN_ID) + ids[1:] + np.uint64(1)
    with np.errstate(over="ignore"):
        hashed = np.concatenate((ids, pairs * np.uint64(0xD6E8FEB86659FD93))) * np.uint64(_HASH)
    bits = np.uint64(64 - (TOKEN_FEATURES - 1).bit_length())
    counts = np.bincount((hashed >> bits).astype(np.int64), minlength=TOKEN_FEATURES)
    damped: Array = np.sqrt(counts)
    return damped / max(1.0, float(np.linalg.norm(damped)))


@dataclass(frozen=True, slots=True, kw_only=True)
class FitReport:
    """How well lengths of held-out prompts are predicted.

    Attributes:
        samples: prompts with answers.
        ridge: chosen penalty.
        explained: share of the variance of the logarithm of the length that the score explains, at
            most 1; below 0 if the mean predicts better.
        rank_correlation: Spearman's, of predicted and true lengths.
        accuracy: by number of bins of equal probability, the share of prompts whose bin is right
            (multi-bin batching, Table 1).
    """

    samples: int
    ridge: float
    explained: float
    rank_correlation: float
    accuracy: tuple[tuple[str, float], ...]


def fit_length_model(
    answered: Sequence[Answered],
    *,
    vocab_size: int | None = None,
    seed: int = 0,
    provenance: tuple[tuple[str, str], ...] = (),
) -> tuple[LengthModel, FitReport]:
    """Fit a model; the penalty is the best of ``RIDGES`` on held-out fifths.

    Args:
        answered: at least ``MIN_SAMPLES``; all with token ids, or only lengths count.
        vocab_size: tokens of the model; ``None`` for a fit to lengths alone.
        seed: of the division into fifths.
        provenance: written into the model.

    Raises:
        SpecError: there are too few.
    """
    if len(answered) < MIN_SAMPLES:
        raise SpecError(
            f"length model: found {len(answered)} answers, expected at least {MIN_SAMPLES}"
        )
    features = _features(answered, with_tokens=vocab_size is not None)
    target = np.log([max(1, item.new_tokens) for item in answered])
    folds = np.random.default_rng(seed).permutation(len(answered)) % FOLDS
    held = _held_out_scores(features, target, folds)
    errors = [float(np.mean((target - scores) ** 2)) for scores in held]
    best = int(np.argmin(errors))
    ridge, scores = RIDGES[best], held[best]
    weights, intercept = _ridge(features, target, ridge)
    tokens = weights[LENGTH_FEATURES:]
    mean_tokens = features[:, LENGTH_FEATURES:].mean(axis=0) @ tokens
    lengths = np.array([max(1.0, float(item.new_tokens)) for item in answered])
    shares = np.linspace(0.0, 1.0, KNOTS)
    model = LengthModel(
        vocab_size=vocab_size,
        intercept=float(intercept),
        length_weights=tuple(map(float, weights[:LENGTH_FEATURES])),
        token_weights=tuple(map(float, tokens)),
        mean_token_score=float(mean_tokens) if len(tokens) else 0.0,
        scores=tuple(map(float, np.quantile(scores, shares))),
        lengths=tuple(map(float, np.quantile(lengths, shares))),
        provenance=provenance,
    )
    places, truth = _ranks(scores), _ranks(lengths)
    variance = float(np.var(target))
    report = FitReport(
        samples=len(answered),
        ridge=ridge,
        explained=1.0 - errors[best] / variance if variance > _TINY else 0.0,
        rank_correlation=_correlation(places, truth),
        accuracy=tuple((str(bins), _accuracy(places, truth, bins)) for bins in (2, 4, 8)),
    )
    return model, report


def _features(answered: Sequence[Answered], *, with_tokens: bool) -> Array:
    """Return the features of all prompts, ``[prompts, LENGTH_FEATURES (+ TOKEN_FEATURES)]``."""
    width = LENGTH_FEATURES + (TOKEN_FEATURES if with_tokens else 0)
    found = np.zeros((len(answered), width))
    for row, item in zip(found, answered, strict=True):
        row[list(length_classes(item.prompt_tokens))] = 1.0
        if with_tokens:
            row[LENGTH_FEATURES:] = token_features(item.token_ids or ())
    return found


def _ridge(features: Array, target: Array, ridge: float) -> tuple[Array, float]:
    """Return weights and intercept; the intercept is not penalised."""
    centre, mean = features.mean(axis=0), target.mean()
    shifted = features - centre
    (weights,) = _ridge_weights(shifted, target - mean, [ridge])
    return weights, float(mean - centre @ weights)


def _ridge_weights(features: Array, target: Array, ridges: Sequence[float]) -> list[Array]:
    """Return the weights for every penalty; features and target have the mean 0.

    One decomposition serves all penalties: of the smaller of ``X^T X`` and ``X X^T``.
    """
    if len(features) < features.shape[1]:
        values, vectors = np.linalg.eigh(features @ features.T)
        projected, back = vectors.T @ target, features.T @ vectors
    else:
        values, vectors = np.linalg.eigh(features.T @ features)
        projected, back = vectors.T @ (features.T @ target), vectors
    values = np.maximum(values, 0.0)
    return [back @ (projected / (values + ridge)) for ridge in ridges]


def _held_out_scores(features: Array, target: Array, folds: NDArray[np.int64]) -> list[Array]:
    """Return for every penalty the scores of all prompts, each by a fit without its fold.

    The mean is that of all: those of the folds differ by chance, perhaps by more than the scores.
    """
    found = [np.empty(len(target)) for _ in RIDGES]
    for fold in range(FOLDS):
        kept, left = folds != fold, folds == fold
        centre, mean = features[kept].mean(axis=0), target[kept].mean()
        shifted = features[kept] - centre
        others = features[left] - centre
        solutions = _ridge_weights(shifted, target[kept] - mean, RIDGES)
        for scores, weights in zip(found, solutions, strict=True):
            scores[left] = target.mean() + others @ weights
    return found


def _ranks(values: Array) -> Array:
    """Return the rank of each value from 0 on; equal values share their mean rank."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    first = np.cumsum(counts) - counts
    ranks: Array = (first + (counts - 1) / 2)[place]
    return ranks


def _correlation(first: Array, second: Array) -> float:
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return 0.0
    return float(np.corrcoef(first, second)[0, 1])


def _accuracy(places: Array, truth: Array, bins: int) -> float:
    """Return the share of values whose ranks are in the same of ``bins`` equal parts."""
    size = len(places) / bins
    return float(np.mean((places // size).astype(int) == (truth // size).astype(int)))
