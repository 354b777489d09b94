"""Devices that share every layer of a stage, by a roofline: the clusters of ExeGPT's evaluation.

A member multiplies its part of every matrix (``shard_of``) and attends to its part of the heads;
after attention and after the feed-forward all add up the hidden states. An all-reduce of ``n``
bytes between ``d`` devices is that of a ring: ``2 (d - 1) / d n`` bytes over the link, and a start
that grows with ``d``. A team is planned as one device with the figures of its members together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

from llmpq.assigner import PlanRequest, make_plan
from llmpq.assigner.forecast import stage_memory
from llmpq.assigner.request import costs_of
from llmpq.assigner.schedules.waa import balanced_cuts
from llmpq.costmodel import ClusterCosts
from llmpq.costmodel.base import Estimate
from llmpq.costmodel.importers.operators import shard_of
from llmpq.costmodel.roofline import RooflineLatencyModel
from llmpq.errors import InfeasibleError
from llmpq.spec import catalog
from llmpq.spec.cluster import Cluster
from llmpq.spec.fields import Fields, from_json
from llmpq.spec.model import ModelSpec
from llmpq.spec.plan import Plan
from llmpq.spec.precision import Phase
from llmpq.spec.workload import Workload

VALUE_BYTES = 2
"""Weights, keys, values and hidden states are float16."""
ALL_REDUCES = 2
"""Of a layer: after attention and after the feed-forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """An all-reduce between devices of a node.

    Attributes:
        bytes_per_s: of a link in one direction.
        start_s: seconds before any byte, for each device.
    """

    bytes_per_s: float
    start_s: float

    def seconds(self, size_bytes: float, devices: int) -> float:
        """Return the seconds of an all-reduce."""
        if devices == 1:
            return 0.0
        moved = 2 * (devices - 1) / devices * size_bytes
        return self.start_s * devices + moved / self.bytes_per_s


RINGS = {
    "A40": Ring(bytes_per_s=24e9, start_s=3.2e-6),
    "A100-80G": Ring(bytes_per_s=150e9, start_s=0.7e-6),
}
"""PCIe 4.0 x16 by the catalogue, with the start of small all-reduces that aiconfigurator measured
on L40S; NVLink 3, near what aiconfigurator measured on A100 from 8 to 64 MiB."""
NETWORK_BYTES_PER_S = {"A40": 12.5e9, "A100-80G": 200e9}
"""Between nodes: 100 Gb/s and 8 x 200 Gb/s InfiniBand (Sec. 7.1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamLatency:
    """Latency of devices that share every layer; see the module.

    Attributes:
        one: of one member with its part of the layers.
        whole: of the team as one device: embedding, head and sampling.
        ring: between the members.
        devices: how many they are.
    """

    one: RooflineLatencyModel
    whole: RooflineLatencyModel
    ring: Ring
    devices: int

    @property
    def source(self) -> str:
        """Where the seconds come from."""
        return self.one.source

    def layer_s(self, phase: Phase, bits: int, batch: int, tokens: float, kind: int) -> float:
        """Return the seconds of one layer; see ``LatencyModel``."""
        rows = batch * tokens if phase is Phase.PREFILL else batch
        size = rows * self.one.model.hidden_size * VALUE_BYTES
        return self.one.layer_s(phase, bits, batch, tokens, kind) + ALL_REDUCES * self.ring.seconds(
            size, self.devices
        )

    def layer_estimate(
        self, phase: Phase, bits: int, batch: int, tokens: float, kind: int
    ) -> Estimate:
        """Return the seconds of ``layer_s`` with the uncertainty of one member."""
        own = self.one.layer_estimate(phase, bits, batch, tokens, kind)
        return replace(own, seconds=self.layer_s(phase, bits, batch, tokens, kind))

    def master_s(self, phase: Phase, batch: int, tokens: float, head_bits: int = 16) -> float:
        """Return the seconds of embedding, head and sampling."""
        return self.whole.master_s(phase, batch, tokens, head_bits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """Equal nodes of one type of device.

    Attributes:
        device: type of the catalogue.
        nodes: how many.
        each: devices of a node.
    """

    device: str
    nodes: int
    each: int

    @property
    def devices(self) -> int:
        """Devices of all nodes."""
        return self.nodes * self.each

    def layouts(self) -> Iterator[tuple[int, ...]]:
        """Yield the teams of a node: equal ones, and on a node alone also unequal ones."""
        degree = self.each
        while degree:
            yield (degree,) * (self.each // degree)
            degree //= 2
        if self.nodes == 1 and self.each == 4:
            yield (2, 1, 1)

    def cluster(self, layout: Sequence[int]) -> Cluster:
        """Return the cluster of these teams, each as one device."""
        spec = catalog.device(self.device)
        types, groups = [], []
        for degree in dict.fromkeys(layout):
            name = self.device if degree == 1 else f"{degree} {self.device}"
            if degree > 1:
                types.append({
                    "type": name, "like": self.device,
                    "memory_bytes": degree * spec.memory_bytes,
                    "runtime_bytes": degree * spec.runtime_bytes,
                    "reserve_bytes": degree * spec.reserve_bytes,
                    "memory_bytes_per_s": degree * spec.memory_bytes_per_s,
                    "flops": {key: degree * rate for key, rate in spec.flops},
                })  # fmt: skip
            groups.append({"type": name, "count": layout.count(degree)})
        names = [f"node{number}" for number in range(self.nodes)]
        links = [
            {"between": list(pair), "bytes_per_s": NETWORK_BYTES_PER_S[self.device],
             "latency_s": 5e-6}
            for pair in combinations(names, 2)
        ]  # fmt: skip
        found = {
            "schema": 1, "name": "teams", "links": links, "device_types": types,
            "nodes": [{"name": name, "devices": groups} for name in names],
        }  # fmt: skip
        return from_json(Cluster, Fields(found, "cluster"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Teams:
    """A model on machines whose devices share layers in teams.

    Attributes:
        model: the model.
        machines: where it runs.
        layout: teams of every node, by their devices.
    """

    model: ModelSpec
    machines: Machines
    layout: tuple[int, ...]

    @property
    def name(self) -> str:
        """The teams of all nodes: as degree times number, or each degree of a node alone."""
        if len(set(self.layout)) > 1:
            return "+".join(map(str, self.layout))
        return f"{self.layout[0]} x {self.machines.nodes * len(self.layout)}"

    def planned(self, prompt: int, new: int, most: int) -> tuple[Plan, ClusterCosts]:
        """Return a plan in 16 bits with as many slots as memory holds, and its costs.

        Args:
            prompt: tokens of the longest prompt.
            new: of the longest answer.
            most: slots, at most.
        """
        spec = catalog.device(self.machines.device)
        free = spec.memory_bytes - spec.runtime_bytes - spec.reserve_bytes
        left = self.machines.devices * free - VALUE_BYTES * self.model.parameters
        values = sum(2 * layer.num_kv_heads * layer.head_dim for layer in self.model.layers)
        slots = min(most, int(left / (VALUE_BYTES * values * (prompt + new))))
        while slots >= 4:
            try:
                return self._planned(Workload(batch=slots, prompt_tokens=prompt, new_tokens=new))
            except InfeasibleError:
                slots = min(slots - 4, int(0.95 * slots))
        raise InfeasibleError(f"{self.model.name}: no memory for four requests on {self.name}")

    def _planned(self, workload: Workload) -> tuple[Plan, ClusterCosts]:
        request = PlanRequest(
            model=self.model,
            cluster=self.machines.cluster(self.layout),
            workload=workload,
            dtype="float16",
            kv_bits=16,
            bits=(16,),
            theta_s=0.0,
            latency="roofline",
            time_limit_s=20.0,
        )
        plan = make_plan(request)
        costs = self._priced(costs_of(request, plan.cluster))
        return self._cut(plan, costs), costs

    def _priced(self, costs: ClusterCosts) -> ClusterCosts:
        """Return the costs with the teams' own latencies."""
        found = []
        degrees = {team.group: self._degree(team.type) for team in costs.cluster.devices}
        for group, whole in enumerate(costs.latency):
            assert isinstance(whole, RooflineLatencyModel)
            degree = degrees[group]
            parts = tuple(shard_of(layer, degree) for layer in self.model.layer_types)
            one = replace(
                whole,
                model=replace(self.model, layer_types=parts),
                device=catalog.device(self.machines.device),
            )
            found.append(
                TeamLatency(one=one, whole=whole, ring=RINGS[self.machines.device], devices=degree)
            )
        return replace(costs, latency=tuple(found))

    def _degree(self, name: str) -> int:
        return 1 if name == self.machines.device else int(name.split()[0])

    def _cut(self, plan: Plan, costs: ClusterCosts) -> Plan:
        """Return the plan with layers cut so that a request takes all stages equally long."""
        work = plan.workload
        rows = max(1, work.batch // len(plan.stages))
        stages = plan.stages

        def of_stage(place: int):
            stage = stages[place]
            device = plan.device_of(stage)
            empty = replace(stage, end_layer=stage.first_layer, bits=())
            room = costs.capacity_bytes(device) - stage_memory(plan, costs, empty).total
            layer_bytes = costs.layer_weight_bytes(device, 0, 16) + costs.layer_kv_bytes(
                0, work.batch, work.max_context_tokens, device
            )
            context = work.prompt_tokens // 2 + work.new_tokens // 4
            prompt, steps = work.prompt_tokens // 2, work.new_tokens // 2
            layer_s = costs.layer_steps_s(device, Phase.PREFILL, 16, 4, prompt, 0) / 4
            layer_s += steps / rows * costs.layer_s(device, Phase.DECODE, 16, rows, context, 0)

            def cost(first: int, end: int) -> float:
                fits = (end - first) * layer_bytes <= room
                return (end - first) * layer_s if fits else float("inf")

            return cost

        found = balanced_cuts([of_stage(place) for place in range(len(stages))], len(plan.bits))
        if found is None:
            return plan
        cut = (
            replace(stage, first_layer=first, end_layer=end, bits=plan.bits[first:end])
            for stage, (first, end) in zip(stages, pairwise(found), strict=True)
        )
        return replace(plan, stages=tuple(cut))
