"""From the body of a request to what the engine needs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmpq.dist.io.sampling_params import SamplingParams, StructuredOutputsParams
from llmpq.errors import SpecError
from llmpq.server.errors import ApiError, bad_request
from llmpq.server.protocol import (
    ChatBody,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationBody,
    ResponseFormat,
    StructuredOutputs,
    TokenizeRequest,
)
from llmpq.server.text.chat_template import content_text
from llmpq.server.text.tokenizer import ServerTokenizer
from llmpq.server.tools import PreparedTools, prepare, template_messages
from llmpq.spec.facts.end_tokens import GENERATION_FILE
from llmpq.spec.fields import read_json
from llmpq.spec.gguf.header import find_gguf
from llmpq.spec.gguf.tokenizer import missing_tokenizer
from llmpq.spec.runtime_constants import MAX_CHOICES

MAX_SHARED_IDS = 1 << 18
"""Most entries of the lists of a request times its answers: each answer carries all of them."""
MAX_LOGPROB_VALUES = 1 << 22
"""Most log-probabilities of several answers, which the server holds for a slow client."""
DEFAULT_SAMPLING: Mapping[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""Where neither the request nor the model's generation_config.json has a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What requests are checked against: the model's name, its limits, its tokenizer.

    Attributes:
        names: by which requests name it; answers use the first.
        root: its directory.
        tokenizer: ``None`` for a model without one, which takes and gives tokens only.
        max_model_len: most tokens of prompt and answer together.
        vocab_size: tokens are below this number.
        created_s: when it was loaded, by the clock of the host.
        default_sampling: values for fields that a request leaves out.
        max_choices: most answers of a request.
    """

    names: tuple[str, ...]
    root: str
    tokenizer: ServerTokenizer | None
    max_model_len: int
    vocab_size: int
    created_s: int = 0
    default_sampling: Mapping[str, float] = field(default_factory=lambda: DEFAULT_SAMPLING)
    max_choices: int = MAX_CHOICES

    @property
    def name(self) -> str:
        """The name in answers."""
        return self.names[0]

    def check_name(self, name: str | None) -> None:
        """Check the model that a request names.

        Raises:
            ApiError: it is another one.
        """
        if name and name not in self.names:
            raise ApiError(404, f"The model `{name:.200}` does not exist.", param="model")

    def need_tokenizer(self, purpose: str) -> ServerTokenizer:
        """Return the tokenizer.

        Raises:
            ApiError: there is none.
        """
        if self.tokenizer is None:
            reason = missing_tokenizer(Path(self.root))
            raise bad_request(f"{reason[0].upper()}{reason[1:]}: {purpose}.")
        return self.tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """A prompt as tokens.

    Attributes:
        token_ids: at least one.
        sampling: of its answers, without a seed.
        echo: text that stands before each answer, ``None`` for none.
        is_continued: whether the text of an answer goes on where that of the prompt ends.
    """

    token_ids: tuple[int, ...]
    sampling: SamplingParams
    echo: str | None = None
    is_continued: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A request, ready for the engine.

    Attributes:
        prompts: in the order of the request; each gets ``n`` answers.
        n: answers to each prompt.
        seed: of the first answer; the others use the numbers that follow. ``None`` for any.
        stop: stop strings.
        include_stop: whether the text of an answer ends with its stop string or stop token.
        skip_special_tokens: whether special tokens are left out of texts.
        echoes_tokens: whether the tokens of the prompt belong to the answer's log-probabilities.
        generates: false when an answer is the prompt alone (``max_tokens`` of 0).
        priority: of the queue.
        cache_salt: of the prefix cache.
        tools: how the answers are split; ``None`` where they are text only.
        prompt_text: of a conversation.
        kept_tokens: special tokens that stay in the text of answers.
    """

    prompts: tuple[EncodedPrompt, ...]
    n: int
    seed: int | None = None
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    echoes_tokens: bool = False
    generates: bool = True
    priority: int = 0
    cache_salt: str = ""
    tools: PreparedTools | None = None
    prompt_text: str = ""
    kept_tokens: frozenset[str] = frozenset()

    @property
    def num_choices(self) -> int:
        """Answers in all."""
        return len(self.prompts) * self.n

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts, each counted once."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)


def default_sampling_of(model_dir: Path) -> Mapping[str, float]:
    """Return the default sampling of a model: ``generation_config.json``, as vLLM reads it.

    Raises:
        SpecError: the file cannot be read, or a value in it is not a number.
    """
    gguf = find_gguf(model_dir)
    path = (model_dir if gguf is None else gguf.parent) / GENERATION_FILE
    found = read_json(path) if path.is_file() else {}
    values = dict(DEFAULT_SAMPLING)
    if not isinstance(found, dict) or found.get("do_sample") is False:
        return values
    for name in values:
        value = found.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise SpecError(f"{path}: field '{name}': found {value!r}, expected a number")
        values[name] = value
    return values


async def work_of_completion(body: CompletionRequest, model: ServedModel) -> Work:
    """Encode the prompts of a completion request and check all its fields.

    Raises:
        ApiError: it cannot be served.
    """
    if body.suffix:
        raise bad_request("suffix is not supported.", "suffix")
    echo = bool(body.echo)
    max_tokens = 16 if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not echo:
        raise bad_request("max_tokens must be at least 1 unless echo is true.", "max_tokens")
    sampling = await _sampling(body, model, max(1, max_tokens))
    prompts = []
    for prompt, encoded in zip(body.prompt, await _encode(body, model), strict=True):
        token_ids = _truncate(encoded, body, model)
        echoed = None
        if echo:
            echoed = prompt if isinstance(prompt, str) else _decode(token_ids, model)
        prompts.append(_encoded(token_ids, sampling, model, echoed))
    generates = max_tokens > 0
    return _work(body, model, prompts, echoes_tokens=echo, generates=generates)


async def _encode(body: CompletionRequest, model: ServedModel) -> list[list[int]]:
    """Return the tokens of the prompts."""
    texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
    if not texts:
        return [list(prompt) for prompt in body.prompt if not isinstance(prompt, str)]
    tokenizer = model.need_tokenizer("send prompts as lists of tokens")
    return await tokenizer.encode_async(
        texts,
        max_tokens=model.max_model_len,
        add_special_tokens=body.add_special_tokens is not False,
    )


async def work_of_chat(body: ChatCompletionRequest, model: ServedModel) -> Work:
    """Render and encode the messages of a chat request and check all its fields.

    Raises:
        ApiError: it cannot be served.
    """
    tokenizer = model.need_tokenizer("chat needs one")
    tools = prepare(body, await tokenizer.template())
    text = await _render(body, tokenizer, tools.messages, tools.tools)
    (token_ids,) = await tokenizer.encode_async(
        [text],
        max_tokens=model.max_model_len,
        add_special_tokens=bool(body.add_special_tokens),
    )
    token_ids = _truncate(token_ids, body, model)
    max_tokens = body.max_completion_tokens or body.max_tokens
    if max_tokens is None:
        max_tokens = max(1, model.max_model_len - len(token_ids))
    last = body.messages[-1]
    echo = content_text(last.get("content")) if body.echo and last["role"] == "assistant" else None
    sampling = await _sampling(body, model, max_tokens)
    grammar = tools.grammar(text, tokenizer.special_tokens)
    sampling = _with_grammar(sampling, tools, grammar)
    prompt = _encoded(token_ids, sampling, model, echo)
    prompt = replace(prompt, is_continued=bool(body.continue_final_message))
    work = _work(body, model, [prompt])
    if tools.is_plain:
        return work
    kept_tokens = tools.kept_tokens(tokenizer.special_tokens)
    return replace(work, tools=tools, prompt_text=text, kept_tokens=kept_tokens)


def _with_grammar(
    sampling: SamplingParams, tools: PreparedTools, grammar: str | None
) -> SamplingParams:
    """Give answers the form of tool calls."""
    if grammar is None:
        return sampling
    if sampling.structured_outputs is None:
        return replace(sampling, structured_outputs=StructuredOutputsParams(grammar=grammar))
    if tools.choice == "required":
        raise bad_request(
            "tool_choice: expected no response_format and no structured_outputs beside a call that "
            "is required.",
            "tool_choice",
        )
    return sampling


async def encode_chat(
    body: ChatBody | TokenizeRequest, model: ServedModel, *, add_special_tokens: bool
) -> list[int]:
    """Return the tokens of a conversation.

    Raises:
        ApiError: the model has no chat template, or it rejects the messages.
    """
    tokenizer = model.need_tokenizer("chat needs one")
    messages = template_messages(body.messages or (), await tokenizer.template())
    text = await _render(body, tokenizer, messages, body.tools or None)
    (token_ids,) = await tokenizer.encode_async(
        [text], max_tokens=model.max_model_len, add_special_tokens=add_special_tokens
    )
    return token_ids


async def _render(
    body: ChatBody | TokenizeRequest,
    tokenizer: ServerTokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
) -> str:
    """Return the prompt of a conversation; templates test for tools by ``is not none``."""
    if isinstance(body, ChatBody) and body.chat_template is not None:
        raise bad_request("chat_template: the server uses the model's own.", "chat_template")
    variables = dict(body.chat_template_kwargs or {})
    if isinstance(body, ChatBody) and body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    continues = bool(body.continue_final_message)
    adds = body.add_generation_prompt
    return await tokenizer.render(
        messages,
        tools=tools,
        add_generation_prompt=not continues if adds is None else adds,
        continue_final_message=continues,
        variables={name: value for name, value in variables.items() if name != "messages"},
    )


def _truncate(token_ids: list[int], body: GenerationBody, model: ServedModel) -> list[int]:
    limit = body.truncate_prompt_tokens
    if limit is None:
        return token_ids
    if limit == 0 or limit > model.max_model_len:
        raise bad_request(
            f"truncate_prompt_tokens: expected -1, or 1 to {model.max_model_len}.",
            "truncate_prompt_tokens",
        )
    if limit < 0:
        limit = model.max_model_len - 1
    return token_ids[:limit] if body.truncation_side == "right" else token_ids[-limit:]


def _encoded(
    token_ids: Sequence[int], sampling: SamplingParams, model: ServedModel, echo: str | None
) -> EncodedPrompt:
    """Check one prompt."""
    max_tokens = sampling.max_tokens or 0
    if not token_ids:
        raise bad_request("The prompt is empty: expected at least one token.", "prompt")
    largest = max(token_ids)
    if largest >= model.vocab_size:
        raise bad_request(
            f"Token id {largest} is out of vocabulary, which has {model.vocab_size} tokens.",
            "prompt",
        )
    if len(token_ids) + max_tokens > model.max_model_len:
        raise bad_request(
            f"This model's maximum context length is {model.max_model_len} tokens. However, you "
            f"requested {max_tokens} output tokens and your prompt contains {len(token_ids)} input "
            "tokens. Please reduce the length of the prompt or the number of output tokens.",
            "max_tokens",
        )
    return EncodedPrompt(token_ids=tuple(token_ids), sampling=sampling, echo=echo)


def _work(
    body: GenerationBody,
    model: ServedModel,
    prompts: list[EncodedPrompt],
    *,
    echoes_tokens: bool = False,
    generates: bool = True,
) -> Work:
    n = body.n or 1
    if body.best_of is not None and body.best_of != n:
        raise bad_request(
            f"best_of: found {body.best_of}, expected none or n = {n}: all answers are returned.",
            "best_of",
        )
    _check_size(prompts, n, model)
    stop = body.stop_strings
    if stop:
        model.need_tokenizer("use stop_token_ids instead of stop")
    return Work(
        prompts=tuple(prompts),
        n=n,
        seed=body.seed,
        stop=stop,
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        echoes_tokens=echoes_tokens,
        generates=generates,
    )


def _check_size(prompts: Sequence[EncodedPrompt], n: int, model: ServedModel) -> None:
    """Check what the answers of a request take together."""
    count, sampling = n * len(prompts), prompts[0].sampling
    if count > model.max_choices:
        raise bad_request(
            f"n: found {count} answers ({len(prompts)} prompts with n = {n}), expected at most "
            f"{model.max_choices} (--max_num_choices).",
            "n",
        )
    ids = (
        len(sampling.stop_token_ids)
        + len(sampling.logit_bias)
        + len(sampling.allowed_token_ids or ())
        + sum(map(len, sampling.bad_words_ids))
    )
    if ids * count > MAX_SHARED_IDS:
        raise bad_request(
            "stop_token_ids, logit_bias, allowed_token_ids, bad_words: found "
            f"{ids} entries for each of {count} answers, expected at most {MAX_SHARED_IDS} in all.",
            "n",
        )
    values = 0
    if sampling.logprobs is not None:
        values += count * (sampling.max_tokens or 0) * (sampling.logprobs + 1)
    if sampling.prompt_logprobs is not None:
        tokens = n * sum(len(prompt.token_ids) for prompt in prompts)
        values += tokens * (sampling.prompt_logprobs + 1)
    if count > 1 and values > MAX_LOGPROB_VALUES:
        raise bad_request(
            f"logprobs: found up to {values} values in {count} answers, expected at most "
            f"{MAX_LOGPROB_VALUES}.",
            "logprobs",
        )


async def _sampling(
    body: CompletionRequest | ChatCompletionRequest, model: ServedModel, max_tokens: int
) -> SamplingParams:
    """Check the sampling, which all prompts of a request share."""
    if body.use_beam_search:
        raise bad_request("use_beam_search is not supported.", "use_beam_search")
    chosen = {name: getattr(body, name) for name in DEFAULT_SAMPLING}
    values: dict[str, Any] = {
        name: model.default_sampling[name] if value is None else value
        for name, value in chosen.items()
    }
    values["top_k"] = int(values["top_k"])
    logprobs, prompt_logprobs = _logprobs(body)
    bad_words = await _bad_words(body.bad_words or (), model)
    try:
        sampling = SamplingParams(
            **values,
            max_tokens=max_tokens,
            min_tokens=body.min_tokens or 0,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            logit_bias=_logit_bias(body.logit_bias),
            bad_words_ids=bad_words,
            allowed_token_ids=_optional_tuple(body.allowed_token_ids),
            stop_token_ids=_stop_token_ids(body, model),
            ignore_eos=bool(body.ignore_eos),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            structured_outputs=_structured_outputs(body.structured_outputs, body.response_format),
        )
        sampling.check_tokens(model.vocab_size)
    except SpecError as error:
        raise bad_request(str(error)) from None
    return sampling


def _logprobs(
    body: CompletionRequest | ChatCompletionRequest,
) -> tuple[int | None, int | None]:
    """Return the numbers of log-probabilities of the answer and of the prompt."""
    if isinstance(body, ChatCompletionRequest):
        return ((body.top_logprobs or 0) if body.logprobs else None), body.prompt_logprobs
    of_prompt = body.prompt_logprobs
    return body.logprobs, body.logprobs if body.echo and of_prompt is None else of_prompt


def _stop_token_ids(body: GenerationBody, model: ServedModel) -> tuple[int, ...]:
    """Return the tokens that end an answer: stop strings that are special tokens have no text."""
    found = list(body.stop_token_ids or ())
    if model.tokenizer is not None:
        special = (model.tokenizer.special_token(text) for text in body.stop_strings)
        found += [token for token in special if token is not None and token < model.vocab_size]
    return tuple(found)


def _optional_tuple(values: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(values)


def _logit_bias(bias: Mapping[str, float] | None) -> tuple[tuple[int, float], ...]:
    found = {}
    for name, value in (bias or {}).items():
        if not (name.isascii() and name.isdecimal() and len(name) < 10):
            raise bad_request("logit_bias: expected token ids as keys.", "logit_bias")
        found[int(name)] = min(max(value, -100.0), 100.0)
    return tuple(found.items())


async def _bad_words(words: Sequence[str], model: ServedModel) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each word at the start of a text and after a space."""
    if not words:
        return ()
    tokenizer = model.need_tokenizer("bad_words needs one")
    found = []
    texts = [text for word in words for text in (word.lstrip(), " " + word.lstrip())]
    encoded = await tokenizer.encode_async(
        texts, max_tokens=model.max_model_len, add_special_tokens=False
    )
    for plain, spaced in zip(encoded[::2], encoded[1::2], strict=True):
        if not plain:
            raise bad_request("bad_words: expected words that are not empty.", "bad_words")
        found.append(tuple(plain))
        if spaced[:1] != plain[:1] and len(spaced) == len(plain):
            found.append(tuple(spaced))
    return tuple(found)


def _structured_outputs(
    wanted: StructuredOutputs | None, response: ResponseFormat | None
) -> StructuredOutputsParams | None:
    if wanted is not None:
        if wanted.structural_tag is not None:
            raise bad_request("structured_outputs.structural_tag is not supported.")
        schema = wanted.json_schema
        return StructuredOutputsParams(
            json=schema if schema is None or isinstance(schema, str) else json.dumps(schema),
            regex=wanted.regex,
            choice=None if wanted.choice is None else tuple(wanted.choice),
            grammar=wanted.grammar,
            json_object=wanted.json_object or None,
        )
    if response is None or response.type == "text":
        return None
    if response.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    if response.json_schema is None or response.json_schema.schema_ is None:
        raise bad_request("response_format: expected json_schema.schema.", "response_format")
    return StructuredOutputsParams(json=json.dumps(response.json_schema.schema_))


def _decode(token_ids: Sequence[int], model: ServedModel) -> str:
    if model.tokenizer is None:
        return ""
    return model.tokenizer.decode(token_ids)
