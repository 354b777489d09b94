"""Predictors of answer lengths, for policies that group requests by length.

A predictor is a callable from a waiting request to a number of tokens. Random numbers are seeded by
the number of the request, so that repeated predictions are equal.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from llmpq.batching.policy_scheduler import WaitingRequest
from llmpq.errors import LlmpqError, SpecError

LengthPredictor = Callable[[WaitingRequest], float]
"""Returns the predicted tokens of an answer, at least 0."""

PredictorName = Literal["oracle", "noisy", "regression", "empirical"]
PREDICTOR_NAMES: tuple[str, ...] = get_args(PredictorName)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Settings of a length predictor.

    Attributes:
        predictor: name of the predictor.
        error: standard deviation of the logarithm for ``noisy``.
        seed: random seed.
    """

    predictor: PredictorName = "oracle"
    error: float = 0.3
    seed: int = 0

    def __post_init__(self) -> None:
        if self.predictor not in PREDICTOR_NAMES:
            raise SpecError(
                f"prediction: field 'predictor': found '{self.predictor}', "
                f"expected one of {', '.join(PREDICTOR_NAMES)}"
            )
        if not 0 <= self.error < math.inf:
            raise SpecError(f"prediction: field 'error': found {self.error}, expected at least 0")


ORACLE = Prediction()


class OraclePredictor:
    """Returns the true length.

    Args:
        new_tokens: true length by request number.
    """

    def __init__(self, new_tokens: Mapping[int, int] | Sequence[int]) -> None:
        self._new_tokens = new_tokens

    def __call__(self, request: WaitingRequest) -> float:
        """Return the true length.

        Raises:
            LlmpqError: the length of the request is unknown.
        """
        try:
            return self._new_tokens[request.request]
        except LookupError:
            raise LlmpqError(f"oracle: no length is known of request {request.request}") from None


class EmpiricalPredictor:
    """Returns the mean of earlier answers for every request.

    Args:
        new_tokens: lengths of earlier answers.

    Raises:
        SpecError: there are no lengths.
    """

    def __init__(self, new_tokens: Sequence[int]) -> None:
        if not new_tokens:
            raise SpecError("empirical predictor: found no lengths, expected at least one")
        self._mean = sum(new_tokens) / len(new_tokens)

    def __call__(self, request: WaitingRequest) -> float:  # noqa: ARG002  the protocol's argument
        """Return the mean."""
        return self._mean


class NoisyPredictor:
    """Multiplies another prediction by ``exp(sigma z)``, z standard normal.

    Args:
        predictor: the predictor to disturb.
        sigma: standard deviation of the logarithm.
        seed: random seed.
    """

    def __init__(self, predictor: LengthPredictor, *, sigma: float, seed: int = 0) -> None:
        if not sigma >= 0:
            raise SpecError(f"noisy predictor: found sigma {sigma}, expected at least 0")
        self._predictor = predictor
        self._sigma = sigma
        self._seed = seed

    def __call__(self, request: WaitingRequest) -> float:
        """Return the disturbed length."""
        generator = _random(self._seed, request)
        return self._predictor(request) * math.exp(self._sigma * generator.gauss(0.0, 1.0))


class RegressionPredictor:
    """Predicts from the prompt length by linear least squares.

    Args:
        prompt_tokens: prompt lengths of earlier requests.
        new_tokens: lengths of their answers.

    Raises:
        SpecError: there are no pairs, or the two have different lengths.
    """

    def __init__(self, prompt_tokens: Sequence[int], new_tokens: Sequence[int]) -> None:
        if not prompt_tokens or len(prompt_tokens) != len(new_tokens):
            raise SpecError(
                f"regression predictor: found {len(prompt_tokens)} prompts and {len(new_tokens)} "
                f"answers, expected equal numbers and at least one"
            )
        count = len(prompt_tokens)
        mean_x, mean_y = sum(prompt_tokens) / count, sum(new_tokens) / count
        variance = sum((x - mean_x) ** 2 for x in prompt_tokens)
        covariance = sum(
            (x - mean_x) * (y - mean_y) for x, y in zip(prompt_tokens, new_tokens, strict=True)
        )
        self.slope = covariance / variance if variance else 0.0
        self.intercept = mean_y - self.slope * mean_x

    def __call__(self, request: WaitingRequest) -> float:
        """Return the predicted length, at least 1."""
        return max(1.0, self.intercept + self.slope * request.prompt_tokens)


def make_predictor(
    prediction: Prediction, prompt_tokens: Sequence[int], new_tokens: Sequence[int]
) -> LengthPredictor | None:
    """Return a predictor for requests with given true lengths; ``None`` without requests."""
    if not new_tokens:
        return None
    if prediction.predictor == "empirical":
        return EmpiricalPredictor(new_tokens)
    if prediction.predictor == "regression":
        return RegressionPredictor(prompt_tokens, new_tokens)
    oracle = OraclePredictor(new_tokens)
    if prediction.predictor == "noisy":
        return NoisyPredictor(oracle, sigma=prediction.error, seed=prediction.seed)
    return oracle


def _random(seed: int, request: WaitingRequest) -> random.Random:
    return random.Random(f"{seed}/{request.request}")
