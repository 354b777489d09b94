"""What ``llmpq-algo`` plans: the options of a plan, and the requests they make."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast, get_args

from llmpq.assigner import METHODS, PlanRequest
from llmpq.assigner.constraints.fixed_bits import with_average_bits, with_stored_bits
from llmpq.assigner.constraints.resolve import HEAD, Overrides
from llmpq.assigner.request import Progress, costs_of, default_gap
from llmpq.assigner.schedules.multibin import with_bins
from llmpq.assigner.schedules.plan import ScheduleRequest, SearchedPolicy, schedule_plan
from llmpq.cli.options import MAX_GIB, with_described, with_host, with_reserve
from llmpq.errors import SpecError
from llmpq.options.declare import add_options, read_options
from llmpq.options.plan import (
    ClusterOptions,
    ManualOptions,
    ModelOptions,
    QualityOptions,
    ScheduleOptions,
    WorkloadOptions,
)
from llmpq.profiler.device import host_cpu, with_host_cpu
from llmpq.spec import catalog
from llmpq.spec.cluster import Cluster, cluster_of_lists, load_cluster
from llmpq.spec.model import ModelSpec
from llmpq.spec.plan import MicroBatching, Plan, PolicyName, default_schedule
from llmpq.spec.precision import DTYPE_BYTES
from llmpq.spec.runtime_constants import KV_CODE_BITS
from llmpq.spec.tables import SensitivityTable, check_measured_on, read_sensitivity
from llmpq.spec.workload import Workload, constant, load_lengths, load_workload
from llmpq.units import GIB


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of what to plan and how, and of the schedule."""
    add_options(parser.add_argument_group("model"), ModelOptions)
    cluster = parser.add_argument_group("cluster")
    names = (
        "cluster",
        "device_names",
        "device_numbers",
        "devices",
        "host_gib",
        "reserve_gib",
        "profile",
    )
    add_options(cluster, ClusterOptions, *names)
    latency = cluster.add_mutually_exclusive_group()
    add_options(latency, ClusterOptions, "use_profiler_prediction", "fit")
    add_options(parser.add_argument_group("workload"), WorkloadOptions)
    quality = parser.add_argument_group("quality")
    add_options(quality, QualityOptions, "omega_file")
    add_options(quality, PlanRequest, "theta_s", "quality_budget")
    add_options(quality, QualityOptions, "average_bits", "pareto")
    add_options(quality, PlanRequest, "bits")
    search = parser.add_argument_group("search")
    add_options(search, QualityOptions, "method", method={"choices": (*METHODS, "all")})
    shape = ("solver", "orders", "formula", "layer_group", "gap", "time_limit_s", "no_streaming")
    add_options(search, PlanRequest, *shape, gap={"default": None})  # which depends on the solver
    manual = parser.add_argument_group(
        "manual decisions",
        "DEVICE is node/type#0, or node/type, node or type for all devices that match. The search "
        "decides the rest.",
    )
    add_options(manual, ManualOptions)
    add_options(parser.add_argument_group("schedule (ExeGPT)"), ScheduleOptions)


def request_of(options: argparse.Namespace) -> PlanRequest:
    """Return the planning request of the options."""
    asked = read_options(ModelOptions, options)
    devices = read_options(ClusterOptions, options)
    quality = read_options(QualityOptions, options)
    model, source = _model(asked)
    dtype = model.dtype if asked.dtype == "auto" else asked.dtype
    profile_dir = None if devices.profile is None else Path(devices.profile)
    if profile_dir is not None and not profile_dir.is_dir():
        raise SpecError(f"--profile: {profile_dir}: no such folder")
    overrides, chooses_head = overrides_of(read_options(ManualOptions, options))
    work = _workload(read_options(WorkloadOptions, options))
    request = read_options(
        PlanRequest,
        options,
        model=model,
        model_source=source,
        cluster=cluster_of(devices, work.batch),
        workload=work,
        dtype=dtype,
        kv_bits=asked.kv_bits if asked.kv_bits in KV_CODE_BITS else 8 * DTYPE_BYTES[dtype],
        head_bits=tuple({16, *options.bits}) if chooses_head else (16,),
        sensitivity=_sensitivity(quality.omega_file, options.bits, model, source),
        gap=default_gap(options.solver) if options.gap is None else options.gap,
        profile_dir=profile_dir,
        latency="fit" if devices.fit else "table",
        overrides=overrides,
        # No other engine splits the experts of a layer.
        whole_experts=getattr(options, "export", None) is not None,
    )
    if getattr(options, "policy", None) in get_args(SearchedPolicy):
        # Their searches move whole layers in memory.
        request = replace(request, no_streaming=True, whole_layers=True)
    fixes_layers = bool(overrides.layer_bits or overrides.device_bits)
    if model.stored:
        for name, given in (("fix_bits", fixes_layers), ("average_bits", quality.average_bits)):
            if given:
                raise SpecError(
                    f"--{name}: found with {source}, whose layers are quantized already, expected "
                    "to leave them their bits, or the model it was made from"
                )
        return with_stored_bits(request, "--bits")
    if quality.average_bits is None:
        return request
    if fixes_layers:
        raise SpecError("--average_bits: found together with --fix_bits, expected one of them")
    for name in ("quality_budget", "theta", "pareto"):
        if getattr(options, name) is not None:
            raise SpecError(f"--average_bits: found together with --{name}, expected one of them")
    return with_average_bits(request, quality.average_bits)


def _model(asked: ModelOptions) -> tuple[ModelSpec, str | None]:
    family, size = asked.model_name, asked.model_size
    if asked.model is not None and family is None and size is None:
        model, source = catalog.resolve_model(asked.model)
        return model, None if source is None else str(source)
    if asked.model is None and family is not None and size is not None:
        return catalog.model(catalog.paper_model_name(family, size)), None
    raise SpecError("expected either --model, or both --model-name and --model_size")


def cluster_of(asked: ClusterOptions, sequences: int) -> Cluster:
    """Return the devices of the options; of a ``cpu`` that states nothing else, those of this host.

    Args:
        asked: the options.
        sequences: of the batch.

    Raises:
        SpecError: there is none, or two, or a device has no figures.
    """
    names, numbers = asked.device_names, asked.device_numbers
    if asked.cluster is not None and names is not None:
        raise SpecError("--cluster and --device_names: found both, expected one of them")
    if asked.cluster is not None and numbers is None:
        found, where = load_cluster(asked.cluster), asked.cluster
    elif asked.cluster is None and names is not None:
        found, where = cluster_of_lists(names, numbers or [1] * len(names)), "--device_names"
    else:
        raise SpecError("expected either --cluster, or --device_names with --device_numbers")
    known = with_reserve(with_described(found, asked.devices, where), asked.reserve_gib)
    known = with_host(known, asked.host_gib, asked.devices, sequences)
    return with_host_cpu(known, host_cpu(), has_tables=asked.profile is not None)


def _workload(asked: WorkloadOptions) -> Workload:
    batch, prompt, new = asked.global_bz, asked.s, asked.n
    if asked.workload is not None and (batch, prompt, new) == (None, None, None):
        found = load_workload(asked.workload)
    elif asked.workload is not None or batch is None or prompt is None or new is None:
        raise SpecError("expected either --workload, or all of --global_bz, --s and --n")
    else:
        found = Workload(batch=batch, prompt_tokens=prompt, new_tokens=new)
    most = asked.max_model_len
    return found if most is None else replace(found, context_tokens=most)


def _sensitivity(
    path: str | None, bits: Sequence[int], model: ModelSpec, source: str | None
) -> SensitivityTable | None:
    if path is None:
        return None
    table = read_sensitivity(path)
    check_measured_on(table, model, source, path)
    try:
        table.normalised(bits)
    except SpecError as error:
        raise SpecError(f"{path}: field 'omega': {error}") from None
    return table


def overrides_of(asked: ManualOptions) -> tuple[Overrides, bool]:
    """Return the manual decisions of the options, and whether the head's bits are a choice."""
    number = r"(\d*\.?\d+(?:e-?\d+)?)"
    memory = _parsed("memory_gib", asked.memory_gib, f"(.+)={number}", "DEVICE=GIB")
    layers = _parsed("fix_layers", asked.fix_layers, r"(.+)=(\d+):(\d+)", "DEVICE=FIRST:END")
    pattern = rf"(?:(\d+):(\d+)|(.+))=(\d+)|({HEAD}=auto)"
    parsed = _parsed("fix_bits", asked.fix_bits, pattern, "LAYERS=BITS")
    autos = sum(bool(auto) for *_, auto in parsed)
    bits = [found for *found, auto in parsed if not auto]
    heads = [int(width) for _, _, name, width in bits if name == HEAD]
    if len(heads) + autos > 1:
        raise SpecError(f"--fix_bits: found {HEAD} {len(heads) + autos} times, expected it once")
    for name, size in memory:
        if not 0 < float(size) < MAX_GIB:
            raise SpecError(f"--memory_gib: found '{name}={size}', expected more than 0 GiB")
    sizes = asked.micro_batch
    overrides = Overrides(
        memory=tuple((name, round(float(size) * GIB)) for name, size in memory),
        exclude=asked.exclude,
        use=asked.use,
        order=asked.fix_order,
        layers=tuple((name, int(first), int(end)) for name, first, end in layers),
        layer_bits=tuple((int(a), int(b), int(width)) for a, b, name, width in bits if not name),
        device_bits=tuple(
            (name, int(width)) for _, _, name, width in bits if name not in (None, HEAD)
        ),
        head_bits=heads[0] if heads else None,
        micro_batching=sizes and MicroBatching(prefill=sizes[0], decode=sizes[1]),
    )
    return overrides, autos > 0


def _parsed(
    option: str, texts: Sequence[str], pattern: str, expected: str
) -> list[tuple[str, ...]]:
    matches = [(text, re.fullmatch(pattern, text)) for text in texts]
    for text, match in matches:
        if match is None:
            raise SpecError(f"--{option}: found '{text}', expected {expected}")
    return [match.groups() for _, match in matches if match is not None]


def scheduled(
    options: argparse.Namespace,
    request: PlanRequest,
    plan: Plan,
    planned: Callable[[PlanRequest], Plan],
    progress: Progress,
) -> tuple[PlanRequest, Plan]:
    """Return the plan with the schedule of the options, and the request that it is a plan of.

    Args:
        options: parsed.
        request: what was planned.
        plan: its plan, without tensor parallelism.
        planned: makes a plan of another request.
        progress: receives the searches that are done, and how many there are.
    """
    asked = read_options(ScheduleOptions, options)
    policy, degrees = asked.policy, asked.tensor_parallel or (1,)
    if policy in get_args(SearchedPolicy):
        return schedule_plan(
            request,
            plan,
            _schedule_request(asked, request),
            cast(SearchedPolicy, policy),
            degrees=degrees,
            planned=planned,
            progress=progress,
        )
    if asked.latency_bound is not None:
        raise SpecError("--latency_bound: expected together with --policy rra, waa or auto")
    if policy == "multibin" and degrees == (1,):
        plan = with_bins(
            plan,
            costs_of(request, plan.cluster),
            _schedule_request(asked, request),
            bins=asked.bins or None,
            target=asked.target,
        )
        return request, _with_wait(plan, asked.max_wait)
    if degrees != (1,):
        raise SpecError("--tensor_parallel: expected together with --policy rra, waa or auto")
    if asked.lengths or asked.prompt_lengths:
        raise SpecError(
            "--lengths, --prompt_lengths: expected together with --policy multibin, rra, waa or "
            "auto"
        )
    if policy in (None, "hybrid"):
        return request, plan
    schedule = default_schedule(cast(PolicyName, policy), plan.workload.batch)
    return request, _with_wait(replace(plan, schedule=schedule), asked.max_wait)


def _with_wait(plan: Plan, max_wait_s: float | None) -> Plan:
    if max_wait_s is None:
        return plan
    assert plan.schedule is not None
    return replace(plan, schedule=replace(plan.schedule, max_wait_s=max_wait_s))


def _schedule_request(asked: ScheduleOptions, request: PlanRequest) -> ScheduleRequest:
    if asked.lengths is None:
        raise SpecError(
            f"--policy {asked.policy}: found no --lengths, expected a distribution of answer "
            "lengths"
        )
    file, prompt_tokens = asked.prompt_lengths, request.workload.prompt_tokens
    return ScheduleRequest(
        prompt_tokens=load_lengths(file) if file else constant(prompt_tokens),
        new_tokens=load_lengths(asked.lengths),
        latency_bound_s=math.inf if asked.latency_bound is None else asked.latency_bound,
        sla=asked.sla,
        confidence=asked.bound_confidence,
    )
