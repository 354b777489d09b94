"""Keys and values between ranks: whole, in their blocks, and waited for by their own rows only."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from helpers.clocks import PATIENCE_S
from helpers.links import TRANSPORTS, open_links
from helpers.ranks import make_split_plan
from hypothesis import given
from hypothesis import strategies as st

from llmpq.dist.engine.executor import packed_batch_of
from llmpq.dist.kv.cache import KVCache, token_bytes
from llmpq.dist.kv.transfer import KVReceiveLink, KVReceiver, KVSender, KVSendLink
from llmpq.dist.transport.errors import PeerLostError
from llmpq.dist.transport.frames import (
    Frame,
    FrameKind,
    FrameLimits,
    Row,
    assemble,
    decode_header,
    encode_header,
    encode_tables,
)
from llmpq.dist.transport.socket_links import SocketReader, SocketWriter
from llmpq.dist.transport.topology import Link, Topology
from llmpq.errors import StageError
from llmpq.models import KVShape
from llmpq.spec.plan import Handover, handovers_of

torch.set_num_threads(1)

SHAPES = tuple(KVShape(heads=heads, head_dim=dim) for heads, dim in ((2, 16), (1, 32), (2, 16)))
ROWS, PROMPT, SLOTS, CONTEXT = 2, 6, 5, 9


def limits(kv_bits: int | None = None) -> FrameLimits:
    return FrameLimits(
        digest=b"12345678",
        num_blocks=SLOTS,
        max_context=CONTEXT,
        prefill_rows=ROWS,
        prefill_tokens=PROMPT,
        decode_rows=SLOTS,
        hidden_size=8,
        dtype=torch.float32,
        kv_token_bytes=tuple(token_bytes(shape, torch.float32, kv_bits) for shape in SHAPES),
    )


def cache(first: int, end: int, *, is_transient: bool, kv_bits: int | None = None) -> KVCache:
    blocks = 2 * ROWS if is_transient else SLOTS
    return KVCache(
        SHAPES[first:end],
        first,
        num_blocks=blocks,
        dtype=torch.float32,
        kv_bits=kv_bits,
    )


def fill(kept: KVCache, rows: list[Row], seed: int) -> None:
    """Let every layer make keys and values of the rows' prompts."""
    generator = torch.Generator().manual_seed(seed)
    batch = packed_batch_of(rows)
    view = kept.view(batch)
    for layer, shape in enumerate(SHAPES):
        size = (1, shape.heads, batch.tokens, shape.head_dim)
        view.update(
            torch.randn(size, generator=generator), torch.randn(size, generator=generator), layer
        )


def held(kept: KVCache, layer: int, rows: list[Row]) -> torch.Tensor:
    tables, lengths = [row.blocks for row in rows], [row.length for row in rows]
    return kept.pack(layer, kept.index_of(tables, [0] * len(rows), lengths))


class Pair:
    """A stage that prefills all layers and one that decodes them."""

    def __init__(
        self, transport: str, timeout_s: float = PATIENCE_S, kv_bits: int | None = None
    ) -> None:
        handover = Handover(source=1, target=0, first_layer=0, end_layer=len(SHAPES))
        link = Link(source=1, target=0, handover=handover)
        self.ends = open_links(Topology(rings=(), handovers=(handover,)), 2, transport)
        self.made = cache(0, 3, is_transient=True, kv_bits=kv_bits)
        self.held = cache(0, 3, is_transient=False, kv_bits=kv_bits)
        self.send_link = KVSendLink(
            handover=handover, name="stage 0", writer=self.ends[1].writer(link, limits(kv_bits))
        )
        reader = self.ends[0].reader(link, limits(kv_bits), timeout_s)
        receive_link = KVReceiveLink(handover=handover, name="stage 1", reader=reader)
        self.sender: KVSender | None = None
        self.is_unused = True  # the sending end
        self.receiver = KVReceiver(self.held, receive_links=[receive_link], timeout_s=timeout_s)

    def start(self, timeout_s: float = PATIENCE_S) -> KVSender:
        self.is_unused = False
        self.sender = KVSender(
            self.made, buffer_blocks=ROWS, send_links=[self.send_link], timeout_s=timeout_s
        )
        return self.sender

    def close(self) -> None:
        if self.sender is not None:
            self.sender.close()
        elif self.is_unused:
            self.send_link.writer.close(0.0)
        self.receiver.close()


@pytest.fixture(params=TRANSPORTS)
def pair(request) -> Iterator[Pair]:
    made = Pair(request.param)
    yield made
    made.close()


def rows_of(blocks: list[int], lengths: list[int], origin: int) -> list[Row]:
    return [
        Row(blocks=(block,), first=0, length=length, origin=origin)
        for block, length in zip(blocks, lengths, strict=True)
    ]


def step(rows: list[Row]) -> list[Row]:
    """The first decode step of these rows."""
    return [replace(row, first=row.length, length=row.length + 1) for row in rows]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kv_bits", [None, 8, 4])
def test_every_layer_arrives_as_it_was_stored_in_the_blocks_of_the_decoding_rank(
    kv_bits, transport
):
    pair = Pair(transport, kv_bits=kv_bits)
    sender = pair.start()
    sent = []
    for origin, (slots, lengths) in enumerate([([3, 0], [6, 2]), ([4], [1]), ([1, 2], [3, 3])]):
        rows = rows_of(slots, lengths, origin)
        here = list(sender.acquire(rows))
        assert [row.blocks[0] // ROWS for row in here] == [origin % 2] * len(rows)
        fill(pair.made, here, seed=origin)
        sent.append((rows, [held(pair.made, layer, here) for layer in range(3)]))
        sender.release(rows)
    for rows, layers in sent:
        pair.receiver.acquire(step(rows))
        for layer, expected in enumerate(layers):
            assert torch.equal(held(pair.held, layer, rows), expected)
    pair.close()


def test_a_step_waits_for_its_own_blocks_and_for_no_others(pair):
    first, second = rows_of([0], [2], origin=0), rows_of([1], [3], origin=1)
    sender = pair.start()
    sender.acquire(first)
    sender.release(first)
    pair.receiver.acquire(step(first))  # returns although block 1 is empty
    waited: list[bool] = []
    thread = threading.Thread(
        target=lambda: waited.append(bool(pair.receiver.acquire(step(second))))
    )
    thread.start()
    thread.join(timeout=0.05)
    assert thread.is_alive()
    pair.receiver.acquire(step(first))  # the other row decodes on meanwhile
    sender.acquire(second)
    sender.release(second)
    thread.join(timeout=PATIENCE_S)
    assert waited == [True]


def test_a_new_owner_of_a_block_does_not_read_old_values(pair):
    old, new = rows_of([2], [4], origin=0), rows_of([2], [4], origin=7)
    sender = pair.start()
    sender.acquire(old)
    sender.release(old)
    pair.receiver.acquire(step(old))
    thread = threading.Thread(target=pair.receiver.acquire, args=[step(new)])
    thread.start()
    thread.join(timeout=0.05)
    assert thread.is_alive(), "the same block and length, but another owner"
    sender.acquire(new)
    sender.release(new)
    thread.join(timeout=PATIENCE_S)
    assert not thread.is_alive()


def send_until_error(sender: KVSender, rows: list[Row]) -> None:
    for _ in itertools.count():
        sender.acquire(rows)
        sender.release(rows)


def test_a_prefill_stage_waits_for_the_link_and_names_a_peer_that_takes_nothing(pair):
    ends = socket.socketpair()  # without a reader and with a small kernel buffer
    writer = SocketWriter(ends[0], limits())
    ends[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    send_link = replace(pair.send_link, writer=writer)
    sender = KVSender(pair.made, buffer_blocks=ROWS, send_links=[send_link], timeout_s=0.3)
    rows = rows_of([0, 1], [6, 6], origin=0)
    for _ in range(2):  # the next call raises it again
        with pytest.raises(PeerLostError, match=r"stage 0: found no sign of life for 0.3 s") as it:
            send_until_error(sender, rows)
        assert it.value.rank == 0
    ends[1].close()
    sender.close()


def test_a_decoding_rank_that_is_gone_is_named(pair):
    sender = pair.start()
    pair.receiver.close()
    rows = rows_of([0], [1], origin=0)
    with pytest.raises(PeerLostError, match="stage 0: closed"):
        send_until_error(sender, rows)
    pair.receiver = KVReceiver(pair.held, receive_links=[], timeout_s=1.0)


def test_a_prefill_rank_that_is_gone_is_named(pair):
    rows = rows_of([0], [1], origin=0)
    sender = pair.start()
    sender.acquire(rows)
    sender.release(rows)
    sender.close()
    pair.sender = None
    pair.receiver.acquire(step(rows))  # what was sent before is there
    with pytest.raises(PeerLostError, match="stage 1: closed") as caught:
        pair.receiver.acquire(step(rows_of([0], [1], origin=1)))
    assert caught.value.rank == 1


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_silence_is_named_in_time(transport):
    pair = Pair(transport, timeout_s=0.2)
    start_s = time.monotonic()
    with pytest.raises(PeerLostError, match=r"stage 1: found no sign of life for 0.2 s"):
        pair.receiver.acquire(step(rows_of([0], [1], origin=0)))
    assert time.monotonic() - start_s >= 0.2
    pair.close()


def kv_frame(layer: int = 1, tokens: int = 5, width: int | None = None) -> Frame:
    width = limits().kv_token_bytes[layer] if width is None else width
    rows = rows_of([3, 1], [tokens - 2, 2], origin=9)
    cached = torch.zeros(tokens, width, dtype=torch.uint8)
    return Frame(kind=FrameKind.KV, micro_batch=9, rows=tuple(rows), layer=layer, cached=cached)


@pytest.mark.parametrize(
    ("frame", "names"),
    [
        (replace(kv_frame(), layer=3), "layer"),
        (kv_frame(width=4), "bytes of a token"),
        (kv_frame(tokens=9), "row"),
        (replace(kv_frame(), micro_batch=8), "origin"),
        (replace(kv_frame(), rows=kv_frame().rows[:1]), "tokens"),
        (replace(kv_frame(), rows=tuple(replace(row, first=1) for row in kv_frame().rows)), "row"),
    ],
)
def test_keys_and_values_that_do_not_fit_are_refused(frame, names):
    with pytest.raises(StageError, match=names):
        decode_header(encode_header(frame, limits(), 0), limits(), 0)


def test_keys_and_values_of_two_rows_in_one_block_are_refused():
    frame = replace(kv_frame(), rows=tuple(replace(row, blocks=(3,)) for row in kv_frame().rows))
    header = decode_header(encode_header(frame, limits(), 0), limits(), 0)
    with pytest.raises(StageError, match="blocks"):
        assemble(header, encode_tables(frame), frame.payload, limits())


def test_a_ring_takes_no_keys_and_values():
    ring = replace(limits(), kv_token_bytes=())
    assert decode_header(encode_header(kv_frame(), limits(), 0), limits(), 0).frame.layer == 1
    with pytest.raises(StageError, match="layer"):
        decode_header(encode_header(kv_frame(), limits(), 0), ring, 0)


@pytest.mark.parametrize(
    "frame", [Frame(kind=FrameKind.STATS, text=b"{}"), replace(kv_frame(), layer=2)]
)
def test_a_frame_that_does_not_belong_on_a_link_is_an_error(frame):
    made, ends = cache(0, 3, is_transient=False), socket.socketpair()
    writer = SocketWriter(ends[0], limits())
    # This link carries layers 0 and 1 alone.
    receive_link = KVReceiveLink(
        handover=Handover(source=1, target=0, first_layer=0, end_layer=2),
        name="stage 1",
        reader=SocketReader(ends[1], limits(), 5.0),
    )
    receiver = KVReceiver(made, receive_links=[receive_link], timeout_s=PATIENCE_S)
    if frame.cached is not None:
        width = limits().kv_token_bytes[frame.layer]
        frame = replace(frame, cached=torch.zeros(5, width, dtype=torch.uint8))
    writer.write(frame)
    with pytest.raises(StageError, match=f"found a frame {frame.kind.name}"):
        receiver.acquire(step(rows_of([0], [1], origin=0)))
    receiver.close()
    writer.close(0.0)


@given(
    decode=st.lists(st.integers(1, 9), max_size=3, unique=True),
    prefill=st.lists(st.integers(1, 9), max_size=3, unique=True),
)
def test_handovers_name_every_layer_once_between_those_that_hold_it(decode, prefill):
    plan = make_split_plan((0, *sorted(decode), 10), (0, *sorted(prefill), 10))
    layers = []
    for one in handovers_of(plan):
        for rank in (one.source, one.target):
            stage = plan.stages[rank]
            assert stage.first_layer <= one.first_layer < one.end_layer <= stage.end_layer
        layers += range(one.first_layer, one.end_layer)
    assert sorted(layers) == list(range(10))
