"""llmpq-profile import: latency and link tables from published measurements."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmpq.cli.common import command_line, print_json
from llmpq.cli.render import table_summary
from llmpq.costmodel.comm import fit_links
from llmpq.costmodel.importers.imported import (
    DEVICE_TYPES,
    LAYOUTS,
    ImportRequest,
    import_links,
    import_table,
)
from llmpq.errors import SpecError
from llmpq.spec.catalog import resolve_model
from llmpq.spec.precision import BITS
from llmpq.spec.tables import write_comm_table, write_latency_table
from llmpq.units import format_bytes, format_seconds

NAME = "llmpq-profile"


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add ``import`` to the commands."""
    take = commands.add_parser(
        "import", help="write a table from published measurements of a device"
    )
    take.add_argument("--from", required=True, dest="layout", choices=LAYOUTS)
    take.add_argument("--device", help="the database's name, such as a100_sxm")
    take.add_argument("--device_type", help="catalogue name written into the table")
    take.add_argument("--model", help="catalogue name or directory")
    take.add_argument("--output", required=True, type=Path, help="table to write (CSV)")
    take.add_argument("--path", type=Path, help="the database (default: the installed package)")
    take.add_argument("--engine", help="inference engine (default: the first that was measured)")
    take.add_argument("--bits", type=int, nargs="+", default=[3, 4, 8, 16], choices=BITS)
    take.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    take.add_argument(
        "--context_tokens", type=int, default=512, help="context length, where the layout has none"
    )
    take.add_argument(
        "--tensor_parallel", type=int, default=1, metavar="N",
        help="devices that share a layer; its seconds include all-reduces (aiconfigurator)",
    )  # fmt: skip
    take.add_argument(
        "--between", nargs=2, metavar=("NODE", "NODE"),
        help="write a link table of these nodes instead, from the send_recv.csv of --path (vidur); "
        "the same name twice for two devices of one node",
    )  # fmt: skip
    take.add_argument("--json", action="store_true", default=argparse.SUPPRESS)


def run(options: argparse.Namespace, argv: Sequence[str] | None) -> int:
    """Assemble a table and write it."""
    command = ("command", command_line(NAME, argv))
    if options.between is not None:
        return _links(options, command)
    for name in ("device", "model"):
        if getattr(options, name) is None:
            raise SpecError(
                f"--{name}: found nothing, expected a value (it is optional only with --between)"
            )
    model, _ = resolve_model(options.model)
    request = ImportRequest(
        model=model,
        device=options.device,
        device_type=options.device_type or DEVICE_TYPES.get(options.device, options.device),
        bits=tuple(dict.fromkeys(options.bits)),
        dtype=options.dtype,
        path=options.path,
        engine=options.engine,
        context_tokens=options.context_tokens,
        tensor_parallel=options.tensor_parallel,
    )
    table = import_table(options.layout, request)
    provenance = (command, *table.provenance)
    write_latency_table(options.output, replace(table, provenance=provenance))
    if options.json:
        print_json({"output": str(options.output), "points": len(table.samples)})
    else:
        print(table_summary(table))
        print(f"{len(table.samples)} points written to {options.output}")
    return 0


def _links(options: argparse.Namespace, command: tuple[str, str]) -> int:
    table = import_links(options.layout, options.path, (options.between[0], options.between[1]))
    (link,) = fit_links(table.samples)
    write_comm_table(options.output, replace(table, provenance=(command, *table.provenance)))
    if options.json:
        print_json({"output": str(options.output), "points": len(table.samples)})
    else:
        rate = format_bytes(round(link.bytes_per_s))
        print(f"{link.between[0]} - {link.between[1]}  {format_seconds(link.latency_s)}, {rate}/s")
        print(f"{len(table.samples)} points written to {options.output}")
    return 0
