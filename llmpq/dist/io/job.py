"""Job: the input of all ranks of a run, a file from launcher to workers, and its checks.

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from llmpq.batching.length import ORACLE, Prediction
from llmpq.batching.speculation import SpeculativeConfig
from llmpq.dist.io.sampling_params import GREEDY, SamplingParams
from llmpq.errors import SpecError
from llmpq.logging import get_logger
from llmpq.options.engine import EngineOptions
from llmpq.options.limits import planned_speculation
from llmpq.options.run import RunOptions
from llmpq.spec.catalog import resolve_model
from llmpq.spec.fields import (
    Fields,
    digest_of,
    dump_json,
    from_json,
    read_json,
    to_json,
    write_text,
)
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.model import ModelSpec
from llmpq.spec.model_files.config import absolute_model_path
from llmpq.spec.plan import Plan, Schedule
from llmpq.spec.precision import DTYPE_BYTES
from llmpq.spec.runtime_constants import KV_CODE_BITS

_log = get_logger(__name__)
Task = Literal["generate", "serve", "online", "hidden", "doctor"]
TOKENIZER_FILE = "tokenizer.json"
BEATS_PER_TIMEOUT = 5
"""Signs of life within a step timeout: a busy machine may delay some of them."""
START_TIMEOUT_S = 120.0
"""How long a rank may take to start and to connect: importing torch takes a while."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the ranks of a run find each other; exactly one of the three ways.

    Attributes:
        file: a file in a folder that only this user can enter, for ranks of one host.
        address: host and port that rank 0 listens on.
        from_environment: torchrun's own store, named by its environment variables.
        folder: private to this user, for the socket files of one host's ranks; unused where
            there is a ``file``, whose folder they are in.
        token_file: holds the secret that ranks of several hosts share.
    """

    file: Path | None = None
    address: tuple[str, int] | None = None
    from_environment: bool = False
    folder: Path | None = None
    token_file: Path | None = None

    @property
    def private_folder(self) -> Path | None:
        """The launcher's folder on this host, ``None`` under torchrun."""
        return self.folder if self.file is None else self.file.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(RunOptions):
    """Everything a run needs: plan, model, prompts, where its output goes, and its options.

    Attributes:
        strategy: the strategy file.
        model_dir: where the weights are, on every host.
        prompts: the prompt file, or the socket that ``serve`` takes requests from; only the master
            reads it.
        output: the result file; only the master writes it, and not under ``serve``.
        task: ``generate`` answers the prompts, ``serve`` batches of requests until the socket is
            closed; ``hidden`` writes the states after the last layer, as safetensors, one tensor a
            micro-batch; ``doctor`` only examines what a run would need.
        resume: whether to skip what the result file already holds.
        trace: file for the time line of every rank; ``None`` for none.
        schedule: the batching policy; ``None`` is the strategy's own.
        prediction: what policies know of answer lengths.
        skips_bad_prompts: whether prompts that cannot be served are skipped and reported; otherwise
            one of them ends the run before it begins.
        replans: whether RRA changes its number of decode iterations after drift.
        lengths: file for the observed answer lengths, the input of a new search; ``None`` for none.
        engine: options of the task ``online``; its ``speculative_config`` is that of all tasks.
        start_s, launch_s: when the command began, and when it started the workers of this host, by
            ``time.perf_counter``; ``None`` if that is not known.
        launcher_pid: the process that started the workers of this host; they end with it.
            0 under torchrun.
    """

    strategy: Path
    model_dir: Path
    prompts: Path
    output: Path
    task: Task = "generate"
    resume: bool = False
    sampling: SamplingParams = GREEDY
    rendezvous: Rendezvous = Rendezvous(from_environment=True)
    trace: Path | None = None
    schedule: Schedule | None = None
    prediction: Prediction = ORACLE
    skips_bad_prompts: bool = False
    replans: bool = False
    lengths: Path | None = None
    engine: EngineOptions = field(default_factory=EngineOptions)
    start_s: float | None = None
    launch_s: float | None = None
    launcher_pid: int = 0


def check_plan(plan: Plan, model_dir: Path, num_layers: int) -> None:
    """Check that the plan is for this model and asks for what the runtime does."""
    if num_layers != plan.model.num_layers:
        raise SpecError(
            f"{model_dir}: found {num_layers} decoder layers, expected the "
            f"{plan.model.num_layers} of the plan's model {plan.model.name}"
        )
    width = 8 * DTYPE_BYTES[plan.dtype]
    if plan.kv_bits not in (*KV_CODE_BITS, width):
        raise SpecError(
            f"plan: field 'kv_bits': found {plan.kv_bits}, expected 4, 8 or {width}: keys and "
            f"values are quantized, or held in the plan's dtype {plan.dtype}"
        )


def check_model(plan: Plan, model_dir: Path, model: ModelSpec) -> None:
    """Check that the plan is for a model of these sizes, as far as its own model is known.

    Checkpoints of one model in other formats, and fine-tuned ones, have its sizes.

    Args:
        plan: the plan.
        model_dir: directory of the weights, for messages.
        model: what is there.

    Raises:
        SpecError: the plan is for another model, or asks for what the runtime does not do.
    """
    check_plan(plan, model_dir, model.num_layers)
    recorded = dict(plan.provenance.inputs).get("model")
    if recorded is None or recorded == digest_of(asdict(model)):
        return
    own = _own_model(plan)
    if own is None:
        named = replace(model, name=plan.model.name)
        same = (named, replace(named, stored=(), stored_head=None))
        if recorded not in [digest_of(asdict(one)) for one in same]:
            _log.warning(
                "%s: found %s; the plan's model %s may be another one: it is not here to compare",
                model_dir,
                _described(model),
                plan.model.name,
            )
        return
    message = (
        f"{model_dir}: found {_described(model)}, expected the plan's model {plan.model.name}: "
        f"{_described(own)}"
    )
    if _sizes(own) != _sizes(model):
        raise SpecError(f"{message}; make a plan with llmpq-algo --model {model_dir}")
    if own.family != model.family:
        _log.warning("%s; the plan's times, memory and quality are those of its own model", message)


def _own_model(plan: Plan) -> ModelSpec | None:
    """Return the model that a plan was made for; ``None`` if it is not here."""
    source = plan.model.source
    if source is not None and not Path(source).exists():
        return None
    try:
        return resolve_model(source or plan.model.name)[0]
    except SpecError:
        return None


def _sizes(model: ModelSpec) -> tuple[int, tuple[int, ...]]:
    """Return the hidden size and the linear weights of every layer."""
    weights = tuple(sum(op.weight_parameters for op in layer.linears) for layer in model.layers)
    return model.hidden_size, weights


def _described(model: ModelSpec) -> str:
    weights = sum(_sizes(model)[1])
    return (
        f"a {model.family} of {model.num_layers} layers, hidden size {model.hidden_size}, "
        f"{weights:,} weights in its layers"
    )


def schedule_of(plan: Plan, asked: Schedule | None) -> Schedule:
    """Return the schedule of a run: the one asked for, else the plan's own, else hybrid.

    Raises:
        SpecError: it does not fit the plan's stages.
    """
    found = asked or plan.schedule or Schedule(policy="hybrid")
    if found.policy == "waa" and not plan.is_split:
        # On one ring, decode steps queue behind prefills, which WAA is to avoid.
        raise SpecError(
            "schedule: found policy 'waa' for stages that do both phases, expected a plan with "
            "stages of their own for either, as llmpq-algo --policy waa makes"
        )
    if plan.is_split and found.policy != "waa":
        raise SpecError(
            f"schedule: found policy '{found.policy}', expected 'waa': this plan has stages of "
            "their own for prefill and for decode"
        )
    return found


def write_job(path: Path, job: Job) -> None:
    """Write a job for the workers of this host."""
    write_text(path, dump_json(to_json(job)))


def read_job(path: Path) -> Job:
    """Read a job; ``SpecError`` names the field that is wrong."""
    return from_json(Job, Fields(read_json(path), str(path)))


def checked_speculation(
    plan: Plan, config: SpeculativeConfig | None, model_dir: Path
) -> SpeculativeConfig | None:
    """Return a run's speculative decoding with the absolute path of its draft model.

    Args:
        plan: whose draft model is taken where none is asked for.
        config: as asked for.
        model_dir: directory of the model that answers.

    Raises:
        SpecError: the draft model has another vocabulary: another size, or another token in its
            ``tokenizer.json``, where both have one.
    """
    config = config or planned_speculation(plan)
    if config is None or config.model is None:
        return config
    folder = absolute_model_path(config.model)
    found, expected = load_model_dir(folder).vocab_size, load_model_dir(model_dir).vocab_size
    if found != expected:
        raise SpecError(
            f"{folder / 'config.json'}: field 'vocab_size': found {found}, expected the {expected} "
            f"of {model_dir / 'config.json'}: a draft model shares the vocabulary"
        )
    _check_tokens(folder / TOKENIZER_FILE, model_dir / TOKENIZER_FILE)
    return replace(config, model=str(folder))


def _check_tokens(own: Path, other: Path) -> None:
    """Compare the tokens of two tokenizers, where both are files that differ."""
    if not (own.is_file() and other.is_file()) or own.read_bytes() == other.read_bytes():
        return
    found, expected = _tokens(own), _tokens(other)
    for number in sorted(found.keys() | expected.keys()):
        if found.get(number) != expected.get(number):
            raise SpecError(
                f"{own}: field 'model.vocab': found token {number} {found.get(number)!r}, expected "
                f"{expected.get(number)!r} as in {other}: a draft model shares the vocabulary"
            )


def _tokens(file: Path) -> dict[int, str]:
    """Return the tokens of a tokenizer by their number."""
    fields = read_json(file)
    if not isinstance(fields, Mapping) or not isinstance(fields.get("model"), Mapping):
        raise SpecError(f"{file}: field 'model': found nothing, expected a tokenizer's model")
    vocab: Any = fields["model"].get("vocab", {})
    if isinstance(vocab, Mapping):
        tokens = {number: token for token, number in vocab.items()}
    else:  # of a unigram model: pieces with their scores
        tokens = {number: piece for number, (piece, _) in enumerate(vocab)}
    return tokens | {item["id"]: item["content"] for item in fields.get("added_tokens", ())}
