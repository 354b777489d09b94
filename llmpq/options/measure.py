"""Options of ``llmpq-profile``: what is measured, imported or corrected, and into which file."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from llmpq.errors import SpecError
from llmpq.options.declare import Option, check_options
from llmpq.spec.cluster import CPU_ISAS
from llmpq.spec.precision import BITS, DTYPE_BYTES

POINTS = 24
"""Points of the planned grid, per phase."""
ALL_BITS = tuple(sorted(BITS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """What every measurement has: a file to write, and how long it may take."""

    output: Annotated[Path, Option(parse=Path, help="latency table to write (CSV)")]
    budget: Annotated[float, Option(help="seconds to spend (default %(default)g)")] = 60.0
    seed: Annotated[int, Option(help="")] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredModel:
    """Of which model a layer or a plan is measured, and in which number formats."""

    model: Annotated[str, Option(help="directory with config.json and weights")]
    bits: Annotated[tuple[int, ...], Option(choices=BITS, help="")] = ALL_BITS
    dtype: Annotated[str, Option(choices=("auto", *DTYPE_BYTES), help="")] = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOptions:
    """How one decoder layer is timed, and at which shapes."""

    device: Annotated[str, Option(help="cpu, cuda or cuda:N (default %(default)s)")] = "cpu"
    device_type: Annotated[
        str | None, Option(help="name written into the table (default: cpu)")
    ] = None
    threads: Annotated[int, Option(minimum=1, help="CPU threads (default %(default)s)")] = 1
    core: Annotated[int | None, Option(help="first CPU core to run on (default: not pinned)")] = (
        None
    )
    cpu_isa: Annotated[
        str | None, Option(choices=CPU_ISAS, help="newest vector extension to use")
    ] = None
    cpu_share: Annotated[
        float | None,
        Option(
            metavar="SHARE",
            help="share of its threads' time that this process gets (default: the kernel's quota)",
        ),
    ] = None
    points: Annotated[
        int | None, Option(help=f"points per phase (default {POINTS}; with own sizes: none)")
    ] = None
    max_batch: Annotated[int, Option(help="")] = 32
    max_prompt: Annotated[int, Option(help="")] = 512
    max_context: Annotated[int | None, Option(help="default 1024, or the model's positions")] = None
    max_prefill: Annotated[int, Option(help="")] = 2048
    batches: Annotated[tuple[int, ...] | None, Option(minimum=1, help="")] = None
    prompt_tokens: Annotated[tuple[int, ...] | None, Option(minimum=1, help="")] = None
    context_tokens: Annotated[tuple[int, ...] | None, Option(minimum=1, help="")] = None
    layers: Annotated[
        int | None,
        Option(
            minimum=1,
            help="layers timed in a row (default: 6, or as many as no processor's cache holds)",
        ),
    ] = None
    companions: Annotated[int, Option(metavar="N", help="has no effect (deprecated)")] = 0
    resume: Annotated[bool, Option(help="continue an interrupted run")] = False
    in_worker: Annotated[bool, Option(help=argparse.SUPPRESS)] = False
    """Threads and vector extension are fixed when torch is imported; this option marks the process
    that was started with them set."""

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeDeviceOptions:
    """Which device is measured in itself."""

    device: Annotated[str, Option(help="torch's name, such as cuda:0 (%(default)s)")] = "cpu"
    threads: Annotated[int, Option(help="of a CPU worker (default %(default)s)")] = 1
    name: Annotated[str, Option(help="name of the type in the file")] = "this machine"
    features: Annotated[
        int | None, Option(help="of a square weight (default: 2048, on a GPU 8192)")
    ] = None
    store: Annotated[
        str | None,
        Option(
            metavar="DIR",
            help="of a CPU, measure the disk of this folder too, with a file of 512 MiB, in some "
            "2 s at 1 GB/s (default: that of the quantized weights; 'off' to leave it out)",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOptions:
    """Between which nodes messages are timed."""

    between: Annotated[
        tuple[str, str],
        Option(
            metavar=("NODE", "NODE"),
            help="their names in the cluster file; the same name twice for two workers of this "
            "host",
        ),
    ] = ("here", "here")
    cluster: Annotated[
        str | None,
        Option(help="name of the cluster; the table then counts for this cluster only"),
    ] = None
    sizes: Annotated[tuple[int, ...] | None, Option(help="bytes, multiples of 512")] = None
    append: Annotated[bool, Option(help="keep what --output already holds")] = False
    rendezvous: Annotated[Path | None, Option(parse=Path, help=argparse.SUPPRESS)] = None
    """Set in the two processes that a local measurement starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """Of which plan the memory is measured: one of a file, or even stages."""

    strategy: Annotated[
        Path | None, Option(parse=Path, help="a strategy file (default: even stages)")
    ] = None
    stages: Annotated[int, Option(help="CPU workers (default %(default)s)")] = 1
    kv_bits: Annotated[int | None, Option(choices=(4, 8, 16, 32), help="default: the dtype's")] = (
        None
    )
    shape: Annotated[tuple[int, int, int], Option(metavar=("BATCH", "PROMPT", "NEW"), help="")] = (
        8,
        248,
        8,
    )
    micro_batch: Annotated[tuple[int, int], Option(metavar=("PREFILL", "DECODE"), help="")] = (4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthsOptions:
    """From which answers a predictor of lengths learns.

    Raises:
        SpecError: neither a trace nor prompts with results are given, or both.
    """

    model: Annotated[
        str | None, Option(metavar="DIR", help="directory of the model that answered")
    ] = None
    prompts: Annotated[
        Path | None, Option(parse=Path, metavar="FILE.jsonl", help="prompts of llmpq-dist")
    ] = None
    results: Annotated[
        Path | None, Option(parse=Path, metavar="FILE.jsonl", help="its --output for them")
    ] = None
    format: Annotated[
        Literal["llmpq", "openai_batch"],
        Option(help="of both, as llmpq-dist --format (default %(default)s)"),
    ] = "llmpq"
    trace: Annotated[
        Path | None,
        Option(
            parse=Path,
            metavar="FILE",
            help="learn from lengths alone: a trace as llmpq-sim --trace takes it",
        ),
    ] = None

    def __post_init__(self) -> None:
        given = [self.model is not None, self.prompts is not None, self.results is not None]
        if self.trace is not None and any(given):
            raise SpecError("trace: found with model, prompts or results, expected it alone")
        if self.trace is None and not all(given):
            raise SpecError("trace: found none, expected one, or model, prompts and results")


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions:
    """With which law a table is fitted, and what it is compared with."""

    table: Annotated[Path, Option(parse=Path, help="latency table to fit (CSV)")]
    holdout: Annotated[
        Path | None, Option(parse=Path, help="latency table to compare with (CSV)")
    ] = None
    law: Annotated[Literal["hinged", "paper"], Option(help="")] = "hinged"
    seed: Annotated[int, Option(help="of the 30 %% held back otherwise")] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    """Which published measurements become a table."""

    layout: Annotated[str, Option(flags=("from",), help="")]
    device: Annotated[str | None, Option(help="the database's name, such as a100_sxm")] = None
    device_type: Annotated[str | None, Option(help="catalogue name written into the table")] = None
    model: Annotated[str | None, Option(help="catalogue name or directory")] = None
    path: Annotated[
        Path | None, Option(parse=Path, help="the database (default: the installed package)")
    ] = None
    engine: Annotated[
        str | None, Option(help="inference engine (default: the first that was measured)")
    ] = None
    dtype: Annotated[Literal["bfloat16", "float16"], Option(help="")] = "bfloat16"
    context_tokens: Annotated[int, Option(help="context length, where the layout has none")] = 512
    tensor_parallel: Annotated[
        int,
        Option(
            metavar="N",
            help="devices that share a layer; its seconds include all-reduces (aiconfigurator)",
        ),
    ] = 1
    between: Annotated[
        tuple[str, str] | None,
        Option(
            metavar=("NODE", "NODE"),
            help="write a link table of these nodes instead, from the send_recv.csv of --path "
            "(vidur); the same name twice for two devices of one node",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecalibrateOptions:
    """Which runs correct a table."""

    report: Annotated[
        tuple[Path, ...],
        Option(
            parse=Path,
            help="what llmpq-dist --report (or --json) wrote of a run; several runs count together",
        ),
    ]
    strat_file_name: Annotated[
        tuple[Path, ...],
        Option(parse=Path, help="the plan that ran: one for all reports, or one each"),
    ]
    node: Annotated[
        str | None,
        Option(help="only what ran on this node (default: every stage the table matches)"),
    ] = None
    model: Annotated[str | None, Option(help="directory or name (default: the plan's own)")] = None
