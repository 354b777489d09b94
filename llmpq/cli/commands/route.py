"""llmpq-route: one OpenAI API in front of several replicas.

The line ``ready http://HOST:PORT`` on standard output and standard error says that requests are
routed. Replicas are servers of this project or of vLLM.
"""

from __future__ import annotations

import argparse
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
from llmpq.options.declare import add_options, read_options
from llmpq.options.server import RouterOptions
from llmpq.routing import load_balancer

SERVER_PACKAGES = ("aiohttp", "fastapi", "uvicorn", "httptools", "prometheus_client")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_command(_parser(), _run, argv)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("llmpq-route", "Route requests of OpenAI's API to replicas of a model.")
    replicas = parser.add_argument_group("replicas")
    add_options(replicas, RouterOptions, "replica", "balancer", "poll_s", "seed")
    add_address_options(parser)
    limits = parser.add_argument_group("limits")
    add_options(limits, RouterOptions, "first_byte_timeout_s")
    add_listen_limits(limits)
    return parser


def _run(options: argparse.Namespace) -> int:
    require(*SERVER_PACKAGES)
    from llmpq.server.router.lifecycle import run_router

    asked = read_options(RouterOptions, options)
    if len(set(options.replica)) < len(options.replica):
        raise SpecError("--replica: found an address twice, expected each once")
    run_router(
        listen_options(options),
        options.replica,
        load_balancer(asked.balancer, seed=asked.seed),
        asked.poll_s,
        lambda url: say_ready(options, {"url": url, "replicas": options.replica}),
        asked.first_byte_timeout_s,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
