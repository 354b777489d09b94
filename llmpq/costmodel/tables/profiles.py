"""Profiles: which measured table speaks for which device.

What a table was measured on stands in its provenance lines, never in its file name. A cluster file
that names a table for a device must name one of this model; a folder of tables is searched for
those that match, and tables of the same device are read as one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llmpq.costmodel.comm import AlphaBetaCommModel, fit_links
from llmpq.errors import SpecError
from llmpq.spec.cluster import Cluster, Device, DeviceSpec
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

STAGE_KEY = "stage_s"
"""Provenance line of a latency table: what a stage takes apart from its layers."""
COMPANY_KEY = "company"
"""Provenance line: how much longer a layer takes while other workers keep the host's cores busy."""
LOOP_KEY = "loop_s"
"""Provenance line: what the master's own loop takes of a micro-batch beside the model."""
STAGE_LOOP_KEY = "stage_loop_s"
"""Provenance line: what a stage that is no master takes of a micro-batch beside the model."""
DRIFT_KEY = "drift"
"""Provenance line: how far the device's speed differs from one moment to the next."""
MAX_S = 3600.0
MAX_COMPANY = 100.0
MAX_DRIFT = 10.0


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
        """Read ``stage_s: prefill 0.0004 decode 0.0003``; without the line both are 0.

        Raises:
            SpecError: the line says something else.
        """
        found = _pair(file, provenance, STAGE_KEY, _PHASES, (0.0, MAX_S))
        return cls() if found is None else cls(prefill=found[0], decode=found[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Company:
    """How much longer layers take while other workers of the host compute, by phase, at least 1.

    Workers with a core each still share memory bandwidth, the last cache and the clock.
    """

    prefill: float = 1.0
    decode: float = 1.0

    def factor(self, phase: Phase) -> float:
        """Return the factor in a phase."""
        return self.prefill if phase is Phase.PREFILL else self.decode

    @classmethod
    def of(cls, file: str, provenance: dict[str, str]) -> Company:
        """Read ``company: prefill 1.03 decode 1.12``; without the line both are 1.

        Raises:
            SpecError: the line says something else.
        """
        found = _pair(file, provenance, COMPANY_KEY, _PHASES, (1.0, MAX_COMPANY))
        return cls() if found is None else cls(prefill=found[0], decode=found[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOverhead:
    """What the master's own loop takes of a micro-batch beside the model: requests, rows, records.

    Attributes:
        step_s: of every micro-batch.
        row_s: of every row of it.
    """

    step_s: float = 0.0
    row_s: float = 0.0

    @classmethod
    def of(cls, file: str, provenance: dict[str, str]) -> SchedulerOverhead:
        """Read ``loop_s: step 0.0004 row 0.00003``; without the line both are 0.

        Raises:
            SpecError: the line says something else.
        """
        found = _pair(file, provenance, LOOP_KEY, ("step", "row"), (0.0, MAX_S))
        return cls() if found is None else cls(step_s=found[0], row_s=found[1])


def drift_of(file: str, provenance: dict[str, str]) -> float:
    """Read ``drift: 0.08``: one standard deviation of the level, as a share of it.

    It is between spans of a few seconds, or between the runs that a table was corrected by; without
    the line it is 0.

    Raises:
        SpecError: the line says something else.
    """
    return _number(file, provenance, DRIFT_KEY, "a share", MAX_DRIFT)


def stage_loop_of(file: str, provenance: dict[str, str]) -> float:
    """Read ``stage_loop_s: 0.00006``, seconds of a micro-batch; without the line it is 0.

    Raises:
        SpecError: the line says something else.
    """
    return _number(file, provenance, STAGE_LOOP_KEY, "seconds", MAX_S)


def _number(file: str, provenance: dict[str, str], key: str, what: str, limit: float) -> float:
    """Return the one figure of a line, in ``[0, limit)``; 0 without the line."""
    text = provenance.get(key, "0")
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0.0 <= found < limit:
        raise SpecError(
            f"{file}: provenance '{key}': found '{text}', expected {what} of at least 0 and below "
            f"{limit:g}"
        )
    return found


_PHASES = ("prefill", "decode")


def _pair(
    file: str,
    provenance: dict[str, str],
    key: str,
    names: tuple[str, str],
    limits: tuple[float, float],
) -> tuple[float, float] | None:
    """Return the figures of a line ``KEY: NAME X NAME Y``, ``None`` without the line."""
    text = provenance.get(key)
    if text is None:
        return None
    low, high = limits
    try:
        first, one, second, other = text.split()
        found = float(one), float(other)
    except ValueError:
        first, second, found = "", "", limits
    if (first, second) != names or not all(low <= x < high for x in found):
        raise SpecError(
            f"{file}: provenance '{key}': found '{text}', expected '{names[0]} X {names[1]} Y', "
            f"both at least {low:g} and below {high:g}"
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A table that speaks for a device.

    Attributes:
        table: its samples.
        file: where they come from.
        layer: index of the decoder layer that was measured.
        stage: what a stage takes apart from its layers.
        company: how much longer everything takes beside other workers.
        loop: what the master's own loop takes beside the model.
        stage_loop_s: what the loop of any other stage takes of a micro-batch.
        drift: one standard deviation of the device's speed from moment to moment, as a share.
    """

    table: LatencyTable
    file: str
    layer: int
    stage: StageOverhead = StageOverhead()
    company: Company = Company()
    loop: SchedulerOverhead = SchedulerOverhead()
    stage_loop_s: float = 0.0
    drift: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKey:
    """What a table must have been measured on; a table that does not say so is taken to match."""

    model: ModelSpec
    dtype: Dtype
    device: Device

    def mismatch(self, provenance: dict[str, str]) -> str | None:
        """Return what differs, in words, or ``None``."""
        wanted = {"model": self.model.name, "dtype": self.dtype, "device": self.device.type}
        for key in ("threads", "cpu_isa"):
            value = getattr(self.device, key)
            if value is not None:
                wanted[key] = str(value)
        for key, value in wanted.items():
            if key in provenance and provenance[key] != value:
                return f"found {key} '{provenance[key]}', expected '{value}'"
        degree = provenance.get("tensor_parallel", "1")
        if degree != str(self.device.members):
            return f"found tensor_parallel '{degree}', expected '{self.device.members}'"
        # A table that states no share was measured with all of its threads' time.
        share, own = provenance.get("cpu_share", "1.0"), str(self.device.cpu_share or 1.0)
        if share != own:
            return f"found cpu_share '{share}', expected '{own}'"
        return None


def find_profile(key: ProfileKey, folder_tables: dict[str, LatencyTable]) -> Profile | None:
    """Return the measured profile of a device, ``None`` when there is none.

    Args:
        key: model, dtype and device.
        folder_tables: the tables of the profile folder, by file.

    Raises:
        SpecError: the cluster names a table for this device that was measured on something else.
    """
    path = key.device.profile
    if path is not None:
        table = read_latency_table(path)
        difference = key.mismatch(dict(table.provenance))
        if difference is not None:
            raise SpecError(f"{path}: not a table for device {key.device.label}: {difference}")
        return _profile({path: table}, path, _layer(path, table, key.model))
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
            f"{', '.join(matching)}: found tables of unlike layers {sorted(layers)} for one "
            "device, expected one layer"
        )
    samples = tuple(sample for table in matching.values() for sample in table.samples)
    lines = (line for table in matching.values() for line in table.provenance)
    filled = dict.fromkeys(line for line in lines if line[0].startswith("filled_"))
    whole = LatencyTable(samples=samples, provenance=tuple(filled))
    return _profile(matching, ", ".join(matching), layers.pop(), whole)


def _profile(
    tables: dict[str, LatencyTable], file: str, layer: int, whole: LatencyTable | None = None
) -> Profile:
    """Return tables of one device as one profile.

    What they say beside their samples is the first that any of them says; of drifts the largest.
    """
    origins = {name: dict(table.provenance) for name, table in tables.items()}
    stages = [StageOverhead.of(name, origin) for name, origin in origins.items()]
    company = [Company.of(name, origin) for name, origin in origins.items()]
    loops = [SchedulerOverhead.of(name, origin) for name, origin in origins.items()]
    return Profile(
        table=next(iter(tables.values())) if whole is None else whole,
        file=file,
        layer=layer,
        stage=next((one for one in stages if one != StageOverhead()), StageOverhead()),
        company=next((one for one in company if one != Company()), Company()),
        loop=next((one for one in loops if one != SchedulerOverhead()), SchedulerOverhead()),
        stage_loop_s=next(
            (found for name, origin in origins.items() if (found := stage_loop_of(name, origin))),
            0.0,
        ),
        drift=max(drift_of(name, origin) for name, origin in origins.items()),
    )


def read_folder(folder: Path | None) -> dict[str, LatencyTable]:
    """Read every latency table of a folder, by file; other CSV files are not looked into.

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
    """Fit the links of a cluster from the link tables of a folder; without one, as it states them.

    A table whose provenance names another cluster is left out, and so are nodes the cluster lacks.
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
    """Return the CSV files whose first line behind the provenance is ``header``."""
    return [file for file in sorted(folder.glob("*.csv")) if _header(file) == header]


def _header(file: Path) -> str:
    with file.open(encoding="utf-8", errors="replace") as lines:
        return next((line.strip() for line in lines if line.strip() and line[0] != "#"), "")


def _layer(file: str, table: LatencyTable, model: ModelSpec) -> int:
    text = dict(table.provenance).get("layer", "0")
    if not text.isdecimal() or int(text) >= model.num_layers:
        raise SpecError(
            f"{file}: provenance 'layer': found '{text}', expected a layer below {model.num_layers}"
        )
    return int(text)
