"""All device orders at once: an acyclic graph whose paths are the orders.

A node stands for one *used* device, identified by all that determines the rest of a plan: how many
devices of each group are used, the group of this device (links differ), and the cost of the return
link to the master. Two exact reductions keep the graph small: masters with equal return links from
every last device share their nodes, and of twins (``device_orders``) a later one is only entered
after the earlier ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llmpq.assigner.enumeration import (
    GroupTables,
    leading_orders,
    num_orders,
    only_blocks,
)
from llmpq.assigner.exact import native
from llmpq.assigner.exact.native import NotCoveredError
from llmpq.assigner.objective import SearchSpace
from llmpq.options.plan import OrderMode
from llmpq.spec.plan import OrderSet

Orders = OrderMode | tuple[int, ...]
"""Which orders to search, or one fixed order (its first device is the master)."""

MAX_CELLS = 4_000_000
"""Largest number of nodes times layers: some 0.5 GB of tables."""
QUICK_CELLS = 16_000
"""Nodes times layers up to which all orders are searched by default: under a second of planning."""


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
    """Device orders as paths in a graph, with the arrays of the C core; group -1 is the start.

    ``orders`` and ``number`` say which orders they are, and how many up to symmetry.
    """

    graph: native.Lattice
    node_group: tuple[int, ...]
    held: list[native.AnyArray]
    orders: OrderSet
    number: int


def build_lattice(space: SearchSpace, orders: Orders) -> OrderLattice:
    """Build the graph of ``orders``.

    By default, of all distinct orders where they are few; else of those in groups; where there are
    too many groups for that, each leads once, the others in file order behind it.

    Raises:
        NotCoveredError: the graph would be too large.
    """
    tables = GroupTables(space)
    needed = () if space.limits is None else space.limits.used
    most = MAX_CELLS // (space.num_layers + 1)
    if not isinstance(orders, str):
        given = _ListedOrders(space.num_groups, [tuple(int(group) for group in orders)], needed)
        return _pack(space, given, _explore(given, most), tables, "given")
    counts, twins = tables.counts, tables.twins()
    if orders == "all" or (orders == "auto" and not only_blocks(counts)):
        few = most if orders == "all" else min(most, QUICK_CELLS // (space.num_layers + 1))
        every = _GroupOrders(tables, needed, in_blocks=False)
        try:
            return _pack(space, every, _explore(every, few), tables, "all")
        except NotCoveredError:
            if orders == "all":
                raise
    blocks = _GroupOrders(tables, needed, in_blocks=True)
    try:
        states = _explore(blocks, most)
    except NotCoveredError:
        leading = _ListedOrders(space.num_groups, leading_orders(counts, twins), needed)
        return _pack(space, leading, _explore(leading, most), tables, "leading")
    return _pack(space, blocks, states, tables, "all" if only_blocks(counts) else "types")


def has_few_orders(space: SearchSpace, orders: OrderMode, most_cells: int) -> bool:
    """Whether all distinct orders are wanted, or by default take at most so many cells."""
    if orders != "auto":
        return orders == "all"
    tables = GroupTables(space)
    if only_blocks(tables.counts):
        return True
    try:
        every = _GroupOrders(tables, (), in_blocks=False)
        _explore(every, most_cells // (space.num_layers + 1))
    except NotCoveredError:
        return False
    return True


def _explore(orders: _GroupOrders | _ListedOrders, limit: int) -> list[State | None]:
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
    orders: _GroupOrders | _ListedOrders,
    states: list[State | None],
    tables: GroupTables,
    kind: OrderSet,
) -> OrderLattice:
    size, price_inner = space.num_groups, tables.inner_links_matter()
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
    return OrderLattice(
        graph=graph,
        node_group=groups,
        held=held,
        orders=kind,
        number=num_orders(tables.counts, kind, tables.twins()),
    )


class _GroupOrders:
    """Every interleaving of the groups, or only those in which a group's devices stand together.

    Progress: devices of every group that are used or, in blocks, were left behind.
    """

    def __init__(self, tables: GroupTables, needed: tuple[int, ...], *, in_blocks: bool) -> None:
        self.counts = tables.counts
        twins = tables.twins()
        self.earlier = [
            [one for one in range(group) if twins[one] == twins[group]]
            for group in range(len(twins))
        ]
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


class _ListedOrders:
    """A list of orders, from which any device but the first may be dropped.

    Progress: which order, and the position in it. The last device determines neither, so orders
    share no nodes.
    """

    def __init__(
        self, num_groups: int, orders: Sequence[tuple[int, ...]], needed: tuple[int, ...]
    ) -> None:
        self.num_groups = num_groups
        self.orders = orders
        self.needed = needed

    def successors(self, state: State | None) -> Iterator[State]:
        if state is None:
            for number, order in enumerate(self.orders):
                yield State((number, 0), order[0], order[0])
            return
        number, last = state.progress
        order = self.orders[number]
        for position in range(last + 1, len(order)):
            yield State((number, position), order[position], state.master)
            if order[position] in self.needed:
                return

    def rank(self, state: State) -> tuple[int, ...]:
        return state.progress[1:]

    def is_first(self, state: State) -> bool:
        return state.progress[1] == 0

    def is_final(self, state: State) -> bool:
        return not set(self._later(state)) & set(self.needed)

    def master_of(self, state: State) -> int:
        return state.master

    def devices_left(self, state: State | None) -> list[int]:
        later = self.orders[0] if state is None else self._later(state)
        return [later.count(group) for group in range(self.num_groups)]

    arrivals_left = devices_left

    def _later(self, state: State) -> tuple[int, ...]:
        number, last = state.progress
        return self.orders[number][last + 1 :]
