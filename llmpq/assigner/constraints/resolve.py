"""Manual decisions, from the command line to constraints of an assignment problem.

``Overrides`` are the values of the command line: devices, order, layers, bits, memory and
micro-batches. Each can be listed and removed, so that an error message can name one that leaves no
plan. ``resolve`` applies them to a cluster; ``Limits`` are what is left for the solvers, in groups,
layers and widths. Every device that a limit names is a group of its own, so its group determines
its position.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise

import numpy as np
import numpy.typing as npt

from llmpq.errors import SpecError
from llmpq.spec.cluster import Cluster, Device, DeviceGroup
from llmpq.spec.plan import MicroBatching
from llmpq.units import GIB


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment in the seconds of a clock; never by default."""

    at_s: float = math.inf
    clock: Callable[[], float] = field(default=time.monotonic, compare=False, repr=False)

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; not positive once it has passed."""
        return self.at_s - self.clock() if math.isfinite(self.at_s) else math.inf

    @property
    def has_passed(self) -> bool:
        """Whether the deadline is over."""
        return self.left_s <= 0

    def within(self, seconds: float | None) -> Deadline:
        """Return the earlier of this and ``seconds`` from now; ``None`` adds no limit."""
        if seconds is None:
            return self
        return Deadline(min(self.at_s, self.clock() + seconds), self.clock)


NEVER = Deadline()


BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Limits:
    """Constraints of a problem in addition to memory and quality.

    Array legend: ``L`` layers, ``B`` bitwidths, ``T`` groups.

    Attributes:
        layer_widths: ``[L, B]`` whether a layer may have a width.
        group_widths: ``[T, B]`` whether layers on a group may have a width.
        ranges: group, first and end layer: its one device holds exactly these layers.
        used: groups whose one device holds at least one layer.
    """

    layer_widths: BoolArray
    group_widths: BoolArray
    ranges: tuple[tuple[int, int, int], ...] = ()
    used: tuple[int, ...] = ()

    @property
    def layers_equal(self) -> bool:
        """Whether all layers have the same choice of widths."""
        return bool((self.layer_widths == self.layer_widths[0]).all())

    def of_columns(self, columns: Sequence[int]) -> Limits:
        """Return the limits of widths that stand in these columns."""
        return replace(
            self,
            layer_widths=self.layer_widths[:, columns],
            group_widths=self.group_widths[:, columns],
        )


def obeys(
    limits: Limits | None,
    order: Sequence[int],
    positions: Sequence[int],
    widths: Sequence[int],
) -> bool:
    """Return whether positions and width indices of all layers keep the limits, if any."""
    if limits is None:
        return True
    groups = [order[position] for position in positions]
    allowed = all(
        limits.layer_widths[layer, width] and limits.group_widths[group, width]
        for layer, (group, width) in enumerate(zip(groups, widths, strict=True))
    )
    ranges = all(
        [layer for layer, found in enumerate(groups) if found == group] == list(range(first, end))
        for group, first, end in limits.ranges
    )
    return allowed and ranges and set(limits.used) <= set(groups)


HEAD = "head"
"""Name of the head in ``--fix_bits``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """Manual decisions; the default leaves everything to the planner.

    A device is named by its label ``node/type#0``. Where several are allowed, ``node/type``,
    ``node`` or ``type`` name all that match.

    Attributes:
        memory: memory limit in bytes, by device or devices.
        exclude: devices to leave out.
        use: devices that hold at least one layer each.
        order: devices in pipeline order; the others are left out.
        layers: a device and the half-open range ``first, end`` of its layers.
        layer_bits: half-open range ``first, end`` and the bits of its layers.
        device_bits: the bits of all layers of a device, by device or devices.
        head_bits: the bits of the head's matrix.
        micro_batching: the two micro-batch sizes.
    """

    memory: tuple[tuple[str, int], ...] = ()
    exclude: tuple[str, ...] = ()
    use: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    layers: tuple[tuple[str, int, int], ...] = ()
    layer_bits: tuple[tuple[int, int, int], ...] = ()
    device_bits: tuple[tuple[str, int], ...] = ()
    head_bits: int | None = None
    micro_batching: MicroBatching | None = None

    def __bool__(self) -> bool:
        return self != Overrides()

    @property
    def shapes_the_plan(self) -> bool:
        """Whether they constrain the search itself, not only its devices and micro-batches."""
        return bool(self.use or self.order or self.layers or self.layer_bits or self.device_bits)

    def options(self) -> tuple[str, ...]:
        """Return every decision as its command-line option."""
        return tuple(text for text, _ in self.without_each())

    def without_each(self) -> Iterator[tuple[str, Overrides]]:
        """Yield every decision as its option, and the overrides without it."""
        for name, texts in self._texts():
            entries = getattr(self, name)
            for index, text in enumerate(texts):
                yield text, replace(self, **{name: entries[:index] + entries[index + 1 :]})
        if self.head_bits is not None:
            yield f"--fix_bits {HEAD}={self.head_bits}", replace(self, head_bits=None)
        if self.order:
            yield f"--fix_order {' '.join(self.order)}", replace(self, order=())
        if self.micro_batching is not None:
            sizes = self.micro_batching
            text = f"--micro_batch {sizes.prefill} {sizes.decode}"
            yield text, replace(self, micro_batching=None)

    def _texts(self) -> Iterator[tuple[str, list[str]]]:
        yield "memory", [f"--memory_gib {name}={size / GIB:g}" for name, size in self.memory]
        yield "exclude", [f"--exclude {name}" for name in self.exclude]
        yield "use", [f"--use {name}" for name in self.use]
        yield "layers", [f"--fix_layers {name}={a}:{b}" for name, a, b in self.layers]
        yield "layer_bits", [f"--fix_bits {a}:{b}={bits}" for a, b, bits in self.layer_bits]
        yield "device_bits", [f"--fix_bits {name}={bits}" for name, bits in self.device_bits]


NO_OVERRIDES = Overrides()


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
