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
from llmpq.cli.engine_options import engine_words, launch_engine, run_stages
from llmpq.cli.run_options import MAX_LISTED, HostProgress, host_words, stated_hosts
from llmpq.dist import Hosts, model_dir_of
from llmpq.dist.metrics.progress import RunProgress, SilentProgress
from llmpq.errors import SpecError
from llmpq.spec.plan import Plan

if TYPE_CHECKING:
    from llmpq.cli.front.planned import PlannedModel
    from llmpq.cli.workers.hosts import OtherHosts
    from llmpq.server.batch import BatchSummary

PACKAGES = ("torch", "transformers", "fastapi", "prometheus_client", "jinja2", "tokenizers")


def answer_batch(options: argparse.Namespace, plan: Plan, model: PlannedModel | None = None) -> int:
    """Answer the requests of ``--prompts`` and return the exit status.

    Args:
        options: of the command.
        plan: the strategy.
        model: whose plan it is, where it was made here; other hosts run ranks of it, too.

    Raises:
        LlmpqError: a file or an option cannot be used, or the engine failed.
    """
    if options.no_auto:
        raise SpecError("--format openai_batch: found --no_auto, expected hosts that start ranks")
    hosts = stated_hosts(options)
    progress: RunProgress | None = None
    if hosts.num_nodes > 1:
        words = host_words(options, "llmpq-dist")
        progress = on_host = HostProgress(SilentProgress(), hosts, plan, words)
        if hosts.node_rank > 0:
            require("torch", "transformers")
            run_stages(options, plan, model_dir_of(plan, options.model), hosts, on_host)
            on_host.say("done")
            return 0
    require(*PACKAGES)
    from llmpq.server.batch import read_batch

    source = Path(options.prompts)
    _, refused = read_batch(source)
    if refused and options.bad_prompts == "refuse":
        raise refused[0]
    start_s = time.monotonic()
    others = None if model is None else model.others
    if model is not None and others is not None:
        words = engine_words(options)
        hosts = others.start(model.found, "serve", words, replan=model.replan)
        if hosts.num_nodes > 1:
            progress = HostProgress(SilentProgress(), hosts, plan, None)
    summary = asyncio.run(_answer(options, plan, source, hosts, progress, others))
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


async def _answer(
    options: argparse.Namespace,
    plan: Plan,
    source: Path,
    hosts: Hosts,
    progress: RunProgress | None,
    others: OtherHosts | None,
) -> BatchSummary:
    from llmpq.server.app import make_service
    from llmpq.server.batch import run_batch
    from llmpq.server.text.tokenizer import load_server_tokenizer

    folder = model_dir_of(plan, options.model)
    tokenizer = asyncio.create_task(asyncio.to_thread(load_server_tokenizer, folder))
    launched = launch_engine(options, plan, folder, hosts=hosts, progress=progress, monitor=others)
    engine = await launched.ready()
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
