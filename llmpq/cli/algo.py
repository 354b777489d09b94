"""llmpq-algo: make a strategy file from a model, a cluster and a workload."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from tqdm import tqdm

from llmpq.assigner import METHODS, PlanRequest, make_plan
from llmpq.assigner.explain import dropped_reasons
from llmpq.assigner.solvers import SOLVERS
from llmpq.assigner.task import DEFAULT_GAP
from llmpq.cli.common import command_line, make_parser, print_json, run_command
from llmpq.cli.report import plan_record, plan_table
from llmpq.costmodel import build_costs
from llmpq.errors import InfeasibleError, SpecError, bad_field
from llmpq.spec import catalog
from llmpq.spec.cluster import Cluster, cluster_of_types, load_cluster
from llmpq.spec.model import ModelSpec
from llmpq.spec.plan import Plan
from llmpq.spec.plan_io import write_plan
from llmpq.spec.precision import BITS, DTYPE_BYTES, Dtype
from llmpq.spec.tables import SensitivityTable, read_sensitivity
from llmpq.spec.workload import Workload, load_workload

NAME = "llmpq-algo"
QUIET_S = 2.0
"""A search shorter than this shows no progress."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""

    def body(options: argparse.Namespace) -> int:
        return _run(options, command_line(NAME, argv))

    return run_command(_parser(), body, argv)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        NAME,
        "Plan: which device runs which layers at how many bits, in micro-batches of what size.",
    )
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
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument("--cluster", metavar="FILE.json")
    cluster.add_argument("--device_names", nargs="+", metavar="TYPE", help="one node per type")
    cluster.add_argument("--device_numbers", nargs="+", type=int, metavar="COUNT")
    cluster.add_argument("--profile", metavar="DIR", help="folder of measured latency tables")
    work = parser.add_argument_group("workload")
    work.add_argument("--workload", metavar="FILE.json")
    work.add_argument("--global_bz", type=int, metavar="B", help="sequences in the batch")
    work.add_argument("--s", type=int, metavar="TOKENS", help="prompt length")
    work.add_argument("--n", type=int, metavar="TOKENS", help="tokens to generate per sequence")
    _add_quality(parser)
    _add_search(parser)
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="strategy file (default: strategies/<model>__<cluster>__<workload>__<method>.json)",
    )
    return parser


def _add_quality(parser: argparse.ArgumentParser) -> None:
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
        "--bits", type=int, nargs="+", choices=sorted(BITS), default=list(BITS), metavar="BITS"
    )


def _add_search(parser: argparse.ArgumentParser) -> None:
    search = parser.add_argument_group("search")
    search.add_argument("--method", choices=(*METHODS, "all"), default="llmpq")
    search.add_argument("--solver", choices=tuple(SOLVERS), default="highs")
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
        default=DEFAULT_GAP,
        metavar="GAP",
        help="stop when proven this close to the optimum (default: %(default)s)",
    )
    search.add_argument("--time_limit", type=float, metavar="SECONDS")


def _run(options: argparse.Namespace, command: str) -> int:
    request = _request(options)
    if options.method != "all":
        plan = _plan(request, options.method, command)
        path = _write(plan, _output(options, request, options.method))
        if options.json:
            print_json(plan_record(plan, path))
        else:
            _print_plan(plan, request, path)
        return 0
    return _run_all(options, request, command)


def _run_all(options: argparse.Namespace, request: PlanRequest, command: str) -> int:
    records: list[dict[str, Any]] = []
    failures: list[InfeasibleError] = []
    for method in METHODS:
        try:
            plan = _plan(request, method, command)
        except InfeasibleError as error:
            failures.append(error)
            records.append({"method": method, "status": "infeasible", "reason": str(error)})
            if not options.json:
                print(f"{method}: no plan: {error}\n")
            continue
        path = _write(plan, _output(options, request, method))
        records.append(plan_record(plan, path))
        if not options.json:
            _print_plan(plan, request, path)
            print()
    if options.json:
        print_json({"plans": records})
    if len(failures) == len(METHODS):
        raise failures[0]
    return 0


def _request(options: argparse.Namespace) -> PlanRequest:
    model, source = _model(options)
    dtype = model.dtype if options.dtype == "auto" else cast(Dtype, options.dtype)
    profile_dir = None if options.profile is None else Path(options.profile)
    if profile_dir is not None and not profile_dir.is_dir():
        raise SpecError(f"--profile: {profile_dir}: no such folder")
    return PlanRequest(
        model=model,
        model_source=source,
        cluster=_cluster(options),
        workload=_workload(options),
        dtype=dtype,
        kv_bits=8 * DTYPE_BYTES[dtype],
        bits=tuple(options.bits),
        sensitivity=_sensitivity(options, model),
        theta_s=options.theta,
        quality_budget=options.quality_budget,
        formula=options.formula,
        solver=options.solver,
        gap=options.gap,
        time_limit_s=options.time_limit,
        orders=options.orders,
        layer_group=options.group,
        profile_dir=profile_dir,
    )


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


def _sensitivity(options: argparse.Namespace, model: ModelSpec) -> SensitivityTable | None:
    path = options.omega_file
    if path is None:
        return None
    table = read_sensitivity(path)
    if table.num_layers != model.num_layers:
        raise bad_field(
            path,
            "omega",
            f"{table.num_layers} layers",
            f"{model.num_layers} layers, as {model.name} has",
        )
    try:
        table.normalised(options.bits)
    except SpecError as error:
        raise SpecError(f"{path}: field 'omega': {error}") from None
    return table


def _output(options: argparse.Namespace, request: PlanRequest, method: str) -> Path:
    if options.output is not None:
        path = Path(options.output)
        if options.method == "all":
            return path.with_name(f"{path.stem}__{method}{path.suffix or '.json'}")
        return path
    model = request.model.name.rstrip("/").rpartition("/")[2]
    parts = model, request.cluster.name, request.workload.name, method
    name = "__".join(part.replace("/", "-").replace(" ", "-") for part in parts)
    return Path("strategies") / f"{name}.json"


def _write(plan: Plan, path: Path) -> str:
    write_plan(path, plan)
    return str(path)


def _plan(request: PlanRequest, method: str, command: str) -> Plan:
    with _Progress() as progress:
        return make_plan(request, method, command=command, progress=progress)


def _print_plan(plan: Plan, request: PlanRequest, path: str) -> None:
    costs = build_costs(
        request.model,
        request.cluster,
        dtype=request.dtype,
        kv_bits=request.kv_bits,
        profile_dir=request.profile_dir,
    )
    print(plan_table(plan, dropped_reasons(plan, costs)))
    print(f"written        {path}")


class _Progress:
    """A progress bar on standard error, for searches that take longer than ``QUIET_S``."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.bar: tqdm[Any] | None = None

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def __call__(self, done: int, total: int, best_s: float | None) -> None:
        if self.bar is None:
            if time.monotonic() - self.started < QUIET_S:
                return
            self.bar = tqdm(
                total=total,
                desc="candidates",
                file=sys.stderr,
                leave=False,
                # A log file gets a line now and then, a terminal a live bar.
                mininterval=0.1 if sys.stderr.isatty() else 10.0,
            )
        if best_s is not None:
            self.bar.set_postfix_str(f"best {best_s:.4g} s", refresh=False)
        self.bar.update(done - self.bar.n)
