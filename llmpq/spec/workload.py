"""Workload: how many sequences, how long, how many tokens to make of each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmpq.errors import SpecError
from llmpq.spec.fields import SCHEMA, Fields, read_json

MAX_BATCH = 1_000_000
MAX_TOKENS = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The offline task of LLM-PQ: a batch of equal requests.

    Attributes:
        batch: sequences held at once ``B``.
        prompt_tokens: longest prompt ``s``.
        new_tokens: tokens to generate per sequence ``n``, the first one by prefill.
    """

    batch: int
    prompt_tokens: int
    new_tokens: int

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
    return workload_from_fields(Fields(read_json(path), str(path)))


def workload_from_fields(fields: Fields) -> Workload:
    """Build a workload from its JSON object, strictly."""
    fields.schema()
    workload = Workload(
        batch=fields.integer("batch", minimum=1, maximum=MAX_BATCH),
        prompt_tokens=fields.integer("prompt_tokens", minimum=1, maximum=MAX_TOKENS),
        new_tokens=fields.integer("new_tokens", minimum=1, maximum=MAX_TOKENS),
    )
    fields.done()
    return workload


def workload_to_json(workload: Workload) -> dict[str, Any]:
    """Return the JSON object of a workload."""
    return {
        "schema": SCHEMA,
        "batch": workload.batch,
        "prompt_tokens": workload.prompt_tokens,
        "new_tokens": workload.new_tokens,
    }
