"""The end tokens of a model, from every file that states them.

``generation_config.json`` (else ``config.json``) and the tokenizer's own end of text are joined, as
vLLM joins them; a GGUF file has up to three.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmpq.errors import bad_field
from llmpq.spec.fields import read_json
from llmpq.spec.gguf.header import find_gguf, read_header

GENERATION_FILE = "generation_config.json"
_FIELD = "eos_token_id"
_OF_GGUF = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))


def end_token_ids(model_dir: Path, configured: object) -> frozenset[int]:
    """Return the end tokens of a model.

    Args:
        model_dir: directory of the model, or its GGUF file.
        configured: ``eos_token_id`` of its configuration: a number, a list of them, or ``None``.

    Raises:
        SpecError: a file cannot be read, or its end token is no number.
    """
    gguf = find_gguf(model_dir)
    folder = model_dir if gguf is None else gguf.parent
    path = folder / GENERATION_FILE
    stated = _object(path).get(_FIELD)
    found = _numbers(path, configured if stated is None else stated)
    if gguf is not None:
        metadata = read_header(gguf).metadata
        found |= {token for name in _OF_GGUF if type(token := metadata.get(name)) is int}
    own = _end_of_tokenizer(folder)
    return found if own is None else found | {own}


def _numbers(path: Path, value: object) -> frozenset[int]:
    values = value if isinstance(value, list) else [value]
    if not all(item is None or type(item) is int for item in values):
        raise bad_field(str(path), _FIELD, value, "token numbers")
    return frozenset(item for item in values if type(item) is int)


def _end_of_tokenizer(folder: Path) -> int | None:
    """Return the number of the tokenizer's ``eos_token``; ``None`` if no file states it."""
    config = _object(folder / "tokenizer_config.json")
    token = _text(config.get("eos_token"))
    if token is None:
        token = _text(_object(folder / "special_tokens_map.json").get("eos_token"))
    if token is None:
        return None
    added = config.get("added_tokens_decoder")
    if isinstance(added, Mapping):
        for number, entry in added.items():
            if _text(entry) == token and str(number).isdecimal():
                return int(number)
    return _number_of(token, _object(folder / "tokenizer.json"))


def _number_of(token: str, tokenizer: Mapping[str, Any]) -> int | None:
    """Return the number of a token by a ``tokenizer.json``."""
    added = tokenizer.get("added_tokens")
    for entry in added if isinstance(added, list) else ():
        if _text(entry) == token and type(entry.get("id")) is int:
            return int(entry["id"])
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, Mapping) else None
    if isinstance(vocab, Mapping):
        number = vocab.get(token)
        return number if type(number) is int else None
    # Of a unigram model: pieces with their scores.
    pieces = vocab if isinstance(vocab, list) else ()
    named = (number for number, piece in enumerate(pieces) if piece and piece[0] == token)
    return next(named, None)


def _text(value: object) -> str | None:
    """Return a token that is written as text, or as an object with its content."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _object(path: Path) -> Mapping[str, Any]:
    """Return the object of a file; empty if there is no such file or it holds something else."""
    found = read_json(path) if path.is_file() else None
    return found if isinstance(found, Mapping) else {}
