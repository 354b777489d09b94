"""The catalogue's models and devices, and the families that are planned, as Markdown."""

from __future__ import annotations

import json
import re
from pathlib import Path

from llmpq.spec import catalog
from llmpq.spec.families import known_families
from llmpq.spec.huggingface.families import model_types
from llmpq.spec.precision import Phase
from llmpq.units import GIB, KIB
from scripts.docs_site import fit_table

SCHEMAS = Path(__file__).resolve().parents[2] / "llmpq" / "spec" / "schema"
VALUE_BYTES = 2
"""Of a weight and of a cached value at 16 bits."""
MARKER = re.compile(r"^<!-- catalogue: (models|devices|device fields|families|fit) -->$", re.M)


def expand(markdown: str) -> str:
    """Replace the markers of a page."""
    makers = {
        "models": models,
        "devices": devices,
        "device fields": device_fields,
        "families": families,
        "fit": fit_table.fit,
    }
    return MARKER.sub(lambda found: makers[found[1]](), markdown)


def families() -> str:
    """Return a table of the families that are planned, and of those that are run."""
    planned = set(model_types())
    tested = {family.name for family in known_families() if family.is_tested}
    groups = {
        "planned and run": planned & tested,
        "planned": planned - tested,
        "run": tested - planned,
    }
    lines = ["| | families |", "| --- | --- |"]
    lines += [
        f"| {title} | {', '.join(f'`{name}`' for name in sorted(names))} |"
        for title, names in groups.items()
        if names
    ]
    return "\n".join(lines)


def models() -> str:
    """Return a table of all models: parameters, bytes of weights and of a cached token."""
    lines = ["| name | parameters, 10^9 | weights, GiB | cache, KiB a token |", "|" + " --- |" * 4]
    for name in sorted(catalog.model_names(), key=str.lower):
        model = catalog.model(name)
        values = sum(layer.kv_values_per_token for layer in model.layers)
        billions, gib = model.parameters / 1e9, VALUE_BYTES * model.parameters / GIB
        cache = VALUE_BYTES * values / KIB
        lines.append(f"| `{name}` | {billions:.3f} | {gib:.2f} | {cache:,.0f} |")
    return "\n".join(lines)


def devices() -> str:
    """Return a table of all devices."""
    heads = (
        "type",
        "memory, GiB",
        "16-bit arithmetic, TFLOP/s",
        "memory bandwidth, GB/s",
        *(f"{one.value}, of the forecast" for one in Phase),
    )
    lines = [f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
    for device in map(catalog.device, catalog.device_types()):
        rate = max(dict(device.flops).values())
        ranges = (
            f"{1.0 - faster:.2f} to {1.0 + slower:.2f}"
            for faster, slower in map(device.deviation, Phase)
        )
        lines.append(
            f"| `{device.type}` | {device.memory_bytes / GIB:.0f} | "
            f"{rate / 1e12:,.1f} | {device.memory_bytes_per_s / 1e9:,.0f} | "
            f"{' | '.join(ranges)} |"
        )
    return "\n".join(lines)


def device_fields() -> str:
    """Return a table of the fields of a device type, from its JSON Schema."""
    schema = json.loads((SCHEMAS / "cluster.v1.schema.json").read_text(encoding="utf-8"))
    fields = schema["properties"]["device_types"]["items"]["properties"]
    lines = ["| field | meaning |", "| --- | --- |"]
    return "\n".join(
        [*lines, *(f"| `{name}` | {one['description']} |" for name, one in fields.items())]
    )
