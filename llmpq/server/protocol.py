"""Bodies of requests, with the field names of OpenAI and vLLM 0.33.

Unknown fields are accepted and logged once each. Ranges that every sampler shares are checked by
``SamplingParams``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StrictBool,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from llmpq.logging import get_logger

MAX_CHOICES = 128
"""Largest ``n``."""
MAX_PROMPTS = 2048
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
MAX_LOGPROBS = 20
MAX_STOP_TOKENS = 1024
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKENS = 1 << 17
MAX_WORDS = 1024
MAX_TOOLS = 1024
MAX_MESSAGES = 4096
MAX_TEMPLATE_VARIABLES = 64
MAX_DETOKENIZED = 1 << 20
MAX_UNKNOWN_NAMES = 256
MAX_DEPTH = 64
"""Levels of lists and objects in a message or a tool."""
_INT64 = 2**63

logger = get_logger(__name__)
_logged: set[str] = set()

TokenIds = tuple[int, ...]


def _check_text(value: object) -> object:
    """Reject lone surrogates, which JSON can hold and no text can."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError("found a lone surrogate, expected Unicode text") from None
    return value


def _check_stop_strings(value: str | list[str] | None) -> str | list[str] | None:
    words = [value] if isinstance(value, str) else value or []
    if len(words) > MAX_STOP_STRINGS or any(not 0 < len(word) <= MAX_STOP_LENGTH for word in words):
        raise ValueError(
            f"expected at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_LENGTH} characters"
        )
    return value


def check_json_text(value: object, depth: int = 0) -> None:
    """Check every text of a JSON value, keys included.

    Raises:
        ValueError: a text holds a lone surrogate, or values are nested too deep.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"expected values nested at most {MAX_DEPTH} deep")
    if isinstance(value, str):
        _check_text(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_text(key)
            check_json_text(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            check_json_text(item, depth + 1)


def _check_json(value: Any) -> Any:
    check_json_text(value)
    return value


JsonField = AfterValidator(_check_json)
"""Marks a field that holds any JSON."""
Stop = AfterValidator(_check_stop_strings)
"""Marks a field that holds stop strings."""
Text = Annotated[str, BeforeValidator(_check_text)]
Count = Annotated[int, Field(ge=0, lt=_INT64)]
Number = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_TOKEN_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}


def parse_prompts(value: object) -> tuple[str | TokenIds, ...]:
    """Return the prompts of a completion request, each text or tokens."""
    if isinstance(value, str):
        return (_text(value),)
    if not isinstance(value, list) or not value:
        raise ValueError("expected text, tokens, or a list of one of them, none of them empty")
    if _is_token(value[0]):
        return (_tokens(value),)
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"found {len(value)} prompts, expected at most {MAX_PROMPTS}")
    if isinstance(value[0], str):
        return tuple(_text(item) for item in value)
    return tuple(_tokens(item) for item in value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("expected a list of texts")
    _check_text(value)
    return value


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _tokens(value: object) -> TokenIds:
    if not isinstance(value, list) or not value:
        raise ValueError("expected a list of tokens that is not empty")
    # A body holds up to millions of tokens: only loops in C are fast enough here.
    if set(map(type, value)) != {int} or min(value) < 0 or max(value) >= 2**31:
        raise ValueError("expected tokens, whole numbers from 0")
    return tuple(value)


Prompts = Annotated[
    tuple[str | TokenIds, ...],
    PlainValidator(parse_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                _TOKEN_SCHEMA,
                {"type": "array", "items": _TOKEN_SCHEMA, "minItems": 1},
            ]
        }
    ),
]


Messages = Annotated[
    list[dict[str, Any]],
    Field(min_length=1, max_length=MAX_MESSAGES),
    JsonField,
    WithJsonSchema(
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["role"],
                "properties": {
                    "role": {"type": "string"},
                    "content": {"type": ["string", "null"]},
                },
            },
        }
    ),
]

Tools = Annotated[list[dict[str, Any]] | None, Field(max_length=MAX_TOOLS), JsonField]
TemplateVariables = Annotated[
    dict[str, Any] | None, Field(max_length=MAX_TEMPLATE_VARIABLES), JsonField
]


class RequestBody(BaseModel):
    """A JSON object; names of unknown fields are logged, never their values."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    @model_validator(mode="after")
    def _log_unknown_fields(self) -> RequestBody:
        for name in self.model_extra or ():
            if name not in _logged and len(_logged) < MAX_UNKNOWN_NAMES:
                _logged.add(name)
                logger.warning("ignored the unknown field %.64r of a request", name)
        return self


class ModelBody(RequestBody):
    """The fields that all generation requests share."""

    model: str | None = None
    stream: bool | None = False


class StreamOptions(RequestBody):
    """Whether a streamed answer ends with its numbers of tokens.

    Attributes:
        include_usage: whether the last chunk holds the numbers of tokens.
        continuous_usage_stats: whether every chunk does.
    """

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class StructuredOutputs(RequestBody):
    """The form that an answer must have; exactly one field is set."""

    json_schema: Annotated[dict[str, Any] | Text | None, Field(alias="json")] = None
    regex: Text | None = None
    choice: Annotated[list[Text] | None, Field(max_length=1024)] = None
    grammar: Text | None = None
    json_object: bool | None = None
    structural_tag: Any = None


class JsonSchemaFormat(RequestBody):
    """A named JSON schema that the text of an answer must satisfy."""

    name: str = "schema"
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(RequestBody):
    """OpenAI's ``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class PromptBody(ModelBody):
    """The fields of all requests whose prompts become tokens."""

    user: str | None = None
    # vLLM's own
    truncate_prompt_tokens: Annotated[int | None, Field(ge=-1, lt=2**31)] = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    priority: Annotated[int | None, Field(ge=-(2**31), lt=2**31)] = 0
    request_id: Annotated[Text | None, Field(max_length=256)] = None
    cache_salt: Annotated[Text | None, Field(min_length=1, max_length=256)] = None


class GenerationBody(PromptBody):
    """The fields that completions and chat completions share."""

    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = 0.0
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)] = 0.0
    logit_bias: Annotated[dict[str, Number] | None, Field(max_length=MAX_LOGIT_BIAS)] = None
    n: Annotated[int | None, Field(ge=1, le=MAX_CHOICES)] = 1
    seed: Annotated[int | None, Field(ge=-_INT64, lt=_INT64)] = None
    stop: Annotated[Text | list[Text] | None, Stop] = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float | None, Field(ge=0, le=1e6)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    response_format: ResponseFormat | None = None
    # vLLM's own
    top_k: Annotated[int | None, Field(ge=-1, lt=2**31)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    repetition_penalty: Annotated[float | None, Field(gt=0, le=1e6)] = None
    use_beam_search: bool | None = False
    length_penalty: Number | None = 1.0
    stop_token_ids: Annotated[list[TokenId] | None, Field(max_length=MAX_STOP_TOKENS)] = None
    include_stop_str_in_output: bool | None = False
    ignore_eos: bool | None = False
    min_tokens: Count | None = 0
    skip_special_tokens: bool | None = True
    spaces_between_special_tokens: bool | None = True
    allowed_token_ids: Annotated[list[TokenId] | None, Field(max_length=MAX_ALLOWED_TOKENS)] = None
    prompt_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    bad_words: Annotated[
        list[Annotated[Text, Field(max_length=MAX_STOP_LENGTH)]] | None, Field(max_length=MAX_WORDS)
    ] = None
    structured_outputs: StructuredOutputs | None = None
    return_tokens_as_token_ids: bool | None = False
    return_token_ids: bool | None = False
    best_of: Annotated[int | None, Field(ge=1)] = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @model_validator(mode="after")
    def _check_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options can only be set when stream is true")
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs are not available when stream is true")
        return self


class CompletionRequest(GenerationBody):
    """The body of ``/v1/completions``."""

    prompt: Prompts
    echo: bool | None = False
    logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    max_tokens: Count | None = 16
    suffix: str | None = None


class EmbeddingRequest(PromptBody):
    """The body of ``/v1/embeddings``."""

    input: Prompts
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: Annotated[int | None, Field(ge=1, lt=2**31)] = None

    @model_validator(mode="after")
    def _check_stream(self) -> EmbeddingRequest:
        if self.stream:
            raise ValueError("embeddings are not available when stream is true")
        return self


class ChatBody(RequestBody):
    """The fields of a conversation."""

    messages: Messages
    tools: Tools = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = False
    chat_template: str | None = None
    chat_template_kwargs: TemplateVariables = None
    reasoning_effort: str | None = None

    @field_validator("messages")
    @classmethod
    def _check_messages(cls, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for place, message in enumerate(messages):
            if not isinstance(message.get("role"), str):
                raise ValueError(f"message {place}: found no role, expected a text")
        return messages

    @model_validator(mode="after")
    def _check_prompt_end(self) -> ChatBody:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt cannot both be true")
        return self


class ChatCompletionRequest(GenerationBody, ChatBody):
    """The body of ``/v1/chat/completions``."""

    echo: bool | None = False
    logprobs: StrictBool | None = False
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    max_tokens: Annotated[int | None, Field(ge=1, lt=_INT64)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1, lt=_INT64)] = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = True

    @model_validator(mode="after")
    def _check_top_logprobs(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs can only be set when logprobs is true")
        return self


class TokenizeRequest(RequestBody):
    """The body of ``/tokenize``: ``prompt``, or ``messages`` with the fields of a conversation."""

    model: str | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    tools: Tools = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = False
    chat_template_kwargs: TemplateVariables = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False

    @model_validator(mode="after")
    def _check_input(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("expected exactly one of prompt and messages")
        return self


class DetokenizeRequest(RequestBody):
    """The body of ``/detokenize``: token ids to turn into text."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_DETOKENIZED)]
