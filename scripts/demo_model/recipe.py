"""What shapes a training run, and how far it has come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that shapes the training run; exactly one of `tokens` and `minutes` is set."""

    seed: int = 1
    tokens: int | None = None
    minutes: float | None = None
    sequence: int = 512
    rows: int = 4
    accumulate: int = 4
    optimizer: str = "muon"
    learning_rate: float = 4e-3
    weight_decay: float = 0.1
    warmup_steps: int = 20
    decay_fraction: float = 0.45
    clip: float = 1.0
    compiled: bool = True
    bf16: bool = True

    @property
    def step_tokens(self) -> int:
        """Tokens whose gradients one update averages."""
        return self.sequence * self.rows * self.accumulate


@dataclass(slots=True, kw_only=True)
class Progress:
    """How far a run has come; saved with each checkpoint."""

    step: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0
    losses: list[list[float]] | None = None

    def fraction(self, recipe: Recipe) -> float:
        """Return the share of the budget that is spent, 1 or more when done."""
        if recipe.tokens is not None:
            return self.tokens / recipe.tokens
        assert recipe.minutes is not None
        return self.elapsed_s / (60 * recipe.minutes)
