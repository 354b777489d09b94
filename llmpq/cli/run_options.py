"""Options of a run: faults, hosts and loading."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from llmpq.cli.common import words_without
from llmpq.dist import Hosts
from llmpq.dist.io.job import Rendezvous
from llmpq.dist.launch.process_environment import Task, started_task
from llmpq.dist.launch.ranks import ranks_of_node
from llmpq.dist.metrics.measurement import Measurement
from llmpq.dist.metrics.progress import BarProgress, Event, RunProgress, SilentProgress
from llmpq.errors import SpecError, StoppedError
from llmpq.options.declare import add_options, read_options, values_of
from llmpq.options.run import (
    FaultOptions,
    HostOptions,
    LauncherOptions,
    PromptFiles,
    RunOptions,
    Transport,
)
from llmpq.spec.plan import Plan

Run = TypeVar("Run", bound=RunOptions)
MAX_LISTED = 10
"""Rejected prompts that are listed; --json lists all."""


def add_fault_options(parser: argparse.ArgumentParser) -> None:
    """Add the handling of faults and signals."""
    faults = parser.add_argument_group("when something fails")
    restarts = {
        "help": "restart all ranks up to N times after one of them died or hung; finished answers "
        "are kept (default %(default)s)"
    }
    add_options(faults, FaultOptions, "max_restarts", "drain_timeout_s", max_restarts=restarts)
    add_options(faults, PromptFiles, "bad_prompts")
    add_options(faults, FaultOptions, "health")


def outcome(measurement: Measurement) -> int:
    """Report requests without an answer, and return the exit status."""
    if measurement.not_served:
        print(
            f"llmpq-dist: stopped with {measurement.not_served} requests not started; "
            "--resume serves them",
            file=sys.stderr,
        )
        return StoppedError.exit_status
    if not measurement.refused:
        return 0
    for text in measurement.refused[:MAX_LISTED]:
        print(f"llmpq-dist: error: not served: {text}", file=sys.stderr)
    if len(measurement.refused) > MAX_LISTED:
        print(f"llmpq-dist: error: {len(measurement.refused)} in all", file=sys.stderr)
    return SpecError.exit_status


@contextlib.contextmanager
def run_progress(num_layers: int) -> Iterator[RunProgress]:
    """Show the loading and the tokens of a run on a terminal; show nothing in a log file."""
    progress = BarProgress(sys.stderr, num_layers) if sys.stderr.isatty() else SilentProgress()
    try:
        yield progress
    finally:
        progress.close()


class HostProgress:
    """Progress of a run over several hosts, which says on each what it waits for.

    Args:
        inner: receives all events.
        place: this host among those of the run.
        plan: whose nodes are the hosts.
        words: the command of other hosts, without ``--node_rank``; ``None`` if a launcher starts
            it everywhere.
        program: name of the command.

    Raises:
        SpecError: the plan has another number of nodes.
    """

    def __init__(
        self,
        inner: RunProgress,
        place: Hosts,
        plan: Plan,
        words: Sequence[str] | None,
        program: str = "llmpq-dist",
    ) -> None:
        ranks = ranks_of_node(plan, place.node_rank, place.num_nodes)
        nodes = plan.nodes
        self._inner = inner
        self._program = program
        self._name = f"host {place.node_rank} of {place.num_nodes} ({nodes[place.node_rank]})"
        self._has_joined = False
        address = "" if place.address is None else f" at {place.address[0]}:{place.address[1]}"
        own = f"with {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
        if place.node_rank > 0:
            self.say(f"{own}, connecting to host 0 ({nodes[0]}){address}")
            return
        for number, node in enumerate(nodes[1:], start=1):
            start = "" if words is None else f"; start there: {_command_of(words, number)}"
            self.say(f"{own}, waiting{address} for host {number} ({node}){start}")

    def report(self, event: Event) -> None:
        """Pass the event on; loading begins when all hosts have joined."""
        if not self._has_joined:
            self._has_joined = True
            self.say("all hosts have joined")
        self._inner.report(event)

    def say(self, text: str) -> None:
        """Print a line about this host."""
        print(f"{self._program}: {self._name}: {text}", file=sys.stderr, flush=True)


def host_words(options: argparse.Namespace, *program: str) -> list[str] | None:
    """Return the command of a host without its number, ``None`` where a launcher starts it."""
    words = words_without(options, {"node_rank"})
    return [*program, *words] if options.nnodes > 1 else None


def _command_of(words: Sequence[str], number: int) -> str:
    """Return the command for a host, given it without ``--node_rank``."""
    return shlex.join([*words, "--node_rank", str(number)])


def commands_of_hosts(
    options: argparse.Namespace, nodes: Sequence[str], words: Sequence[str], others: Sequence[str]
) -> str:
    """Return the lines that start a command on each host of a plan, for one that names no hosts.

    Args:
        options: of the command.
        nodes: of the plan.
        words: the command of host 0, without ``--node_rank``.
        others: that of the other hosts.
    """
    added = ["--nnodes", str(len(nodes))]
    added += ["--master_addr", "ADDRESS"] * (options.master_addr is None)
    added += ["--token_file", "FILE"] * (options.token_file is None)
    lines = [
        f"  {node}: {_command_of([*(others if number else words), *added], number)}"
        for number, node in enumerate(nodes)
    ]
    about = (
        f"run on each host (ADDRESS: where the others reach {nodes[0]}; FILE: a secret that all "
        "hosts share, mode 600)"
    )
    return "\n".join([about, *lines])


def add_host_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the hosts of a run and return their group."""
    hosts = parser.add_argument_group("several hosts (each runs this command)")
    add_options(hosts, HostOptions)
    add_options(hosts, RunOptions, "transport")
    return hosts


def add_ray_options(hosts: argparse._ArgumentGroup) -> None:
    """Add the options that run the command on a Ray cluster."""
    add_options(hosts, LauncherOptions, "launcher", "ray_address")


def ray_address_of(options: argparse.Namespace) -> str | None:
    """Return the address of the Ray cluster, ``None`` for the one that Ray finds.

    Raises:
        SpecError: a Ray cluster is named that is not used.
    """
    if options.ray_address is not None and options.launcher != "ray":
        raise SpecError("--ray_address: found without --launcher ray, expected both")
    return options.ray_address or os.environ.get("RAY_ADDRESS")


def words_for_ray(options: argparse.Namespace) -> list[str]:
    """Return the arguments of the command for the nodes of a Ray cluster.

    Raises:
        SpecError: an option is about hosts, which Ray chooses.
    """
    for name, value in [*values_of(HostOptions()).items(), ("no_auto", False)]:
        if getattr(options, name) != value:
            raise SpecError(f"--{name}: found with --launcher ray, expected one of them")
    return words_without(options, {"launcher", "ray_address"})


def hosts_of(options: argparse.Namespace) -> Hosts:
    """Return the number of hosts and the rank of this one, also from ``srun`` or ``mpirun``."""
    if options.nnodes == 1:
        task = started_task(os.environ)
        if task is None:
            return Hosts()
        return Hosts(
            num_nodes=task.world_size,
            node_rank=task.rank,
            address=_address_of(options, task),
            token_file=_token_file(options),
        )
    return stated_hosts(options)


def stated_hosts(options: argparse.Namespace) -> Hosts:
    """Return the number of hosts and the rank of this one, as the options say."""
    if options.nnodes == 1:
        return Hosts()
    if options.master_addr is None:
        raise SpecError("--nnodes: found more than one host, expected --master_addr too")
    return Hosts(
        num_nodes=options.nnodes,
        node_rank=options.node_rank,
        address=(options.master_addr, options.master_port),
        token_file=_token_file(options),
    )


def _token_file(options: argparse.Namespace) -> Path | None:
    return None if options.token_file is None else Path(options.token_file).resolve()


def rendezvous_of(options: argparse.Namespace, task: Task | None = None) -> Rendezvous:
    """Return the rendezvous of the options; the launcher completes it.

    Args:
        options: of the command.
        task: of ``srun`` or ``mpirun``, if this process is one rank.
    """
    token_file = _token_file(options)
    if task is None or task.launcher == "torchrun":
        return Rendezvous(from_environment=True, token_file=token_file)
    return Rendezvous(address=_address_of(options, task), token_file=token_file)


def transport_of(options: argparse.Namespace, *, is_rank: bool = False) -> Transport:
    """Return what carries frames: by default torch.distributed under another launcher.

    Args:
        options: of the command.
        is_rank: whether torchrun started this process.
    """
    is_started = options.nnodes == 1 and started_task(os.environ) is not None
    is_torch = options.transport == "auto" and (is_rank or is_started)
    return "torch" if is_torch else options.transport


def _address_of(options: argparse.Namespace, task: Task) -> tuple[str, int]:
    """Return the address of rank 0."""
    host = options.master_addr or task.first_host
    if host is None:
        raise SpecError(
            f"{task.launcher}: found several hosts, expected --master_addr, the address of rank 0"
        )
    return host, options.master_port


_OFF = "off"
_VARIABLE = "LLMPQ_STORE"


def add_store_options(group: argparse._ArgumentGroup) -> None:
    """Add ``--store``, ``--store_limit`` and ``--kernel``."""
    store = {
        "help": "cache of quantized layers, so that the next start quantizes nothing "
        f"(default: ${_VARIABLE}, else llmpq/store in the user's cache)"
    }
    add_options(group, RunOptions, "store", "store_limit_bytes", "kernel", store=store)


def read_run_options(kind: type[Run], options: argparse.Namespace) -> Run:
    """Return the options of a run, with the default folder of quantized layers.

    Raises:
        SpecError: a value cannot be used.
    """
    return read_options(kind, options, store=store_directory(options.store, os.environ))


def store_directory(option: str | None, environ: Mapping[str, str]) -> Path | None:
    """Return the folder of the cache of quantized layers, ``None`` without a cache.

    Args:
        option: value of ``--store``.
        environ: environment of the process.
    """
    chosen = option or environ.get(_VARIABLE)
    if chosen == _OFF:
        return None
    if chosen:
        return Path(chosen).expanduser().resolve()
    home, cache = environ.get("HOME"), environ.get("XDG_CACHE_HOME")
    if not home and not cache:
        return None
    default = (Path(cache) if cache else Path(home or "") / ".cache").resolve() / "llmpq" / "store"
    try:  # the default is optional: a home without write access is not an error
        default.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return None
    return default
