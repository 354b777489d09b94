"""The figures of this host's devices: measured once and kept, else those of the catalogue.

They are kept in ``$XDG_CACHE_HOME/llmpq/devices``, by device, driver and versions, as files that
``--devices`` takes. A measurement that other programs disturbed is not kept and not used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from llmpq import __version__
from llmpq.cli.common import INTERRUPTED
from llmpq.cli.run_options import store_directory
from llmpq.dist.metrics.measurement import busy_text, is_busy
from llmpq.errors import LlmpqError
from llmpq.profiler.device import cpu_name
from llmpq.spec.catalog import load_devices, with_device_types
from llmpq.spec.cluster import Cluster, DeviceGroup
from llmpq.spec.devices.figures import DeviceEntry

MEASURING_S = 30.0
"""Most seconds that measuring all devices of a host may take."""
BUDGET_S = 3.0
"""Of them, for timing one device; starting and preparing come on top."""
CPU_FEATURES = 1024
"""Of a square weight: few, because making the weights takes most of the time."""

_CATALOGUE = "the catalogue's figures are used"
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostDevice:
    """A type of device of this host, and how ``llmpq-profile device`` measures it.

    Attributes:
        type: of its group.
        words: options of ``llmpq-profile device``.
        file: where its figures are kept.
    """

    type: str
    words: tuple[str, ...]
    file: Path


def cache_folder(name: str) -> Path:
    """Return a folder of what is kept of this host: ``plans`` or ``devices``."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "llmpq" / name


def with_kept_figures(cluster: Cluster) -> Cluster:
    """Return this host's devices with the measured figures that are kept."""
    entries = [entry for one in host_devices(cluster) for entry in _kept(one)]
    return with_device_types(cluster, entries)


def with_measured_figures(cluster: Cluster) -> Cluster:
    """Return this host's devices with figures that are kept or measured now.

    Those of a device that cannot be measured in time, or that other programs use meanwhile, stay
    the catalogue's, which is said.
    """
    end_s = time.monotonic() + MEASURING_S
    entries: list[DeviceEntry] = []
    disks: dict[str, float] = {}
    for one in host_devices(cluster):
        kept = _kept(one)
        entries += kept or _measure(one, end_s - time.monotonic(), disks)
    return with_device_types(_with_disks(cluster, disks), entries)


def _with_disks(cluster: Cluster, disks: Mapping[str, float]) -> Cluster:
    """Return this host's devices with the speed of its disk, by type, which is shared."""

    def stated(group: DeviceGroup) -> DeviceGroup:
        whole = disks.get(group.type)
        return group if whole is None else replace(group, disk_bytes_per_s=whole / group.count)

    own, *others = cluster.nodes
    own = replace(own, devices=tuple(map(stated, own.devices)))
    return replace(cluster, nodes=(own, *others))


def host_devices(cluster: Cluster) -> Iterator[HostDevice]:
    """Yield every type of device of this host once."""
    seen = set()
    for place, group in enumerate(cluster.nodes[0].devices):
        if group.type not in seen:
            seen.add(group.type)
            device = "cpu" if group.type == "cpu" else f"cuda:{place}"
            words = ("--device", device, "--threads", str(group.threads or 1))
            features = ("--features", str(CPU_FEATURES)) if device == "cpu" else ()
            yield HostDevice(type=group.type, words=(*words, *features), file=_file(group))


def _file(group: DeviceGroup) -> Path:
    """Return the file of a device's figures, which other hardware or versions do not have."""
    driver = ""
    if group.type != "cpu":
        with contextlib.suppress(OSError):
            driver = _DRIVER.read_text(encoding="utf-8")
    identity = {
        "type": group.type,
        "chip": cpu_name(),
        "threads": group.threads,
        "instruction_set": group.instruction_set,
        "driver": driver,
        "torch": _version("torch"),
        "store": str(store_directory(None, os.environ)) if group.type == "cpu" else None,
        "llmpq": __version__,
    }
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return cache_folder("devices") / f"{group.type}-{digest[:16]}.json"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _kept(device: HostDevice) -> list[DeviceEntry]:
    """Return the figures that are kept, none if there are none or they cannot be read."""
    try:
        return [entry for entry in load_devices(device.file) if entry.type == device.type]
    except (LlmpqError, OSError):
        return []


def _measure(device: HostDevice, limit_s: float, disks: dict[str, float]) -> list[DeviceEntry]:
    """Measure a device in a process of its own, whose memory is free afterwards.

    Where other programs use it meanwhile, the speed of the disk alone is put into ``disks``.
    """
    _say(f"measuring {device.type}, once, for at most {max(0.0, limit_s):.0f} s (or: --no_measure)")
    device.file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=device.file.parent) as folder:
        output = Path(folder) / "device.json"
        command = [sys.executable, "-m", "llmpq.cli.commands.profile", "device", "--json"]
        command += [*device.words, "--name", device.type, "--budget", str(BUDGET_S)]
        command += ["--output", str(output)]
        # The driver lists GPUs in the order of their slots, torch by their speed.
        environment = {**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        try:
            done = subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, timeout=limit_s, check=True
            )
        except subprocess.TimeoutExpired:
            _say(f"{device.type}: measuring took too long; {_CATALOGUE}")
            return []
        except subprocess.CalledProcessError as error:
            if error.returncode == INTERRUPTED:
                raise KeyboardInterrupt from None
            _say(f"{device.type}: measuring failed; {_CATALOGUE}")
            return []
        found = json.loads(done.stdout)
        share, disk = found["cpu_taken"], found["devices"][0].get("disk_bytes_per_s")
        if is_busy(share):
            if disk is not None:
                disks[device.type] = disk
            _say(f"{busy_text({device.type: share}, 'while measuring')}; {_CATALOGUE}")
            return []
        output.replace(device.file)
    return _kept(device)


def _say(text: str) -> None:
    print(f"llmpq: {text}", file=sys.stderr)
