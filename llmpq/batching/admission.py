"""Dynamic workload adjustment: how many requests to encode now (ExeGPT, Sec. 5.2).

The encoding batch holds at most a threshold more prompt tokens than the mean (the paper's holds
no fewer either), and grows or shrinks when the decoding batch is below or above its target.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from llmpq.batching.base import SchedulerView
from llmpq.errors import SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Batch sizes of RRA and WAA, and their tolerance.

    Attributes:
        encode_batch: mean requests of an encoding batch ``B_E``.
        decode_batch: sequences decoded together ``B_D``, also the maximum that hold a slot.
        mean_prompt_tokens: mean length of a prompt; 0 ignores prompt lengths.
        threshold: allowed relative deviation of a batch from its mean.
    """

    encode_batch: int
    decode_batch: int
    mean_prompt_tokens: float = 0.0
    threshold: float = 0.25

    def __post_init__(self) -> None:
        if not 1 <= self.encode_batch <= self.decode_batch:
            raise SpecError(
                f"admission: found an encode batch of {self.encode_batch} and a decode batch of "
                f"{self.decode_batch}, expected 1 <= encode batch <= decode batch"
            )
        if not self.threshold >= 0:
            raise SpecError(f"admission: found threshold {self.threshold}, expected at least 0")

    def choose(self, view: SchedulerView) -> tuple[int, ...]:
        """Return the requests to encode now, in order of arrival; may be empty."""
        most = self.encode_batch
        if view.alive + most < self._smallest:
            most += max(1, round(self.encode_batch * self.threshold))
        return self.take(view, most)

    def wanted(self, alive: int) -> int:
        """Return how many requests to encode until the next encoding.

        ``encode_batch``, or more when the decoding batch is too small, as at the start of a run.
        """
        if alive + self.encode_batch >= self._smallest:
            return self.encode_batch
        return max(self.encode_batch, math.ceil(self._smallest) - alive)

    def take(self, view: SchedulerView, most: int) -> tuple[int, ...]:
        """Return at most ``most`` requests to encode, in order of arrival.

        Fewer when slots are short, or the decoding batch or the prompts would become too large.
        """
        room = min(most, self.decode_batch - view.alive)
        limit = self.encode_batch * self.mean_prompt_tokens * (1 + self.threshold)
        chosen: list[int] = []
        tokens = 0
        for item in view.fitting(room):
            tokens += item.prompt_tokens
            if chosen and limit and tokens > limit:
                break
            chosen.append(item.request)
        return tuple(chosen)

    @property
    def _smallest(self) -> float:
        return self.decode_batch * (1 - self.threshold)
