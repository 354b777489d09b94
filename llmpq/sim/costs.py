"""What a simulated pipeline is made of and what its parts take: the simulator's questions.

Whoever has cost models answers them (``llmpq.sim.plan_costs`` from a plan); tests answer by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from llmpq.batching import PipelineDepth
from llmpq.errors import SpecError
from llmpq.spec.precision import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a micro-batch asks of a stage.

    Attributes:
        phase: prefill or decode.
        rows: sequences.
        longest: in prefill the longest prompt, to which all are padded; in decode the longest
            context.
        total: sum over the sequences of prompt or context tokens.
    """

    phase: Phase
    rows: int
    longest: int
    total: int

    @property
    def mean(self) -> float:
        """Mean prompt or context."""
        return self.total / self.rows


class Hop(NamedTuple):
    """What sending a message takes.

    Attributes:
        end_s: seconds of work at either end; a message between processes of one host is copied.
        delay_s: seconds on the way, in which nobody works.
    """

    end_s: float
    delay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The ranks of a pipeline, and the way a micro-batch takes through them.

    Attributes:
        num_ranks: rank 0 is the master: every micro-batch starts and ends there.
        prefill_path, decode_path: ranks in the order they are visited, from rank 0 on. They are
            the same, unless prefill and decode have stages of their own (WAA).
        threads: cores each rank occupies while it works.
        hosts: the host of each rank.
        cores: cores of a host that its ranks share; a host that is not named has enough.
    """

    num_ranks: int
    prefill_path: tuple[int, ...]
    decode_path: tuple[int, ...]
    threads: tuple[int, ...]
    hosts: tuple[str, ...]
    cores: dict[str, int] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for path in (self.prefill_path, self.decode_path):
            if not path or path[0] != 0 or len(set(path)) != len(path):
                raise SpecError(
                    f"pipeline layout: found the path {path}, expected ranks from 0 on, each once"
                )
        if {*self.prefill_path, *self.decode_path} != set(range(self.num_ranks)):
            raise SpecError("pipeline layout: expected every rank on a path")

    @property
    def is_split(self) -> bool:
        """Whether prefill and decode have stages of their own."""
        return self.prefill_path != self.decode_path

    def path(self, phase: Phase) -> tuple[int, ...]:
        """Return the way of a phase."""
        return self.prefill_path if phase is Phase.PREFILL else self.decode_path

    @property
    def depth(self) -> PipelineDepth:
        """Limits of the micro-batches in flight, as in the runtime."""
        return PipelineDepth(
            prefill_stages=len(self.prefill_path),
            decode_stages=len(self.decode_path),
            is_split=self.is_split,
        )


def straight(num_stages: int) -> Layout:
    """Return the layout of stages in a row, each on a host of its own."""
    ranks = tuple(range(num_stages))
    return Layout(
        num_ranks=num_stages,
        prefill_path=ranks,
        decode_path=ranks,
        threads=(1,) * num_stages,
        hosts=tuple(f"host {rank}" for rank in ranks),
    )


class StepCosts(Protocol):
    """Seconds of a pipeline's parts."""

    @property
    def layout(self) -> Layout:
        """Who takes part."""
        ...

    def stage_s(self, rank: int, shape: Shape) -> float:
        """Return the seconds of a rank's layers; the master's may be none."""
        ...

    def embed_s(self, shape: Shape) -> float:
        """Return the seconds the master spends before any layer."""
        ...

    def project_s(self, shape: Shape) -> float:
        """Return the seconds of final norm, head and sampling."""
        ...

    def hop(self, rank: int, shape: Shape) -> Hop:
        """Return what sending a rank's output to the next on its way takes; the last answers 0."""
        ...

    def handover_s(self, shape: Shape) -> float:
        """Return the delay until a prefilled micro-batch's keys and values are where it decodes.

        0 when both phases have the same stages.
        """
        ...


def mean_shape(phase: Phase, tokens: Sequence[int]) -> Shape:
    """Return the shape of a micro-batch from its prompts or contexts."""
    return Shape(phase=phase, rows=len(tokens), longest=max(tokens), total=sum(tokens))
