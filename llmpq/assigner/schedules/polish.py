"""What expectations do not see: an RRA schedule's neighbours, played by the simulator.

The closed form takes every batch for its mean and a cycle for done before the next one begins. In a
pipeline, prompts follow behind the last decode steps of the old cycle, so that encoding more often
costs less than it says; and a batch that is filled up at every encoding, whatever ended (a
threshold of 0), answers more than one that is full on average. Under a bound for 99 % of the
requests the closed form errs on the answer it is for, so that the decoding batch is moved as well.
A neighbour encodes as many ``B_E`` as its ``B_D`` and ``N_D`` ask for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from llmpq.assigner.schedules.expected import SteadyBatch
from llmpq.spec.lengths import LengthDistribution
from llmpq.spec.plan import MicroBatching, Plan

LEAST_GAIN = 1.003
"""Smaller gains are of the trace, not of the schedule."""
FILLED = 0.0
"""The threshold under which every encoding fills the decoding batch up."""
_ROUNDS = 3

Score = Callable[[Plan], float]
"""Requests a second of a plan when played; 0 when it breaks the bound or does not fit."""


class Move(NamedTuple):
    """A step to a neighbour: factors on its variables, and perhaps another threshold."""

    iterations: float = 1.0
    decode_batch: float = 1.0
    prefill: float = 1.0
    threshold: float | None = None


CYCLES = (
    Move(threshold=FILLED),
    Move(iterations=0.5),
    Move(iterations=0.7),
    Move(prefill=2.0),
    Move(prefill=0.5),
    Move(iterations=1.4),
    Move(iterations=2.0),
)
"""What is tried for any schedule, in this order."""
BATCHES = (
    Move(decode_batch=1.25),
    Move(decode_batch=1.1),
    Move(decode_batch=1.25, iterations=2.0),
    Move(decode_batch=0.9),
    Move(decode_batch=0.9, iterations=0.5),
)
"""What is tried besides where a bound, and not the number of slots, limits the decoding batch."""
MOST_PLAYED = 1 + _ROUNDS * (len(CYCLES) + len(BATCHES))


class _Variables(NamedTuple):
    encode_batch: int
    decode_batch: int
    iterations: int
    prefill: int
    threshold: float | None


def polished(
    plan: Plan,
    prompt_tokens: LengthDistribution,
    new_tokens: LengthDistribution,
    score: Score,
    *,
    moves: tuple[Move, ...] = CYCLES,
) -> list[Plan]:
    """Return ever better RRA plans, from the given one on to one that no neighbour of beats.

    Args:
        plan: with an RRA schedule.
        prompt_tokens: law of prompt lengths.
        new_tokens: law of answer lengths.
        score: how good a plan is; asked once for each.
        moves: to its neighbours, tried one after the other from the best so far.
    """
    path, best_score = [plan], score(plan)
    seen = {_variables(plan)}
    for _ in range(_ROUNDS):
        start = path[-1]
        for move in moves:
            found = _moved(path[-1], move, prompt_tokens, new_tokens)
            if found in seen:
                continue
            seen.add(found)
            candidate = _with(path[-1], found)
            reached = score(candidate)
            if reached > LEAST_GAIN * best_score:
                path.append(candidate)
                best_score = reached
        if path[-1] is start:
            break
    return path


def _moved(
    plan: Plan, move: Move, prompt_tokens: LengthDistribution, new_tokens: LengthDistribution
) -> _Variables:
    """Return the neighbour's variables, each within its range."""
    now = _variables(plan)
    slots, longest = plan.workload.batch, max(1, new_tokens.longest - 1)
    iterations = min(max(1, round(move.iterations * now.iterations)), longest)
    decode_batch = min(max(1, round(move.decode_batch * now.decode_batch)), slots)
    encode_batch = now.encode_batch
    if (decode_batch, iterations) != (now.decode_batch, now.iterations):
        steady = SteadyBatch(
            prompt_tokens=prompt_tokens, new_tokens=new_tokens, decode_iterations=iterations
        )
        encode_batch = min(max(1, round(steady.encode_batch(decode_batch))), decode_batch)
    return _Variables(
        encode_batch=encode_batch,
        decode_batch=decode_batch,
        iterations=iterations,
        prefill=min(max(1, math.floor(move.prefill * now.prefill)), decode_batch),
        threshold=now.threshold if move.threshold is None else move.threshold,
    )


def _variables(plan: Plan) -> _Variables:
    schedule = plan.schedule
    assert schedule is not None
    assert schedule.encode_batch is not None
    assert schedule.decode_batch is not None
    assert schedule.decode_iterations is not None
    return _Variables(
        encode_batch=schedule.encode_batch,
        decode_batch=schedule.decode_batch,
        iterations=schedule.decode_iterations,
        prefill=plan.micro_batching.prefill,
        threshold=schedule.threshold,
    )


def _with(plan: Plan, found: _Variables) -> Plan:
    schedule = plan.schedule
    assert schedule is not None
    sizes = plan.micro_batching
    if found.decode_batch != schedule.decode_batch:
        sizes = replace(sizes, decode=math.ceil(found.decode_batch / len(plan.stages)))
    return replace(
        plan,
        schedule=replace(
            schedule,
            encode_batch=found.encode_batch,
            decode_batch=found.decode_batch,
            decode_iterations=found.iterations,
            threshold=found.threshold,
        ),
        micro_batching=MicroBatching(prefill=found.prefill, decode=sizes.decode),
    )
