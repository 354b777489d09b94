"""OffloadedKV: a stage's part of KV blocks in host memory and in files.

The scheduler on the master decides what is where (``OffloadedBlocks``); every stage makes the same
copies of its own layers, in the same order: those of a ``COPY`` frame, between two steps. On a CUDA
device host memory is pinned, and copies queue up with the steps; a file is read at once.

A file holds one block: a header with digest, key and CRC-32, and the bytes of its layers. Its name
is its place, so the files never take more than their budget. A thread writes them, under a
temporary name, and renames them: steps wait for a disk only when ``WRITE_BUFFER_BYTES`` wait for
it. A file that is missing, damaged, or of another key or digest is a miss. The first error of a
disk is a warning; the run goes on.

Shapes: n blocks, N tokens, B bytes of a block.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import threading
import zlib
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from llmpq.batching.blocks import BlockCopy, OffloadLimits, Tier
from llmpq.dist.kv.cache import KVCache, TokenIndex
from llmpq.dist.transport.frames import Frame, FrameKind
from llmpq.errors import StageError
from llmpq.logging import get_logger
from llmpq.spec.runtime_constants import KV_FILE_HEADER_BYTES
from llmpq.units import MIB

_log = get_logger(__name__)
MAX_COPIES = 500
"""Copies of a frame, whose text with all keys is less than ``MAX_TEXT_BYTES``."""
BLOCKS_AT_ONCE = 16
"""Blocks that are gathered or scattered together: more would take memory alone."""
WRITE_BUFFER_BYTES = 32 * MIB
"""Bytes of blocks that wait to be written."""
_MAGIC = b"LPKV"
_FIXED = struct.Struct("<4sI32s32sQ")
_DIGEST_END = struct.calcsize("<4sI32s")
_CHECKSUM = struct.Struct("<I")


def copy_frame(copies: Sequence[BlockCopy], unread: Sequence[int] = ()) -> Frame:
    """Return the frame of some copies; ``unread`` are the places of those that a stage missed."""
    found = [
        (*copy[:4], copy.key.hex() if isinstance(copy.key, bytes) else "", copy.has_window)
        for copy in copies
    ]
    text = json.dumps([found, list(unread)], separators=(",", ":"))
    return Frame(kind=FrameKind.COPY, text=text.encode())


def copies_of_frame(frame: Frame) -> tuple[list[BlockCopy], list[int]]:
    """Return the copies of a frame, and the places of those that a stage before missed.

    Raises:
        StageError: it is not what :func:`copy_frame` returns.
    """
    try:
        found, unread = json.loads(frame.text)
        copies = [
            BlockCopy(source, int(place), target, int(other), bytes.fromhex(key), bool(window))
            for source, place, target, other, key, window in found
        ]
        if not {tier for copy in copies for tier in (copy.source, copy.target)} <= {
            *get_args(Tier)
        }:
            raise ValueError
        return copies, [int(place) for place in unread]
    except (ValueError, TypeError):
        raise StageError("found unreadable copies of KV blocks, expected those of a step") from None


class BlockFiles:
    """Files of blocks in a folder that only this user can enter; the folder is made.

    Blocks are written by a thread, in order; :meth:`close` waits for it. What is not written yet is
    read from memory.

    Args:
        folder: of the run; each rank has a folder of its own in it.
        digest: 32 bytes of everything that the content depends on, besides the tokens.
        buffer_bytes: of blocks that wait to be written, or one block; :meth:`write` waits for room.
    """

    def __init__(self, folder: Path, digest: bytes, buffer_bytes: int = WRITE_BUFFER_BYTES) -> None:
        self.folder = folder
        self._digest = digest
        self._buffer_bytes = buffer_bytes
        self._is_warned = False  # only the first error is reported
        self._changed = threading.Condition()
        self._waiting: dict[str, tuple[bytes, Tensor]] = {}  # key and bytes by name
        self._names: deque[str] = deque()
        self._num_bytes = 0
        self._is_closed = False
        self._thread: threading.Thread | None = None
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            self._warn(error)

    def write(self, name: str, key: bytes, data: Tensor) -> None:
        """Have a block written, uint8 ``[B]``, which stays as it is; an error is a warning."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="kv-files", daemon=True)
            self._thread.start()
        size = data.numel()
        with self._changed:
            self._changed.wait_for(
                lambda: not self._waiting or self._num_bytes + size <= self._buffer_bytes
            )
            self._waiting[name] = key, data
            self._names.append(name)
            self._num_bytes += size
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all blocks are written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting)

    def close(self) -> None:
        """Write what waits, and end the thread."""
        self.flush()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._names or self._is_closed)
                if not self._names:
                    return
                name = self._names.popleft()
                block = self._waiting[name]
            self._write(name, *block)
            with self._changed:
                self._num_bytes -= block[1].numel()
                if name not in self._names:  # else it has another content since
                    del self._waiting[name]
                self._changed.notify_all()

    def _write(self, name: str, key: bytes, data: Tensor) -> None:
        path, temporary = self.folder / name, self.folder / f"{name}.tmp"
        try:
            path.unlink(missing_ok=True)  # what it held is forgotten; two would exceed the budget
            content = data.numpy().data
            header = self._header(key, data.numel())
            header += _CHECKSUM.pack(zlib.crc32(content, zlib.crc32(header)))
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
            with open(os.open(temporary, flags, 0o600), "wb") as file:  # noqa: PTH123  a descriptor
                file.write(header.ljust(KV_FILE_HEADER_BYTES, b"\0"))
                file.write(content)
            temporary.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            self._warn(error)

    def read(self, name: str, key: bytes, size: int) -> Tensor | None:
        """Return the ``size`` bytes of a block, ``None`` if its file does not have them."""
        with self._changed:
            if name in self._waiting:
                own_key, data = self._waiting[name]
                return data if own_key == key and data.numel() == size else None
        expected = self._header(key, size)
        try:
            found = bytearray((self.folder / name).read_bytes())
        except OSError:
            return None
        content = memoryview(found)[KV_FILE_HEADER_BYTES:]
        if len(content) != size or found[: len(expected)] != expected:
            return None
        (checksum,) = _CHECKSUM.unpack_from(found, len(expected))
        if checksum != zlib.crc32(content, zlib.crc32(expected)):
            return None
        return torch.frombuffer(found, dtype=torch.uint8, offset=KV_FILE_HEADER_BYTES)

    def found(self) -> list[tuple[str, bytes]]:
        """Return names and keys of the files, oldest first; remove those of others."""
        found: list[tuple[int, str, bytes]] = []
        with contextlib.suppress(OSError):
            for path in self.folder.iterdir():
                with path.open("rb") as file:
                    header = file.read(_FIXED.size)
                if header[:_DIGEST_END] == self._header(b"", 0)[:_DIGEST_END] and not path.suffix:
                    key = _FIXED.unpack(header)[3]
                    found.append((path.stat().st_mtime_ns, path.name, key))
                else:
                    path.unlink()
        return [(name, key) for _, name, key in sorted(found)]

    def remove(self, name: str) -> None:
        """Remove a file."""
        with contextlib.suppress(OSError):
            (self.folder / name).unlink()

    def _header(self, key: bytes, size: int) -> bytes:
        return _FIXED.pack(_MAGIC, 1, self._digest, key, size)

    def _warn(self, error: OSError) -> None:
        if not self._is_warned:
            _log.warning(
                "KV blocks on disk: %s: %s; what cannot be written is computed again",
                self.folder,
                error.strerror or error,
            )
            self._is_warned = True


class OffloadedKV:
    """Host memory and files for the blocks of a stage.

    Args:
        cache: the stage's blocks.
        limits: copies of blocks.
        files: of the blocks on disk; ``None`` without any.
    """

    def __init__(self, cache: KVCache, limits: OffloadLimits, files: BlockFiles | None) -> None:
        self._cache = cache
        self._files = files
        self._num_disk = limits.sizes[1], limits.window_sizes[1]
        layers = [pair for pair in enumerate(cache.token_bytes, cache.first_layer) if pair[1]]
        self._layers = [
            [(layer, size) for layer, size in layers if cache.has_window(layer) == has_window]
            for has_window in (False, True)
        ]
        self._sizes = [sum(size for _, size in own) * cache.block_size for own in self._layers]
        self._is_pinned = cache.device.type == "cuda"
        self._host = [
            torch.empty((count, size), dtype=torch.uint8, pin_memory=self._is_pinned)
            for count, size in zip(
                (limits.sizes[0], limits.window_sizes[0]), self._sizes, strict=True
            )
        ]

    def close(self) -> None:
        """Wait until all files are written."""
        if self._files is not None:
            self._files.close()

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(part.nbytes for part in self._host)

    def stored(self) -> list[tuple[bool, bytes, int]]:
        """Return what the files of ranks that ended hold, oldest first; remove other files.

        Returns:
            Whether of layers with windows, key and place of each block.
        """
        if self._files is None:
            return []
        places = {
            _name(place, has_window=has_window): (has_window, place)
            for has_window in (False, True)
            for place in range(self._num_disk[has_window])
        }
        found = []
        for name, key in self._files.found():
            if name in places:
                has_window, place = places[name]
                found.append((has_window, key, place))
            else:
                self._files.remove(name)
        return found

    @torch.inference_mode()
    def copy(self, copies: Sequence[BlockCopy]) -> list[int]:
        """Make copies in order; return the places of those whose file does not have them.

        Raises:
            StageError: a place does not exist.
        """
        unread: list[int] = []
        first = 0
        while first < len(copies):
            end = _end_of_group(copies, first)
            group = copies[first:end]
            self._check(group)
            if not self._sizes[group[0].has_window]:
                pass  # no layer of this stage has these blocks
            elif group[0].target == "blocks":
                data = self._stored(group)
                found = [place for place, one in enumerate(data) if one is not None]
                unread += [first + place for place, one in enumerate(data) if one is None]
                self._load(
                    [group[place] for place in found], [one for one in data if one is not None]
                )
            else:
                self._save(group)
            first = end
        return unread

    def _check(self, group: Sequence[BlockCopy]) -> None:
        window = group[0].has_window
        blocks = self._cache.num_window_blocks if window else self._cache.num_blocks
        sizes = {
            "blocks": blocks or 0,
            "host": len(self._host[window]),
            "disk": 0 if self._files is None else self._num_disk[window],
        }
        for one in group:
            for tier, place in ((one.source, one.source_place), (one.target, one.target_place)):
                if not 0 <= place < sizes[tier]:
                    raise StageError(
                        f"KV blocks: found a copy of place {place} of {tier}, expected one of "
                        f"[0, {sizes[tier]})"
                    )

    def _stored(self, group: Sequence[BlockCopy]) -> list[Tensor | None]:
        """Return the bytes of blocks in host memory or in files."""
        window = group[0].has_window
        if group[0].source == "host":
            return [self._host[window][one.source_place] for one in group]
        assert self._files is not None
        return [
            self._files.read(
                _name(one.source_place, has_window=window), one.key, self._sizes[window]
            )
            for one in group
            if isinstance(one.key, bytes)
        ]

    def _load(self, group: Sequence[BlockCopy], data: Sequence[Tensor]) -> None:
        """Put bytes into blocks."""
        if not group:
            return
        window, device = group[0].has_window, self._cache.device
        staged = torch.empty((len(data), self._sizes[window]), dtype=torch.uint8, device=device)
        for row, one in zip(staged, data, strict=True):
            row.copy_(one, non_blocking=self._is_pinned)
        tokens, first = self._tokens([one.target_place for one in group]), 0
        for layer, size in self._layers[window]:
            end = first + size * self._cache.block_size
            part = staged[:, first:end].reshape(len(data) * self._cache.block_size, size)
            self._cache.unpack(layer, tokens, part)
            first = end

    def _save(self, group: Sequence[BlockCopy]) -> None:
        """Copy blocks to host memory or to files, and from there to files."""
        window, data = group[0].has_window, self._data_of(group)
        if group[0].target == "host":
            for row, one in zip(data, group, strict=True):
                self._host[window][one.target_place].copy_(row, non_blocking=self._is_pinned)
            return
        assert self._files is not None
        if self._is_pinned:
            torch.cuda.synchronize(self._cache.device)  # copies to host memory may be queued
        for row, one in zip(data, group, strict=True):
            assert isinstance(one.key, bytes)
            own = row.clone() if one.source == "host" else row.cpu()
            self._files.write(_name(one.target_place, has_window=window), one.key, own)

    def _data_of(self, group: Sequence[BlockCopy]) -> Sequence[Tensor]:
        """Return the bytes of blocks or of host memory: each uint8 ``[B]``."""
        window, places = group[0].has_window, [one.source_place for one in group]
        if group[0].source == "host":
            return [self._host[window][place] for place in places]
        tokens = self._tokens(places)
        parts = [
            self._cache.pack(layer, tokens).reshape(len(places), self._cache.block_size * size)
            for layer, size in self._layers[window]
        ]
        return [*torch.cat(parts, dim=1)]  # n times [B]

    def _tokens(self, blocks: Sequence[int]) -> TokenIndex:
        """Return all tokens of some blocks, one block after the other."""
        size = self._cache.block_size
        tables = [(block,) for block in blocks]
        return self._cache.index_of(tables, [0] * len(tables), [size] * len(tables))


def _end_of_group(copies: Sequence[BlockCopy], first: int) -> int:
    """Return the end of the copies from ``first`` on that can be made together."""
    kind, targets = _kind(copies[first]), {copies[first].target_place}
    for end in range(first + 1, min(len(copies), first + BLOCKS_AT_ONCE)):
        if _kind(copies[end]) != kind or copies[end].target_place in targets:
            return end
        targets.add(copies[end].target_place)
    return min(len(copies), first + BLOCKS_AT_ONCE)


def _kind(copy: BlockCopy) -> tuple[Tier, Tier, bool]:
    return copy.source, copy.target, copy.has_window


def _name(place: int, *, has_window: bool) -> str:
    return f"window-{place}" if has_window else f"block-{place}"
