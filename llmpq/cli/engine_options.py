"""Options of the engine that answers requests as they arrive, and its start."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

from llmpq.batching.queue_order import ALPHA, SERVED_ORDERS
from llmpq.cli.common import check_least
from llmpq.cli.options import (
    add_speculative_option,
    add_step_timeout_option,
    speculative_config_of,
)
from llmpq.cli.run_options import (
    DEFAULT_MAX_RESTARTS,
    add_store_options,
    store_directory,
    store_limit_bytes,
)
from llmpq.costmodel.memory import context_bytes
from llmpq.dist.async_engine import AsyncEngine
from llmpq.dist.io.generation import EngineClient
from llmpq.dist.io.job import MIN_STEP_TIMEOUT_S
from llmpq.dist.limited.form_checker import DEFAULT_FORM_TIMEOUT_S
from llmpq.errors import SpecError
from llmpq.spec import catalog
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.model import ModelSpec
from llmpq.spec.plan import Plan, draft_bytes
from llmpq.units import format_bytes


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the queue order, the token budget and what a rank needs."""
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--scheduler",
        choices=SERVED_ORDERS,
        default="fcfs",
        help="order in which waiting requests are admitted (default fcfs)",
    )
    engine.add_argument(
        "--alpha",
        type=float,
        help="--scheduler larry: weight of waiting, in mean prefill times of a prompt (default "
        f"{ALPHA:g}; 0 is shortest prompt first)",
    )
    budget = engine.add_mutually_exclusive_group()
    budget.add_argument(
        "--token_budget",
        type=int,
        metavar="N",
        help="tokens of a step (default: 1024, or fewer where the plan has less memory)",
    )
    budget.add_argument(
        "--itl_bound",
        type=float,
        metavar="SECONDS",
        help="bound on the time between tokens, from which --token_budget is computed by the "
        "plan's own cost model",
    )
    engine.add_argument(
        "--max_model_len",
        type=int,
        metavar="N",
        help="tokens of the longest request, prompt and answer together, up to what the model, the "
        "KV blocks and the plan's free memory hold (default: the plan's --s + --n)",
    )
    engine.add_argument(
        "--no_prefix_caching",
        action="store_true",
        help="compute every prompt, also where its beginning is in the cache",
    )
    add_speculative_option(engine)
    engine.add_argument(
        "--max_restarts",
        type=int,
        default=DEFAULT_MAX_RESTARTS,
        metavar="N",
        help="start the ranks again up to N times within 300 s of serving after one was lost; "
        "requests are recomputed, and fail after two deaths in a row without a token of theirs "
        f"(default {DEFAULT_MAX_RESTARTS})",
    )
    engine.add_argument(
        "--form_timeout",
        type=float,
        default=DEFAULT_FORM_TIMEOUT_S,
        metavar="SECONDS",
        help="processor time to compile the form of an answer (structured_outputs), in a process "
        f"of its own (default {DEFAULT_FORM_TIMEOUT_S:g})",
    )
    add_step_timeout_option(engine)
    add_store_options(engine)


def check_engine_options(options: argparse.Namespace) -> None:
    """Check what can be checked before anything is loaded.

    Raises:
        SpecError: an option cannot be used.
    """
    check_least(options, 1, "token_budget")
    check_least(options, 0, "max_restarts")
    speculative_config_of(options.speculative_config)
    if not 0 < options.form_timeout < math.inf:
        raise SpecError(f"--form_timeout: found {options.form_timeout:g}, expected more than 0")
    alpha = options.alpha
    if alpha is not None and options.scheduler != "larry":
        raise SpecError(
            f"--alpha: found with --scheduler {options.scheduler}, expected --scheduler larry"
        )
    if alpha is not None and not 0 <= alpha < math.inf:
        raise SpecError(f"--alpha: found {alpha:g}, expected a number of at least 0")
    if not MIN_STEP_TIMEOUT_S <= options.step_timeout < math.inf:
        raise SpecError(
            f"--step_timeout: found {options.step_timeout:g}, expected at least "
            f"{MIN_STEP_TIMEOUT_S:g}"
        )


async def start_engine(options: argparse.Namespace, plan: Plan, model_dir: Path) -> EngineClient:
    """Start the ranks of a plan and return their engine once it is loaded.

    Raises:
        LlmpqError: an option cannot be used, or a rank did not start.
    """
    return await launch_engine(options, plan, model_dir).ready()


def launch_engine(options: argparse.Namespace, plan: Plan, model_dir: Path) -> AsyncEngine:
    """Start the ranks of a plan and return their engine while they load.

    Options that the command does not have are left at their defaults.

    Raises:
        SpecError: an option cannot be used.
    """
    given = vars(options)
    max_model_len = given.get("max_model_len")
    if max_model_len is not None:
        check_context_memory(plan, load_model_dir(model_dir), max_model_len)
    return AsyncEngine.launch(
        plan,
        model_dir,
        scheduler=given.get("scheduler", "fcfs"),
        alpha=given.get("alpha"),
        token_budget=given.get("token_budget"),
        max_model_len=max_model_len,
        prefix_caching=not given.get("no_prefix_caching", False),
        speculative_config=speculative_config_of(given.get("speculative_config")),
        step_timeout_s=options.step_timeout,
        max_restarts=options.max_restarts,
        form_timeout_s=given.get("form_timeout", DEFAULT_FORM_TIMEOUT_S),
        store=store_directory(options.store, os.environ),
        store_limit_bytes=store_limit_bytes(options.store_limit),
        kernel=options.kernel,
    )


def check_context_memory(plan: Plan, model: ModelSpec, max_model_len: int) -> None:
    """Check that every stage has memory to attend to sequences longer than the plan's.

    Raises:
        SpecError: the plan leaves too little memory free on a device.
    """
    planned = plan.workload.max_context_tokens
    for stage, estimate in zip(plan.stages, plan.estimate.stages, strict=True):
        kind = catalog.device(plan.device_of(stage).type, plan.cluster).kind
        token_bytes = context_bytes(model, plan.dtype, 1, kind)
        used = estimate.memory.total + draft_bytes(plan.draft, stage.device)
        free = estimate.capacity_bytes - used
        if not token_bytes:  # longer sequences take blocks alone
            continue
        longest = planned + max(0, free) // token_bytes
        if stage.num_layers and max_model_len > max(planned, longest):
            raise SpecError(
                f"--max_model_len: found {max_model_len}, expected at most {longest}: the plan "
                f"leaves {format_bytes(free)} free on rank {stage.rank}, and a step takes "
                f"{format_bytes(token_bytes)} for each token beyond the plan's {planned}"
            )
