"""Predictors of how long an answer will be, for policies that group requests by it.

A predictor is any callable from a waiting request to a number of tokens. It sees what is known on
arrival: the request's number and the length of its prompt. Chance is seeded by the request's own
number, so that a prediction does not depend on who asks, when, or how often.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from llmpq.batching.base import WaitingRequest
from llmpq.errors import LlmpqError, SpecError

LengthPredictor = Callable[[WaitingRequest], float]
"""Returns the predicted tokens of an answer, at least 0."""

PredictorName = Literal["oracle", "noisy", "regression", "empirical"]
PREDICTOR_NAMES: tuple[str, ...] = get_args(PredictorName)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What is known of answer lengths before they are made.

    Attributes:
        predictor: the name of a predictor.
        error: of ``noisy``: standard deviation of the logarithm.
        seed: of its chance.
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
    """Knows every length: the best any predictor can be.

    Args:
        new_tokens: by request number.
    """

    def __init__(self, new_tokens: Mapping[int, int] | Sequence[int]) -> None:
        self._new_tokens = new_tokens

    def __call__(self, request: WaitingRequest) -> float:
        """Return the true length.

        Raises:
            LlmpqError: the request is not among those known.
        """
        try:
            return self._new_tokens[request.request]
        except LookupError:
            raise LlmpqError(f"oracle: no length is known of request {request.request}") from None


class EmpiricalPredictor:
    """Knows only how long answers were before: predicts their mean, the same for everyone.

    Args:
        new_tokens: lengths of earlier answers.

    Raises:
        SpecError: there are none.
    """

    def __init__(self, new_tokens: Sequence[int]) -> None:
        if not new_tokens:
            raise SpecError("empirical predictor: found no lengths, expected at least one")
        self._mean = sum(new_tokens) / len(new_tokens)

    def __call__(self, request: WaitingRequest) -> float:  # noqa: ARG002  the protocol's argument
        """Return the mean."""
        return self._mean


class NoisyPredictor:
    """Another predictor with a stated error: off by a factor ``exp(sigma z)``, z standard normal.

    Args:
        predictor: what is disturbed, mostly an oracle.
        sigma: standard deviation of the logarithm; 0.3 is off by a third, one time in three.
        seed: of the chance.
    """

    def __init__(self, predictor: LengthPredictor, *, sigma: float, seed: int = 0) -> None:
        if not sigma >= 0:
            raise SpecError(f"noisy predictor: found sigma {sigma}, expected at least 0")
        self._predictor = predictor
        self._sigma = sigma
        self._seed = seed

    def __call__(self, request: WaitingRequest) -> float:
        """Return the disturbed length, always the same for one request."""
        chance = _chance(self._seed, request)
        return self._predictor(request) * math.exp(self._sigma * chance.gauss(0.0, 1.0))


class NeighbourNoise:
    """Puts a share of the requests into a neighbouring bin (multi-bin batching, Sec. 6.3).

    Args:
        predictor: the truth.
        boundaries: the k - 1 lengths between the k bins, rising.
        error: probability ``p`` of the wrong bin; below and above are equally likely, and the
            outermost bins have one neighbour only.
        seed: of the chance.
    """

    def __init__(
        self,
        predictor: LengthPredictor,
        *,
        boundaries: Sequence[float],
        error: float,
        seed: int = 0,
    ) -> None:
        if not 0 <= error <= 1:
            raise SpecError(f"neighbour noise: found an error of {error}, expected 0 to 1")
        self._predictor = predictor
        self._boundaries = tuple(boundaries)
        self._error = error
        self._seed = seed

    def __call__(self, request: WaitingRequest) -> float:
        """Return the true length, or one just inside the neighbouring bin."""
        length = self._predictor(request)
        chance = _chance(self._seed, request)
        if not self._boundaries or chance.random() >= self._error:
            return length
        own = bisect_right(self._boundaries, length)
        neighbours = [bin for bin in (own - 1, own + 1) if 0 <= bin <= len(self._boundaries)]
        chosen = chance.choice(neighbours)
        # A bin holds lengths from its lower boundary on, up to below its upper one.
        if chosen > own:
            return self._boundaries[chosen - 1]
        return math.nextafter(self._boundaries[chosen], -math.inf)


class RegressionPredictor:
    """Predicts from the length of the prompt, by a least-squares line through earlier pairs.

    Args:
        prompt_tokens: of earlier requests.
        new_tokens: of their answers.

    Raises:
        SpecError: no pairs, or as many of one as of the other are not given.
    """

    def __init__(self, prompt_tokens: Sequence[int], new_tokens: Sequence[int]) -> None:
        if not prompt_tokens or len(prompt_tokens) != len(new_tokens):
            raise SpecError(
                f"regression predictor: found {len(prompt_tokens)} prompts and {len(new_tokens)} "
                f"answers, expected as many of either and at least one"
            )
        count = len(prompt_tokens)
        mean_x, mean_y = sum(prompt_tokens) / count, sum(new_tokens) / count
        spread = sum((x - mean_x) ** 2 for x in prompt_tokens)
        together = sum(
            (x - mean_x) * (y - mean_y) for x, y in zip(prompt_tokens, new_tokens, strict=True)
        )
        self.slope = together / spread if spread else 0.0
        self.intercept = mean_y - self.slope * mean_x

    def __call__(self, request: WaitingRequest) -> float:
        """Return the line's answer, at least one token."""
        return max(1.0, self.intercept + self.slope * request.prompt_tokens)


def make_predictor(
    prediction: Prediction, prompt_tokens: Sequence[int], new_tokens: Sequence[int]
) -> LengthPredictor | None:
    """Return a predictor for requests whose true lengths are given, by their numbers.

    Returns:
        ``None`` when there are no requests.
    """
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


def _chance(seed: int, request: WaitingRequest) -> random.Random:
    return random.Random(f"{seed}/{request.request}")
