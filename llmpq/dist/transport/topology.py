"""Topology: the links between the ranks of a plan. Needs no torch.

Stages that do both phases form one ring. Where prefill and decode have stages of their own (WAA),
there are two rings, both through the master, and a one-way link for every handover of keys and
values. A draft model in a process of its own forms a ring with the master.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmpq.spec.plan import Handover, Plan, handovers_of
from llmpq.spec.precision import Phase

DRAFT_RING = 2
"""Number of the ring of the draft model, after those of both phases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A one-way stream between two ranks: of a ring, or of the keys and values of a handover."""

    source: int
    target: int
    ring: int | None = None
    handover: Handover | None = None

    @property
    def name(self) -> str:
        """The purpose of the link; unique in the run together with its ends."""
        return "keys and values" if self.ring is None else f"ring {self.ring}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """All links of a run.

    Attributes:
        rings: ranks in the order of sending, the master first: one ring, or the ring of the stages
            that decode, then that of the stages that prefill. Rings of one rank are left out.
        handovers: of keys and values.
        draft_rank: of the draft model's own process, ``None`` without one.
    """

    rings: tuple[tuple[int, ...], ...]
    handovers: tuple[Handover, ...] = ()
    draft_rank: int | None = None

    @property
    def links(self) -> tuple[Link, ...]:
        """Every link, in the same order on all ranks."""
        rings = dict(enumerate(self.rings))
        if self.draft_rank is not None:
            rings[DRAFT_RING] = (0, self.draft_rank)
        found = [
            Link(ring=number, source=rank, target=ring[(index + 1) % len(ring)])
            for number, ring in rings.items()
            for index, rank in enumerate(ring)
        ]
        found += [
            Link(source=one.source, target=one.target, handover=one) for one in self.handovers
        ]
        return tuple(found)


def topology_of(plan: Plan, *, has_drafts: bool = False) -> Topology:
    """Return the links that a plan's ranks need; ``has_drafts``: a draft model's rank is one."""
    phases = (Phase.DECODE, Phase.PREFILL) if plan.is_split else (Phase.DECODE,)
    rings = tuple(plan.path(phase) for phase in phases)
    return Topology(
        rings=tuple(ring for ring in rings if len(ring) > 1),
        handovers=handovers_of(plan),
        draft_rank=plan.draft_rank if has_drafts else None,
    )


def one_ring(world_size: int) -> Topology:
    """Return the topology of a ring of all ranks."""
    return Topology(rings=(tuple(range(world_size)),))
