"""The store: layers that were quantized once, on disk, so that nobody quantizes them again.

One safetensors file for each layer and precision, named by its key. A key covers where the weights
came from (``TensorFiles.fingerprint``), how they were quantized, for which dtype, and the format
below: another plan finds what this one made. Entries are written beside their place and renamed
into it, so ranks of one host need no locks; each carries checksums, and one that fails them is
removed and made anew. The folder is its owner's alone (0700, files 0600): checksums find accidents,
permissions keep out others. Losing an entry costs time, so no failure of the store ends a run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from llmpq.errors import SpecError
from llmpq.logging import get_logger
from llmpq.quant.loading.entry_file import FORMAT, Entry, EntryLayout, EntryWriter

_logger = get_logger(__name__)

_ABANDONED_S = 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """A folder of quantized layers.

    Attributes:
        directory: the folder; made by :meth:`opened`.
        limit_bytes: what it may hold; the entries unused for longest go first.
    """

    directory: Path
    limit_bytes: int

    @classmethod
    def opened(cls, directory: Path, limit_bytes: int) -> Store:
        """Make the folder where it is missing.

        Raises:
            SpecError: it cannot be made, or others can write into it.
        """
        if limit_bytes < 0:
            raise SpecError(f"store: found a limit of {limit_bytes} bytes, expected at least 0")
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            found = directory.stat()
        except OSError as error:
            raise SpecError(f"store {directory}: cannot be made: {error}") from error
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise SpecError(
                f"store {directory}: found mode {stat.S_IMODE(found.st_mode):o} of user "
                f"{found.st_uid}, expected a folder of this user alone (mode 700): weights that "
                "others can write are not to be trusted"
            )
        return cls(directory=directory, limit_bytes=limit_bytes)

    def find(self, key: str, layouts: Sequence[EntryLayout]) -> Entry | None:
        """Return an entry to be read; ``None`` when there is none that fits one of the layouts.

        One that does not is removed with a warning.
        """
        try:
            return Entry(self._path(key), layouts)
        except SpecError as error:
            self.discard(key, error)
        except OSError:
            pass
        return None

    def discard(self, key: str, why: Exception) -> None:
        """Remove a damaged entry, and say so."""
        _logger.warning("%s; removed, will be quantized again", why)
        with contextlib.suppress(OSError):
            self._path(key).unlink(missing_ok=True)

    def writer(self, key: str, layout: EntryLayout) -> EntryWriter | None:
        """Begin an entry; ``None`` when the store cannot hold it."""
        if layout.file_bytes > self.limit_bytes:
            return None
        try:
            return EntryWriter(self.directory, key, layout, partial(self._settle, key))
        except OSError as error:
            _logger.warning("store %s: cannot write: %s", self.directory, error)
            return None

    def _settle(self, key: str, temporary: Path) -> None:
        """Give a finished entry its name, then make room."""
        temporary.replace(self._path(key))
        self._evict(keep=self._path(key))

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}.safetensors"

    def _evict(self, keep: Path) -> None:
        """Remove the entries used longest ago until the rest fits, and what crashes left behind."""
        entries: list[tuple[float, int, Path]] = []
        now = time.time()
        for path in self.directory.iterdir():
            try:
                found = path.stat()
            except FileNotFoundError:  # another rank was faster
                continue
            if path.suffix == ".safetensors":
                entries.append((found.st_mtime, found.st_size, path))
            elif path.suffix == ".tmp" and now - found.st_mtime > _ABANDONED_S:
                path.unlink(missing_ok=True)
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= self.limit_bytes:
                return
            if path != keep:
                path.unlink(missing_ok=True)
                total -= size


def entry_key(fingerprint: str, parts: Sequence[str]) -> str:
    """Return the name of an entry: SHA-256 over its format, its weights' fingerprint and more.

    Args:
        fingerprint: from ``TensorFiles.fingerprint``.
        parts: whatever else decides about the codes: precision, dtype, names of the matrices.
    """
    text = json.dumps([FORMAT, fingerprint, *parts])
    return hashlib.sha256(text.encode()).hexdigest()
