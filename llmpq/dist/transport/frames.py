"""Frames: the messages between ranks, and their layout on the wire.

A frame is a header of one fixed size, equal for all ranks of a run, the block tables of its rows,
and a payload of exactly the bytes that the header announces. The header names the plan and is
checked against the plan's limits before anything is allocated; nothing is unpickled. Payloads carry
no checksum: the transport has its own, and hashing them would take longer than sending them.

Header, little-endian, then one row of the table for each of ``max_rows`` sequences::

    4s magic | B version | B kind | B dtype | B buffer | 8s plan digest | Q sequence | Q micro_batch
    | I rows | I tokens | I hidden | I layer | Q payload bytes
    | table: rows x (I first, I length, I rope_length, I slot, i from_slot, i to_slot,
      i parent_slot, Q origin), zeros
    | I crc32 of everything before

A row of ``length`` tokens has ``ceil(length / block_size)`` blocks. The block tables follow the
header of a frame with rows::

    I block, for every block of every row
    | the same of layers with windows, where these have blocks of their own
    | I crc32 of everything before

``buffer`` is 0 if the payload follows in the stream, else the buffer of the link's shared memory
that holds it (``transport.socket_links``). In a frame of keys and values (``KV``), ``hidden`` is
the bytes of one token and ``layer`` is set; else it is 0.

Between the master and a draft model's rank, hidden states are int32 and of size 1: token ids.

Shapes: R rows (sequences), N tokens of all rows, H hidden size, B bytes of a token.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from llmpq.batching.blocks import tokens_written_twice
from llmpq.errors import StageError
from llmpq.spec.runtime_constants import KV_BLOCK_SIZE

MAGIC = b"LPQ1"
VERSION = 10
MAX_TEXT_BYTES = 64 * 1024
"""The longest text of a control frame."""

_FIXED = struct.Struct("<4sBBBB8sQQIIIIQ")
_ROW = struct.Struct("<IIIIiiiQ")
_CHECKSUM = struct.Struct("<I")
_BLOCK = np.dtype("<u4")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int32)


class FrameKind(IntEnum):
    """Purpose of a message between ranks: work, results, control.

    A ``MIXED`` step has rows of both phases, where both share their stages. ``COPY`` names KV
    blocks to copy to and from host memory and files.
    """

    PREFILL = 1
    DECODE = 2
    READY = 3
    SHUTDOWN = 4
    STATS = 5
    ERROR = 6
    HEARTBEAT = 7
    TRACE = 8
    KV = 9
    MIXED = 10
    COPY = 11


_KINDS = {int(kind): kind for kind in FrameKind}
TENSOR_KINDS = (FrameKind.PREFILL, FrameKind.DECODE, FrameKind.MIXED)
LAST_KINDS = (FrameKind.SHUTDOWN, FrameKind.ERROR)
"""No frame follows one of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameLimits:
    """The largest frames of a run; equal on all ranks.

    Attributes:
        digest: 8 bytes that identify the plan and the model.
        max_context: tokens of the longest sequence.
        recomputed_tokens: tokens of a sequence whose keys and values a decode step computes again;
            0 where none does.
        prefill_rows, prefill_tokens: sequences of the largest prefill micro-batch, and tokens of
            its longest prompt.
        mixed_rows, mixed_tokens: sequences and tokens of the largest mixed step; 0 for none.
        num_window_blocks: blocks of layers with windows; 0 where all layers have the same.
        block_size: tokens of a block.
        dtype: of hidden states.
        other_dtypes: of the states of stages that compute in another format.
        kv_token_bytes: of every layer of the model, the bytes of one token's keys and values;
            empty where none travel.
    """

    digest: bytes
    num_blocks: int
    max_context: int
    prefill_rows: int
    prefill_tokens: int
    decode_rows: int
    hidden_size: int
    dtype: torch.dtype
    other_dtypes: tuple[torch.dtype, ...] = ()
    kv_token_bytes: tuple[int, ...] = ()
    recomputed_tokens: int = 0
    mixed_rows: int = 0
    mixed_tokens: int = 0
    num_window_blocks: int = 0
    block_size: int = KV_BLOCK_SIZE

    def of_token_ids(self, rows: int, tokens: int) -> FrameLimits:
        """Return the limits of a link whose steps have token ids in place of hidden states."""
        return replace(
            self,
            prefill_rows=1,
            prefill_tokens=1,
            decode_rows=1,
            hidden_size=1,
            dtype=torch.int32,
            other_dtypes=(),
            kv_token_bytes=(),
            recomputed_tokens=0,
            num_window_blocks=0,
            mixed_rows=rows,
            mixed_tokens=tokens,
        )

    @property
    def max_rows(self) -> int:
        """Rows in the table of every header."""
        return max(self.prefill_rows, self.decode_rows, self.mixed_rows)

    @property
    def header_bytes(self) -> int:
        """Size of every header of the run."""
        return _FIXED.size + self.max_rows * _ROW.size + _CHECKSUM.size

    @property
    def max_tables_bytes(self) -> int:
        """Size of the largest block tables of a frame."""
        blocks = self.max_rows * self.blocks_of(self.max_context)
        return blocks * self.num_tables * _BLOCK.itemsize + _CHECKSUM.size

    @property
    def num_tables(self) -> int:
        """Block tables of a row."""
        return 2 if self.num_window_blocks else 1

    def blocks_of(self, tokens: int) -> int:
        """Return the blocks that a sequence of ``tokens`` takes."""
        return -(-tokens // self.block_size)

    def most(self, kind: FrameKind) -> tuple[int, int]:
        """Return the most rows of a step of ``kind``, and the most tokens of all of them."""
        if kind is FrameKind.PREFILL:
            # Short prompts share a micro-batch (HybridPolicy).
            rows = max(self.prefill_rows, self.decode_rows)
            return rows, self.prefill_rows * self.prefill_tokens
        if kind is FrameKind.DECODE:
            return self.decode_rows, self.decode_tokens
        return self.mixed_rows, self.mixed_tokens

    @property
    def decode_tokens(self) -> int:
        """Tokens of the largest decode micro-batch."""
        return self.decode_rows * max(1, self.recomputed_tokens)

    @property
    def max_payload_bytes(self) -> int:
        """Size of the largest payload other than a text."""
        prefill_tokens = self.prefill_rows * self.prefill_tokens
        tokens = max(prefill_tokens, self.decode_tokens, self.mixed_tokens)
        widest = max(one.itemsize for one in (self.dtype, *self.other_dtypes))
        hidden = tokens * self.hidden_size * widest
        return max(hidden, prefill_tokens * max(self.kv_token_bytes, default=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sequence of a micro-batch or of a step.

    Attributes:
        blocks: of its keys and values; the i-th holds its tokens from ``i * block_size`` on.
        window_blocks: as many in layers with windows, where these have blocks of their own; those
            before the window may belong to others.
        first: absolute position of its first token in this step.
        length: its tokens after the step.
        origin: number of the prefill micro-batch that filled its blocks; distinguishes the owners
            of a block where keys and values are sent.
        rope_length: length of the sequence for rotary angles that depend on it; 0 for ``length``.
        slot: of the states of its sequence, in layers with a recurrent state.
        from_slot: slot whose states are copied to ``slot`` before the step; -1 for none.
        to_slot: slot to which they are copied after it; -1 for none.
        parent_slot: of a row of draft tokens the slot of the row before, with whose states this one
            begins and which keeps them; -1 for other rows.
    """

    blocks: tuple[int, ...]
    first: int
    length: int
    origin: int = 0
    rope_length: int = 0
    window_blocks: tuple[int, ...] = ()
    slot: int = 0
    from_slot: int = -1
    to_slot: int = -1
    parent_slot: int = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Frame:
    """A message between two ranks.

    Attributes:
        micro_batch: number of the micro-batch, counted by the master.
        rows: the sequences of a micro-batch.
        hidden: their hidden states ``[1, N, H]``.
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
        """The bytes after the header, on the tensor's device; ``None`` if there are none."""
        if self.hidden is not None:
            return self.hidden.reshape(-1).view(torch.uint8)
        if self.cached is not None:
            return self.cached.contiguous().reshape(-1)
        if self.text:
            return torch.frombuffer(bytearray(self.text), dtype=torch.uint8)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """A checked header: the frame without its payload, and the payload's shape and place.

    The frame's rows have no blocks yet; ``tables_bytes`` follow the header.
    """

    frame: Frame
    shape: tuple[int, int, int]
    tables_bytes: int
    payload_bytes: int
    buffer: int
    dtype: torch.dtype | None = None


def encode_header(frame: Frame, limits: FrameLimits, sequence: int, buffer: int = 0) -> bytes:
    """Return the header of ``frame``, before which ``sequence`` frames were sent over its link.

    ``buffer`` of the shared memory holds the payload; it follows if that is 0.
    """
    rows, tokens, hidden, dtype, size = len(frame.rows), 0, 0, 0, len(frame.text)
    if frame.hidden is not None:
        _, tokens, hidden = frame.hidden.shape
        dtype, size = _DTYPES.index(frame.hidden.dtype) + 1, frame.hidden.nbytes
    elif frame.cached is not None:
        (tokens, hidden), size = frame.cached.shape, frame.cached.nbytes
    fixed = _FIXED.pack(
        MAGIC, VERSION, frame.kind, dtype, buffer, limits.digest, sequence, frame.micro_batch,
        rows, tokens, hidden, frame.layer, size,
    )  # fmt: skip
    table = b"".join(
        _ROW.pack(
            row.first,
            row.length,
            row.rope_length,
            row.slot,
            row.from_slot,
            row.to_slot,
            row.parent_slot,
            row.origin,
        )
        for row in frame.rows
    )
    body = (fixed + table).ljust(limits.header_bytes - _CHECKSUM.size, b"\0")
    return body + _CHECKSUM.pack(zlib.crc32(body))


def encode_tables(frame: Frame) -> bytes:
    """Return the block tables of a frame's rows; nothing for a frame without rows."""
    if not frame.rows:
        return b""
    blocks = [block for row in frame.rows for block in row.blocks]
    blocks += [block for row in frame.rows for block in row.window_blocks]
    body = np.array(blocks, _BLOCK).tobytes()
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
    if buffer > (buffers if kind in TENSOR_KINDS else 0):
        raise _refused("buffer", buffer, f"at most {buffers}, and 0 without hidden states")
    if kind not in _KINDS:
        raise _refused("kind", kind, f"one of {list(_KINDS)}")
    frame = Frame(
        kind=_KINDS[kind],
        micro_batch=micro_batch,
        rows=_read_table(body, rows, limits),
        layer=layer,
    )
    header = Header(
        frame=frame,
        shape=(rows, tokens, hidden),
        tables_bytes=_tables_bytes(frame.rows, limits),
        payload_bytes=size,
        buffer=buffer,
        dtype=_DTYPES[dtype - 1] if 1 <= dtype <= len(_DTYPES) else None,
    )
    if frame.kind is FrameKind.KV:
        _check_cached(header, dtype, limits)
        return header
    _expect("layer", layer, 0)
    if frame.kind in TENSOR_KINDS:
        _check_tensor(header, limits)
    else:
        _expect("dtype and shape of a control frame", (dtype, *header.shape), (0, 0, 0, 0))
        if size > MAX_TEXT_BYTES:
            raise _refused("payload bytes", size, f"at most {MAX_TEXT_BYTES}")
    return header


def assemble(header: Header, tables: bytes, payload: Tensor | None, limits: FrameLimits) -> Frame:
    """Join a header, the block tables of its rows and its payload.

    The payload is uint8 ``[payload_bytes]``, ``None`` if the header announces none.

    Raises:
        StageError: they are not what a rank of this run sends.
    """
    _expect("payload size", 0 if payload is None else payload.numel(), header.payload_bytes)
    frame = replace(header.frame, rows=_read_blocks(header, tables, limits))
    if payload is None:
        return frame
    if frame.kind in TENSOR_KINDS:
        assert header.dtype is not None  # checked with the header
        hidden = payload.view(header.dtype).view(1, *header.shape[1:])  # [1, N, H]
        return replace(frame, hidden=hidden)
    if frame.kind is FrameKind.KV:
        return replace(frame, cached=payload.reshape(header.shape[1:]))  # [N, B]
    return replace(frame, text=payload.numpy().tobytes())


def _read_table(body: bytes, rows: int, limits: FrameLimits) -> tuple[Row, ...]:
    if rows > limits.max_rows:
        raise _refused("rows", rows, f"at most {limits.max_rows}")
    end = _FIXED.size + rows * _ROW.size
    if body.count(0, end) != len(body) - end:
        raise _refused("table", "entries beyond its rows", "zeros")
    return tuple(
        Row(
            blocks=(),
            first=first,
            length=length,
            origin=origin,
            rope_length=rope_length,
            slot=slot,
            from_slot=from_slot,
            to_slot=to_slot,
            parent_slot=parent_slot,
        )
        for first, length, rope_length, slot, from_slot, to_slot, parent_slot, origin in (
            _ROW.iter_unpack(body[_FIXED.size : end])
        )
    )


def _tables_bytes(rows: Sequence[Row], limits: FrameLimits) -> int:
    """Return the size of the block tables; rows of a wrong length are found later."""
    blocks = sum(limits.blocks_of(min(row.length, limits.max_context)) for row in rows)
    return blocks * limits.num_tables * _BLOCK.itemsize + _CHECKSUM.size if rows else 0


def _read_blocks(header: Header, data: bytes, limits: FrameLimits) -> tuple[Row, ...]:
    """Return the rows with their blocks, which exist; no place is written twice."""
    _expect("size of the block tables", len(data), header.tables_bytes)
    if not header.frame.rows:
        return ()
    body, checksum = data[: -_CHECKSUM.size], data[-_CHECKSUM.size :]
    _expect("checksum of the block tables", _CHECKSUM.unpack(checksum)[0], zlib.crc32(body))
    found: list[int] = np.frombuffer(body, _BLOCK).tolist()
    width = len(found) // limits.num_tables
    blocks, window_blocks = found[:width], found[width:]
    if max(blocks) >= limits.num_blocks:
        raise _refused("blocks", max(blocks), f"numbers below {limits.num_blocks}")
    if window_blocks and max(window_blocks) >= limits.num_window_blocks:
        expected = f"numbers below {limits.num_window_blocks}"
        raise _refused("blocks of windows", max(window_blocks), expected)
    rows, at = [], 0
    for row in header.frame.rows:
        end = at + limits.blocks_of(row.length)
        own = tuple(blocks[at:end])
        rows.append(replace(row, blocks=own, window_blocks=tuple(window_blocks[at:end])))
        at = end
    places = [(row.blocks, row.first, row.length) for row in rows]
    if tokens_written_twice(places, limits.block_size):
        raise _refused("blocks", blocks, "places of their own for the new tokens of every row")
    return tuple(rows)


def _check_tensor(header: Header, limits: FrameLimits) -> None:
    rows, tokens, hidden = header.shape
    most_rows, most_tokens = limits.most(header.frame.kind)
    if not 1 <= rows <= most_rows or not 1 <= tokens <= most_tokens:
        raise _refused("shape", header.shape, f"at most {most_rows} rows, {most_tokens} tokens")
    _expect("hidden size", hidden, limits.hidden_size)
    known = (limits.dtype, *limits.other_dtypes)
    if header.dtype not in known:
        raise _refused("dtype", header.dtype, f"one of {', '.join(map(str, known))}")
    _expect("payload bytes", header.payload_bytes, tokens * hidden * header.dtype.itemsize)
    is_prefill = header.frame.kind is FrameKind.PREFILL
    if header.frame.kind is FrameKind.DECODE and not limits.recomputed_tokens:
        _expect("tokens of a decode step", tokens, rows)
    for row in header.frame.rows:
        longest = limits.max_context
        if not (row.first < row.length <= longest and row.rope_length <= longest):
            raise _refused("row", row, f"positions of a sequence of at most {longest} tokens")
        if is_prefill and row.length - row.first > limits.prefill_tokens:
            raise _refused("row", row, f"at most {limits.prefill_tokens} tokens of a prompt")
    _expect("tokens of the rows", sum(row.length - row.first for row in header.frame.rows), tokens)


def _check_cached(header: Header, dtype: int, limits: FrameLimits) -> None:
    frame, (rows, tokens, width) = header.frame, header.shape
    if frame.layer >= len(limits.kv_token_bytes):
        raise _refused("layer", frame.layer, f"one of {len(limits.kv_token_bytes)} on this link")
    if not 1 <= rows <= limits.prefill_rows:
        raise _refused("rows", rows, f"1 to {limits.prefill_rows}")
    _expect("dtype", dtype, 0)
    _expect("bytes of a token", width, limits.kv_token_bytes[frame.layer])
    for row in frame.rows:
        if row.first != 0 or not 1 <= row.length <= limits.prefill_tokens:
            raise _refused("row", row, f"a prompt of at most {limits.prefill_tokens} tokens")
        _expect("origin", row.origin, frame.micro_batch)
    _expect("tokens", tokens, sum(row.length for row in frame.rows))
    _expect("payload bytes", header.payload_bytes, tokens * width)


def _expect(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise _refused(what, found, repr(expected))


def _refused(what: str, found: object, expected: str) -> StageError:
    return StageError(f"frame refused: {what}: found {found!r}, expected {expected}"[:400])
