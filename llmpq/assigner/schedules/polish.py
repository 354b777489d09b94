"""What expectations do not see: an RRA schedule's neighbours, played by the simulator.

The closed form takes every batch for its mean and a cycle for done before the next one begins. In a
pipeline, prompts follow behind the last decode steps of the old cycle, so that encoding more often
costs less than it says: over three tasks its best schedule was 2 to 5 % below its own neighbours.
A neighbour keeps the decoding batch: it encodes ``B_E`` as often as ``N_D`` then asks for, in
smaller or larger micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from llmpq.assigner.schedules.expected import SteadyBatch
from llmpq.spec.lengths import LengthDistribution
from llmpq.spec.plan import MicroBatching, Plan
from llmpq.spec.schedule import Schedule

ITERATION_STEPS = (0.5, 0.7, 1.4, 2.0)
PREFILL_STEPS = (0.5, 2.0)
LEAST_GAIN = 1.003
"""Smaller gains are of the trace, not of the schedule."""
_ROUNDS = 3

Score = Callable[[Plan], float]
"""Requests a second of a plan when played; 0 when it breaks the bound or does not fit."""
Variables = tuple[int, int, int]
"""``B_E``, ``N_D`` and the sequences of a prefill micro-batch."""


def polished(
    plan: Plan, prompt_tokens: LengthDistribution, new_tokens: LengthDistribution, score: Score
) -> Plan:
    """Return the best of an RRA plan and its neighbours, step by step, as long as one is better.

    Args:
        plan: with an RRA schedule.
        prompt_tokens: law of prompt lengths.
        new_tokens: law of answer lengths.
        score: how good a plan is.
    """
    schedule = plan.schedule
    assert schedule is not None
    decode_batch = schedule.decode_batch
    assert decode_batch is not None
    best, best_score = plan, score(plan)
    seen = {_variables(plan)}
    for _ in range(_ROUNDS):
        start = best
        for found in _around(best, decode_batch, prompt_tokens, new_tokens):
            if found in seen:
                continue
            seen.add(found)
            candidate = _with(start, found)
            reached = score(candidate)
            if reached > LEAST_GAIN * best_score:
                best, best_score = candidate, reached
        if best is start:
            break
    return best


def _around(
    plan: Plan,
    decode_batch: int,
    prompt_tokens: LengthDistribution,
    new_tokens: LengthDistribution,
) -> Iterator[Variables]:
    """Yield neighbours: other cycles, then other micro-batches of the same cycle."""
    encode_batch, iterations, prefill = _variables(plan)
    for step in ITERATION_STEPS:
        other = min(max(1, round(step * iterations)), max(1, new_tokens.longest - 1))
        steady = SteadyBatch(
            prompt_tokens=prompt_tokens, new_tokens=new_tokens, decode_iterations=other
        )
        wanted = min(max(1, round(steady.encode_batch(decode_batch))), decode_batch)
        yield wanted, other, min(prefill, wanted)
    for step in PREFILL_STEPS:
        yield encode_batch, iterations, min(max(1, math.floor(step * prefill)), encode_batch)


def _variables(plan: Plan) -> Variables:
    schedule = plan.schedule
    assert schedule is not None
    assert schedule.encode_batch is not None
    assert schedule.decode_iterations is not None
    return schedule.encode_batch, schedule.decode_iterations, plan.micro_batching.prefill


def _with(plan: Plan, variables: Variables) -> Plan:
    encode_batch, iterations, prefill = variables
    schedule: Schedule | None = plan.schedule
    assert schedule is not None
    return replace(
        plan,
        schedule=replace(schedule, encode_batch=encode_batch, decode_iterations=iterations),
        micro_batching=MicroBatching(prefill=prefill, decode=plan.micro_batching.decode),
    )
