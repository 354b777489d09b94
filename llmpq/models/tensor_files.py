"""TensorFiles: the safetensors of one model directory, as one mapping from name to tensor.

Safetensors only, single or sharded; a directory with only pickled weights is refused. Headers are
checked when the directory is opened, tensors are read when asked for, one at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from safetensors import SafetensorError, safe_open
from torch import Tensor

from llmpq.errors import SpecError, bad_field
from llmpq.models.headers import Header, read_header

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_INDEX_BYTES = 100_000_000
_PICKLED = {".bin", ".pt", ".pth", ".ckpt"}


class TensorFiles:
    """The safetensors files of one directory, as one mapping from name to tensor.

    Args:
        model_dir: directory with ``model.safetensors`` or an index and its shards.

    Raises:
        SpecError: no such weights, a shard that is missing or outside the directory, a header
            that is not consistent, or an index that disagrees with the headers.
    """

    def __init__(self, model_dir: Path | str) -> None:
        self.directory = Path(model_dir)
        self.headers: dict[str, Header] = {}
        self._file_of: dict[str, str] = {}
        if (self.directory / SINGLE_FILE).exists():
            self._add_file(SINGLE_FILE)
            self._file_of = dict.fromkeys(self.headers[SINGLE_FILE].entries, SINGLE_FILE)
        elif (self.directory / INDEX_FILE).exists():
            self._add_shards(self.directory / INDEX_FILE)
        else:
            raise SpecError(self._no_weights())

    @property
    def names(self) -> Iterable[str]:
        """Every tensor, in the order of the files."""
        return self._file_of.keys()

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def shape(self, name: str) -> tuple[int, ...]:
        """Dimensions of a tensor, from the header alone."""
        return self.headers[self._file_of[name]].entries[name].shape

    def where(self, name: str) -> str:
        """File and tensor, for messages."""
        return f"{self.directory / self._file_of[name]}: tensor '{name}'"

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the named tensors, each file opened once and each tensor read when reached.

        Raises:
            SpecError: a tensor that does not exist, or a file that cannot be read any more.
        """
        by_file: dict[str, list[str]] = {}
        for name in names:
            if name not in self._file_of:
                raise SpecError(f"{self.directory}: found no tensor '{name}'")
            by_file.setdefault(self._file_of[name], []).append(name)
        for file, wanted in by_file.items():
            path = self.directory / file
            try:
                with safe_open(path, framework="pt") as tensors:
                    for name in wanted:
                        yield name, tensors.get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise SpecError(f"{path}: cannot be read: {error}") from error

    def _add_file(self, name: str) -> None:
        path = self.directory / name
        if not path.is_file():
            raise SpecError(f"{path}: found no such file, expected a shard of the checkpoint")
        if not self._may_read(path):
            raise SpecError(f"{path}: leads outside the model directory")
        self.headers[name] = read_header(path)

    def _may_read(self, path: Path) -> bool:
        """Whether a link stays inside the directory, or in the blobs of a hub cache around it."""
        roots = [self.directory.resolve()]
        snapshots = roots[0].parent
        if snapshots.name == "snapshots":
            roots.append(snapshots.parent / "blobs")
        return any(path.resolve().is_relative_to(root) for root in roots)

    def _add_shards(self, index: Path) -> None:
        weight_map = _read_weight_map(index)
        for name in sorted(set(weight_map.values())):
            if PurePosixPath(name).name != name or "\\" in name or name in {"", ".", ".."}:
                raise bad_field(str(index), "weight_map", name, "a file of this directory")
            self._add_file(name)
        for tensor, file in weight_map.items():
            if tensor not in self.headers[file].entries:
                raise SpecError(f"{index}: tensor '{tensor}' is not in {file}")
        self._file_of = dict(weight_map)

    def _no_weights(self) -> str:
        pickled = [p.name for p in sorted(self.directory.glob("*")) if p.suffix in _PICKLED]
        if pickled:
            return (
                f"{self.directory}: found only pickled weights ({pickled[0]}), expected "
                "safetensors; pickles can run code and are never read: convert the checkpoint"
            )
        return f"{self.directory}: found no weights, expected {SINGLE_FILE} or {INDEX_FILE}"


def _read_weight_map(index: Path) -> dict[str, str]:
    if index.stat().st_size > MAX_INDEX_BYTES:
        raise SpecError(f"{index}: larger than {MAX_INDEX_BYTES} bytes, expected an index")
    try:
        fields = json.loads(index.read_bytes())
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{index}: not JSON: {error}") from error
    weight_map = fields.get("weight_map") if isinstance(fields, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise bad_field(str(index), "weight_map", weight_map, "an object of tensors and files")
    for file in weight_map.values():
        if not isinstance(file, str):
            raise bad_field(str(index), "weight_map", file, "the name of a file")
    return weight_map
