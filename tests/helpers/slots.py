"""Schedulers of a policy over slots, and requests without content."""

from __future__ import annotations

from llmpq.batching import BatchingPolicy, PipelineDepth, PolicyScheduler
from llmpq.batching.engine_step import EngineLimits, EngineRequest, EngineStep

TOKENS = 64
"""Of a slot."""
MANY = PipelineDepth(prefill_stages=10**6, decode_stages=10**6)


def slots_of(
    policy: BatchingPolicy,
    num_slots: int,
    drafts: int = 0,
    part_tokens: int | None = None,
    tokens: int = TOKENS,
    scored_tokens: int = 1,
) -> PolicyScheduler:
    """Return a scheduler of so many slots; any number of micro-batches may be in flight.

    Draft tokens, up to ``drafts`` of a sequence in a step, cost nothing.
    """
    limits = EngineLimits(
        token_budget=tokens,
        max_sequences=num_slots,
        num_blocks=num_slots,
        block_size=tokens,
        prefix_caching=False,
        num_speculative_tokens=drafts,
        row_cost=0.0,
    )
    return PolicyScheduler(
        policy, limits, MANY, part_tokens=part_tokens, scored_tokens=scored_tokens
    )


def request_of(
    number: int,
    prompt_tokens: int = 1,
    max_tokens: int = 32,
    arrival_s: float = 0.0,
    predicted: float | None = None,
) -> EngineRequest:
    return EngineRequest(
        request=number,
        token_ids=None,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        arrival_s=arrival_s,
        predicted_tokens=float(max_tokens) if predicted is None else predicted,
    )


def complete(scheduler: PolicyScheduler, step: EngineStep, finished=(), accepted=None) -> None:
    """Complete a step with a token for every sequence whose answer is not complete."""
    tokens = {chunk.request: 0 for chunk in step.chunks if chunk.makes_token}
    scheduler.complete(step.number, tokens, finished, accepted or {})
