"""The Python API: ``plan``, ``load_plan`` and ``Pipeline``. Import the names from ``llmpq``.

A plan is made without torch, on any machine. A pipeline starts one process for each stage of a
plan, loads the weights once and answers any number of calls. It works in scripts and notebooks.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast, get_type_hints

from llmpq.assigner import PlanRequest, make_plan
from llmpq.assigner.constraints.fixed_bits import with_stored_bits
from llmpq.assigner.request import default_gap
from llmpq.dist import Hosts, Prompt, Result, model_dir_of
from llmpq.dist import SamplingParams as SamplingParams
from llmpq.dist.async_engine import AsyncEngine as AsyncEngine
from llmpq.dist.async_engine import Session
from llmpq.dist.io.generation import GenerationRequest as GenerationRequest
from llmpq.dist.io.generation import TokenOutput as TokenOutput
from llmpq.dist.io.sampling_params import StructuredOutputsParams as StructuredOutputsParams
from llmpq.dist.io.sampling_params import TokenLogprobs
from llmpq.dist.launch.ranks import HostMonitor
from llmpq.dist.metrics.progress import RunProgress
from llmpq.errors import SpecError
from llmpq.options.declare import with_keywords
from llmpq.options.engine import SpeculationOptions
from llmpq.options.run import RunOptions
from llmpq.profiler.device import host_cpu, with_host_cpu
from llmpq.spec import catalog
from llmpq.spec.cluster import Cluster, cluster_of_lists, load_cluster
from llmpq.spec.fields import Fields, from_json
from llmpq.spec.plan import Plan, read_plan
from llmpq.spec.precision import DTYPE_BYTES, Dtype
from llmpq.spec.runtime_constants import KV_CODE_BITS
from llmpq.spec.workload import Workload

if TYPE_CHECKING:
    from llmpq.server.text.tokenizer import ChatEncoder

P = ParamSpec("P")
R = TypeVar("R")
ClusterLike = Cluster | str | Path | Mapping[str, Any]
Prompts = str | Sequence[str] | Sequence[Sequence[int]]
Messages = str | Sequence[Mapping[str, Any]]
Sampling = SamplingParams | Sequence[SamplingParams] | None


def _with_options(function: Callable[P, R]) -> Callable[P, R]:
    """Put the options of ``PlanRequest`` into a signature, for ``help`` and for completion."""
    signature = inspect.signature(function)
    *own, _ = signature.parameters.values()
    set_here = {"theta_s", "workload", "model_source", *signature.parameters}
    hints = get_type_hints(PlanRequest)
    fields = inspect.signature(PlanRequest).parameters.items()
    options = [
        field.replace(annotation=hints[name]) for name, field in fields if name not in set_here
    ]
    vars(function)["__signature__"] = signature.replace(parameters=[*own, *options])
    return function


@_with_options
def plan(  # noqa: PLR0913  what a plan is made from
    model: str | Path,
    *,
    batch: int = 1,
    prompt: int = 512,
    new: int = 128,
    max_model_len: int | None = None,
    cluster: ClusterLike | None = None,
    device_names: Sequence[str] = (),
    device_numbers: Sequence[int] = (),
    method: str = "llmpq",
    dtype: str = "auto",
    kv_bits: int = 16,
    theta: float | None = None,
    **options: Any,
) -> Plan:
    """Plan which device runs which layers, at how many bits, in micro-batches of what size.

    Args:
        model: catalogue name or directory with ``config.json``.
        batch: number of sequences in the batch.
        prompt: longest prompt, in tokens.
        new: new tokens of each sequence.
        max_model_len: tokens that a sequence may reach; ``prompt`` and ``new`` are then the usual
            lengths.
        cluster: a ``Cluster``, a cluster file, or the content of one as a mapping.
        device_names: instead of a cluster, device types of the catalogue, one node each.
        device_numbers: how many devices of each type; by default one.
        method: planning method, a name in ``llmpq.assigner.METHODS``.
        dtype: number format of what is not quantized; ``auto`` is the checkpoint's own.
        kv_bits: bits of a cached key or value; 16 keeps them in ``dtype``.
        theta: price of "every layer at 4 bits", in seconds.
        options: further fields of ``llmpq.assigner.PlanRequest``, such as ``bits``,
            ``quality_budget``, ``sensitivity``, ``time_limit_s``, ``profile_dir``.

    Raises:
        SpecError: an input cannot be accepted.
        InfeasibleError: no plan exists; the message says why.

    Examples:
        >>> found = plan("facebook/opt-30b", device_names=["T4-16G", "V100-32G"],
        ...              device_numbers=[3, 1], batch=32, prompt=512, new=100)
        >>> found.workload.batch, len(found.bits)
        (32, 48)
        >>> print(found.summary().splitlines()[0])
        facebook/opt-30b on t4-16gx3-v100-32gx1: 32 x 512 prompt tokens, 100 new tokens each, ...
    """
    spec, source = catalog.resolve_model(model)
    number_format = spec.dtype if dtype == "auto" else cast(Dtype, dtype)
    if number_format not in DTYPE_BYTES:
        raise SpecError(f"dtype: found '{dtype}', expected auto, {', '.join(DTYPE_BYTES)}")
    if kv_bits not in (*KV_CODE_BITS, 16):
        raise SpecError(f"kv_bits: found {kv_bits}, expected 4, 8 or 16")
    options.setdefault("gap", default_gap(options.get("solver", "exact")))
    known = inspect.signature(plan).parameters
    for name in sorted(set(options) - set(known)):
        near = get_close_matches(name, known, 1)
        meant = f"; did you mean '{near[0]}'?" if near else ""
        raise SpecError(f"plan: found option '{name}', expected a field of PlanRequest{meant}")
    request = PlanRequest(
        model=spec,
        model_source=None if source is None else str(source),
        cluster=_cluster(
            cluster,
            device_names,
            device_numbers,
            has_tables=options.get("profile_dir") is not None,
        ),
        workload=Workload(
            batch=batch, prompt_tokens=prompt, new_tokens=new, context_tokens=max_model_len
        ),
        dtype=number_format,
        kv_bits=kv_bits if kv_bits in KV_CODE_BITS else 8 * DTYPE_BYTES[number_format],
        theta_s=theta,
        **options,
    )
    return make_plan(with_stored_bits(request), method, command="llmpq.plan")


def load_plan(path: str | Path) -> Plan:
    """Read a strategy file, as ``Plan.save`` and ``llmpq-algo`` write it.

    Raises:
        SpecError: names the file and the field that is wrong.
    """
    return read_plan(path)


def _cluster(
    cluster: ClusterLike | None, names: Sequence[str], numbers: Sequence[int], *, has_tables: bool
) -> Cluster:
    found = catalog.with_known_types(_read_cluster(cluster, names, numbers), "cluster")
    return with_host_cpu(found, host_cpu(), has_tables=has_tables)


def _read_cluster(
    cluster: ClusterLike | None, names: Sequence[str], numbers: Sequence[int]
) -> Cluster:
    for what, value in (("device_names", names), ("device_numbers", numbers)):
        if isinstance(value, str | int):
            raise SpecError(f"{what}: found {value!r}, expected a list, such as [{value!r}]")
    if cluster is None:
        return cluster_of_lists(names, numbers or [1] * len(names))
    if names or numbers:
        raise SpecError("cluster: found together with device_names, expected one of them")
    if isinstance(cluster, Cluster):
        return cluster
    if isinstance(cluster, Mapping):
        return from_json(Cluster, Fields(dict(cluster), "cluster"))
    return load_cluster(cluster)


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The answer to a prompt.

    Attributes:
        id: place of the prompt in the call, from 0.
        prompt: the prompt, as given.
        token_ids: the new tokens; a stop token is the last one.
        text: the same as text, without special tokens; empty for a model without a tokenizer.
        finish_reason: ``stop`` by a stop token, ``length`` by reaching ``max_tokens``.
        logprobs: of each new token where the sampling parameters ask for them, else ``None``.
        prompt_logprobs: likewise of each token of the prompt, ``None`` for the first.
    """

    id: int
    prompt: str | tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputChunk:
    """What one step adds to an answer.

    Attributes:
        id: place of the prompt in the call, from 0.
        token_ids: the new tokens; none in the last chunk of an answer.
        text: the new text; the texts of all chunks together are the answer's text.
        finish_reason: as of ``Output`` in the last chunk, ``None`` before.
    """

    id: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None = None


class Pipeline:
    """The ranks of a plan as processes of this host: load once, answer many times.

    One call runs at a time; calls of several threads wait for each other. When a rank dies, the
    call raises a ``StageError`` that names it, all other ranks end, and later calls raise too.
    Interrupting a call (Ctrl-C) cancels its requests and keeps the pipeline.

    Args:
        strategy: a plan, or a strategy file.
        model: directory with the weights; the plan's own by default.
        options: those of ``RunOptions``, and ``speculative_config``, draft tokens to verify, such
            as ``{"num_speculative_tokens": 5}``: they change the time of an answer, not the answer.
        progress: receives loading and token events.
        hosts: this host's place, which is the master's; by default all ranks run here.
        monitor: watches the other hosts.

    Raises:
        LlmpqError: ``SpecError`` when the plan is not for this model, ``CapacityError`` when memory
            runs out, ``StageError`` when a rank fails.

    Examples:
        >>> with Pipeline(strategy, model=model_dir) as llm:
        ...     first = llm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=4))
        ...     again = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
        >>> [len(output.token_ids) for output in first]
        [4, 4]
        >>> again[0].token_ids == first[0].token_ids
        True
    """

    @with_keywords(RunOptions, SpeculationOptions)
    def __init__(
        self,
        strategy: Plan | str | Path,
        model: str | Path | None = None,
        *,
        progress: RunProgress | None = None,
        hosts: Hosts | None = None,
        monitor: HostMonitor | None = None,
        **options: Any,
    ) -> None:
        self.plan = strategy if isinstance(strategy, Plan) else load_plan(strategy)
        self._model_dir = model_dir_of(self.plan, model)
        self._lock = threading.Lock()
        self._session = Session(
            self.plan,
            self._model_dir,
            progress=progress,
            hosts=hosts,
            monitor=monitor,
            **options,
        )

    def generate(self, prompts: Prompts, sampling: Sampling = None) -> list[Output]:
        """Answer prompts; return when all of them are finished.

        Args:
            prompts: one text, several texts, or several lists of token ids.
            sampling: how tokens are chosen, for all prompts or one for each; greedy by default.

        Returns:
            One output for each prompt, in their order.

        Raises:
            SpecError: a prompt cannot be served (empty, too long for the plan, unknown tokens); no
                other one is answered either.
            StageError: a rank died, hung or failed, or the pipeline is closed.
        """
        batch = _as_prompts(prompts, sampling)
        with self._lock:
            results = self._session.generate(batch)
        return [
            Output(
                id=number,
                prompt=item.text if item.text is not None else item.token_ids or (),
                token_ids=result.token_ids,
                text=result.text,
                finish_reason=result.finish_reason,
                logprobs=result.logprobs,
                prompt_logprobs=result.prompt_logprobs,
            )
            for number, (item, result) in enumerate(zip(batch, results, strict=True))
        ]

    def stream(self, prompts: Prompts, sampling: Sampling = None) -> Iterator[OutputChunk]:
        """Answer prompts; yield every token as it is made.

        Leaving the loop early cancels what is not finished, and so does a later call.

        Args:
            prompts: as for :meth:`generate`.
            sampling: as for :meth:`generate`.

        Raises:
            LlmpqError: as :meth:`generate`.
        """
        with self._lock:
            answers = self._session.run(_as_prompts(prompts, sampling), streams=True)
        texts: dict[object, str] = {}
        while True:
            with self._lock:
                item = next(answers, None)
            if item is None:
                return
            number = cast(int, item.id)
            before = texts.get(number, "")
            if isinstance(item, Result):
                rest = item.text.removeprefix(before) if item.text.startswith(before) else ""
                yield OutputChunk(
                    id=number, token_ids=(), text=rest, finish_reason=item.finish_reason
                )
            else:
                texts[number] = before + item.text
                yield OutputChunk(id=number, token_ids=(item.token_id,), text=item.text)

    def chat(
        self,
        messages: Messages,
        sampling: SamplingParams | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Output:
        """Answer a conversation; its prompt is made as by the server.

        Args:
            messages: such as ``[{"role": "user", "content": "Hello"}]``, the last one to be
                answered; a text is that of a single message of the user.
            sampling: how tokens are chosen; greedy by default.
            chat_template_kwargs: variables of the model's chat template, such as
                ``{"enable_thinking": False}``.

        Returns:
            The answer. Its prompt is the tokens of the conversation.

        Raises:
            SpecError: the model has no chat template, it rejects the messages, or they are too long
                for the plan.
            StageError: as :meth:`generate`.
        """
        prompt = self._chat_prompt(messages, chat_template_kwargs)
        return self.generate([prompt], sampling)[0]

    def stream_chat(
        self,
        messages: Messages,
        sampling: SamplingParams | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[OutputChunk]:
        """Answer a conversation as :meth:`chat`; yield every token as it is made."""
        return self.stream([self._chat_prompt(messages, chat_template_kwargs)], sampling)

    def _chat_prompt(
        self, messages: Messages, variables: Mapping[str, Any] | None
    ) -> tuple[int, ...]:
        return self._encoder.encode(_as_messages(messages), variables or {})

    @cached_property
    def _encoder(self) -> ChatEncoder:
        try:
            from llmpq.server.text.tokenizer import ChatEncoder  # noqa: PLC0415  of an extra
        except ModuleNotFoundError as error:
            raise SpecError(
                f"chat: found no package '{error.name}', expected it: pip install 'llmpq[server]'"
            ) from None
        return ChatEncoder(self._model_dir)

    def close(self) -> None:
        """End all ranks; no process is left when this returns."""
        self._session.close()

    def __repr__(self) -> str:
        """Return the model and the number of stages."""
        return f"<Pipeline of {self.plan.model.name} in {len(self.plan.stages)} stages>"

    def __enter__(self) -> Pipeline:
        """Return itself; the ranks are loaded since construction."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the pipeline."""
        self.close()


def _listed(prompts: Prompts) -> list[str | tuple[int, ...]]:
    """Return the prompts, each a text or tokens."""
    if isinstance(prompts, str):
        return [prompts]
    _check_iterable("prompts", prompts)
    items: list[str | Sequence[int]] = list(prompts)
    for number, item in enumerate(items):
        _check_iterable(f"prompts[{number}]", item)
    return [item if isinstance(item, str) else tuple(item) for item in items]


def _check_iterable(what: str, value: object) -> None:
    if not isinstance(value, Iterable):
        raise SpecError(
            f"{what}: found {value!r}, expected a text or a list of token ids; several prompts, or "
            "one of tokens, are a list of these"
        )


def _as_messages(messages: Messages) -> Sequence[Mapping[str, Any]]:
    """Return the messages of a conversation, each with a role."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    _check_iterable("messages", messages)
    found: list[Any] = list(messages)
    if not found:
        raise SpecError("messages: found none, expected at least one")
    for number, message in enumerate(found):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise SpecError(
                f"messages[{number}]: found {message!r}, expected a mapping with a role, such as "
                "{'role': 'user', 'content': 'Hello'}"
            )
    return found


def _as_prompts(prompts: Prompts, sampling: Sampling) -> list[Prompt]:
    found = _listed(prompts)
    if sampling is None or isinstance(sampling, SamplingParams):
        sampling = [sampling or SamplingParams()] * len(found)
    if len(sampling) != len(found):
        raise SpecError(
            f"sampling: found {len(sampling)} parameters for {len(found)} prompts, "
            "expected one for each"
        )
    return [
        Prompt(
            id=number,
            where=f"prompt {number}",
            text=item if isinstance(item, str) else None,
            token_ids=None if isinstance(item, str) else item,
            sampling_params=params,
        )
        for number, (item, params) in enumerate(zip(found, sampling, strict=True))
    ]
