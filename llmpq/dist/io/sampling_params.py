"""SamplingParams: how the tokens of an answer are chosen, and when it ends. Needs no torch."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any

from llmpq.errors import SpecError
from llmpq.options.declare import Option
from llmpq.spec.fields import Rule

MAX_LOGIT_BIAS = 100.0
MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1
_SAMPLING_EPS = 1e-5
_OPTIONAL = Rule(optional=True)

TokenId = Annotated[int, Rule(minimum=0)]
TokenIds = Annotated[tuple[TokenId, ...], _OPTIONAL]
Penalty = Annotated[float, Rule(minimum=-2, maximum=2, optional=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The form that the text of an answer must have; exactly one field is set.

    Attributes:
        json: a JSON schema, as JSON text; a mapping is accepted and stored as text.
        regex: a regular expression that the whole answer matches.
        choice: the possible answers.
        grammar: a context-free grammar in Lark or GBNF notation.
        json_object: ``True`` for any JSON object.
    """

    json: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        schema: object = self.json
        if isinstance(schema, Mapping):
            object.__setattr__(self, "json", json.dumps(dict(schema)))
        if self.choice is not None:
            object.__setattr__(self, "choice", tuple(self.choice))
        found = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        if len(found) != 1 or self.json_object is False or self.choice == ():
            raise SpecError(
                f"structured_outputs: found {', '.join(found) or 'no form'}, expected exactly one "
                "of json, regex, choice (not empty), grammar and json_object (true)"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of an answer are chosen, and when it ends. Names and ranges are vLLM's.

    Scores are changed in this order: allowed tokens, bad words, minimum length, bias, penalties;
    then for a random choice temperature, ``min_p``, ``top_k`` and ``top_p``.

    Attributes:
        max_tokens: most new tokens of an answer; ``None`` is the plan's number.
        temperature: divides the scores; 0 is greedy decoding.
        top_p: keep only the smallest set of best tokens with this probability, in (0, 1].
        top_k: keep only the k best tokens; 0 or -1 keeps all.
        min_p: keep only tokens with this share of the best token's probability, in [0, 1].
        seed: seed of the random numbers; equal seeds give equal answers. ``None`` is seed 0.
        repetition_penalty: divides positive and multiplies negative scores of the tokens in prompt
            and answer; 1 changes nothing.
        presence_penalty: subtracted from the score of every token in the answer, in [-2, 2].
        frequency_penalty: subtracted for each time that a token is in the answer, in [-2, 2].
        logit_bias: added to the score of each of these tokens, limited to [-100, 100]; a mapping.
        bad_words_ids: token sequences that the answer never contains.
        allowed_token_ids: the only tokens of an answer; ``None`` allows all.
        stop_token_ids: tokens that end an answer, in addition to the model's own end tokens.
        min_tokens: tokens of an answer before one may end it.
        ignore_eos: whether answers go on after the model's own end tokens.
        logprobs: how many of the best tokens to report with their log probabilities at each
            position, in addition to the chosen one; -1 reports all, ``None`` none at all. They are
            those of the model's scores, before anything here changes them.
        prompt_logprobs: the same for each token of the prompt but the first.
        structured_outputs: the form that the text must have; ``None`` leaves it free.
    """

    max_tokens: (
        Annotated[int, Option(minimum=1, metavar="N", help="most tokens of an answer")] | None
    ) = None
    temperature: Annotated[float, Option(optional=True, help="0 is greedy (default)")] = 0.0
    top_p: Annotated[
        float, Option(optional=True, help="share of probability to keep (default %(default)g)")
    ] = 1.0
    top_k: Annotated[int, Option(minimum=-1, optional=True, help="0 is all tokens")] = 0
    min_p: Annotated[float, _OPTIONAL] = 0.0
    seed: (
        Annotated[int, Option(minimum=MIN_SEED, maximum=MAX_SEED, help="seed (default 0)")] | None
    ) = None
    repetition_penalty: Annotated[float, _OPTIONAL] = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[
        tuple[
            tuple[int, Annotated[float, Rule(minimum=-MAX_LOGIT_BIAS, maximum=MAX_LOGIT_BIAS)]],
            ...,
        ],
        _OPTIONAL,
    ] = ()
    bad_words_ids: Annotated[tuple[tuple[TokenId, ...], ...], _OPTIONAL] = ()
    allowed_token_ids: tuple[TokenId, ...] | None = None
    stop_token_ids: TokenIds = ()
    min_tokens: Annotated[int, _OPTIONAL] = 0
    ignore_eos: Annotated[bool, _OPTIONAL] = False
    logprobs: Annotated[int, Rule(minimum=-1)] | None = None
    prompt_logprobs: Annotated[int, Rule(minimum=-1)] | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        self._freeze()
        for name, minimum, maximum in (
            ("max_tokens", 1, math.inf),
            ("temperature", 0, math.inf),
            ("min_p", 0, 1),
            ("top_k", -1, math.inf),
            ("seed", MIN_SEED, MAX_SEED),
            ("presence_penalty", -2, 2),
            ("frequency_penalty", -2, 2),
            ("min_tokens", 0, math.inf if self.max_tokens is None else self.max_tokens),
            ("logprobs", -1, math.inf),
            ("prompt_logprobs", -1, math.inf),
        ):
            _check_range(name, getattr(self, name), minimum, maximum)
        if not 0 < self.top_p <= 1:
            raise SpecError(f"top_p: found {self.top_p}, expected a number in (0, 1]")
        if not 0 < self.repetition_penalty < math.inf:
            raise SpecError(
                f"repetition_penalty: found {self.repetition_penalty}, expected a finite number "
                "above 0"
            )
        if self.allowed_token_ids == ():
            raise SpecError("allowed_token_ids: found no tokens, expected at least one")
        if () in self.bad_words_ids:
            raise SpecError("bad_words_ids: found an empty sequence, expected at least one token")

    @property
    def is_greedy(self) -> bool:
        """Whether the best token is chosen; a temperature near 0 means so, too."""
        return self.temperature < _SAMPLING_EPS

    @property
    def changes_scores(self) -> bool:
        """Whether another token than the model's best one may be the best after the changes."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.min_tokens > 0
            or bool(self.logit_bias)
            or bool(self.bad_words_ids)
            or self.allowed_token_ids is not None
            or self.structured_outputs is not None
        )

    def check_tokens(self, vocab_size: int) -> None:
        """Check that every token it names is in a vocabulary.

        Raises:
            SpecError: names the field and the token.
        """
        for name, token_ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("logit_bias", [token for token, _ in self.logit_bias]),
            ("bad_words_ids", [token for word in self.bad_words_ids for token in word]),
        ):
            # A list may have 100,000 tokens: only loops in C are fast enough here.
            token = max(token_ids, default=0)
            if token < vocab_size:
                token = min(token_ids, default=0)
            if not 0 <= token < vocab_size:
                raise SpecError(
                    f"field '{name}': found token {token}, expected tokens below the "
                    f"vocabulary of {vocab_size}"
                )

    def with_seed(self, seed: int) -> SamplingParams:
        """Return these parameters, which need no further check, with a valid seed."""
        found = copy.copy(self)
        object.__setattr__(found, "seed", seed)
        return found

    def _freeze(self) -> None:
        """Store sequences and mappings as tuples, in one order."""
        bias = self.logit_bias
        items: Iterable[tuple[int, float]] = bias.items() if isinstance(bias, Mapping) else bias
        limited = {int(token): _limited_bias(value) for token, value in items}
        allowed = self.allowed_token_ids
        for name, value in (
            ("logit_bias", tuple(sorted(limited.items()))),
            ("bad_words_ids", tuple(tuple(word) for word in self.bad_words_ids)),
            ("allowed_token_ids", None if allowed is None else tuple(sorted(set(allowed)))),
            ("stop_token_ids", tuple(self.stop_token_ids)),
        ):
            object.__setattr__(self, name, value)


def _limited_bias(value: float) -> float:
    if math.isnan(value):
        raise SpecError("logit_bias: found NaN, expected numbers")
    return min(max(float(value), -MAX_LOGIT_BIAS), MAX_LOGIT_BIAS)


def _check_range(name: str, value: float | None, minimum: float, maximum: float) -> None:
    if value is None or (math.isfinite(value) and minimum <= value <= maximum):
        return
    limit = f"at least {minimum}" if maximum == math.inf else f"a number in [{minimum}, {maximum}]"
    raise SpecError(f"{name}: found {value}, expected {limit}")


GREEDY = SamplingParams()


MIN_LOGPROB = -9999.0
"""What stands for minus infinity, which JSON does not have, as in vLLM."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position, of the model's scores.

    Attributes:
        token_id: the token of the prompt or the answer.
        logprob: its log probability.
        top: tokens with the highest log probabilities, the best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def logprobs_to_json(values: Sequence[TokenLogprobs | None] | None) -> list[Any] | None:
    """Return a JSON array of log probabilities; :func:`logprobs_from_json` reads it back."""
    if values is None:
        return None
    return [item and [item.token_id, item.logprob, list(item.top)] for item in values]


def logprobs_from_json(values: list[Any] | None) -> tuple[TokenLogprobs | None, ...] | None:
    """Return the log probabilities of :func:`logprobs_to_json`."""
    if values is None:
        return None
    return tuple(
        item and TokenLogprobs(item[0], item[1], tuple((token, value) for token, value in item[2]))
        for item in values
    )
