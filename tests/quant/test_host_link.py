"""Rows to the host and back, on a stream that computes copies late."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from helpers.decode_steps import HAS_STEPS
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from llmpq.kernels.cpu.experts import HostPool
from llmpq.quant.modules.experts import HostExperts, move_
from llmpq.quant.modules.host_link import HostLink, link_of
from llmpq.quant.modules.layer import GatedActivation, QuantExperts
from llmpq.spec.runtime_constants import HOST_LINK_SLOTS

HIDDEN, FEATURES, COUNT = 64, 32, 7


class _Stream(TorchFunctionMode):
    """Copies wait in a queue until an event behind them is waited for, or an operator follows."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: deque = deque()
        self.waits: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        given = kwargs or {}
        if func is Tensor.copy_ and given.get("non_blocking"):
            place, values = args
            self.queue.append(lambda: place.copy_(values))
            return place
        if func in (Tensor.add_, Tensor.masked_fill, nn.functional.linear):
            self.run(len(self.queue))  # operators of a device follow its copies
        return func(*args, **given)

    def run(self, count):
        for _ in range(count):
            with torch._C.DisableTorchFunction():
                self.queue.popleft()()

    def event(self):
        return _Event(self)


class _Event:
    def __init__(self, stream):
        self._stream = stream
        self._left: list | None = None

    def record(self):
        self._left = list(self._stream.queue)

    def synchronize(self):
        if self._left is None:
            return
        while self._stream.queue and self._stream.queue[0] in self._left:
            self._stream.run(1)
        self._left = None


def _experts():
    torch.manual_seed(0)
    ups = [nn.Linear(HIDDEN, 2 * FEATURES, bias=False) for _ in range(COUNT)]
    downs = [nn.Linear(FEATURES, HIDDEN, bias=False) for _ in range(COUNT)]
    return QuantExperts(ups, downs, GatedActivation(nn.SiLU())).requires_grad_(False)


def _rows(count, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(count, COUNT, generator=generator)
    weights = torch.rand(count, 3, generator=generator)
    return torch.randn(count, HIDDEN, generator=generator), scores.topk(3).indices, weights


@pytest.fixture
def pool():
    if not HAS_STEPS:
        pytest.skip("needs AVX2 and a C compiler")
    made = HostPool(2)
    yield made
    made.close()


@pytest.mark.parametrize("resident", [(), (0, 5)], ids=["none", "some"])
def test_sums_over_a_stream_are_those_of_the_experts(resident, pool):
    experts, stream = _experts(), _Stream()
    link = HostLink(stream.event, is_pinned=False)
    host = HostExperts(experts, resident, pool, link)
    calls = [_rows(count, seed) for seed, count in enumerate((1, 9, 2, 40, 1, 1, 7))]
    with torch.inference_mode():
        expected = [experts(*rows) for rows in calls]
        with stream:
            found = [host(*rows) for rows in calls]
        stream.run(len(stream.queue))
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)


def test_rows_that_are_read_before_they_are_there_are_wrong(pool):
    """The stream of these tests shows a missing wait."""
    experts, stream = _experts(), _Stream()
    link = HostLink(stream.event, is_pinned=False)
    host = HostExperts(experts, (), pool, link)
    rows = _rows(5, 0)
    with torch.inference_mode(), stream:
        slot, sent, total = link.send(rows)
        slot.room.zero_()
        pool.submit(host._layer(torch.float32, HIDDEN, 3), sent, total)()
        early = total.clone()
        slot.sent.synchronize()
        pool.submit(host._layer(torch.float32, HIDDEN, 3), sent, total)()
    assert not early.any()
    assert torch.allclose(total, experts(*rows), rtol=1e-4, atol=1e-5)


def test_a_slot_is_filled_again_once_the_device_has_read_it():
    stream = _Stream()
    link = HostLink(stream.event, is_pinned=False)
    with stream:
        sent = [link.send(_rows(3, number)) for number in range(HOST_LINK_SLOTS)]
        for slot, _, total in sent:
            link.receive(slot, total, torch.device("cpu"))
        assert len(stream.queue) == 4 * HOST_LINK_SLOTS
        link.send(_rows(3, 9))
    # All up to the first sum has been read, the sums of other slots have not.
    assert len(stream.queue) == HOST_LINK_SLOTS - 1 + 3


def test_a_cpu_needs_no_link():
    assert link_of(torch.device("cpu")) is None


def test_experts_of_the_host_stay_there_when_a_layer_moves():
    layer = nn.Module()
    layer.norm = nn.LayerNorm(HIDDEN)
    layer.experts = HostExperts(_experts(), (1, 4), None)
    move_(layer, torch.device("meta"))
    assert layer.norm.weight.is_meta
    places = [layer.experts.gate_up[expert].weight.is_meta for expert in range(COUNT)]
    assert places == [expert in (1, 4) for expert in range(COUNT)]
