"""The layout of a simulated pipeline, and the interface of its costs.

``llmpq.sim.plan_costs`` implements the interface for a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from llmpq.batching import PipelineDepth
from llmpq.errors import SpecError
from llmpq.spec.precision import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """Size of a micro-batch.

    Attributes:
        phase: prefill or decode.
        rows: number of sequences.
        longest: tokens of the longest prompt or context.
        total: prompt or context tokens of all sequences.
        spread: mean of the squared prompt lengths over the square of their mean, as attention
            grows with squares; 1 for equal lengths and in decode.
    """

    phase: Phase
    rows: int
    longest: int
    total: int
    spread: float = 1.0

    @property
    def mean(self) -> float:
        """Mean tokens of a prompt or context."""
        return self.total / self.rows


class Hop(NamedTuple):
    """Cost of sending a message.

    Attributes:
        end_s: seconds of work at each end, such as copying.
        delay_s: seconds of transfer without work.
    """

    end_s: float
    delay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineLayout:
    """The ranks of a pipeline, and the path of a micro-batch through them.

    Attributes:
        num_ranks: number of ranks; every micro-batch starts and ends at rank 0, the master.
        prefill_path, decode_path: ranks in order, from rank 0 on; they differ only if prefill and
            decode have separate stages (WAA).
        threads: cores that each rank uses.
        hosts: host of each rank.
        cores: cores of a host that its ranks share; unlimited for other hosts.
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
        """Whether prefill and decode have separate stages."""
        return self.prefill_path != self.decode_path

    def path(self, phase: Phase) -> tuple[int, ...]:
        """Return the path of a phase."""
        return self.prefill_path if phase is Phase.PREFILL else self.decode_path

    @property
    def depth(self) -> PipelineDepth:
        """Limits of the micro-batches in flight, as in the runtime."""
        return PipelineDepth(
            prefill_stages=len(self.prefill_path),
            decode_stages=len(self.decode_path),
            is_split=self.is_split,
        )


def linear_layout(num_stages: int) -> PipelineLayout:
    """Return the layout of a linear pipeline with one host per stage."""
    ranks = tuple(range(num_stages))
    return PipelineLayout(
        num_ranks=num_stages,
        prefill_path=ranks,
        decode_path=ranks,
        threads=(1,) * num_stages,
        hosts=tuple(f"host {rank}" for rank in ranks),
    )


class MicroBatchCosts(Protocol):
    """Seconds of a pipeline's parts."""

    @property
    def layout(self) -> PipelineLayout:
        """Layout of the pipeline."""
        ...

    def stage_s(self, rank: int, shape: BatchShape) -> float:
        """Return the seconds of the layers of a rank."""
        ...

    def embed_s(self, shape: BatchShape) -> float:
        """Return the seconds of the embedding on the master."""
        ...

    def project_s(self, shape: BatchShape) -> float:
        """Return the seconds of final norm, head and sampling."""
        ...

    def hop(self, rank: int, shape: BatchShape) -> Hop:
        """Return the cost of sending the output of a rank to the next rank on the path."""
        ...

    def handover_s(self, shape: BatchShape) -> float:
        """Return the seconds of the KV transfer to the decode stages; 0 if they are the same."""
        ...


def batch_shape(phase: Phase, tokens: Sequence[int]) -> BatchShape:
    """Return the shape of a micro-batch with these prompt or context lengths."""
    rows, total, spread = len(tokens), sum(tokens), 1.0
    if phase is Phase.PREFILL:
        spread = rows * sum(count * count for count in tokens) / total**2
    return BatchShape(phase=phase, rows=rows, longest=max(tokens), total=total, spread=spread)
