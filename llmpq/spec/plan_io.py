"""Strategy files: a plan as JSON, schema version 1. Reading and writing again gives the same bytes.

A reader of an older version goes here when the schema changes; there is none yet.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from llmpq.errors import SpecError
from llmpq.spec.cluster import cluster_from_fields, cluster_to_json
from llmpq.spec.fields import SCHEMA, Fields, dump_json, read_json, write_text
from llmpq.spec.plan import (
    Formula,
    MemoryParts,
    MicroBatching,
    ModelRef,
    Plan,
    PlanEstimate,
    PlanForecast,
    Provenance,
    Search,
    StageAssignment,
    StageEstimate,
    StageForecast,
    Status,
)
from llmpq.spec.precision import BITS, DTYPE_BYTES, Dtype, Phase
from llmpq.spec.schedule import schedule_from_fields, schedule_to_json
from llmpq.spec.workload import workload_from_fields, workload_to_json

V = TypeVar("V")

_MEMORY_FIELDS = ("weights", "kv", "temporary", "master", "runtime")
_FORECAST_FIELDS = ("prefill_s", "decode_s", "prefill_busy_s", "decode_busy_s")


def read_plan(path: str | Path) -> Plan:
    """Read and validate a strategy file; ``SpecError`` names the file and the field."""
    fields = Fields(read_json(path), str(path))
    try:
        return plan_from_fields(fields)
    except SpecError as error:
        text = str(error)
        raise SpecError(text if text.startswith(str(path)) else f"{path}: {text}") from None


def write_plan(path: str | Path, plan: Plan) -> None:
    """Write a strategy file, whole or not at all."""
    write_text(path, plan_text(plan))


def plan_text(plan: Plan) -> str:
    """Return the exact text of a strategy file."""
    return dump_json(plan_to_json(plan))


def plan_from_fields(fields: Fields) -> Plan:
    """Build a plan from its JSON object, strictly."""
    fields.schema()
    plan = Plan(
        model=_read(fields.child("model"), _model),
        dtype=cast(Dtype, fields.text("dtype", DTYPE_BYTES)),
        kv_bits=fields.integer("kv_bits", minimum=1, maximum=64),
        micro_batching=_read(fields.child("micro_batching"), _micro_batching),
        stages=tuple(_read(stage, _stage) for stage in fields.children("stages", minimum=1)),
        dropped_devices=_integers(fields, "dropped_devices"),
        estimate=_read(fields.child("estimate"), _estimate),
        search=_read(fields.child("search"), _search),
        workload=workload_from_fields(fields.child("workload")),
        cluster=cluster_from_fields(fields.child("cluster")),
        provenance=_read(fields.child("provenance"), _provenance),
        schedule=schedule_from_fields(fields.child("schedule")) if fields.has("schedule") else None,
    )
    fields.done()
    return plan


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """Return the JSON object of a plan: the decision first, then estimate, inputs and origin."""
    schedule = {} if plan.schedule is None else {"schedule": schedule_to_json(plan.schedule)}
    return {
        "schema": SCHEMA,
        "model": {
            "name": plan.model.name,
            "source": plan.model.source,
            "num_layers": plan.model.num_layers,
        },
        "dtype": plan.dtype,
        "kv_bits": plan.kv_bits,
        "micro_batching": {
            "prefill": plan.micro_batching.prefill,
            "decode": plan.micro_batching.decode,
        },
        "stages": [_stage_to_json(stage) for stage in plan.stages],
        "dropped_devices": list(plan.dropped_devices),
        **schedule,
        "estimate": _estimate_to_json(plan.estimate),
        "search": _search_to_json(plan.search),
        "workload": workload_to_json(plan.workload),
        "cluster": cluster_to_json(plan.cluster),
        "provenance": {
            "command": plan.provenance.command,
            "version": plan.provenance.version,
            "inputs": dict(plan.provenance.inputs),
        },
    }


def _read(fields: Fields, build: Callable[[Fields], V]) -> V:
    value = build(fields)
    fields.done()
    return value


def _integers(fields: Fields, field: str) -> tuple[int, ...]:
    values = fields.items(field)
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int):
            raise fields.error(field, value, "whole numbers")
    return tuple(values)


def _model(fields: Fields) -> ModelRef:
    return ModelRef(
        name=fields.text("name"),
        source=fields.optional_text("source"),
        num_layers=fields.integer("num_layers", minimum=1, maximum=10_000),
    )


def _micro_batching(fields: Fields) -> MicroBatching:
    return MicroBatching(
        prefill=fields.integer("prefill", minimum=1), decode=fields.integer("decode", minimum=1)
    )


def _stage(fields: Fields) -> StageAssignment:
    bits = _integers(fields, "bits")
    for value in bits:
        if value not in BITS:
            raise fields.error("bits", value, f"bitwidths out of {list(BITS)}")
    return StageAssignment(
        rank=fields.integer("rank"),
        device=fields.integer("device"),
        first_layer=fields.integer("first_layer"),
        end_layer=fields.integer("end_layer"),
        bits=bits,
        phase=Phase(fields.text("phase", tuple(Phase))) if fields.has("phase") else None,
    )


def _stage_to_json(stage: StageAssignment) -> dict[str, Any]:
    value = {
        "rank": stage.rank,
        "device": stage.device,
        "first_layer": stage.first_layer,
        "end_layer": stage.end_layer,
        "bits": list(stage.bits),
    }
    return value if stage.phase is None else value | {"phase": stage.phase.value}


def _estimate(fields: Fields) -> PlanEstimate:
    return PlanEstimate(
        latency_s=fields.number("latency_s"),
        quality=fields.number("quality"),
        objective_s=fields.number("objective_s"),
        stages=tuple(_read(stage, _stage_estimate) for stage in fields.children("stages")),
        forecast=_read(fields.child("forecast"), _forecast) if fields.has("forecast") else None,
    )


def _forecast(fields: Fields) -> PlanForecast:
    return PlanForecast(
        latency_s=fields.number("latency_s"),
        prefill_s=fields.number("prefill_s"),
        stages=tuple(_read(stage, _stage_forecast) for stage in fields.children("stages")),
    )


def _stage_forecast(fields: Fields) -> StageForecast:
    return StageForecast(**{name: fields.number(name) for name in _FORECAST_FIELDS})


def _stage_estimate(fields: Fields) -> StageEstimate:
    return StageEstimate(
        prefill_s=fields.number("prefill_s"),
        decode_s=fields.number("decode_s"),
        send_prefill_s=fields.number("send_prefill_s"),
        send_decode_s=fields.number("send_decode_s"),
        memory=_read(fields.child("memory_bytes"), _memory),
        capacity_bytes=fields.integer("capacity_bytes"),
    )


def _memory(fields: Fields) -> MemoryParts:
    return MemoryParts(**{name: fields.integer(name) for name in _MEMORY_FIELDS})


def _search(fields: Fields) -> Search:
    return Search(
        method=fields.text("method"),
        solver=fields.optional_text("solver") or "",
        formula=cast(Formula, fields.text("formula", ("steady", "paper"))),
        theta_s=fields.number("theta_s"),
        quality_budget=fields.optional_number("quality_budget"),
        status=cast(Status, fields.text("status", ("optimal", "feasible"))),
        bound_s=fields.optional_number("bound_s", minimum=-1e30),
        gap=fields.optional_number("gap", minimum=-1.0),
        planning_s=fields.number("planning_s"),
        orders=fields.integer("orders"),
        pairs_searched=fields.integer("pairs_searched"),
        pairs_pruned=fields.integer("pairs_pruned"),
    )


def _provenance(fields: Fields) -> Provenance:
    command, version = fields.text("command"), fields.text("version")
    inputs = fields.take("inputs")
    if not isinstance(inputs, dict) or not all(isinstance(item, str) for item in inputs.values()):
        raise fields.error("inputs", inputs, "an object of digests")
    return Provenance(command=command, version=version, inputs=tuple(inputs.items()))


def _estimate_to_json(estimate: PlanEstimate) -> dict[str, Any]:
    value: dict[str, Any] = {
        "latency_s": estimate.latency_s,
        "quality": estimate.quality,
        "objective_s": estimate.objective_s,
        "stages": [
            {
                "prefill_s": stage.prefill_s,
                "decode_s": stage.decode_s,
                "send_prefill_s": stage.send_prefill_s,
                "send_decode_s": stage.send_decode_s,
                "memory_bytes": {name: getattr(stage.memory, name) for name in _MEMORY_FIELDS},
                "capacity_bytes": stage.capacity_bytes,
            }
            for stage in estimate.stages
        ],
    }
    if estimate.forecast is not None:
        value["forecast"] = {
            "latency_s": estimate.forecast.latency_s,
            "prefill_s": estimate.forecast.prefill_s,
            "stages": [
                {name: getattr(stage, name) for name in _FORECAST_FIELDS}
                for stage in estimate.forecast.stages
            ],
        }
    return value


def _search_to_json(search: Search) -> dict[str, Any]:
    return {
        "method": search.method,
        "solver": search.solver or None,
        "formula": search.formula,
        "theta_s": search.theta_s,
        "quality_budget": search.quality_budget,
        "status": search.status,
        "bound_s": search.bound_s,
        "gap": search.gap,
        "planning_s": search.planning_s,
        "orders": search.orders,
        "pairs_searched": search.pairs_searched,
        "pairs_pruned": search.pairs_pruned,
    }
