"""Dynamic adjustment: how many requests to encode now, so that the workload stays even.

ExeGPT, Sec. 5.2: the encoder batch is adjusted so that the prompt tokens of a batch stay within a
threshold of the mean, and grows or shrinks when the decoding batch is below or above its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from llmpq.batching.base import SchedulerView
from llmpq.errors import SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The workload that RRA and WAA keep even.

    Attributes:
        encode_batch: requests encoded at a time on average ``B_E``.
        decode_batch: sequences decoded together on average ``B_D``; more never hold a slot than
            this and the threshold allow.
        mean_prompt_tokens: mean length of a prompt; 0 leaves prompt lengths out of account.
        threshold: how far a batch may be from its mean, as a share of it.
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
        """Return the requests to encode now, in order of arrival; none when there is no room."""
        missing = self.decode_batch - view.alive
        # More only makes up for a decoding batch that has become too small, less only when the
        # batch would become too large.
        most = self.encode_batch
        if view.alive + most < self.decode_batch * (1 - self.threshold):
            most += max(1, round(self.encode_batch * self.threshold))
        elif missing < most:
            most = missing
        limit = self.encode_batch * self.mean_prompt_tokens * (1 + self.threshold)
        chosen: list[int] = []
        tokens = 0
        for item in islice(view.waiting, max(0, min(most, view.free_slots))):
            tokens += item.prompt_tokens
            if chosen and limit and tokens > limit:
                break
            chosen.append(item.request)
        return tuple(chosen)
