"""Which devices the processes of a stage take: those that they have, or the ones that fit best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmpq.assigner.fleet.partition import Pools
from llmpq.multillm.candidates import Candidate
from llmpq.multillm.estimate import Process

Places = Mapping[int, tuple[tuple[int, ...], ...]]
"""Devices of each replica of each model, indices into the cluster's."""


def place(
    pools: Pools,
    processes: Mapping[int, Process],
    before: Mapping[Process, tuple[tuple[int, ...], ...]],
) -> dict[Process, tuple[tuple[int, ...], ...]]:
    """Return the devices of every replica of the processes of a stage.

    A process that goes on keeps its devices. Replicas with most devices choose first, aligned
    blocks of as many devices (those that share a fast link) where one is free; single devices fill
    blocks that are in use already.

    Args:
        pools: of the cluster.
        processes: of the stage, which fit.
        before: devices of the processes of the stage before.
    """
    placed = {one: before[one] for one in processes.values() if one in before}
    taken = {device for replicas in placed.values() for own in replicas for device in own}
    new = [one for one in processes.values() if one not in before]
    for process in sorted(new, key=lambda one: -sum(one.candidate.counts)):
        replicas = []
        for _ in range(process.candidate.replicas):
            own = _replica(pools, process.candidate, taken)
            taken.update(own)
            replicas.append(own)
        placed[process] = tuple(replicas)
    return placed


def _replica(pools: Pools, candidate: Candidate, taken: set[int]) -> tuple[int, ...]:
    found: list[int] = []
    for members, count in zip(pools.members(), candidate.counts, strict=True):
        found += _block(members, count, taken)
    return tuple(found)


def _block(members: Sequence[int], count: int, taken: set[int]) -> Sequence[int]:
    """Return ``count`` free devices of a pool, side by side if possible."""
    if count > 1:
        for start in range(0, len(members) - count + 1, count):
            block = members[start : start + count]
            if not taken & set(block):
                return block

    def crowd(at: int) -> tuple[int, ...]:
        """Free devices in the aligned blocks of 2, 4 and 8 about a device: few first."""
        sizes = (2, 4, 8)
        return tuple(
            len(set(members[at // size * size : (at // size + 1) * size]) - taken) for size in sizes
        )

    free = [at for at, device in enumerate(members) if device not in taken]
    return [members[at] for at in sorted(free, key=crowd)[:count]]
