"""Speculative decoding: its options, and how many draft tokens are worth verifying.

Prompt lookup (Saxena 2023; ``ngram`` in vLLM) proposes the tokens that followed the last tokens of
a sequence where they were before. One step computes the next token and the draft tokens as rows of
their own. The model chooses a token at each of these positions as it would without a draft; the
draft is accepted as far as it consists of these tokens. As a draft here has no probabilities of its
own, this is rejection sampling: a draft token is accepted with the model's probability of it, and
replaced by a token of the distribution without it otherwise.

A draft token takes a part of a step. ``DraftCredit`` bounds what drafts may lose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from llmpq.errors import SpecError
from llmpq.spec.codec import Rule, from_json
from llmpq.spec.fields import Fields

MAX_STEP_TOKENS = 32
"""Most tokens of a step with drafts: a compiled decode step takes no more rows."""
ROW_COST = 1 / 3
"""Seconds of each row of a decode step, relative to those that do not depend on the rows."""
FIRST_CREDIT = 0.25
CREDIT_OF_TOKEN = 0.02
MOST_CREDIT = 4.0

_Method = Literal["ngram"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding of an engine, in vLLM's names.

    Attributes:
        method: ``ngram``, prompt lookup.
        num_speculative_tokens: most draft tokens of a sequence in a step.
        prompt_lookup_max: most last tokens of a sequence that are looked up; the longest match
            counts, and the latest one of that length.
        prompt_lookup_min: fewest.

    Raises:
        SpecError: the numbers are not in order.
    """

    method: Annotated[_Method, Rule(optional=True)] = "ngram"
    num_speculative_tokens: Annotated[int, Rule(minimum=1, maximum=MAX_STEP_TOKENS - 1)]
    prompt_lookup_max: Annotated[int, Rule(minimum=1, optional=True)] = 4
    prompt_lookup_min: Annotated[int, Rule(minimum=1, optional=True)] = 2

    def __post_init__(self) -> None:
        if not 1 <= self.num_speculative_tokens < MAX_STEP_TOKENS:
            raise SpecError(
                f"speculative_config: field 'num_speculative_tokens': found "
                f"{self.num_speculative_tokens}, expected 1 to {MAX_STEP_TOKENS - 1}"
            )
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise SpecError(
                f"speculative_config: found prompt_lookup_min {self.prompt_lookup_min} and "
                f"prompt_lookup_max {self.prompt_lookup_max}, expected "
                "1 <= prompt_lookup_min <= prompt_lookup_max"
            )


def read_speculative_config(fields: object, where: str = "speculative_config") -> SpeculativeConfig:
    """Return the speculative decoding that a mapping describes, in the notation of vLLM.

    Raises:
        SpecError: it is not acceptable; the message names the field.
    """
    return from_json(SpeculativeConfig, Fields(fields, where))


def draft_cost(tokens: int) -> float:
    """Return what a draft token costs, in steps of its sequence: the share of rows in a step.

    With few tokens in a step a row is cheap, because the weights are read for all rows together.
    With many, a draft token takes as long as a token.

    Args:
        tokens: of the step without drafts.
    """
    rows_s = ROW_COST * tokens
    return rows_s / (1 + rows_s)


class DraftCredit:
    """Steps that the drafts of a sequence may still lose.

    Every draft token spends its cost, every accepted one earns the step that it saves, and every
    token adds ``CREDIT_OF_TOKEN``. A draft is never longer than the credit pays for, so all drafts
    of a sequence together lose at most ``FIRST_CREDIT`` steps and that share of its steps, where
    ``ROW_COST`` is right. Where drafts are accepted their length grows; where they are not, they
    end. ``MOST_CREDIT`` lets them end soon after a passage that repeats itself.
    """

    __slots__ = ("_steps",)

    def __init__(self) -> None:
        self._steps = FIRST_CREDIT

    def longest(self, step_tokens: int) -> int:
        """Return how many draft tokens it pays for in a step of so many other tokens."""
        return int(self._steps / draft_cost(step_tokens))

    def spend(self, draft_tokens: int, step_tokens: int) -> None:
        """Pay for a draft."""
        self._steps -= draft_tokens * draft_cost(step_tokens)

    def earn(self, accepted: int) -> None:
        """Take what a step made: the accepted draft tokens, and one token more."""
        earned = accepted + CREDIT_OF_TOKEN * (accepted + 1)
        self._steps = min(MOST_CREDIT, self._steps + earned)
