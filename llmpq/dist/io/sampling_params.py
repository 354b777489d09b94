"""SamplingParams: how the tokens of an answer are chosen, and when it ends. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from llmpq.errors import SpecError
from llmpq.spec.codec import Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of an answer are chosen, and when it ends. Names are vLLM's.

    Attributes:
        max_tokens: most new tokens of an answer; ``None`` is the plan's number.
        temperature: divides the scores; 0 is greedy decoding.
        top_p: keep only the smallest set of best tokens with this probability, in (0, 1].
        top_k: keep only the k best tokens; 0 keeps all.
        seed: seed of the random numbers; equal seeds give equal answers.
        stop_token_ids: tokens that end an answer, in addition to the model's own end tokens.
        ignore_eos: whether answers go on after the model's own end tokens.
    """

    max_tokens: Annotated[int, Rule(minimum=1)] | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise SpecError(f"max_tokens: found {self.max_tokens}, expected at least 1")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise SpecError(f"temperature: found {self.temperature}, expected at least 0")
        if self.top_k < 0:
            raise SpecError(f"top_k: found {self.top_k}, expected at least 0")
        if not 0 < self.top_p <= 1:
            raise SpecError(f"top_p: found {self.top_p}, expected a number in (0, 1]")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))


GREEDY = SamplingParams()
