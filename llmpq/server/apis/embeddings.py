"""OpenAI's embeddings: the pooled final hidden states of prompts, of length 1."""

from __future__ import annotations

import base64
import math
import struct
from pathlib import Path

from llmpq.dist.io.sampling_params import SamplingParams
from llmpq.errors import SpecError
from llmpq.options.run import Pooling
from llmpq.server.apis.openai import check_count, check_tokens, encode_prompts
from llmpq.server.errors import ApiError, bad_request
from llmpq.server.json_output import PING
from llmpq.server.protocol import EmbeddingRequest
from llmpq.server.service import (
    ChoiceDelta,
    EmbeddingSettings,
    Json,
    PreparedRequest,
    ServedModel,
    TokenUsage,
)
from llmpq.spec.fields import read_json
from llmpq.spec.model_files.gguf_form import GgufMetadata
from llmpq.spec.model_files.weight_headers import find_gguf, read_gguf_header

POOLING_FILE = Path("1_Pooling", "config.json")
"""Where sentence-transformers states the pooling of a model."""
_MODES: dict[str, Pooling] = {"lasttoken": "last", "mean_tokens": "mean"}
_PREFIX = "pooling_mode_"
_GGUF_POOLING: dict[int, Pooling] = {0: "last", 1: "mean", 3: "last"}
"""Pooling by its number in a GGUF file; 0 states none."""


async def prepare_embeddings(
    body: EmbeddingRequest, model: ServedModel, request_id: str
) -> EmbeddingFormat:
    """Encode the inputs of an embedding request and check all its fields.

    Raises:
        ApiError: it cannot be served.
    """
    del request_id  # the answer has none
    check_count(len(body.input), 1, model, "input")
    _check_dimensions(body.dimensions, model)
    prompts = await encode_prompts(body.input, body, model)
    longest = model.max_model_len - 1
    for token_ids in prompts:
        check_tokens(token_ids, model, "input")
        if len(token_ids) > longest:
            raise bad_request(
                f"The longest input of this model has {longest} tokens. However, you requested "
                f"{len(token_ids)} tokens in the input for embedding generation. Please reduce the "
                "length of the input.",
                "input",
            )
    request = PreparedRequest(
        prompts=tuple(map(tuple, prompts)),
        sampling=SamplingParams(max_tokens=1),
        pooling=model.embeddings.pooling,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
    )
    return EmbeddingFormat(body, model, request)


def _check_dimensions(wanted: int | None, model: ServedModel) -> None:
    known = model.embeddings.dimensions
    if wanted is None or wanted in known:
        return
    if not known:
        raise bad_request(
            "dimensions: this model was not trained for embeddings that are cut (its config.json "
            "has no is_matryoshka or matryoshka_dimensions).",
            "dimensions",
        )
    expected = f"1 to {known[-1]}" if isinstance(known, range) else f"one of {list(known)}"
    raise bad_request(f"dimensions: found {wanted}, expected {expected}.", "dimensions")


class EmbeddingFormat:
    """The items of ``/v1/embeddings``; there are no streams of them.

    Args:
        body: of the request.
        model: that answers.
        request: what is answered.
    """

    list_field = "data"
    ping = PING
    end_of_stream = b""

    def __init__(
        self, body: EmbeddingRequest, model: ServedModel, request: PreparedRequest
    ) -> None:
        self.request = request
        self._body = body
        self._model = model

    def items(self, delta: ChoiceDelta) -> list[Json]:
        """Return the embedding of an input."""
        assert delta.embedding is not None
        found = delta.embedding
        if self._body.dimensions is not None:
            found = cut(found, self._body.dimensions)
        is_text = self._body.encoding_format == "base64"
        value = base64.b64encode(found).decode() if is_text else _numbers(found)
        return [{"object": "embedding", "index": delta.index, "embedding": value}]

    def whole(self, usage: TokenUsage) -> Json:
        """Return the object around the embeddings."""
        tokens = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
        return {"object": "list", "data": [], "model": self._model.name, "usage": tokens}

    def opening(self) -> list[Json]:
        """Return nothing."""
        return []

    def events(self, delta: ChoiceDelta) -> list[Json]:
        """Return the embedding of an input."""
        return self.items(delta)

    def closing(self, usage: TokenUsage) -> list[Json]:
        """Return nothing."""
        del usage
        return []

    def failure(self, error: ApiError) -> list[Json]:
        """Return the error."""
        return [error.to_json()]


def _numbers(embedding: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(embedding) // 4}f", embedding))


def cut(embedding: bytes, dimensions: int) -> bytes:
    """Return the first numbers of an embedding, of length 1 again."""
    kept = _numbers(embedding)[:dimensions]
    length = math.hypot(*kept) or 1.0
    return struct.pack(f"<{len(kept)}f", *(value / length for value in kept))


def embedding_settings(model_dir: Path, pooling: Pooling | None = None) -> EmbeddingSettings:
    """Return how the embeddings of a model are made.

    Args:
        model_dir: directory of the model.
        pooling: as asked for; ``None`` for what sentence-transformers states in the directory, or
            the last token.

    Raises:
        SpecError: a file cannot be read, or it states another pooling than the engine has.
    """
    return EmbeddingSettings(
        pooling=pooling or _stated_pooling(model_dir), dimensions=_stated_dimensions(model_dir)
    )


def _stated_pooling(model_dir: Path) -> Pooling:
    gguf = find_gguf(model_dir)
    if gguf is not None:
        return _gguf_pooling(GgufMetadata(read_gguf_header(gguf)))
    path = model_dir / POOLING_FILE
    if not path.is_file():
        return "last"
    found = read_json(path)
    fields = found if isinstance(found, dict) else {}
    modes = [
        name.removeprefix(_PREFIX)
        for name, value in fields.items()
        if name.startswith(_PREFIX) and value is True
    ]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise SpecError(
            f"{path}: found pooling {', '.join(modes) or 'of no kind'}, expected one of "
            f"{', '.join(_MODES)}; --pooling states another"
        )
    return _MODES[modes[0]]


def _gguf_pooling(metadata: GgufMetadata) -> Pooling:
    """Return the pooling that a GGUF file states, by default of the last token."""
    key = "pooling_type"
    stated = metadata.whole(key, 0)
    if stated not in _GGUF_POOLING:
        raise metadata.error(
            key, stated, f"one of {', '.join(map(str, _GGUF_POOLING))}; --pooling states another"
        )
    return _GGUF_POOLING[stated]


def _stated_dimensions(model_dir: Path) -> range | list[int]:
    path = model_dir / "config.json"
    config = read_json(path) if path.is_file() else {}
    if not isinstance(config, dict):
        return []
    sizes = config.get("matryoshka_dimensions")
    if isinstance(sizes, list) and sizes:
        return sorted(map(int, sizes))
    size = (config.get("text_config") or config).get("hidden_size")
    return range(1, int(size) + 1) if config.get("is_matryoshka") and size else []
