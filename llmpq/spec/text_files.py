"""Text files as programs of today write them: UTF-8, with a byte-order mark, or UTF-16.

PowerShell and Notepad begin UTF-8 with a mark, and PowerShell's ``>`` writes UTF-16.
"""

from __future__ import annotations

import codecs
import os
from pathlib import Path

from llmpq.errors import SpecError

LFS_BYTES = 24
"""Bytes at the start of a file that :func:`check_downloaded` needs."""

_LFS_POINTER = b"version https://git-lfs"
_LEAST_BYTES = 8
_MARK_BYTES = 3


def encoding_of(head: bytes) -> str:
    """Return the encoding of a text file by its first bytes, a mark included."""
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    return "utf-8-sig"


def encoding_of_file(path: Path) -> str:
    """Return the encoding of a text file; a pipe or a device is UTF-8 without a mark.

    Raises:
        OSError: it cannot be read.
    """
    if not path.is_file():
        return "utf-8"
    with path.open("rb") as stream:
        return encoding_of(stream.read(_MARK_BYTES))


def decode_text(data: bytes, where: str) -> str:
    """Return the text of a file's bytes, without a mark.

    Raises:
        SpecError: they are neither UTF-8 nor UTF-16 with a mark.
    """
    try:
        return data.decode(encoding_of(data))
    except UnicodeDecodeError as error:
        raise SpecError(
            f"{where}: found {error.object[error.start : error.start + 1]!r} at byte "
            f"{error.start}, expected text in UTF-8: save the file as UTF-8"
        ) from None


def read_text(path: Path) -> str:
    """Return the text of a file, without a mark; every end of a line becomes a line feed.

    Raises:
        OSError: it cannot be read.
        SpecError: as :func:`decode_text`.
    """
    text = decode_text(path.read_bytes(), str(path))
    return text.replace("\r\n", "\n").replace("\r", "\n")


def check_downloaded(where: str | os.PathLike[str], head: bytes) -> None:
    """Check that a file is not a pointer of Git LFS, as a clone without git-lfs has them.

    Args:
        where: name of the file.
        head: its first bytes, at least 8 of them.

    Raises:
        SpecError: it is one.
    """
    head = head[: len(_LFS_POINTER)]
    if len(head) >= _LEAST_BYTES and _LFS_POINTER.startswith(head):
        raise SpecError(
            f"{os.fspath(where)}: found a pointer of Git LFS: the file itself was not downloaded; "
            "run 'git lfs pull' in its folder, or download the model with 'hf download'"
        )
