"""A cluster of different devices on this host, for real: see ``tools/hetbox --help``."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from llmpq.errors import LlmpqError, SpecError
from llmpq.spec.cluster import Device, load_cluster
from llmpq.spec.plan import Plan, read_plan
from tools.boxes.devices import Box, children_of, has_begun, rank_of, spaces_of
from tools.boxes.groups import Group, groups, remove_all
from tools.boxes.pace import Pace, paced
from tools.boxes.wire import Link, hosts, remove_hosts

START_S, WATCH_S = 0.004, 0.05
"""Seconds between two looks for new ranks: until all are there, and afterwards."""
PORT = 29500
_HELP = """\
A device of "cpu_share": 0.5 computes in two of every four milliseconds, so its layers take twice as
long; one of "memory_bytes": 600000000 is ended by the kernel beyond that, resident libraries
included. With
--links, every node of the cluster is a network namespace of its own, and the wire between two keeps
to the rate and the delay of the cluster file. Needs root. Everything is removed again; should this
program be killed, its processes and groups are too, and its namespaces by "clean".

  tools/hetbox run llmpq-dist --strat_file_name plan.json --prompts p.jsonl --output o.jsonl
  tools/hetbox run --links llmpq-dist ...
  tools/hetbox device cluster.json desk/cpu#1 llmpq-profile layer ...
  tools/hetbox clean
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in its box, and return its exit status."""
    options = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return int(options.verb(options))
    except LlmpqError as error:
        print(f"hetbox: {error}", file=sys.stderr)
        return error.exit_status
    except PermissionError as error:
        print(f"hetbox: {error}; expected the rights of root", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hetbox",
        description="Run a command on this host as a cluster of different devices.",
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(required=True)
    run = verbs.add_parser("run", help="run llmpq-dist, each rank in the box of its device")
    run.add_argument("--links", action="store_true", help="a namespace for each node of the plan")
    run.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND")
    run.set_defaults(verb=_run)
    one = verbs.add_parser("device", help="run any command in the box of one device")
    one.add_argument("cluster", type=Path)
    one.add_argument("label", help="of the device, such as desk/cpu#0")
    one.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND")
    one.set_defaults(verb=_device)
    clean = verbs.add_parser("clean", help="remove what a killed run may have left")
    clean.set_defaults(verb=_clean)
    return parser


def _run(options: argparse.Namespace) -> int:
    plan = read_plan(_strategy(options.words))
    with contextlib.ExitStack() as stack:
        devices = [plan.device_of(stage) for stage in plan.stages]
        # Reading libraries is no part of a run: a slow device may do it at full speed.
        boxes = stack.enter_context(_boxes(devices, is_begun=has_begun))
        if not options.links:
            return _watch([_command(options.words)], boxes)
        return _watch(stack.enter_context(_on_hosts(plan, options.words)), boxes)


def _device(options: argparse.Namespace) -> int:
    devices = {device.label: device for device in load_cluster(options.cluster).devices}
    if options.label not in devices:
        raise SpecError(f"{options.label}: found no such device, expected one of {list(devices)}")
    with _boxes([devices[options.label]]) as boxes:
        child = subprocess.Popen(_command(options.words))
        boxes[0].take(child.pid)  # before it has started anything itself
        while child.poll() is None:
            boxes[0].hold()
            time.sleep(WATCH_S)
        _tell(boxes)
        return _status(child)


def _clean(options: argparse.Namespace) -> int:
    del options
    for name in (*remove_all(), *remove_hosts()):
        print(f"hetbox: removed {name}", file=sys.stderr)
    return 0


@contextlib.contextmanager
def _boxes(
    devices: list[Device], is_begun: Callable[[int], bool] | None = None
) -> Iterator[list[Box]]:
    """Make the devices' boxes; one is slowed at once, or when ``is_begun`` of a process in it."""

    def pids_of(group: Group) -> list[int]:
        # All or none: a child is called as its parent until it is a program of its own, and
        # stopped processes must be continued.
        pids = group.pids()
        return pids if is_begun is None or any(map(is_begun, pids)) else []

    spaces = spaces_of(devices, sorted(os.sched_getaffinity(0)))
    with groups(len(spaces)) as found:
        boxes = [Box(space, group) for space, group in zip(spaces, found, strict=True)]
        paces = [
            Pace(
                begin=one.space.begin,
                end=one.space.begin + one.space.share,
                pids=partial(pids_of, one.group),
            )
            for one in boxes
            if one.space.share < 1.0
        ]
        with paced(paces):
            yield boxes


def _watch(commands: list[list[str]], boxes: list[Box]) -> int:
    """Run the launchers, put every rank that appears into its box; return the first's status."""
    launchers = [
        subprocess.Popen(command, stdout=None if number == 0 else subprocess.DEVNULL)
        for number, command in enumerate(commands)
    ]
    known: set[int] = set()
    try:
        while any(launcher.poll() is None for launcher in launchers):
            for pid in children_of({launcher.pid for launcher in launchers}):
                rank = None if pid in known else rank_of(pid)
                if rank is not None:
                    known.add(pid)
                    boxes[rank].take(pid)
            for box in boxes:
                box.hold()
            is_complete = all(box.has_been_used for box in boxes)
            time.sleep(WATCH_S if is_complete else START_S)
    finally:
        for launcher in launchers:
            launcher.terminate()
        statuses = [_status(launcher) for launcher in launchers]
        _tell(boxes)
    return next((status for status in statuses if status), 0)


def _tell(boxes: list[Box]) -> None:
    for number, box in enumerate(boxes):
        end = f": ended {box.killed_for_memory}x, memory full" if box.killed_for_memory else ""
        print(f"hetbox: rank {number} on {box.space}{end}", file=sys.stderr)


@contextlib.contextmanager
def _on_hosts(plan: Plan, words: list[str]) -> Iterator[list[list[str]]]:
    """Yield a launcher's command for each node of the plan, in its own namespace."""
    nodes = list(dict.fromkeys(plan.device_of(stage).node for stage in plan.stages))
    devices = {device.node: device for device in plan.cluster.devices}
    links = {}
    for low, first in enumerate(nodes):
        for high in range(low + 1, len(nodes)):
            link = plan.cluster.link(devices[first], devices[nodes[high]])
            links[low, high] = Link(bytes_per_s=link.bytes_per_s, delay_s=link.latency_s)
    with hosts(links, len(nodes)) as found, tempfile.TemporaryDirectory() as folder:
        token = Path(folder) / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(16))
        own = [
            *("--nnodes", str(len(nodes)), "--master_addr", found[0].address),
            *("--master_port", str(PORT), "--token_file", str(token)),
        ]
        yield [
            ["ip", "netns", "exec", host.name, *_command(words), *own, "--node_rank", str(number)]
            for number, host in enumerate(found)
        ]


def _command(words: list[str]) -> list[str]:
    """Return the command; ours run from this very checkout and interpreter."""
    if not words:
        raise SpecError("COMMAND: found nothing, expected what to run")
    own = {"llmpq-dist": "llmpq.cli.commands.dist", "llmpq-profile": "llmpq.cli.commands.profile"}
    if words[0] in own:
        return [sys.executable, "-m", own[words[0]], *words[1:]]
    return list(words)


def _strategy(words: list[str]) -> Path:
    for number, word in enumerate(words[:-1]):
        if word == "--strat_file_name":
            return Path(words[number + 1])
    raise SpecError("COMMAND: found no --strat_file_name, expected a run of llmpq-dist")


def _status(process: subprocess.Popen[bytes]) -> int:
    code = process.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
