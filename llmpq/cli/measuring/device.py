"""llmpq-profile device: measure a device in itself, for plans of any model."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from typing import Any

from llmpq import __version__
from llmpq.cli.common import print_json, progress_bar, require
from llmpq.cli.run_options import store_directory
from llmpq.costmodel.device_fit import fit_device
from llmpq.errors import SpecError
from llmpq.options.declare import add_options
from llmpq.options.measure import Measurements, WholeDeviceOptions
from llmpq.spec.devices.figures import DeviceEntry, DeviceFile
from llmpq.spec.fields import dump_json, to_json, write_text


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add ``device`` to the commands of ``llmpq-profile``."""
    device = commands.add_parser(
        "device", help="measure a device of this machine for --devices, in under two minutes"
    )
    add_options(device, WholeDeviceOptions, "device", "threads", "name")
    file = {"metavar": "FILE.json", "help": None}
    add_options(device, Measurements, "output", "budget", output=file)
    add_options(device, WholeDeviceOptions, "features", "store")
    device.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure and write; see ``add_parser``."""
    require("torch", "transformers")
    import torch

    from llmpq.profiler.device import cpu_name
    from llmpq.profiler.whole_device import DeviceJob, measure_device
    from llmpq.quant.loading.streaming import read_bytes_per_s

    if options.budget <= 0 or options.threads < 1 or (options.features or 64) % 64:
        raise SpecError(
            "--budget, --threads, --features: expected more than 0, at least 1, a multiple of 64"
        )
    try:
        device = torch.device(options.device)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise SpecError(
            f"--device: found '{options.device}', expected a device here: {error}"
        ) from None
    if device.type == "cpu":
        torch.set_num_threads(options.threads)
    features = options.features or (2048 if device.type == "cpu" else 8192)
    large = 128 * 2**20 if device.type == "cpu" else 512 * 2**20
    job = DeviceJob(
        device=device,
        features=features,
        distinct_bytes=min(large, 32 * features * features),
        budget_s=options.budget,
    )
    with progress_bar("device") as show:
        timings = measure_device(job, show)
    disk = None
    store = store_directory(options.store, os.environ) if device.type == "cpu" else None
    if store is not None:
        store.mkdir(parents=True, exist_ok=True, mode=0o700)
        disk = read_bytes_per_s(store)
    chip = cpu_name() if device.type == "cpu" else str(device)
    entry = fit_device(
        timings, options.name, f"{chip}, torch {torch.__version__}, llmpq {__version__}"
    )
    entry = replace(entry, disk_bytes_per_s=disk)
    record = to_json(DeviceFile(devices=(entry,)))
    write_text(options.output, dump_json(record))
    if options.json:
        print_json({**record, "cpu_taken": timings.cpu_taken})
    else:
        print(f"{_summary(entry)}\nwritten to {options.output}")
    return 0


def _summary(entry: DeviceEntry) -> str:
    rates = ", ".join(f"{name} {rate / 1e12:.3g} TFLOP/s" for name, rate in entry.flops or ())
    disk = entry.disk_bytes_per_s
    read = "" if disk is None else f"; the disk of the store {disk / 1e9:.3g} GB/s"
    return (
        f"{entry.type}: {rates}; memory {(entry.memory_bytes_per_s or 0) / 1e9:.3g} GB/s, of which "
        f"reading weights reaches {entry.memory_efficiency or 0:.0%}; a layer's launches "
        f"{(entry.layer_overhead_s or 0) * 1e6:.0f} us{read}"
    )
