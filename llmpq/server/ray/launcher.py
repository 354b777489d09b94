"""Hosts of a run as actors of a Ray cluster: Ray places them, and each runs the command.

A placement group has a bundle for each node of the plan, each on another node of Ray, whose label
:data:`LABEL` says which devices it has. The actor in a bundle runs ``llmpq-dist`` there, as a user
would on several hosts. Ray carries the arguments, the token of the run and what the commands
print; frames pass over our own sockets. The kernel ends a command with its actor, and Ray ends the
actors with the process that started them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray._private import worker as ray_worker
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from llmpq.dist.launch.process_environment import python_path
from llmpq.dist.launch.signals import StopRequest, clean_up_if_killed, ending_with_this_process
from llmpq.errors import CapacityError, SpecError, StageError, StoppedError
from llmpq.logging import get_logger
from llmpq.spec.catalog import device as device_spec
from llmpq.spec.cluster import Cluster, Device
from llmpq.spec.plan import Plan

logger = get_logger(__name__)
LABEL = "llmpq-device"
"""Label of a node of Ray: the device types of a node of the plan's cluster, joined by ``_``."""
PLACE_TIMEOUT_S = 60.0
REACH_TIMEOUT_S = 5.0
POLL_S = 0.2
END_TIMEOUT_S = 20.0
"""Seconds that the other hosts have to end by themselves after a failure."""
MAX_ERROR_LINES = 40
MODULE = "llmpq.cli.commands.dist"
TASK_VARIABLES = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
"""Say that a command is one of several tasks, which is true of what started Ray only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayHost:
    """What one node of a plan asks of a node of Ray.

    Attributes:
        node: name in the plan.
        ranks: that run there.
        devices: value of the label.
        resources: that Ray reserves: a GPU for each accelerator, the threads of CPU stages.
    """

    node: str
    ranks: tuple[int, ...]
    devices: str
    resources: dict[str, float]

    @property
    def wanted(self) -> str:
        """The node of Ray in words."""
        return f"{LABEL}={self.devices} with {resources_text(self.resources)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostEnd:
    """How the command of a host has ended.

    Attributes:
        node: of the plan.
        status: exit status.
        out: what it printed on standard output.
        errors: its last lines on standard error.
    """

    node: str
    status: int
    out: str = ""
    errors: str = ""


class HostRunner:
    """Runs the command of a host as an actor of Ray.

    Args:
        node: of the plan.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self._process: subprocess.Popen[str] | None = None

    def address(self) -> tuple[str, int]:
        """Return the address of this node, and a port that is free on it."""
        host = ray.util.get_node_ip_address()
        with socket.create_server((host, 0)) as server:
            return host, int(server.getsockname()[1])

    def run(self, words: Sequence[str], folder: str, token: str) -> HostEnd:
        """Run ``llmpq-dist`` to its end.

        Args:
            words: arguments, without the file of the token.
            folder: in which relative paths are looked up.
            token: secret of the run; empty on one host.
        """
        if not Path(folder).is_dir():
            text = f"found no folder {folder} here, expected that of the command on every node"
            return HostEnd(node=self._node, status=SpecError.exit_status, errors=text)
        with tempfile.TemporaryDirectory(prefix="llmpq-ray-") as own, clean_up_if_killed(Path(own)):
            command = [sys.executable, "-P", "-m", MODULE, *words, *_token_words(own, token)]
            environment = {**os.environ, "PYTHONPATH": python_path(os.environ)}
            # The kernel ends the command with this thread, which waits for it.
            self._process = subprocess.Popen(
                ending_with_this_process(command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=folder,
                env={name: environment[name] for name in environment.keys() - {*TASK_VARIABLES}},
                text=True,
                errors="replace",
            )
            out, errors = self._process.communicate()
        lines = errors.splitlines()[-MAX_ERROR_LINES:]
        status = self._process.returncode
        if status < 0:
            lines.append(f"ended by {signal.Signals(-status).name}")
            is_stopped = -status == signal.SIGTERM
            status = StoppedError.exit_status if is_stopped else StageError.exit_status
        return HostEnd(node=self._node, status=status, out=out, errors="\n".join(lines))

    def stop(self) -> None:
        """Ask the command to end; it drains."""
        while self._process is None:
            time.sleep(POLL_S)
        self._process.send_signal(signal.SIGTERM)


def _token_words(folder: str, token: str) -> list[str]:
    if not token:
        return []
    file = Path(folder) / "token"
    file.touch(mode=0o600)
    file.write_text(token, encoding="ascii")
    return ["--token_file", str(file)]


def run_on_ray(
    plan: Plan,
    words: Sequence[str],
    stop: StopRequest,
    *,
    address: str | None = None,
    place_timeout_s: float = PLACE_TIMEOUT_S,
) -> list[HostEnd]:
    """Run ``llmpq-dist`` on the nodes of a Ray cluster that have the devices of a plan.

    Args:
        plan: its nodes are the hosts, the node of rank 0 first.
        words: arguments of the command, without those of hosts; files are those of each node.
        stop: asks the run to drain; by signals too.
        address: of the cluster; by default the one that Ray finds.
        place_timeout_s: seconds to wait until the nodes are free.

    Returns:
        How each host has ended, that of rank 0 first.

    Raises:
        SpecError: there is no cluster, or a device type cannot be a label.
        CapacityError: the cluster has no free nodes with the labels.
        StoppedError: the run was asked to end before it began.
    """
    wanted = ray_hosts(plan)
    # Ray handles signals from here on, so that ours come after.
    with (
        ray_cluster(address),
        stop.from_signals(),
        _placed(wanted, stop, place_timeout_s) as group,
    ):
        actors = [_actor(host, group, number) for number, host in enumerate(wanted)]
        try:
            return _run(wanted, actors, words, stop)
        finally:
            for actor in actors:
                ray.kill(actor)


def ray_hosts(plan: Plan) -> list[RayHost]:
    """Return what each node of a plan asks of a node of Ray, that of rank 0 first."""
    ranks: dict[str, list[int]] = {}
    for rank, index in enumerate(plan.rank_devices):
        ranks.setdefault(plan.cluster.devices[index].node, []).append(rank)
    return [
        RayHost(
            node=node,
            ranks=tuple(own),
            devices=device_label(node, plan.cluster),
            resources=with_threads(
                reserved(_devices(plan, own), plan.cluster), host_threads(plan, own)
            ),
        )
        for node, own in ranks.items()
    ]


def with_threads(resources: dict[str, float], threads: int) -> dict[str, float]:
    """Return what is reserved, and so many threads that compute experts."""
    cpus = resources.get("CPU", 0.0) + threads
    return {**resources, "CPU": cpus} if cpus else resources


def host_threads(plan: Plan, ranks: Sequence[int]) -> int:
    """Return the threads that compute experts of ranks of a node at the same time.

    One sequence is on one rank at a time.
    """
    threads = [plan.stages[rank].host_threads for rank in ranks if rank < len(plan.stages)]
    return max(threads, default=0) if plan.workload.batch == 1 else sum(threads)


def _devices(plan: Plan, ranks: Sequence[int]) -> list[Device]:
    """Return the devices of some ranks, each once."""
    found = dict.fromkeys(plan.rank_devices[rank] for rank in ranks)
    return [plan.cluster.devices[index] for index in found]


def device_label(node: str, cluster: Cluster) -> str:
    """Return the value of the label for a node: the types of its devices."""
    types = (one.type for one in cluster.devices if one.node == node)
    return "_".join(dict.fromkeys(types))


def reserved(devices: Sequence[Device], cluster: Cluster) -> dict[str, float]:
    """Return what Ray reserves for devices of a node: threads of CPU devices, and accelerators."""
    found = {"CPU": 0.0, "GPU": 0.0}
    for device in devices:
        if device_spec(device.type, cluster).kind == "cpu":
            found["CPU"] += device.threads or 1
        else:
            found["GPU"] += 1
    return {name: count for name, count in found.items() if count}


@contextlib.contextmanager
def ray_cluster(address: str | None) -> Iterator[None]:
    """Connect to a Ray cluster while the context lasts, unless this process is connected.

    Args:
        address: of the cluster; ``None`` for the one that Ray finds.

    Raises:
        SpecError: there is none.
    """
    if ray.is_initialized():
        yield
        return
    # Ray prints losses of nodes on standard output, which has the results of the command.
    ray_worker.print_to_stdstream = _log_text_of_ray
    try:
        _check_reachable(address)
        ray.init(address=address or "auto", logging_level="error", log_to_driver=False)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise SpecError(
            f"--ray_address: found no Ray cluster at {address or 'the default address'}, expected "
            f"one that 'ray start' began, with a node on this host ({reason})"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def _check_reachable(address: str | None) -> None:
    """Raise ``OSError`` if nothing listens at an address; Ray itself would try for minutes."""
    host, _, port = (address or "").rpartition(":")
    if port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), REACH_TIMEOUT_S).close()


def _log_text_of_ray(data: Mapping[str, Any], **_: object) -> None:
    for text in data["lines"]:
        logger.info("Ray: %s", text)


@contextlib.contextmanager
def _placed(
    wanted: Sequence[RayHost], stop: StopRequest, timeout_s: float
) -> Iterator[PlacementGroup]:
    """Reserve nodes of Ray, a different one for each host."""
    resources = [host.resources for host in wanted]
    labels = [{LABEL: host.devices} for host in wanted]
    try:
        group = new_group(resources, labels, "STRICT_SPREAD", timeout_s, stop)
    except ValueError as error:
        raise SpecError(f"cluster: device types: {str(error).splitlines()[0]}") from None
    if group is None:
        raise CapacityError(
            f"Ray: found the nodes {_nodes_text()}, expected within {timeout_s:g} s that "
            f"these are free: {', '.join(host.wanted for host in wanted)}"
        )
    try:
        yield group
    finally:
        remove_placement_group(group)


def new_group(
    resources: Sequence[dict[str, float]],
    labels: Sequence[dict[str, str]],
    strategy: str,
    timeout_s: float,
    stop: StopRequest | None = None,
) -> PlacementGroup | None:
    """Return a placement group once Ray has reserved it, ``None`` if that takes too long.

    Args:
        resources: of each bundle.
        labels: that the node of each bundle has.
        strategy: of Ray, for the nodes of bundles.
        timeout_s: how long to wait.
        stop: ends the waiting.

    Raises:
        ValueError: a label is none for Ray.
        StoppedError: the run was asked to end meanwhile.
    """
    group = placement_group(list(resources), strategy=strategy, bundle_label_selector=list(labels))
    with contextlib.ExitStack() as stack:
        stack.callback(remove_placement_group, group)
        deadline_s = time.monotonic() + timeout_s
        while not group.wait(POLL_S):
            if stop is not None and stop.is_requested:
                raise StoppedError(f"stopped by {stop.source}: Ray had not placed the run yet")
            if time.monotonic() > deadline_s:
                return None
        stack.pop_all()
    return group


def _nodes_text() -> str:
    """Return label and resources of every node of Ray."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return ", ".join(
        f"{LABEL}={node.get('Labels', {}).get(LABEL, '(none)')} "
        f"with {resources_text(node['Resources'])}"
        for node in nodes
    )


def resources_text(resources: Mapping[str, float]) -> str:
    """Return what Ray has or reserves in words."""
    found = [f"{resources[name]:g} {name}" for name in ("CPU", "GPU") if resources.get(name)]
    return " and ".join(found) or "neither CPU nor GPU"


def _actor(host: RayHost, group: PlacementGroup, number: int) -> Any:
    """Return the actor of a host, in its bundle."""
    return (
        ray.remote(HostRunner)
        .options(
            num_cpus=host.resources.get("CPU", 0),
            num_gpus=host.resources.get("GPU", 0),
            max_concurrency=2,  # the command, and its end
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=number
            ),
        )
        .remote(host.node)
    )


def _run(
    wanted: Sequence[RayHost], actors: Sequence[Any], words: Sequence[str], stop: StopRequest
) -> list[HostEnd]:
    """Run the command on all hosts until it has ended everywhere."""
    token = secrets.token_hex(32) if len(actors) > 1 else ""
    try:
        address, port = ray.get(actors[0].address.remote())
    except ray.exceptions.RayError as error:
        return [_lost(wanted[0], error)]
    folder = os.getcwd()  # noqa: PTH109  a name for another host
    calls = {
        actor.run.remote([*words, *_host_words(number, len(actors), address, port)], folder, token):
        host
        for number, (actor, host) in enumerate(zip(actors, wanted, strict=True))
    }  # fmt: skip
    ends: dict[Any, HostEnd] = {}
    failed_s: float | None = None
    is_draining = False
    while len(ends) < len(calls):
        for call in ray.wait([call for call in calls if call not in ends], timeout=POLL_S)[0]:
            ends[call] = _end(call, calls[call])
        if any(end.status for end in ends.values()):
            failed_s = failed_s or time.monotonic()
            if time.monotonic() - failed_s > END_TIMEOUT_S:
                for call in calls.keys() - ends.keys():
                    text = (
                        f"ended, for it went on {END_TIMEOUT_S:g} s after another node had failed"
                    )
                    status = StageError.exit_status
                    ends[call] = HostEnd(node=calls[call].node, status=status, errors=text)
        if stop.is_requested and not is_draining:
            is_draining = True
            actors[0].stop.remote()  # only the master drains; the others end with it
    return [ends[call] for call in calls]


def _host_words(number: int, count: int, address: str, port: int) -> list[str]:
    """Return the options of one host; none where there is a single one."""
    if count == 1:
        return []
    return [
        "--nnodes", str(count), "--node_rank", str(number),
        "--master_addr", address, "--master_port", str(port),
    ]  # fmt: skip


def _end(call: Any, host: RayHost) -> HostEnd:
    """Return how a host has ended, also where Ray lost its actor."""
    try:
        found: HostEnd = ray.get(call)
    except ray.exceptions.RayError as error:
        return _lost(host, error)
    return found


def _lost(host: RayHost, error: Exception) -> HostEnd:
    ranks = ", ".join(map(str, host.ranks))
    text = f"Ray lost the actor with rank {ranks} ({type(error).__name__}): {error}"
    return HostEnd(node=host.node, status=StageError.exit_status, errors=text[:2000])
