"""llmpq-profile: measure devices and write the tables a plan is priced with."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from llmpq.cli import profile_fit, profile_import
from llmpq.cli.common import command_line, make_parser, print_json, run_command
from llmpq.cli.profile_table import table_summary
from llmpq.dist.environment import cpu_environment
from llmpq.errors import SpecError
from llmpq.profiler.device import available_cores, cpu_isas, cpu_name
from llmpq.spec.catalog import resolve_model
from llmpq.spec.cluster import CPU_ISAS
from llmpq.spec.precision import BITS, DTYPE_BYTES
from llmpq.spec.tables import LatencyTable, write_latency_table

NAME = "llmpq-profile"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``llmpq-profile``."""
    verbs = {"layer": _layer, "fit": profile_fit.run, "import": profile_import.run}
    return run_command(_parser(), lambda options: verbs[options.what](options, argv), argv)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(NAME, __doc__ or "")
    commands = parser.add_subparsers(dest="what", required=True, metavar="layer|fit|import")
    layer = commands.add_parser(
        "layer", help="time one decoder layer of a model on this machine, at every bitwidth"
    )
    layer.add_argument("--model", required=True, help="directory with config.json and weights")
    layer.add_argument("--output", required=True, type=Path, help="latency table to write (CSV)")
    layer.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default cpu)")
    layer.add_argument("--device_type", help="name written into the table (default: cpu)")
    layer.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    layer.add_argument("--core", type=int, help="first CPU core to run on (default: not pinned)")
    layer.add_argument("--cpu_isa", choices=CPU_ISAS, help="newest vector extension to use")
    layer.add_argument("--bits", type=int, nargs="+", default=[3, 4, 8, 16], choices=BITS)
    layer.add_argument("--dtype", default="auto", choices=["auto", *DTYPE_BYTES])
    layer.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    layer.add_argument("--prompt_tokens", type=int, nargs="+", default=[16, 64, 128, 256, 512])
    layer.add_argument("--context_tokens", type=int, nargs="+", default=[32, 128, 512, 1024])
    layer.add_argument("--layers", type=int, default=4, help="layers timed in a row (default 4)")
    layer.add_argument("--budget", type=float, default=60.0, help="seconds to spend (default 60)")
    layer.add_argument("--seed", type=int, default=0)
    # A worker's threads and vector extension are fixed when torch is imported; this marks the
    # process that was started with them set.
    layer.add_argument("--in_worker", action="store_true", help=argparse.SUPPRESS)
    profile_fit.add_parser(commands)
    profile_import.add_parser(commands)
    return parser


def _layer(options: argparse.Namespace, argv: Sequence[str] | None) -> int:
    _check(options)
    if not options.in_worker:
        return _in_prepared_process(options, argv)
    table = _measure(options)
    write_latency_table(options.output, table)
    if options.json:
        print_json({"output": str(options.output), "points": len(table.samples)})
    else:
        print(table_summary(table))
        print(f"{len(table.samples)} points written to {options.output}")
    return 0


def _check(options: argparse.Namespace) -> None:
    for name in ("batches", "prompt_tokens", "context_tokens"):
        if min(getattr(options, name)) < 1:
            raise SpecError(f"--{name}: found {min(getattr(options, name))}, expected at least 1")
    for name in ("threads", "layers"):
        if getattr(options, name) < 1:
            raise SpecError(f"--{name}: found {getattr(options, name)}, expected at least 1")
    if options.budget <= 0:
        raise SpecError(f"--budget: found {options.budget}, expected seconds above 0")
    if options.cpu_isa is not None and options.cpu_isa not in cpu_isas():
        raise SpecError(
            f"--cpu_isa: found {options.cpu_isa}, expected one of what this processor has: "
            f"{', '.join(cpu_isas()) or 'none known'}"
        )
    if options.core is not None and options.core not in available_cores():
        raise SpecError(f"--core: found {options.core}, expected one of {list(available_cores())}")
    resolve_model(options.model)


def _in_prepared_process(options: argparse.Namespace, argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    environment = {**os.environ, **cpu_environment(options.threads, options.cpu_isa)}
    command = [sys.executable, "-m", "llmpq.cli.profile", *arguments, "--in_worker"]
    return subprocess.run(command, env=environment, check=False).returncode


def _measure(options: argparse.Namespace) -> LatencyTable:
    import torch
    from tqdm import tqdm

    from llmpq.models import Checkpoint
    from llmpq.profiler.layer import LayerGrid, LayerJob, profile_layer

    if options.core is not None:
        cores = [core for core in available_cores() if core >= options.core]
        os.sched_setaffinity(0, cores[: options.threads])
    torch.set_num_threads(options.threads)
    job = LayerJob(
        model_dir=Path(options.model),
        bits=tuple(dict.fromkeys(options.bits)),
        grid=LayerGrid(
            batches=tuple(options.batches),
            prompt_tokens=tuple(options.prompt_tokens),
            context_tokens=tuple(options.context_tokens),
        ),
        dtype=Checkpoint(options.model).dtype
        if options.dtype == "auto"
        else getattr(torch, options.dtype),
        device=torch.device(options.device),
        layers=options.layers,
        budget_s=options.budget,
        seed=options.seed,
    )
    with tqdm(unit="round", desc="profiling", leave=False, disable=None, file=sys.stderr) as bar:

        def progress(done: int, planned: int) -> None:
            bar.total = planned
            bar.n = done
            bar.refresh()

        table = profile_layer(job, progress)
    return LatencyTable(
        samples=table.samples, provenance=(*_who(options, job.model_dir), *table.provenance)
    )


def _who(options: argparse.Namespace, model_dir: Path) -> tuple[tuple[str, str], ...]:
    model, _ = resolve_model(str(model_dir))
    arguments = [word for word in sys.argv[1:] if word != "--in_worker"]
    who = [
        ("command", command_line(NAME, arguments)),
        ("model", model.name),
        ("device", options.device_type or options.device.partition(":")[0]),
        ("processor", cpu_name()),
    ]
    if options.cpu_isa is not None:
        who.append(("cpu_isa", options.cpu_isa))
    return tuple(who)


if __name__ == "__main__":
    sys.exit(main())
