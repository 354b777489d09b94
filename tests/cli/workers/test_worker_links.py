"""The connection to a worker, the measured link, and the cluster of several hosts' devices."""

from __future__ import annotations

import socket
import threading

import pytest
from helpers.small_host import small_host

from llmpq.cli.workers import connection as module
from llmpq.cli.workers import hosts, link
from llmpq.cli.workers.connection import Connection
from llmpq.cli.workers.link import answer_link, measure_link
from llmpq.cli.workers.socket_hosts import WorkerHosts
from llmpq.errors import SpecError, StageError
from llmpq.options.run import WORKER_PORT, WorkersOptions, worker_address
from llmpq.spec.catalog import with_device_types
from llmpq.spec.devices.figures import DeviceEntry
from llmpq.units import GIB


@pytest.fixture
def ends():
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def test_messages_arrive_in_order_and_signs_of_life_between_them_are_no_messages(ends, monkeypatch):
    monkeypatch.setattr(module, "ALIVE_S", 0.001)
    first, second = (Connection(sock, "x", 600) for sock in ends)
    for number in range(3):
        assert second.is_there()
        first.send("count", number=number)
    found = [second.receive(600) for _ in range(3)]
    assert found == [{"kind": "count", "number": number} for number in range(3)]
    assert second.receive(0) is None
    first.close()
    second.close()


def test_the_end_of_a_connection_is_noticed_after_its_last_message(ends):
    first, second = (Connection(sock, "b", 600) for sock in ends)
    first.send("last")
    first.close()
    while second.is_there():  # the message, where it is read only now, is a sign of life
        pass
    assert second.receive(0) == {"kind": "last"}
    with pytest.raises(StageError, match="b: closed the connection"):
        second.receive(600)
    with pytest.raises(StageError):
        second.send("more")
    second.close()


def test_silence_is_a_loss(ends):
    found = Connection(ends[0], "b", 0.05)
    assert not found.is_there()
    assert found.lost == "gave no sign of life for 0.05 s"
    found.close()


def test_what_is_no_message_is_a_loss(ends):
    found = Connection(ends[0], "b", 600)
    ends[1].sendall(b"\x02\x00\x00\x00[]")
    assert not found.is_there()
    assert "expected" in found.lost
    found.close()


def test_a_link_is_measured_in_both_directions(ends, monkeypatch):
    now = [0.0]

    class Clock:
        """Each message out takes a byte a microsecond, each back two."""

        @staticmethod
        def monotonic():
            return now[0]

    monkeypatch.setattr(link, "time", Clock)
    real = link._give, link._take

    def give(sock, size, deadline_s):
        now[0] += size * 1e-6 if sock is ends[0] else 0
        real[0](sock, size, deadline_s)

    def take(sock, size, deadline_s):
        now[0] += size * 2e-6 if sock is ends[0] else 0
        real[1](sock, size, deadline_s)

    monkeypatch.setattr(link, "_give", give)
    monkeypatch.setattr(link, "_take", take)
    monkeypatch.setattr(link, "send_all", lambda sock, data, _: sock.sendall(data))
    monkeypatch.setattr(link, "receive", lambda sock, size, _: sock.recv(size, socket.MSG_WAITALL))
    thread = threading.Thread(target=lambda: answer_link(ends[1], 600), daemon=True)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # the end of the measurement
    thread.start()
    found = measure_link(ends[0], 600)
    assert found.latency_s == pytest.approx(0.5e-6)
    assert found.out_bytes_per_s == pytest.approx(1e6, rel=1e-3)
    assert found.in_bytes_per_s == pytest.approx(0.5e6, rel=1e-3)
    thread.join()


def test_a_worker_answers_no_longer_message_than_the_longest(ends):
    ends[0].sendall(link._REQUEST.pack(b"u", link.MOST_BYTES + 1))
    with pytest.raises(StageError, match="expected at most"):
        answer_link(ends[1], 600)


def entry(rate):
    return DeviceEntry(
        type="cpu",
        kind="cpu",
        memory_bytes=8 * GIB,
        memory_bytes_per_s=rate,
        flops=(("float32", 1e10),),
        cores=1,
    )


@pytest.mark.parametrize(
    ("here", "there", "types"),
    [
        (None, None, ["cpu", "cpu"]),
        (1e9, 1e9, ["cpu", "cpu"]),
        (1e9, 2e9, ["cpu-here", "cpu-b"]),
        (None, 2e9, ["cpu", "cpu-b"]),
        (1e9, None, ["cpu-here", "cpu"]),
    ],
)
def test_hosts_with_other_figures_of_a_device_have_types_of_their_own(here, there, types):
    clusters = {
        name: small_host(500) if rate is None else with_device_types(small_host(500), [entry(rate)])
        for name, rate in (("here", here), ("b", there))
    }
    nodes, entries = hosts._with_own_figures(clusters)
    assert [node.name for node in nodes] == ["here", "b"]
    assert [node.devices[0].type for node in nodes] == types
    rates = {one.type: one.memory_bytes_per_s for one in entries}
    assert [rates.get(kind) for kind in types] == [here, there]


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("b", ("b", WORKER_PORT)),
        ("b:7", ("b", 7)),
        ("10.0.0.1:7", ("10.0.0.1", 7)),
        ("::1", ("::1", WORKER_PORT)),
        ("[::1]", ("::1", WORKER_PORT)),
        ("[::1]:7", ("::1", 7)),
    ],
)
def test_an_address_is_a_host_and_perhaps_a_port(text, address):
    assert worker_address(text) == address


@pytest.mark.parametrize("text", ["", "b:", "b:x", "b:0", "b:70000", "http://b:7"])
def test_other_texts_are_no_address(text):
    with pytest.raises(Exception, match="expected"):
        worker_address(text)


def test_a_key_is_needed(tmp_path):
    with pytest.raises(SpecError, match="--key_file"):
        WorkerHosts(WorkersOptions(workers=(("b", 7),)), 1.0, "test")
