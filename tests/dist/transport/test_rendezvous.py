"""The rendezvous: tokens, garbage, idle connections, ranks that differ or do not come."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.clocks import PATIENCE_S
from helpers.frames import SMALL
from helpers.ranks import make_plan
from torch.distributed import ProcessGroupGloo

from llmpq.dist.io.job import Rendezvous
from llmpq.dist.launch.rank import frame_limits
from llmpq.dist.transport import torch_links
from llmpq.dist.transport.channels import RankChannels
from llmpq.dist.transport.endpoint import MAX_PENDING_HANDSHAKES, Endpoint, read_token
from llmpq.dist.transport.frames import Frame, FrameKind, FrameLimits
from llmpq.dist.transport.rendezvous import RankIdentity, connect
from llmpq.errors import LlmpqError, SpecError, StageError
from llmpq.options.engine import EngineOptions
from llmpq.options.limits import engine_limits


def identity(rank: int, world_size: int, limits: FrameLimits = SMALL) -> RankIdentity:
    name = f"stage {rank} (rank {rank})"
    return RankIdentity(
        rank=rank, world_size=world_size, name=name, limits=limits, timeout_s=PATIENCE_S
    )


def connect_all(
    ranks: list[tuple[RankIdentity, Rendezvous]],
) -> tuple[dict[int, RankChannels], dict[int, LlmpqError]]:
    """Connect all ranks at once, each in a thread."""
    made: dict[int, RankChannels] = {}
    failed: dict[int, LlmpqError] = {}

    def run(who: RankIdentity, rendezvous: Rendezvous) -> None:
        try:
            made[who.rank] = connect(who, rendezvous)
        except LlmpqError as error:
            failed[who.rank] = error

    threads = [threading.Thread(target=run, args=rank) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=PATIENCE_S)
    return made, failed


def passes_round(made: dict[int, RankChannels]) -> bool:
    """Send a frame round the ring and close; return whether it came back."""
    communicators = [made[rank].communicator for rank in sorted(made)]
    communicators[0].send(Frame(kind=FrameKind.STATS, text=b"round"))
    for one in communicators[1:]:
        one.send(one.recv())
    text = communicators[0].recv().text
    for one in communicators:
        one.close()
    return text == b"round"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def token_file(folder: Path, text: str = "a secret of many letters") -> Path:
    path = folder / "token"
    path.write_text(text)
    path.chmod(0o600)
    return path


def is_listening(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def test_ranks_of_one_host_use_unix_sockets_and_leave_no_file(tmp_path):
    deep = tmp_path / ("a" * 60) / ("b" * 60)  # deeper than a unix socket's name can be
    deep.mkdir(parents=True)
    rendezvous = Rendezvous(file=deep / "rendezvous")
    made, failed = connect_all([(identity(rank, 3), rendezvous) for rank in range(3)])
    assert not failed
    assert [made[rank].transport for rank in range(3)] == ["unix"] * 3
    assert made[1].communicator.names == [identity(rank, 3).name for rank in range(3)]
    assert not list(deep.iterdir())
    assert passes_round(made)


def test_ranks_of_one_host_with_an_address_use_unix_sockets_and_stop_listening(tmp_path):
    port = free_port()
    rendezvous = Rendezvous(address=("127.0.0.1", port), token_file=token_file(tmp_path))
    made, failed = connect_all([(identity(rank, 2), rendezvous) for rank in range(2)])
    assert not failed
    assert {ring.transport for ring in made.values()} == {"unix"}
    assert abs(made[1].clock_offset_s) <= made[1].clock_error_s + 1e-3
    assert not is_listening(port)
    assert passes_round(made)


@pytest.mark.parametrize(
    ("gpus", "num_hosts", "expected"),
    [
        (("a", "b", None), 1, ["nccl", "gloo", "gloo"]),
        (("a", "b", None), 3, ["tcp"] * 3),  # NCCL checks no token
        (("a", "a", None), 1, ["unix"] * 3),  # one GPU
        ((None, "b", None), 1, ["unix"] * 3),
    ],
)
def test_gpus_of_one_host_are_joined_by_nccl(tmp_path, monkeypatch, gpus, num_hosts, expected):
    def open_gloo(store, end):
        return ProcessGroupGloo(store, end, 2, torch_links.LINK_TIMEOUT)

    def gpu_of(device):
        return None if device.index is None else gpus[device.index]

    hosts = iter(f"host {rank % num_hosts}" for rank in range(3))
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr("llmpq.dist.transport.rendezvous._host_key", lambda: next(hosts))
    monkeypatch.setattr("llmpq.dist.transport.rendezvous.gpu_of", gpu_of)
    monkeypatch.setattr(torch_links, "_open_nccl", open_gloo)  # on host memory: no GPU is here
    rendezvous = Rendezvous(file=tmp_path / "rendezvous")
    if num_hosts > 1:
        address = ("127.0.0.1", free_port())
        rendezvous = Rendezvous(address=address, token_file=token_file(tmp_path))
    ends = [
        (dataclasses.replace(identity(rank, 3), device=torch.device("cpu", rank)), rendezvous)
        for rank in range(3)
    ]
    made, failed = connect_all(ends)
    assert not failed
    assert [made[rank].transport for rank in range(3)] == expected
    assert passes_round(made)
    assert (os.environ.pop("NCCL_SOCKET_IFNAME", None) == "lo") == ("nccl" in expected)


def test_ranks_of_different_hosts_use_tcp(tmp_path, monkeypatch):
    hosts = iter("abc")
    monkeypatch.setattr("llmpq.dist.transport.rendezvous._host_key", lambda: next(hosts))
    rendezvous = Rendezvous(address=("127.0.0.1", free_port()), token_file=token_file(tmp_path))
    made, failed = connect_all([(identity(rank, 3), rendezvous) for rank in range(3)])
    assert not failed
    assert [made[rank].transport for rank in range(3)] == ["tcp"] * 3
    assert passes_round(made)


def test_each_link_has_its_own_transport(tmp_path, monkeypatch):
    key = {"MainThread": "x"}

    def host_key() -> str:
        return key.setdefault(threading.current_thread().name, f"host {len(key) % 2}")

    monkeypatch.setattr("llmpq.dist.transport.rendezvous._host_key", host_key)
    rendezvous = Rendezvous(address=("127.0.0.1", free_port()), token_file=token_file(tmp_path))
    made, failed = connect_all([(identity(rank, 3), rendezvous) for rank in range(3)])
    assert not failed
    assert sorted(made[rank].transport for rank in range(3)) == ["tcp", "tcp", "unix"]
    assert passes_round(made)


def test_another_token_is_refused_and_the_other_ranks_connect(tmp_path):
    address = ("127.0.0.1", free_port())
    (tmp_path / "other").mkdir()
    good = Rendezvous(address=address, token_file=token_file(tmp_path))
    bad = Rendezvous(address=address, token_file=token_file(tmp_path / "other", "x" * 30))
    intruder, connected = {}, {}

    def intrude() -> None:
        intruder.update(connect_all([(identity(1, 2), bad)])[1])

    thread = threading.Thread(target=intrude)
    host = threading.Thread(
        target=lambda: connected.update(connect_all([(identity(0, 2), good)])[0])
    )
    host.start()
    thread.start()
    thread.join(timeout=PATIENCE_S)
    assert isinstance(intruder[1], SpecError)
    assert "token" in str(intruder[1])
    made, failed = connect_all([(identity(1, 2), good)])
    host.join(timeout=PATIENCE_S)
    assert not failed
    assert passes_round(connected | made)


def test_an_address_that_other_hosts_reach_needs_a_token():
    with pytest.raises(SpecError, match=r"192\.0\.2\.1.*token_file"):
        connect(identity(1, 2), Rendezvous(address=("192.0.2.1", 1)))


@pytest.mark.parametrize(
    ("text", "mode", "names"), [("short", 0o600, "at least 16"), ("long" * 9, 0o644, "mode 644")]
)
def test_a_short_or_readable_token_is_refused(tmp_path, text, mode, names):
    path = token_file(tmp_path, text)
    path.chmod(mode)
    with pytest.raises(SpecError, match=names):
        read_token(path)


def test_ranks_of_another_plan_are_named(tmp_path):
    other = dataclasses.replace(SMALL, digest=b"another.")
    rendezvous = Rendezvous(file=tmp_path / "rendezvous")
    made, failed = connect_all([(identity(0, 2), rendezvous), (identity(1, 2, other), rendezvous)])
    assert not made
    assert all(isinstance(error, SpecError) for error in failed.values())
    assert "stage 1 (rank 1) runs another plan" in str(failed[0])


def test_ranks_with_other_options_have_another_digest(tiny_model):
    plan, model_dir = make_plan((0, 1, 3)), tiny_model("llama", seed=1)

    def digest(token_budget: int, longest: int = 24, *, has_drafts: bool = False) -> bytes:
        limits = engine_limits(plan, EngineOptions(token_budget=token_budget))
        return frame_limits(plan, model_dir, limits, longest, has_drafts=has_drafts).digest

    assert digest(16) == digest(16)
    assert len({digest(16), digest(17), digest(16, 32), digest(16, has_drafts=True)}) == 4


def test_a_rank_that_does_not_come_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("llmpq.dist.transport.rendezvous.START_TIMEOUT_S", 0.3)
    rendezvous = Rendezvous(file=tmp_path / "rendezvous")
    made, failed = connect_all([(identity(0, 3), rendezvous), (identity(1, 3), rendezvous)])
    assert not made
    assert all(isinstance(error, StageError) for error in failed.values())
    assert "rank 2 did not start in time" in str(failed[0])
    assert "rank 2 did not start in time" in str(failed[1])


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n\r\n" * 9, b"\0" * 64, b"\xff" * 4096, os.urandom(4096), b"llmpq-1\n"],
)
def test_garbage_is_closed_at_once_and_the_ranks_connect(tmp_path, garbage):
    address = ("127.0.0.1", free_port())
    rendezvous = Rendezvous(address=address, token_file=token_file(tmp_path))
    connected: dict[int, RankChannels] = {}
    host = threading.Thread(
        target=lambda: connected.update(connect_all([(identity(0, 2), rendezvous)])[0])
    )
    host.start()
    with _connection(lambda: Endpoint(address=address).connect(5)) as intruder:
        if len(garbage) > 24:  # what is shorter is waited for, 5 s at most
            intruder.sendall(garbage)
            assert _bytes_until_closed(intruder) <= 16  # the challenge, never more
        made, failed = connect_all([(identity(1, 2), rendezvous)])
    host.join(timeout=PATIENCE_S)
    assert not failed
    assert passes_round(connected | made)


def test_idle_connections_do_not_block_the_ranks(tmp_path):
    address = ("127.0.0.1", free_port())
    rendezvous = Rendezvous(address=address, token_file=token_file(tmp_path))
    connected: dict[int, RankChannels] = {}
    host = threading.Thread(
        target=lambda: connected.update(connect_all([(identity(0, 2), rendezvous)])[0])
    )
    host.start()
    with contextlib.ExitStack() as idle:
        for _ in range(MAX_PENDING_HANDSHAKES + 40):
            idle.enter_context(_connection(lambda: Endpoint(address=address).connect(5)))
        made, failed = connect_all([(identity(1, 2), rendezvous)])
    host.join(timeout=PATIENCE_S)
    assert not failed
    assert passes_round(connected | made)


def _connection(make: Callable[[], socket.socket], limit_s: float = PATIENCE_S) -> socket.socket:
    end = time.monotonic() + limit_s
    while True:
        try:
            return make()
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.01)


def _bytes_until_closed(sock: socket.socket) -> int:
    count = 0
    with contextlib.suppress(ConnectionError):
        while data := sock.recv(4096):
            count += len(data)
    return count
