"""Options that say what to plan and how, and the requests they make."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from llmpq.assigner import PlanRequest
from llmpq.assigner.constraints.fixed_bits import with_average_bits, with_stored_bits
from llmpq.assigner.constraints.resolve import HEAD, Overrides
from llmpq.assigner.planner import METHODS
from llmpq.assigner.request import DEFAULT_GAP
from llmpq.assigner.schedules.plan import ScheduleRequest, schedule_plan
from llmpq.cli.options import (
    add_devices_option,
    add_reserve_option,
    with_described,
    with_reserve,
)
from llmpq.errors import SpecError
from llmpq.options.declare import add_options, read_options
from llmpq.profiler.device import host_cpu, with_host_cpu
from llmpq.spec import catalog
from llmpq.spec.cluster import Cluster, cluster_of_lists, load_cluster
from llmpq.spec.model import ModelSpec
from llmpq.spec.plan import MicroBatching, Plan, default_schedule
from llmpq.spec.precision import BITS, DTYPE_BYTES, Dtype
from llmpq.spec.tables import SensitivityTable, check_measured_on, read_sensitivity
from llmpq.spec.workload import Workload, constant, load_lengths, load_workload
from llmpq.units import GIB

DEFAULT_METHOD = "llmpq"
POLICIES = ("hybrid", "static", "iteration", "rra", "waa", "auto")
SEARCHED = ("rra", "waa", "auto")
CONFIDENCE = 0.95
"""Default probability that a latency bound is kept: a margin of 1.6 standard deviations."""


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of what to plan and how, and of the schedule."""
    _add_input_options(parser)
    _add_quality_options(parser)
    _add_search_options(parser)
    _add_override_options(parser)
    _add_schedule_options(parser)


def _add_input_options(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model")
    model.add_argument("--model", metavar="NAME_OR_DIR", help="catalogue name or local directory")
    model.add_argument(
        "--model-name", metavar="FAMILY", help="family as in the paper: opt or bloom"
    )
    model.add_argument("--model_size", metavar="SIZE", help="with --model-name, such as 30b")
    model.add_argument(
        "--dtype",
        choices=("auto", *DTYPE_BYTES),
        default="auto",
        help="number format of unquantized tensors (auto: that of the checkpoint)",
    )
    model.add_argument(
        "--kv_bits",
        type=int,
        choices=(8, 16),
        default=16,
        help="bits of a cached key or value (16: the number format of --dtype)",
    )
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument("--cluster", metavar="FILE.json", help="cluster file")
    cluster.add_argument(
        "--device_names", nargs="+", metavar="TYPE", help="device types, one node per type"
    )
    cluster.add_argument(
        "--device_numbers", nargs="+", type=int, metavar="COUNT", help="of each type (default 1)"
    )
    add_devices_option(cluster)
    add_reserve_option(cluster)
    cluster.add_argument("--profile", metavar="DIR", help="folder of measured latency tables")
    latency = cluster.add_mutually_exclusive_group()
    latency.add_argument(
        "--use_profiler_prediction",
        action="store_true",
        help="use measured latencies, and interpolate other shapes (the default)",
    )
    latency.add_argument(
        "--fit", action="store_true", help="use the regression fitted to a table for all shapes"
    )
    work = parser.add_argument_group("workload")
    work.add_argument("--workload", metavar="FILE.json", help="workload file")
    work.add_argument("--global_bz", type=int, metavar="B", help="sequences in the batch")
    work.add_argument("--s", type=int, metavar="TOKENS", help="prompt length")
    work.add_argument("--n", type=int, metavar="TOKENS", help="tokens to generate per sequence")


def _add_quality_options(parser: argparse.ArgumentParser) -> None:
    quality = parser.add_argument_group("quality")
    quality.add_argument(
        "--omega_file",
        metavar="FILE.json",
        help="measured sensitivity (default: the same for all layers, from the quantization step)",
    )
    add_options(quality, PlanRequest, "theta_s", "quality_budget")
    quality.add_argument(
        "--average_bits",
        type=float,
        metavar="A",
        help="give every layer the bits that lose least quality at A bits per weight, and search "
        "only the partition and the micro-batches",
    )
    quality.add_argument(
        "--pareto",
        type=int,
        metavar="K",
        help="make K plans from the best quality to the highest speed, a table and a picture",
    )
    add_options(quality, PlanRequest, "bits", bits={"choices": sorted(BITS)})


def _add_search_options(parser: argparse.ArgumentParser) -> None:
    search = parser.add_argument_group("search")
    search.add_argument(
        "--method",
        choices=(*METHODS, "all"),
        default=DEFAULT_METHOD,
        help="planner (default: llmpq); all compares every method",
    )
    search.add_argument(
        "--shaq-efficient",
        dest="method",
        action="store_const",
        const="heuristic",
        help="name of --method heuristic in the paper",
    )
    add_options(search, PlanRequest, "solver", "orders", "formula", "layer_group")
    search.add_argument(
        "--gap",
        type=float,
        metavar="GAP",
        help="relative optimality gap to stop at (default: 0; integer programs 0.001)",
    )
    add_options(search, PlanRequest, "time_limit_s")


def request_of(options: argparse.Namespace) -> PlanRequest:
    """Return the planning request of the options."""
    model, source = _model(options)
    dtype = model.dtype if options.dtype == "auto" else cast(Dtype, options.dtype)
    profile_dir = None if options.profile is None else Path(options.profile)
    if profile_dir is not None and not profile_dir.is_dir():
        raise SpecError(f"--profile: {profile_dir}: no such folder")
    gap = 0.0 if options.solver == "exact" else DEFAULT_GAP
    overrides, chooses_head = overrides_of(options)
    request = read_options(
        PlanRequest,
        options,
        model=model,
        model_source=source,
        cluster=_cluster(options),
        workload=_workload(options),
        dtype=dtype,
        kv_bits=8 if options.kv_bits == 8 else 8 * DTYPE_BYTES[dtype],
        head_bits=tuple({16, *options.bits}) if chooses_head else (16,),
        sensitivity=_sensitivity(options, model, source),
        gap=gap if options.gap is None else options.gap,
        profile_dir=profile_dir,
        latency="fit" if options.fit else "table",
        overrides=overrides,
    )
    fixes_layers = bool(request.overrides.layer_bits or request.overrides.device_bits)
    if model.stored:
        for name, given in (("fix_bits", fixes_layers), ("average_bits", options.average_bits)):
            if given:
                raise SpecError(
                    f"--{name}: found with {source}, whose layers are quantized already, expected "
                    "to leave them their bits, or the model it was made from"
                )
        return with_stored_bits(request, "--bits")
    if options.average_bits is None:
        return request
    if fixes_layers:
        raise SpecError("--average_bits: found together with --fix_bits, expected one of them")
    for name in ("quality_budget", "theta", "pareto"):
        if getattr(options, name) is not None:
            raise SpecError(f"--average_bits: found together with --{name}, expected one of them")
    return with_average_bits(request, options.average_bits)


def _model(options: argparse.Namespace) -> tuple[ModelSpec, str | None]:
    paper = options.model_name, options.model_size
    if options.model is not None and paper == (None, None):
        model, source = catalog.resolve_model(options.model)
        return model, None if source is None else str(source)
    if options.model is None and None not in paper:
        return catalog.model(catalog.paper_model_name(*paper)), None
    raise SpecError("expected either --model, or both --model-name and --model_size")


def _cluster(options: argparse.Namespace) -> Cluster:
    names, numbers = options.device_names, options.device_numbers
    if options.cluster is not None and names is None and numbers is None:
        cluster = with_described(load_cluster(options.cluster), options, options.cluster)
        return _of_host(with_reserve(cluster, options.reserve_gib), options)
    if options.cluster is not None or names is None:
        raise SpecError("expected either --cluster, or --device_names with --device_numbers")
    own = cluster_of_lists(names, numbers or [1] * len(names))
    cluster = with_described(own, options, "--device_names")
    return _of_host(with_reserve(cluster, options.reserve_gib), options)


def _of_host(cluster: Cluster, options: argparse.Namespace) -> Cluster:
    """Return a cluster whose ``cpu`` devices are this host's where they state nothing else."""
    return with_host_cpu(cluster, host_cpu(), has_tables=options.profile is not None)


def _workload(options: argparse.Namespace) -> Workload:
    sizes = options.global_bz, options.s, options.n
    if options.workload is not None and sizes == (None, None, None):
        return load_workload(options.workload)
    if options.workload is not None or None in sizes:
        raise SpecError("expected either --workload, or all of --global_bz, --s and --n")
    return Workload(batch=options.global_bz, prompt_tokens=options.s, new_tokens=options.n)


def _sensitivity(
    options: argparse.Namespace, model: ModelSpec, source: str | None
) -> SensitivityTable | None:
    path = options.omega_file
    if path is None:
        return None
    table = read_sensitivity(path)
    check_measured_on(table, model, source, path)
    try:
        table.normalised(options.bits)
    except SpecError as error:
        raise SpecError(f"{path}: field 'omega': {error}") from None
    return table


def _add_override_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "manual decisions",
        "DEVICE is node/type#0, or node/type, node or type for all devices that match. The search "
        "decides the rest.",
    )
    group.add_argument(
        "--memory_gib", nargs="+", metavar="DEVICE=GIB", help="memory that a device may use"
    )
    group.add_argument("--exclude", nargs="+", metavar="DEVICE", help="devices to leave out")
    group.add_argument("--use", nargs="+", metavar="DEVICE", help="devices that must hold layers")
    group.add_argument(
        "--fix_order",
        nargs="+",
        metavar="DEVICE",
        help="the devices of the pipeline in order; others are left out",
    )
    group.add_argument(
        "--fix_layers",
        nargs="+",
        metavar="DEVICE=FIRST:END",
        help="layers of a device, END excluded",
    )
    group.add_argument(
        "--fix_bits",
        nargs="+",
        metavar="LAYERS=BITS",
        help="bits of layers FIRST:END, of all layers of a DEVICE, or of the LM head (head=8; "
        "head=auto: the best of 16 and --bits), and of the embedding where it is the same matrix",
    )
    group.add_argument(
        "--micro_batch", nargs=2, type=int, metavar=("PREFILL", "DECODE"), help="micro-batch sizes"
    )


def overrides_of(options: argparse.Namespace) -> tuple[Overrides, bool]:
    """Return the manual decisions of the options, and whether the head's bits are a choice."""
    number = r"(\d*\.?\d+(?:e-?\d+)?)"
    memory = _parsed("memory_gib", options.memory_gib, f"(.+)={number}", "DEVICE=GIB")
    layers = _parsed("fix_layers", options.fix_layers, r"(.+)=(\d+):(\d+)", "DEVICE=FIRST:END")
    pattern = rf"(?:(\d+):(\d+)|(.+))=(\d+)|({HEAD}=auto)"
    parsed = _parsed("fix_bits", options.fix_bits, pattern, "LAYERS=BITS")
    autos = sum(bool(auto) for *_, auto in parsed)
    bits = [found for *found, auto in parsed if not auto]
    heads = [int(width) for _, _, name, width in bits if name == HEAD]
    if len(heads) + autos > 1:
        raise SpecError(f"--fix_bits: found {HEAD} {len(heads) + autos} times, expected it once")
    for name, size in memory:
        if not 0 < float(size) < 1e6:
            raise SpecError(f"--memory_gib: found '{name}={size}', expected more than 0 GiB")
    sizes = options.micro_batch
    overrides = Overrides(
        memory=tuple((name, round(float(size) * GIB)) for name, size in memory),
        exclude=tuple(options.exclude or ()),
        use=tuple(options.use or ()),
        order=tuple(options.fix_order or ()),
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
    option: str, texts: Sequence[str] | None, pattern: str, expected: str
) -> list[tuple[str, ...]]:
    matches = [(text, re.fullmatch(pattern, text)) for text in texts or ()]
    for text, match in matches:
        if match is None:
            raise SpecError(f"--{option}: found '{text}', expected {expected}")
    return [match.groups() for _, match in matches if match is not None]


def _add_schedule_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("schedule (ExeGPT)")
    group.add_argument(
        "--policy",
        choices=POLICIES,
        help="batching policy of the strategy (default: hybrid micro-batches); rra and waa are "
        "searched, waa with separate stages for prefill and decode; auto is the policy with the "
        "most requests per second in simulation",
    )
    group.add_argument(
        "--latency_bound",
        type=float,
        metavar="SECONDS",
        help="rra, waa, auto: largest latency of a request from the start of its prefill",
    )
    group.add_argument(
        "--sla",
        choices=("length", "queries"),
        default="length",
        help="the bound is for an answer of the 99th percentile's length (default), or for 99 %% "
        "of all requests in simulation",
    )
    group.add_argument(
        "--bound_confidence",
        type=float,
        default=CONFIDENCE,
        metavar="SHARE",
        help="probability that --latency_bound is kept, given the uncertainty of the measured "
        f"tables (default {CONFIDENCE}; 0.5 ignores the uncertainty)",
    )
    group.add_argument("--lengths", metavar="FILE.json", help="distribution of answer lengths")
    group.add_argument(
        "--prompt_lengths",
        metavar="FILE.json",
        help="distribution of prompt lengths (default: all as long as --s)",
    )
    group.add_argument(
        "--tensor_parallel",
        type=int,
        nargs="+",
        metavar="N",
        help="rra, waa, auto: let N equal devices share every layer, with the best of the given N "
        "in simulation; needs tables measured with N devices; planned and simulated only",
    )


def scheduled(
    options: argparse.Namespace,
    request: PlanRequest,
    plan: Plan,
    planned: Callable[[PlanRequest], Plan],
) -> tuple[PlanRequest, Plan]:
    """Return the plan with the schedule of the options, and the request that it is a plan of.

    Args:
        options: parsed.
        request: what was planned.
        plan: its plan, without tensor parallelism.
        planned: makes a plan of another request.
    """
    degrees = options.tensor_parallel or [1]
    if options.policy in SEARCHED:
        wanted = _schedule_request(options, request)
        return schedule_plan(
            request, plan, wanted, options.policy, degrees=degrees, planned=planned
        )
    if degrees != [1]:
        raise SpecError("--tensor_parallel: expected together with --policy rra, waa or auto")
    if options.latency_bound is not None or options.lengths or options.prompt_lengths:
        raise SpecError(
            "--latency_bound, --lengths, --prompt_lengths: expected together with --policy rra, "
            "waa or auto"
        )
    if options.policy in (None, "hybrid"):
        return request, plan
    schedule = default_schedule(options.policy, plan.workload.batch)
    return request, replace(plan, schedule=schedule)


def _schedule_request(options: argparse.Namespace, request: PlanRequest) -> ScheduleRequest:
    if options.lengths is None:
        raise SpecError(
            f"--policy {options.policy}: found no --lengths, expected a distribution of answer "
            "lengths"
        )
    bound_s = math.inf if options.latency_bound is None else options.latency_bound
    if not bound_s > 0:
        raise SpecError(f"--latency_bound: found {bound_s:g}, expected more than 0 seconds")
    file, prompt_tokens = options.prompt_lengths, request.workload.prompt_tokens
    return ScheduleRequest(
        prompt_tokens=load_lengths(file) if file else constant(prompt_tokens),
        new_tokens=load_lengths(options.lengths),
        latency_bound_s=bound_s,
        sla=options.sla,
        confidence=options.bound_confidence,
    )
