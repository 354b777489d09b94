"""Predictors of answer lengths, for multi-bin batching and the queue order ``trail``.

A predictor is a callable from a request to a number of tokens; it is called once, when the request
arrives. Random numbers are seeded by the number of the request, so that repeated predictions are
equal.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, get_args

from llmpq.errors import LlmpqError, SpecError


class Unanswered(Protocol):
    """What a predictor may read of a request."""

    @property
    def request(self) -> int:
        """Number of the request."""
        ...

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        ...

    @property
    def token_ids(self) -> Sequence[int] | None:
        """The prompt; ``None`` in a simulation without content."""
        ...

    @property
    def max_tokens(self) -> int:
        """Largest number of answer tokens."""
        ...


LengthPredictor = Callable[[Unanswered], float]
"""Returns the predicted tokens of an answer, at least 0."""

PredictorName = Literal["oracle", "noisy", "regression", "empirical", "learned"]
PREDICTOR_NAMES: tuple[str, ...] = tuple(
    name for name in get_args(PredictorName) if name != "learned"
)
"""Predictors that need no file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Settings of a length predictor.

    Attributes:
        predictor: name of the predictor.
        error: standard deviation of the logarithm for ``noisy``.
        seed: random seed.
        file: of ``learned``: what ``llmpq-profile lengths`` wrote.
    """

    predictor: PredictorName = "oracle"
    error: float = 0.3
    seed: int = 0
    file: Path | None = None

    def __post_init__(self) -> None:
        names = get_args(PredictorName)
        if self.predictor not in names:
            raise SpecError(
                f"prediction: field 'predictor': found '{self.predictor}', "
                f"expected one of {', '.join(names)}"
            )
        if (self.file is not None) != (self.predictor == "learned"):
            raise SpecError(
                f"prediction: field 'file': found {self.file} with the predictor "
                f"'{self.predictor}', expected a file with 'learned' alone"
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

    def __call__(self, request: Unanswered) -> float:
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

    def __call__(self, request: Unanswered) -> float:  # noqa: ARG002  the protocol's argument
        """Return the mean."""
        return self._mean


class LearnedPredictor:
    """Predicts from the prompt, by what was learned from earlier answers.

    Args:
        file: what ``llmpq-profile lengths`` wrote.
        vocab_size: tokens of the model that answers; ``None`` where prompts have no content.

    Raises:
        SpecError: the file is wrong, or made for another vocabulary.
    """

    def __init__(self, file: Path, vocab_size: int | None = None) -> None:
        # Processes that start ranks load no numpy.
        from llmpq.batching.length.learned import read_length_model  # noqa: PLC0415

        self._model = read_length_model(file)
        own = self._model.vocab_size
        if None not in (own, vocab_size) and own != vocab_size:
            raise SpecError(
                f"{file}: field 'vocab_size': found {own}, expected the model's {vocab_size}"
            )

    def __call__(self, request: Unanswered) -> float:
        """Return the predicted length, at most what the request allows."""
        found = self._model.predict(request.prompt_tokens, request.token_ids)
        return min(found, float(request.max_tokens))


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

    def __call__(self, request: Unanswered) -> float:
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

    def __call__(self, request: Unanswered) -> float:
        """Return the predicted length, at least 1."""
        return max(1.0, self.intercept + self.slope * request.prompt_tokens)


def make_predictor(
    prediction: Prediction,
    prompt_tokens: Sequence[int],
    new_tokens: Sequence[int],
    vocab_size: int | None = None,
) -> LengthPredictor | None:
    """Return a predictor for requests with given true lengths; ``None`` without requests.

    Args:
        prediction: its settings.
        prompt_tokens: lengths of the requests' prompts, by their numbers.
        new_tokens: of their answers.
        vocab_size: tokens of the model, where prompts have content.
    """
    if prediction.file is not None:
        return LearnedPredictor(prediction.file, vocab_size)
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


def _random(seed: int, request: Unanswered) -> random.Random:
    return random.Random(f"{seed}/{request.request}")
