"""The plan of a model for this host, where the user states nothing but the model.

It is kept in ``$XDG_CACHE_HOME/llmpq/plans`` (``~/.cache`` by default) and used again while model,
options and devices are the same and it fits into what is free.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from llmpq import __version__
from llmpq.assigner.forecast import evaluate_plan
from llmpq.assigner.longest_context import plan_longest_context
from llmpq.assigner.request import PlanRequest
from llmpq.cli.render import aligned, compact_bits
from llmpq.costmodel import build_costs
from llmpq.errors import LlmpqError, SpecError
from llmpq.profiler.device import host_cluster
from llmpq.spec import catalog
from llmpq.spec.cluster import Cluster
from llmpq.spec.model import ModelSpec
from llmpq.spec.plan import Plan, read_plan, write_plan
from llmpq.spec.precision import BITS, DTYPE_BYTES
from llmpq.spec.workload import Workload
from llmpq.units import format_bytes, format_number

USUAL_PROMPT, USUAL_ANSWER = 256, 128
"""Tokens of the request whose speed is printed: few are as long as the plan allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlan:
    """The plan of a model for this host, and where it is kept.

    Attributes:
        plan: the plan.
        file: where it is kept.
        model_dir: of the weights.
        is_new: whether it was made now.
        answer_tokens_per_s: forecast of one answer after a short prompt, all sequences busy;
            ``None`` where the plan has no forecast of it.
    """

    plan: Plan
    file: Path
    model_dir: Path
    is_new: bool
    answer_tokens_per_s: float | None


def add_host_plan_options(
    parser: argparse._ActionsContainer, sequences: int, *, has_length: bool = True
) -> None:
    """Add what a plan for this host can be asked for.

    Args:
        parser: gets the options.
        sequences: default number of answers at the same time.
        has_length: whether ``--max_model_len`` is among them.
    """
    if has_length:
        parser.add_argument(
            "--max_model_len",
            type=int,
            metavar="N",
            help="tokens of prompt and answer together (default: the most that fit without loss "
            "of quality, up to the model's own)",
        )
    parser.add_argument(
        "--max_num_seqs",
        type=int,
        default=sequences,
        metavar="N",
        help="answers at the same time (default %(default)s)",
    )
    parser.add_argument(
        "--bits",
        type=int,
        nargs="+",
        choices=sorted(BITS),
        metavar="BITS",
        help="bitwidths to choose from (default: all; 8 and more where they fit)",
    )
    parser.add_argument("--replan", action="store_true", help="do not use the plan that is kept")


def host_plan(model: str, options: argparse.Namespace) -> HostPlan:
    """Return the plan of a model for this host: the one that is kept, or a new one.

    Args:
        model: folder, GGUF file, or a name whose files are in the hub's cache.
        options: of :func:`add_host_plan_options`.

    Raises:
        SpecError: there is no such model, or an option cannot be used.
        InfeasibleError: the model does not fit on this host.
    """
    spec, model_dir = find_model(model)
    if options.max_num_seqs < 1:
        raise SpecError(f"--max_num_seqs: found {options.max_num_seqs}, expected at least 1")
    cluster = host_cluster()
    asked = {name: getattr(options, name) for name in ("max_model_len", "max_num_seqs", "bits")}
    file = plans_folder() / f"{_key(model_dir, cluster, asked)}.json"
    plan = None if options.replan else _kept(file, cluster)
    is_new = plan is None
    if plan is None:
        request = PlanRequest(
            model=spec,
            model_source=str(model_dir),
            cluster=cluster,
            workload=Workload(batch=options.max_num_seqs, prompt_tokens=1, new_tokens=1),
            dtype=spec.dtype,
            kv_bits=8 * DTYPE_BYTES[spec.dtype],
            bits=tuple(sorted(set(options.bits), reverse=True)) if options.bits else BITS,
        )
        plan = plan_longest_context(request, options.max_model_len, command=options.command)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_plan(file, plan)
    return HostPlan(
        plan=plan,
        file=file,
        model_dir=model_dir,
        is_new=is_new,
        answer_tokens_per_s=_usual_speed(plan, spec),
    )


def find_model(name: str) -> tuple[ModelSpec, Path]:
    """Return a model and where its weights are.

    Raises:
        SpecError: there are none here; nothing is downloaded.
    """
    folder = None if Path(name).exists() else hub_folder(name)
    spec, source = catalog.resolve_model(name if folder is None else folder)
    if source is None:
        raise SpecError(
            f"{name}: found no weights on this host, expected a folder, a GGUF file, or a model in "
            f"the hub's cache; to get it: hf download {name}"
        )
    return spec, Path(source).resolve()


def hub_folder(name: str) -> Path | None:
    """Return the folder of a model in the cache of the hub, ``None`` if it is not there."""
    with contextlib.suppress(ImportError, ValueError):
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "config.json")
        return Path(found).parent if isinstance(found, str) else None
    return None


def plans_folder() -> Path:
    """Return the folder of plans that are kept."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "llmpq" / "plans"


def _key(model_dir: Path, cluster: Cluster, asked: dict[str, Any]) -> str:
    """Return the name of a plan: of its model's files, the devices and what was asked for."""
    files = sorted(model_dir.iterdir()) if model_dir.is_dir() else [model_dir]
    stats = [(one.name, one.stat()) for one in files if one.is_file()]
    # Free memory changes all the time: whether a kept plan fits is checked when it is used.
    devices = [asdict(replace(one, memory_bytes=None)) for one in cluster.nodes[0].devices]
    content = {
        "version": __version__,
        "model": str(model_dir),
        "files": [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats],
        "devices": devices,
        **asked,
    }
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return f"{model_dir.name}-{digest[:16]}"


def _kept(file: Path, cluster: Cluster) -> Plan | None:
    """Return the plan in a file if it fits into what is free, ``None`` otherwise."""
    try:
        plan = read_plan(file)
    except (LlmpqError, OSError):
        return None  # there is none, or it cannot be used: a new one takes its place
    free = {device.label: device.memory_bytes for device in cluster.devices}
    for stage, estimate in zip(plan.stages, plan.estimate.stages, strict=True):
        room = free.get(plan.device_of(stage).label)
        if room is None or estimate.memory.total > room:
            return None
    return plan


def _usual_speed(plan: Plan, spec: ModelSpec) -> float | None:
    """Return the forecast tokens a second of one answer after a prompt of usual length."""
    longest = plan.workload.max_context_tokens
    answer = max(1, min(USUAL_ANSWER, longest // 3))
    work = replace(
        plan.workload, prompt_tokens=min(USUAL_PROMPT, longest - answer), new_tokens=answer
    )
    short = replace(plan, workload=work)
    costs = build_costs(spec, plan.cluster, dtype=plan.dtype, kv_bits=plan.kv_bits)
    estimate, _ = evaluate_plan(short, costs, np.zeros((spec.num_layers, len(BITS))))
    return replace(short, estimate=estimate).answer_tokens_per_s


def say_plan(found: HostPlan) -> None:
    """Print a plan on standard error, in a few lines."""
    print(plan_text(found), file=sys.stderr)


def plan_text(found: HostPlan) -> str:
    """Return a plan as text."""
    plan, work = found.plan, found.plan.workload
    stages = plan.estimate.stages
    rows: list[Sequence[str]] = [("model", f"{plan.model.name} ({found.model_dir})")]
    for stage, estimate in zip(plan.stages, stages, strict=True):
        if stage.bits:
            device, memory = plan.device_of(stage), estimate.memory.total
            rows.append(
                (
                    device.label,
                    f"{len(stage.bits)} layers, {compact_bits(stage.bits)} bits, "
                    f"{format_bytes(memory)} of {format_bytes(estimate.capacity_bytes)}",
                )
            )
    answers = "one answer" if work.batch == 1 else f"{work.batch} answers at the same time"
    rows.append(("context", f"{work.max_context_tokens:,} tokens each, {answers}"))
    if found.answer_tokens_per_s is not None:
        rows.append(
            (
                "speed",
                f"{format_number(found.answer_tokens_per_s)} tokens/s an answer after a short "
                "prompt (forecast from the catalogue; llmpq-profile measures)",
            )
        )
    rows.append(("quality", f"{plan.estimate.quality:.2g} lost (1: all layers at 4 bits)"))
    rows.append(("plan", f"{found.file} ({'new' if found.is_new else 'kept from before'})"))
    return "\n".join(aligned(rows))
