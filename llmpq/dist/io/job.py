"""Job: everything the ranks of one run are told, as a file between the launcher and its workers.

Needs no torch.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from llmpq.batching.length import ORACLE, Prediction, PredictorName
from llmpq.dist.io.sampling_params import GREEDY, SamplingParams, sampling_from_fields
from llmpq.errors import SpecError
from llmpq.spec.codec import from_json, to_json
from llmpq.spec.fields import Fields, dump_json, read_json, write_text
from llmpq.spec.plan import Plan
from llmpq.spec.precision import DTYPE_BYTES
from llmpq.spec.schedule import Schedule
from llmpq.units import GIB

Task = Literal["generate", "serve", "hidden", "doctor"]
Transport = Literal["auto", "gloo"]
MIN_STEP_TIMEOUT_S = 0.5
BEATS_PER_TIMEOUT = 5
"""Signs of life within a step timeout: a machine that is merely busy may swallow some."""
DEFAULT_STORE_LIMIT_BYTES = 32 * GIB
START_TIMEOUT_S = 120.0
"""How long a rank may take to start and to meet the others: importing torch takes a while."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the ranks of a run find each other; exactly one of the three ways.

    Attributes:
        file: a file in a folder that only this user can enter, for ranks of one host.
        address: host and port that rank 0 listens on.
        from_environment: torchrun's own store, named by its environment variables.
        folder: private to this user, for the socket files of one host's ranks; that of ``file``
            where there is one.
        token_file: holds the secret that ranks of several hosts share.
    """

    file: Path | None = None
    address: tuple[str, int] | None = None
    from_environment: bool = False
    folder: Path | None = None
    token_file: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftHandling:
    """What is done when answers are not those that the schedule was made for.

    Attributes:
        replans: whether RRA goes on with another number of decode iterations.
        lengths: where the lengths seen are written, for a new search; ``None`` for nowhere.
    """

    replans: bool = False
    lengths: Path | None = None


TOLD_ONLY = DriftHandling()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run.

    Attributes:
        strategy: the strategy file.
        model_dir: where the weights are, on every host.
        prompts: the prompt file, or the socket that ``serve`` takes requests from; only the master
            reads it.
        output: the result file; only the master writes it, and not under ``serve``.
        task: ``generate`` answers the prompts; ``serve`` answers batches of requests until the
            other end of the socket closes it; ``hidden`` passes the prompts through all layers and
            writes the states after the last one, as safetensors, one tensor a micro-batch;
            ``doctor`` only examines what a run would need.
        resume: whether to skip what the result file already holds.
        sampling: how tokens are chosen.
        step_timeout_s: how long a rank may give no sign of life.
        rendezvous: where the ranks find each other.
        transport: ``auto`` takes the fastest that each link allows; ``gloo`` is torch's own.
        trace: where the master writes what every rank did when; ``None`` for nowhere.
        schedule: the batching policy to obey; ``None`` is the strategy's own.
        prediction: what policies are told of answer lengths.
        store: folder of quantized layers, ``None`` for none.
        store_limit_bytes: what it may hold.
        kernel: backend that multiplies wherever it can run; ``None`` leaves it to the registry.
        captures: whether GPUs may capture decode steps as CUDA graphs.
        pins_workers: whether CPU workers keep to cores of their own where there are enough.
        drift: what is done when answers are not those that the schedule was made for.
        skips_bad_prompts: whether prompts that cannot be served are put aside and told of, instead
            of ending the run before it begins.
        launcher_pid: the process that started the workers of this host; they end with it.
            0 when something else (torchrun) did.
    """

    strategy: Path
    model_dir: Path
    prompts: Path
    output: Path
    task: Task = "generate"
    resume: bool = False
    sampling: SamplingParams = GREEDY
    step_timeout_s: float = 10.0
    rendezvous: Rendezvous = Rendezvous(from_environment=True)
    transport: Transport = "auto"
    trace: Path | None = None
    schedule: Schedule | None = None
    prediction: Prediction = ORACLE
    store: Path | None = None
    store_limit_bytes: int = DEFAULT_STORE_LIMIT_BYTES
    kernel: str | None = None
    captures: bool = True
    pins_workers: bool = True
    skips_bad_prompts: bool = False
    drift: DriftHandling = TOLD_ONLY
    launcher_pid: int = 0

    def __post_init__(self) -> None:
        if not MIN_STEP_TIMEOUT_S <= self.step_timeout_s < math.inf:
            raise SpecError(
                f"step_timeout: found {self.step_timeout_s}, "
                f"expected at least {MIN_STEP_TIMEOUT_S} seconds"
            )


def check_plan(plan: Plan, model_dir: Path, num_layers: int) -> None:
    """Make sure that the plan is for this model and asks for what the runtime does.

    Raises:
        SpecError: it is for another model, or keeps keys and values at other bits.
    """
    if num_layers != plan.model.num_layers:
        raise SpecError(
            f"{model_dir}: found {num_layers} decoder layers, expected the "
            f"{plan.model.num_layers} of the plan's model {plan.model.name}"
        )
    width = 8 * DTYPE_BYTES[plan.dtype]
    if plan.kv_bits not in (8, width):
        raise SpecError(
            f"plan: field 'kv_bits': found {plan.kv_bits}, expected 8 or {width}: keys and values "
            f"are quantized, or held in the plan's dtype {plan.dtype}"
        )


def write_job(path: Path, job: Job) -> None:
    """Write a job for the workers of this host."""
    write_text(path, dump_json(_job_to_json(job)))


def read_job(path: Path) -> Job:
    """Read a job; ``SpecError`` names the field that is wrong."""
    fields = Fields(read_json(path), str(path))
    job = Job(
        strategy=Path(fields.text("strategy")),
        model_dir=Path(fields.text("model_dir")),
        prompts=Path(fields.text("prompts")),
        output=Path(fields.text("output")),
        task=cast(Task, fields.text("task", choices=get_args(Task))),
        resume=fields.flag("resume"),
        sampling=sampling_from_fields(fields.child("sampling")),
        step_timeout_s=fields.number("step_timeout_s"),
        rendezvous=_rendezvous(fields.child("rendezvous")),
        transport=cast(Transport, fields.text("transport", choices=get_args(Transport))),
        trace=_optional_path(fields, "trace"),
        schedule=from_json(Schedule, fields.child("schedule")) if fields.has("schedule") else None,
        prediction=_prediction(fields.child("prediction")),
        store=_optional_path(fields, "store"),
        store_limit_bytes=fields.integer("store_limit_bytes"),
        kernel=fields.optional_text("kernel"),
        captures=fields.flag("captures"),
        pins_workers=fields.flag("pins_workers"),
        skips_bad_prompts=fields.flag("skips_bad_prompts"),
        drift=_drift(fields.child("drift")),
        launcher_pid=fields.integer("launcher_pid"),
    )
    fields.done()
    return job


def _job_to_json(job: Job) -> dict[str, Any]:
    rendezvous = job.rendezvous
    return {
        "strategy": str(job.strategy),
        "model_dir": str(job.model_dir),
        "prompts": str(job.prompts),
        "output": str(job.output),
        "task": job.task,
        "resume": job.resume,
        "sampling": asdict(job.sampling),
        "step_timeout_s": job.step_timeout_s,
        "rendezvous": {
            "file": None if rendezvous.file is None else str(rendezvous.file),
            "host": None if rendezvous.address is None else rendezvous.address[0],
            "port": None if rendezvous.address is None else rendezvous.address[1],
            "from_environment": rendezvous.from_environment,
            "folder": None if rendezvous.folder is None else str(rendezvous.folder),
            "token_file": None if rendezvous.token_file is None else str(rendezvous.token_file),
        },
        "transport": job.transport,
        "trace": None if job.trace is None else str(job.trace),
        **({} if job.schedule is None else {"schedule": to_json(job.schedule)}),
        "prediction": asdict(job.prediction),
        "store": None if job.store is None else str(job.store),
        "store_limit_bytes": job.store_limit_bytes,
        "kernel": job.kernel,
        "captures": job.captures,
        "pins_workers": job.pins_workers,
        "skips_bad_prompts": job.skips_bad_prompts,
        "drift": {
            "replans": job.drift.replans,
            "lengths": None if job.drift.lengths is None else str(job.drift.lengths),
        },
        "launcher_pid": job.launcher_pid,
    }


def _optional_path(fields: Fields, name: str) -> Path | None:
    text = fields.optional_text(name)
    return None if text is None else Path(text)


def _prediction(fields: Fields) -> Prediction:
    prediction = Prediction(
        predictor=cast(PredictorName, fields.text("predictor")),
        error=fields.number("error"),
        seed=fields.integer("seed"),
    )
    fields.done()
    return prediction


def _drift(fields: Fields) -> DriftHandling:
    drift = DriftHandling(replans=fields.flag("replans"), lengths=_optional_path(fields, "lengths"))
    fields.done()
    return drift


def _rendezvous(fields: Fields) -> Rendezvous:
    file, host = fields.optional_text("file"), fields.optional_text("host")
    port = fields.optional_integer("port", minimum=1, maximum=65535)
    rendezvous = Rendezvous(
        file=None if file is None else Path(file),
        address=None if host is None or port is None else (host, port),
        from_environment=fields.flag("from_environment"),
        folder=_optional_path(fields, "folder"),
        token_file=_optional_path(fields, "token_file"),
    )
    fields.done()
    return rendezvous
