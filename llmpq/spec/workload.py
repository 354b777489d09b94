"""Workload: number of sequences, prompt length and tokens to generate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from llmpq.errors import SpecError
from llmpq.spec.codec import Rule, from_json
from llmpq.spec.fields import SCHEMA, read_fields

MAX_BATCH = 1_000_000
MAX_TOKENS = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The offline task of LLM-PQ: a batch of requests of equal size.

    Attributes:
        batch: sequences held at once ``B``.
        prompt_tokens: longest prompt ``s``.
        new_tokens: tokens to generate per sequence ``n``, the first one by prefill.
    """

    SCHEMA: ClassVar[int] = SCHEMA

    batch: Annotated[int, Rule(minimum=1, maximum=MAX_BATCH)]
    prompt_tokens: Annotated[int, Rule(minimum=1, maximum=MAX_TOKENS)]
    new_tokens: Annotated[int, Rule(minimum=1, maximum=MAX_TOKENS)]

    def __post_init__(self) -> None:
        limits = {"batch": MAX_BATCH, "prompt_tokens": MAX_TOKENS, "new_tokens": MAX_TOKENS}
        for field, maximum in limits.items():
            value = getattr(self, field)
            if not 1 <= value <= maximum:
                raise SpecError(
                    f"workload: field '{field}': found {value}, "
                    f"expected a whole number in [1, {maximum}]"
                )

    @property
    def name(self) -> str:
        """The name used in file names: ``s512-n100-b32``."""
        return f"s{self.prompt_tokens}-n{self.new_tokens}-b{self.batch}"

    @property
    def max_context_tokens(self) -> int:
        """Tokens a sequence may reach, which is the length of a KV slot ``s + n``."""
        return self.prompt_tokens + self.new_tokens

    @property
    def mean_context_tokens(self) -> float:
        """Context of the average decode step ``s + n/2`` (LLM-PQ, Sec. 4.3)."""
        return self.prompt_tokens + self.new_tokens / 2


def load_workload(path: str | Path) -> Workload:
    """Read a workload file."""
    return from_json(Workload, read_fields(path, "workload"))
