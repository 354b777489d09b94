"""llmpq-profile link: time messages between two nodes, or between two workers of this machine.

Between two hosts, each runs this command with its ``--node_rank``. Without one, both ends are
started on this host, each on a core of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from llmpq.cli.common import print_points, progress_bar, require
from llmpq.dist.launch.process_environment import cpu_environment, pin
from llmpq.errors import SpecError
from llmpq.options.declare import add_options
from llmpq.options.measure import LinkOptions, Measurements
from llmpq.options.run import HostOptions, RunOptions
from llmpq.profiler.device import available_cores
from llmpq.spec.tables import CommTable, ends_line, ends_of, read_comm_table, write_comm_table
from llmpq.units import format_bytes, format_seconds


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add ``link`` to the commands."""
    link = commands.add_parser("link", help="time messages between two nodes of a cluster")
    add_options(link, Measurements, "output", output={"help": "link table to write (CSV)"})
    add_options(link, LinkOptions, "between", "cluster", "sizes")
    add_options(link, Measurements, "budget", "seed", budget={"default": 5.0})
    add_options(link, LinkOptions, "append")
    hosts = link.add_argument_group("two hosts (each runs this command)")
    changes: dict[str, dict[str, Any]] = {
        "node_rank": {"choices": (0, 1), "default": None, "help": "0 is the first of --between"},
        "master_addr": {"help": "address of host 0"},
        "token_file": {"type": Path, "help": "the same secret on both hosts"},
    }
    names = ("node_rank", "master_addr", "master_port", "token_file")
    add_options(hosts, HostOptions, *names, **changes)
    add_options(link, RunOptions, "step_timeout_s")
    add_options(link, LinkOptions, "rendezvous")
    link.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure as one of the two ends, or start both."""
    require("torch")
    if options.budget <= 0:
        raise SpecError(f"--budget: found {options.budget}, expected seconds above 0")
    if options.node_rank is None:
        return _start_both(options.argv)
    if options.rendezvous is None and options.master_addr is None:
        raise SpecError("--node_rank: found no --master_addr, expected the address of host 0")
    table = _measure(options)
    if table is None:
        return 0
    if options.append and options.output.exists():
        table = _joined(read_comm_table(options.output), table)
    write_comm_table(options.output, table)
    return print_points(options, len(table.samples), _summary(table))


def _start_both(arguments: list[str]) -> int:
    """Start both ends on this machine; the first one prints and writes."""
    cores = available_cores()
    environment = {**os.environ, **cpu_environment(1)}
    with tempfile.TemporaryDirectory() as folder:
        own = ["--rendezvous", str(Path(folder) / "store"), "--node_rank"]
        command = [sys.executable, "-m", "llmpq.cli.commands.profile", *arguments, *own]
        ends = [subprocess.Popen([*command, str(rank)], env=environment) for rank in (0, 1)]
        if len(cores) > 1:
            for end, core in zip(ends, cores, strict=False):
                pin(end.pid, {core})
        try:
            return max(abs(end.wait()) for end in ends)
        finally:
            for end in ends:
                end.kill()
                end.wait()


def _measure(options: argparse.Namespace) -> CommTable | None:
    from llmpq.dist.io.job import Rendezvous
    from llmpq.dist.transport.rendezvous import RankIdentity, connect
    from llmpq.profiler.link import DEFAULT_SIZES, LinkJob, measure_link

    job = LinkJob(
        between=(options.between[0], options.between[1]),
        sizes=tuple(options.sizes or DEFAULT_SIZES),
        budget_s=options.budget,
        seed=options.seed,
    )
    address = (options.master_addr, options.master_port)
    me = RankIdentity(
        rank=options.node_rank,
        world_size=2,
        name=job.between[options.node_rank],
        limits=job.limits,
        timeout_s=options.step_timeout,
    )
    rendezvous = Rendezvous(address=address, token_file=options.token_file)
    if options.rendezvous is not None:
        rendezvous = Rendezvous(file=options.rendezvous)
    communicator = connect(me, rendezvous).communicator
    assert communicator is not None  # two ranks have a ring
    with contextlib.closing(communicator), progress_bar("measuring") as progress:
        table = measure_link(communicator, job, progress if me.rank == 0 else None)
    if table is None:
        return None
    who = [("command", options.command.replace(f" --rendezvous {options.rendezvous}", ""))]
    if options.cluster is not None:
        who.append(("cluster", options.cluster))
    return CommTable(samples=table.samples, provenance=(*who, *table.provenance))


def _joined(old: CommTable, new: CommTable) -> CommTable:
    """Return both tables as one; the new table replaces pairs that both measured."""
    measured = {frozenset((one.source, one.target)) for one in new.samples}
    kept = [one for one in old.samples if frozenset((one.source, one.target)) not in measured]
    pairs = dict.fromkeys((one.source, one.target) for one in kept)
    ends = (ends_line(pair, found) for pair in pairs if (found := ends_of("", old, pair)))
    provenance = dict(new.provenance) | dict(ends)
    return CommTable(samples=(*kept, *new.samples), provenance=tuple(provenance.items()))


def _summary(table: CommTable) -> str:
    return "\n".join(
        f"{one.source} -> {one.target}  {format_bytes(one.size_bytes):>9}  "
        f"{format_seconds(one.seconds)}"
        for one in sorted(table.samples, key=lambda one: (one.source, one.target, one.size_bytes))
    )
