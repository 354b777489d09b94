"""Speculative decoding: its options, and how many draft tokens are worth verifying.

Prompt lookup (Saxena 2023; ``ngram`` in vLLM) proposes the tokens that followed the last tokens of
a sequence where they were before, a draft model those that it finds most likely, and so does the
layer for multi-token prediction that some models ship (``mtp``; ``batching.engine_step``). One step
computes the next token and the draft tokens as rows of their own. The model chooses a token at each
of these positions as it would without a draft; the draft is accepted as far as it consists of these
tokens. As a draft here has no probabilities of its own, this is rejection sampling: a draft token
is accepted with the model's probability of it, and replaced by a token of the distribution without
it otherwise.

A draft token takes a part of a step, its ``RowCost``. ``DraftCredit`` bounds what drafts may lose.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from llmpq.errors import SpecError
from llmpq.spec.fields import Fields, Rule, from_json
from llmpq.spec.plan import Plan
from llmpq.spec.precision import BITS

MAX_STEP_TOKENS = 32
"""Most tokens of a step with drafts: a compiled decode step takes no more rows."""
ROW_COST = 1 / 4
"""``RowCost`` where no plan forecasts it: that of 16 and 8 bits on CPUs."""
FIRST_WEIGHT = 2.0
"""Weight of the first ``RowCost``, in squares of differences between the rows of two steps."""
MOST_DISTURBED = 1.5
"""Longest time of a step that is believed, relative to the expected one."""
KNOWN_STEPS = 512
"""Steps after which a measured cost counts for a third of what it did."""
SMOOTHED_STEPS = 32
"""Steps whose mean is that of a step, and pairs of steps whose slope is that of a row."""
FIRST_CREDIT = 0.25
CREDIT_OF_TOKEN = 0.01
MOST_CREDIT = 4.0
FIRST_ACCEPTED, FIRST_REJECTED = 2.0, 1.0
"""Draft tokens of a sequence that count as accepted and rejected before its first draft."""
KEPT_HISTORY = 0.9
"""Weight of all drafts before, at every draft."""

_Method = Literal["ngram", "draft_model", "mtp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding of an engine, in vLLM's names.

    Attributes:
        method: ``ngram``, prompt lookup; ``draft_model``; or ``mtp``, the model's own layer for
            multi-token prediction.
        num_speculative_tokens: most draft tokens of a sequence in a step.
        prompt_lookup_max: most last tokens of a sequence that are looked up; the longest match
            counts, and the latest one of that length.
        prompt_lookup_min: fewest.
        model: directory of the draft model; its vocabulary is that of the model.
        bits: of the draft model's layers, ``None`` for those of its checkpoint; its head has 8 bits
            where they are fewer than 16. With ``mtp``, of that layer, by default those of the
            model's last one.

    Raises:
        SpecError: the numbers are not in order, or the method has no such field.
    """

    method: Annotated[_Method, Rule(optional=True)] = "ngram"
    num_speculative_tokens: Annotated[int, Rule(minimum=1, maximum=MAX_STEP_TOKENS - 1)]
    prompt_lookup_max: Annotated[int, Rule(minimum=1, optional=True)] = 4
    prompt_lookup_min: Annotated[int, Rule(minimum=1, optional=True)] = 2
    model: str | None = None
    bits: int | None = None

    def __post_init__(self) -> None:
        needs_model = self.method == "draft_model"
        has_no_bits = self.method == "ngram"
        if needs_model == (self.model is None) or (self.bits is not None and has_no_bits):
            raise SpecError(
                f"speculative_config: found method '{self.method}' with model {self.model!r} and "
                f"bits {self.bits}, expected 'model', the directory of the draft model, with "
                "method 'draft_model' alone, and no 'bits' with 'ngram'"
            )
        if self.bits is not None and self.bits not in BITS:
            raise SpecError(
                f"speculative_config: field 'bits': found {self.bits}, expected one of {list(BITS)}"
            )
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


def as_speculative_config(
    given: SpeculativeConfig | Mapping[str, Any] | str | None,
) -> SpeculativeConfig | None:
    """Return the speculative decoding that an argument asks for, in the notation of vLLM.

    Args:
        given: a mapping, or its JSON.

    Raises:
        SpecError: it is not acceptable; the message names the field.
    """
    name = "speculative_config"
    if given is None or isinstance(given, SpeculativeConfig):
        return given
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise SpecError(f"{name}: found no JSON: {error}") from None
    return from_json(SpeculativeConfig, Fields(given, name))


def row_cost_of(plan: Plan) -> float:
    """Return the first ``RowCost`` of a plan's engine: its forecast's, if it has one."""
    forecast = plan.estimate.forecast
    known = None if forecast is None else forecast.row_cost
    return ROW_COST if known is None else known


class RowCost:
    """Seconds of one more row of a decode step, in steps of one row: 0 to 1.

    With few rows a row is cheap, because the weights are read for all rows together. How cheap
    depends on device, bits and kernel. The first value is the plan's forecast; measured steps
    correct it. The cost is the slope of seconds over rows between steps that follow each other, as
    what else changes (contexts, clocks) changes slowly, relative to the smoothed mean of a step.

    Args:
        first: the value before any step is measured.
    """

    __slots__ = (
        "_first",
        "_last",
        "_mean_rows",
        "_mean_s",
        "_products",
        "_squares",
        "_steps",
    )

    def __init__(self, first: float = ROW_COST) -> None:
        self._first = first
        self._steps = 0
        self._mean_rows = self._mean_s = 0.0  # of the steps
        self._last = (0, 0.0)
        self._squares = self._products = 0.0

    @property
    def share(self) -> float:
        """Seconds of one more row, in steps of one row."""
        if not self._steps:
            return self._first
        row_s = self._row_s
        return row_s / (self._mean_s - row_s * (self._mean_rows - 1))

    @property
    def _row_s(self) -> float:
        """Least-squares slope; no row takes more than its part of a step."""
        return min(max(0.0, self._products / self._squares), self._mean_s / self._mean_rows)

    def step_s(self, rows: int) -> float | None:
        """Return the expected seconds of a step; ``None`` before any is measured."""
        return self._mean_s + self._row_s * (rows - self._mean_rows) if self._steps else None

    def observe(self, rows: int, seconds: float) -> None:
        """Take a measured decode step; at most ``MOST_DISTURBED`` of the expected time counts."""
        if seconds <= 0:
            return
        expected_s = self.step_s(rows)
        if expected_s is not None:
            seconds = min(seconds, MOST_DISTURBED * expected_s)
            self._compare(rows - self._last[0], seconds - self._last[1])
        else:
            self._squares = FIRST_WEIGHT
            self._products = FIRST_WEIGHT * self._first * seconds / (1 + self._first * (rows - 1))
        self._smooth(rows, seconds)
        self._forget()
        self._last = (rows, seconds)

    def _compare(self, more_rows: int, more_s: float) -> None:
        """Add the difference to the step before, where the rows differ."""
        if more_rows:
            self._squares += more_rows**2 - self._squares / SMOOTHED_STEPS
            self._products += more_rows * more_s - self._products / SMOOTHED_STEPS

    def _smooth(self, rows: int, seconds: float) -> None:
        """Move the means; what the rows do not explain changes all seconds alike."""
        self._steps = min(self._steps + 1, SMOOTHED_STEPS)
        more_rows = (rows - self._mean_rows) / self._steps
        mean_s = self._mean_s + (seconds - self._mean_s) / self._steps
        if self._steps > 1:
            self._products *= mean_s / (self._mean_s + self._row_s * more_rows)
        self._mean_rows += more_rows
        self._mean_s = mean_s

    def _forget(self) -> None:
        """Return slowly to the first value, so that no wrong one ends all drafts for good."""
        one_s = self._mean_s - self._row_s * (self._mean_rows - 1)
        self._squares += (FIRST_WEIGHT - self._squares) / KNOWN_STEPS
        self._products += (FIRST_WEIGHT * self._first * one_s - self._products) / KNOWN_STEPS

    def of_draft_token(self, tokens: int) -> float:
        """Return what a draft token costs, in steps of its sequence: the share of rows in a step.

        With many tokens in a step, a draft token takes as long as a token.

        Args:
            tokens: of the step without drafts.
        """
        share = self.share
        return tokens * share / (1 + (tokens - 1) * share)


class DraftCredit:
    """Steps that the drafts of a sequence may still lose, and how long a draft pays.

    Every draft token spends its cost, every accepted one earns the step that it saves, and every
    token adds ``CREDIT_OF_TOKEN``. A draft is never longer than the credit pays for, so all drafts
    of a sequence together lose at most ``FIRST_CREDIT`` steps and that share of its steps, where
    the cost is right. Where drafts are accepted their length grows; where they are not, they end.
    ``MOST_CREDIT`` lets them end soon after a passage that repeats itself.

    A draft token counts only if all before it are accepted, which a share ``a`` of them was so far:
    the draft ends before the first of its tokens whose ``a^k`` is less than its cost.

    Args:
        first: steps that drafts may lose at first.
    """

    __slots__ = ("_accepted", "_rejected", "_steps")

    def __init__(self, first: float = FIRST_CREDIT) -> None:
        self._steps = first
        self._accepted, self._rejected = FIRST_ACCEPTED, FIRST_REJECTED

    @property
    def share(self) -> float:
        """Share of the draft tokens that was accepted, while all before them were."""
        return self._accepted / (self._accepted + self._rejected)

    def longest(self, cost: float) -> int:
        """Return how many draft tokens of such a cost are worth it; none that save nothing."""
        if cost >= 1:
            return 0
        paid = int(min(self._steps / cost, MAX_STEP_TOKENS)) if cost > 0 else MAX_STEP_TOKENS
        tokens = min(1, paid)  # else no draft would show that the share has changed
        while tokens < paid and self.share ** (tokens + 1) >= cost:
            tokens += 1
        return tokens

    def spend(self, draft_tokens: int, cost: float) -> None:
        """Pay for a draft."""
        self._steps -= draft_tokens * cost

    def earn(self, accepted: int, draft_tokens: int) -> None:
        """Take what a step made: the accepted ones of its draft tokens, and one token more."""
        earned = accepted + CREDIT_OF_TOKEN * (accepted + 1)
        self._steps = min(MOST_CREDIT, self._steps + earned)
        if draft_tokens:
            self._accepted = KEPT_HISTORY * self._accepted + accepted
            self._rejected = KEPT_HISTORY * self._rejected + (accepted < draft_tokens)
