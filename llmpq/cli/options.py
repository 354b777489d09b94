"""Options that several commands share: batching policy, kernel, time-out and calibration."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmpq.batching.length import (
    PREDICTOR_NAMES,
    LengthPredictor,
    Prediction,
    make_predictor,
)
from llmpq.batching.policies.multibin import DEFAULT_BINS, quantile_boundaries
from llmpq.errors import SpecError
from llmpq.options.declare import add_options, read_options
from llmpq.options.quality import CalibrationOptions
from llmpq.options.run import BatchingOptions, DriftOptions
from llmpq.spec.catalog import GPUS, device, load_devices, with_device_types, with_known_types
from llmpq.spec.cluster import Cluster, DeviceGroup, Node
from llmpq.spec.devices.figures import DeviceEntry
from llmpq.spec.plan import Plan, Schedule, default_schedule
from llmpq.spec.workload import TraceRequest
from llmpq.units import GIB, format_bytes

if TYPE_CHECKING:
    from llmpq.calibration import CalibrationSet

MAX_GIB = 1e6
"""Most memory of a processor, in GiB."""


def add_policy_options(parser: argparse.ArgumentParser) -> None:
    """Add policy, bins and predictor."""
    group = parser.add_argument_group("batching")
    add_options(group, BatchingOptions)


def add_drift_options(parser: argparse.ArgumentParser) -> None:
    """Add the handling of answer lengths that differ from those of the schedule."""
    group = parser.add_argument_group(
        "workload shift: answer lengths that differ from the schedule's (rra, waa)"
    )
    add_options(group, DriftOptions)


def schedule_of(options: argparse.Namespace, plan: Plan, new_tokens: Sequence[int]) -> Schedule:
    """Return the schedule to run: that of the options, else the strategy's, else hybrid.

    Args:
        options: parsed.
        plan: the strategy.
        new_tokens: answer lengths, from which multi-bin boundaries are computed where the
            predictor's file does not state them.
    """
    own = plan.schedule
    name = options.policy or (own.policy if own is not None else "hybrid")
    if options.bins is not None and (name != "multibin" or options.bins < 1):
        raise SpecError(
            f"--bins: found {options.bins} with policy '{name}', "
            "expected at least 1, with --policy multibin"
        )
    if own is not None and own.policy == name and options.bins is None:
        return own
    schedule = default_schedule(name, plan.workload.batch)
    if name == "multibin":
        bins = DEFAULT_BINS if options.bins is None else options.bins
        file = prediction_of(options).file
        boundaries = quantile_boundaries(new_tokens, bins)
        if file is not None:
            from llmpq.batching.length.learned import read_length_model

            boundaries = read_length_model(file).boundaries(bins)
        schedule = replace(schedule, boundaries=boundaries)
    return schedule


def prediction_of(options: argparse.Namespace) -> Prediction:
    """Return the settings of the predictor of answer lengths."""
    name, error = options.predictor, options.predictor_error
    if name in PREDICTOR_NAMES:
        return Prediction(predictor=name, error=error)
    file = Path(name).resolve()
    if not file.exists():
        raise SpecError(
            f"--predictor: found '{name}', expected one of {', '.join(PREDICTOR_NAMES)}, or a file "
            "that llmpq-profile lengths wrote"
        )
    return Prediction(predictor="learned", error=error, file=file)


def predictor_of(
    options: argparse.Namespace, trace: Sequence[TraceRequest]
) -> LengthPredictor | None:
    """Return the predictor of the answers of a trace in a simulation, which has no prompts."""
    prompts = [item.prompt_tokens for item in trace]
    return make_predictor(prediction_of(options), prompts, [item.new_tokens for item in trace])


def with_reserve(cluster: Cluster, reserve_gib: float | None) -> Cluster:
    """Return a cluster whose plans leave so much memory free on GPUs, ``None`` for the default.

    Raises:
        SpecError: the number is negative, or leaves nothing of a device.
    """
    if reserve_gib is None:
        return cluster

    def limited(group: DeviceGroup) -> DeviceGroup:
        spec = device(group.type, cluster)
        if group.memory_bytes is not None or spec.kind not in GPUS:
            return group
        left = spec.memory_bytes - round(reserve_gib * GIB)
        if not 0 < left <= spec.memory_bytes:
            raise SpecError(
                f"--reserve_gib: found {reserve_gib:g}, expected 0 or more, and less than the "
                f"{format_bytes(spec.memory_bytes)} of {group.type}"
            )
        return replace(group, memory_bytes=left)

    nodes = (replace(node, devices=tuple(map(limited, node.devices))) for node in cluster.nodes)
    return replace(cluster, nodes=tuple(nodes))


def with_host(
    cluster: Cluster, host_gib: str | None, devices: str | None, sequences: int
) -> Cluster:
    """Return a cluster in which a processor beside the GPUs of each node computes experts.

    Args:
        cluster: nodes that state a CPU or a host stay as they are.
        host_gib: the processor and its memory, ``CPU=GIB``; ``None`` for none.
        devices: file of ``--devices``, which may describe it.
        sequences: at the same time.

    Raises:
        SpecError: it is no whole processor, or there are no GPUs beside which it may be.
    """
    if host_gib is None:
        return cluster
    match = re.fullmatch(r"(.+)=(\d*\.?\d+)", host_gib)
    if match is None or not 0 < float(match[2]) < MAX_GIB:
        raise SpecError(
            f"--host_gib: found '{host_gib}', expected CPU=GIB, such as Ryzen-9-7950X=64, and more "
            "than 0 GiB"
        )
    described = () if devices is None else load_devices(devices)
    cpu = _whole_processor(match[1], round(float(match[2]) * GIB), cluster, described)
    beside, nodes = set(), []
    for node in cluster.nodes:
        kinds = {device(one.type, cluster).kind for one in node.devices}
        is_open = "cpu" not in kinds and all(one.host is None for one in node.devices)
        beside |= {node.name} if is_open else set()
        nodes.append(replace(node, devices=(*node.devices, cpu)) if is_open else node)
    if not beside:
        raise SpecError(
            f"--host_gib: found '{host_gib}' with {cluster.name}, whose nodes all state a CPU or a "
            "host, expected a node of GPUs alone"
        )
    # Commands that plan nothing, as those that start ranks, have options too, and load no numpy.
    from llmpq.costmodel.host_clusters import with_experts_on_hosts

    together = with_device_types(replace(cluster, nodes=tuple(nodes)), described)
    found = with_experts_on_hosts(together, sequences, beside)
    if found == together:
        raise SpecError(
            f"--host_gib: found '{host_gib}', expected more memory than the processes of the GPUs "
            "take of it, and a processor with kernels for experts"
        )
    return replace(found, name=f"{cluster.name}-{cpu.type}-{match[2]}gib".lower())


def _whole_processor(
    name: str, memory_bytes: int, cluster: Cluster, described: Sequence[DeviceEntry]
) -> DeviceGroup:
    """Return a CPU with all of its cores, of the catalogue, a cluster file, or ``--devices``."""
    group = DeviceGroup(type=name, count=1, memory_bytes=memory_bytes)
    alone = replace(cluster, nodes=(Node(name="host", devices=(group,)),), links=())
    known = with_device_types(alone, described)
    try:
        spec = device(name, known)
    except SpecError as error:
        raise SpecError(f"--host_gib: {error}") from None
    if spec.kind != "cpu" or spec.cores is None:
        raise SpecError(
            f"--host_gib: found '{name}', expected a whole processor: of the catalogue, or one "
            "that llmpq-profile device --device cpu --threads N measured"
        )
    return replace(group, type=spec.type, threads=spec.cores)


def with_described(cluster: Cluster, devices: str | None, where: str) -> Cluster:
    """Return a cluster that carries the types it uses of the file of ``--devices``.

    Raises:
        SpecError: the file is wrong, or a device of the cluster, which ``where`` names, has no
            figures.
    """
    if devices is not None:
        cluster = with_device_types(cluster, load_devices(devices))
    return with_known_types(cluster, where)


def calibration_of(options: argparse.Namespace) -> CalibrationSet | None:
    """Return the calibration text of the options, ``None`` without one."""
    from llmpq.calibration import read_calibration

    asked = read_options(CalibrationOptions, options)
    if asked.calibration is None:
        return None
    return read_calibration(
        asked.calibration,
        Path(options.model),
        num_sequences=asked.calibration_sequences,
        sequence_tokens=asked.calibration_tokens,
    )
