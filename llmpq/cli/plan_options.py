"""The options that say what to plan and how, and the request they make."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from llmpq.assigner import PlanRequest
from llmpq.assigner.constraints.average import bits_at_average, quantizable_weights
from llmpq.assigner.milp.solvers import SOLVERS
from llmpq.assigner.planner import METHODS
from llmpq.assigner.task import DEFAULT_GAP, omega_of
from llmpq.cli.fit_cache import fit_cache
from llmpq.cli.override_options import overrides_of
from llmpq.errors import SpecError
from llmpq.spec import catalog
from llmpq.spec.cluster import Cluster, cluster_of_types, load_cluster
from llmpq.spec.model import ModelSpec
from llmpq.spec.precision import BITS, DTYPE_BYTES, Dtype
from llmpq.spec.sensitivity import SensitivityTable, check_measured_on, read_sensitivity
from llmpq.spec.workload import Workload, load_workload

DEFAULT_METHOD = "llmpq"


def add_input_options(parser: argparse.ArgumentParser) -> None:
    """Add model, cluster and workload."""
    model = parser.add_argument_group("model")
    model.add_argument("--model", metavar="NAME_OR_DIR", help="catalogue name or local directory")
    model.add_argument("--model-name", metavar="FAMILY", help="the paper's form: opt or bloom")
    model.add_argument("--model_size", metavar="SIZE", help="with --model-name, such as 30b")
    model.add_argument(
        "--dtype",
        choices=("auto", *DTYPE_BYTES),
        default="auto",
        help="number format of what is not quantized (auto: the checkpoint's own)",
    )
    model.add_argument(
        "--kv_bits",
        type=int,
        choices=(8, 16),
        default=16,
        help="bits of a cached key or value; 16 keeps them in the number format",
    )
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument("--cluster", metavar="FILE.json")
    cluster.add_argument("--device_names", nargs="+", metavar="TYPE", help="one node per type")
    cluster.add_argument("--device_numbers", nargs="+", type=int, metavar="COUNT")
    cluster.add_argument("--profile", metavar="DIR", help="folder of measured latency tables")
    latency = cluster.add_mutually_exclusive_group()
    latency.add_argument(
        "--use_profiler_prediction",
        action="store_true",
        help="measured shapes answer for themselves, others are interpolated (the default)",
    )
    latency.add_argument(
        "--fit", action="store_true", help="the regression fitted to a table answers everywhere"
    )
    work = parser.add_argument_group("workload")
    work.add_argument("--workload", metavar="FILE.json")
    work.add_argument("--global_bz", type=int, metavar="B", help="sequences in the batch")
    work.add_argument("--s", type=int, metavar="TOKENS", help="prompt length")
    work.add_argument("--n", type=int, metavar="TOKENS", help="tokens to generate per sequence")


def add_quality_options(parser: argparse.ArgumentParser) -> None:
    """Add what trades quality against speed."""
    quality = parser.add_argument_group("quality")
    quality.add_argument(
        "--omega_file",
        metavar="FILE.json",
        help="measured sensitivity (default: every layer alike, by the quantizer's step alone)",
    )
    quality.add_argument(
        "--theta",
        type=float,
        metavar="SECONDS",
        help='price of "every layer at 4 bits" (default: a lower bound of the latency, to two '
        "digits; 0 under a quality budget)",
    )
    quality.add_argument(
        "--quality_budget",
        type=float,
        metavar="Q",
        help="largest total degradation (1 = every layer at 4 bits)",
    )
    quality.add_argument(
        "--average_bits",
        type=float,
        metavar="A",
        help="give every layer the bits that lose least at A bits a weight; only where layers "
        "run, and in what micro-batches, is then searched",
    )
    quality.add_argument(
        "--pareto",
        type=int,
        metavar="K",
        help="K plans from the best quality to the highest speed, with a table and a picture",
    )
    quality.add_argument(
        "--bits", type=int, nargs="+", choices=sorted(BITS), default=list(BITS), metavar="BITS"
    )


def add_search_options(parser: argparse.ArgumentParser) -> None:
    """Add how to search."""
    search = parser.add_argument_group("search")
    search.add_argument("--method", choices=(*METHODS, "all"), default=DEFAULT_METHOD)
    search.add_argument(
        "--shaq-efficient",
        dest="method",
        action="store_const",
        const="heuristic",
        help="the paper's name for --method heuristic",
    )
    search.add_argument(
        "--solver",
        choices=("exact", *SOLVERS),
        default="exact",
        help="exact (default): proven best, no solver; else integer programs",
    )
    search.add_argument(
        "--orders",
        choices=("types", "all"),
        default="types",
        help="types: equal devices side by side; all: every distinct order",
    )
    search.add_argument(
        "--formula",
        choices=("steady", "paper"),
        default="steady",
        help="latency: decoding in steady state, or the published formula",
    )
    search.add_argument(
        "--group", type=int, default=1, metavar="G", help="consecutive layers decided together"
    )
    search.add_argument(
        "--gap",
        type=float,
        metavar="GAP",
        help="stop when proven this close to the optimum (default: 0, programs 0.001)",
    )
    search.add_argument(
        "--time_limit",
        type=float,
        metavar="SECONDS",
        help="of the whole command: then the best plan so far is told, with its bound and gap; "
        "--pareto: of each of its searches",
    )


def request_of(options: argparse.Namespace) -> PlanRequest:
    """Return the request of parsed options.

    Raises:
        SpecError: something is missing, contradicts itself or cannot be read.
    """
    model, source = _model(options)
    dtype = model.dtype if options.dtype == "auto" else cast(Dtype, options.dtype)
    profile_dir = None if options.profile is None else Path(options.profile)
    if profile_dir is not None and not profile_dir.is_dir():
        raise SpecError(f"--profile: {profile_dir}: no such folder")
    request = PlanRequest(
        model=model,
        model_source=source,
        cluster=_cluster(options),
        workload=_workload(options),
        dtype=dtype,
        kv_bits=8 if options.kv_bits == 8 else 8 * DTYPE_BYTES[dtype],
        bits=tuple(options.bits),
        sensitivity=_sensitivity(options, model, source),
        theta_s=options.theta,
        quality_budget=options.quality_budget,
        formula=options.formula,
        solver=options.solver,
        gap=_gap(options),
        time_limit_s=options.time_limit,
        orders=options.orders,
        layer_group=options.group,
        profile_dir=profile_dir,
        cache_dir=fit_cache(os.environ),
        latency="fit" if options.fit else "table",
        overrides=overrides_of(options),
    )
    request = _as_stored(options, request)
    return request if options.average_bits is None else _with_average(options, request)


def stored_text(model: ModelSpec) -> list[str]:
    """Return a line about a model that is quantized already; none about any other."""
    if not model.stored:
        return []
    counts = Counter(map(str, model.stored))
    parts = ", ".join(f"{count} layers {name}" for name, count in counts.items())
    return [f"stored         {parts}: each is served as it is, at no other bits"]


def _as_stored(options: argparse.Namespace, request: PlanRequest) -> PlanRequest:
    """Let layers that are quantized already keep their bits."""
    widths = [precision.bits for precision in request.model.stored]
    if not widths:
        return request
    for other in (name for name in ("fix_bits", "average_bits") if getattr(options, name)):
        raise SpecError(
            f"--{other}: found with {request.model_source}, whose layers are quantized already, "
            "expected to leave them their bits, or the model it was made from"
        )
    bits = tuple(sorted(set(widths), reverse=True))
    if not set(bits) <= set(options.bits):
        raise SpecError(
            f"--bits: found {list(options.bits)}, expected {list(bits)} among them: layers of "
            f"{request.model_source} are stored at these and can be served at no others"
        )
    request = replace(request, bits=bits)
    if len(bits) == 1:
        return request
    decided = replace(request.overrides, layer_bits=tuple(_runs_of(widths)))
    return replace(request, overrides=decided)


def _with_average(options: argparse.Namespace, request: PlanRequest) -> PlanRequest:
    """Decide the bits of every layer by their average alone."""
    given = ("fix_bits", "quality_budget", "theta", "pareto")
    for other in (name for name in given if getattr(options, name) is not None):
        raise SpecError(f"--average_bits: found together with --{other}, expected one of them")
    widths = bits_at_average(
        omega_of(request), request.bits, quantizable_weights(request.model), options.average_bits
    )
    decided = replace(request.overrides, layer_bits=tuple(_runs_of(widths)))
    return replace(request, overrides=decided)


def _runs_of(widths: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return equal neighbours as half-open ranges with their bits."""
    runs: list[tuple[int, int, int]] = []
    for layer, width in enumerate(widths):
        if runs and runs[-1][2] == width:
            runs[-1] = (runs[-1][0], layer + 1, width)
        else:
            runs.append((layer, layer + 1, width))
    return runs


def _gap(options: argparse.Namespace) -> float:
    if options.gap is not None:
        return float(options.gap)
    return 0.0 if options.solver == "exact" else DEFAULT_GAP


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
        return load_cluster(options.cluster)
    if options.cluster is not None or names is None or numbers is None:
        raise SpecError("expected either --cluster, or both --device_names and --device_numbers")
    if len(names) != len(numbers):
        raise SpecError(
            f"--device_numbers: found {len(numbers)} counts, expected one for each of {names}"
        )
    if len(set(names)) != len(names):
        raise SpecError(f"--device_names: found {names}, expected each type once")
    if min(numbers) < 1:
        raise SpecError(f"--device_numbers: found {min(numbers)}, expected at least 1")
    return cluster_of_types(dict(zip(names, numbers, strict=True)))


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
