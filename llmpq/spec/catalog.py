"""Catalogue: models and devices by name, read from the package's own data files.

A model's entry is the part of its public ``config.json`` that determines sizes, with its source and
the parameter count where one is published; a device's entry has the source of every figure. A model
may be named without its owner and in any case, a device as ``llmpq.spec.devices.names`` says. An
unknown name is an error that lists those that begin with it, or the nearest ones.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from llmpq.errors import SpecError
from llmpq.spec.cluster import Cluster, types_label
from llmpq.spec.devices import names
from llmpq.spec.devices.figures import (
    FIGURES,
    GPU_RESERVE_BYTES,
    DeviceEntry,
    DeviceFile,
    DeviceSpec,
    completed,
)
from llmpq.spec.fields import Fields, from_json, read_json
from llmpq.spec.huggingface.described import read_model_file
from llmpq.spec.huggingface.families import load_model_dir, model_from_config
from llmpq.spec.model import ModelSpec
from llmpq.spec.model_files.weight_headers import find_gguf

REFERENCE = {"cpu": "cpu", "cuda": "RTX3090", "mps": "M1", "xpu": "Arc-A770"}
"""By kind, the type whose figures a described device has where it states none."""

OFFERS = 8
"""Most names that a message offers."""
EXAMPLES = 3
"""Names that it shows where none is like the one that was found."""
GPUS = ("cuda", "xpu")
"""Kinds of devices with a memory of their own, of which the driver takes a part."""

_ANY_GPU = re.compile(r"(gpu|cuda|rocm|nvidia|amd)s?(:\d+)?", re.IGNORECASE)
"""What names a GPU in other programs, but not which one."""


def model(name: str) -> ModelSpec:
    """Return the catalogue's model of that name, in any case and with or without its owner.

    Raises:
        SpecError: no such model, or several; the message offers their names.
    """
    wanted = name.lower()
    found = [known for known in _models() if wanted in (known.lower(), _short(known).lower())]
    if len(found) != 1:
        raise _unknown("model", name, model_names(), found)
    return model_from_config(_models()[found[0]], found[0], f"catalogue entry {found[0]}")


def model_names() -> tuple[str, ...]:
    """Return the names of all models, in the order of the file."""
    return tuple(_models())


def paper_model_name(family: str, size: str) -> str:
    """Translate the paper's ``--model-name opt --model_size 30b`` into a catalogue name."""
    return model(f"{family}-{size}".lower().removesuffix("-176b")).name


def resolve_model(name_or_dir: str | Path) -> tuple[ModelSpec, Path | None]:
    """Return a model given by directory, model file or catalogue name, and the path if it is one.

    Raises:
        SpecError: neither a directory with ``config.json`` nor a model file nor a catalogue name.
    """
    path = Path(name_or_dir)
    if path.is_dir() or path.suffix == ".gguf" or find_gguf(path) is not None:
        return load_model_dir(path), path
    if path.suffix == ".json" and path.is_file():
        return read_model_file(path), path
    try:
        return model(str(name_or_dir)), None
    except SpecError as error:
        raise SpecError(f"{error} (a directory of that name does not exist either)") from None


def device(type_name: str, cluster: Cluster | None = None) -> DeviceSpec:
    """Return the figures of a type of device: the cluster's own, else the catalogue's.

    Raises:
        SpecError: no such type, or several that the name may mean; the message offers names.
    """
    own = _own_types(cluster)
    known = device_type(type_name, cluster)
    for place, entry in enumerate(own):
        if entry.type == known:
            return _completed(entry, own[:place])
    return _devices()[known]


def device_type(name: str, cluster: Cluster | None = None) -> str:
    """Return the type that a name means; a cluster's own types are named exactly.

    Raises:
        SpecError: no such type, or several that the name may mean; the message offers names.
    """
    own = [entry.type for entry in _own_types(cluster)]
    if name in own or name in _devices():
        return name
    if _ANY_GPU.fullmatch(name):
        raise SpecError(
            f"device type: found '{name}', expected the name of a GPU, such as RTX4090; "
            "nvidia-smi -L prints those of a host"
        )
    found = names.matching(name, _devices(), _other_names())
    if len(found) != 1:
        raise _unknown("device type", name, (*own, *_devices()), found, names.folded)
    return found[0]


def device_types() -> tuple[str, ...]:
    """Return the names of all device types, in the order of the file."""
    return tuple(_devices())


def device_sources(type_name: str) -> dict[str, str]:
    """Return the origin of every figure of a catalogue type, by field."""
    entries = {entry.type: entry for entry in _entries()}
    entry = entries[type_name]
    found = dict(entry.source or ())
    like = entry.like or REFERENCE[device(type_name).kind]
    if like != type_name:
        inherited = device_sources(like)
        for name in FIGURES:
            if name not in found and name in inherited and name != "compute_capability":
                found[name] = f"assumed equal to {like}; not measured"
    if entry.reserve_bytes is None:  # the default of its kind
        found["reserve_bytes"] = "assumed for its driver and a display; not measured"
    return found


def load_devices(path: str | Path) -> tuple[DeviceEntry, ...]:
    """Read a file of device types.

    Raises:
        SpecError: names the file, the type and the field.
    """
    entries = from_json(DeviceFile, Fields(read_json(path), str(path))).devices
    for place, entry in enumerate(entries):
        try:
            _completed(entry, entries[:place])
        except SpecError as error:
            raise SpecError(f"{path}: {error}") from None
    return entries


def with_device_types(cluster: Cluster, entries: Sequence[DeviceEntry]) -> Cluster:
    """Return a cluster that carries the entries its devices need, in place of its own of that name.

    An entry that another one is like comes before it.
    """
    replaced = {entry.type for entry in entries}
    known = [entry for entry in _own_types(cluster) if entry.type not in replaced] + [*entries]
    needed = cluster.used_types
    for entry in reversed(known):
        if entry.type in needed and entry.like is not None:
            needed.add(entry.like)
    kept = tuple(entry for entry in known if entry.type in needed)
    return replace(cluster, device_types=kept or None)


def with_known_types(cluster: Cluster, where: str) -> Cluster:
    """Return a cluster whose devices all have figures, each named by its type.

    Raises:
        SpecError: names ``where`` (the file), the field and the type.
    """

    def known(name: str, field: str) -> str:
        try:
            device(name, cluster)
            return device_type(name, cluster)
        except SpecError as error:
            raise SpecError(f"{where}: field '{field}': {error}") from None

    for at, entry in enumerate(_own_types(cluster)):
        known(entry.type, f"device_types[{at}]")
    nodes = []
    for place, node in enumerate(cluster.nodes):
        groups = []
        for number, group in enumerate(node.devices):
            field, host = f"nodes[{place}].devices[{number}]", group.host
            if host is not None:
                host = replace(host, type=known(host.type, f"{field}.host.type"))
            groups.append(replace(group, type=known(group.type, f"{field}.type"), host=host))
        nodes.append(replace(node, devices=tuple(groups)))
    is_named_so = cluster.name == types_label(cluster.nodes)
    name = types_label(nodes) if is_named_so else cluster.name
    return replace(cluster, name=name, nodes=tuple(nodes))


def _own_types(cluster: Cluster | None) -> tuple[DeviceEntry, ...]:
    return () if cluster is None else cluster.device_types or ()


def _completed(entry: DeviceEntry, earlier: Sequence[DeviceEntry]) -> DeviceSpec:
    """Return the figures of an entry of a file, which may be like an ``earlier`` one."""
    like = entry.like
    if like is None:
        assert entry.kind is not None  # checked by the entry
        return completed(entry, _devices()[REFERENCE[entry.kind]])
    for place, other in enumerate(earlier):
        if other.type == like:
            return completed(entry, _completed(other, earlier[:place]))
    found = _devices().get(like)
    if found is None:
        names = (*(other.type for other in earlier), *_devices())
        raise _unknown(f"device type '{entry.type}': field 'like'", like, names)
    return completed(entry, found)


@cache
def _models() -> dict[str, Any]:
    """Return the configuration of every model."""
    entries = _data("models.json").children("models", minimum=1)
    return {entry.text("name"): entry.take("config") for entry in entries}


@cache
def _entries() -> tuple[DeviceEntry, ...]:
    children = _data("devices.json").children("devices", minimum=1)
    return tuple(from_json(DeviceEntry, child) for child in children)


@cache
def _devices() -> dict[str, DeviceSpec]:
    """Return the catalogue's types; an entry is like an earlier one."""
    found: dict[str, DeviceSpec] = {}
    for entry in _entries():
        if entry.like is not None:
            found[entry.type] = completed(entry, found[entry.like])
            continue
        stated = {name: getattr(entry, name) for name in FIGURES}
        given = {name: value for name, value in stated.items() if value is not None}
        assert entry.kind is not None
        given.setdefault("reserve_bytes", GPU_RESERVE_BYTES if entry.kind in GPUS else 0)
        found[entry.type] = DeviceSpec(type=entry.type, kind=entry.kind, **given)
    return found


@cache
def _other_names() -> dict[str, str]:
    """Return the types by further names, which their own do not begin or end with."""
    return dict(_data("devices.json").take("other_names"))


def _data(name: str) -> Fields:
    with resources.as_file(resources.files("llmpq") / "data" / name) as path:
        fields = Fields(read_json(path), f"llmpq/data/{name}")
    fields.schema()
    return fields


def _unknown(
    what: str,
    name: str,
    known: Iterable[str],
    candidates: Sequence[str] = (),
    spelling: Callable[[str], str] = str.lower,
) -> SpecError:
    """Return an error that offers ``candidates``, or the ``known`` names like ``name``.

    Those that begin with it come first, then the nearest, as ``spelling`` writes them. Where none
    is near, a few are examples.
    """
    whole = {spelling(known_name): known_name for known_name in known}
    short = {_short(key): key for key in whole}
    wanted = spelling(name)
    near = [key for key in whole if key.startswith(wanted) or _short(key).startswith(wanted)]
    near += difflib.get_close_matches(wanted, whole, n=3, cutoff=0.5)
    near += [short[key] for key in difflib.get_close_matches(wanted, short, n=3, cutoff=0.5)]
    offers = candidates or [whole[key] for key in dict.fromkeys(near)]
    meant = f"; did you mean {', '.join(offers[:OFFERS])}?"
    such = f", such as {', '.join(list(whole.values())[:EXAMPLES])}"
    return SpecError(
        f"{what}: found '{name}', expected a name of the catalogue{meant if offers else such}"
    )


def _short(name: str) -> str:
    """Return the name of a repository without its owner."""
    return name.rpartition("/")[2]
