"""llmpq run: answer one prompt on this host."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict

from llmpq.cli.common import INTERRUPTED, make_parser, print_json, require, run_command
from llmpq.cli.front.answers import add_answer_options, loaded, sampling_of, show_answer
from llmpq.cli.front.host_plan import (
    MODEL_HELP,
    add_host_plan_options,
    host_plan,
    plan_decisions,
    say_plan,
)
from llmpq.errors import SpecError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    return run_command(_parser(), _run, argv)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "llmpq run", "Answer one prompt on this host; the answer alone is printed."
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "--prompt", "-p", metavar="TEXT", help="what to continue (default: standard input)"
    )
    add_answer_options(parser)
    add_host_plan_options(parser.add_argument_group("plan"), 1)
    return parser


def _run(options: argparse.Namespace) -> int:
    prompt = sys.stdin.read() if options.prompt is None else options.prompt
    if not prompt:
        raise SpecError("--prompt: found an empty text, expected at least one character")
    sampling_of(options, 1)
    found = host_plan(options.model, options)
    require("torch", "transformers", "safetensors")
    if not options.json:
        say_plan(found)
    sampling = sampling_of(options, found.plan.workload.new_tokens)
    with loaded(found) as pipeline:
        shown = show_answer(pipeline, prompt, sampling, is_quiet=options.json)
    if options.json:
        print_json({**asdict(shown), **plan_decisions(found)})
    return INTERRUPTED if shown.finish_reason == "cancelled" else 0


if __name__ == "__main__":
    sys.exit(main())
