"""The plan of a model for this host and others, where the user states only the model.

It is kept in ``$XDG_CACHE_HOME/llmpq/plans`` (``~/.cache`` by default) and used again while model,
options and devices are the same and it fits into what is free.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from llmpq import __version__
from llmpq.assigner.constraints.resolve import Overrides
from llmpq.assigner.draft_placement import mtp_request, place_draft
from llmpq.assigner.longest_context import plan_longest_context
from llmpq.assigner.request import PlanRequest, costs_of
from llmpq.cli.front.host_devices import (
    cache_folder,
    with_kept_figures,
    with_measured_figures,
)
from llmpq.cli.front.hub import HubModel, HubName, hub_model, hub_name
from llmpq.cli.render import aligned, apart_text, compact_bits
from llmpq.costmodel.host_clusters import clusters_to_plan
from llmpq.errors import InfeasibleError, LlmpqError
from llmpq.options.declare import read_options
from llmpq.options.run import HostPlanOptions
from llmpq.profiler.device import host_cluster
from llmpq.spec import catalog
from llmpq.spec.cluster import Cluster
from llmpq.spec.model import ModelSpec
from llmpq.spec.model_files.config import absolute_model_path
from llmpq.spec.model_files.facts import stored_mtp
from llmpq.spec.plan import Plan, draft_bytes, read_plan, write_plan
from llmpq.spec.precision import BITS, DTYPE_BYTES
from llmpq.spec.workload import Workload
from llmpq.units import format_bytes, format_number

if TYPE_CHECKING:
    from llmpq.cli.workers.hosts import OtherHosts


SAVED_STATES = 16
"""Beginnings of prompts whose states a server of MODEL keeps, where there is room."""
STATE_SHARE = 0.25
"""Most of a device's memory beside the plan that saved states take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModel:
    """A model with weights on this host.

    Attributes:
        spec: the model; one of the hub has its id as name.
        path: folder of the weights, or their GGUF file.
        hub: where it comes from, ``None`` for the user's own folder or file.
    """

    spec: ModelSpec
    path: Path
    hub: HubModel | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Requests that a plan is for.

    Attributes:
        requests: how many.
        prompt_tokens, new_tokens: of a usual request.
        context_tokens: of the longest one, prompt and answer together.
    """

    requests: int
    prompt_tokens: int
    new_tokens: int
    context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlan:
    """The plan of a model for this host, and where it is kept.

    Attributes:
        plan: the plan.
        file: where it is kept.
        model: what is planned.
        is_new: whether it was made now.
        measured: types of devices that were measured now.
        answer_tokens_per_s: forecast of one answer after a short prompt, all sequences busy;
            ``None`` where the plan has no forecast of it, or leaves recurrences out of it.
    """

    plan: Plan
    file: Path
    model: FoundModel
    is_new: bool
    measured: tuple[str, ...]
    answer_tokens_per_s: float | None


def host_plan(
    model: str,
    options: argparse.Namespace,
    others: OtherHosts | None = None,
    read_lengths: Callable[[Path], Lengths | None] | None = None,
) -> HostPlan:
    """Return the plan of a model for this host: the one that is kept, or a new one.

    Args:
        model: folder, GGUF file, or name of the hub or the catalogue.
        options: of :func:`add_host_plan_options`.
        others: whose devices are planned for too.
        read_lengths: returns those of the requests, given the model's files; ``None`` where they
            are not known.

    Raises:
        SpecError: there is no such model, it cannot be downloaded, or an option cannot be used.
        InfeasibleError: the model does not fit on these hosts.
        StageError: a host is lost.
    """
    read_options(HostPlanOptions, options)
    devices = host_cluster() if others is None else others.own(host_cluster())
    own = with_kept_figures(devices)
    cluster = own if others is None else others.joined(own)
    least_bits = min(options.bits or BITS)
    may_stream = not options.no_streaming

    def check(spec: ModelSpec) -> None:
        if not (may_stream and _has_disk(cluster)):
            _check_room(spec, cluster, least_bits)

    found = find_model(model, check)
    names = ("max_model_len", "max_num_seqs", "bits", "no_streaming")
    asked = {name: getattr(options, name) for name in names}
    lengths = None if read_lengths is None else read_lengths(found.path)
    sequences = options.max_num_seqs
    if lengths is not None:
        asked["lengths"] = asdict(lengths)
        sequences = min(sequences, lengths.requests)
    file = _file(found, cluster, asked)
    plan = None if options.replan else _kept(file, clusters_to_plan(cluster, found.spec, sequences))
    is_new, kept = plan is None, types_of(cluster)
    if plan is None:
        if not options.no_measure:
            own = with_measured_figures(own)
            cluster = own if others is None else others.joined(own, measures=True)
            file = _file(found, cluster, asked)
        clusters = clusters_to_plan(cluster, found.spec, sequences)
        plan = _make_plan(found, clusters, options, lengths)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_plan(file, plan)
    return HostPlan(
        plan=plan,
        file=file,
        model=found,
        is_new=is_new,
        measured=tuple(sorted(types_of(cluster) - kept)),
        answer_tokens_per_s=None if found.spec.has_states else plan.answer_tokens_per_s,
    )


def types_of(cluster: Cluster) -> set[str]:
    """Return the types of devices that have figures of their own, which were measured."""
    return {entry.type for entry in cluster.device_types or ()}


def _make_plan(
    found: FoundModel,
    clusters: Sequence[Cluster],
    options: argparse.Namespace,
    lengths: Lengths | None,
) -> Plan:
    """Return a new plan of a model on one of some clusters, with the master on this host."""
    spec, sequences = found.spec, options.max_num_seqs
    if lengths is not None:
        sequences = min(sequences, lengths.requests)
    request = PlanRequest(
        model=spec,
        model_source=str(found.path),
        cluster=clusters[0],
        workload=Workload(batch=sequences, prompt_tokens=1, new_tokens=1),
        dtype=spec.dtype,
        kv_bits=8 * DTYPE_BYTES[spec.dtype],
        bits=tuple(sorted(set(options.bits), reverse=True)) if options.bits else BITS,
        no_streaming=options.no_streaming,
    )
    longest, usual = options.max_model_len, None
    if lengths is not None:
        longest = longest or lengths.context_tokens
        if lengths.prompt_tokens + lengths.new_tokens <= longest:
            usual = lengths.prompt_tokens, lengths.new_tokens
    others, own = clusters[1:], {"usual": usual, "command": options.command}
    plan = plan_longest_context(request, longest, others=others, **own)
    if plan.nodes[0] != plan.cluster.nodes[0].name:
        request = _with_master_here(request, plan)
        plan = plan_longest_context(request, longest, **own)
    return _with_drafts(plan, request)


def _with_drafts(plan: Plan, request: PlanRequest) -> Plan:
    """Return the plan with the model's own layer for multi-token prediction, where that pays."""
    source, model = request.model_source, request.model
    if model.stored or source is None or stored_mtp(Path(source), model) is None:
        return plan  # GPTQ's codes of such a layer are not read
    costs = costs_of(request, plan.cluster)
    return replace(plan, draft=place_draft(plan, costs, mtp_request(plan, costs)))


def _with_master_here(request: PlanRequest, plan: Plan) -> PlanRequest:
    """Return a request for a plan on the devices of another one, those of this host first."""
    cluster = plan.cluster
    here = cluster.nodes[0].name
    own = [device for device in cluster.devices if device.node == here]
    used = map(plan.device_of, plan.stages)
    order = [*own, *(device for device in used if device.node != here)]
    overrides = Overrides(order=tuple(one.label for one in order))
    return replace(request, cluster=cluster, overrides=overrides)


def find_model(name: str, check: Callable[[ModelSpec], None] = lambda _: None) -> FoundModel:
    """Return a model that is on this host, or download it from the hub.

    Args:
        name: folder, GGUF file, or name of the hub or the catalogue.
        check: called with a model before its weights are downloaded.

    Raises:
        SpecError: there is none, or it cannot be downloaded.
    """
    if Path(name).exists():
        spec, source = catalog.resolve_model(name)
        if source is not None:
            return FoundModel(spec=spec, path=absolute_model_path(source), hub=None)
    wanted = hub_name(name)
    if wanted is None:  # a name of the catalogue without its owner, or an error that offers some
        wanted = HubName(repo=catalog.resolve_model(name)[0].name, part=None)

    def read(path: Path) -> ModelSpec:
        return replace(catalog.resolve_model(path)[0], name=wanted.repo)

    hub = hub_model(wanted, lambda folder: check(read(folder)))
    return FoundModel(spec=read(hub.path), path=hub.path, hub=hub)


def _has_disk(cluster: Cluster) -> bool:
    """Whether weights may rest on the disk of some host, as its speed is known."""
    return any(
        device.disk_bytes_per_s is not None
        or catalog.device(device.type, cluster).disk_bytes_per_s is not None
        for device in cluster.devices
    )


def _check_room(spec: ModelSpec, cluster: Cluster, bits: int) -> None:
    """Check that the layers of a model can fit into what is free, before they are downloaded."""
    needed = sum(layer.parameters for layer in spec.layers) * bits // 8
    free = sum(device.memory_bytes or 0 for device in cluster.devices)
    if needed > free:
        raise InfeasibleError(
            f"{spec.name}: found {format_bytes(free)} of free memory, expected at least "
            f"{format_bytes(needed)} for its layers at {bits} bits; it was not downloaded"
        )


def _file(model: FoundModel, cluster: Cluster, asked: dict[str, Any]) -> Path:
    """Return the file of a plan: of the model's files, the devices and what was asked for."""
    path = model.path
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    stats = [(one.name, one.stat()) for one in files if one.is_file()]
    # Free memory changes all the time: whether a kept plan fits is checked when it is used.
    devices = [
        (node.name, asdict(replace(one, memory_bytes=None)))
        for node in cluster.nodes
        for one in node.devices
    ]
    content = {
        "version": __version__,
        "model": str(path),
        "files": [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats],
        "devices": devices,
        "figures": [asdict(entry) for entry in cluster.device_types or ()],
        **asked,
    }
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    name = f"{PurePosixPath(model.spec.name).name}-{digest[:16]}.json"
    return cache_folder("plans") / name


def _kept(file: Path, clusters: Sequence[Cluster]) -> Plan | None:
    """Return the plan in a file if it fits into what is free, ``None`` otherwise.

    ``clusters`` are those that it may be for, with what is free now.
    """
    try:
        plan = read_plan(file)
    except (LlmpqError, OSError):
        return None  # there is none, or it cannot be used: a new one takes its place
    devices = [device for cluster in clusters for device in cluster.devices]
    # GPUs are in all clusters, and have hosts in one.
    hosts = {one.label: one.host.memory_bytes for one in devices if one.host is not None}
    free = {device.label: device.memory_bytes for device in devices}
    for stage, estimate in zip(plan.stages, plan.estimate.stages, strict=True):
        label, on_host = plan.device_of(stage).label, estimate.memory.host or 0
        room = free.get(label)
        needed = estimate.memory.total + draft_bytes(plan.draft, stage.device)
        if room is None or needed > room or on_host > hosts.get(label, 0):
            return None
    return plan


def saved_state_bytes(found: HostPlan) -> int:
    """Return memory for saved states of a server: those of ``SAVED_STATES`` beginnings of prompts.

    They take at most ``STATE_SHARE`` of what the plan leaves on any device; 0 where not one fits,
    or no layer has a recurrent state.
    """
    plan, model = found.plan, found.model.spec
    own = model.state_bytes()
    if not own:
        return 0
    room = SAVED_STATES
    for stage, estimate in zip(plan.stages, plan.estimate.stages, strict=True):
        bytes_here = model.state_bytes(stage.first_layer, stage.end_layer)
        planned = estimate.memory.total + draft_bytes(plan.draft, stage.device)
        free = max(0, estimate.capacity_bytes - planned)
        if bytes_here:
            room = min(room, int(STATE_SHARE * free) // bytes_here)
    return room * own


def plan_decisions(found: HostPlan) -> dict[str, Any]:
    """Return every decision for ``--json``; ``docs/install/first-answer.md`` lists the fields."""
    plan, hub = found.plan, found.model.hub
    measured = types_of(plan.cluster)
    rows = []
    for stage, estimate in zip(plan.stages, plan.estimate.stages, strict=True):
        device = plan.device_of(stage)
        figures = "catalogue" if device.type not in measured else "kept"
        rows.append(
            {
                "device": device.label,
                "figures": "measured" if device.type in found.measured else figures,
                "threads": device.threads,
                "layers": stage.num_layers,
                "layers_on_disk": len(stage.on_disk),
                "memory_bytes": estimate.memory.total,
                "capacity_bytes": estimate.capacity_bytes,
                "layers_with_experts_on_host": stage.num_apart,
                "host_memory_bytes": estimate.memory.host or 0,
            }
        )
    return {
        "model": {
            "name": plan.model.name,
            "path": str(found.model.path),
            "from": "here" if hub is None else "hub",
            "commit": None if hub is None else hub.commit,
            "downloaded_bytes": 0 if hub is None else hub.downloaded_bytes,
        },
        "devices": rows,
        "context": plan.workload.max_context_tokens,
        "sequences": plan.workload.batch,
        "bits": list(plan.bits),
        "quality": plan.estimate.quality,
        "forecast_tokens_per_s": found.answer_tokens_per_s,
        "draft_tokens": 0 if plan.draft is None else plan.draft.num_speculative_tokens,
        "plan": str(found.file),
        "is_new_plan": found.is_new,
    }


def say_plan(found: HostPlan) -> None:
    """Print a plan on standard error, in a few lines."""
    print(plan_text(found), file=sys.stderr)


def plan_text(found: HostPlan) -> str:
    """Return a plan as text."""
    plan, work = found.plan, found.plan.workload
    stages = plan.estimate.stages
    rows: list[Sequence[str]] = [("model", f"{plan.model.name} ({found.model.path})")]
    for stage, estimate in zip(plan.stages, stages, strict=True):
        if stage.bits:
            device, memory = plan.device_of(stage), estimate.memory.total
            read = f" ({len(stage.on_disk)} read from disk)" if stage.on_disk else ""
            parts = [
                f"{len(stage.bits)} layers{read}",
                f"{compact_bits(stage.bits)} bits",
                f"{format_bytes(memory)} of {format_bytes(estimate.capacity_bytes)}",
                *apart_text(stage, estimate),
            ]
            rows.append((device.label, ", ".join(parts)))
    answers = "one answer" if work.batch == 1 else f"{work.batch} answers at the same time"
    rows.append(("context", f"{work.max_context_tokens:,} tokens each, {answers}"))
    if found.answer_tokens_per_s is not None:
        figures = (
            "measured devices"
            if types_of(plan.cluster)
            else "the catalogue; llmpq chat --replan measures"
        )
        rows.append(
            (
                "speed",
                f"{format_number(found.answer_tokens_per_s)} tokens/s an answer after a short "
                f"prompt (forecast with {figures})",
            )
        )
    if plan.draft is not None:
        count, rate = plan.draft.num_speculative_tokens, plan.draft.acceptance_rate
        rows.append(
            (
                "drafts",
                f"{count} by multi-token prediction: {plan.draft.speedup:.1f} times as fast where "
                f"{rate:.0%} are right",
            )
        )
    rows.append(("quality", f"{plan.estimate.quality:.2g} lost (1: all layers at 4 bits)"))
    rows.append(("plan", f"{found.file} ({'new' if found.is_new else 'kept from before'})"))
    return "\n".join(aligned(rows))
