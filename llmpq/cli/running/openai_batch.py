"""llmpq-dist --format openai_batch: answer a file of requests in OpenAI's Batch format."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from llmpq.cli.common import print_json, require
from llmpq.cli.engine_options import start_engine
from llmpq.cli.run_options import MAX_LISTED
from llmpq.dist import model_dir_of
from llmpq.errors import SpecError
from llmpq.spec.plan import Plan

if TYPE_CHECKING:
    from llmpq.server.batch import BatchSummary

PACKAGES = ("torch", "transformers", "fastapi", "prometheus_client", "jinja2", "tokenizers")


def answer_batch(options: argparse.Namespace, plan: Plan) -> int:
    """Answer the requests of ``--prompts`` and return the exit status.

    Raises:
        LlmpqError: a file or an option cannot be used, or the engine failed.
    """
    if options.nnodes != 1 or options.no_auto:
        raise SpecError("--format openai_batch: found several hosts, expected one")
    require(*PACKAGES)
    from llmpq.server.batch import read_batch

    source = Path(options.prompts)
    _, refused = read_batch(source)
    if refused and options.bad_prompts == "refuse":
        raise refused[0]
    start_s = time.monotonic()
    summary = asyncio.run(_answer(options, plan, source))
    elapsed_s = time.monotonic() - start_s
    if options.json:
        print_json(
            {
                "status": "done",
                "requests": summary.requests,
                "errors": summary.errors,
                "skipped": summary.skipped,
                "prompt_tokens": summary.prompt_tokens,
                "generated_tokens": summary.generated_tokens,
                "elapsed_s": elapsed_s,
            }
        )
    else:
        print(
            f"{summary.requests} requests answered, {summary.errors} of them with an error; "
            f"{summary.generated_tokens} tokens in {elapsed_s:.1f} s with loading"
        )
    return _report_refused(summary.refused)


async def _answer(options: argparse.Namespace, plan: Plan, source: Path) -> BatchSummary:
    from llmpq.server.app import make_service
    from llmpq.server.batch import run_batch
    from llmpq.server.text.tokenizer import load_server_tokenizer

    folder = model_dir_of(plan, options.model)
    tokenizer = asyncio.create_task(asyncio.to_thread(load_server_tokenizer, folder))
    engine = await start_engine(options, plan, folder)
    try:
        names = (plan.model.name, folder.name)
        service = make_service(engine, await tokenizer, folder, names)
        with contextlib.closing(service):
            return await run_batch(service, source, Path(options.output), resume=options.resume)
    finally:
        await engine.close()


def _report_refused(refused: tuple[str, ...]) -> int:
    for text in refused[:MAX_LISTED]:
        print(f"llmpq-dist: error: not served: {text}", file=sys.stderr)
    if len(refused) > MAX_LISTED:
        print(f"llmpq-dist: error: {len(refused)} in all", file=sys.stderr)
    return SpecError.exit_status if refused else 0
