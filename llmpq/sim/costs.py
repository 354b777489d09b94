"""The layout of a simulated pipeline, the sizes of its steps, and their seconds on a plan.

A step of one phase, a micro-batch, is priced by ``PlanCosts``:

- Between CPU workers a message costs both ends processor time. If the communication table has this
  time (``end_s``), the rest of the send is delay. Otherwise half of a send within a host is work of
  each end, and a send between hosts is delay.
- In decode, CPU attention reads only the tokens of each row, so a micro-batch costs as much as its
  mean context. On other devices it costs as much as its longest context.
- Prompts are computed in chunks, as in the runtime, and packed without padding. ``v`` prompts with
  mean length ``m`` take ``P(v, m)`` as equal ones, where ``A(m)`` of each is attention. Attention
  grows with the squares of the lengths ``s``::

      P(v, m) + A(m) (sum s^2 / m^2 - v)

A packed step mixes chunks of both phases and is priced by ``PlanEngineCosts``. Cost models give
``P(v, s)`` for ``v`` prompts of ``s`` tokens and ``D(v, c)`` for ``v`` sequences with a context of
``c`` tokens. The linear operators of a packed step see all of its tokens; attention is the sum over
its sequences.

Attention of a prompt grows with ``v s^2`` and everything else with ``v s``, so two shapes of ``n``
tokens separate them::

    A(n) = 4/3 (P(1, n) - P(4, n/4))        attention of one whole prompt
    L(n) = P(1, n) - A(n)                   everything else

A step of ``r`` decode rows with a mean context ``c`` and of chunks ``[f, f + k)`` of prompts, ``n``
tokens in all, takes::

    max(L(n), D(r, 1)) + (D(r, c) - D(r, 1)) + sum max(A(f + k) - A(f), D(1, f) - D(1, 1))

The second term of each chunk reads the keys and values before it once. A step of decode rows alone
takes ``D(r, c)`` and one whole prompt ``P(1, s)``; the chunks of a prompt add up to its attention.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from llmpq.batching import PipelineDepth
from llmpq.batching.engine_step import ScheduledChunk
from llmpq.costmodel import ClusterCosts
from llmpq.costmodel.base import PhaseSeconds, chunked_s, prompt_s
from llmpq.errors import SpecError
from llmpq.spec.cluster import Device
from llmpq.spec.devices.figures import reads_blocks
from llmpq.spec.model import ModelSpec
from llmpq.spec.plan import Plan, handovers_of
from llmpq.spec.precision import Phase

CONTEXT_STEP = 16
"""Decode times of micro-batches are evaluated at multiples of this context and interpolated."""
PACKED_CONTEXT_STEP = 64
"""The same for packed steps."""

Shape = TypeVar("Shape", contravariant=True)


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

    def path(self, phase: Phase | None) -> tuple[int, ...]:
        """Return the path of a step of one phase, or of a step of both."""
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


class PipelineCosts(Protocol[Shape]):
    """Seconds of a pipeline's parts, for steps of a size."""

    @property
    def layout(self) -> PipelineLayout:
        """Layout of the pipeline."""
        ...

    def stage_s(self, rank: int, shape: Shape) -> float:
        """Return the seconds of the layers of a rank."""
        ...

    def project_s(self, shape: Shape) -> float:
        """Return the seconds of the master's own work: embedding, head, sampling."""
        ...

    def hop(self, rank: int, shape: Shape) -> Hop:
        """Return the cost of sending the output of a rank to the next rank on the path.

        That of the last prefill stage includes the transfer of keys and values to the decode
        stages, if they are others.
        """
        ...


def batch_shape(phase: Phase, tokens: Sequence[int]) -> BatchShape:
    """Return the shape of a micro-batch with these prompt or context lengths."""
    rows, total, spread = len(tokens), sum(tokens), 1.0
    if phase is Phase.PREFILL:
        spread = rows * sum(count * count for count in tokens) / total**2
    return BatchShape(phase=phase, rows=rows, longest=max(tokens), total=total, spread=spread)


class StepSize(NamedTuple):
    """Rows, tokens and contexts that the seconds of a step depend on.

    Attributes:
        rows: output positions: one of every sequence, and one of every draft token.
        tokens: tokens of all sequences.
        decode_rows: tokens of sequences that decode, draft tokens included.
        decode_context: keys that those attend to, in all.
        prompts: first token and number of tokens of every other chunk.
    """

    rows: int
    tokens: int
    decode_rows: int
    decode_context: int
    prompts: tuple[tuple[int, int], ...]


def step_size(chunks: Sequence[ScheduledChunk]) -> StepSize:
    """Return the size of a step."""
    decode = context = tokens = drafts = 0
    prompts: list[tuple[int, int]] = []
    for chunk in chunks:
        count = chunk.count
        if count == 1:
            decode += 1
            context += chunk.first + 1
        elif chunk.num_draft_tokens:
            drafts += chunk.num_draft_tokens
            decode += count
            context += count * chunk.first + count * (count + 1) // 2
        else:
            prompts.append((chunk.first, count))
            tokens += count
    return StepSize(len(chunks) + drafts, decode + tokens, decode, context, tuple(prompts))


MicroBatchCosts = PipelineCosts[BatchShape]
"""Seconds of steps of one phase."""
EngineCosts = PipelineCosts[StepSize]
"""Seconds of packed steps."""


class PlanCosts:
    """Seconds of a plan's stages, links and master.

    Args:
        plan: the plan.
        costs: cost models of its cluster.
        devices: device of every stage; by default those of the plan.
        pads_prompts: price an engine that computes every prompt of a micro-batch as long as the
            longest one, such as ExeGPT's.

    Raises:
        ProfileMissError: a table lacks a phase and bitwidth.
    """

    def __init__(
        self,
        plan: Plan,
        costs: ClusterCosts,
        devices: Sequence[Device] | None = None,
        *,
        pads_prompts: bool = False,
    ) -> None:
        own = [plan.device_of(stage) for stage in plan.stages] if devices is None else devices
        self._costs = costs
        self._devices = own
        self._pads_prompts = pads_prompts
        kinds = costs.model.layer_kinds
        self._layers = [
            Counter(zip(kinds[stage.first_layer : stage.end_layer], stage.variants, strict=True))
            for stage in plan.stages
        ]
        cores = {node.name: node.cores for node in costs.cluster.nodes}
        self._layout = PipelineLayout(
            num_ranks=len(own),
            prefill_path=plan.path(Phase.PREFILL),
            decode_path=plan.path(Phase.DECODE),
            threads=tuple(device.threads or 1 for device in own),
            hosts=tuple(device.node for device in own),
            cores={name: count for name, count in cores.items() if count is not None},
        )
        self._reads_row_lengths = [reads_blocks(costs.specs[device.group]) for device in own]
        self._stages = plan.stages
        self._streamed_bytes = [
            sum(
                costs.layer_weight_bytes(
                    device, kinds[stage.first_layer + index], stage.bits[index]
                )
                for index in stage.on_disk
            )
            for stage, device in zip(plan.stages, own, strict=True)
        ]
        self._handovers = handovers_of(plan)
        self._stage: dict[tuple[int, Phase, int, int], float] = {}
        self._attention: dict[tuple[int, int], float] = {}
        self._project: dict[tuple[Phase, int, float], float] = {}
        self._hops: dict[tuple[int, Phase, int], Hop] = {}

    @property
    def model(self) -> ModelSpec:
        """The model of the plan."""
        return self._costs.model

    @property
    def layout(self) -> PipelineLayout:
        """Layout of the pipeline of the plan."""
        return self._layout

    def stage_s(self, rank: int, shape: BatchShape) -> float:
        """Return the seconds of the layers of a stage and of its overhead."""
        if not self.has_layers(rank, shape.phase):
            return 0.0
        if shape.phase is Phase.PREFILL:
            return self._prefill_s(rank, shape)
        tokens = shape.mean if self._reads_row_lengths[rank] else shape.longest
        return self.layers_s(rank, shape.phase, shape.rows, tokens)

    def _prefill_s(self, rank: int, shape: BatchShape) -> float:
        """Return the seconds of prompts of any lengths; see the module."""
        seconds = self.layers_s(rank, Phase.PREFILL, shape.rows, self._tokens_a_prompt(shape))
        if self._pads_prompts or shape.spread == 1.0:
            return seconds
        near = max(1, round(shape.mean))
        key = rank, near
        if key not in self._attention:
            prefill_s = partial(self.micro_batch_s, rank, Phase.PREFILL)
            _, self._attention[key] = prompt_s(prefill_s, near)
        more = (shape.spread - 1.0) * shape.rows * (shape.mean / near) ** 2
        return seconds + more * self._attention[key]

    def _tokens_a_prompt(self, shape: BatchShape) -> float:
        return shape.longest if self._pads_prompts else shape.mean

    def has_layers(self, rank: int, phase: Phase) -> bool:
        """Whether a rank computes layers; a master may only embed and project."""
        return bool(self._layers[rank]) and self._stages[rank].computes(phase)

    def layers_s(self, rank: int, phase: Phase, rows: int, tokens: float) -> float:
        """Return the seconds of a stage; ``tokens`` may be a mean.

        Weights on disk are read while layers and the master compute.
        """
        computed_s = self._computed_s(rank, phase, rows, tokens)
        if not self._streamed_bytes[rank]:
            return computed_s
        length = tokens if phase is Phase.PREFILL else 1.0
        read_s = self._costs.stream_s(self._devices[rank], self._streamed_bytes[rank], length)
        beside_s = self.master_s(phase, rows, length) if rank == 0 else 0.0
        return max(computed_s, read_s - beside_s)

    def _computed_s(self, rank: int, phase: Phase, rows: int, tokens: float) -> float:
        step = 1 if phase is Phase.PREFILL else CONTEXT_STEP
        below = int(tokens) // step * step
        share = (tokens - below) / step
        low_s = self._at(rank, phase, rows, max(1, below))
        if not share:
            return low_s
        high_s = self._at(rank, phase, rows, below + step)
        return low_s + share * (high_s - low_s)

    def micro_batch_s(self, rank: int, phase: Phase, rows: int, tokens: float) -> float:
        """Return the seconds of a stage for one micro-batch in one pass; not cached."""
        device = self._devices[rank]
        seconds = sum(
            count * self._costs.variant_s(device, phase, variant, rows, tokens, kind)
            for (kind, variant), count in self._layers[rank].items()
        )
        return seconds + self._costs.stage_s(device, phase)

    def master_s(self, phase: Phase, rows: int, tokens: float) -> float:
        """Return the seconds of the master's own work on one micro-batch."""
        key = phase, rows, tokens
        if key not in self._project:
            self._project[key] = self._costs.master_s(self._devices[0], *key)
        return self._project[key]

    def project_s(self, shape: BatchShape) -> float:
        """Return the seconds of embedding, final norm, head, sampling and scheduler."""
        tokens = self._tokens_a_prompt(shape) if shape.phase is Phase.PREFILL else 1.0
        return self.master_s(shape.phase, shape.rows, tokens)

    def hop(self, rank: int, shape: BatchShape) -> Hop:
        """Return the cost of sending the output of a stage; see ``PipelineCosts.hop``."""
        is_last = rank == self._layout.path(shape.phase)[-1]
        # The last stage sends only the last position.
        tokens = shape.rows
        if not is_last and shape.phase is Phase.PREFILL:
            tokens = round(shape.rows * self._tokens_a_prompt(shape))
        key = rank, shape.phase, tokens
        if key not in self._hops:
            self._hops[key] = self._hop(*key)
        hop = self._hops[key]
        if not (is_last and self._handovers and shape.phase is Phase.PREFILL):
            return hop
        return hop._replace(delay_s=hop.delay_s + self._handover_s(rank, shape))

    def _handover_s(self, last: int, shape: BatchShape) -> float:
        """Return the seconds to send the keys and values of the last prefill stage.

        Earlier stages send theirs while it computes.
        """
        costs, devices, total_s = self._costs, self._devices, 0.0
        for one in self._handovers:
            if one.source == last:
                kinds = costs.model.layer_kinds[one.first_layer : one.end_layer]
                size = sum(costs.token_kv_bytes(kind, shape.total) for kind in kinds)
                total_s += costs.comm.send_s(devices[last], devices[one.target], size)
        return total_s

    def _at(self, rank: int, phase: Phase, rows: int, tokens: int) -> float:
        key = rank, phase, rows, tokens
        if key not in self._stage:
            seconds = partial(self.micro_batch_s, rank, phase)
            is_prompt = phase is Phase.PREFILL
            self._stage[key] = (
                chunked_s(seconds, rows, tokens) if is_prompt else seconds(rows, tokens)
            )
        return self._stage[key]

    def _hop(self, rank: int, phase: Phase, tokens: int) -> Hop:
        path = self._layout.path(phase)
        if len(path) == 1:
            return Hop(0.0, 0.0)
        source = self._devices[rank]
        target = self._devices[path[(path.index(rank) + 1) % len(path)]]
        seconds = self._costs.send_s(source, target, phase, tokens, 1)
        kinds = {self._costs.specs[end.group].kind for end in (source, target)}
        if kinds != {"cpu"}:
            return Hop(0.0, seconds)
        is_local, end_s = source.node == target.node, self._costs.comm.end_s(source, target)
        if end_s is None:
            return Hop(seconds / 2.0, 0.0) if is_local else Hop(0.0, seconds)
        if is_local:
            end_s += (seconds - self._costs.comm.send_s(source, target, 0)) / 2.0
        return Hop(end_s, max(0.0, seconds - 2.0 * end_s))


class StageLaw:
    """Seconds of a stage for packed steps; see the module.

    Args:
        prefill_s: ``P(v, s)``.
        decode_s: ``D(v, c)``.
    """

    def __init__(self, prefill_s: PhaseSeconds, decode_s: PhaseSeconds) -> None:
        self._prefill_s, self._decode_s = prefill_s, decode_s
        self._prompts: dict[int, tuple[float, float]] = {}
        self._decodes: dict[tuple[int, int], float] = {}

    def __call__(self, shape: StepSize) -> float:
        """Return the seconds of a step."""
        rows = shape.decode_rows
        decode_s = self._decode(rows, shape.decode_context / rows) if rows else 0.0
        if not shape.prompts:
            return decode_s
        linear_s, _ = self._prompt(shape.tokens)
        if rows:
            thin_s = self._decode(rows, 1.0)
            linear_s = max(linear_s, thin_s) + max(0.0, decode_s - thin_s)
        return linear_s + sum(self._attention(*chunk) for chunk in shape.prompts)

    def _attention(self, first: int, count: int) -> float:
        whole_s = self._prompt(first + count)[1]
        if not first:
            return whole_s
        read_s = self._decode(1, float(first)) - self._decode(1, 1.0)
        return max(whole_s - self._prompt(first)[1], read_s, 0.0)

    def _prompt(self, tokens: int) -> tuple[float, float]:
        """Return the seconds of one prompt, without attention and of attention."""
        if tokens not in self._prompts:
            self._prompts[tokens] = prompt_s(self._prefill_s, float(tokens))
        return self._prompts[tokens]

    def _decode(self, rows: int, context: float) -> float:
        below = int(context) // PACKED_CONTEXT_STEP
        low_s = self._decode_at(rows, below)
        if below == 0:
            share = (context - 1.0) / (PACKED_CONTEXT_STEP - 1.0)
        else:
            share = context / PACKED_CONTEXT_STEP - below
        if not share:
            return low_s
        return low_s + share * (self._decode_at(rows, below + 1) - low_s)

    def _decode_at(self, rows: int, place: int) -> float:
        key = rows, place
        if key not in self._decodes:
            self._decodes[key] = self._decode_s(rows, max(1.0, float(place * PACKED_CONTEXT_STEP)))
        return self._decodes[key]


class PlanEngineCosts:
    """Seconds of packed steps on the stages of a plan, its links and its master.

    Args:
        costs: of the plan.

    Raises:
        SpecError: the plan has separate stages for prefill and for decode.
    """

    def __init__(self, costs: PlanCosts) -> None:
        if costs.layout.is_split:
            raise SpecError(
                "engine: found separate stages for prefill and decode, expected one pipeline"
            )
        self._costs = costs
        self._layout = replace(costs.layout, cores={})
        self._laws = [
            StageLaw(
                partial(costs.micro_batch_s, rank, Phase.PREFILL),
                partial(costs.micro_batch_s, rank, Phase.DECODE),
            )
            for rank in range(costs.layout.num_ranks)
        ]

    @property
    def layout(self) -> PipelineLayout:
        """Layout of the pipeline; every stage is timed as if it had its cores alone."""
        return self._layout

    def stage_s(self, rank: int, shape: StepSize) -> float:
        """Return the seconds of the layers of a stage; 0 for a master without layers."""
        if not self._costs.has_layers(rank, Phase.DECODE):
            return 0.0
        return self._laws[rank](shape)

    def project_s(self, shape: StepSize) -> float:
        """Return the seconds of embedding, final norm, head, sampling and scheduler."""
        if shape.prompts:
            return self._costs.master_s(Phase.PREFILL, shape.rows, shape.tokens / shape.rows)
        return self._costs.master_s(Phase.DECODE, shape.rows, 1.0)

    def hop(self, rank: int, shape: StepSize) -> Hop:
        """Return the cost of sending; the last stage sends one position of every sequence."""
        is_last = rank == self._layout.num_ranks - 1
        rows = shape.rows if is_last else shape.tokens
        return self._costs.hop(
            rank, BatchShape(phase=Phase.DECODE, rows=rows, longest=1, total=rows)
        )
