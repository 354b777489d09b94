"""The routes of the server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp

from llmpq import __version__
from llmpq.options.server import TransportLimits
from llmpq.server.errors import (
    ApiError,
    as_api_error,
    bad_request,
    error_response,
    json_response,
    validation_error,
)
from llmpq.server.metrics import CONTENT_TYPE
from llmpq.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from llmpq.server.responses import Json
from llmpq.server.service import Service
from llmpq.server.translate import ServedModel, encode_chat
from llmpq.server.transport import EventStream, Gate, until_disconnected

OWNER = "llmpq"
TOKENIZE_TOKENS = 1 << 17
"""Longest text of ``/tokenize`` where the model's own length is smaller."""
_ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "integer"},
            },
        }
    },
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {"schema": _ERROR_SCHEMA}}}
    for status, text in {
        400: "The request can never be served.",
        401: "The API key is missing or wrong.",
        403: "The request comes from a page of another site, and the server asks for no key.",
        404: "There is no such model.",
        408: "The body did not arrive in time.",
        413: "The body is too large.",
        415: "The body is not JSON.",
        500: "The engine failed.",
        503: "The server is busy, starting or ending.",
    }.items()
}


def build_app(
    service: Service,
    limits: TransportLimits | None = None,
    api_keys: Sequence[str] = (),
    *,
    checks_site: bool = True,
) -> ASGIApp:
    """Return the application of a server.

    Args:
        service: answers the requests.
        limits: of connections.
        api_keys: accepted keys; without any, no key is asked for.
        checks_site: see ``Gate``.
    """
    app = FastAPI(
        title="llmpq",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        responses=_ERRORS,
        telemetry={
            "tracing": False,
            "metrics": False,
            "logs": False,
            "operation_spans": False,
            "auto_configure": False,
        },
    )
    _add_error_handlers(app)
    _add_generation(app, service)
    _add_models(app, service)
    _add_tokenizer(app, service)
    _add_state(app, service)
    return Gate(
        app,
        limits or TransportLimits(),
        service.check_open,
        tuple(api_keys),
        checks_site=checks_site,
    )


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Complete prompts."""
        return await _generate(service, body, request)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await _generate(service, body, request)


async def _generate(
    service: Service, body: CompletionRequest | ChatCompletionRequest, request: Request
) -> Response:
    generation = await service.prepare(body, request.state.request_id)
    if not body.stream:
        whole = await until_disconnected(generation.body(), request.receive)
        return Response(whole, media_type="application/json")
    events = generation.events()
    await anext(events)  # a full server is answered with 503, not with a stream
    return EventStream(events)


def _add_models(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def models() -> Response:
        """List the model under its names."""
        model = service.model
        return json_response(
            {"object": "list", "data": [_model_card(model, name) for name in model.names]}
        )

    @app.get("/v1/models/{model:path}")
    async def retrieve_model(model: str) -> Response:
        """Describe the model."""
        service.model.check_name(model)
        return json_response(_model_card(service.model, model))


def _model_card(model: ServedModel, name: str) -> Json:
    return {
        "id": name,
        "object": "model",
        "created": model.created_s,
        "owned_by": OWNER,
        "root": model.root,
        "parent": None,
        "max_model_len": model.max_model_len,
        "permission": [],
    }


def _add_tokenizer(app: FastAPI, service: Service) -> None:
    model = service.model

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        """Return the tokens of a text or a conversation."""
        model.check_name(body.model)
        tokenizer = model.need_tokenizer("it cannot tokenize")
        if body.prompt is None:
            special = bool(body.add_special_tokens)
            tokens = await encode_chat(body, model, add_special_tokens=special)
        else:
            (tokens,) = await tokenizer.encode_async(
                [body.prompt],
                max_tokens=max(model.max_model_len, TOKENIZE_TOKENS),
                add_special_tokens=body.add_special_tokens is not False,
            )
        names = None
        if body.return_token_strs:
            names = [tokenizer.token_name(token) for token in tokens]
        return json_response(
            {
                "count": len(tokens),
                "max_model_len": model.max_model_len,
                "tokens": tokens,
                "token_strs": names,
            }
        )

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        """Return the text of tokens."""
        model.check_name(body.model)
        tokenizer = model.need_tokenizer("it cannot detokenize")
        if max(body.tokens, default=0) >= model.vocab_size:
            raise bad_request(f"expected tokens below {model.vocab_size}.", "tokens")
        text = await tokenizer.decode_async(body.tokens)
        return json_response({"prompt": text})


def _add_state(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    @app.get("/ping")
    @app.post("/ping", include_in_schema=False)
    async def health() -> Response:
        """Answer 200 while new requests are served, 503 otherwise."""
        return Response(status_code=200 if service.is_ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Return the metrics in Prometheus's format."""
        return Response(service.metrics.exposition(), media_type=CONTENT_TYPE)

    @app.get("/version")
    async def version() -> Response:
        """Return the version of llmpq."""
        return json_response({"version": __version__})

    @app.get("/load")
    async def load() -> Response:
        """Return how many answers wait or run, and what a router reads of the engine."""
        return json_response(service.load())


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def on_api_error(_: Request, error: ApiError) -> Response:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def on_validation_error(_: Request, error: RequestValidationError) -> Response:
        return error_response(validation_error(error.errors()))

    @app.exception_handler(HTTPException)
    async def on_http_error(_: Request, error: HTTPException) -> Response:
        if isinstance(error.__cause__, ApiError):  # raised while the body was read
            return error_response(error.__cause__)
        return error_response(ApiError(error.status_code, str(error.detail)))

    @app.exception_handler(Exception)
    async def on_other_error(_: Request, error: Exception) -> Response:
        return error_response(as_api_error(error))
