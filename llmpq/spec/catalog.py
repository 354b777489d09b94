"""Catalogue: models and devices by name, read from the package's own data files.

A model's entry is the part of its public ``config.json`` that determines sizes, with the published
parameter count; a device's entry has the source of every figure. An unknown name is an error that
lists the nearest ones.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from llmpq.errors import SpecError
from llmpq.spec.cluster import DeviceSpec
from llmpq.spec.codec import from_json
from llmpq.spec.fields import Fields, read_json
from llmpq.spec.huggingface.families import load_model_dir, model_from_config
from llmpq.spec.model import ModelSpec

_PAPER_NAMES = {"opt": "facebook/opt-{}", "bloom": "bigscience/bloom-{}"}


def model(name: str) -> ModelSpec:
    """Return the catalogue's model of that name (any case).

    Raises:
        SpecError: no such model; the message offers the nearest names.
    """
    found = {known.lower(): known for known in _models()}.get(name.lower())
    if found is None:
        raise _unknown("model", name, model_names())
    return model_from_config(_models()[found], found, f"catalogue entry {found}")


def model_names() -> tuple[str, ...]:
    """Return the names of all models, in the order of the file."""
    return tuple(_models())


def paper_model_name(family: str, size: str) -> str:
    """Translate the paper's ``--model-name opt --model_size 30b`` into a catalogue name."""
    pattern = _PAPER_NAMES.get(family.lower())
    if pattern is None:
        raise _unknown("model family", family, _PAPER_NAMES)
    name = pattern.format(size.lower()).removesuffix("-176b")
    return model(name).name


def resolve_model(name_or_dir: str | Path) -> tuple[ModelSpec, Path | None]:
    """Return a model given by directory or catalogue name, and the directory if it is one.

    Raises:
        SpecError: neither a directory with ``config.json`` nor a catalogue name.
    """
    folder = Path(name_or_dir)
    if folder.is_dir():
        return load_model_dir(folder), folder
    try:
        return model(str(name_or_dir)), None
    except SpecError as error:
        raise SpecError(f"{error} (a directory of that name does not exist either)") from None


def device(type_name: str) -> DeviceSpec:
    """Return the figures of a type of device.

    Raises:
        SpecError: no such type; the message offers the nearest names.
    """
    found = _devices().get(type_name)
    if found is None:
        raise _unknown("device type", type_name, device_types())
    return found


def device_types() -> tuple[str, ...]:
    """Return the names of all device types, in the order of the file."""
    return tuple(_devices())


@cache
def _models() -> dict[str, Any]:
    """Return the configuration of every model."""
    entries = _data("models.json").children("models", minimum=1)
    return {entry.text("name"): entry.take("config") for entry in entries}


@cache
def _devices() -> dict[str, DeviceSpec]:
    found = {}
    for entry in _data("devices.json").children("devices", minimum=1):
        entry.take("source")
        spec = from_json(DeviceSpec, entry)
        found[spec.type] = spec
    return found


def _data(name: str) -> Fields:
    with resources.as_file(resources.files("llmpq") / "data" / name) as path:
        fields = Fields(read_json(path), f"llmpq/data/{name}")
    fields.schema()
    return fields


def _unknown(what: str, name: str, known: Iterable[str]) -> SpecError:
    names = {known_name.lower(): known_name for known_name in known}
    # Users may leave out the owner of a repository id.
    short = {key.rpartition("/")[2]: key for key in names}
    wanted = name.lower()
    near = difflib.get_close_matches(wanted, names, n=3, cutoff=0.5)
    near += [short[key] for key in difflib.get_close_matches(wanted, short, n=3, cutoff=0.5)]
    offers = [names[key] for key in dict.fromkeys(near)] or list(names.values())
    return SpecError(
        f"{what}: found '{name}', expected a name of the catalogue; did you mean "
        f"{', '.join(offers[:5])}?"
    )
