"""llmpq-dist doctor: check every rank of a strategy without loading weights.

Exit status: 0 if a run can start, 2 with findings, 4 if a rank did not start or a link failed.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmpq.cli.common import make_parser, print_json, require, run_command
from llmpq.cli.run_options import (
    HostProgress,
    add_host_options,
    host_words,
    hosts_of,
    rendezvous_of,
    transport_of,
)
from llmpq.dist import model_dir_of, run_job
from llmpq.dist.io.job import Job
from llmpq.dist.io.prompts import Prompt, write_prompts
from llmpq.dist.metrics.progress import SilentProgress
from llmpq.errors import SpecError
from llmpq.options.declare import add_options, read_options, values_of
from llmpq.options.run import PromptFiles, RunOptions
from llmpq.spec.fields import read_json
from llmpq.spec.plan import read_plan
from llmpq.units import format_bytes, format_seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_command(_parser(), _run, argv)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "llmpq-dist doctor", "Check every rank of a strategy without loading weights."
    )
    model = {"help": "weights (default: the plan's own)"}
    strategy = {"required": True}
    names = ("strat_file_name", "model")
    add_options(parser, PromptFiles, *names, strat_file_name=strategy, model=model)
    add_options(parser, RunOptions, "step_timeout_s")
    add_host_options(parser)
    return parser


def _run(options: argparse.Namespace) -> int:
    plan = read_plan(options.strat_file_name)
    require("torch", "transformers")
    with tempfile.TemporaryDirectory(prefix="llmpq-") as name:
        output, prompts = Path(name) / "doctor.json", Path(name) / "prompts.jsonl"
        write_prompts(prompts, [Prompt(id="none", where="", token_ids=(0,), max_new_tokens=1)])
        job = Job(
            strategy=Path(options.strat_file_name).resolve(),
            model_dir=model_dir_of(plan, options.model),
            prompts=prompts,
            output=output,
            task="doctor",
            rendezvous=rendezvous_of(options),
            **values_of(read_options(RunOptions, options, transport=transport_of(options))),
        )
        place, progress = hosts_of(options), None
        if place.num_nodes > 1:
            words = host_words(options, "llmpq-dist", "doctor")
            progress = HostProgress(SilentProgress(), place, plan, words)
        run_job(job, hosts=place, progress=progress)
        if not output.is_file():
            return 0  # the host of the master reports the findings
        found = read_json(output)
    if options.json:
        print_json(found)
    else:
        print(_text(found))
    return 0 if found["status"] == "ready" else SpecError.exit_status


def _text(found: dict[str, Any]) -> str:
    lines = []
    for one in found["ranks"]:
        line = f"{one['name']}: {format_bytes(one['available_bytes'])} available"
        if "link" in one:
            link = one["link"]
            line += (
                f", to the next over {link['transport_to_next']}, from the one before "
                f"{format_seconds(link['latency_s'])}, {format_bytes(link['bytes_per_s'])}/s"
            )
        lines.append(line)
    for one in found["findings"]:
        lines.append(f"{one['level']}: {one['name']}: {one['check']}: {one['message']}")
    return "\n".join([*lines, found["status"]])
