"""llmpq: one program with verbs; each is a command that also has a name of its own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

from llmpq.cli.common import make_parser, run_command
from llmpq.errors import SpecError
from llmpq.options.declare import add_options
from llmpq.options.run import Program

VERBS = {
    "chat": ("llmpq.cli.front.chat", "talk to a model: a folder, a GGUF file, or one of the hub"),
    "run": ("llmpq.cli.front.run", "answer one prompt"),
    "serve": ("llmpq.cli.commands.serve", "answer OpenAI's API over HTTP (llmpq-serve)"),
    "worker": ("llmpq.cli.workers.command", "lend this host's devices to serve, chat and run"),
    "plan": ("llmpq.cli.commands.algo", "decide which device runs which layers (llmpq-algo)"),
    "check": ("llmpq.cli.commands.check", "explain a plan, or what fits (llmpq-check)"),
    "dist": ("llmpq.cli.commands.dist", "answer a file of prompts (llmpq-dist)"),
    "profile": ("llmpq.cli.commands.profile", "measure devices and links (llmpq-profile)"),
    "sim": ("llmpq.cli.commands.sim", "simulate a plan on a trace (llmpq-sim)"),
    "route": ("llmpq.cli.commands.route", "balance requests over servers (llmpq-route)"),
    "apps": ("llmpq.cli.apps.command", "run applications of several models (llmpq-apps)"),
    "quantize": ("llmpq.cli.commands.quantize", "write a quantized checkpoint (llmpq-quantize)"),
    "eval": ("llmpq.cli.commands.evals", "measure perplexity and divergence (llmpq-eval)"),
    "indicator": (
        "llmpq.cli.commands.indicator",
        "find the layers that tolerate few bits (llmpq-indicator)",
    ),
}
"""Of each verb the module whose ``main`` it calls, and what it does."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command of the first word; return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in VERBS:
        status: int = import_module(VERBS[words[0]][0]).main(words[1:])
        return status
    return run_command(_parser(), _run, words)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "llmpq", "Run a large language model on the devices of this host, or of a mixed cluster."
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    rows = "".join(f"  {verb:<10} {text}\n" for verb, (_, text) in VERBS.items())
    parser.epilog = (
        f"verbs:\n{rows}\nllmpq VERB --help lists the options of one. Start with: llmpq chat MODEL"
    )
    add_options(parser, Program, words={"nargs": argparse.REMAINDER})
    return parser


def _run(options: argparse.Namespace) -> int:
    """Say what is wrong with the first word."""
    if options.verb is None:
        raise SpecError(f"found no verb, expected one of {', '.join(VERBS)}; see llmpq --help")
    near = get_close_matches(options.verb, VERBS, 1)
    meant = f" (did you mean {near[0]}?)" if near else ""
    raise SpecError(
        f"found '{options.verb}', expected one of {', '.join(VERBS)}{meant}; see llmpq --help"
    )


if __name__ == "__main__":
    sys.exit(main())
