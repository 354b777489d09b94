"""Options of the engine that answers requests as they arrive, and its start."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from llmpq.cli.common import words_without
from llmpq.cli.run_options import add_store_options, read_run_options
from llmpq.costmodel.memory import context_bytes
from llmpq.dist import Hosts
from llmpq.dist.async_engine import AsyncEngine, run_engine_stages
from llmpq.dist.launch.ranks import HostMonitor
from llmpq.dist.launch.signals import StopRequest
from llmpq.dist.metrics.progress import RunProgress
from llmpq.errors import SpecError
from llmpq.options.declare import add_options, read_options, values_of
from llmpq.options.engine import EngineOptions, TokenBound
from llmpq.options.run import LaunchOptions
from llmpq.spec import catalog
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.model import ModelSpec
from llmpq.spec.plan import Plan, draft_bytes
from llmpq.units import format_bytes

OF_THIS_HOST = ("max_model_len", "store", "store_limit", "token_budget", "itl_bound")
"""Options of the engine that the plan says, or that name files of this host."""


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the queue order, the token budget and what a rank needs."""
    engine = parser.add_argument_group("engine")
    add_options(engine, EngineOptions, "scheduler", "alpha", "predictor")
    budget = engine.add_mutually_exclusive_group()
    add_options(budget, EngineOptions, "token_budget")
    add_options(budget, TokenBound)
    add_options(engine, EngineOptions, "max_model_len", "prefix_caching")
    kept = (
        "state_cache_bytes",
        "kv_offloading_bytes",
        "kv_offloading_folder",
        "kv_offloading_disk_bytes",
    )
    add_options(engine, EngineOptions, *kept, "speculative_config")
    names = ("max_restarts", "form_timeout_s", "step_timeout_s", "transport")
    add_options(engine, LaunchOptions, *names)
    add_store_options(engine)


def check_engine_options(options: argparse.Namespace) -> None:
    """Check what can be checked before anything is loaded.

    Raises:
        SpecError: an option cannot be used.
    """
    predictor = _engine_options(options).predictor
    if predictor is not None and not getattr(options, "node_rank", 0):
        from llmpq.batching.length.learned import read_length_model

        read_length_model(predictor)
    read_options(LaunchOptions, options, leaves=["store"])


def engine_words(options: argparse.Namespace) -> list[str]:
    """Return the options of the engine, which its ranks on other hosts have too.

    Those of the plan, and of the files of this host, are left out.
    """
    engine = argparse.ArgumentParser(add_help=False)
    add_engine_options(engine)
    others = {name for name, _ in options.given_words} - {one.dest for one in engine._actions}
    words = words_without(options, others.union(OF_THIS_HOST))
    budget = getattr(options, "token_budget", None)
    return words if budget is None else [*words, "--token_budget", str(budget)]


def launch_engine(
    options: argparse.Namespace,
    plan: Plan,
    model_dir: Path,
    *,
    hosts: Hosts | None = None,
    progress: RunProgress | None = None,
    monitor: HostMonitor | None = None,
) -> AsyncEngine:
    """Start the ranks of a plan and return their engine while they load.

    Options that the command does not have are left at their defaults. ``progress`` receives the
    events of the ranks.

    Args:
        options: of the command.
        plan: the strategy.
        model_dir: directory with the weights.
        hosts: this host's place, which is the master's; by default all ranks run here.
        progress: receives loading events.
        monitor: watches the other hosts.

    Raises:
        SpecError: an option cannot be used.
    """
    values = _engine_values(options, plan, model_dir)
    return AsyncEngine.launch(
        plan, model_dir, hosts=hosts, progress=progress, monitor=monitor, **values
    )


def run_stages(
    options: argparse.Namespace, plan: Plan, model_dir: Path, hosts: Hosts, progress: RunProgress
) -> None:
    """Run the ranks of a host without the master, until the engine is closed.

    SIGTERM and Ctrl-C end them.

    Raises:
        LlmpqError: as :func:`llmpq.dist.async_engine.run_engine_stages`.
    """
    values, stop = _engine_values(options, plan, model_dir), StopRequest()
    with stop.from_signals():
        run_engine_stages(plan, model_dir, hosts, progress=progress, stop=stop, **values)


def _engine_values(options: argparse.Namespace, plan: Plan, model_dir: Path) -> dict[str, Any]:
    """Return the options of an engine by name."""
    engine = _engine_options(options)
    if engine.max_model_len is not None:
        check_context_memory(plan, load_model_dir(model_dir), engine.max_model_len)
    return values_of(engine) | values_of(read_run_options(LaunchOptions, options))


def _engine_options(options: argparse.Namespace) -> EngineOptions:
    """Return the options of the engine; without an order of its own, it predicts nothing."""
    leaves = () if "scheduler" in options else ("predictor",)
    return read_options(EngineOptions, options, leaves=leaves)


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
