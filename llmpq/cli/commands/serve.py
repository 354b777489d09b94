"""llmpq-serve: answer OpenAI's API over HTTP with the ranks of a strategy.

HTTP and tokenizing are in this process, the ranks in processes of their own. The line ``ready
http://HOST:PORT`` on standard output and standard error says that requests are answered.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmpq.cli.common import make_parser, print_json, require, run_command
from llmpq.cli.engine_options import add_engine_options, check_engine_options, start_engine
from llmpq.dist import model_dir_of
from llmpq.dist.launch.supervisor import DRAIN_TIMEOUT_S
from llmpq.errors import SpecError
from llmpq.spec.plan import Plan, read_plan

if TYPE_CHECKING:
    from llmpq.server.admission import AdmissionLimits

DEFAULT_PORT = 8000
MAX_PORT = 65535
SERVER_PACKAGES = ("fastapi", "uvicorn", "httptools", "prometheus_client", "jinja2", "tokenizers")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_command(_parser(), _run, argv)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("llmpq-serve", "Answer OpenAI's API with the ranks of a strategy.")
    files = parser.add_argument_group("files")
    files.add_argument("--strat_file_name", required=True, metavar="FILE", help="strategy file")
    files.add_argument(
        "--model", metavar="DIR", help="weights (default: the directory in the plan)"
    )
    _add_address_options(parser)
    _add_limit_options(parser)
    add_engine_options(parser)
    return parser


def _add_address_options(parser: argparse.ArgumentParser) -> None:
    address = parser.add_argument_group("address")
    address.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; one that other hosts can reach needs --api_key_file "
        "(default 127.0.0.1)",
    )
    address.add_argument(
        "--port",
        type=int,
        default=DEFAULT_PORT,
        help=f"port to listen on; 0 takes a free one (default {DEFAULT_PORT})",
    )
    address.add_argument(
        "--served_model_name",
        nargs="+",
        metavar="NAME",
        help="names of the model in requests; answers use the first (default: the plan's)",
    )
    address.add_argument(
        "--api_key_file",
        metavar="FILE",
        help="accepted API keys, one a line, at least 16 characters in all (mode 600)",
    )
    address.add_argument("--ssl_certfile", metavar="FILE.pem", help="certificate chain, for TLS")
    address.add_argument(
        "--ssl_keyfile", metavar="FILE.pem", help="its key (default: in --ssl_certfile)"
    )


def _add_limit_options(parser: argparse.ArgumentParser) -> None:
    limits = parser.add_argument_group("limits (above them requests are answered with 503)")
    limits.add_argument(
        "--max_num_queued_reqs",
        type=int,
        metavar="N",
        help="answers that wait or run at once (default: any number)",
    )
    tokens = limits.add_mutually_exclusive_group()
    tokens.add_argument(
        "--max_num_queued_tokens",
        type=int,
        metavar="N",
        help="prompt tokens that have not been computed (default: any number)",
    )
    tokens.add_argument(
        "--ttft_bound",
        type=float,
        metavar="SECONDS",
        help="bound on the time to the first token, from which --max_num_queued_tokens is computed "
        "by the plan's own cost model",
    )
    limits.add_argument(
        "--max_body_bytes",
        type=int,
        default=8 << 20,
        metavar="N",
        help="largest body of a request (default 8 MiB)",
    )
    limits.add_argument(
        "--drain_timeout",
        type=float,
        default=DRAIN_TIMEOUT_S,
        metavar="SECONDS",
        help="time for running answers after SIGTERM or Ctrl-C; a second signal ends the server at "
        f"once (default {DRAIN_TIMEOUT_S:g})",
    )


def _run(options: argparse.Namespace) -> int:
    check_engine_options(options)
    _check_names(options)
    plan = read_plan(options.strat_file_name)
    model_dir = model_dir_of(plan, options.model)
    require("torch", "transformers", *SERVER_PACKAGES)
    from llmpq.server.admission import token_budget_for
    from llmpq.server.lifecycle import ServerOptions, run_server
    from llmpq.server.tokenizer import load_server_tokenizer
    from llmpq.server.transport import TransportLimits

    admission = _admission(options, plan)
    if options.itl_bound is not None:
        options.token_budget = token_budget_for(plan, options.itl_bound)
    names = tuple(options.served_model_name or (plan.model.name,))
    server = ServerOptions(
        host=options.host,
        port=options.port,
        model_dir=model_dir,
        names=names,
        admission=admission,
        transport=TransportLimits(
            max_body_bytes=_at_least("--max_body_bytes", options.max_body_bytes, 1)
        ),
        api_key_file=_path(options.api_key_file),
        drain_timeout_s=_at_least("--drain_timeout", options.drain_timeout, 0),
        ssl_certfile=_path(options.ssl_certfile),
        ssl_keyfile=_path(options.ssl_keyfile),
    )

    def say_ready(url: str) -> None:
        print(f"ready {url}", file=sys.stderr, flush=True)
        if options.json:
            found: dict[str, Any] = {"url": url, "models": list(names)}
            found["max_num_queued_tokens"] = admission.max_num_queued_tokens
            print_json({**found, "token_budget": options.token_budget})
        else:
            print(f"ready {url}")
        sys.stdout.flush()

    run_server(
        server,
        lambda: start_engine(options, plan, model_dir),
        load_server_tokenizer,
        say_ready,
    )
    return 0


def _check_names(options: argparse.Namespace) -> None:
    """Check the address and the names that the server gets."""
    if not 0 <= options.port <= MAX_PORT:
        raise SpecError(f"--port: found {options.port}, expected 0 to {MAX_PORT}")
    if not all(options.served_model_name or ("the plan's",)):
        raise SpecError("--served_model_name: found an empty name, expected at least one character")


def _admission(options: argparse.Namespace, plan: Plan) -> AdmissionLimits:
    """Return the limits of the options; a bound in seconds becomes a number of tokens."""
    from llmpq.server.admission import (
        AdmissionLimits,
        decode_round_s,
        prefill_tokens_per_s,
        queued_tokens_for,
    )

    tokens = options.max_num_queued_tokens
    if options.ttft_bound is not None:
        tokens = queued_tokens_for(plan, options.ttft_bound)
    return AdmissionLimits(
        max_num_queued_reqs=_at_least("--max_num_queued_reqs", options.max_num_queued_reqs, 1),
        max_num_queued_tokens=_at_least("--max_num_queued_tokens", tokens, 1),
        prefill_tokens_per_s=prefill_tokens_per_s(plan),
        decode_step_s=decode_round_s(plan),
    )


def _at_least(name: str, value: Any, minimum: int) -> Any:
    if value is not None and not value >= minimum:
        raise SpecError(f"{name}: found {value}, expected at least {minimum}")
    return value


def _path(name: str | None) -> Path | None:
    return None if name is None else Path(name).resolve()


if __name__ == "__main__":
    sys.exit(main())
