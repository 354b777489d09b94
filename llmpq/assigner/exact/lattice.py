"""All device orders at once: an acyclic graph whose paths are the orders.

A node stands for one *used* device, identified by all that determines the rest of a plan: how many
devices of each group are used, the group of this device (links differ), and the cost of the return
link to the master. Two exact reductions keep the graph small: masters with equal return links from
every last device share their nodes, and of interchangeable groups (equal devices and links) a later
one is only entered after the earlier ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from llmpq.assigner.exact import native
from llmpq.assigner.exact.native import NotCoveredError
from llmpq.assigner.problem import FloatArray, SearchSpace

Orders = Literal["types", "all"] | tuple[int, ...]
"""Blocks of groups, every interleaving, or one fixed order (its first device is the master)."""

MAX_CELLS = 4_000_000
"""Largest number of nodes times layers: some 0.5 GB of tables."""


class State(NamedTuple):
    """A node of the lattice: all that determines the rest of a plan after one used device.

    ``progress`` is how far the groups are used, as the order space defines it; ``master`` the class
    of masters of the first device.
    """

    progress: tuple[int, ...]
    group: int
    master: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OrderLattice:
    """Device orders as paths in a graph, with the arrays of the C core; group -1 is the start."""

    graph: native.Lattice
    node_group: tuple[int, ...]
    held: list[native.AnyArray]


def build_lattice(space: SearchSpace, orders: Orders) -> OrderLattice:
    """Build the graph of ``orders``; raises ``NotCoveredError`` if it would be too large."""
    tables = _GroupTables(space)
    needed = () if space.limits is None else space.limits.used
    found: _GroupOrders | _FixedOrder
    if isinstance(orders, str):
        found = _GroupOrders(tables, needed, in_blocks=orders == "types")
    else:
        found = _FixedOrder(space.num_groups, tuple(int(group) for group in orders), needed)
    states = _explore(found, MAX_CELLS // (space.num_layers + 1))
    return _pack(space, found, states, price_inner=tables.inner_links_matter())


def _explore(orders: _GroupOrders | _FixedOrder, limit: int) -> list[State | None]:
    """Return every state in topological order, the start first."""
    found: set[State] = set()
    waiting: list[State | None] = [None]
    while waiting:
        fresh = [state for state in orders.successors(waiting.pop()) if state not in found]
        found.update(fresh)
        waiting += dict.fromkeys(fresh)
        if len(found) > limit:
            raise NotCoveredError(
                f"device orders: found more than {limit} states of the pipeline, expected at "
                "most that; take orders by types, or merge nodes of one device type"
            )
    return [None, *sorted(found, key=lambda state: (orders.rank(state), state))]


def _pack(
    space: SearchSpace,
    orders: _GroupOrders | _FixedOrder,
    states: list[State | None],
    *,
    price_inner: bool,
) -> OrderLattice:
    size = space.num_groups
    number = {state: node for node, state in enumerate(states)}
    starts, targets, links = [0], [], []
    for state in states:
        for later in orders.successors(state):
            targets.append(number[later])
            links.append(-1 if state is None else state.group * size + later.group)
        starts.append(len(targets))
    classes, returns, finals = [0], [-1], [False]
    for state in states:
        if state is not None:
            finals.append(orders.is_final(state))
            first = orders.is_first(state)
            back = size * size + state.group * size + orders.master_of(state)
            classes.append(state.group + size * first)
            returns.append(-1 if first else back)
    needed = () if space.limits is None else space.limits.used
    masters = [int(group in needed) for group in range(size)]
    arrivals = orders.devices_left if price_inner else orders.arrivals_left
    graph = native.Lattice()
    held = native.fill(
        graph,
        nodes=len(states),
        edges=len(targets),
        node_class=classes,
        node_return=returns,
        node_final=finals,
        least_layers=[1] * size + masters,
        edge_start=starts,
        edge_target=targets,
        edge_link=links,
        remaining=[[*orders.devices_left(state), *arrivals(state)] for state in states],
        count=orders.devices_left(None),
        arrivals=arrivals(None),
        price_inner_links=int(price_inner),
    )
    groups = tuple(-1 if state is None else state.group for state in states)
    return OrderLattice(graph=graph, node_group=groups, held=held)


class _GroupOrders:
    """Every interleaving of the groups, or only those in which a group's devices stand together.

    Progress: devices of every group that are used or, in blocks, were left behind.
    """

    def __init__(self, tables: _GroupTables, needed: tuple[int, ...], *, in_blocks: bool) -> None:
        self.counts = tables.counts
        self.earlier = tables.earlier_interchangeable()
        self.masters = tables.master_classes(skip_own=in_blocks)
        self.needed = needed
        self.in_blocks = in_blocks

    def successors(self, state: State | None) -> Iterator[State]:
        """Yield the states after one more used device; ``None`` is the state before the first."""
        spent = self._spent(state)
        groups = list(range(len(self.counts)))
        if self.in_blocks and state is not None:  # the current block continues first
            groups.sort(key=lambda group: group != state.group)
        for group in groups:
            if spent[group] == self.counts[group] or not all(
                spent[other] for other in self.earlier[group]
            ):
                continue
            grown = list(spent)
            if self.in_blocks and state is not None and group != state.group:
                grown[state.group] = self.counts[state.group]
            grown[group] += 1
            master = self.masters[group] if state is None else state.master
            yield State(tuple(grown), group, master)

    def rank(self, state: State) -> tuple[int, ...]:
        """Return a key that grows along every order."""
        if not self.in_blocks:
            return (sum(state.progress),)
        entered = [group for group, spent in enumerate(state.progress) if spent]
        bits = sum(1 << group for group in entered)
        return len(entered), state.progress[state.group], bits, state.group

    def is_first(self, state: State) -> bool:
        """Whether only the master is used."""
        return sum(state.progress) == 1

    def is_final(self, state: State) -> bool:
        """Whether every group that must be used is used."""
        return all(state.progress[group] for group in self.needed)

    def master_of(self, state: State) -> int:
        """Return a group whose device may be the master of this state."""
        if not self.in_blocks:
            return state.master
        members = (group for group, spent in enumerate(state.progress) if spent)
        others = (g for g in members if g != state.group and self.masters[g] == state.master)
        return next(others, state.group)

    def devices_left(self, state: State | None) -> list[int]:
        """Return ``[T]`` devices that may still follow."""
        return [count - n for count, n in zip(self.counts, self._spent(state), strict=True)]

    def arrivals_left(self, state: State | None) -> list[int]:
        """Return ``[T]`` how often a group may still be entered from another group."""
        if not self.in_blocks:
            return self.devices_left(state)
        return [int(not spent) for spent in self._spent(state)]

    def _spent(self, state: State | None) -> tuple[int, ...]:
        return (0,) * len(self.counts) if state is None else state.progress


class _FixedOrder:
    """One order, from which devices may be dropped. Progress: position in it."""

    def __init__(self, num_groups: int, order: tuple[int, ...], needed: tuple[int, ...]) -> None:
        self.num_groups = num_groups
        self.order = order
        self.needed = needed

    def successors(self, state: State | None) -> Iterator[State]:
        if state is None:
            yield State((0,), self.order[0], self.order[0])
            return
        for position in range(state.progress[0] + 1, len(self.order)):
            yield State((position,), self.order[position], state.master)
            if self.order[position] in self.needed:
                return

    def rank(self, state: State) -> tuple[int, ...]:
        return state.progress

    def is_first(self, state: State) -> bool:
        return state.progress == (0,)

    def is_final(self, state: State) -> bool:
        return not set(self.order[state.progress[0] + 1 :]) & set(self.needed)

    def master_of(self, state: State) -> int:
        return state.master

    def devices_left(self, state: State | None) -> list[int]:
        later = self.order if state is None else self.order[state.progress[0] + 1 :]
        return [later.count(group) for group in range(self.num_groups)]

    arrivals_left = devices_left


_VECTORS = (
    "prefill_s",
    "decode_s",
    "layer_bytes",
    "capacity_bytes",
    "first_capacity_bytes",
    "master_prefill_s",
    "master_decode_s",
)
_MATRICES = ("send_prefill_s", "send_decode_s", "return_prefill_s", "return_decode_s")


class _GroupTables:
    """All costs of groups over all pairs: ``own`` is ``[T, F]``, those of links ``[T, T, F]``."""

    def __init__(self, space: SearchSpace) -> None:
        self.counts = space.group_counts
        size = space.num_groups

        def stacked(names: tuple[str, ...], shape: tuple[int, ...]) -> FloatArray:
            tables = [
                np.asarray(getattr(pair, name), dtype=np.float64).reshape(*shape, -1)
                for name in names
                for pair in space.pairs
            ]
            return np.concatenate(tables, axis=-1)

        used = set() if space.limits is None else set(space.limits.used)
        self.own = np.concatenate(
            [
                stacked(_VECTORS, (size,)),
                space.allowed.reshape(size, -1),
                np.array([[group in used] for group in range(size)]),
            ],
            axis=-1,
        )
        self.links = stacked(_MATRICES, (size, size))
        self.sends = stacked(_MATRICES[:2], (size, size))
        self.returns = stacked(_MATRICES[2:], (size, size))

    def earlier_interchangeable(self) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(other for other in range(group) if self._are_interchangeable(other, group))
            for group in range(len(self.counts))
        )

    def _are_interchangeable(self, one: int, other: int) -> bool:
        """Whether exchanging two groups changes no cost."""
        if self.counts[one] != self.counts[other]:
            return False
        if not (self.own[one] == self.own[other]).all():
            return False
        swapped = list(range(len(self.counts)))
        swapped[one], swapped[other] = other, one
        return bool((self.links[np.ix_(swapped, swapped)] == self.links).all())

    def master_classes(self, *, skip_own: bool) -> tuple[int, ...]:
        """Return for every group the first one with equal return links from every last group.

        ``skip_own`` ignores those from the groups themselves, as where groups stand together.
        """
        returns, size = self.returns, len(self.counts)
        members: dict[int, list[int]] = {}

        def is_member(group: int, others: list[int]) -> bool:
            return all(
                (returns[last, group] == returns[last, other]).all()
                for last in range(size)
                for other in others
                if not (skip_own and last in (group, other))
            )

        names = []
        for group in range(size):
            name = next((key for key, others in members.items() if is_member(group, others)), group)
            members.setdefault(name, []).append(group)
            names.append(name)
        return tuple(names)

    def inner_links_matter(self) -> bool:
        """Whether a link inside a group of several devices is slower than all other links."""
        several = [group for group, count in enumerate(self.counts) if count > 1]
        inner = self.sends[several, several]
        outer = self.sends[~np.eye(len(self.counts), dtype=bool)]
        if not several:
            return False
        return not outer.size or bool((inner.max(axis=0) > outer.max(axis=0)).any())
