"""Cache: fitted curves and assembled tables kept in a folder between runs.

Files are named after the digest of all they were made from, this package's own sources included,
so a stale one is never asked for. They hold a line of JSON (names, types and shapes) and the
numbers behind it, readable by their owner; whatever cannot be read is made again, and whatever
cannot be written is not kept.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = dict[str, npt.NDArray[Any]]

MAX_FILES = 2000
"""Files that are kept; the oldest go first. A model on four devices takes about forty."""
_MODE = 0o600
_TYPES = ("<f8", "<i8", "|u1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """A folder of numbers by what they were made from."""

    folder: Path

    def read(self, key: str) -> Arrays | None:
        """Return what was kept under a key, ``None`` where there is nothing to be read."""
        try:
            return _unpacked(self._file(key).read_bytes())
        except (OSError, ValueError, TypeError, AttributeError):
            return None

    def write(self, key: str, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Keep arrays of numbers under a key."""
        content = _packed(arrays)
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Whole or not at all: other processes may read it meanwhile. Made readable by its
            # owner alone.
            handle, name = tempfile.mkstemp(dir=self.folder, prefix=".new-")
            with os.fdopen(handle, "wb") as out:
                out.write(content)
            Path(name).chmod(_MODE)
            Path(name).replace(self._file(key))
            self._prune()
        except OSError:
            return

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}.fit"

    def _prune(self) -> None:
        files = list(self.folder.glob("*.fit"))
        if len(files) <= MAX_FILES:
            return
        for file in sorted(files, key=lambda one: one.stat().st_mtime)[: len(files) - MAX_FILES]:
            file.unlink(missing_ok=True)


def _packed(arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    header = {name: [one.dtype.str, list(one.shape)] for name, one in arrays.items()}
    body = b"".join(one.tobytes() for one in arrays.values())
    return json.dumps(header).encode() + b"\n" + body


def _unpacked(content: bytes) -> Arrays:
    """Return the arrays of a file; ``ValueError`` where it is cut or holds anything else."""
    header, _, body = content.partition(b"\n")
    arrays: Arrays = {}
    first = 0
    for name, (kind, shape) in json.loads(header).items():
        if kind not in _TYPES:
            raise ValueError(kind)
        one = np.frombuffer(body, dtype=kind, count=prod(shape), offset=first).reshape(shape)
        first += one.nbytes
        arrays[name] = one
    if first != len(body):
        raise ValueError("found more bytes than the header names")
    return arrays


def digest(*parts: bytes) -> str:
    """Return a key of everything a result was made from, the code apart, which is added."""
    found = sha256(_code())
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.hexdigest()


@lru_cache(maxsize=1)
def _code() -> bytes:
    """Return the digest of this package's sources: other code may fit otherwise."""
    found = sha256(np.__version__.encode())
    for file in sorted(Path(__file__).parent.glob("*.py")):
        found.update(file.read_bytes())
    return found.digest()
