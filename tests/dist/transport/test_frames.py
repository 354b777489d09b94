"""Frames: round trips, and headers that are refused."""

from __future__ import annotations

import random
import struct
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmpq.dist.transport.frames import (
    MAX_TEXT_BYTES,
    Frame,
    FrameKind,
    FrameLimits,
    Row,
    assemble,
    decode_header,
    encode_header,
)
from llmpq.errors import StageError

LIMITS = FrameLimits(
    digest=b"12345678",
    num_slots=6,
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
        rows=tuple(Row(slot=slot, first=0, length=tokens - slot) for slot in range(rows)),
        hidden=torch.randn(rows, tokens, 8, dtype=torch.bfloat16),
    )


def _forge(data: bytes, offset: int, layout: str, value: object) -> bytes:
    """Change one field and make the checksum right again."""
    body = bytearray(data[:-4])
    struct.pack_into(layout, body, offset, value)
    return bytes(body) + struct.pack("<I", zlib.crc32(body))


@given(
    kind=st.sampled_from([FrameKind.PREFILL, FrameKind.DECODE]),
    slots=st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True),
    tokens=st.integers(1, 20),
    micro_batch=st.integers(0, 2**64 - 1),
    sequence=st.integers(0, 2**64 - 1),
    data=st.data(),
)
def test_micro_batch_round_trip(kind, slots, tokens, micro_batch, sequence, data):
    tokens = 1 if kind is FrameKind.DECODE else tokens
    rows = []
    for slot in slots:
        first = data.draw(st.integers(0, LIMITS.max_context - tokens))
        length = data.draw(st.integers(first + 1, first + tokens))
        rows.append(Row(slot=slot, first=first, length=length))
    hidden = torch.randn(len(rows), tokens, 8).to(torch.bfloat16)
    sent = Frame(kind=kind, micro_batch=micro_batch, rows=tuple(rows), hidden=hidden)
    raw = encode_header(sent, LIMITS, sequence)
    assert len(raw) == LIMITS.header_bytes
    got = assemble(decode_header(raw, LIMITS, sequence), sent.payload, LIMITS)
    assert (got.kind, got.micro_batch, got.rows) == (kind, micro_batch, tuple(rows))
    assert got.hidden is not None
    assert torch.equal(got.hidden, hidden)


@pytest.mark.parametrize("text", [b"", b'{"reason": "x"}'])
def test_control_round_trip(text):
    sent = Frame(kind=FrameKind.STATS, text=text)
    got = assemble(decode_header(encode_header(sent, LIMITS, 3), LIMITS, 3), sent.payload, LIMITS)
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
        (56, "<I", 6, "slots"),
        (56, "<I", 1, "slots"),
        (76, "<I", 0, "slots"),
        (60, "<I", 37, "row"),
        (64, "<I", 0, "row"),
        (64, "<I", 5, "row"),
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
    header = decode_header(encode_header(frame, LIMITS, 0), LIMITS, 0)
    payload = frame.payload
    assert payload is not None
    for wrong in (payload[:-1], None):
        with pytest.raises(StageError, match="payload size"):
            assemble(header, wrong, LIMITS)


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
        assert header.payload_bytes == rows * tokens * hidden * 2 <= 3 * 20 * 8 * 2
        assert all(row.slot < 6 and row.length <= 40 for row in header.frame.rows)
    assert accepted > 0
