"""Orders of devices: which the planner searches, and how many there are up to symmetry.

Devices of one group (equal devices of one node) are interchangeable. So are *twins*: groups of as
many devices whose costs and links are equal, each to each. Orders that differ in the places of such
devices cost the same, and one of them is searched.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from llmpq.assigner.problem import FloatArray, SearchSpace
from llmpq.errors import SpecError
from llmpq.spec.plan import OrderSet

OrderMode = Literal["auto", "types", "all"]
"""All distinct orders; those that keep the devices of a group together; or all where they are few,
and those in groups where they are many."""

MAX_ORDERS = 5040
"""Most orders that are listed, for integer programs."""
FEW_ORDERS = 6
"""Orders up to which integer programs try all by default: each has programs of its own."""
MAX_COUNT = 10**18
"""Where counting orders stops."""


def device_orders(
    counts: Sequence[int], mode: OrderSet, twins: Sequence[int] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Return one order of device groups of every kind of symmetric ones.

    Args:
        counts: devices of each group.
        mode: a set of orders.
        twins: the first twin of each group, as ``GroupTables.twins`` returns them; by default no
            group has a twin.

    Raises:
        SpecError: more than ``MAX_ORDERS``.
    """
    twins = range(len(counts)) if twins is None else twins
    number = num_orders(counts, mode, twins)
    if number > MAX_ORDERS:
        hint = "--orders types" if mode == "all" else "--solver exact"
        raise SpecError(
            f"device orders: found {number} of mode '{mode}' for groups of {list(counts)} devices, "
            f"expected at most {MAX_ORDERS}; use {hint}"
        )
    if mode == "all":
        return tuple(_interleavings(list(counts), (), twins))
    if mode == "leading":
        return leading_orders(counts, twins)
    return tuple(
        tuple(group for group in blocks for _ in range(counts[group]))
        for blocks in _interleavings([1] * len(counts), (), twins)
    )


def leading_orders(
    counts: Sequence[int], twins: Sequence[int] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Return one order for each group as the master's, the others in file order behind it."""
    order = [group for group, count in enumerate(counts) for _ in range(count)]
    firsts = range(len(counts)) if twins is None else dict.fromkeys(twins)
    return tuple(
        (*(group for group in order if group == first), *(g for g in order if g != first))
        for first in firsts
    )


def num_orders(counts: Sequence[int], mode: OrderSet, twins: Sequence[int] | None = None) -> int:
    """Return the number of orders of all devices up to symmetry, at most ``MAX_COUNT``."""
    twins = range(len(counts)) if twins is None else twins
    if mode == "given":
        return 1
    if mode == "leading":
        return len(set(twins))
    symmetric = math.prod(math.factorial(size) for size in Counter(twins).values())
    if mode == "types":
        found = math.factorial(len(counts)) // symmetric
    else:
        equal = math.prod(math.factorial(count) for count in counts)
        found = math.factorial(sum(counts)) // equal // symmetric
    return min(found, MAX_COUNT)


def listed_orders(counts: Sequence[int], wanted: OrderMode, twins: Sequence[int]) -> OrderSet:
    """Return the orders that integer programs try: few enough to list, unless all are wanted."""
    every, blocks = (num_orders(counts, mode, twins) for mode in ("all", "types"))
    if wanted == "all" or (wanted == "auto" and every <= FEW_ORDERS):
        return "all"
    if blocks > MAX_ORDERS:
        return "leading"
    return "all" if only_blocks(counts) else "types"


def only_blocks(counts: Sequence[int]) -> bool:
    """Whether every order of these devices keeps the devices of a group together."""
    return len(counts) == 1 or max(counts) == 1


def _interleavings(
    left: list[int], prefix: tuple[int, ...], twins: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    if not any(left):
        yield prefix
        return
    for group, count in enumerate(left):
        # Of twins, the first one is used first.
        waits = group not in prefix and any(
            twins[one] == twins[group] and one not in prefix for one in range(group)
        )
        if count and not waits:
            left[group] -= 1
            yield from _interleavings(left, (*prefix, group), twins)
            left[group] += 1


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


class GroupTables:
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

    def twins(self) -> tuple[int, ...]:
        """Return for every group the first one that it may be exchanged with: itself, or a twin."""
        found: list[int] = []
        for group in range(len(self.counts)):
            firsts = dict.fromkeys(found)
            twin = next((one for one in firsts if self._are_interchangeable(one, group)), group)
            found.append(twin)
        return tuple(found)

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
