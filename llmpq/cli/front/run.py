"""llmpq run: answer one prompt on this host."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict

from llmpq.cli.common import INTERRUPTED, make_parser, print_json, require, run_command
from llmpq.cli.front.answers import LoadedModel, add_answer_options, sampling_of
from llmpq.cli.front.host_plan import plan_decisions, say_plan
from llmpq.cli.front.plan_options import add_host_plan_options
from llmpq.errors import SpecError
from llmpq.options.declare import add_options
from llmpq.options.run import AnswerOptions


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    return run_command(_parser(), _run, argv)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "llmpq run", "Answer one prompt on this host; the answer alone is printed."
    )
    add_options(parser, AnswerOptions, "model", "prompt")
    add_answer_options(parser)
    add_host_plan_options(parser.add_argument_group("plan"))
    return parser


def _run(options: argparse.Namespace) -> int:
    prompt = sys.stdin.read() if options.prompt is None else options.prompt
    if not prompt:
        raise SpecError("--prompt: found an empty text, expected at least one character")
    sampling_of(options, 1)
    with LoadedModel(options.model, options, "llmpq run") as model:
        require("torch", "transformers", "safetensors")
        if not options.json:
            say_plan(model.found)
        model.load()
        sampling = sampling_of(options, model.found.plan.workload.new_tokens)
        shown = model.answer(prompt, sampling, is_quiet=options.json)
    if options.json:
        print_json({**asdict(shown), **plan_decisions(model.found)})
    return INTERRUPTED if shown.finish_reason == "cancelled" else 0


if __name__ == "__main__":
    sys.exit(main())
