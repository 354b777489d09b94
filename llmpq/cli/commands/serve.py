"""llmpq-serve: answer OpenAI's API over HTTP with the ranks of a strategy.

HTTP and tokenizing are in this process, the ranks in processes of their own. The line ``ready
http://HOST:PORT`` on standard output and standard error says that requests are answered.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmpq.cli.common import make_parser, require, run_command
from llmpq.cli.engine_options import add_engine_options, check_engine_options, start_engine
from llmpq.cli.server_options import (
    add_address_options,
    add_listen_limits,
    at_least,
    listen_options,
    say_ready,
)
from llmpq.dist import model_dir_of
from llmpq.errors import SpecError
from llmpq.spec.plan import Plan, read_plan

if TYPE_CHECKING:
    from llmpq.server.admission import AdmissionLimits

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
    files.add_argument(
        "--served_model_name",
        nargs="+",
        metavar="NAME",
        help="names of the model in requests; answers use the first (default: the plan's)",
    )
    add_address_options(parser)
    _add_limit_options(parser)
    add_engine_options(parser)
    return parser


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
    add_listen_limits(limits)


def _run(options: argparse.Namespace) -> int:
    check_engine_options(options)
    _check_names(options)
    plan = read_plan(options.strat_file_name)
    model_dir = model_dir_of(plan, options.model)
    require("torch", "transformers", *SERVER_PACKAGES)
    from llmpq.server.admission import token_budget_for
    from llmpq.server.lifecycle import ServerOptions, run_server
    from llmpq.server.tokenizer import load_server_tokenizer

    admission = _admission(options, plan)
    if options.itl_bound is not None:
        options.token_budget = token_budget_for(plan, options.itl_bound)
    names = tuple(options.served_model_name or (plan.model.name,))
    server = ServerOptions(
        **vars(listen_options(options)), model_dir=model_dir, names=names, admission=admission
    )
    record = {
        "models": list(names),
        "max_num_queued_tokens": admission.max_num_queued_tokens,
        "token_budget": options.token_budget,
    }

    run_server(
        server,
        lambda: start_engine(options, plan, model_dir),
        load_server_tokenizer,
        lambda url: say_ready(options, {"url": url, **record}),
    )
    return 0


def _check_names(options: argparse.Namespace) -> None:
    """Check the names that the server gets."""
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
        max_num_queued_reqs=at_least("--max_num_queued_reqs", options.max_num_queued_reqs, 1),
        max_num_queued_tokens=at_least("--max_num_queued_tokens", tokens, 1),
        prefill_tokens_per_s=prefill_tokens_per_s(plan),
        decode_step_s=decode_round_s(plan),
    )


if __name__ == "__main__":
    sys.exit(main())
