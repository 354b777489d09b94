"""Answering a file of requests in OpenAI's Batch format.

A line in is ``{"custom_id", "method": "POST", "url": "/v1/...", "body"}``. A line out is ``{"id",
"custom_id", "response": {"status_code", "request_id", "body"}, "error"}``, appended when its
request ends. A request that cannot be served has a line with its error.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from llmpq.dist.io.prompts import lines_of, parse_line
from llmpq.dist.io.results import LineWriter, finished_ids, read_lines
from llmpq.errors import SpecError, StageError
from llmpq.server.apis.embeddings import prepare_embeddings
from llmpq.server.apis.openai import prepare_chat, prepare_completion
from llmpq.server.errors import ApiError, bad_request, validation_error
from llmpq.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    EmbeddingRequest,
    ModelBody,
)
from llmpq.server.service import ServedModel, Service, Translate
from llmpq.server.text.tokenizer import load_server_tokenizer
from llmpq.spec.fields import Fields
from llmpq.spec.huggingface.families import load_model_dir

URLS: dict[str, tuple[type[ModelBody], Translate[Any]]] = {
    "/v1/completions": (CompletionRequest, prepare_completion),
    "/v1/chat/completions": (ChatCompletionRequest, prepare_chat),
    "/v1/embeddings": (EmbeddingRequest, prepare_embeddings),
}
MAX_UNDER_WAY = 256
"""Requests that the engine has at once; the others wait in the file."""
MAX_POSITIONS = 1 << 30
"""Tokens of the longest sequence of a model that states none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLine:
    """One request of a batch file.

    Attributes:
        custom_id: chosen by the user, unique in the file.
        method, url: ``POST`` and one of the generation paths.
        body: of the request.
    """

    custom_id: str
    method: str
    url: str
    body: object


@dataclass(slots=True, kw_only=True)
class BatchSummary:
    """What a run did.

    Attributes:
        requests: lines with an answer, of this run.
        errors: of these, answered with an error.
        skipped: lines that the output file answered before.
        prompt_tokens, generated_tokens: of this run.
        refused: lines that are no requests.
    """

    requests: int = 0
    errors: int = 0
    skipped: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    refused: tuple[str, ...] = ()


def read_batch(path: Path) -> tuple[list[BatchLine], list[SpecError]]:
    """Read a batch file; lines without a usable ``custom_id`` are returned as errors.

    Raises:
        SpecError: the file cannot be read or has no lines.
    """
    lines: list[BatchLine] = []
    refused: list[SpecError] = []
    seen: set[str] = set()
    for number, text in lines_of(path):
        try:
            fields = parse_line(path, number, text)
            line = _line_of(fields)
            if line.custom_id in seen:
                raise fields.error(
                    "custom_id", line.custom_id, "an id that differs from the others"
                )
        except SpecError as error:
            refused.append(error)
            continue
        seen.add(line.custom_id)
        lines.append(line)
    if not (lines or refused):
        raise SpecError(f"{path}: found no requests, expected at least one line")
    return lines, refused


def _line_of(fields: Fields) -> BatchLine:
    custom_id = fields.text("custom_id")
    if not 0 < len(custom_id) <= 512:
        raise fields.error("custom_id", custom_id, "1 to 512 characters")
    return BatchLine(
        custom_id=custom_id,
        method=str(fields.take("method")) if fields.has("method") else "POST",
        url=str(fields.take("url")),
        body=fields.take("body"),
    )


async def run_batch(service: Service, source: Path, output: Path, *, resume: bool) -> BatchSummary:
    """Answer the requests of a file.

    Args:
        service: answers them.
        source: the requests.
        output: the answers, a new file unless ``resume``.
        resume: whether to keep the answers there are and to skip their requests.

    Raises:
        SpecError: a file cannot be used.
        StageError: the engine failed; the answers made before are kept.
    """
    lines, refused = read_batch(source)
    summary = BatchSummary(refused=tuple(str(error) for error in refused))
    done = finished_ids(output, resume=resume, id_field="custom_id")
    todo = iter([line for line in lines if line.custom_id not in done])
    summary.skipped = len(lines) - sum(line.custom_id not in done for line in lines)
    with LineWriter(output, done) as writer:
        workers = [
            asyncio.create_task(_work(service, todo, writer, summary))
            for _ in range(min(MAX_UNDER_WAY, len(lines)))
        ]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
    return summary


async def _work(
    service: Service, todo: Iterator[BatchLine], writer: LineWriter, summary: BatchSummary
) -> None:
    """Answer one request after the other until none is left."""
    for line in todo:
        answer = await _answer(service, line)
        response = answer["response"]
        summary.requests += 1
        summary.errors += response["status_code"] != 200
        usage = response["body"].get("usage") or {}
        summary.prompt_tokens += usage.get("prompt_tokens", 0)
        summary.generated_tokens += usage.get("completion_tokens", 0)
        writer.write_line(line.custom_id, answer)


async def _answer(service: Service, line: BatchLine) -> dict[str, Any]:
    """Return the line of an answer.

    Raises:
        StageError: the engine failed.
    """
    request_id = uuid.uuid4().hex
    error: dict[str, Any] | None = None
    status = 200
    try:
        translate, request = _request_of(line)
        handler = await service.prepare(translate, request, request_id)
        body = await handler.result()
    except ApiError as failure:
        if isinstance(failure.__cause__, StageError):
            raise failure.__cause__ from None
        status, body = failure.status, failure.to_json()
        error = body["error"]
    return {
        "id": f"batch_req_{request_id}",
        "custom_id": line.custom_id,
        "response": {"status_code": status, "request_id": request_id, "body": body},
        "error": error,
    }


def _request_of(line: BatchLine) -> tuple[Translate[Any], ModelBody]:
    if line.method != "POST" or line.url not in URLS:
        raise bad_request(f"expected method POST and as url one of {', '.join(URLS)}.", "url")
    try:
        # Through JSON, as over HTTP: the same types are accepted.
        kind, translate = URLS[line.url]
        body = kind.model_validate_json(json.dumps(line.body))
    except ValidationError as error:
        raise validation_error(error.errors()) from None
    if body.stream:
        raise bad_request("stream: expected false in a batch.", "stream")
    return translate, body


async def batch_prompts(path: Path, model_dir: Path) -> dict[str, tuple[int, ...]]:
    """Return the tokens of the prompts of a batch file as the server encodes them, by custom id.

    Requests of several prompts, and those that the server would refuse, are left out.

    Args:
        path: of the batch file.
        model_dir: directory of the model.

    Raises:
        SpecError: a file cannot be read.
    """
    lines, _ = read_batch(path)
    spec = load_model_dir(model_dir)
    model = ServedModel(
        names=(spec.name,),
        root=str(model_dir),
        tokenizer=load_server_tokenizer(model_dir),
        max_model_len=spec.max_positions or MAX_POSITIONS,
        vocab_size=spec.vocab_size,
    )
    found = {}
    for line in lines:
        try:
            translate, request = _request_of(line)
            form = await translate(request, model, line.custom_id)
        except ApiError:
            continue
        prompts = form.request.prompts
        if len(prompts) == 1:
            found[line.custom_id] = prompts[0]
    return found


def read_answer_lengths(path: Path) -> dict[str, int]:
    """Return the tokens of an answer to each answered request of an output file, by custom id.

    Of several answers to a request it is their mean.

    Raises:
        SpecError: the file cannot be read.
    """
    found: dict[str, int] = {}
    for fields in read_lines(path):
        custom_id = fields.text("custom_id")
        response = fields.child("response")
        if response.integer("status_code") != 200:
            continue
        body = response.take("body")
        choices = body.get("choices") if isinstance(body, dict) else None
        usage = body.get("usage") if isinstance(body, dict) else None
        tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
        if choices and isinstance(tokens, int) and tokens > 0:
            found[custom_id] = max(1, round(tokens / len(choices)))
    return found
