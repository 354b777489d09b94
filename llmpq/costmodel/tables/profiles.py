"""Profiles: find the measured tables of a device, by their provenance lines.

A table that the cluster file names for a device must be of this model; a folder that it names must
have one. Another folder of tables is searched for those that match. Tables of the same device are
read as one.

The seconds of a send are latency plus size over bandwidth (alpha-beta), fitted to a link table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmpq.costmodel.tables.latency import fit_relative
from llmpq.errors import SpecError
from llmpq.spec.cluster import Cluster, Device, LinkSpec
from llmpq.spec.devices.figures import DeviceSpec
from llmpq.spec.fields import encoding_of_file
from llmpq.spec.model import ModelSpec
from llmpq.spec.precision import Dtype, Phase
from llmpq.spec.tables import (
    COMM_HEADER,
    LATENCY_HEADER,
    CommSample,
    LatencyTable,
    LinkEnds,
    ends_of,
    read_comm_table,
    read_latency_table,
)

MAX_BYTES_PER_S = 1e15


@dataclass(frozen=True, slots=True, kw_only=True)
class AlphaBetaCommModel:
    """Seconds of a send from the cluster's links.

    Attributes:
        cluster: names the links; a node's own devices use the sender's figures otherwise.
        specs: figures of every group of the cluster, by ``Device.group``.
        measured: links that replace the cluster's.
        ends: processor time of messages at the ends of measured links, by the two nodes.
    """

    cluster: Cluster
    specs: tuple[DeviceSpec, ...]
    measured: tuple[LinkSpec, ...] = ()
    ends: tuple[tuple[tuple[str, str], LinkEnds], ...] = ()

    def send_s(self, source: Device, target: Device, size_bytes: int) -> float:
        """Return ``latency + size / bandwidth``, and 0 for a device and itself."""
        if source == target:
            return 0.0
        link = self._link(source, target)
        return link.latency_s + size_bytes / link.bytes_per_s

    def end_s(self, source: Device, target: Device) -> float | None:
        """Return the processor time of an empty message at either end, ``None`` if not measured.

        It is the mean of both ends: every rank of a ring sends as often as it receives.
        """
        nodes = {source.node, target.node}
        for between, ends in self.ends:
            if set(between) == nodes:
                return (ends.send_s + ends.receive_s) / 2.0
        return None

    def _link(self, source: Device, target: Device) -> LinkSpec:
        ends = {source.node, target.node}
        for link in self.measured:
            if set(link.between) == ends:
                return link
        return self.cluster.link(source, target, self.specs[source.group])


def fit_links(samples: Sequence[CommSample]) -> tuple[LinkSpec, ...]:
    """Fit latency and bandwidth of every pair of nodes, both directions together.

    Minimizes the relative error, so that small messages determine the latency and large ones the
    bandwidth; neither is negative. Raises ``SpecError`` for a pair measured at one size only.
    """
    pairs = dict.fromkeys(tuple(sorted((one.source, one.target))) for one in samples)
    links = []
    for first, second in pairs:
        own = [one for one in samples if {one.source, one.target} == {first, second}]
        if len({one.size_bytes for one in own}) < 2:
            raise SpecError(
                f"link table: found one message size between '{first}' and '{second}', "
                "expected at least two"
            )
        features = np.array([[1.0, float(one.size_bytes)] for one in own])
        alpha, beta = fit_relative(features, np.array([one.seconds for one in own]))
        rate = 1.0 / max(beta, 1.0 / MAX_BYTES_PER_S)
        links.append(LinkSpec(between=(first, second), bytes_per_s=rate, latency_s=float(alpha)))
    return tuple(links)


STAGE_KEY = "stage_s"
"""Provenance line of a latency table: per-stage overhead, in addition to the layers."""
MAX_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOverhead:
    """Seconds that a stage takes for a micro-batch apart from its layers, by phase."""

    prefill: float = 0.0
    decode: float = 0.0

    def seconds(self, phase: Phase) -> float:
        """Return the seconds in a phase."""
        return self.prefill if phase is Phase.PREFILL else self.decode

    @classmethod
    def of(cls, file: str, provenance: dict[str, str]) -> StageOverhead:
        """Read ``stage_s: prefill 0.0004 decode 0.0003``; both are 0 without the line.

        A malformed line is a ``SpecError``.
        """
        text = provenance.get(STAGE_KEY)
        if text is None:
            return cls()
        try:
            first, prefill, second, decode = text.split()
            found = float(prefill), float(decode)
        except ValueError:
            first, second, found = "", "", (-1.0, -1.0)
        if (first, second) != ("prefill", "decode") or not all(0 <= x < MAX_S for x in found):
            raise SpecError(
                f"{file}: provenance '{STAGE_KEY}': found '{text}', expected 'prefill X decode Y', "
                f"both at least 0 and below {MAX_S:g}"
            )
        return cls(prefill=found[0], decode=found[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The measured table of a device, its file, the layer measured, and the overhead of a stage."""

    table: LatencyTable
    file: str
    layer: int
    stage: StageOverhead = StageOverhead()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKey:
    """What a table must have been measured on; a key that its provenance lacks matches."""

    model: ModelSpec
    dtype: Dtype
    device: Device

    def mismatch(self, provenance: dict[str, str]) -> str | None:
        """Return what differs, in words, or ``None``."""
        device = self.device
        wanted = {
            "model": self.model.name,
            "dtype": self.dtype,
            "device": device.type,
            "threads": device.threads,
            "cpu_isa": device.cpu_isa,
            "tensor_parallel": device.members,
            "cpu_share": device.cpu_share or 1.0,
        }
        # A table that states no share was measured by one device with all of its threads' time.
        stated = {"tensor_parallel": "1", "cpu_share": "1.0"} | provenance
        for key, value in wanted.items():
            if value is not None and stated.get(key, str(value)) != str(value):
                return f"found {key} '{stated[key]}', expected '{value}'"
        return None


def find_profile(key: ProfileKey, folder_tables: dict[str, LatencyTable]) -> Profile | None:
    """Return the measured profile of a device, ``None`` when there is none.

    Raises:
        SpecError: the cluster names a table for this device that was measured on something else,
            or a folder without one for it.
    """
    path = key.device.profile
    if path is not None:
        matching = _named_tables(key, Path(path))
    else:
        matching = {
            file: table
            for file, table in folder_tables.items()
            if "device" in (origin := dict(table.provenance)) and key.mismatch(origin) is None
        }
    if not matching:
        return None
    layers = {_layer(file, table, key.model) for file, table in matching.items()}
    if len(layers) > 1:
        raise SpecError(
            f"{', '.join(matching)}: found tables of different layers {sorted(layers)} for one "
            "device, expected one layer"
        )
    samples = tuple(sample for table in matching.values() for sample in table.samples)
    lines = (line for table in matching.values() for line in table.provenance)
    filled = dict.fromkeys(line for line in lines if line[0].startswith("filled_"))
    stages = [StageOverhead.of(file, dict(one.provenance)) for file, one in matching.items()]
    return Profile(
        table=LatencyTable(samples=samples, provenance=tuple(filled)),
        file=", ".join(matching),
        layer=layers.pop(),
        # The first stated overhead counts.
        stage=next((one for one in stages if one != StageOverhead()), StageOverhead()),
    )


def _named_tables(key: ProfileKey, path: Path) -> dict[str, LatencyTable]:
    """Return the table that the cluster file names for a device, or that of the folder it names."""
    if not path.is_dir():
        table = read_latency_table(str(path))
        difference = key.mismatch(dict(table.provenance))
        if difference is not None:
            raise SpecError(f"{path}: not a table for device {key.device.label}: {difference}")
        return {str(path): table}
    tables = read_folder(path)
    differences = {file: key.mismatch(dict(table.provenance)) for file, table in tables.items()}
    if all(differences.values()):
        found = [f"{Path(file).name}: {one}" for file, one in differences.items()]
        raise SpecError(
            f"{path}: no table for device {key.device.label}: "
            f"{'; '.join(found) or 'found no latency table'}"
        )
    return {file: table for file, table in tables.items() if differences[file] is None}


def read_folder(folder: Path | None) -> dict[str, LatencyTable]:
    """Read every latency table of a folder, by file; other CSV files are skipped.

    Raises:
        SpecError: no such folder, or a latency table in it is malformed.
    """
    if folder is None:
        return {}
    if not folder.is_dir():
        raise SpecError(f"{folder}: no such folder, expected one with measured tables")
    files = _tables(folder, ",".join(LATENCY_HEADER))
    return {str(file): read_latency_table(file) for file in files}


def read_links(
    folder: Path | None, cluster: Cluster, specs: tuple[DeviceSpec, ...]
) -> AlphaBetaCommModel:
    """Fit the links of a cluster from the link tables of a folder; without one, use the cluster's.

    Tables whose provenance names another cluster, and nodes that the cluster lacks, are skipped.
    """
    if folder is None:
        return AlphaBetaCommModel(cluster=cluster, specs=specs)
    names = {node.name for node in cluster.nodes}
    header = ",".join(COMM_HEADER)
    samples: list[CommSample] = []
    ends: dict[tuple[str, str], LinkEnds] = {}
    for file in _tables(folder, header):
        table = read_comm_table(file)
        if dict(table.provenance).get("cluster", cluster.name) == cluster.name:
            own = [one for one in table.samples if {one.source, one.target} <= names]
            samples += own
            for first, second in dict.fromkeys((one.source, one.target) for one in own):
                found = ends_of(str(file), table, (first, second))
                ends |= {} if found is None else {(first, second): found}
    return AlphaBetaCommModel(
        cluster=cluster, specs=specs, measured=fit_links(samples), ends=tuple(ends.items())
    )


def _tables(folder: Path, header: str) -> list[Path]:
    """Return the CSV files whose first line after the provenance is ``header``."""
    return [file for file in sorted(folder.glob("*.csv")) if _header(file) == header]


def _header(file: Path) -> str:
    with file.open(encoding=encoding_of_file(file), errors="replace") as lines:
        return next((line.strip() for line in lines if line.strip() and line[0] != "#"), "")


def _layer(file: str, table: LatencyTable, model: ModelSpec) -> int:
    text = dict(table.provenance).get("layer", "0")
    if not text.isdecimal() or int(text) >= model.num_layers:
        raise SpecError(
            f"{file}: provenance 'layer': found '{text}', expected a layer below {model.num_layers}"
        )
    return int(text)
