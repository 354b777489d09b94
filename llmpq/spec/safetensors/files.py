"""Which safetensors files hold the weights of a model directory.

One file, shards with an index, or shards without one, whose tensors are those of their headers. An
index counts before a single file, as its other readers do, unless a shard of it is missing; a
tensor is where the index says, whatever else a shard holds.
Links are followed wherever they lead: hub caches and folders of links are made of them. A name in
an index is a name, not a path.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from llmpq.errors import SpecError, bad_field
from llmpq.spec.fields import check_downloaded
from llmpq.spec.safetensors.headers import SafetensorsHeader, read_header, unique_keys

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_INDEX_BYTES = 32 * 1024 * 1024
FLOATING = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""torch's name of each dtype of weights that are not codes."""

_SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)")
_ADAPTER = "adapter_model"
_OF_CODES = ".scales"
_PICKLED = {".bin", ".pt", ".pth", ".ckpt"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """The safetensors files of a model directory.

    Attributes:
        directory: where they are.
        names: of the files, each once.
        index: path of the index, ``None`` without one.
        file_of: file of every tensor by the index, empty without one.
    """

    directory: Path
    names: tuple[str, ...]
    index: Path | None
    file_of: Mapping[str, str]

    def assign(self, headers: Mapping[str, SafetensorsHeader]) -> dict[str, str]:
        """Return the file of every tensor.

        Args:
            headers: of all files, by name.

        Raises:
            SpecError: the index disagrees with the headers, or two files have a tensor.
        """
        if self.index is not None:
            for tensor, file in self.file_of.items():
                if tensor not in headers[file].entries:
                    raise SpecError(f"{self.index}: tensor '{tensor}' is not in {file}")
            return dict(self.file_of)
        found: dict[str, str] = {}
        for file in self.names:
            for tensor in headers[file].entries:
                if tensor in found:
                    raise SpecError(
                        f"{self.directory}: tensor '{tensor}' is in {found[tensor]} and in {file}, "
                        "expected once"
                    )
                found[tensor] = file
        return found


def find_weights(directory: Path) -> WeightFiles:
    """Find the safetensors files of a model directory, without reading them.

    Raises:
        SpecError: there are none, some of them are missing, or those of several models.
    """
    is_single = (directory / SINGLE_FILE).exists()
    index = directory / INDEX_FILE
    if index.exists():
        file_of = _read_weight_map(index)
        names = tuple(sorted(set(file_of.values())))
        for name in names:
            if PurePosixPath(name).name != name or "\\" in name or name in {"", ".", ".."}:
                raise bad_field(str(index), "weight_map", name, "a file of this directory")
        if not is_single or all((directory / name).exists() for name in names):
            return WeightFiles(directory=directory, names=names, index=index, file_of=file_of)
    names = (SINGLE_FILE,) if is_single else _without_index(directory)
    return WeightFiles(directory=directory, names=names, index=None, file_of={})


def read_headers(files: WeightFiles) -> dict[str, SafetensorsHeader]:
    """Read the headers of all files, by name.

    Raises:
        SpecError: a file cannot be read, or its header is not consistent.
    """
    return {name: _read(files.directory / name) for name in files.names}


def weights_dtype(
    headers: Mapping[str, SafetensorsHeader], file_of: Mapping[str, str]
) -> str | None:
    """Return torch's name of the dtype of most weights, by bytes, without scales of codes.

    Args:
        headers: of all files, by name.
        file_of: file of every tensor of the model; shards may hold others.

    Returns:
        ``None`` if no tensor holds floating-point numbers.
    """
    stored: Counter[str] = Counter()
    for name, file in file_of.items():
        entry = headers[file].entries[name]
        if entry.dtype in FLOATING and not name.endswith(_OF_CODES):
            stored[FLOATING[entry.dtype]] += entry.end - entry.begin
    return stored.most_common(1)[0][0] if stored else None


def _read(path: Path) -> SafetensorsHeader:
    try:
        with path.open("rb") as stream:
            return read_header(stream, file_bytes=path.stat().st_size, where=str(path))
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror or error}") from None


def _without_index(directory: Path) -> tuple[str, ...]:
    """Return the files of the only checkpoint of a directory without an index."""
    found: dict[str, list[str]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        shard = _SHARD.fullmatch(path.stem)
        found.setdefault(shard[1] if shard else path.stem, []).append(path.name)
    adapters = found.pop(_ADAPTER, [])
    if len(found) > 1 and "model" in found:
        found = {"model": found["model"]}  # beside copies in other layouts (consolidated)
    if len(found) > 1:
        raise SpecError(
            f"{directory}: found the weights {', '.join(names[0] for names in found.values())}, "
            f"expected one checkpoint, or {INDEX_FILE}"
        )
    if not found:
        raise SpecError(_no_weights(directory, adapters))
    ((stem, names),) = found.items()
    _check_shards(directory, stem, names)
    return tuple(names)


def _check_shards(directory: Path, stem: str, names: Sequence[str]) -> None:
    """Check that no shard is missing."""
    shards = [found for name in names if (found := _SHARD.fullmatch(Path(name).stem))]
    counts = {shard[3] for shard in shards}
    if not counts:
        return
    if len(counts) > 1 or len(shards) != len(names):
        raise SpecError(
            f"{directory}: found {', '.join(names[:3])}, expected shards of one checkpoint"
        )
    (count,) = counts
    known = {int(shard[2]) for shard in shards}
    missing = [number for number in range(1, int(count) + 1) if number not in known]
    if missing:
        width = len(shards[0][2])
        raise SpecError(
            f"{directory}: found {len(known)} of {int(count)} shards, "
            f"'{stem}-{missing[0]:0{width}d}-of-{count}.safetensors' is missing"
        )


def _no_weights(directory: Path, adapters: Sequence[str]) -> str:
    pickled = [path.name for path in sorted(directory.glob("*")) if path.suffix in _PICKLED]
    if pickled:
        return (
            f"{directory}: found only pickled weights ({pickled[0]}), expected "
            "safetensors; pickles can run code and are never read: convert the checkpoint"
        )
    if adapters:
        return f"{directory}: found only an adapter ({adapters[0]}), expected a whole model"
    return f"{directory}: found no weights, expected {SINGLE_FILE} or {INDEX_FILE}"


def _read_weight_map(index: Path) -> dict[str, str]:
    try:
        if index.stat().st_size > MAX_INDEX_BYTES:
            raise SpecError(f"{index}: larger than {MAX_INDEX_BYTES} bytes, expected an index")
        data = index.read_bytes()
        check_downloaded(index, data)
        fields = json.loads(data, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError, OSError) as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError(f"{index}: not JSON: {error}") from error
    weight_map = fields.get("weight_map") if isinstance(fields, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise bad_field(str(index), "weight_map", weight_map, "an object of tensors and files")
    for file in weight_map.values():
        if not isinstance(file, str):
            raise bad_field(str(index), "weight_map", file, "the name of a file")
    return weight_map
