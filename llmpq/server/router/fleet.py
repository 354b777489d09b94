"""Replicas as processes of this host, and the router in front of them: start, route, drain, end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from llmpq.dist.launch.signals import SIGNALS, ending_with_this_process
from llmpq.errors import StageError
from llmpq.options.server import ListenOptions
from llmpq.routing import LoadBalancer
from llmpq.server.app import Life, Served, run_app
from llmpq.server.router.lifecycle import connected, served

END_TIMEOUT_S = 10.0
"""Seconds that a replica has to end after its own time to drain."""
READY = b"ready "


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCommand:
    """How to start a replica, or the part of one that is on this host.

    Attributes:
        words: program and arguments; empty where nothing of it is on this host.
        environment: variables besides those of this process.
        address: where it answers, if the master is on another host; ``None`` where the program
            prints ``ready URL`` on its standard output.
    """

    words: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    address: str | None = None


def run_fleet(
    options: ListenOptions,
    commands: Sequence[ReplicaCommand],
    balancer: LoadBalancer,
    poll_s: float,
    on_ready: Callable[[str, Sequence[str]], None],
) -> None:
    """Start replicas and route requests to them until SIGTERM or Ctrl-C.

    Running answers end before the replicas do. A replica that ends early gets no more requests,
    and one of another host none before it answers. The kernel ends the replicas when this process
    is killed.

    Args:
        options: how the router listens.
        commands: one for each replica.
        balancer: chooses among them.
        poll_s: seconds between two readings of the statistics of a replica.
        on_ready: called with the address, and those of the replicas, once requests are routed.

    Raises:
        LlmpqError: an option cannot be used; ``StageError`` when a replica does not start, or all
            have ended; ``StoppedError`` when answers were cut short.
    """
    urls: list[str] = []

    @contextlib.asynccontextmanager
    async def open_fleet(life: Life) -> AsyncIterator[Served]:
        async with _started(commands, options.drain_timeout_s + END_TIMEOUT_S) as processes:
            addresses = asyncio.gather(
                *(_address(number, one, processes) for number, one in enumerate(commands))
            )
            found = await life.unless_stopped(addresses)
            urls.extend(found)
            async with connected(urls, balancer, poll_s) as router:
                yield served(router, options, life, lambda: _error(processes, commands))

    run_app(options, open_fleet, lambda url: on_ready(url, urls))


def run_replicas(commands: Sequence[ReplicaCommand], drain_timeout_s: float) -> None:
    """Run the replicas of a host without the router until SIGTERM or Ctrl-C, or their end.

    Args:
        commands: one for each replica.
        drain_timeout_s: seconds that running answers have.

    Raises:
        StageError: all have ended, one of them with an error.
    """
    asyncio.run(_run_replicas(commands, drain_timeout_s + END_TIMEOUT_S))


async def _run_replicas(commands: Sequence[ReplicaCommand], end_timeout_s: float) -> None:
    stop = asyncio.Event()
    for number in SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with _started(commands, end_timeout_s) as processes:
        ends = asyncio.create_task(_wait_for_all(processes))
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait((ends, stopped), return_when=asyncio.FIRST_COMPLETED)
        ends.cancel()
        stopped.cancel()
        if not stop.is_set() and any(process.returncode for process in processes.values()):
            raise _ended(processes)


async def _wait_for_all(processes: Mapping[int, Process]) -> None:
    for process in processes.values():
        await process.wait()


@contextlib.asynccontextmanager
async def _started(
    commands: Sequence[ReplicaCommand], end_timeout_s: float
) -> AsyncIterator[dict[int, Process]]:
    """Yield the processes of this host by the number of their replica, and end them."""
    processes: dict[int, Process] = {}
    copies: list[asyncio.Task[None]] = []
    try:
        for number, command in enumerate(commands):
            if not command.words:
                continue
            # Ctrl-C reaches this process only, which ends the replicas after the last answer.
            process = await asyncio.create_subprocess_exec(
                *ending_with_this_process(command.words),
                stdout=PIPE,
                stderr=PIPE,
                env={**os.environ, **command.environment},
                start_new_session=True,
            )
            processes[number] = process
            copies.append(asyncio.create_task(_copy_errors(number, process)))
        yield processes
    finally:
        await asyncio.gather(*(_end(process, end_timeout_s) for process in processes.values()))
        await asyncio.gather(*copies)


async def _end(process: Process, timeout_s: float) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
    try:
        await asyncio.wait_for(process.wait(), timeout_s)
    except TimeoutError:
        process.kill()
        await process.wait()


async def _copy_errors(number: int, process: Process) -> None:
    """Copy the standard error of a replica, each line with its number."""
    assert process.stderr is not None
    while line := await process.stderr.readline():
        sys.stderr.write(f"replica {number}: {line.decode(errors='replace')}")
        sys.stderr.flush()


async def _address(number: int, command: ReplicaCommand, processes: Mapping[int, Process]) -> str:
    """Return the address of a replica, of one on this host once it is ready."""
    if command.address is not None:
        return command.address
    process = processes[number]
    assert process.stdout is not None
    while line := await process.stdout.readline():
        if line.startswith(READY):
            return line.removeprefix(READY).decode().strip()
    status = await process.wait()
    raise StageError(
        f"replica {number} ended with status {status} before it was ready", is_permanent=True
    )


def _error(
    processes: Mapping[int, Process], commands: Sequence[ReplicaCommand]
) -> StageError | None:
    """Return an error once no replica is left; those of other hosts may come back."""
    if any(command.address is not None for command in commands):
        return None
    return None if any(one.returncode is None for one in processes.values()) else _ended(processes)


def _ended(processes: Mapping[int, Process]) -> StageError:
    statuses = ", ".join(str(process.returncode) for process in processes.values())
    return StageError(f"all replicas have ended, with status {statuses}")
