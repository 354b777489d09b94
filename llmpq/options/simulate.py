"""Options of ``llmpq-sim``: the requests that are played, and the online engine."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Annotated, Literal

from llmpq.options.declare import Option, check_options
from llmpq.options.server import RoutingOptions
from llmpq.routing import BALANCERS
from llmpq.spec.plan import ACCEPTANCE_RATE
from llmpq.spec.runtime_constants import POLL_S
from llmpq.spec.workload import ARRIVALS


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayOptions:
    """The strategy that is simulated, and its requests: by default those of its workload."""

    strategy: Annotated[str, Option(metavar="FILE", help="strategy file of llmpq-algo")]
    trace: Annotated[
        str | None,
        Option(
            metavar="FILE",
            help="CSV of arrival_s,prompt_tokens,new_tokens, an Azure trace, or Mooncake's JSONL",
        ),
    ] = None
    lengths: Annotated[
        str | None,
        Option(metavar="FILE.json", help="distribution of answer lengths to draw from"),
    ] = None
    prompt_lengths: Annotated[
        str | None,
        Option(
            metavar="FILE.json",
            help="with --lengths: distribution of prompt lengths (default: that of the strategy)",
        ),
    ] = None
    requests: Annotated[
        int, Option(help="with --lengths: number of requests (default %(default)s)")
    ] = 1000
    rate: Annotated[
        float | None,
        Option(
            metavar="PER_S",
            help="with --lengths: rate of Poisson arrivals; with --arrivals: mean rate",
        ),
    ] = None
    seed: Annotated[int, Option(help="seed of the draws (default %(default)s)")] = 0
    too_long: Annotated[
        Literal["refuse", "skip", "cut"],
        Option(help="handling of requests longer than the strategy's slots (default %(default)s)"),
    ] = "refuse"
    trace_out: Annotated[
        str | None, Option(metavar="FILE.json", help="write the timeline for Perfetto")
    ] = None


def _slice(text: str) -> tuple[int, int | None]:
    first, _, end = text.partition(":")
    try:
        return int(first or 0), int(end) if end else None
    except ValueError:
        raise argparse.ArgumentTypeError(f"found '{text}', expected FIRST:END") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSimulation:
    """What is simulated beside the engine's own options: drafts, arrivals, replicas."""

    engine: Annotated[
        bool, Option(help="simulate the online engine instead of a batching policy")
    ] = False
    unit: Annotated[
        float | None,
        Option(
            metavar="TOKENS",
            help="larry: unit of prompt lengths (default: mean prompt so far)",
        ),
    ] = None
    num_speculative_tokens: Annotated[
        int | None,
        Option(
            metavar="K",
            help="speculative decoding: draft tokens of a sequence in a step (default: those of "
            "the strategy's draft model, else 0)",
        ),
    ] = None
    acceptance_rate: Annotated[
        float | None,
        Option(
            maximum=1,
            metavar="A",
            help="probability that a draft token is right, once those before it are (default: that "
            f"of the strategy's draft model, else {ACCEPTANCE_RATE:g})",
        ),
    ] = None
    draft_cost: Annotated[
        float | None,
        Option(
            above=0,
            metavar="C",
            help="drafts are those of a draft model beside stage 0, one token of which takes C "
            "decode steps of a sequence (default: the strategy's draft model, else prompt lookup)",
        ),
    ] = None
    max_tokens: Annotated[
        int | None,
        Option(
            metavar="N",
            help="longest answer that a request allows (default: its answer), for no_preempt",
        ),
    ] = None
    trace_slice: Annotated[
        tuple[int, int | None] | None,
        Option(
            parse=_slice,
            metavar="FIRST:END",
            help="simulate these requests of the trace only",
        ),
    ] = None
    arrivals: Annotated[
        str,
        Option(
            choices=("trace", *ARRIVALS),
            help="arrival times: those of the requests (default), or random ones at --rate",
        ),
    ] = "trace"
    cv: Annotated[float, Option(help="gamma: variation of the gaps (default %(default)g)")] = 2.0
    rate_scale: Annotated[
        tuple[float, ...],
        Option(metavar="X", help="simulate at these multiples of the rate (default 1)"),
    ] = (1.0,)
    ttft_bound: Annotated[
        float | None,
        Option(metavar="S", help="find the rate at which the 95th percentile of TTFT reaches this"),
    ] = None
    replicas: Annotated[
        int,
        Option(
            minimum=1,
            metavar="N",
            help="simulate N engines behind a load balancer (default %(default)s)",
        ),
    ] = 1
    balancer: Annotated[
        str,
        Option(
            choices=tuple(BALANCERS), help="which replica takes a request (default %(default)s)"
        ),
    ] = RoutingOptions.balancer
    poll_s: Annotated[
        float,
        Option(
            flags=("poll",),
            above=0,
            metavar="S",
            help="seconds between two readings of the replicas' statistics (default %(default)g)",
        ),
    ] = POLL_S
    plot: Annotated[
        str | None,
        Option(metavar="FILE", help="draw TTFT and TGT over the rate, and their distributions"),
    ] = None

    def __post_init__(self) -> None:
        check_options(self)
