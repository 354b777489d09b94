"""What torch.distributed carries: the choice of a backend, and payloads in a group of their own."""

from __future__ import annotations

import select
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from helpers.clocks import PATIENCE_S
from helpers.frames import LARGE, large_prefill
from helpers.links import open_links

from llmpq.dist.transport import torch_links
from llmpq.dist.transport.communicator import LinkClosedError
from llmpq.dist.transport.frames import Frame, FrameKind
from llmpq.dist.transport.topology import one_ring
from llmpq.dist.transport.torch_links import (
    TorchLink,
    TorchReader,
    TorchWriter,
    gpu_of,
    payload_backend,
)


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (None, None, "gloo"),
        ("gpu a", None, "gloo"),
        (None, "gpu a", "gloo"),
        ("gpu a", "gpu a", "gloo"),
        ("gpu a", "gpu b", "nccl"),
    ],
)
def test_nccl_needs_two_gpus(source, target, expected):
    assert payload_backend(source, target) == expected


@pytest.mark.parametrize(
    ("kind", "has_nccl", "expected"),
    [("cpu", True, None), ("xpu", True, None), ("cuda", False, None), ("cuda", True, "uuid 1")],
)
def test_only_a_gpu_that_nccl_can_use_has_an_identifier(monkeypatch, kind, has_nccl, expected):
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: has_nccl)
    monkeypatch.setattr(
        "torch.cuda.get_device_properties",
        lambda device: SimpleNamespace(uuid=f"uuid {device.index}"),
    )
    assert gpu_of(torch.device(kind, 1)) == expected


class CountingGroup:
    """A stand-in for NCCL's group: gloo's, which counts the bytes that it carries."""

    def __init__(self, inner) -> None:
        self._inner = inner
        self.sent = 0
        self.received = 0

    def send(self, tensors, target, tag):
        self.sent += sum(tensor.nbytes for tensor in tensors)
        return self._inner.send(tensors, target, tag)

    def recv(self, tensors, source, tag):
        self.received += sum(tensor.nbytes for tensor in tensors)
        return self._inner.recv(tensors, source, tag)


def test_only_hidden_states_travel_in_the_group_of_payloads(monkeypatch):
    made: list[CountingGroup] = []
    gpus = ["gpu a", "gpu b"]

    def open_group(store, end):
        made.append(CountingGroup(open_gloo(store, end)))
        return made[-1]

    def open_gloo(store, end):
        return torch.distributed.ProcessGroupGloo(store, end, 2, torch_links.LINK_TIMEOUT)

    monkeypatch.setattr(torch_links, "_open_nccl", open_group)
    topology = one_ring(2)
    first, second = open_links(topology, 2, "torch", gpus)
    assert first.transport == second.transport == "nccl"
    link = topology.links[0]
    writer, reader = first.writer(link, LARGE), second.reader(link, LARGE, 1.0)
    back = topology.links[1]
    others = second.writer(back, LARGE), first.reader(back, LARGE, 1.0)
    sent = large_prefill(0)
    writer.write(sent)
    writer.write(Frame(kind=FrameKind.STATS, text=b"{}"))
    got = _next(reader)
    assert torch.equal(got.hidden, sent.hidden)
    assert _next(reader).text == b"{}"
    assert sorted(group.sent for group in made) == [0, 0, 0, sent.hidden.nbytes]
    assert sorted(group.received for group in made) == [0, 0, 0, sent.hidden.nbytes]
    for end in (reader, others[1]):
        end.close()
    for end in (writer, others[0]):
        end.close(0.0)


def _next(reader: TorchReader) -> Frame:
    frame = None
    while frame is None:
        frame = reader.read()
    return frame


class ForgettingGroup:
    """Operations never end but for those that wait for the link to be closed, as gloo's may."""

    def __init__(self) -> None:
        self.closed = threading.Event()

    def send(self, *_: object) -> SimpleNamespace:
        return SimpleNamespace(wait=lambda _: threading.Event().wait())

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> SimpleNamespace:
        del tensors, source
        if tag == torch_links._TAG:
            return self.send()
        return SimpleNamespace(wait=self._wait)

    def _wait(self, limit: timedelta) -> None:
        if limit < timedelta(seconds=1):  # a closing end
            self.closed.set()
        self.closed.wait()
        raise RuntimeError("Connection closed by peer")


def test_the_end_of_a_link_is_seen_where_an_operation_is_forgotten():
    group = ForgettingGroup()
    link = TorchLink(frames=group, payloads=group, device=torch.device("cpu"), peer=1)
    writer, reader = TorchWriter(link, LARGE), TorchReader(link, LARGE)
    writer.write(Frame(kind=FrameKind.HEARTBEAT))
    assert not writer.drain(0.01)
    assert reader.read() is None
    group.closed.set()
    with pytest.raises(LinkClosedError):
        writer.drain(PATIENCE_S)
    select.select([reader.fileno()], [], [], PATIENCE_S)
    with pytest.raises(LinkClosedError):
        reader.read()
    writer.close(0.0)
    reader.close()
