"""OpenAI's completions and chat completions: bodies to requests, and deltas to answers."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from llmpq.dist.io.detokenizer import IncrementalDecoder
from llmpq.dist.io.sampling_params import (
    MIN_LOGPROB,
    SamplingParams,
    StructuredOutputsParams,
    TokenLogprobs,
)
from llmpq.errors import SpecError
from llmpq.server.apis.answer_events import AnswerSplitter
from llmpq.server.errors import ApiError, bad_request, validation_error
from llmpq.server.json_output import PING, SharedItems, SharedList
from llmpq.server.protocol import (
    ChatBody,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationBody,
    PromptBody,
    ResponseFormat,
    StreamOptions,
    StructuredOutputs,
    TokenIds,
    TokenizeRequest,
)
from llmpq.server.service import (
    DEFAULT_SAMPLING,
    ChoiceDelta,
    Json,
    PreparedRequest,
    PromptLogprobs,
    ServedModel,
    TokenUsage,
)
from llmpq.server.text.chat_template import content_text
from llmpq.server.text.tokenizer import ServerTokenizer
from llmpq.server.tools import (
    AnswerParts,
    PreparedTools,
    TextDelta,
    chat_delta,
    prepare,
    template_messages,
    template_tools,
)

MAX_SHARED_IDS = 1 << 18
"""Most entries of the lists of a request times its answers: each answer carries all of them."""
MAX_LOGPROB_VALUES = 1 << 22
"""Most log-probabilities of several answers, which the server holds for a slow client."""


async def prepare_completion(
    body: CompletionRequest, model: ServedModel, request_id: str
) -> CompletionFormat:
    """Encode the prompts of a completion request and check all its fields.

    Raises:
        ApiError: it cannot be served.
    """
    if body.suffix:
        raise bad_request("suffix is not supported.", "suffix")
    max_tokens = 16 if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo:
        raise bad_request("max_tokens must be at least 1 unless echo is true.", "max_tokens")
    sampling = await _sampling(body, model, max(1, max_tokens))
    prompts, echoes = [], []
    encoded = await encode_prompts(body.prompt, body, model)
    for prompt, token_ids in zip(body.prompt, encoded, strict=True):
        if body.echo:
            echoes.append(prompt if isinstance(prompt, str) else _decode(token_ids, model))
        prompts.append(_checked(token_ids, sampling, model))
    request = _prepared(
        body, model, prompts, sampling, echoes=tuple(echoes), generates=max_tokens > 0
    )
    return CompletionFormat(body, model, request, f"cmpl-{request_id}")


async def encode_prompts(
    prompts: Sequence[str | TokenIds], body: PromptBody, model: ServedModel
) -> list[list[int]]:
    """Return the tokens of the prompts of a request, cut as it says.

    Raises:
        ApiError: a prompt is a text and there is no tokenizer, or it cannot be cut so.
    """
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if texts:
        tokenizer = model.need_tokenizer("send prompts as lists of tokens")
        encoded = await tokenizer.encode_async(
            texts,
            max_tokens=model.max_model_len,
            add_special_tokens=body.add_special_tokens is not False,
        )
    else:
        encoded = [list(prompt) for prompt in prompts if not isinstance(prompt, str)]
    return [_truncate(token_ids, body, model) for token_ids in encoded]


async def prepare_chat(
    body: ChatCompletionRequest, model: ServedModel, request_id: str
) -> ChatFormat:
    """Render and encode the messages of a chat request and check all its fields.

    Raises:
        ApiError: it cannot be served.
    """
    return ChatFormat(body, model, await chat_request(body, model), f"chatcmpl-{request_id}")


def chat_of(**fields: Any) -> ChatCompletionRequest:
    """Return a conversation that a client of another API sent.

    Raises:
        ApiError: a field cannot be used.
    """
    try:
        return ChatCompletionRequest(**fields)
    except ValidationError as error:
        raise validation_error(error.errors()) from None


async def chat_request(
    body: ChatCompletionRequest, model: ServedModel, *, cuts_max_tokens: bool = False
) -> PreparedRequest:
    """Return the request of a conversation.

    Args:
        body: the conversation.
        model: that answers.
        cuts_max_tokens: whether a longest answer that does not fit becomes one that does.

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
    most = max(1, model.max_model_len - len(token_ids))
    max_tokens = body.max_completion_tokens or body.max_tokens or most
    if cuts_max_tokens:
        max_tokens = min(max_tokens, most)
    last = body.messages[-1]
    echoes: tuple[str, ...] = ()
    if body.echo and last["role"] == "assistant":
        echoes = (content_text(last.get("content")),)
    sampling = await _sampling(body, model, max_tokens)
    grammar = tools.grammar(text, tokenizer.special_tokens)
    form = sampling.structured_outputs
    sampling = _with_grammar(sampling, tools, grammar)
    if form is not None and not body.continue_final_message:
        behind = tools.form_grammar(form, text, tokenizer.special_tokens)
        if behind is not None:
            sampling = replace(sampling, structured_outputs=StructuredOutputsParams(grammar=behind))
    request = _prepared(
        body,
        model,
        [_checked(token_ids, sampling, model)],
        sampling,
        echoes=echoes,
        is_continued=bool(body.continue_final_message),
    )
    if tools.is_plain:
        return request
    kept_tokens = tools.kept_tokens(tokenizer.special_tokens)
    return replace(request, tools=tools, prompt_text=text, kept_tokens=kept_tokens)


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
    text = await _render(body, tokenizer, messages, template_tools(body.tools or ()) or None)
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


def _truncate(token_ids: list[int], body: PromptBody, model: ServedModel) -> list[int]:
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


def _checked(
    token_ids: Sequence[int], sampling: SamplingParams, model: ServedModel
) -> tuple[int, ...]:
    """Check one prompt."""
    max_tokens = sampling.max_tokens or 0
    check_tokens(token_ids, model, "prompt")
    if len(token_ids) + max_tokens > model.max_model_len:
        raise bad_request(
            f"This model's maximum context length is {model.max_model_len} tokens. However, you "
            f"requested {max_tokens} output tokens and your prompt contains {len(token_ids)} input "
            "tokens. Please reduce the length of the prompt or the number of output tokens.",
            "max_tokens",
        )
    return tuple(token_ids)


def check_tokens(token_ids: Sequence[int], model: ServedModel, param: str) -> None:
    """Check that a prompt has tokens, all of them in the vocabulary.

    Raises:
        ApiError: names the field ``param``.
    """
    if not token_ids:
        raise bad_request("The prompt is empty: expected at least one token.", param)
    largest = max(token_ids)
    if largest >= model.vocab_size:
        raise bad_request(
            f"Token id {largest} is out of vocabulary, which has {model.vocab_size} tokens.", param
        )


def _prepared(
    body: GenerationBody,
    model: ServedModel,
    prompts: Sequence[tuple[int, ...]],
    sampling: SamplingParams,
    **more: Any,
) -> PreparedRequest:
    n = body.n or 1
    if body.best_of is not None and body.best_of != n:
        raise bad_request(
            f"best_of: found {body.best_of}, expected none or n = {n}: all answers are returned.",
            "best_of",
        )
    _check_size(prompts, sampling, n, model)
    stop = body.stop_strings
    if stop:
        model.need_tokenizer("use stop_token_ids instead of stop")
    return PreparedRequest(
        prompts=tuple(prompts),
        sampling=sampling,
        n=n,
        seed=body.seed,
        stop=stop,
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        **more,
    )


def check_count(num_prompts: int, n: int, model: ServedModel, param: str = "n") -> None:
    """Check the number of answers of a request.

    Raises:
        ApiError: they are too many; names the field ``param``.
    """
    count = n * num_prompts
    if count > model.max_choices:
        raise bad_request(
            f"{param}: found {count} answers ({num_prompts} prompts with n = {n}), expected at "
            f"most {model.max_choices} (--max_num_choices).",
            param,
        )


def _check_size(
    prompts: Sequence[tuple[int, ...]], sampling: SamplingParams, n: int, model: ServedModel
) -> None:
    """Check what the answers of a request take together."""
    count = n * len(prompts)
    check_count(len(prompts), n, model)
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
        tokens = n * sum(map(len, prompts))
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


OwnBody = TypeVar("OwnBody", bound=GenerationBody)


class _OpenAIFormat(Generic[OwnBody]):
    """What completions and chat completions share.

    Args:
        body: of the request.
        model: that answers.
        request: what is answered.
        id: of the answer.
    """

    list_field = "choices"
    ping = PING
    end_of_stream = b"data: [DONE]\n\n"
    kind, chunk_kind = "text_completion", "text_completion"

    def __init__(
        self, body: OwnBody, model: ServedModel, request: PreparedRequest, id: str
    ) -> None:
        self.request = request
        self._body = body
        self._options = body.stream_options or StreamOptions()
        self._model = model
        self._head = {"id": id, "created": int(time.time())}
        self._tokenizer = None if body.return_tokens_as_token_ids else model.tokenizer

    def items(self, delta: ChoiceDelta) -> list[Json]:
        """Return the choice of a whole answer."""
        return [self._choice(delta, is_chunk=False)]

    def whole(self, usage: TokenUsage) -> Json:
        """Return the object around the choices."""
        return {**self._frame(self.kind, []), "usage": self._usage(usage)}

    def opening(self) -> list[Json]:
        """Return nothing: the first delta opens a completion."""
        return []

    def events(self, delta: ChoiceDelta) -> list[Json]:
        """Return the chunk of a delta."""
        return [self._chunk(delta, self._choice(delta, is_chunk=True))]

    def closing(self, usage: TokenUsage) -> list[Json]:
        """Return the chunk with the numbers of tokens, if it is asked for."""
        if not self._options.include_usage:
            return []
        return [{**self._frame(self.chunk_kind, []), "usage": self._usage(usage)}]

    def failure(self, error: ApiError) -> list[Json]:
        """Return the error."""
        return [error.to_json()]

    def _choice(self, delta: ChoiceDelta, *, is_chunk: bool) -> Json:
        """Return a choice of a chunk, or of the whole answer when the delta is all of it."""
        raise NotImplementedError

    def _chunk(self, delta: ChoiceDelta, choice: Json) -> Json:
        frame = self._frame(self.chunk_kind, [choice])
        if self._options.continuous_usage_stats:
            prompt_tokens = len(self.request.prompt_of(delta.index))
            counts = (prompt_tokens, delta.num_cached_tokens, delta.num_tokens)
            frame["usage"] = self._usage(TokenUsage(*counts), delta.index)
        elif self._options.include_usage:
            frame["usage"] = None
        return frame

    def _usage(self, usage: TokenUsage, index: int | None = None) -> Json:
        """Return the numbers of tokens of one answer, or of all."""
        del index
        return {
            "prompt_tokens": usage.prompt_tokens,
            "total_tokens": usage.prompt_tokens + usage.new_tokens,
            "completion_tokens": usage.new_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        }

    def _frame(self, kind: str, choices: list[Json]) -> Json:
        head = self._head
        return {
            "id": head["id"],
            "object": kind,
            "created": head["created"],
            "model": self._model.name,
            "choices": choices,
        }

    def _name(self, token_id: int) -> str:
        """Return how log-probabilities name a token: by its text, else by its number."""
        if self._tokenizer is None:
            return f"token_id:{token_id}"
        return self._tokenizer.token_text(token_id)

    def _prompt_logprobs(self, found: PromptLogprobs | None) -> list[Json | None]:
        """Return vLLM's ``prompt_logprobs``: for each position the tokens with rank and text."""
        return [None if item is None else self._position_json(item) for item in found or ()]

    def _position_json(self, item: TokenLogprobs) -> Json:
        ranks = {token: rank for rank, (token, _) in enumerate(item.top, start=1)}
        pairs = {item.token_id: item.logprob, **dict(item.top)}
        return {
            str(token): {
                "logprob": max(value, MIN_LOGPROB),
                "rank": ranks.get(token),
                "decoded_token": self._name(token),
            }
            for token, value in pairs.items()
        }


class CompletionFormat(_OpenAIFormat[CompletionRequest]):
    """Choices of ``/v1/completions``."""

    _echoed: tuple[int, Mapping[str, SharedItems]] = (-1, {})  # of the last prompt

    def _choice(self, delta: ChoiceDelta, *, is_chunk: bool) -> Json:
        """Return a choice; its first one begins with the echo of the prompt."""
        found = self.request.echo_of(delta.index)
        echo, is_echoed = found or "", delta.is_first and found is not None
        choice: Json = {
            "index": delta.index,
            "text": echo * is_echoed + delta.text,
            "logprobs": None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._body.logprobs is not None:
            offsets = [len(echo) + offset for offset in delta.offsets]
            own = self._logprobs(delta.token_ids, delta.logprobs, offsets)
            if is_echoed:
                echoed = self._logprobs_of(delta)
                own = {name: SharedList(echoed[name], values) for name, values in own.items()}
            choice["logprobs"] = own
        if delta.is_first and not is_chunk and self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._prompt_logprobs(delta.prompt_logprobs)
        if self._body.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if delta.is_first:
                choice["prompt_token_ids"] = list(self.request.prompt_of(delta.index))
        return choice

    def _logprobs(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs | None],
        offsets: Sequence[int],
    ) -> Json:
        values, names, tops = [], [], []
        for token_id, found in zip(token_ids, logprobs, strict=True):
            names.append(self._name(token_id))
            values.append(None if found is None else max(found.logprob, MIN_LOGPROB))
            tops.append(None if found is None else self._tops(found))
        return {
            "text_offset": list(offsets),
            "token_logprobs": values,
            "tokens": names,
            "top_logprobs": tops,
        }

    def _logprobs_of(self, delta: ChoiceDelta) -> Mapping[str, SharedItems]:
        """Return the log probabilities of a prompt, which are made once for all its answers."""
        number = delta.index // self.request.n
        if self._echoed[0] != number:
            found = self._logprobs(
                self.request.prompts[number],
                delta.prompt_logprobs or (),
                self._offsets_of(number),
            )
            self._echoed = number, {name: SharedItems(items) for name, items in found.items()}
        return self._echoed[1]

    def _offsets_of(self, number: int) -> list[int]:
        """Return where the text of each token begins in the echo of a prompt."""
        tokenizer = self._model.tokenizer
        decode = None if tokenizer is None else tokenizer.decoder(skip_special_tokens=True)
        decoder, echo = IncrementalDecoder(decode), self.request.echoes[number]
        offsets, pieces = [], []
        for token in self.request.prompts[number]:
            offsets.append(decoder.num_characters)
            pieces.append(decoder.add(token))
        text = "".join([*pieces, decoder.finish()])
        # Some decoders drop the space before the first token.
        dropped = len(echo) - len(text) if echo.endswith(text) else 0
        return [dropped + offset for offset in offsets]

    def _tops(self, found: TokenLogprobs) -> dict[str, float]:
        """Return the best tokens and the chosen one, which may be one of them."""
        wanted = found.top[: self._body.logprobs]
        pairs = [(found.token_id, found.logprob), *wanted]
        tops: dict[str, float] = {}
        for token_id, value in pairs:
            tops.setdefault(self._name(token_id), max(value, MIN_LOGPROB))
        return tops


class ChatFormat(_OpenAIFormat[ChatCompletionRequest]):
    """Choices of ``/v1/chat/completions``."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(
        self, body: ChatCompletionRequest, model: ServedModel, request: PreparedRequest, id: str
    ) -> None:
        super().__init__(body, model, request, id)
        self._splitter = AnswerSplitter(request)
        generates = not body.continue_final_message and body.add_generation_prompt is not False
        self._role = "assistant" if generates else str(body.messages[-1]["role"])

    def opening(self) -> list[Json]:
        """Return the chunks with the role of each answer."""
        return [self._opening(index) for index in range(self.request.num_choices)]

    def _usage(self, usage: TokenUsage, index: int | None = None) -> Json:
        details = {"reasoning_tokens": self._splitter.reasoning_tokens(index)}
        return {**super()._usage(usage), "completion_tokens_details": details}

    def _opening(self, index: int) -> Json:
        echo = self.request.echo_of(index) or ""
        choice = {
            "index": index,
            "delta": {"role": self._role, "content": echo},
            "logprobs": None,
            "finish_reason": None,
        }
        return self._chunk(ChoiceDelta(index=index), choice)

    def _choice(self, delta: ChoiceDelta, *, is_chunk: bool) -> Json:
        choice: Json = {
            "index": delta.index,
            "logprobs": self._logprobs(delta) if self._body.logprobs else None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        events = self._splitter.events(delta)
        if self._splitter.ends_in_calls(delta):
            choice["finish_reason"] = "tool_calls"
        if is_chunk:
            choice["delta"] = chat_delta(events)
        else:
            parts = AnswerParts()
            parts.add([TextDelta(self.request.echo_of(delta.index) or ""), *events])
            choice["message"] = {"role": self._role, "refusal": None, **parts.message()}
        if self._body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        if delta.is_first and not is_chunk and self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._prompt_logprobs(delta.prompt_logprobs)
        return choice

    def _logprobs(self, delta: ChoiceDelta) -> Json:
        content = []
        for found in delta.logprobs:
            tops = found.top[: self._body.top_logprobs or 0]
            entry = self._entry(found.token_id, found.logprob)
            entry["top_logprobs"] = [self._entry(token, value) for token, value in tops]
            content.append(entry)
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> Json:
        return {
            "token": self._name(token_id),
            "logprob": max(logprob, MIN_LOGPROB),
            "bytes": self._bytes(token_id),
        }

    def _bytes(self, token_id: int) -> list[int]:
        """Return the bytes of a token, which may be a part of a character."""
        if self._tokenizer is None:
            return list(self._name(token_id).encode())
        return list(self._tokenizer.token_bytes(token_id))
