"""The capability table of the kernels as Markdown."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from llmpq.kernels import BACKENDS

MARKER = "<!-- kernels -->"
HEAD = ("kernel", "device", "bits", "default in", "weights it takes", "bytes it keeps", "time")


def expand(page: str) -> str:
    """Replace the marker of a page."""
    return page.replace(MARKER, table())


def table() -> str:
    """Return one row for each kernel, in the order in which one is chosen."""
    rows = [HEAD, ("---",) * len(HEAD)]
    for name, backend in BACKENDS.items():
        row = backend.capability
        default = short(row.default_dtypes) or "by name only"
        device = ", ".join(row.device_types) or "any"
        bits = ", ".join(map(str, row.bits))
        rows.append((f"`{name}`", device, bits, default, row.shapes, row.stored, row.cost))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def short(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
