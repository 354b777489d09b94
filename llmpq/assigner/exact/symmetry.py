"""What makes two groups the same to a search: it only ever merges what costs exactly the same."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmpq.assigner.exact.space import SearchSpace
from llmpq.assigner.problem import FloatArray

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Symmetry:
    """Equal groups and equal ways back, over all pairs.

    Attributes:
        earlier_twins: for every group the earlier groups it may be exchanged with.
        block_master: for every group the first group of its class of masters when groups stand
            together: all members are sent back to equally by any *other* last group.
        free_master: the same when groups interleave: by any last group, their own included.
        inner_links_matter: whether some link inside a group is slower than all between groups.
    """

    earlier_twins: tuple[tuple[int, ...], ...]
    block_master: tuple[int, ...]
    free_master: tuple[int, ...]
    inner_links_matter: bool


def find_symmetry(space: SearchSpace) -> Symmetry:
    """Compare all groups over all pairs."""
    tables = _Tables(space)
    groups = range(space.num_groups)
    return Symmetry(
        earlier_twins=tuple(
            tuple(twin for twin in range(group) if tables.are_twins(twin, group))
            for group in groups
        ),
        block_master=_classes(tables.returns, skip_own=True),
        free_master=_classes(tables.returns, skip_own=False),
        inner_links_matter=tables.inner_links_matter(),
    )


class _Tables:
    """Everything a group is told by: ``own`` is ``[T, F]``, the tables of links ``[T, T, F]``."""

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

    def are_twins(self, one: int, other: int) -> bool:
        """Whether exchanging two groups changes nothing."""
        if self.counts[one] != self.counts[other]:
            return False
        if not (self.own[one] == self.own[other]).all():
            return False
        swapped = list(range(len(self.counts)))
        swapped[one], swapped[other] = other, one
        return bool((self.links[np.ix_(swapped, swapped)] == self.links).all())

    def inner_links_matter(self) -> bool:
        """Whether a link inside a group of several devices is slower than all other links."""
        several = [group for group, count in enumerate(self.counts) if count > 1]
        inner = self.sends[several, several]
        outer = self.sends[~np.eye(len(self.counts), dtype=bool)]
        if not several:
            return False
        return not outer.size or bool((inner.max(axis=0) > outer.max(axis=0)).any())


def _classes(returns: FloatArray, *, skip_own: bool) -> tuple[int, ...]:
    """Name every group after the first group whose ways back equal its own."""
    size = len(returns)
    members: dict[int, list[int]] = {}

    def alike(group: int, others: list[int]) -> bool:
        return all(
            (returns[last, group] == returns[last, other]).all()
            for last in range(size)
            for other in others
            if not (skip_own and last in (group, other))
        )

    names = []
    for group in range(size):
        name = next((key for key, others in members.items() if alike(group, others)), group)
        members.setdefault(name, []).append(group)
        names.append(name)
    return tuple(names)
