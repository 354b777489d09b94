"""Frames: the messages between ranks, and their layout on the wire.

A frame is a header of one fixed size, equal for all ranks of a run, and a payload of exactly the
bytes that the header announces. The header names the plan and is checked against the plan's limits
before anything is allocated; nothing is unpickled. The transport checks the payloads.

Header, little-endian, then one row of the table for each of ``max_rows`` sequences::

    4s magic | B version | B kind | B dtype | B buffer | 8s plan digest | Q sequence | Q micro_batch
    | I rows | I tokens | I hidden | I layer | Q payload bytes
    | table: rows x (I slot, I first, I length, Q origin), zeros | I crc32 of everything before

``buffer`` is 0 if the payload follows in the stream, else the buffer of the link's shared memory
that holds it (``transport.shared_memory``). In a frame of keys and values (``KV``), ``tokens`` are
those of all rows, ``hidden`` is the bytes of one token and ``layer`` is set; else it is 0.

Shapes: R rows (sequences), T tokens a row, H hidden size, N tokens of all rows, B bytes of a token.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

from llmpq.errors import StageError

MAGIC = b"LPQ1"
VERSION = 3
MAX_TEXT_BYTES = 64 * 1024
"""The longest text of a control frame."""

_FIXED = struct.Struct("<4sBBBB8sQQIIIIQ")
_ROW = struct.Struct("<IIIQ")
_CHECKSUM = struct.Struct("<I")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class FrameKind(IntEnum):
    """The kind of a frame."""

    PREFILL = 1
    DECODE = 2
    READY = 3
    SHUTDOWN = 4
    STATS = 5
    ERROR = 6
    HEARTBEAT = 7
    TRACE = 8
    KV = 9


_KINDS = {int(kind): kind for kind in FrameKind}
_TENSOR_KINDS = (FrameKind.PREFILL, FrameKind.DECODE)
LAST_KINDS = (FrameKind.SHUTDOWN, FrameKind.ERROR)
"""No frame follows one of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameLimits:
    """The largest frames of a run; equal on all ranks.

    Attributes:
        digest: 8 bytes that identify the plan and the model.
        max_context: tokens of a slot.
        prefill_rows, prefill_tokens: largest prefill micro-batch ``[R, T]``.
        kv_token_bytes: of every layer of the model, the bytes of one token's keys and values;
            empty where none travel.
    """

    digest: bytes
    num_slots: int
    max_context: int
    prefill_rows: int
    prefill_tokens: int
    decode_rows: int
    hidden_size: int
    dtype: torch.dtype
    kv_token_bytes: tuple[int, ...] = ()

    @property
    def max_rows(self) -> int:
        """Rows in the table of every header."""
        return max(self.prefill_rows, self.decode_rows)

    @property
    def header_bytes(self) -> int:
        """Size of every header of the run."""
        return _FIXED.size + self.max_rows * _ROW.size + _CHECKSUM.size

    @property
    def max_payload_bytes(self) -> int:
        """Size of the largest payload other than a text."""
        prefill_tokens = self.prefill_rows * self.prefill_tokens
        hidden = max(prefill_tokens, self.decode_rows) * self.hidden_size * self.dtype.itemsize
        return max(hidden, prefill_tokens * max(self.kv_token_bytes, default=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sequence of a micro-batch.

    Attributes:
        slot: the KV slot it owns.
        first: absolute position of its first token in this step.
        length: tokens in its slot after the step, without padding.
        origin: number of the prefill micro-batch that filled the slot; distinguishes the owners
            of a slot where keys and values are sent.
    """

    slot: int
    first: int
    length: int
    origin: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Frame:
    """A message between two ranks.

    Attributes:
        micro_batch: number of the micro-batch, counted by the master.
        rows: the sequences of a micro-batch.
        hidden: their hidden states ``[R, T, H]``.
        text: bytes of a control frame (UTF-8 JSON).
        layer: of keys and values.
        cached: keys and values of the rows' tokens, as the cache stores them: uint8 ``[N, B]``.
    """

    kind: FrameKind
    micro_batch: int = 0
    rows: tuple[Row, ...] = ()
    hidden: Tensor | None = None
    text: bytes = b""
    layer: int = 0
    cached: Tensor | None = None

    @property
    def payload(self) -> Tensor | None:
        """The bytes after the header, on the CPU; ``None`` if there are none."""
        if self.hidden is not None:
            # Sockets and gloo send host memory: the states of a CUDA stage are copied here.
            hidden = self.hidden if self.hidden.is_cpu else self.hidden.to("cpu")
            return hidden.reshape(-1).view(torch.uint8)
        if self.cached is not None:
            return self.cached.to("cpu").contiguous().reshape(-1)
        if self.text:
            return torch.frombuffer(bytearray(self.text), dtype=torch.uint8)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """A checked header: the frame without its payload, and the payload's shape and place."""

    frame: Frame
    shape: tuple[int, int, int]
    payload_bytes: int
    buffer: int


def encode_header(frame: Frame, limits: FrameLimits, sequence: int, buffer: int = 0) -> bytes:
    """Return the header of ``frame``, before which ``sequence`` frames were sent over its link.

    ``buffer`` of the shared memory holds the payload; it follows if that is 0.
    """
    rows, tokens, hidden, dtype, size = 0, 0, 0, 0, len(frame.text)
    if frame.hidden is not None:
        rows, tokens, hidden = frame.hidden.shape
        dtype, size = _DTYPES.index(frame.hidden.dtype) + 1, frame.hidden.nbytes
    elif frame.cached is not None:
        rows, (tokens, hidden), size = len(frame.rows), frame.cached.shape, frame.cached.nbytes
    fixed = _FIXED.pack(
        MAGIC, VERSION, frame.kind, dtype, buffer, limits.digest, sequence, frame.micro_batch,
        rows, tokens, hidden, frame.layer, size,
    )  # fmt: skip
    table = b"".join(_ROW.pack(row.slot, row.first, row.length, row.origin) for row in frame.rows)
    body = (fixed + table).ljust(limits.header_bytes - _CHECKSUM.size, b"\0")
    return body + _CHECKSUM.pack(zlib.crc32(body))


def decode_header(data: bytes, limits: FrameLimits, sequence: int, buffers: int = 0) -> Header:
    """Check a header of ``limits.header_bytes`` bytes against the run's limits.

    ``sequence`` frames were received over this link before; it has so many shared ``buffers``.

    Raises:
        StageError: it is not what :func:`encode_header` of this run writes.
    """
    _expect("header size", len(data), limits.header_bytes)
    body, checksum = data[: -_CHECKSUM.size], data[-_CHECKSUM.size :]
    _expect("checksum", _CHECKSUM.unpack(checksum)[0], zlib.crc32(body))
    (
        magic, version, kind, dtype, buffer, digest, number, micro_batch,
        rows, tokens, hidden, layer, size,
    ) = _FIXED.unpack_from(body)  # fmt: skip
    _expect("magic", magic, MAGIC)
    _expect("version", version, VERSION)
    _expect("plan digest", digest, limits.digest)
    _expect("sequence number", number, sequence)
    if buffer > (buffers if kind in _TENSOR_KINDS else 0):
        raise _refused("buffer", buffer, f"at most {buffers}, and 0 without hidden states")
    if kind not in _KINDS:
        raise _refused("kind", kind, f"one of {list(_KINDS)}")
    frame = Frame(
        kind=_KINDS[kind],
        micro_batch=micro_batch,
        rows=_read_table(body, rows, limits),
        layer=layer,
    )
    header = Header(frame=frame, shape=(rows, tokens, hidden), payload_bytes=size, buffer=buffer)
    if frame.kind is FrameKind.KV:
        _check_cached(header, dtype, limits)
        return header
    _expect("layer", layer, 0)
    if frame.kind in _TENSOR_KINDS:
        _check_tensor(header, dtype, limits)
    else:
        _expect("dtype and shape of a control frame", (dtype, *header.shape), (0, 0, 0, 0))
        if size > MAX_TEXT_BYTES:
            raise _refused("payload bytes", size, f"at most {MAX_TEXT_BYTES}")
    return header


def assemble(header: Header, payload: Tensor | None, limits: FrameLimits) -> Frame:
    """Join a header and its payload, uint8 ``[payload_bytes]``; ``None`` if it has none."""
    _expect("payload size", 0 if payload is None else payload.numel(), header.payload_bytes)
    if payload is None:
        return header.frame
    if header.frame.kind in _TENSOR_KINDS:
        hidden = payload.view(limits.dtype).reshape(header.shape)  # [R, T, H]
        return replace(header.frame, hidden=hidden)
    if header.frame.kind is FrameKind.KV:
        return replace(header.frame, cached=payload.reshape(header.shape[1:]))  # [N, B]
    return replace(header.frame, text=payload.numpy().tobytes())


def _read_table(body: bytes, rows: int, limits: FrameLimits) -> tuple[Row, ...]:
    if rows > limits.max_rows:
        raise _refused("rows", rows, f"at most {limits.max_rows}")
    end = _FIXED.size + rows * _ROW.size
    if body.count(0, end) != len(body) - end:
        raise _refused("table", "entries beyond its rows", "zeros")
    return tuple(
        Row(slot=slot, first=first, length=length, origin=origin)
        for slot, first, length, origin in _ROW.iter_unpack(body[_FIXED.size : end])
    )


def _check_tensor(header: Header, dtype: int, limits: FrameLimits) -> None:
    rows, tokens, hidden = header.shape
    is_prefill = header.frame.kind is FrameKind.PREFILL
    most_rows = limits.prefill_rows if is_prefill else limits.decode_rows
    most_tokens = limits.prefill_tokens if is_prefill else 1
    if not 1 <= rows <= most_rows or not 1 <= tokens <= most_tokens:
        raise _refused("shape", header.shape, f"at most [{most_rows}, {most_tokens}] rows, tokens")
    _expect("hidden size", hidden, limits.hidden_size)
    _expect("dtype", dtype, _DTYPES.index(limits.dtype) + 1)
    _expect("payload bytes", header.payload_bytes, rows * tokens * hidden * limits.dtype.itemsize)
    _check_slots(header, limits)
    for row in header.frame.rows:
        # The row's valid tokens end inside this step; padding after them must fit the slot too.
        if not row.first < row.length <= row.first + tokens <= limits.max_context:
            raise _refused("row", row, f"positions of a slot of {limits.max_context} tokens")


def _check_cached(header: Header, dtype: int, limits: FrameLimits) -> None:
    frame, (rows, tokens, width) = header.frame, header.shape
    if frame.layer >= len(limits.kv_token_bytes):
        raise _refused("layer", frame.layer, f"one of {len(limits.kv_token_bytes)} on this link")
    if not 1 <= rows <= limits.prefill_rows:
        raise _refused("rows", rows, f"1 to {limits.prefill_rows}")
    _expect("dtype", dtype, 0)
    _expect("bytes of a token", width, limits.kv_token_bytes[frame.layer])
    _check_slots(header, limits)
    for row in frame.rows:
        if row.first != 0 or not 1 <= row.length <= limits.prefill_tokens:
            raise _refused("row", row, f"a prompt of at most {limits.prefill_tokens} tokens")
        _expect("origin", row.origin, frame.micro_batch)
    _expect("tokens", tokens, sum(row.length for row in frame.rows))
    _expect("payload bytes", header.payload_bytes, tokens * width)


def _check_slots(header: Header, limits: FrameLimits) -> None:
    slots = [row.slot for row in header.frame.rows]
    if len(set(slots)) != header.shape[0] or max(slots) >= limits.num_slots:
        raise _refused("slots", slots, f"distinct numbers below {limits.num_slots}")


def _expect(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise _refused(what, found, repr(expected))


def _refused(what: str, found: object, expected: str) -> StageError:
    return StageError(f"frame refused: {what}: found {found!r}, expected {expected}"[:400])
