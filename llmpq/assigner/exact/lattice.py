"""All device orders at once: an acyclic graph whose paths are the orders.

A node stands for one *used* device, told by what decides the rest of a plan: how far the groups
are used up, the group of this device, because links are unlike, and what the way back to the
master costs. A device that stays empty is simply not on the path. Two reductions keep the graph
small, and both are exact:

- masters that every last device sends back to equally are not told apart;
- of interchangeable groups (equal devices and links, such as two like nodes), a later one is only
  entered after the earlier ones: any other order is a relabelling.

Three kinds of progress exist, one class each: blocks of groups, every interleaving, and the
sub-orders of one fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from llmpq.assigner.exact import native
from llmpq.assigner.exact.coverage import NotCoveredError
from llmpq.assigner.exact.space import SearchSpace
from llmpq.assigner.exact.symmetry import Symmetry, find_symmetry

Orders = Literal["types", "all"] | tuple[int, ...]
"""Blocks of groups, every interleaving, or one fixed order (its first device is the master)."""

MAX_PLACES = 4_000_000
"""Largest number of nodes times layers: some 0.5 GB of tables."""


class State(NamedTuple):
    """What decides the rest of a plan, after one used device.

    Attributes:
        progress: how far the groups are used up; its meaning is the walk's.
        group: group of the device.
        master: class of masters the first device belongs to.
    """

    progress: tuple[int, ...]
    group: int
    master: int


class Walk(Protocol):
    """How orders unfold."""

    def follow(self, state: State | None) -> Iterator[State]:
        """Yield the states after one more used device; ``None`` is the start."""

    def rank(self, state: State) -> tuple[int, ...]:
        """Return a key that grows along every order."""

    def is_first(self, state: State) -> bool:
        """Whether only the master is used so far."""

    def is_final(self, state: State) -> bool:
        """Whether every group that must be used is used."""

    def master_of(self, state: State) -> int:
        """Return a group whose device may be the master of this state."""

    def devices_left(self, state: State | None) -> list[int]:
        """Return ``[T]`` devices that may still follow."""

    def arrivals_left(self, state: State | None) -> list[int]:
        """Return ``[T]`` how often a group may still be entered from another group."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OrderLattice:
    """The graph.

    Attributes:
        graph: the core's structure.
        node_group: group of every node's device; -1 for the start.
        held: arrays the structure points into.
    """

    graph: native.Lattice
    node_group: tuple[int, ...]
    held: list[native.AnyArray]


def build_lattice(space: SearchSpace, orders: Orders) -> OrderLattice:
    """Build the graph of ``orders``.

    Raises:
        NotCoveredError: it would be too large.
    """
    symmetry = find_symmetry(space)
    needed = () if space.limits is None else space.limits.used
    walk: Walk
    if orders == "types":
        walk = BlockWalk(space.group_counts, symmetry, needed)
    elif orders == "all":
        walk = FreeWalk(space.group_counts, symmetry, needed)
    else:
        walk = FixedWalk(space.num_groups, tuple(int(group) for group in orders), needed)
    states = _explore(walk, MAX_PLACES // (space.num_layers + 1))
    return _pack(space, walk, states, price_inner=symmetry.inner_links_matter)


def _explore(walk: Walk, limit: int) -> list[State | None]:
    """Return every state, the start first, in an order no edge goes against."""
    found: set[State] = set()
    waiting: list[State | None] = [None]
    while waiting:
        fresh = [state for state in walk.follow(waiting.pop()) if state not in found]
        found.update(fresh)
        waiting += dict.fromkeys(fresh)
        if len(found) > limit:
            raise NotCoveredError(
                f"device orders: found more than {limit} states of the pipeline, expected at "
                "most that; take orders by types, or merge nodes of one device type"
            )
    return [None, *sorted(found, key=lambda state: (walk.rank(state), state))]


def _pack(
    space: SearchSpace, walk: Walk, states: list[State | None], *, price_inner: bool
) -> OrderLattice:
    size = space.num_groups
    number = {state: node for node, state in enumerate(states)}
    starts, targets, links = [0], [], []
    for state in states:
        for later in walk.follow(state):
            targets.append(number[later])
            links.append(-1 if state is None else state.group * size + later.group)
        starts.append(len(targets))
    classes, returns, finals = [0], [-1], [False]
    for state in states:
        if state is not None:
            finals.append(walk.is_final(state))
            first = walk.is_first(state)
            back = size * size + state.group * size + walk.master_of(state)
            classes.append(state.group + size * first)
            returns.append(-1 if first else back)
    needed = () if space.limits is None else space.limits.used
    masters = [int(group in needed) for group in range(size)]
    arrivals = walk.devices_left if price_inner else walk.arrivals_left
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
        remaining=[[*walk.devices_left(state), *arrivals(state)] for state in states],
        count=walk.devices_left(None),
        arrivals=arrivals(None),
        price_inner_links=int(price_inner),
    )
    groups = tuple(-1 if state is None else state.group for state in states)
    return OrderLattice(graph=graph, node_group=groups, held=held)


class BlockWalk:
    """The devices of a group stand together.

    Progress: the groups entered, as a bit set, and the devices used of the last one.
    """

    def __init__(
        self, counts: tuple[int, ...], symmetry: Symmetry, needed: tuple[int, ...]
    ) -> None:
        self.counts = counts
        self.symmetry = symmetry
        self.needed = needed

    def follow(self, state: State | None) -> Iterator[State]:
        """Yield one more device of the block, and the first of every block not yet entered."""
        entered, used = (0, 0) if state is None else state.progress
        if state is not None and used < self.counts[state.group]:
            yield state._replace(progress=(entered, used + 1))
        for group, count in enumerate(self.counts):
            twins = self.symmetry.earlier_twins[group]
            if not count or entered >> group & 1:
                continue
            if all(entered >> twin & 1 for twin in twins):
                master = self.symmetry.block_master[group] if state is None else state.master
                yield State((entered | 1 << group, 1), group, master)

    def rank(self, state: State) -> tuple[int, ...]:
        """Return the blocks entered and the devices used of the last."""
        entered, used = state.progress
        return entered.bit_count(), used

    def is_first(self, state: State) -> bool:
        """Whether one device of one block is used."""
        return self.rank(state) == (1, 1)

    def is_final(self, state: State) -> bool:
        """Whether every needed block is entered."""
        return all(state.progress[0] >> group & 1 for group in self.needed)

    def master_of(self, state: State) -> int:
        """Return this group if it is the only one, else an entered member of the class."""
        entered, _ = state.progress
        if entered.bit_count() == 1:
            return state.group
        return next(
            group
            for group, master in enumerate(self.symmetry.block_master)
            if master == state.master and group != state.group and entered >> group & 1
        )

    def devices_left(self, state: State | None) -> list[int]:
        """Return what is left of the last block, and the blocks not entered."""
        if state is None:
            return list(self.counts)
        entered, used = state.progress
        left = [0 if entered >> group & 1 else n for group, n in enumerate(self.counts)]
        left[state.group] = self.counts[state.group] - used
        return left

    def arrivals_left(self, state: State | None) -> list[int]:
        """Return one for every block not entered."""
        entered = 0 if state is None else state.progress[0]
        return [1 - (entered >> group & 1) for group in range(len(self.counts))]


class FreeWalk:
    """Any interleaving. Progress: devices used of every group."""

    def __init__(
        self, counts: tuple[int, ...], symmetry: Symmetry, needed: tuple[int, ...]
    ) -> None:
        self.counts = counts
        self.symmetry = symmetry
        self.needed = needed

    def follow(self, state: State | None) -> Iterator[State]:
        """Yield one more device of every group that has one."""
        used = (0,) * len(self.counts) if state is None else state.progress
        for group, count in enumerate(self.counts):
            twins = self.symmetry.earlier_twins[group]
            if used[group] == count or (not used[group] and not all(used[t] for t in twins)):
                continue
            master = self.symmetry.free_master[group] if state is None else state.master
            grown = tuple(n + (index == group) for index, n in enumerate(used))
            yield State(grown, group, master)

    def rank(self, state: State) -> tuple[int, ...]:
        """Return the number of devices used."""
        return (sum(state.progress),)

    def is_first(self, state: State) -> bool:
        """Whether one device is used."""
        return sum(state.progress) == 1

    def is_final(self, state: State) -> bool:
        """Whether every needed group has a used device."""
        return all(state.progress[group] for group in self.needed)

    def master_of(self, state: State) -> int:
        """Return the class itself: it is named after a member, and all cost the same."""
        return state.master

    def devices_left(self, state: State | None) -> list[int]:
        """Return the devices not used."""
        used = (0,) * len(self.counts) if state is None else state.progress
        return [count - n for count, n in zip(self.counts, used, strict=True)]

    def arrivals_left(self, state: State | None) -> list[int]:
        """Return the devices not used: each may be entered from another group."""
        return self.devices_left(state)


class FixedWalk:
    """One order, from which devices may be dropped. Progress: position in it."""

    def __init__(self, num_groups: int, order: tuple[int, ...], needed: tuple[int, ...]) -> None:
        self.num_groups = num_groups
        self.order = order
        self.needed = needed

    def follow(self, state: State | None) -> Iterator[State]:
        """Yield the master, then every later position up to one that is needed."""
        if state is None:
            yield State((0,), self.order[0], self.order[0])
            return
        for position in range(state.progress[0] + 1, len(self.order)):
            yield State((position,), self.order[position], state.master)
            if self.order[position] in self.needed:
                return

    def rank(self, state: State) -> tuple[int, ...]:
        """Return the position."""
        return state.progress

    def is_first(self, state: State) -> bool:
        """Whether this is the first position."""
        return state.progress == (0,)

    def is_final(self, state: State) -> bool:
        """Whether no later position is needed."""
        return not set(self.order[state.progress[0] + 1 :]) & set(self.needed)

    def master_of(self, state: State) -> int:
        """Return the group of the first position."""
        return state.master

    def devices_left(self, state: State | None) -> list[int]:
        """Return the groups of the later positions."""
        later = self.order if state is None else self.order[state.progress[0] + 1 :]
        return [later.count(group) for group in range(self.num_groups)]

    def arrivals_left(self, state: State | None) -> list[int]:
        """Return the same: each of them may be entered."""
        return self.devices_left(state)
