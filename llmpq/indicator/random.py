"""The null rival: ordered random numbers. Whatever does not beat it knows nothing.

LLM-PQ, Sec. 6.5: uniform draws, ordered so that a higher bitwidth never scores worse in a layer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from llmpq.indicator.base import Progress, Scores, Subject
from llmpq.models import load_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Random:
    """Uniform draws of a seed; the model gives nothing but its number of layers."""

    seed: int = 0

    def score(self, subject: Subject, progress: Progress | None = None) -> Scores:
        """Draw for every layer; the fewer bits, the larger the draw."""
        count = load_config(subject.model_dir).num_hidden_layers
        generator = random.Random(self.seed)
        rows = [
            sorted((generator.random() for _ in subject.bits), reverse=True) for _ in range(count)
        ]
        if progress is not None:
            progress(count, count, "drawn")
        return {width: tuple(row[at] for row in rows) for at, width in enumerate(subject.bits)}
