"""Where the tokenizer of a model is, its chat template and its end tokens, from all files.

A tokenizer is in files of the model's directory, or inside a GGUF file. End tokens are those of
``generation_config.json`` (else ``config.json``) and the tokenizer's own end of text, as vLLM joins
them; a GGUF file has up to three.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmpq.errors import SpecError, bad_field
from llmpq.spec.fields import LFS_BYTES, check_downloaded, read_json
from llmpq.spec.model_files.weight_headers import find_gguf, read_gguf_header

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
UNREAD_FILES = ("*tekken*.json", "tokenizer.model.*", "*.tiktoken", "tiktoken.model")
"""Patterns of tokenizers in formats that are not read."""
TEMPLATE_FILE = "chat_template.jinja"
PROCESSOR_FILES = ("chat_template.json", "processor_config.json")
_CONFIG = "tokenizer_config.json"
_TOKENS = "tokenizer.ggml.tokens"
_TEMPLATE_OF_GGUF = "tokenizer.chat_template"


def tokenizer_arguments(model_dir: Path) -> dict[str, Path | str] | None:
    """Return how ``AutoTokenizer`` finds the tokenizer of a model; ``None`` if it has none.

    Files of a tokenizer beside a GGUF file are preferred to the tokenizer inside it.

    Raises:
        SpecError: a file is a pointer of Git LFS.
    """
    gguf, files = find_gguf(model_dir), tokenizer_files(model_dir)
    folder = model_dir if gguf is None else gguf.parent
    for file in files:
        with file.open("rb") as stream:
            check_downloaded(file, stream.read(LFS_BYTES))
    if files:
        return {"pretrained_model_name_or_path": folder}
    if gguf is None or _TOKENS not in read_gguf_header(gguf).lengths:
        return None
    return {"pretrained_model_name_or_path": folder, "gguf_file": gguf.name}


def tokenizer_files(model_dir: Path) -> list[Path]:
    """Return the files of the tokenizer in a model's directory, or beside its GGUF file."""
    gguf = find_gguf(model_dir)
    folder = model_dir if gguf is None else gguf.parent
    return [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]


def chat_templates(model_dir: Path) -> dict[str, Any]:
    """Return the chat templates of a model by where they stand; the first one is used.

    transformers reads ``chat_template.jinja`` before the tokenizer's own, and neither from the
    files of a multimodal model's processor, which come last here.
    """
    gguf = find_gguf(model_dir)
    folder = model_dir if gguf is None else gguf.parent
    found: dict[str, Any] = {}
    if gguf is not None and not tokenizer_files(model_dir):
        found[f"{gguf.name}: {_TEMPLATE_OF_GGUF}"] = read_gguf_header(gguf).metadata.get(
            _TEMPLATE_OF_GGUF
        )
    else:
        file = folder / TEMPLATE_FILE
        found[TEMPLATE_FILE] = file.read_text(encoding="utf-8") if file.is_file() else None
        for name in (_CONFIG, *PROCESSOR_FILES):
            found[name] = _object(folder / name).get("chat_template")
    return {place: template for place, template in found.items() if template}


def missing_tokenizer(model_dir: Path) -> str:
    """Return what to say of a model for which :func:`tokenizer_arguments` finds none."""
    folder = model_dir if model_dir.is_dir() else model_dir.parent
    unread = (path.name for pattern in UNREAD_FILES for path in sorted(folder.glob(pattern)))
    name = next(unread, None)
    if name is None:
        return "the model has no tokenizer"
    return (
        f"the model has no tokenizer that can be read: {name} needs a tokenizer.json beside it, as "
        "in the model's version for transformers"
    )


def tokenizer_error(model_dir: Path, error: Exception) -> SpecError:
    """Return the error of a tokenizer that transformers does not read."""
    if "trust_remote_code" in str(error):
        return SpecError(
            f"{model_dir}: found a tokenizer that is code of the model directory (auto_map), which "
            "llmpq never runs; expected one that transformers has"
        )
    return SpecError(f"{model_dir}: the tokenizer cannot be read: {error}")


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
    return frozenset().union(*end_tokens(model_dir, configured)[0].values())


def end_tokens(
    model_dir: Path, configured: object
) -> tuple[dict[str, frozenset[int]], dict[str, frozenset[int]]]:
    """Return the end tokens of a model by where they stand: those that are used, and others.

    Args:
        model_dir: as :func:`end_token_ids`.
        configured: likewise.

    Raises:
        SpecError: likewise.
    """
    gguf = find_gguf(model_dir)
    folder = model_dir if gguf is None else gguf.parent
    path, of_model = folder / GENERATION_FILE, "config.json" if gguf is None else gguf.name
    stated = _object(path).get(_FIELD)
    others: dict[str, frozenset[int]] = {}
    if stated is None:
        found = {of_model: _numbers(path, configured)}
    else:
        found = {GENERATION_FILE: _numbers(path, stated)}
        if gguf is None and (other := _numbers(folder / "config.json", configured)):
            others[of_model] = other
    if gguf is not None:
        metadata = read_gguf_header(gguf).metadata
        own = (metadata.get(name) for name in _OF_GGUF)
        tokens = frozenset(token for token in own if type(token) is int)
        found[gguf.name] = found.get(gguf.name, frozenset()) | tokens
    if (end := _end_of_tokenizer(folder)) is not None:
        found["tokenizer"] = frozenset({end})
    return found, others


def _numbers(path: Path, value: object) -> frozenset[int]:
    values = value if isinstance(value, list) else [value]
    if not all(item is None or type(item) is int for item in values):
        raise bad_field(str(path), _FIELD, value, "token numbers")
    return frozenset(item for item in values if type(item) is int)


def _end_of_tokenizer(folder: Path) -> int | None:
    """Return the number of the tokenizer's ``eos_token``; ``None`` if no file states it."""
    config = _object(folder / _CONFIG)
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
