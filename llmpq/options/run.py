"""Options of the ranks of a run: how they are watched, connected, loaded and placed."""

from __future__ import annotations

import argparse
import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from llmpq.batching.length import PREDICTOR_NAMES
from llmpq.options.declare import Option, check_options
from llmpq.spec.plan import POLICY_NAMES
from llmpq.units import GIB

Transport = Literal["auto", "sockets", "torch", "gloo"]
Pooling = Literal["last", "mean"]
"""How the final hidden states of a prompt become one: that of its last token, or their mean."""
WORKER_PORT = 29400
MODEL_HELP = "folder, GGUF file, or model of the hub: ORG/NAME[:revision or GGUF file]"
_MAX_PORT = 65535


def host_name(text: str) -> str:
    """Return the host that an option names: a name or an address, IPv6 with brackets or without.

    Raises:
        argparse.ArgumentTypeError: it holds more, such as a scheme or a port.
    """
    host = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    is_name = bool(host) and not set(host) & set("[]/@ :")
    if not is_name and not _is_address(host):
        raise argparse.ArgumentTypeError(
            f"found {text!r}, expected a host name or an address, without scheme and port"
        )
    return host


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def worker_address(text: str) -> tuple[str, int]:
    """Return host and port of ``HOST`` or ``HOST:PORT``.

    Raises:
        argparse.ArgumentTypeError: it is neither.
    """
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]") or (":" in host.strip("[]") and not host.startswith("[")):
        return host_name(text), WORKER_PORT
    if not port.isdecimal() or not 0 < int(port) <= _MAX_PORT:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected HOST or HOST:PORT")
    return host_name(host), int(port)


def address_text(address: tuple[str, int]) -> str:
    """Return an address as it is written on a command line."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def absolute_path(given: str | Path | None) -> Path | None:
    """Return the absolute path of a file or folder that an option names."""
    return None if given is None else Path(given).resolve()


def _pairs(
    given: Mapping[str, str] | Iterable[tuple[str, str]] | None,
) -> tuple[tuple[str, str], ...]:
    return tuple(dict(given or {}).items())


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandOptions:
    """What every command has: its version, output for machines, a log."""

    version: Annotated[bool, Option(help="show program's version number and exit")] = False
    json: Annotated[bool, Option(help="print one JSON object")] = False
    verbose: Annotated[bool, Option(short="v", help="log the steps")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The verb that ``llmpq`` is given, and the rest of its command line."""

    verb: Annotated[
        str | None, Option(is_positional=True, metavar="VERB", help="one of those below")
    ] = None
    words: Annotated[tuple[str, ...], Option(is_positional=True, help=argparse.SUPPRESS)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of the ranks of a plan, whatever they answer.

    Raises:
        SpecError: a value cannot be used.
    """

    step_timeout_s: Annotated[
        float,
        Option(
            flags=("step_timeout",),
            minimum=0.5,
            metavar="SECONDS",
            help="a rank without a sign of life for this time has failed (default %(default)g)",
        ),
    ] = 10.0
    store: Annotated[
        Path | None,
        Option(
            accept=absolute_path,
            metavar="DIR|off",
            help="cache of quantized layers, so that the next start quantizes nothing",
        ),
    ] = None
    store_limit_bytes: Annotated[
        int,
        Option(
            flags=("store_limit",),
            unit=GIB,
            maximum=2**60,
            metavar="GIB",
            help="size of the cache; least recently used entries are deleted (default %(default)g)",
        ),
    ] = 32 * GIB
    kernel: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="kernel to use wherever it can run, such as bnb_int8_cpu (default: the fastest; "
            "docs/reference/support.md lists all)",
        ),
    ] = None
    captures: Annotated[
        bool,
        Option(
            flags=("enforce_eager", "no_cuda_graphs"),
            help="run decode steps operator by operator: no CUDA graphs on GPUs, no compiled steps "
            "on CPUs",
        ),
    ] = True
    pins_workers: Annotated[
        bool, Option(flags=("no_pin",), help="do not pin CPU workers to cores")
    ] = True
    cores: Annotated[
        tuple[int, ...],
        Option(
            accept=tuple,
            help="CPU cores of the ranks, those of rank 0 first (default: all of this process)",
        ),
    ] = ()
    environment: Annotated[
        tuple[tuple[str, str], ...],
        Option(accept=_pairs, help="variables of the ranks besides those of this process"),
    ] = ()
    transport: Annotated[
        Transport,
        Option(
            help="sockets: unix sockets and shared memory inside a host, TCP between hosts; torch "
            "(gloo: its old name): torch.distributed, unauthenticated, NCCL between GPUs; auto: "
            "torch between GPUs of one host, and where torchrun, srun or mpirun start the command"
        ),
    ] = "auto"

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """This host's place among those of a run."""

    nnodes: Annotated[int, Option(help="number of hosts")] = 1
    node_rank: Annotated[int, Option(help="number of this host; 0 is the master")] = 0
    master_addr: Annotated[
        str | None, Option(parse=host_name, help="address of host 0 that rank 0 listens on")
    ] = None
    master_port: Annotated[int, Option(help="its port (default %(default)s)")] = 29500
    token_file: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="secret shared by all hosts (mode 600); required unless --master_addr is this "
            "host",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Where a worker listens, and what it lends."""

    key_file: Annotated[
        Path,
        Option(metavar="FILE", help="secret that all hosts share (mode 600, at least 16 bytes)"),
    ]
    host: Annotated[
        str,
        Option(parse=host_name, help="address to listen on (default %(default)s: this host only)"),
    ] = "127.0.0.1"
    port: Annotated[
        int,
        Option(maximum=_MAX_PORT, help="its port; 0 takes a free one (default %(default)s)"),
    ] = WORKER_PORT
    model: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            help="weights on this host (default: the path of the other host, or the hub's cache)",
        ),
    ] = None
    no_measure: Annotated[
        bool, Option(help="lend devices that were not measured with the catalogue's figures")
    ] = False

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersOptions:
    """The hosts whose workers a command uses."""

    workers: Annotated[
        tuple[tuple[str, int], ...],
        Option(
            parse=worker_address,
            metavar="HOST[:PORT]",
            help="plan over the devices of this host and of these, where llmpq worker runs "
            f"(default port {WORKER_PORT})",
        ),
    ] = ()
    key_file: Annotated[
        Path | None, Option(metavar="FILE", help="--workers: the secret that all hosts share")
    ] = None
    replan_timeout_s: Annotated[
        float,
        Option(
            flags=("replan_timeout",),
            above=0,
            metavar="SECONDS",
            help="after the loss of a host: time for a new plan over the others and the start of "
            "its ranks there, else the command ends with status 3 (default %(default)g)",
        ),
    ] = 120.0

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlanOptions(WorkersOptions):
    """The plan of a model for this host and its workers.

    Raises:
        SpecError: a value cannot be used.
    """

    given: Annotated[str | None, Option(is_positional=True, metavar="MODEL", help=MODEL_HELP)] = (
        None
    )
    max_num_seqs: Annotated[
        int,
        Option(minimum=1, metavar="N", help="answers at the same time (default %(default)s)"),
    ] = 1
    replan: Annotated[bool, Option(help="do not use the plan that is kept")] = False
    no_measure: Annotated[
        bool,
        Option(help="plan with the catalogue's figures of devices that were not measured before"),
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """What a model on this host is asked."""

    model: Annotated[str, Option(is_positional=True, metavar="MODEL", help=MODEL_HELP)]
    system: Annotated[
        str | None, Option(metavar="TEXT", help="message of the system, before all others")
    ] = None
    prompt: Annotated[
        str | None,
        Option(short="p", metavar="TEXT", help="what to continue (default: standard input)"),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFiles:
    """Files of a run that answers prompts, and what becomes of prompts that cannot be served."""

    strat_file_name: Annotated[str | None, Option(metavar="FILE", help="strategy file")] = None
    model: Annotated[
        str | None, Option(metavar="DIR", help="weights (default: the directory in the plan)")
    ] = None
    prompts: Annotated[str, Option(metavar="FILE.jsonl", help="prompts")]
    format: Annotated[
        Literal["llmpq", "openai_batch"],
        Option(
            help="format of --prompts and --output; openai_batch: OpenAI's Batch files, whose "
            "requests say how tokens are chosen (default %(default)s)"
        ),
    ] = "llmpq"
    output: Annotated[str, Option(metavar="FILE.jsonl", help="answers")]
    resume: Annotated[bool, Option(help="skip the requests that --output already answers")] = False
    report: Annotated[
        str | None,
        Option(metavar="FILE.json", help="write the predicted-against-measured report too"),
    ] = None
    plot: Annotated[str | None, Option(metavar="FILE.png", help="draw the report")] = None
    trace: Annotated[
        str | None,
        Option(
            metavar="FILE.json",
            help="write a timeline of all ranks, for Perfetto or chrome://tracing",
        ),
    ] = None
    bad_prompts: Annotated[
        Literal["skip", "refuse"],
        Option(
            help="skip: answer the other prompts, then exit with status 2; refuse: answer none "
            "(default %(default)s)"
        ),
    ] = "skip"


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplicationRun:
    """Files of the run of an application, and what becomes of prompts that are too long."""

    resume: Annotated[bool, Option(help="go on with the folder of a run that was ended")] = False
    model: Annotated[
        tuple[str, ...],
        Option(
            repeats=True,
            metavar="NAME=DIR",
            help="folder of the weights of a model of the application (default: its own)",
        ),
    ] = ()
    format: Annotated[
        Literal["llmpq", "openai_batch"],
        Option(
            help="openai_batch: write the answers of every node as a file of OpenAI's Batch API, "
            "too (default %(default)s); requests are read in both formats"
        ),
    ] = "llmpq"
    plot: Annotated[
        str | None,
        Option(metavar="FILE.png", help="draw the stages, predicted and measured"),
    ] = None
    overflow: Annotated[
        Literal["refuse", "skip"],
        Option(
            help="refuse: load nothing if a prompt does not fit the context of its model, or "
            "answers may be too long for the next prompt; skip: leave such requests out and "
            "report them (default %(default)s)"
        ),
    ] = "refuse"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingOptions:
    """The batching policy of a run or a simulation, where it is not the strategy's own."""

    policy: Annotated[
        str | None,
        Option(
            choices=POLICY_NAMES,
            help="batching policy (default: the strategy's own schedule, else hybrid)",
        ),
    ] = None
    bins: Annotated[
        int | None,
        Option(
            metavar="K",
            help="multibin: number of bins, each with the same share of requests (default 4)",
        ),
    ] = None
    predictor: Annotated[
        str,
        Option(
            metavar="NAME|FILE.json",
            help=f"multibin: predictor of answer lengths: {', '.join(PREDICTOR_NAMES)}, or what "
            "llmpq-profile lengths wrote (default %(default)s)",
        ),
    ] = "oracle"
    predictor_error: Annotated[
        float,
        Option(
            metavar="SIGMA",
            help="--predictor noisy: standard deviation of the logarithm (default %(default)g)",
        ),
    ] = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftOptions:
    """What is done when answer lengths differ from those of the schedule."""

    replan: Annotated[
        bool,
        Option(help="rra: adjust the encoding frequency to the answer lengths, without a restart"),
    ] = False
    lengths_out: Annotated[
        str | None,
        Option(
            metavar="FILE.json",
            help="write the lengths of all answers, for llmpq-algo --lengths (default: next to "
            "--output, only after a workload shift)",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherOptions:
    """What starts the processes of a run."""

    launcher: Annotated[
        Literal["local", "ray"],
        Option(
            help="local: processes of this host; ray: nodes of a Ray cluster, whose label "
            "llmpq-device is the device types of a node in the plan (default %(default)s)"
        ),
    ] = "local"
    ray_address: Annotated[
        str | None,
        Option(help="with --launcher ray: the cluster (default: the one that Ray finds)"),
    ] = None
    auto: Annotated[
        bool,
        Option(flags=("no_auto",), help="run one rank, as torchrun's environment says"),
    ] = True


@dataclass(frozen=True, kw_only=True)
class DrainOptions:
    """How long requests may go on once a run or a server is asked to end.

    Raises:
        SpecError: a value cannot be used.
    """

    drain_timeout_s: Annotated[
        float,
        Option(
            flags=("drain_timeout",),
            metavar="SECONDS",
            help="time for running requests to finish after SIGTERM or Ctrl-C; a second signal "
            "ends them at once (default %(default)g)",
        ),
    ] = 30.0

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, kw_only=True)
class RestartOptions:
    """How often ranks are started again after one was lost.

    Raises:
        SpecError: a value cannot be used.
    """

    max_restarts: Annotated[
        int,
        Option(
            metavar="N",
            help="start the ranks again up to N times within 300 s of serving after one was lost; "
            "requests are recomputed, and fail after two deaths in a row without a token of theirs "
            "(default %(default)s)",
        ),
    ] = 3

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, kw_only=True)
class FaultOptions(DrainOptions, RestartOptions):
    """What becomes of a batch when a rank is lost, or when it is asked to end."""

    health: Annotated[
        Path | None, Option(metavar="FILE.json", help="file to update with the state of the run")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions(RunOptions, RestartOptions):
    """Options of ranks that serve until they are closed, and are started again after a fault."""

    form_timeout_s: Annotated[
        float,
        Option(
            flags=("form_timeout",),
            above=0,
            metavar="SECONDS",
            help="processor time to compile the form of an answer (structured_outputs), in a "
            "process of its own (default %(default)g)",
        ),
    ] = 2.0
