"""Options of plans: the model, the devices, the workload, how to search, and what to write."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from llmpq.errors import SpecError
from llmpq.options.declare import Option, check_options
from llmpq.spec.devices.figures import GPU_RESERVE_BYTES
from llmpq.spec.plan import ACCEPTANCE_RATE, MOST_DRAFT_TOKENS, Formula
from llmpq.spec.precision import BITS, DTYPE_BYTES, Dtype
from llmpq.units import GIB

OrderMode = Literal["auto", "types", "all"]
"""All distinct orders; those that keep the devices of a group together; or all where they are few,
and those in groups where they are many."""
SolverName = Literal["highs", "cbc", "gurobi"]
Sla = Literal["both", "length", "queries"]
SCHEDULE_FILE, PICTURE_FILE = "schedule.json", "schedule.png"
"""What is written of an application, in the folder of its output."""
WIDTHS = tuple(sorted(BITS))
CONFIDENCE = 0.95
"""Default probability that a latency bound is kept: a margin of 1.6 standard deviations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Which model, and the number format of what is not quantized."""

    model: Annotated[
        str | None, Option(metavar="NAME_OR_DIR", help="catalogue name or local directory")
    ] = None
    model_name: Annotated[
        str | None,
        Option(flags=("model-name",), metavar="FAMILY", help="family, as in the paper's commands"),
    ] = None
    model_size: Annotated[
        str | None, Option(metavar="SIZE", help="with --model-name, such as 30b")
    ] = None
    dtype: Annotated[
        Literal["auto"] | Dtype,
        Option(
            choices=("auto", *DTYPE_BYTES),
            help="number format of unquantized tensors (auto: that of the checkpoint)",
        ),
    ] = "auto"
    kv_bits: Annotated[
        int,
        Option(
            choices=(4, 8, 16),
            help="bits of a cached key or value (16: the number format of --dtype; 4: on CPUs)",
        ),
    ] = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions:
    """Figures of devices that come from neither the catalogue nor a cluster file.

    Raises:
        SpecError: a value cannot be used.
    """

    devices: Annotated[
        str | None,
        Option(
            metavar="FILE.json",
            help="file of device types that the catalogue lacks or whose figures it replaces, such "
            "as llmpq-profile device writes",
        ),
    ] = None
    reserve_gib: Annotated[
        float | None,
        Option(
            metavar="GIB",
            help="memory to leave free on every GPU whose memory the cluster file does not state, "
            f"for its driver and a display (default {GPU_RESERVE_BYTES / GIB:g})",
        ),
    ] = None
    profile: Annotated[
        str | None, Option(metavar="DIR", help="folder of measured latency tables")
    ] = None

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions(DeviceOptions):
    """Which devices to plan for, and what their latencies are taken from."""

    cluster: Annotated[str | None, Option(metavar="FILE.json", help="cluster file")] = None
    device_names: Annotated[
        tuple[str, ...] | None, Option(metavar="TYPE", help="device types, one node per type")
    ] = None
    device_numbers: Annotated[
        tuple[int, ...] | None, Option(metavar="COUNT", help="of each type (default 1)")
    ] = None
    host_gib: Annotated[
        str | None,
        Option(
            metavar="CPU=GIB",
            help="processor and memory beside the GPUs of a node, for routed experts of a model: a "
            "whole processor of the catalogue or of --devices; for nodes whose cluster file states "
            "neither a CPU nor a host",
        ),
    ] = None
    use_profiler_prediction: Annotated[
        bool,
        Option(help="use measured latencies, and interpolate other shapes (the default)"),
    ] = False
    fit: Annotated[bool, Option(help="use the regression fitted to a table for all shapes")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """What the devices are to do: a file, or three numbers."""

    workload: Annotated[str | None, Option(metavar="FILE.json", help="workload file")] = None
    global_bz: Annotated[int | None, Option(metavar="B", help="sequences in the batch")] = None
    s: Annotated[int | None, Option(metavar="TOKENS", help="prompt length")] = None
    n: Annotated[int | None, Option(metavar="TOKENS", help="tokens to generate per sequence")] = (
        None
    )
    max_model_len: Annotated[
        int | None,
        Option(
            metavar="TOKENS",
            help="tokens of prompt and answer that a sequence may reach; --s and --n are then the "
            "usual lengths (default: s + n)",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """What a plan may choose from, and how it is searched; fields of a ``PlanRequest``."""

    no_streaming: Annotated[
        bool,
        Option(
            help="keep all weights in memory, even on devices whose disk's speed is known "
            "('disk_bytes_per_s' of the cluster file)",
        ),
    ] = False

    bits: Annotated[
        tuple[int, ...],
        Option(choices=WIDTHS, metavar="BITS", help="bitwidths to choose from (default: all)"),
    ] = BITS
    theta_s: Annotated[
        float | None,
        Option(
            flags=("theta",),
            metavar="SECONDS",
            help='cost of "every layer at 4 bits" in the objective (default: a lower bound of the '
            "latency, to two digits; 0 with a quality budget)",
        ),
    ] = None
    quality_budget: Annotated[
        float | None,
        Option(metavar="Q", help="largest total degradation (1 = every layer at 4 bits)"),
    ] = None
    formula: Annotated[
        Formula,
        Option(help="latency formula: decoding in steady state (default), or as published"),
    ] = "steady"
    solver: Annotated[
        Literal["exact"] | SolverName,
        Option(
            choices=("exact", "highs", "cbc", "gurobi"),
            help="exact (default): built-in search with a proof; others: integer programs",
        ),
    ] = "exact"
    gap: Annotated[
        float,
        Option(
            metavar="GAP",
            help="relative optimality gap to stop at (default: 0; integer programs 0.001)",
        ),
    ] = 0.0
    time_limit_s: Annotated[
        float | None,
        Option(
            flags=("time_limit",),
            metavar="SECONDS",
            help="limit of the whole command, which then reports the best plan found with its "
            "bound and gap; with --pareto: limit of each search",
        ),
    ] = None
    orders: Annotated[
        OrderMode,
        Option(
            help="device orders to search: types keeps equal devices of a node adjacent, all is "
            "every order, auto (default) is all where that takes under about a second, else types"
        ),
    ] = "auto"
    layer_group: Annotated[
        int,
        Option(
            flags=("group",),
            minimum=1,
            metavar="G",
            help="consecutive layers that share device and bits",
        ),
    ] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityOptions:
    """What is known and wanted of the quality of a plan."""

    omega_file: Annotated[
        str | None,
        Option(
            metavar="FILE.json",
            help="measured sensitivity (default: the same for all layers, from the quantization "
            "step)",
        ),
    ] = None
    average_bits: Annotated[
        float | None,
        Option(
            metavar="A",
            help="give every layer the bits that lose least quality at A bits per weight, and "
            "search only the partition and the micro-batches",
        ),
    ] = None
    pareto: Annotated[
        int | None,
        Option(
            metavar="K",
            help="make K plans from the best quality to the highest speed, a table and a picture",
        ),
    ] = None
    method: Annotated[
        str,
        Option(
            aliases=(("shaq-efficient", "heuristic"),),
            help="planner (default: %(default)s); all compares every method",
        ),
    ] = "llmpq"


@dataclass(frozen=True, slots=True, kw_only=True)
class ManualOptions:
    """Decisions of the user, which the search keeps."""

    memory_gib: Annotated[
        tuple[str, ...], Option(metavar="DEVICE=GIB", help="memory that a device may use")
    ] = ()
    exclude: Annotated[tuple[str, ...], Option(metavar="DEVICE", help="devices to leave out")] = ()
    use: Annotated[
        tuple[str, ...], Option(metavar="DEVICE", help="devices that must hold layers")
    ] = ()
    fix_order: Annotated[
        tuple[str, ...],
        Option(metavar="DEVICE", help="the devices of the pipeline in order; others are left out"),
    ] = ()
    fix_layers: Annotated[
        tuple[str, ...],
        Option(metavar="DEVICE=FIRST:END", help="layers of a device, END excluded"),
    ] = ()
    fix_bits: Annotated[
        tuple[str, ...],
        Option(
            metavar="LAYERS=BITS",
            help="bits of layers FIRST:END, of all layers of a DEVICE, or of the LM head (head=8; "
            "head=auto: the best of 16 and --bits), and of the embedding where it is the same "
            "matrix",
        ),
    ] = ()
    micro_batch: Annotated[
        tuple[int, int] | None, Option(metavar=("PREFILL", "DECODE"), help="micro-batch sizes")
    ] = None


def _auto_or_count(text: str) -> int:
    """Return the number, 0 for ``auto``."""
    if text == "auto":
        return 0
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"found '{text}', expected auto or a number from 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleOptions:
    """The batching policy of a plan, and the answers and the bound that it is searched for.

    Raises:
        SpecError: a value cannot be used.
    """

    policy: Annotated[
        str | None,
        Option(
            choices=("hybrid", "static", "iteration", "multibin", "rra", "waa", "auto"),
            help="batching policy of the strategy (default: hybrid micro-batches); rra and waa are "
            "searched, waa with separate stages for prefill and decode; auto is the one of static, "
            "iteration, rra and waa with the most requests per second in simulation",
        ),
    ] = None
    latency_bound: Annotated[
        float | None,
        Option(
            above=0,
            metavar="SECONDS",
            help="rra, waa, auto: largest latency of a request from the start of its prefill",
        ),
    ] = None
    sla: Annotated[
        Sla,
        Option(
            help="the bound is for 99 %% of all requests in simulation (queries), also for 99 %% "
            "of the answers of about the 99th percentile's length (both, the default), or for an "
            "answer of that length by closed form (length)"
        ),
    ] = "both"
    bound_confidence: Annotated[
        float,
        Option(
            metavar="SHARE",
            help="probability that --latency_bound is kept, given the uncertainty of the measured "
            "tables (default %(default)s; 0.5 ignores the uncertainty)",
        ),
    ] = CONFIDENCE
    lengths: Annotated[
        str | None, Option(metavar="FILE.json", help="distribution of answer lengths")
    ] = None
    prompt_lengths: Annotated[
        str | None,
        Option(
            metavar="FILE.json",
            help="distribution of prompt lengths (default: all as long as --s)",
        ),
    ] = None
    bins: Annotated[
        int | None,
        Option(
            parse=_auto_or_count,
            metavar="auto|K",
            help="multibin: number of bins, each with the same share of the answers (default: "
            "auto with --target, else 4)",
        ),
    ] = None
    target: Annotated[
        float | None,
        Option(
            above=0,
            metavar="R",
            help="multibin: as few bins as answer R requests a second, if lengths are predicted "
            "right",
        ),
    ] = None
    max_wait: Annotated[
        float | None,
        Option(
            above=0,
            metavar="SECONDS",
            help="static, multibin: longest that a request waits for its batch to fill (default: "
            "until it is full)",
        ),
    ] = None
    tensor_parallel: Annotated[
        tuple[int, ...],
        Option(
            metavar="N",
            help="rra, waa, auto: let N equal devices share every layer, with the best of the "
            "given N in simulation; needs tables measured with N devices; planned and simulated "
            "only",
        ),
    ] = ()

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("bins", "target"):
            if getattr(self, name) is not None and self.policy != "multibin":
                raise SpecError(f"{name}: found without --policy multibin, expected both")
        if self.bins == 0 and self.target is None:
            raise SpecError("bins: found auto without --target, expected both")
        if self.bins and self.target is not None:
            raise SpecError("bins: found a number and --target, expected one of them")
        if self.max_wait is not None and self.policy not in ("static", "multibin"):
            raise SpecError("max_wait: found without --policy static or multibin, expected both")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """How a cluster is cut into pipelines that serve side by side."""

    replicas: Annotated[
        int | None,
        Option(
            parse=_auto_or_count,
            metavar="auto|K",
            help="plan K replicas, or as many as are best: for the most requests a second, or for "
            "--rate",
        ),
    ] = None
    rate: Annotated[
        float | None,
        Option(
            metavar="R",
            help="plan for the least mean time to first token when R requests arrive in a second",
        ),
    ] = None
    same_bits: Annotated[bool, Option(help="give a layer the same bits in all replicas")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOptions:
    """A draft model that a plan may use.

    Raises:
        SpecError: a value cannot be used.
    """

    speculative_model: Annotated[
        str | None,
        Option(
            metavar="DIR|NAME|mtp",
            help="decide whether a draft model pays, and on which device it runs; mtp is the "
            "model's own layer for multi-token prediction, which runs with rank 0",
        ),
    ] = None
    speculative_bits: Annotated[
        int | None,
        Option(
            choices=BITS,
            help="bits of its layers (default: as stored; with mtp, those of the last layer)",
        ),
    ] = None
    acceptance_rate: Annotated[
        float,
        Option(
            maximum=1,
            metavar="A",
            help="probability that a draft token is right, once those before it are (default "
            "%(default)g)",
        ),
    ] = ACCEPTANCE_RATE
    num_speculative_tokens: Annotated[
        int,
        Option(
            minimum=1,
            metavar="K",
            help="most draft tokens of a sequence in a step (default %(default)s)",
        ),
    ] = MOST_DRAFT_TOKENS

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOutput:
    """What is written of a plan, and what is explained.

    Raises:
        SpecError: a value cannot be used.
    """

    output: Annotated[
        str | None,
        Option(
            metavar="FILE",
            help="strategy file (default: "
            "strategies/<model>__<cluster>__<workload>__<method>.json); several plans get one "
            "suffix each",
        ),
    ] = None
    export: Annotated[
        str | None,
        Option(
            help="write the commands, environment and settings with which another engine runs the "
            "plan; --output is their new directory"
        ),
    ] = None
    plot: Annotated[
        str | None,
        Option(metavar="FILE.png", help="draw the plan, or the plans of --pareto"),
    ] = None
    requests: Annotated[
        int | None,
        Option(minimum=1, metavar="N", help="also print how long N requests take"),
    ] = None
    what_if: Annotated[bool, Option(help="also plan with one more device of each kind")] = False
    explains: Annotated[
        bool,
        Option(
            flags=("no_explain",),
            help="do not plan again with each device left out, which shows its cost",
        ),
    ] = True

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedFile:
    """The plan or the fleet that is checked."""

    strategy: Annotated[
        str | None,
        Option(is_positional=True, metavar="FILE", help="strategy or fleet file of llmpq-algo"),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplicationOptions:
    """Which application of several models is planned, on which devices, and what is written."""

    application: Annotated[
        Path,
        Option(is_positional=True, parse=Path, metavar="APP.json", help="application file"),
    ]
    cluster: Annotated[Path, Option(parse=Path, metavar="FILE", help="cluster file")]
    output: Annotated[
        Path | None,
        Option(
            parse=Path,
            metavar="DIR",
            help=f"folder for {SCHEDULE_FILE} and, if matplotlib is installed, {PICTURE_FILE}",
        ),
    ] = None
    pipelines: Annotated[
        bool,
        Option(
            flags=("no_pipelines",),
            help="estimate tensor-parallel replicas also for models without measured iterations; "
            "such schedules cannot be run",
        ),
    ] = True
    schedule: Annotated[
        Path | None,
        Option(parse=Path, metavar="FILE", help="schedule to play (default: plan one)"),
    ] = None
    play_seed: Annotated[
        int, Option(help="of the answer lengths that are played (default %(default)s)")
    ] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplicationSearch:
    """How a schedule of an application is searched.

    Raises:
        SpecError: a value cannot be used.
    """

    method: Annotated[
        Literal["greedy", "samullm", "max", "min", "exact"],
        Option(
            help="greedy (default): the best of the others, improved; samullm: Algorithm 1; max, "
            "min: its rivals; exact: all schedules, for small applications"
        ),
    ] = "greedy"
    preemption: Annotated[
        bool,
        Option(flags=("no_preemption",), help="never stop a model or change its plan"),
    ] = True
    seed: Annotated[
        int,
        Option(help="of the answer lengths that are planned with (default %(default)s)"),
    ] = 0
    limit_s: Annotated[
        float,
        Option(
            flags=("time_limit",),
            metavar="SECONDS",
            help="for improving and for the exact search (default %(default)g)",
        ),
    ] = 20.0

    def __post_init__(self) -> None:
        check_options(self)
