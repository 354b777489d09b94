"""Overrides applied to a cluster: the devices to plan for, and the limits of the search.

Every device that a decision names gets a group of its own. Contradictory decisions are errors here;
whether a plan exists is decided by the search.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import numpy as np

from llmpq.assigner.constraints.limits import BoolArray, Limits
from llmpq.assigner.constraints.overrides import Overrides
from llmpq.errors import SpecError
from llmpq.spec.cluster import Cluster, Device, DeviceGroup


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Resolved:
    """A cluster to plan for.

    Attributes:
        whole: the user's cluster with memory limits, groups split where their devices differ.
        cluster: the part of it that may be used.
        indices: for every device of ``cluster`` its index in ``whole``.
        limits: limits of the search, ``None`` without any.
        order: group of every position when the order is fixed.
    """

    whole: Cluster
    cluster: Cluster
    indices: tuple[int, ...]
    limits: Limits | None = None
    order: tuple[int, ...] | None = None


def resolve(
    overrides: Overrides, cluster: Cluster, starts: Sequence[int], bits: Sequence[int]
) -> Resolved:
    """Apply overrides to a cluster and the layers.

    ``starts`` holds the first layer of every run of layers decided together, then the number of
    layers; ``bits`` the bitwidths allowed, widest first.

    Raises:
        SpecError: a decision names an unknown device or layer, or contradicts another one.
    """
    all_devices = tuple(range(len(cluster.devices)))
    if not overrides:
        return Resolved(whole=cluster, cluster=cluster, indices=all_devices)
    names = _Names(cluster)
    keeping = _kept(overrides, names)
    whole = _split(cluster, overrides, names)
    kept = [index for index in all_devices if index in keeping]
    part = with_counts(whole, Counter(whole.devices[index].group for index in kept))
    groups = {index: part.devices[number].group for number, index in enumerate(kept)}
    order = tuple(groups[names.one(name, "--fix_order")] for name in overrides.order) or None
    return Resolved(
        whole=whole,
        cluster=part,
        indices=tuple(kept),
        limits=_limits(overrides, names, groups, starts, bits),
        order=order,
    )


class _Names:
    def __init__(self, cluster: Cluster) -> None:
        self.devices = cluster.devices

    def all(self, name: str, option: str) -> list[int]:
        """Return the indices of all devices that ``name`` matches."""
        found = [index for index, item in enumerate(self.devices) if name in device_names(item)]
        if not found:
            labels = [item.label for item in self.devices]
            shown = ", ".join(labels[:8]) + (", ..." if len(labels) > 8 else "")
            raise SpecError(f"{option}: found no device '{name}', expected one of {shown}")
        return found

    def one(self, name: str, option: str) -> int:
        """Return the index of the only device that ``name`` matches."""
        found = self.all(name, option)
        if len(found) > 1:
            labels = ", ".join(self.devices[index].label for index in found[:8])
            raise SpecError(f"{option}: found '{name}', which is {labels}; expected one of them")
        return found[0]


def device_names(device: Device) -> tuple[str, ...]:
    """Return all names that match a device: its label, and those it shares with others."""
    return device.label, f"{device.node}/{device.type}", device.node, device.type


def _kept(overrides: Overrides, names: _Names) -> set[int]:
    kept = set(range(len(names.devices)))
    for name in overrides.exclude:
        kept -= set(names.all(name, "--exclude"))
    if not kept:
        raise SpecError("--exclude: found every device, expected at least one to be left")
    ordered = [names.one(name, "--fix_order") for name in overrides.order]
    if len(set(ordered)) < len(ordered):
        raise SpecError(f"--fix_order: found {list(overrides.order)}, expected each device once")
    wanted = [(f"--use {name}", names.one(name, "--use")) for name in overrides.use]
    for name, first, end in overrides.layers:
        option = f"--fix_layers {name}={first}:{end}"
        wanted.append((option, names.one(name, "--fix_layers")))
    for option, index in [*wanted, *(("--fix_order", index) for index in ordered)]:
        if index not in kept:
            label = names.devices[index].label
            raise SpecError(f"{option}: found {label}, which --exclude leaves out")
        if ordered and index not in ordered:
            raise SpecError(
                f"{option}: found {names.devices[index].label}, which --fix_order leaves out"
            )
    return kept & set(ordered) if ordered else kept


def _split(cluster: Cluster, overrides: Overrides, names: _Names) -> Cluster:
    """Limit memory, and split the groups whose devices differ; devices keep their indices."""
    caps: dict[int, int] = {}
    for name, size in overrides.memory:
        for index in names.all(name, "--memory_gib"):
            if caps.setdefault(index, size) != size:
                label = names.devices[index].label
                raise SpecError(f"--memory_gib: found two sizes for {label}, expected one")
    bits = _device_bits(overrides, names)
    alone = {names.one(name, "--fix_order") for name in overrides.order}
    alone |= {names.one(name, "--use") for name in overrides.use}
    alone |= {names.one(name, "--fix_layers") for name, _, _ in overrides.layers}
    numbers = iter(range(len(names.devices)))

    def parts(group: DeviceGroup) -> Iterable[DeviceGroup]:
        members = [next(numbers) for _ in range(group.count)]
        for key, run in groupby(
            members, key=lambda i: (caps.get(i), bits.get(i), i if i in alone else None)
        ):
            size = group.memory_bytes if key[0] is None else key[0]
            yield replace(group, count=len(list(run)), memory_bytes=size)

    nodes = [
        replace(node, devices=tuple(part for group in node.devices for part in parts(group)))
        for node in cluster.nodes
    ]
    return replace(cluster, nodes=tuple(nodes))


def with_counts(cluster: Cluster, counts: Mapping[int, int]) -> Cluster:
    """Return a cluster with these numbers of devices by group; others are left out."""
    number = itertools.count()
    nodes = []
    for node in cluster.nodes:
        numbered = [(group, counts.get(next(number), 0)) for group in node.devices]
        groups = tuple(replace(group, count=count) for group, count in numbered if count)
        nodes += [replace(node, devices=groups)] if groups else []
    names = {node.name for node in nodes}
    links = tuple(link for link in cluster.links if set(link.between) <= names)
    return replace(cluster, nodes=tuple(nodes), links=links)


def _device_bits(overrides: Overrides, names: _Names) -> dict[int, int]:
    found: dict[int, int] = {}
    for name, width in overrides.device_bits:
        for index in names.all(name, "--fix_bits"):
            if found.setdefault(index, width) != width:
                label = names.devices[index].label
                raise SpecError(
                    f"--fix_bits: found {found[index]} and {width} bits for {label}, expected one"
                )
    return found


def _limits(
    overrides: Overrides,
    names: _Names,
    groups: dict[int, int],
    starts: Sequence[int],
    bits: Sequence[int],
) -> Limits | None:
    if not (overrides.use or overrides.layers or overrides.layer_bits or overrides.device_bits):
        return None
    ranges = {}
    for name, first, end in overrides.layers:
        index = names.one(name, "--fix_layers")
        if index in ranges:
            raise SpecError(f"--fix_layers: found {name} twice, expected each device once")
        ranges[index] = _runs(first, end, starts, f"--fix_layers {name}={first}:{end}")
    _check_ranges(overrides, names, ranges)
    layer_widths = np.ones((len(starts) - 1, len(bits)), dtype=bool)
    for first, end, width in overrides.layer_bits:
        option = f"--fix_bits {first}:{end}={width}"
        rows = slice(*_runs(first, end, starts, option))
        layer_widths[rows] &= _only(width, bits, option)
        if not layer_widths[rows].any(axis=1).all():
            raise SpecError(f"{option}: another --fix_bits gives some of these layers other bits")
    group_widths = np.ones((len(set(groups.values())), len(bits)), dtype=bool)
    for index, width in _device_bits(overrides, names).items():
        if index in groups:
            group_widths[groups[index]] = _only(width, bits, f"--fix_bits ...={width}")
    for index, (first_run, end_run) in ranges.items():
        if not (layer_widths[first_run:end_run] & group_widths[groups[index]]).any(axis=1).all():
            label = names.devices[index].label
            raise SpecError(f"--fix_bits: found other bits for {label} and for its --fix_layers")
    return Limits(
        layer_widths=layer_widths,
        group_widths=group_widths,
        ranges=tuple((groups[index], first, end) for index, (first, end) in ranges.items()),
        used=tuple(groups[names.one(name, "--use")] for name in overrides.use),
    )


def _runs(first: int, end: int, starts: Sequence[int], option: str) -> tuple[int, int]:
    if not 0 <= first < end <= starts[-1]:
        raise SpecError(
            f"{option}: found layers [{first}, {end}), expected a range within [0, {starts[-1]})"
        )
    for edge in (first, end):
        if edge not in starts:
            raise SpecError(f"{option}: found layer {edge} inside a group of --group, expected one")
    return starts.index(first), starts.index(end)


def _only(width: int, bits: Sequence[int], option: str) -> BoolArray:
    if width not in bits:
        raise SpecError(f"{option}: found {width} bits, expected one of --bits {list(bits)}")
    only: BoolArray = np.array(bits) == width
    return only


def _check_ranges(overrides: Overrides, names: _Names, ranges: dict[int, tuple[int, int]]) -> None:
    """Raise for ranges that overlap or contradict the order."""
    found = sorted((first, end, index) for index, (first, end) in ranges.items())
    for (_, before, one), (after, _, other) in pairwise(found):
        labels = f"{names.devices[one].label} and {names.devices[other].label}"
        if after < before:
            raise SpecError(f"--fix_layers: found a layer on both {labels}, expected each once")
        if overrides.order:
            order = [names.one(name, "--fix_order") for name in overrides.order]
            if order.index(other) < order.index(one):
                raise SpecError(
                    f"--fix_layers: found layers of {labels} against --fix_order, which puts them "
                    "the other way round"
                )
