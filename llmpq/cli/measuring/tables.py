"""llmpq-profile fit, import, recalibrate, describe: make and check files without measuring."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from llmpq.cli.common import print_json, print_points, require
from llmpq.cli.render import outlier_lines, table_summary
from llmpq.costmodel.importers.import_table import (
    DEVICE_TYPES,
    LAYOUTS,
    ImportRequest,
    import_links,
    import_table,
)
from llmpq.costmodel.tables.fidelity import fidelity
from llmpq.costmodel.tables.profiles import fit_links
from llmpq.costmodel.tables.recalibrate import recalibrated_table
from llmpq.errors import SpecError
from llmpq.options.declare import add_options
from llmpq.options.measure import (
    FitOptions,
    ImportOptions,
    MeasuredModel,
    Measurements,
    RecalibrateOptions,
)
from llmpq.spec.catalog import resolve_model
from llmpq.spec.fields import digest_of, read_json
from llmpq.spec.huggingface.described import MODEL_FILE, write_model_file
from llmpq.spec.tables import read_latency_table, write_comm_table, write_latency_table
from llmpq.units import format_bytes, format_seconds


def add_fit(commands: argparse._SubParsersAction[Any]) -> None:
    """Add ``fit`` to the commands."""
    fit = commands.add_parser("fit", help="errors of the latency model on unseen shapes")
    add_options(fit, FitOptions)
    fit.set_defaults(run=_fit)


def _fit(options: argparse.Namespace) -> int:
    """Fit a table, print its errors on the hold-out."""
    held = read_latency_table(options.holdout) if options.holdout else None
    table = read_latency_table(options.table)
    reports = fidelity(table, held, seed=options.seed, law=options.law)
    if options.json:
        print_json({phase.value: asdict(report) for phase, report in reports.items()})
        return 0
    for phase, report in reports.items():
        print(
            f"{phase.value:8} mean {report.mean:.2%}  median {report.median:.2%}  "
            f"p95 {report.p95:.2%}  of {report.points} points"
        )
    for line in () if options.law == "paper" else outlier_lines(table):
        print(line)
    return 0


def add_import(commands: argparse._SubParsersAction[Any]) -> None:
    """Add ``import`` to the commands."""
    take = commands.add_parser(
        "import", help="write a table from published measurements of a device"
    )
    layout = {"dest": "layout", "choices": LAYOUTS}
    add_options(take, ImportOptions, "layout", layout=layout)
    add_options(take, ImportOptions, "device", "device_type", "model")
    add_options(take, Measurements, "output", output={"help": "table to write (CSV)"})
    add_options(take, ImportOptions, "path", "engine")
    add_options(take, MeasuredModel, "bits")
    add_options(take, ImportOptions, "dtype", "context_tokens", "tensor_parallel", "between")
    take.set_defaults(run=_import)


def _import(options: argparse.Namespace) -> int:
    """Assemble a table and write it."""
    command = ("command", options.command)
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
    return print_points(options, len(table.samples), table_summary(table))


def _links(options: argparse.Namespace, command: tuple[str, str]) -> int:
    table = import_links(options.layout, options.path, (options.between[0], options.between[1]))
    (link,) = fit_links(table.samples)
    write_comm_table(options.output, replace(table, provenance=(command, *table.provenance)))
    cost = f"{format_seconds(link.latency_s)}, {format_bytes(round(link.bytes_per_s))}/s"
    return print_points(options, len(table.samples), f"{' - '.join(link.between)}  {cost}")


def add_recalibrate(commands: argparse._SubParsersAction[Any]) -> None:
    """Add ``recalibrate`` to the commands."""
    again = commands.add_parser(
        "recalibrate", help="correct a latency table by what runs of plans measured"
    )
    add_options(again, RecalibrateOptions, "report", "strat_file_name")
    add_options(again, FitOptions, "table", table={"help": "latency table to correct (CSV)"})
    add_options(again, Measurements, "output", output={"help": "corrected table (CSV)"})
    add_options(again, RecalibrateOptions, "node", "model")
    again.set_defaults(run=_recalibrate)


def _recalibrate(options: argparse.Namespace) -> int:
    """Correct the table, write it, and print the factors."""
    new, factors = recalibrated_table(
        options.table, _runs(options), node=options.node, model=options.model
    )
    origin = [line for line in new.provenance if line[0] not in ("command", "recalibrated by")]
    digests = ", ".join(digest_of(read_json(file)) for file in options.report)
    first = (
        ("command", options.command),
        ("recalibrated by", f"{'report' if len(options.report) == 1 else 'reports'} {digests}"),
    )
    write_latency_table(options.output, replace(new, provenance=(*first, *origin)))
    named = {f"{phase.value} {bits or 'master'}": value for (phase, bits), value in factors.items()}
    if options.json:
        print_json({"output": str(options.output), "factors": named})
        return 0
    for name, value in sorted(named.items()):
        print(f"{name:16} x {value:.3f}")
    print(f"{len(new.samples)} points written to {options.output}")
    return 0


def _runs(options: argparse.Namespace) -> list[tuple[Path, Path]]:
    """Return every report with the plan that ran."""
    reports, plans = options.report, options.strat_file_name
    if len(plans) == 1:
        plans = plans * len(reports)
    if len(plans) != len(reports):
        raise SpecError(
            f"--strat_file_name: found {len(plans)} plans for {len(reports)} reports, expected one "
            "for all or one each"
        )
    return list(zip(reports, plans, strict=True))


def add_describe(commands: argparse._SubParsersAction[Any]) -> None:
    """Add ``describe`` to the commands."""
    describe = commands.add_parser(
        "describe", help="write the sizes of a model whose family is not in the planner's table"
    )
    folder = {"type": Path, "help": "directory with config.json"}
    add_options(describe, MeasuredModel, "model", model=folder)
    file = {
        "required": False,
        "help": f"model file (default: {MODEL_FILE} in the directory)",
    }
    add_options(describe, Measurements, "output", output=file)
    describe.set_defaults(run=_describe)


def _describe(options: argparse.Namespace) -> int:
    """Build the model on torch's meta device and write its model file."""
    require("torch", "transformers")
    from llmpq.profiler.describe import describe_dir

    model = describe_dir(options.model)
    path = options.output or options.model / MODEL_FILE
    write_model_file(path, model)
    kv_bytes = sum(layer.kv_bytes_per_token(2) for layer in model.layers)
    found = {
        "model_type": model.family,
        "layers": model.num_layers,
        "parameters": model.parameters,
        "kv_values_per_token": sum(layer.kv_values_per_token for layer in model.layers),
        "output": str(path),
    }
    if options.json:
        print_json(found)
        return 0
    print(
        f"{path}: {model.family}, {model.num_layers} layers, {model.parameters:,} parameters, "
        f"{format_bytes(kv_bytes)} of 16-bit keys and values a token"
    )
    return 0
