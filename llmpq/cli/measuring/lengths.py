"""llmpq-profile lengths: learn to predict the length of an answer from its prompt."""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmpq.batching.length.learned import (
    Answered,
    FitReport,
    fit_length_model,
    write_length_model,
)
from llmpq.cli.common import print_json, require
from llmpq.errors import SpecError
from llmpq.options.declare import add_options, read_options
from llmpq.options.measure import LengthsOptions, Measurements
from llmpq.spec.catalog import resolve_model
from llmpq.spec.workload import load_trace

LEAST_EXPLAINED = 0.01
"""Share of the variance below which a predictor says nothing."""


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add ``lengths`` to the commands."""
    lengths = commands.add_parser(
        "lengths", help="learn to predict the length of an answer from its prompt"
    )
    add_options(lengths, LengthsOptions)
    own = {"help": "file of the predictor, for --predictor (JSON)"}
    add_options(lengths, Measurements, "output", "seed", output=own)
    lengths.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    asked = read_options(LengthsOptions, options)
    if asked.trace is not None:
        answered = [Answered(one.prompt_tokens, one.new_tokens) for one in load_trace(asked.trace)]
        vocab_size, source = None, [("trace", asked.trace.name)]
    else:
        assert asked.model is not None
        answered = _read_answers(asked)
        model, _ = resolve_model(asked.model)
        vocab_size, source = model.vocab_size, [("model", model.name)]
    source.append(("command", options.command))
    model_of_lengths, report = fit_length_model(
        answered, vocab_size=vocab_size, seed=options.seed, provenance=tuple(source)
    )
    write_length_model(options.output, model_of_lengths)
    if options.json:
        record = asdict(report) | {"accuracy": dict(report.accuracy)}
        print_json({"output": str(options.output), **record})
    else:
        print(_text(report))
        print(f"written        {options.output}")
    return 0


def _text(report: FitReport) -> str:
    bins = ", ".join(
        f"{share:.0%} of {count} (by chance {1 / int(count):.0%})"
        for count, share in report.accuracy
    )
    lines = [
        f"answers        {report.samples}, a fifth of them held out in turn",
        f"explained      {max(0.0, report.explained):.0%} of the variance of log(tokens)",
        f"ranks          correlation {report.rank_correlation:.2f}",
        f"right bin      {bins}",
    ]
    if report.explained < LEAST_EXPLAINED:
        lines.append("               these prompts do not say how long their answers are")
    return "\n".join(lines)


def _read_answers(asked: LengthsOptions) -> list[Answered]:
    """Return the prompts that have an answer, in the order of the prompts."""
    assert asked.prompts is not None
    assert asked.results is not None
    if asked.format == "openai_batch":
        prompts, lengths = _read_batch(asked)
    else:
        prompts, lengths = _read_own(asked)
    found = [
        Answered(len(tokens), lengths[id], tokens)
        for id, tokens in prompts.items()
        if id in lengths and tokens
    ]
    if not found:
        raise SpecError(f"{asked.results}: found no answer to a prompt of {asked.prompts}")
    return found


def _read_own(asked: LengthsOptions) -> tuple[dict[Any, tuple[int, ...]], dict[Any, int]]:
    require("tokenizers", "transformers")
    from llmpq.dist.io.model_files import load_tokenizer
    from llmpq.dist.io.prompts import read_prompts
    from llmpq.dist.io.results import read_results

    assert asked.prompts is not None
    assert asked.results is not None
    prompts = read_prompts(asked.prompts)
    tokenizer = None
    if any(prompt.token_ids is None for prompt in prompts):
        tokenizer = load_tokenizer(Path(str(asked.model)))
        if tokenizer is None:
            raise SpecError(f"--model: found no tokenizer in {asked.model}, expected one")
    tokens = {
        prompt.id: prompt.token_ids
        if prompt.token_ids is not None or tokenizer is None
        else tuple(tokenizer.encode(prompt.text or ""))
        for prompt in prompts
    }
    lengths = {one.id: len(one.token_ids) for one in read_results(asked.results)}
    return {id: found for id, found in tokens.items() if found is not None}, lengths


def _read_batch(asked: LengthsOptions) -> tuple[dict[Any, tuple[int, ...]], dict[Any, int]]:
    require("tokenizers", "transformers", "fastapi", "jinja2")
    from llmpq.server.batch import batch_prompts, read_answer_lengths

    assert asked.prompts is not None
    assert asked.results is not None
    prompts = asyncio.run(batch_prompts(asked.prompts, Path(str(asked.model))))
    return dict(prompts), dict(read_answer_lengths(asked.results))
