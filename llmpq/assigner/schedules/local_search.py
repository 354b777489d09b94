"""Local search around an RRA schedule, each neighbour evaluated by the simulator.

The closed form assumes that a cycle ends before the next one begins. In a pipeline prompts follow
the last decode steps of the old cycle, so encoding more often costs less than it says, and a batch
that is refilled at every encoding (a threshold of 0) has a higher throughput. With a bound for 99 %
of the requests the decoding batch varies too. A neighbour encodes the ``B_E`` that its ``B_D`` and
``N_D`` need.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from llmpq.assigner.schedules.steady_state import SteadyBatch
from llmpq.spec.lengths import LengthDistribution
from llmpq.spec.plan import MicroBatching, Plan

LEAST_GAIN = 1.003
"""Smaller gains are due to the trace."""
ALWAYS_REFILL = 0.0
"""The threshold with which every encoding refills the decoding batch."""
_ROUNDS = 3

Score = Callable[[Plan], float]
"""Simulated requests a second of a plan; 0 when it breaks the bound or does not fit."""


class Move(NamedTuple):
    """A step to a neighbour: factors on its variables, and a new threshold unless ``None``."""

    iterations: float = 1.0
    decode_batch: float = 1.0
    prefill: float = 1.0
    threshold: float | None = None


CYCLE_MOVES = (
    Move(threshold=ALWAYS_REFILL),
    Move(iterations=0.5),
    Move(iterations=0.7),
    Move(prefill=2.0),
    Move(prefill=0.5),
    Move(iterations=1.4),
    Move(iterations=2.0),
)
"""Moves of any schedule, in this order."""
BATCH_MOVES = (
    Move(decode_batch=1.25),
    Move(decode_batch=1.1),
    Move(decode_batch=1.25, iterations=2.0),
    Move(decode_batch=0.9),
    Move(decode_batch=0.9, iterations=0.5),
)
"""More moves where a bound, and not the number of slots, limits the decoding batch."""
MAX_EVALUATIONS = 1 + _ROUNDS * (len(CYCLE_MOVES) + len(BATCH_MOVES))


def local_search(
    plan: Plan,
    prompt_tokens: LengthDistribution,
    new_tokens: LengthDistribution,
    score: Score,
    *,
    moves: tuple[Move, ...] = CYCLE_MOVES,
) -> list[Plan]:
    """Return ever better RRA plans, from the given one to a local optimum.

    ``score`` is called once for each plan; ``moves`` are tried in turn from the best plan so far.
    """
    path, best_score = [plan], score(plan)
    seen = {(plan.schedule, plan.micro_batching)}
    for _ in range(_ROUNDS):
        start = path[-1]
        for move in moves:
            candidate = _moved(path[-1], move, prompt_tokens, new_tokens)
            key = candidate.schedule, candidate.micro_batching
            if key in seen:
                continue
            seen.add(key)
            reached = score(candidate)
            if reached > LEAST_GAIN * best_score:
                path.append(candidate)
                best_score = reached
        if path[-1] is start:
            break
    return path


def _moved(
    plan: Plan, move: Move, prompt_tokens: LengthDistribution, new_tokens: LengthDistribution
) -> Plan:
    """Return the neighbour, each variable within its range."""
    schedule, sizes = plan.schedule, plan.micro_batching
    assert schedule is not None
    assert schedule.encode_batch is not None
    assert schedule.decode_batch is not None
    assert schedule.decode_iterations is not None
    slots, longest = plan.workload.batch, max(1, new_tokens.longest - 1)
    iterations = min(max(1, round(move.iterations * schedule.decode_iterations)), longest)
    decode_batch = min(max(1, round(move.decode_batch * schedule.decode_batch)), slots)
    encode_batch, decode = schedule.encode_batch, sizes.decode
    if (decode_batch, iterations) != (schedule.decode_batch, schedule.decode_iterations):
        steady = SteadyBatch(
            prompt_tokens=prompt_tokens, new_tokens=new_tokens, decode_iterations=iterations
        )
        encode_batch = min(max(1, round(steady.encode_batch(decode_batch))), decode_batch)
    if decode_batch != schedule.decode_batch:
        decode = math.ceil(decode_batch / len(plan.stages))
    prefill = min(max(1, math.floor(move.prefill * sizes.prefill)), decode_batch)
    return replace(
        plan,
        schedule=replace(
            schedule,
            encode_batch=encode_batch,
            decode_batch=decode_batch,
            decode_iterations=iterations,
            threshold=schedule.threshold if move.threshold is None else move.threshold,
        ),
        micro_batching=MicroBatching(prefill=prefill, decode=decode),
    )
