"""PlanCosts: the costs of a pipeline, from a plan and the cost models.

- Between CPU workers a message costs both ends processor time. If the communication table has this
  time (``end_s``), the rest of the send is delay. Otherwise half of a send within a host is work of
  each end, and a send between hosts is delay.
- In decode, CPU attention reads only the tokens of each row, so a micro-batch costs as much as its
  mean context. On other devices it costs as much as its longest context.
- Prompts are computed in chunks, as in the runtime, and packed without padding. ``v`` prompts with
  mean length ``m`` take ``P(v, m)`` as equal ones, where ``A(m)`` of each is attention. Attention
  grows with the squares of the lengths ``s``::

      P(v, m) + A(m) (sum s^2 / m^2 - v)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

from llmpq.costmodel import ClusterCosts
from llmpq.costmodel.base import chunked_s, prompt_s
from llmpq.sim.costs import BatchShape, Hop, PipelineLayout
from llmpq.spec.cluster import Device
from llmpq.spec.model import ModelSpec
from llmpq.spec.plan import Plan, handovers_of
from llmpq.spec.precision import Phase

CONTEXT_STEP = 16
"""Decode times are evaluated at multiples of this context length and interpolated."""


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
            Counter(zip(kinds[stage.first_layer : stage.end_layer], stage.bits, strict=True))
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
        self._reads_row_lengths = [costs.specs[device.group].kind == "cpu" for device in own]
        self._stages = plan.stages
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
        """Return the seconds of a stage; ``tokens`` may be a mean."""
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
            count * self._costs.layer_s(device, phase, bits, rows, tokens, kind)
            for (kind, bits), count in self._layers[rank].items()
        )
        return seconds + self._costs.stage_s(device, phase)

    def master_s(self, phase: Phase, rows: int, tokens: float) -> float:
        """Return the seconds of the master's own work on one micro-batch."""
        key = phase, rows, tokens
        if key not in self._project:
            self._project[key] = self._costs.master_s(self._devices[0], *key)
        return self._project[key]

    def embed_s(self, shape: BatchShape) -> float:  # noqa: ARG002  the protocol's argument
        """Return 0: ``project_s`` includes all work of the master."""
        return 0.0

    def project_s(self, shape: BatchShape) -> float:
        """Return the seconds of embedding, final norm, head, sampling and scheduler."""
        tokens = self._tokens_a_prompt(shape) if shape.phase is Phase.PREFILL else 1.0
        return self.master_s(shape.phase, shape.rows, tokens)

    def hop(self, rank: int, shape: BatchShape) -> Hop:
        """Return the cost of sending the output of a stage."""
        is_last = rank == self._layout.path(shape.phase)[-1]
        # The last stage sends only the last position.
        tokens = shape.rows
        if not is_last and shape.phase is Phase.PREFILL:
            tokens = round(shape.rows * self._tokens_a_prompt(shape))
        key = rank, shape.phase, tokens
        if key not in self._hops:
            self._hops[key] = self._hop(*key)
        return self._hops[key]

    def handover_s(self, shape: BatchShape) -> float:
        """Return the seconds to send the keys and values of the last prefill stage.

        Earlier stages send theirs while it computes.
        """
        last = self._layout.prefill_path[-1]
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
