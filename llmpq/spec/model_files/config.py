"""The configuration of a model directory, completed and corrected by what its weights say.

Planner and runtime read it here, so that both have the same model. Where files contradict each
other, a line of the log says which one was believed.

The language model of a multimodal ``config.json`` is its text part. Text alone passes through the
same layers as in the language model that the family builds on: Qwen's three position rows are equal
then, so its text model is Qwen2 or Qwen3.

A GGUF file stands for a ``config.json``, too: llama.cpp's converter writes sizes as metadata and
leaves out what follows from the architecture; here they become the fields of transformers again.
What transformers could not compute as llama.cpp does is an error.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from llmpq.errors import SpecError, bad_field
from llmpq.logging import get_logger
from llmpq.spec.families import family_of, known_families
from llmpq.spec.fields import dump_json, read_json
from llmpq.spec.model_files.gguf_form import GgufMetadata, head_dim, layer_count, rotation
from llmpq.spec.model_files.weight_headers import (
    GgufHeader,
    SafetensorsHeader,
    find_gguf,
    find_weights,
    read_gguf_header,
    read_headers,
    weights_dtype,
)

_logger = get_logger(__name__)

CONFIG_FILE = "config.json"

_TIE = "tie_word_embeddings"
_DTYPES = ("dtype", "torch_dtype")
_SHARED = (*_DTYPES, "eos_token_id", "bos_token_id")
_ROPE = ("rope_parameters", "rope_scaling")
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
    config = _untagged(read_json(file, allows_constants=True))
    if not isinstance(config, dict):
        raise bad_field(str(file), "(top level)", config, "a JSON object")
    language = language_fields(config)
    fields = _with_windows(config, _windows_of(language, str(file)))
    has_dtype = any(language.get(name) is not None for name in _DTYPES)
    if has_dtype and language.get(_TIE) is False:
        return fields
    weights = stored_weights(folder)
    if weights is None:
        return fields
    if not has_dtype and weights.dtype is not None:
        fields["dtype"] = weights.dtype
    if language.get(_TIE) is not False and weights.has_own_head:
        if language.get(_TIE):
            _logger.warning(
                "%s: field '%s' is true, but the stored head differs from the embedding: the head "
                "is used",
                file,
                _TIE,
            )
        fields[_TIE] = False
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
class StoredWeights:
    """What the weights of a directory say of the model.

    Attributes:
        dtype: of most weights, ``None`` without floating-point ones.
        has_own_head: whether a head is stored that differs from every embedding.
        names: of the tensors.
    """

    dtype: str | None
    has_own_head: bool
    names: tuple[str, ...]


def stored_weights(folder: Path) -> StoredWeights | None:
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
def _read_weights(folder: Path, stamps: tuple[tuple[int, ...], ...]) -> StoredWeights | None:
    """Read the headers; ``stamps`` make the cache notice changed files."""
    del stamps
    try:
        files = find_weights(folder)
        headers = read_headers(files)
        file_of = files.assign(headers)
        own = _has_own_head(folder, headers, file_of)
    except (SpecError, OSError):
        return None
    dtype = weights_dtype(headers, file_of)
    return StoredWeights(dtype=dtype, has_own_head=own, names=tuple(file_of))


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


def language_fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of the language model; those of any other model as they are.

    Fields that the inner object leaves out and both objects can have are those of the outer one;
    the outer one says first whether the head is tied.
    """
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return _renamed(config)
    shared = {name: config[name] for name in _SHARED if name in config and name not in inner}
    if config.get(_TIE) is not None:
        shared[_TIE] = config[_TIE]
    return _renamed({**inner, **shared})


def _renamed(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or (name := family_of(model_type).name) == model_type:
        return fields
    found = dict(fields)
    found["model_type"] = name
    for name in _ROPE:
        rope = found.get(name)
        if isinstance(rope, Mapping):
            kept = {key: rope[key] for key in rope if not key.startswith("mrope")}
            kinds = {key: kept[key] for key in ("type", "rope_type") if kept.get(key) == "mrope"}
            found[name] = {**kept, **dict.fromkeys(kinds, "default")}
    return found


def gguf_config(model: Path | str) -> dict[str, Any] | None:
    """Return the ``config.json`` of a GGUF model; ``None`` if the model is none.

    Raises:
        SpecError: the file is damaged, of an unknown architecture, or scales positions in a way
            that transformers does not.
    """
    path = find_gguf(model)
    return None if path is None else config_of(read_gguf_header(path))


def _untagged(value: Any) -> Any:
    """Return JSON with numbers in place of transformers' ``{"__float__": "Infinity"}``."""
    if isinstance(value, list):
        return [_untagged(one) for one in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
        return float(value["__float__"])
    return {name: _untagged(one) for name, one in value.items()}


def config_bytes(model: Path | str) -> bytes:
    """Return a model's ``config.json`` for a digest, as stored or as made from a GGUF file.

    Raises:
        SpecError: as :func:`gguf_config`.
        OSError: there is no such file.
    """
    config = gguf_config(model)
    if config is None:
        return (Path(model) / "config.json").read_bytes()
    return dump_json(config).encode()


def model_digest(model: Path | str) -> str:
    """Return a digest of a model's configuration and of the names and sizes of its tensors.

    Copies of a model have the same, in however many files. The weights are not read.

    Raises:
        SpecError: a file is wrong, or missing.
    """
    path = find_gguf(model)
    if path is not None:
        tensors = read_gguf_header(path).tensors
        rows = [(name, one.type.name, one.shape) for name, one in tensors.items()]
    else:
        headers = read_headers(find_weights(Path(model))).values()
        rows = [(n, one.dtype, one.shape) for each in headers for n, one in each.entries.items()]
    try:
        digest = hashlib.sha256(config_bytes(model))
    except OSError as error:
        raise SpecError(f"{error.filename}: cannot be read: {error.strerror}") from None
    digest.update(repr(sorted(rows)).encode())
    return digest.hexdigest()


def config_of(header: GgufHeader) -> dict[str, Any]:
    """Return the ``config.json`` of a header; errors as :func:`gguf_config`."""
    metadata = GgufMetadata(header)
    forms = {one.name: one.gguf for one in known_families() if one.gguf is not None}
    for name, form in forms.items():
        if form.means(metadata):
            own = form.fields(metadata)
            fields = _common(metadata, own.keys()) | {"model_type": name} | own
            metadata.check_all_read()
            return {key: value for key, value in fields.items() if value is not ...}
    known = {name for form in forms.values()
             for name in (form.architecture, *form.other_architectures)}  # fmt: skip
    raise bad_field(
        str(header.path),
        "general.architecture",
        metadata.architecture,
        f"one of {', '.join(sorted(known))}",
    )


_COMMON: dict[str, Callable[[GgufMetadata], Any]] = {
    "hidden_size": lambda found: found.whole("embedding_length"),
    "num_hidden_layers": layer_count,
    "num_attention_heads": lambda found: found.whole("attention.head_count"),
    "num_key_value_heads": lambda found: found.whole(
        "attention.head_count_kv", found.whole("attention.head_count")
    ),
    "head_dim": head_dim,
    "intermediate_size": lambda found: found.whole("feed_forward_length"),
    "max_position_embeddings": lambda found: found.whole("context_length"),
    "rms_norm_eps": lambda found: found.number("attention.layer_norm_rms_epsilon"),
    "rope_parameters": rotation,
}
"""Fields of every family that has no other key for them."""


def _common(metadata: GgufMetadata, own: Collection[str]) -> dict[str, Any]:
    """Return the fields that most families have, without the ``own`` ones of the family."""
    vocabulary = metadata.header.tensors.get("token_embd.weight")
    if vocabulary is None or len(vocabulary.shape) != 2:
        raise SpecError(f"{metadata.header.path}: found no tensor 'token_embd.weight'")
    config = {name: read(metadata) for name, read in _COMMON.items() if name not in own}
    metadata.expect("attention.causal", True)
    config |= {
        "vocab_size": vocabulary.shape[0],
        "tie_word_embeddings": not metadata.has_tensor("output.weight"),
        "dtype": _dtype(metadata.header),
    }
    for name in ("bos", "eos", "padding"):
        token = metadata.header.metadata.get(f"tokenizer.ggml.{name}_token_id")
        config[f"{name.replace('padding', 'pad')}_token_id"] = token
    return config


def _dtype(header: GgufHeader) -> str:
    """Return the number format of most matrices by bytes; bfloat16 for quantized ones."""
    counts: Counter[str] = Counter()
    for tensor in header.tensors.values():
        if len(tensor.shape) > 1:
            counts[tensor.type.name] += tensor.nbytes
    most = counts.most_common(1)[0][0]
    return {"F32": "float32", "F16": "float16"}.get(most, "bfloat16")
