"""llmpq-profile layer: time one decoder layer of a model on this machine."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmpq.cli.common import print_points, progress_bar
from llmpq.cli.render import table_summary
from llmpq.dist.launch.process_environment import cpu_environment
from llmpq.errors import SpecError
from llmpq.options.declare import add_options, read_options
from llmpq.options.measure import POINTS, LayerOptions, MeasuredModel, Measurements
from llmpq.profiler.device import available_cores, cpu_isas, cpu_name, cpu_quota
from llmpq.profiler.grid import GridLimits, Shape, planned_grid, product_grid
from llmpq.spec.catalog import resolve_model
from llmpq.spec.cluster import MIN_CPU_SHARE
from llmpq.spec.tables import LatencyTable, write_latency_table

if TYPE_CHECKING:
    from llmpq.profiler.bench import LayerJob

_LISTS = ("batches", "prompt_tokens", "context_tokens")


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add ``layer`` to the commands."""
    layer = commands.add_parser(
        "layer", help="time one decoder layer of a model on this machine, at every bitwidth"
    )
    add_options(layer, MeasuredModel, "model")
    add_options(layer, Measurements, "output")
    process = ("device", "device_type", "threads", "core", "cpu_isa", "cpu_share")
    add_options(layer, LayerOptions, *process)
    add_options(layer, MeasuredModel, "bits", "dtype")
    planned = layer.add_argument_group("the planned grid: few points over everything up to")
    largest = ("max_batch", "max_prompt", "max_context", "max_prefill")
    add_options(planned, LayerOptions, "points", *largest)
    own = layer.add_argument_group("or every combination of (with --points: and)")
    add_options(own, LayerOptions, *_LISTS)
    add_options(layer, LayerOptions, "layers")
    add_options(layer, Measurements, "budget")
    add_options(layer, LayerOptions, "companions")
    add_options(layer, Measurements, "seed")
    add_options(layer, LayerOptions, "resume", "in_worker")
    layer.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure in a process that was started with its threads and extensions set."""
    _check(options)
    shapes = shapes_of(options)
    if not options.in_worker:
        return _in_prepared_process(options)
    table = _measure(options, shapes)
    return print_points(options, len(table.samples), table_summary(table))


def _check(options: argparse.Namespace) -> None:
    read_options(LayerOptions, options)
    if options.cpu_share is not None and not MIN_CPU_SHARE <= options.cpu_share <= 1.0:
        raise SpecError(f"--cpu_share: found {options.cpu_share}, expected {MIN_CPU_SHARE} to 1")
    if options.budget <= 0:
        raise SpecError(f"--budget: found {options.budget}, expected seconds above 0")
    if options.cpu_isa is not None and options.cpu_isa not in cpu_isas():
        raise SpecError(
            f"--cpu_isa: found {options.cpu_isa}, expected an extension of this processor: "
            f"{', '.join(cpu_isas()) or 'none known'}"
        )
    if options.core is not None and options.core not in available_cores():
        raise SpecError(f"--core: found {options.core}, expected one of {list(available_cores())}")


def shapes_of(options: argparse.Namespace) -> tuple[Shape, ...]:
    """Return the planned grid, the product of the lists, or both if both are given."""
    own = _own_shapes(options)
    if own and options.points is None:
        return own
    model, _ = resolve_model(options.model)
    longest = model.max_positions or GridLimits().context_tokens
    planned = planned_grid(
        GridLimits(
            batch=options.max_batch,
            prompt_tokens=min(options.max_prompt, longest),
            context_tokens=options.max_context or min(GridLimits().context_tokens, longest),
            prefill_tokens=options.max_prefill,
        ),
        POINTS if options.points is None else options.points,
    )
    return tuple(dict.fromkeys((*planned, *own)))


def _own_shapes(options: argparse.Namespace) -> tuple[Shape, ...]:
    lists = [getattr(options, name) for name in _LISTS]
    if not any(lists):
        return ()
    usual = ((1, 2, 4, 8, 16, 32), (16, 64, 128, 256, 512), (32, 128, 512, 1024))
    batches, prompts, contexts = (
        tuple(dict.fromkeys(own or default)) for own, default in zip(lists, usual, strict=True)
    )
    return product_grid(batches, prompts, contexts)


def _in_prepared_process(options: argparse.Namespace) -> int:
    environment = {**os.environ, **cpu_environment(options.threads, options.cpu_isa)}
    command = [sys.executable, "-m", "llmpq.cli.commands.profile", *options.argv, "--in_worker"]
    return subprocess.run(command, env=environment, check=False).returncode


def _measure(options: argparse.Namespace, shapes: tuple[Shape, ...]) -> LatencyTable:
    from llmpq.profiler.journal import Journal, journal_file
    from llmpq.profiler.layer import job_identity, profile_layer

    job = _job(options, shapes)
    origin = _origin(options)
    # The command may differ between the runs (a longer budget); what is measured may not.
    identity = (*origin[1:], *job_identity(job))
    with (
        Journal(journal_file(options.output), identity, resume=options.resume) as journal,
        progress_bar("profiling") as progress,
    ):
        table = profile_layer(job, progress, journal)
        table = LatencyTable(samples=table.samples, provenance=(*origin, *table.provenance))
        write_latency_table(options.output, table)
        journal.remove()
    return table


def _job(options: argparse.Namespace, shapes: tuple[Shape, ...]) -> LayerJob:
    """Return what to measure; with ``--core``, pin this process."""
    import torch

    from llmpq.models import Checkpoint
    from llmpq.profiler.bench import LayerJob

    torch.set_num_threads(options.threads)
    dtype = options.dtype
    if options.core is not None:
        own = [core for core in available_cores() if core >= options.core]
        os.sched_setaffinity(0, own[: options.threads])
    return LayerJob(
        model_dir=Path(options.model),
        bits=tuple(dict.fromkeys(options.bits)),
        shapes=shapes,
        dtype=Checkpoint(options.model).dtype if dtype == "auto" else getattr(torch, dtype),
        device=torch.device(options.device),
        head_bits=tuple(sorted({*options.bits} - {16})),
        layers=options.layers,
        budget_s=options.budget,
        seed=options.seed,
    )


def _origin(options: argparse.Namespace) -> tuple[tuple[str, str], ...]:
    model, _ = resolve_model(options.model)
    origin = [
        ("command", options.command.removesuffix(" --in_worker")),
        ("model", model.name),
        ("device", options.device_type or options.device.partition(":")[0]),
        ("processor", cpu_name()),
    ]
    if options.cpu_isa is not None:
        origin.append(("cpu_isa", options.cpu_isa))
    share = options.cpu_share or _share_of_quota(options.threads)
    if share < 1.0:
        origin.append(("cpu_share", str(share)))
    return tuple(origin)


def _share_of_quota(threads: int) -> float:
    """Return the share of the threads' time that the CPU quota of this process allows."""
    quota = cpu_quota()
    return 1.0 if quota is None else min(1.0, round(quota / threads, 4))
