"""Execution plans that a model of an application may run with, and what each takes.

SamuLLM's plans are ``(dp, tp)``: replicas, each on devices that share every layer. Ours are
replicas of pipelines that the exact planner of a single model finds for a part of the cluster;
these can be run. A plan is valid if every replica holds the weights and one longest sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from llmpq.assigner.fleet.partition import DeviceCounts, DevicePools
from llmpq.assigner.planner import make_plan
from llmpq.assigner.request import PlanRequest
from llmpq.costmodel import ClusterCosts, build_costs
from llmpq.errors import InfeasibleError, SpecError
from llmpq.multillm.engine.law import (
    EngineModel,
    FlopCount,
    IterationModel,
    measured_law,
    plan_law,
    read_iterations,
    team_law,
)
from llmpq.multillm.graph import Application, AppModel, ModelTable
from llmpq.multillm.workload import AppWorkload, ModelLengths
from llmpq.spec import catalog
from llmpq.spec.cluster import Cluster, Device
from llmpq.spec.model import ModelSpec
from llmpq.spec.plan import Plan
from llmpq.spec.precision import DTYPE_BYTES
from llmpq.spec.workload import Workload, load_lengths

START_S = 4.0
"""Seconds to start a process and to import its libraries, where no table states the load time."""
LOAD_BYTES_PER_S = 2e9
"""Rate at which weights are loaded, likewise."""
MEMORY_SHARE = 0.9
"""Part of a GPU's memory that vLLM uses by default."""
MAX_DEGREE = 8
PLAN_BATCH = 32
"""Sequences that a pipeline is planned for, or its half and so on where these do not fit."""
MAX_PARTS = 64
"""Parts of a cluster for which pipelines are planned."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A model's execution plan.

    Attributes:
        name: for people: ``dp2 tp4``, or ``2 x 3 stages``.
        replicas: equal engines, which share the requests.
        counts: devices of one replica, by pool of the cluster.
        law: limits and seconds of one replica.
        load_s: seconds until all replicas have loaded.
        tensor_parallel: devices that share every layer of a replica; 1 for a pipeline.
        plan: pipeline of a replica, on a cluster of its devices; ``None``: can only be estimated.
    """

    name: str
    replicas: int
    counts: DeviceCounts
    law: EngineModel
    load_s: float
    tensor_parallel: int = 1
    plan: Plan | None = None

    @property
    def demand(self) -> DeviceCounts:
        """Devices of all replicas, by pool."""
        return tuple(self.replicas * count for count in self.counts)

    @property
    def devices(self) -> int:
        """Devices of all replicas."""
        return sum(self.demand)


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedModel:
    """A model of an application with the sizes of its architecture."""

    model: AppModel
    spec: ModelSpec
    source: str | None

    @property
    def max_model_len(self) -> int | None:
        """Longest sequence; ``None`` when unlimited."""
        own = [one for one in (self.model.max_model_len, self.spec.max_positions) if one]
        return min(own, default=None)

    def lengths(self) -> ModelLengths:
        """Read what bounds and spreads its answers."""
        path = self.model.lengths
        law = None if path is None else load_lengths(path)
        return ModelLengths(law=law, context=self.max_model_len)


def resolve_models(app: Application) -> tuple[PlannedModel, ...]:
    """Return the models of an application with their sizes; ``SpecError`` names an unknown one."""
    found = []
    for place, model in enumerate(app.models):
        try:
            spec, source = catalog.resolve_model(model.model)
        except SpecError as error:
            raise SpecError(f"application: field 'models[{place}].model': {error}") from None
        found.append(
            PlannedModel(model=model, spec=spec, source=None if source is None else str(source))
        )
    return tuple(found)


def find_candidates(
    models: Sequence[PlannedModel],
    pools: DevicePools,
    workload: AppWorkload,
    *,
    pipelines: bool = True,
    fitted: dict[str, IterationModel] | None = None,
) -> tuple[tuple[Candidate, ...], ...]:
    """Return the execution plans of every model.

    Models with a table of iterations have SamuLLM's plans at the degrees that it states; others
    have pipelines, and without ``pipelines`` SamuLLM's plans at estimated seconds.

    Args:
        models: of the application.
        pools: of the cluster.
        workload: requests of the application.
        pipelines: plan pipelines.
        fitted: fitted tables of iterations by path; those that are read are added.

    Raises:
        InfeasibleError: a model has no plan; names it and the longest sequence that must fit.
    """
    known = {} if fitted is None else fitted
    found = []
    for number, model in enumerate(models):
        of_model = workload.model == number
        total = (workload.prompt + workload.answer)[of_model]
        shape = _Shape(
            longest=int(total.max(initial=2)),
            prompt=max(1, round(float(workload.prompt[of_model].mean()))) if of_model.any() else 1,
            answer=max(1, round(float(workload.answer[of_model].mean()))) if of_model.any() else 1,
            requests=int(of_model.sum()),
        )
        is_measured = any(table.iterations for table in model.model.tables)
        if pipelines and not is_measured:
            own = tuple(_pipelines(model, pools, shape))
        else:
            own = tuple(_teams(model, pools, shape, _reader(known)))
        if not own:
            raise InfeasibleError(
                f"model '{model.model.name}': no part of cluster {pools.cluster.name} holds "
                f"{model.spec.name} and a sequence of {shape.longest} tokens"
            )
        found.append(own)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Shape:
    """What a model is asked: longest sequence, usual prompt and answer, number of requests."""

    longest: int
    prompt: int
    answer: int
    requests: int


def _reader(known: dict[str, IterationModel]) -> Callable[[str], IterationModel]:
    def read(path: str) -> IterationModel:
        if path not in known:
            known[path] = IterationModel(read_iterations(path))
        return known[path]

    return read


def _teams(
    model: PlannedModel, pools: DevicePools, shape: _Shape, read: Callable[[str], IterationModel]
) -> Iterator[Candidate]:
    """Yield the plans ``(dp, tp)`` on each pool of equal devices."""
    tables = {table.tensor_parallel: table for table in model.model.tables}
    is_measured = any(table.iterations for table in tables.values())
    degrees = [2**power for power in range(MAX_DEGREE.bit_length())]
    if is_measured:
        degrees = [degree for degree, table in tables.items() if table.iterations]
    costs = _costs(model, pools.cluster)
    for pool, (count, members) in enumerate(zip(pools.counts, pools.members(), strict=True)):
        device = pools.cluster.devices[members[0]]
        for degree in sorted(degrees):
            if degree > count:
                continue
            table = tables.get(degree, ModelTable(tensor_parallel=degree))
            kv_tokens = _kv_tokens(costs, device, degree)
            if kv_tokens < shape.longest:
                continue
            context = model.max_model_len or shape.longest
            if table.iterations is not None:
                law = measured_law(
                    read(table.iterations),
                    FlopCount.of(model.spec),
                    prompt_tokens=shape.prompt,
                    kv_tokens=kv_tokens,
                    max_model_len=context,
                )
            else:
                law = team_law(
                    costs, device, degree,
                    prompt_tokens=shape.prompt, kv_tokens=kv_tokens, max_model_len=context,
                )  # fmt: skip
            load_s = load_seconds(model, costs, degree)
            for replicas in range(1, min(count // degree, shape.requests) + 1):
                yield Candidate(
                    name=f"dp{replicas} tp{degree}",
                    replicas=replicas,
                    counts=tuple(degree * (place == pool) for place in range(len(pools.counts))),
                    law=law,
                    load_s=load_s,
                    tensor_parallel=degree,
                )


def _pipelines(model: PlannedModel, pools: DevicePools, shape: _Shape) -> Iterator[Candidate]:
    """Yield replicas of the exact planner's pipeline on each part of the cluster."""
    parts, _ = pools.parts()
    own: dict[str, tuple[Plan, EngineModel] | None] = {}
    for counts in sorted(parts, key=sum)[:MAX_PARTS]:
        cluster = pools.cluster_of(counts)
        key = pools.key(counts)
        if key not in own:
            own[key] = _pipeline(model, cluster, shape)
        found = own[key]
        if found is None or len(found[0].stages) < sum(counts):
            continue
        plan, law = replace(found[0], cluster=cluster), found[1]
        costs = _costs(model, cluster)
        load_s = load_seconds(model, costs)
        most = min(have // need for have, need in zip(pools.counts, counts, strict=True) if need)
        for replicas in range(1, min(most, shape.requests) + 1):
            stages = "1 device" if len(plan.stages) == 1 else f"{len(plan.stages)} stages"
            yield Candidate(
                name=f"{replicas} x {stages}",
                replicas=replicas,
                counts=counts,
                law=law,
                load_s=load_s,
                plan=plan,
            )


def _pipeline(
    model: PlannedModel, cluster: Cluster, shape: _Shape
) -> tuple[Plan, EngineModel] | None:
    """Return the plan of a part with its law, for as many sequences as fit; ``None`` for none."""
    batch = min(PLAN_BATCH, shape.requests)
    prompt = min(max(shape.prompt, shape.longest - shape.answer), shape.longest - 1)
    while batch:
        request = PlanRequest(
            model=model.spec,
            model_source=model.source,
            no_streaming=True,  # models of a host would share its disk, and its cores
            whole_layers=True,
            cluster=cluster,
            workload=Workload(batch=batch, prompt_tokens=prompt, new_tokens=shape.longest - prompt),
            dtype=model.spec.dtype,
            kv_bits=8 * DTYPE_BYTES[model.spec.dtype],
            bits=(16,),
        )
        try:
            plan = make_plan(request, command="llmpq-apps plan")
        except InfeasibleError:
            batch //= 2
            continue
        return plan, plan_law(plan, _costs(model, cluster))
    return None


def _costs(model: PlannedModel, cluster: Cluster) -> ClusterCosts:
    dtype = model.spec.dtype
    return build_costs(model.spec, cluster, dtype=dtype, kv_bits=8 * DTYPE_BYTES[dtype])


def _kv_tokens(costs: ClusterCosts, device: Device, degree: int) -> int:
    """Return the tokens whose keys and values a team of devices holds beside the weights."""
    room = MEMORY_SHARE * costs.capacity_bytes(device) - costs.runtime_bytes(device)
    left = degree * room - _weight_bytes(costs, device)
    each = sum(costs.token_kv_bytes(kind, 1) for kind in costs.model.layer_kinds)
    return max(0, math.floor(left / each))


def _weight_bytes(costs: ClusterCosts, device: Device) -> int:
    kinds, counts = np.unique(costs.model.layer_kinds, return_counts=True)
    layers = sum(
        int(count) * costs.layer_weight_bytes(device, int(kind), 16)
        for kind, count in zip(kinds, counts, strict=True)
    )
    return layers + costs.master_bytes(device)


def load_seconds(model: PlannedModel, costs: ClusterCosts, degree: int = 1) -> float:
    """Return the seconds to load a model: as stated for this many devices a layer, or estimated."""
    for table in model.model.tables:
        if table.tensor_parallel == degree and table.load_s is not None:
            return table.load_s
    return START_S + _weight_bytes(costs, costs.cluster.devices[0]) / LOAD_BYTES_PER_S
