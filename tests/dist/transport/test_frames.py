"""Frames: round trips, and headers that are refused."""

from __future__ import annotations

import random
import struct
import zlib
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmpq.batching.blocks import blocks_of
from llmpq.dist.transport.frames import (
    MAX_TEXT_BYTES,
    Frame,
    FrameKind,
    FrameLimits,
    Header,
    Row,
    assemble,
    decode_header,
    encode_header,
    encode_tables,
)
from llmpq.errors import StageError

LIMITS = FrameLimits(
    digest=b"12345678",
    num_blocks=6,
    max_context=40,
    prefill_rows=3,
    prefill_tokens=20,
    decode_rows=5,
    hidden_size=8,
    dtype=torch.bfloat16,
)


def _prefill(rows: int = 2, tokens: int = 4) -> Frame:
    return Frame(
        kind=FrameKind.PREFILL,
        micro_batch=9,
        rows=tuple(Row(blocks=(slot,), first=0, length=tokens - slot) for slot in range(rows)),
        hidden=torch.randn(1, sum(tokens - slot for slot in range(rows)), 8, dtype=torch.bfloat16),
    )


def _header(frame: Frame) -> Header:
    return decode_header(encode_header(frame, LIMITS, 0), LIMITS, 0)


def _forge(data: bytes, offset: int, layout: str, value: object) -> bytes:
    """Change one field and make the checksum right again."""
    body = bytearray(data[:-4])
    struct.pack_into(layout, body, offset, value)
    return bytes(body) + struct.pack("<I", zlib.crc32(body))


@given(
    kind=st.sampled_from([FrameKind.PREFILL, FrameKind.DECODE]),
    blocks=st.permutations(range(9)),
    count=st.integers(1, 3),
    micro_batch=st.integers(0, 2**64 - 1),
    sequence=st.integers(0, 2**64 - 1),
    data=st.data(),
)
def test_micro_batch_round_trip(kind, blocks, count, micro_batch, sequence, data):
    limits = replace(LIMITS, num_blocks=9)
    is_prefill = kind is FrameKind.PREFILL
    rows = []
    for _ in range(count):
        length = data.draw(st.integers(1, 20 if is_prefill else 40))
        first = data.draw(st.integers(0, length - 1)) if is_prefill else length - 1
        held, blocks = blocks[: blocks_of(length)], blocks[blocks_of(length) :]
        rows.append(Row(blocks=tuple(held), first=first, length=length))
    tokens = sum(row.length - row.first for row in rows)
    hidden = torch.randn(1, tokens, 8).to(torch.bfloat16)
    sent = Frame(kind=kind, micro_batch=micro_batch, rows=tuple(rows), hidden=hidden)
    raw = encode_header(sent, limits, sequence)
    assert len(raw) == limits.header_bytes
    header = decode_header(raw, limits, sequence)
    assert header.tables_bytes == len(encode_tables(sent)) <= limits.max_tables_bytes
    got = assemble(header, encode_tables(sent), sent.payload, limits)
    assert (got.kind, got.micro_batch, got.rows) == (kind, micro_batch, tuple(rows))
    assert got.hidden is not None
    assert torch.equal(got.hidden, hidden)


@pytest.mark.parametrize("text", [b"", b'{"reason": "x"}'])
def test_control_round_trip(text):
    sent = Frame(kind=FrameKind.STATS, text=text)
    got = assemble(
        decode_header(encode_header(sent, LIMITS, 3), LIMITS, 3), b"", sent.payload, LIMITS
    )
    assert (got.kind, got.text, got.hidden) == (FrameKind.STATS, text, None)


@pytest.mark.parametrize(
    ("offset", "layout", "value", "names"),
    [
        (0, "<I", 0, "magic"),
        (4, "<B", 1, "version"),
        (5, "<B", 0, "kind"),
        (5, "<B", 2, "shape"),
        (5, "<B", 7, "control frame"),
        (6, "<B", 1, "dtype"),
        (7, "<B", 1, "buffer"),
        (44, "<I", 1, "layer"),
        (5, "<B", 9, "layer"),
        (8, "<8s", b"otherrun", "plan digest"),
        (16, "<Q", 4, "sequence"),
        (32, "<I", 2**32 - 1, "rows"),
        (32, "<I", 1, "table"),
        (36, "<I", 2**31, "shape"),
        (36, "<I", 0, "shape"),
        (40, "<I", 2**31, "hidden"),
        (48, "<Q", 2**40, "payload"),
        (36, "<I", 6, "payload"),
        (56, "<I", 4, "row"),
        (56, "<I", 1, "tokens of the rows"),
        (60, "<I", 41, "row"),
        (60, "<I", 0, "row"),
        (60, "<I", 5, "tokens of the rows"),
    ],
)
def test_a_forged_field_is_named(offset, layout, value, names):
    raw = _forge(encode_header(_prefill(), LIMITS, 3), offset, layout, value)
    with pytest.raises(StageError, match=names):
        decode_header(raw, LIMITS, 3)


def test_a_long_text_is_refused_before_it_is_received():
    raw = encode_header(Frame(kind=FrameKind.ERROR), LIMITS, 0)
    with pytest.raises(StageError, match="payload bytes"):
        decode_header(_forge(raw, 48, "<Q", MAX_TEXT_BYTES + 1), LIMITS, 0)


def test_a_payload_of_another_size_is_refused():
    frame = _prefill()
    header = _header(frame)
    payload = frame.payload
    assert payload is not None
    for wrong in (payload[:-1], None):
        with pytest.raises(StageError, match="payload size"):
            assemble(header, encode_tables(frame), wrong, LIMITS)


@pytest.mark.parametrize(
    ("blocks", "names"),
    [
        (((0,), (6,)), "blocks: found 6"),
        (((3,), (3,)), "blocks"),
        (((0,), (1, 2)), "size of the block tables"),
    ],
)
def test_block_tables_that_do_not_fit_are_refused(blocks, names):
    frame = _prefill()
    header = _header(frame)
    rows = tuple(replace(row, blocks=table) for row, table in zip(frame.rows, blocks, strict=True))
    with pytest.raises(StageError, match=names):
        assemble(header, encode_tables(replace(frame, rows=rows)), frame.payload, LIMITS)


def test_damaged_block_tables_are_refused():
    frame = _prefill()
    header = _header(frame)
    for at in range(len(encode_tables(frame))):
        tables = bytearray(encode_tables(frame))
        tables[at] ^= 1
        with pytest.raises(StageError, match="checksum of the block tables"):
            assemble(header, bytes(tables), frame.payload, LIMITS)


def test_mutated_block_tables_raise_only_stage_errors():
    """Damaged tables whose checksum is right: blocks of an accepted frame exist, once."""
    rng = random.Random(0)
    frame = _prefill(3)
    header = _header(frame)
    accepted = 0
    for _ in range(2000):
        tables = bytearray(encode_tables(frame)[:-4])
        for _ in range(rng.randint(1, 3)):
            tables[rng.randrange(len(tables))] ^= 1 << rng.randrange(8)
        tables += struct.pack("<I", zlib.crc32(tables))
        try:
            got = assemble(header, bytes(tables), frame.payload, LIMITS)
        except StageError:
            continue
        accepted += 1
        blocks = [block for row in got.rows for block in row.blocks]
        assert max(blocks) < 6
        assert len(set(blocks)) == len(blocks) == 3
    assert accepted > 0


def test_rows_may_share_blocks_that_they_only_read():
    limits = replace(LIMITS, mixed_rows=3, mixed_tokens=9)
    rows = (
        Row(blocks=(5, 0), first=16, length=21, origin=2, rope_length=30),
        Row(blocks=(5, 3), first=18, length=19),
        Row(blocks=(1,), first=0, length=3),
    )
    hidden = torch.randn(1, 9, 8).to(torch.bfloat16)
    sent = Frame(kind=FrameKind.MIXED, micro_batch=1, rows=rows, hidden=hidden)
    header = decode_header(encode_header(sent, limits, 0), limits, 0)
    got = assemble(header, encode_tables(sent), sent.payload, limits)
    assert (got.kind, got.rows) == (FrameKind.MIXED, rows)
    with pytest.raises(StageError, match="shape"):
        decode_header(encode_header(sent, LIMITS, 0), LIMITS, 0)


def test_rows_have_the_blocks_of_layers_with_windows_too():
    limits = replace(LIMITS, mixed_rows=2, mixed_tokens=9, num_window_blocks=4)
    rows = (
        Row(blocks=(5, 0), first=16, length=21, window_blocks=(3, 1)),
        Row(blocks=(1,), first=0, length=3, window_blocks=(2,)),
    )
    hidden = torch.randn(1, 8, 8).to(torch.bfloat16)
    sent = Frame(kind=FrameKind.MIXED, micro_batch=1, rows=rows, hidden=hidden)
    header = decode_header(encode_header(sent, limits, 0), limits, 0)
    tables = encode_tables(sent)
    assert header.tables_bytes == len(tables) <= limits.max_tables_bytes
    assert assemble(header, tables, sent.payload, limits).rows == rows
    fewer = replace(limits, num_window_blocks=3)
    with pytest.raises(StageError, match="blocks of windows: found 3, expected numbers below 3"):
        assemble(header, tables, sent.payload, fewer)
    without = replace(limits, num_window_blocks=0)
    with pytest.raises(StageError, match="size of the block tables"):
        assemble(
            decode_header(encode_header(sent, without, 0), without, 0),
            tables,
            sent.payload,
            without,
        )


@pytest.mark.parametrize(
    ("count", "seed"), [(100_000, 0), pytest.param(1_000_000, 1, marks=pytest.mark.slow)]
)
def test_mutated_headers_raise_only_stage_errors(count, seed):
    """Damaged frames: half with the checksum made right, so the fields are reached."""
    rng = random.Random(seed)
    base = encode_header(_prefill(), LIMITS, 7)
    accepted = 0
    for _ in range(count):
        raw = bytearray(base)
        for _ in range(rng.randint(1, 4)):
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        if rng.random() < 0.5:
            raw[-4:] = struct.pack("<I", zlib.crc32(raw[:-4]))
        elif rng.random() < 0.2:
            del raw[rng.randrange(len(raw)) :]
        try:
            header = decode_header(bytes(raw), LIMITS, 7)
        except StageError:
            continue
        accepted += 1
        rows, tokens, hidden = header.shape
        assert header.payload_bytes == tokens * hidden * 2 <= 3 * 20 * 8 * 2
        assert rows == len(header.frame.rows) <= 3
        assert all(row.length <= 40 for row in header.frame.rows)
    assert accepted > 0


def test_decode_steps_have_whole_sequences_only_where_angles_change():
    rows = (Row(blocks=(0, 1), first=0, length=17), Row(blocks=(2,), first=4, length=5))
    hidden = torch.randn(1, 18, 8).to(torch.bfloat16)
    sent = Frame(kind=FrameKind.DECODE, micro_batch=1, rows=rows, hidden=hidden)
    limits = replace(LIMITS, recomputed_tokens=17)
    header = decode_header(encode_header(sent, limits, 0), limits, 0)
    assert assemble(header, encode_tables(sent), sent.payload, limits).rows == rows
    with pytest.raises(StageError, match="shape"):
        _header(sent)


def test_a_length_beyond_the_longest_sequence_is_refused():
    frame = _prefill()
    rows = tuple(replace(row, rope_length=41) for row in frame.rows)
    with pytest.raises(StageError, match="row"):
        _header(replace(frame, rows=rows))
