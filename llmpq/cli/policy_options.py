"""The options that choose a batching policy and what it knows of answer lengths."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from llmpq.batching.length import PREDICTOR_NAMES, Prediction
from llmpq.batching.policies.multibin import quantile_boundaries
from llmpq.errors import SpecError
from llmpq.spec.plan import Plan
from llmpq.spec.schedule import POLICY_NAMES, Schedule, default_schedule


def add_policy_options(parser: argparse.ArgumentParser) -> None:
    """Add policy, bins and predictor."""
    group = parser.add_argument_group("batching")
    group.add_argument(
        "--policy",
        choices=POLICY_NAMES,
        help="batching policy (default: the strategy's own schedule, else hybrid)",
    )
    group.add_argument(
        "--bins",
        type=int,
        metavar="K",
        help="multibin: bins of equally many requests by predicted length (default 4)",
    )
    group.add_argument(
        "--predictor",
        choices=PREDICTOR_NAMES,
        default="oracle",
        help="multibin: what is known of an answer's length (default oracle)",
    )
    group.add_argument(
        "--predictor_error",
        type=float,
        default=0.3,
        metavar="SIGMA",
        help="of --predictor noisy: standard deviation of the logarithm (default 0.3)",
    )


def add_drift_options(parser: argparse.ArgumentParser) -> None:
    """Add what a run does when answers leave the lengths that its schedule was made for."""
    group = parser.add_argument_group("drift of answer lengths (schedules of rra and waa)")
    group.add_argument(
        "--replan",
        action="store_true",
        help="rra: encode as often as the answers' lengths ask for, without loading anew",
    )
    group.add_argument(
        "--lengths_out",
        metavar="FILE.json",
        help="write the lengths of all answers, for llmpq-algo --lengths (default: beside "
        "--output, and only when they have drifted)",
    )


def schedule_of(options: argparse.Namespace, plan: Plan, new_tokens: Sequence[int]) -> Schedule:
    """Return the schedule to run: the one asked for, else the strategy's, else hybrid.

    Args:
        options: parsed.
        plan: the strategy.
        new_tokens: lengths that bins are made for.

    Raises:
        SpecError: options that do not go together.
    """
    own = plan.schedule
    name = options.policy or (own.policy if own is not None else "hybrid")
    if options.bins is not None and (name != "multibin" or options.bins < 1):
        raise SpecError(
            f"--bins: found {options.bins} with policy '{name}', "
            "expected at least 1, with --policy multibin"
        )
    if own is not None and own.policy == name and options.bins is None:
        return own
    schedule = default_schedule(name, plan.workload.batch)
    if name == "multibin":
        bins = 4 if options.bins is None else options.bins
        schedule = replace(schedule, boundaries=quantile_boundaries(new_tokens, bins))
    return schedule


def prediction_of(options: argparse.Namespace) -> Prediction:
    """Return what a policy is told of answer lengths."""
    return Prediction(predictor=options.predictor, error=options.predictor_error)
