"""The configuration of a model directory, completed and corrected by what its weights say.

Planner and runtime read it here, so that both have the same model. Where files contradict each
other, a line of the log says which one was believed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from llmpq.errors import SpecError, bad_field
from llmpq.logging import get_logger
from llmpq.spec.fields import read_json
from llmpq.spec.gguf.config import gguf_config
from llmpq.spec.huggingface.language import language_fields
from llmpq.spec.safetensors.files import find_weights, read_headers, weights_dtype
from llmpq.spec.safetensors.headers import SafetensorsHeader

_logger = get_logger(__name__)

CONFIG_FILE = "config.json"
TIE = "tie_word_embeddings"
DTYPES = ("dtype", "torch_dtype")

_HEAD = re.compile(r"(?:model\.|language_model\.)?(?:lm_head|embed_out)\.weight")
_EMBEDDING = re.compile(r"(?:.*\.)?(?:embed_tokens|wte|word_embeddings|embed_in)\.weight")
_BLOCK_BYTES = 1 << 20


def absolute_model_path(model: Path | str) -> Path:
    """Return the absolute path of a model directory or file.

    Its own name stays where it is a link: a hub cache links ``x.gguf`` to a file without suffix.
    """
    path = Path(model)
    return path.resolve() if path.name in {"", ".."} else path.parent.resolve() / path.name


def model_fields(model_dir: Path | str) -> dict[str, Any]:
    """Return the fields of a model's ``config.json``, or those that its GGUF file stands for.

    A head that is stored and differs from the embedding is not tied, whatever
    ``tie_word_embeddings`` says; a missing dtype is that of most weights.

    Raises:
        SpecError: there is no such file, it is no JSON object, or its fields about windows
            contradict each other.
    """
    folder = Path(model_dir)
    found = gguf_config(folder)
    if found is not None:
        return found
    file = folder / CONFIG_FILE
    if folder.is_file():
        raise SpecError(f"{folder}: found a file, expected a model directory or a GGUF file")
    # Classes of transformers write limits such as [0.0, Infinity].
    config = read_json(file, allows_constants=True)
    if not isinstance(config, dict):
        raise bad_field(str(file), "(top level)", config, "a JSON object")
    language = language_fields(config)
    fields = _with_windows(config, _windows_of(language, str(file)))
    has_dtype = any(language.get(name) is not None for name in DTYPES)
    if has_dtype and language.get(TIE) is False:
        return fields
    weights = _stored_weights(folder)
    if weights is None:
        return fields
    if not has_dtype and weights.dtype is not None:
        fields["dtype"] = weights.dtype
    if language.get(TIE) is not False and weights.has_own_head:
        if language.get(TIE):
            _logger.warning(
                "%s: field '%s' is true, but the stored head differs from the embedding: the head "
                "is used",
                file,
                TIE,
            )
        fields[TIE] = False
    return fields


def _with_windows(config: Mapping[str, Any], windows: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with fields of its language model."""
    inner = config.get("text_config")
    if windows and isinstance(inner, Mapping):
        return {**config, "text_config": {**inner, **windows}}
    return {**config, **windows}


def _windows_of(fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the fields that windows by ``layer_types`` need and the file leaves out.

    Raises:
        SpecError: a layer has a window by ``layer_types``, and other fields say that none has.
    """
    kinds = fields.get("layer_types")
    if not isinstance(kinds, list) or "sliding_attention" not in kinds:
        return {}
    if "sliding_window" in fields and fields["sliding_window"] is None:
        raise bad_field(where, "sliding_window", None, "tokens, as 'layer_types' has windows")
    if fields.get("use_sliding_window") is False:
        raise bad_field(where, "use_sliding_window", False, "true, as 'layer_types' has windows")
    return {"use_sliding_window": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredWeights:
    """What the weights of a directory say of the model.

    Attributes:
        dtype: of most weights, ``None`` without floating-point ones.
        has_own_head: whether a head is stored that differs from every embedding.
    """

    dtype: str | None
    has_own_head: bool


def _stored_weights(folder: Path) -> _StoredWeights | None:
    """Read the headers of the weights; ``None`` where there are none, or not all of them.

    A plan needs no weights, and loading them reports what is wrong with them.
    """
    try:
        files = find_weights(folder)
        stats = [(folder / name).stat() for name in files.names]
    except (SpecError, OSError):
        return None
    stamps = tuple((one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for one in stats)
    return _read_weights(folder.absolute(), stamps)


@lru_cache(maxsize=8)
def _read_weights(folder: Path, stamps: tuple[tuple[int, ...], ...]) -> _StoredWeights | None:
    """Read the headers; ``stamps`` make the cache notice changed files."""
    del stamps
    try:
        files = find_weights(folder)
        headers = read_headers(files)
        file_of = files.assign(headers)
        own = _has_own_head(folder, headers, file_of)
    except (SpecError, OSError):
        return None
    return _StoredWeights(dtype=weights_dtype(headers, file_of), has_own_head=own)


def _has_own_head(
    folder: Path, headers: Mapping[str, SafetensorsHeader], file_of: Mapping[str, str]
) -> bool:
    """Return whether a head and an embedding are stored, and differ."""
    heads = [name for name in file_of if _HEAD.fullmatch(name)]
    embeddings = [name for name in file_of if _EMBEDDING.fullmatch(name)]
    if not heads or not embeddings:
        return False
    return not any(
        _are_equal(_Stored.of(folder, headers, file_of, heads[0]),
                   _Stored.of(folder, headers, file_of, name))
        for name in embeddings
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """Place of a tensor's bytes, and what they mean."""

    file: Path
    begin: int
    nbytes: int
    form: tuple[str, tuple[int, ...]]

    @classmethod
    def of(
        cls,
        folder: Path,
        headers: Mapping[str, SafetensorsHeader],
        file_of: Mapping[str, str],
        name: str,
    ) -> _Stored:
        """Return the place of a tensor."""
        header = headers[file_of[name]]
        entry = header.entries[name]
        return cls(
            file=folder / file_of[name],
            begin=header.data_begin + entry.begin,
            nbytes=entry.end - entry.begin,
            form=(entry.dtype, entry.shape),
        )


def _are_equal(one: _Stored, other: _Stored) -> bool:
    """Compare two tensors, byte by byte until they differ."""
    if one.form != other.form:
        return False
    with one.file.open("rb") as left, other.file.open("rb") as right:
        left.seek(one.begin)
        right.seek(other.begin)
        for done in range(0, one.nbytes, _BLOCK_BYTES):
            size = min(_BLOCK_BYTES, one.nbytes - done)
            if left.read(size) != right.read(size):
                return False
    return True
