"""Where the tokenizer of a model is: in files of its directory, or inside a GGUF file."""

from __future__ import annotations

from pathlib import Path

from llmpq.errors import SpecError
from llmpq.spec.fields import LFS_BYTES, check_downloaded
from llmpq.spec.gguf.header import find_gguf, read_header

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
UNREAD_FILES = ("*tekken*.json", "tokenizer.model.*", "*.tiktoken", "tiktoken.model")
"""Patterns of tokenizers in formats that are not read."""
_TOKENS = "tokenizer.ggml.tokens"


def tokenizer_arguments(model_dir: Path) -> dict[str, Path | str] | None:
    """Return how ``AutoTokenizer`` finds the tokenizer of a model; ``None`` if it has none.

    Files of a tokenizer beside a GGUF file are preferred to the tokenizer inside it.

    Raises:
        SpecError: a file is a pointer of Git LFS.
    """
    gguf = find_gguf(model_dir)
    folder = model_dir if gguf is None else gguf.parent
    files = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    for file in files:
        with file.open("rb") as stream:
            check_downloaded(file, stream.read(LFS_BYTES))
    if files:
        return {"pretrained_model_name_or_path": folder}
    if gguf is None or _TOKENS not in read_header(gguf).lengths:
        return None
    return {"pretrained_model_name_or_path": folder, "gguf_file": gguf.name}


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
