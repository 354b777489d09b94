"""Verification of a plan: its figures against those of the cost models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmpq.assigner.forecast import costs_of_plan, evaluate_plan
from llmpq.assigner.objective import FloatArray
from llmpq.assigner.request import DEFAULT_OMEGA, default_omega, head_loss_at
from llmpq.costmodel import ClusterCosts
from llmpq.errors import SpecError, bad_field
from llmpq.spec import catalog
from llmpq.spec.cluster import Device
from llmpq.spec.fields import to_json
from llmpq.spec.model import ModelSpec
from llmpq.spec.plan import Plan, PlanEstimate, StageAssignment, draft_bytes
from llmpq.spec.precision import BITS
from llmpq.spec.tables import read_sensitivity

TOLERANCE = 1e-6
"""Relative difference up to which a stored figure counts as confirmed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Result of ``verify_plan``; without the model's directory only what the file states.

    ``warnings`` name figures of the file that are not confirmed.
    """

    excess_bytes: int
    warnings: tuple[str, ...]
    estimate: PlanEstimate | None = None
    costs: ClusterCosts | None = None


def verify_plan(
    plan: Plan,
    where: str,
    *,
    profile_dir: Path | None,
    omega_file: str | None = None,
) -> Verification:
    """Evaluate a plan again and compare the result with its stored figures.

    ``where`` is its file, for messages; ``omega_file`` the sensitivity table that it was made with.

    Raises:
        SpecError: the plan does not match its model, or the sensitivity table does not.
    """
    stages = plan.estimate.stages
    stored_excess = sum(max(0, one.memory.total - one.capacity_bytes) for one in stages)
    stored_excess += sum(
        _draft_excess(plan, one.memory.total, one.capacity_bytes, stage.device)
        for stage, one in zip(plan.stages, stages, strict=True)
    )
    model = _model(plan, where)
    if model is None:
        return Verification(
            excess_bytes=stored_excess,
            warnings=(f"model directory '{plan.model.source}' is not here: not evaluated again",),
        )
    costs = costs_of_plan(plan, model, profile_dir)
    _check_formats(plan, costs, where)
    omega = _omega(plan, model, omega_file)
    estimate, excess_bytes = evaluate_plan(
        plan, costs, default_omega(model, BITS) if omega is None else omega
    )
    used = {
        stage.device: one.memory.total
        for stage, one in zip(plan.stages, estimate.stages, strict=True)
    }
    for index, device in enumerate(plan.cluster.devices):
        excess_bytes += _draft_excess(plan, used.get(index, 0), costs.capacity_bytes(device), index)
    warnings = [
        *_differences(plan, estimate, with_quality=omega is not None),
        *_source_changes(plan, costs),
    ]
    if omega is None:
        warnings.append(
            "quality is not verified: it was measured; pass its table with --omega_file"
        )
    return Verification(
        excess_bytes=max(excess_bytes, stored_excess),
        warnings=tuple(warnings),
        estimate=estimate,
        costs=costs,
    )


def _draft_excess(plan: Plan, used: int, capacity: int, device: int) -> int:
    """Return the bytes of the draft model that a device has no room for beside what it holds."""
    return max(0, draft_bytes(plan.draft, device) - max(0, capacity - used))


def _model(plan: Plan, where: str) -> ModelSpec | None:
    source = plan.model.source
    if source is not None and not Path(source).exists():
        return None
    model, _ = catalog.resolve_model(plan.model.name if source is None else source)
    if model.num_layers != plan.model.num_layers:
        raise bad_field(
            where,
            "model.num_layers",
            plan.model.num_layers,
            f"{model.num_layers}, as {model.name} has",
        )
    return model


def _check_formats(plan: Plan, costs: ClusterCosts, where: str) -> None:
    """Check that every stage has a format and bits that its device computes."""
    first = plan.device_of(plan.stages[0])
    if plan.head_width not in (known := costs.specs[first.group].bits):
        expected = f"some of {list(known)}, by which {first.label} multiplies"
        raise bad_field(where, "head_bits", plan.head_width, expected)
    for stage in plan.stages:
        device, field = plan.device_of(stage), f"stages[{stage.rank}]"
        form = costs.format_of(device)
        if plan.dtype_of(stage) != form:
            found, expected = plan.dtype_of(stage), f"'{form}', in which {device.label} computes"
            raise bad_field(where, f"{field}.dtype", found, expected)
        if stage.on_disk and not costs.streams(device):
            expected = f"'resident', or 'disk_bytes_per_s' of {device.label} in the cluster"
            raise bad_field(where, f"{field}.weights", "disk", expected)
        _check_experts(stage, device, costs, where, field)
        known = costs.specs[device.group].bits
        if not set(stage.bits) <= set(known):
            expected = f"some of {list(known)}, by which {device.label} multiplies"
            raise bad_field(where, f"{field}.bits", sorted(set(stage.bits)), expected)


def _check_experts(
    stage: StageAssignment, device: Device, costs: ClusterCosts, where: str, field: str
) -> None:
    """Check that a stage names routed experts of its layers, and that its host computes them."""
    own, known = stage.experts, costs.specs[device.group].bits
    for place, one in enumerate(() if own is None else own.layers):
        name = f"{field}.experts.layers[{place}]"
        count = costs.model.layer_types[costs.model.layer_kinds[one.layer]].num_experts
        if not count:
            raise bad_field(where, f"{name}.layer", one.layer, "a layer with routed experts")
        if one.resident and one.resident[-1] >= count:
            raise bad_field(
                where, f"{name}.resident", one.resident[-1], f"numbers of experts below {count}"
            )
        if one.bits is not None and one.bits not in known:
            expected = f"one of {list(known)}, by which {device.label} multiplies"
            raise bad_field(where, f"{name}.bits", one.bits, expected)
    if stage.host_threads:
        threads = costs.host_of(device).threads
        if stage.host_threads > threads:
            expected = f"at most the {threads} of the host of {device.label}"
            raise bad_field(where, f"{field}.experts.threads", stage.host_threads, expected)


def _omega(plan: Plan, model: ModelSpec, path: str | None) -> FloatArray | None:
    """Return ``[L, B]`` over ``BITS``, ``None`` if the plan was made with a table not given.

    Every layer has an equal share of what the head loses.
    """
    if path is None:
        is_default = dict(plan.provenance.inputs).get("omega") == DEFAULT_OMEGA
        head = head_loss_at(None, model, plan.head_width) / model.num_layers
        return default_omega(model, BITS) + head if is_default else None
    table = read_sensitivity(path)
    if table.num_layers != model.num_layers:
        raise bad_field(path, "omega", f"{table.num_layers} layers", f"{model.num_layers} layers")
    measured = [width for width in BITS if width == 16 or width in dict(table.omega)]
    missing = sorted(set(plan.bits) - set(measured))
    if missing:
        raise SpecError(f"{path}: field 'omega': no column for {missing} bits, which the plan uses")
    found = np.zeros((model.num_layers, len(BITS)))
    columns = [BITS.index(width) for width in measured]
    found[:, columns] = np.array(table.normalised(measured))
    return found + head_loss_at(table, model, plan.head_width) / model.num_layers


def _differences(plan: Plan, now: PlanEstimate, *, with_quality: bool) -> Iterator[str]:
    stored = plan.estimate
    totals = ["latency_s", *(["quality", "objective_s"] if with_quality else [])]
    for name in totals:
        yield from _difference(f"estimate.{name}", getattr(stored, name), getattr(now, name))
    for rank, (before, after) in enumerate(zip(stored.stages, now.stages, strict=True)):
        where = f"estimate.stages[{rank}]"
        for name in ("prefill_s", "decode_s", "send_prefill_s", "send_decode_s"):
            yield from _difference(f"{where}.{name}", getattr(before, name), getattr(after, name))
        # With equal totals, the search may have counted the master's buffers under another part.
        if before.memory.total != after.memory.total:
            parts = zip(to_json(before.memory).items(), to_json(after.memory).values(), strict=True)
            for (name, old), new in parts:
                yield from _difference(f"{where}.memory_bytes.{name}", old, new)
        yield from _difference(
            f"{where}.capacity_bytes", before.capacity_bytes, after.capacity_bytes
        )


def _difference(name: str, stored: float, now: float) -> Iterator[str]:
    if abs(stored - now) > TOLERANCE * max(abs(stored), abs(now)):
        yield f"field '{name}': the file says {stored:.6g}, the cost models now say {now:.6g}"


def _source_changes(plan: Plan, costs: ClusterCosts) -> list[str]:
    """Return a warning for every device whose latencies come from another source now."""
    recorded = dict(plan.provenance.inputs)
    changes = []
    for device in plan.cluster.devices:
        before = recorded.get(f"latency of {device.label}")
        now = costs.latency_source(device)
        if device.local_index == 0 and before is not None and before != now:
            changes.append(f"{device.label}: planned with {before}, evaluated with {now}")
    return changes
