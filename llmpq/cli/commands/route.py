"""llmpq-route: one OpenAI API in front of several replicas.

The line ``ready http://HOST:PORT`` on standard output and standard error says that requests are
routed. Replicas are servers of this project or of vLLM.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence

from llmpq.cli.common import make_parser, require, run_command
from llmpq.cli.server_options import (
    add_address_options,
    add_listen_limits,
    listen_options,
    say_ready,
)
from llmpq.errors import SpecError
from llmpq.routing import BALANCERS, load_balancer
from llmpq.spec.runtime_constants import FIRST_BYTE_S, POLL_S

SERVER_PACKAGES = ("aiohttp", "fastapi", "uvicorn", "httptools", "prometheus_client")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_command(_parser(), _run, argv)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("llmpq-route", "Route requests of OpenAI's API to replicas of a model.")
    replicas = parser.add_argument_group("replicas")
    replicas.add_argument(
        "--replica",
        nargs="+",
        required=True,
        metavar="URL",
        help="addresses of the replicas, http://HOST:PORT",
    )
    replicas.add_argument(
        "--balancer",
        choices=BALANCERS,
        default="sal_seconds",
        help="which replica takes a request (default sal_seconds)",
    )
    replicas.add_argument(
        "--poll_s",
        type=float,
        default=POLL_S,
        metavar="SECONDS",
        help=f"time between two readings of the replicas' statistics (default {POLL_S:g})",
    )
    replicas.add_argument("--seed", type=int, default=0, help="of random balancers (default 0)")
    add_address_options(parser)
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--first_byte_timeout",
        type=float,
        default=FIRST_BYTE_S,
        metavar="SECONDS",
        help="time to the first byte of a streamed answer, ten times as long for a whole one; then "
        f"another replica is tried (default {FIRST_BYTE_S:g})",
    )
    add_listen_limits(limits)
    return parser


def _run(options: argparse.Namespace) -> int:
    require(*SERVER_PACKAGES)
    from llmpq.server.router.lifecycle import run_router

    if not 0 < options.poll_s <= 60:
        raise SpecError(f"--poll_s: found {options.poll_s:g}, expected more than 0, at most 60")
    if not 0 < options.first_byte_timeout < math.inf:
        raise SpecError(
            f"--first_byte_timeout: found {options.first_byte_timeout:g}, expected more than 0"
        )
    if len(set(options.replica)) < len(options.replica):
        raise SpecError("--replica: found an address twice, expected each once")
    run_router(
        listen_options(options),
        options.replica,
        load_balancer(options.balancer, seed=options.seed),
        options.poll_s,
        lambda url: say_ready(options, {"url": url, "replicas": options.replica}),
        options.first_byte_timeout,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
