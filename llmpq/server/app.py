"""The server: its routes, and its life: load, say that it is ready, serve, drain, end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp

from llmpq import __version__
from llmpq.dist.io.generation import EngineClient
from llmpq.dist.transport.endpoint import MIN_TOKEN_BYTES, is_loopback, read_token
from llmpq.errors import LlmpqError, SpecError, StageError, StoppedError
from llmpq.options.run import Pooling
from llmpq.options.server import ListenOptions, TransportLimits
from llmpq.server.admission import AdmissionLimits, RequestAdmission
from llmpq.server.apis.embeddings import embedding_settings, prepare_embeddings
from llmpq.server.apis.messages import (
    CountTokensRequest,
    MessagesRequest,
    count_tokens,
    prepare_messages,
)
from llmpq.server.apis.openai import encode_chat, prepare_chat, prepare_completion
from llmpq.server.apis.responses import ResponsesRequest, ResponseStore
from llmpq.server.errors import (
    ApiError,
    as_api_error,
    bad_request,
    error_response,
    validation_error,
)
from llmpq.server.json_output import json_response, parts_response
from llmpq.server.metrics import CONTENT_TYPE, ServerMetrics
from llmpq.server.page.page import page_response
from llmpq.server.page.plan_view import PlanView
from llmpq.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from llmpq.server.service import (
    Body,
    Json,
    ServedModel,
    Service,
    Translate,
    default_sampling_of,
)
from llmpq.server.text.tokenizer import ServerTokenizer
from llmpq.server.transport import (
    EventStream,
    RequestGuard,
    bounded_protocol,
    until_disconnected,
    with_origins,
)

if sys.platform != "win32":
    import resource

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
    view: PlanView | None = None,
    allowed_origins: Sequence[str] = (),
) -> ASGIApp:
    """Return the application of a server.

    Args:
        service: answers the requests.
        limits: of connections.
        api_keys: accepted keys; without any, no key is asked for.
        checks_site: see ``RequestGuard``.
        view: of the plan, for the page.
        allowed_origins: sites whose pages may use the server.
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
    _add_page(app, service, view or PlanView())
    guard = RequestGuard(
        app,
        limits or TransportLimits(),
        service.check_open,
        tuple(api_keys),
        checks_site=checks_site,
        allowed_origins=allowed_origins,
    )
    return with_origins(guard, allowed_origins)


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Complete prompts."""
        return await _generate(service, prepare_completion, body, request)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await _generate(service, prepare_chat, body, request)

    @app.post("/v1/messages")
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation of Anthropic's API."""
        return await _generate(service, prepare_messages, body, request)

    @app.post("/v1/messages/count_tokens")
    async def count(body: CountTokensRequest) -> Response:
        """Return the tokens of a conversation of Anthropic's API."""
        return json_response({"input_tokens": await count_tokens(body, service.model)})

    @app.post("/v1/embeddings")
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """Return the embeddings of inputs."""
        return await _generate(service, prepare_embeddings, body, request)

    store = ResponseStore()

    @app.post("/v1/responses")
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answer a conversation of OpenAI's Responses API."""
        return await _generate(service, store.prepare, body, request)


async def _generate(
    service: Service, translate: Translate[Body], body: Body, request: Request
) -> Response:
    handler = await service.prepare(translate, body, request.state.request_id)
    if not body.stream:
        whole = await until_disconnected(handler.body(), request.receive)
        return parts_response(whole)
    events = handler.events()
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


def _add_page(app: FastAPI, service: Service, view: PlanView) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        """Return the page."""
        return page_response()

    @app.get("/server_info")
    async def server_info() -> Response:
        """Return the plan, the load of its stages and the engine's counters."""
        tokenizer = service.model.tokenizer
        has_template = tokenizer is not None and tokenizer.has_chat_template
        return json_response({**view.to_json(service.engine), "has_chat_template": has_template})


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def on_api_error(request: Request, error: ApiError) -> Response:
        return error_response(error, request.url.path)

    @app.exception_handler(RequestValidationError)
    async def on_validation_error(request: Request, error: RequestValidationError) -> Response:
        return error_response(validation_error(error.errors()), request.url.path)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        cause = error.__cause__  # of ours if it was raised while the body was read
        found = cause if isinstance(cause, ApiError) else None
        text = str(error.detail)
        if error.status_code == HTTPStatus.NOT_FOUND:
            asked = f"{request.method} {request.url.path:.200}"
            text = f"There is no endpoint {asked}; GET /openapi.json lists them."
        return error_response(found or ApiError(error.status_code, text), request.url.path)

    @app.exception_handler(Exception)
    async def on_other_error(request: Request, error: Exception) -> Response:
        return error_response(as_api_error(error), request.url.path)


BACKLOG = 2048
MIN_OPEN_FILES = 256
"""A server with fewer would close connections without an answer."""
POLL_S = 0.05
CLOSE_TIMEOUT_S = 2
"""Seconds for connections to close after the last answer."""

T = TypeVar("T")
StartEngine = Callable[[], Awaitable[EngineClient]]


@dataclass(frozen=True, kw_only=True)
class ServerOptions(ListenOptions):
    """How to serve a model.

    Attributes:
        model_dir: directory of the model.
        names: of the model in requests and answers.
        admission: how much may wait.
        view: of the plan, for the page.
        pooling: of embeddings; ``None`` for the model's own.
    """

    model_dir: Path
    names: tuple[str, ...]
    admission: AdmissionLimits = field(default_factory=AdmissionLimits)
    view: PlanView | None = None
    pooling: Pooling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """An application, and what its life needs to know of it.

    Attributes:
        app: answers the requests.
        error: returns why it has ended for good, ``None`` while it has not.
        num_open: returns the answers that have not ended.
        begin_drain: admits no new requests.
        abort: ends all answers with a reason.
    """

    app: ASGIApp
    error: Callable[[], BaseException | None]
    num_open: Callable[[], int]
    begin_drain: Callable[[], None]
    abort: Callable[[], None]


Open = Callable[["Life"], AbstractAsyncContextManager[Served]]


def run_server(
    options: ServerOptions,
    start_engine: StartEngine,
    load_tokenizer: Callable[[Path], ServerTokenizer | None],
    on_ready: Callable[[str], None],
) -> None:
    """Serve until SIGTERM or Ctrl-C.

    Args:
        options: how to serve.
        start_engine: returns the loaded engine.
        load_tokenizer: returns the tokenizer of a model directory.
        on_ready: called with the address once requests are served.

    Raises:
        LlmpqError: an option cannot be used, the engine did not start or ended; ``StoppedError``
            when answers were cut short.
    """

    @contextlib.asynccontextmanager
    async def open_engine(life: Life) -> AsyncIterator[Served]:
        async with _loaded(life, options, start_engine, load_tokenizer) as service:
            yield Served(
                app=build_app(
                    service,
                    options.transport,
                    life.keys,
                    view=options.view,
                    allowed_origins=options.allowed_origins,
                ),
                error=lambda: service.engine.error,
                num_open=lambda: service.admission.num_choices,
                begin_drain=service.begin_drain,
                abort=service.abort_all,
            )

    run_app(options, open_engine, on_ready)


def run_app(options: ListenOptions, open_app: Open, on_ready: Callable[[str], None]) -> None:
    """Serve an application until SIGTERM or Ctrl-C.

    Args:
        options: how to listen.
        open_app: returns the context in which the application can answer.
        on_ready: called with the address once requests are served.

    Raises:
        LlmpqError: see :func:`run_server`.
    """
    keys = read_api_keys(options)
    check_tls(options)
    allow_open_files()
    with listen(options.host, options.port) as sock:
        config = uvicorn.Config(lambda: None, lifespan="off", log_config=None)
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(Life(options, keys, sock, on_ready).run(open_app))


def make_service(
    engine: EngineClient,
    tokenizer: ServerTokenizer | None,
    model_dir: Path,
    names: tuple[str, ...],
    limits: AdmissionLimits | None = None,
    pooling: Pooling | None = None,
) -> Service:
    """Return the service of a loaded engine.

    Args:
        engine: makes the tokens.
        tokenizer: ``None`` for requests and answers without text.
        model_dir: directory of the model.
        names: of the model in requests and answers.
        limits: on what may wait; none by default.
        pooling: of embeddings; ``None`` for the model's own.

    Raises:
        SpecError: a file of the model's defaults cannot be used.
    """
    limits = limits or AdmissionLimits()
    model = ServedModel(
        names=names,
        root=str(model_dir),
        tokenizer=tokenizer,
        max_model_len=engine.max_model_len,
        vocab_size=engine.vocab_size,
        created_s=int(time.time()),
        default_sampling=default_sampling_of(model_dir),
        max_choices=limits.max_num_choices,
        embeddings=embedding_settings(model_dir, pooling),
    )
    admission = RequestAdmission(limits)
    return Service(engine, model, admission, ServerMetrics(names[0], engine, admission))


@contextlib.contextmanager
def listen(host: str, port: int) -> Iterator[socket.socket]:
    """Return a bound socket that sends small writes at once.

    Raises:
        SpecError: the address cannot be used.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise SpecError(
            f"--host: found {host}, expected an address of this host: {error}"
        ) from None
    with sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            sock.bind(address)
        except OSError as error:
            raise SpecError(
                f"--host, --port: {host} port {port} cannot be used: {error.strerror}"
            ) from None
        yield sock


def read_api_keys(options: ListenOptions) -> tuple[str, ...]:
    """Return the accepted keys.

    Raises:
        SpecError: the file cannot be used, or is missing where other hosts can connect.
    """
    if options.api_key_file is None:
        if is_loopback(options.host):
            return ()
        raise SpecError(
            f"--host: found {options.host}, which other hosts can reach, and no key; expected "
            "--api_key_file FILE"
        )
    try:
        lines = read_token(options.api_key_file).decode().splitlines()
    except SpecError as error:
        raise SpecError(f"--api_key_file: {error}") from None
    except UnicodeDecodeError:
        raise SpecError(
            f"--api_key_file: {options.api_key_file}: found bytes that are not UTF-8, expected keys"
        ) from None
    return _keys_of(options.api_key_file, lines)


def _keys_of(path: Path, lines: Sequence[str]) -> tuple[str, ...]:
    """Return the keys of a file: its lines without the empty ones and comments."""
    keys = []
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        if len(line) < MIN_TOKEN_BYTES:
            raise SpecError(
                f"--api_key_file: {path}: line {number}: found a key of {len(line)} characters, "
                f"expected at least {MIN_TOKEN_BYTES}"
            )
        keys.append(line)
    if not keys:
        raise SpecError(f"--api_key_file: {path}: found comments only, expected a key a line")
    return tuple(keys)


def allow_open_files() -> None:
    """Allow this process as many open files as its user may have.

    Raises:
        SpecError: they are too few to answer many connections.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < MIN_OPEN_FILES:
        raise SpecError(
            f"open files: found a limit of {most} (ulimit -n), expected at least {MIN_OPEN_FILES}"
        )
    with contextlib.suppress(ValueError, OSError):  # macOS has a smaller limit of its own
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def check_tls(options: ListenOptions) -> None:
    """Check certificate and key.

    Raises:
        SpecError: they cannot be used.
    """
    if options.ssl_certfile is None:
        if options.ssl_keyfile is not None:
            raise SpecError("--ssl_keyfile: found without a certificate, expected --ssl_certfile")
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
    except (OSError, ssl.SSLError) as error:
        text = error.strerror or str(error)
        raise SpecError(f"--ssl_certfile: {options.ssl_certfile}: cannot be used: {text}") from None


class Life:
    """One server, from loading to its end.

    Args:
        options: how to listen.
        keys: accepted API keys.
        sock: bound.
        on_ready: called with the address once requests are served.
    """

    def __init__(
        self,
        options: ListenOptions,
        keys: tuple[str, ...],
        sock: socket.socket,
        on_ready: Callable[[str], None],
    ) -> None:
        self._options = options
        self.keys = keys
        self._sock = sock
        self._on_ready = on_ready
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()

    async def run(self, open_app: Open) -> None:
        """Load, serve, drain, end."""
        with self._signals():
            async with open_app(self) as served:
                await self._serve(served)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        handled = (signal.SIGTERM, signal.SIGINT)
        for number in handled:
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in handled:
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        (self._stop_now if self._stop.is_set() else self._stop).set()

    async def unless_stopped(self, task: asyncio.Future[T]) -> T:
        """Return the result of a task; a signal cancels it."""
        stop = asyncio.create_task(self._stop.wait())
        try:
            both: set[asyncio.Future[Any]] = {task, stop}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise StoppedError("stopped while loading")
        finally:
            stop.cancel()

    async def _serve(self, served: Served) -> None:
        options = self._options
        config = uvicorn.Config(
            served.app,
            http=bounded_protocol(options.transport),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
            ssl_certfile=options.ssl_certfile,
            ssl_keyfile=options.ssl_keyfile,
        )
        self._listen()
        server = _Server(config)
        serving = asyncio.create_task(server.serve([self._sock]))
        try:
            while not server.started and not serving.done():
                await asyncio.sleep(POLL_S / 10)
            # What lives until the end is not looked at again: all answers wait for a collection.
            gc.collect()
            gc.freeze()
            self._on_ready(self._address())
            await self._until_stopped(served)
            is_drained = await self._drain(served)
        finally:
            server.should_exit = True
            await serving
        error = served.error()
        if error is not None:
            raise _as_stage_error(error)
        if not is_drained:
            raise StoppedError("answers were cut short after --drain_timeout or a second signal")

    def _listen(self) -> None:
        """Accept connections; uvloop would say nothing if that failed."""
        try:
            self._sock.listen(BACKLOG)
        except OSError as error:
            raise SpecError(
                f"--port: {self._address()} was taken while the model was loaded, expected a free "
                f"port: {error.strerror}"
            ) from None

    def _address(self) -> str:
        host, port = self._sock.getsockname()[:2]
        scheme = "https" if self._options.ssl_certfile is not None else "http"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    async def _until_stopped(self, served: Served) -> None:
        """Wait for a signal, or for the end of the application."""
        while not self._stop.is_set() and served.error() is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), POLL_S)

    async def _drain(self, served: Served) -> bool:
        """Finish running answers and admit no new ones; return whether all of them ended."""
        served.begin_drain()
        end_s = time.monotonic() + self._options.drain_timeout_s
        while served.num_open() and time.monotonic() < end_s:
            if self._stop_now.is_set() or served.error() is not None:
                break
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop_now.wait(), POLL_S)
        is_drained = served.num_open() == 0
        served.abort()  # streams end with a reason
        return is_drained


@contextlib.asynccontextmanager
async def _loaded(
    life: Life,
    options: ServerOptions,
    start_engine: StartEngine,
    load_tokenizer: Callable[[Path], ServerTokenizer | None],
) -> AsyncIterator[Service]:
    """Load engine and tokenizer together; close the engine in the end."""
    tokenizer_task = asyncio.create_task(asyncio.to_thread(load_tokenizer, options.model_dir))
    engine_task = asyncio.ensure_future(start_engine())
    try:
        engine = await life.unless_stopped(engine_task)
    except BaseException:
        tokenizer_task.cancel()
        raise
    try:
        tokenizer = await life.unless_stopped(tokenizer_task)
        if tokenizer is not None:
            tokenizer.warm()
        service = make_service(
            engine,
            tokenizer,
            options.model_dir,
            options.names,
            options.admission,
            options.pooling,
        )
        with contextlib.closing(service):
            yield service
    finally:
        await engine.close()


class _Server(uvicorn.Server):
    """uvicorn without its own handling of signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield


def _as_stage_error(error: BaseException) -> LlmpqError:
    return error if isinstance(error, LlmpqError) else StageError(f"the engine ended: {error}")
