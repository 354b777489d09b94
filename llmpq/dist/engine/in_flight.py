"""What the master keeps of requests that hold a slot, and of micro-batches on their way."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from llmpq.batching import RequestRecord, Step, Ways
from llmpq.dist.engine.stage import StageRunner
from llmpq.dist.io.prompts import Request
from llmpq.dist.io.results import FinishReason
from llmpq.dist.transport.frames import FrameKind, Row
from llmpq.spec.plan import Plan
from llmpq.spec.precision import Phase


@dataclass(slots=True, kw_only=True)
class RunningRequest:
    """A request that was admitted, and its tokens so far."""

    request: Request
    start_s: float
    origin: int  # the prefill micro-batch that filled its slot
    first_token_s: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    is_aborted: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether no further token is made for it."""
        return self.is_aborted or self.finish_reason is not None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the answer is complete; ``None`` while it is not."""
        if self.token_ids[-1] in self.request.stop_token_ids:
            return "stop"
        return "length" if len(self.token_ids) == self.request.max_new_tokens else None


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchedStep:
    """A micro-batch on its way, and what the master spent on sending it off."""

    step: Step
    kind: FrameKind
    rows: tuple[Row, ...]
    spent_s: float
    embed_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PhaseSplit:
    """What is different where prefill and decode have stages of their own.

    Attributes:
        ways: the stages of either.
        prefill_runner: the master's own part of a prefill, which has no layers.
    """

    ways: Ways
    prefill_runner: StageRunner


def split_of(plan: Plan, device: torch.device) -> PhaseSplit | None:
    """Return how the master treats either phase; ``None`` where stages do both."""
    if not plan.is_split:
        return None
    nothing = StageRunner(layers=None, cache=None, device=device, is_last=False)
    ways = Ways(
        prefill_stages=len(plan.path(Phase.PREFILL)),
        decode_stages=len(plan.path(Phase.DECODE)),
        is_split=True,
    )
    return PhaseSplit(ways=ways, prefill_runner=nothing)


def record_of(number: int, answer: RunningRequest, end_s: float) -> RequestRecord:
    """Return the record of a request whose last token is known."""
    return RequestRecord(
        request=number,
        prompt_tokens=len(answer.request.prompt_token_ids),
        new_tokens=len(answer.token_ids),
        arrival_s=answer.request.arrival_s,
        start_s=answer.start_s,
        first_token_s=answer.first_token_s,
        end_s=end_s,
    )
