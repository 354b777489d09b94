"""Run one plan on two "hosts": network namespaces joined by a wire of 1 Gbit/s and 1 ms.

    sudo python scripts/two_hosts.py [--rate_mbit 1000] [--delay_ms 1] [--transport auto|gloo]

Each host runs the documented ``llmpq-dist doctor`` and ``llmpq-dist`` commands with its
``--node_rank``; nothing but the wire joins them. The wire is a process between two veth pairs that
forwards packets at the rate and after the delay asked for, because not every kernel has ``netem``.
Prints one JSON object; everything made is removed again, whatever happens.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import heapq
import itertools
import json
import os
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOSTS = ("llmpq-a", "llmpq-b")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
MTU = 9000
PORT = 29500
_SIOCETHTOOL = 0x8946
_OFFLOADS = (0x17, 0x1F, 0x24, 0x2C)  # transmit checksums, TSO, GSO, GRO: whole packets only
PACKET_IGNORE_OUTGOING = 23
SOL_PACKET = 263


def main() -> int:
    """Build the hosts, examine them, run the plan, print what came out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate_mbit", type=float, default=1000.0)
    parser.add_argument("--delay_ms", type=float, default=1.0)
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as name, hosts(options.rate_mbit, options.delay_ms):
        folder = Path(name)
        files = prepare(folder, options.layers)
        words = [*files, "--transport", options.transport]
        doctor = run_both("doctor", words)
        words += ["--prompts", str(folder / "prompts.jsonl")]
        words += ["--output", str(folder / "results.jsonl"), "--trace", str(folder / "trace.json")]
        report = run_both(None, words)
        events = json.loads((folder / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    stages = [
        {name: round(stage[name], 3) for name in ("busy_fraction", "wait_fraction")}
        for stage in report["stages"]
    ]
    links = [one["link"] for one in doctor["ranks"]]
    print(
        json.dumps(
            {
                "links": links,
                "findings": doctor["findings"],
                "requests": report["requests"],
                "generated_tokens": report["generated_tokens"],
                "elapsed_s": report["elapsed_s"],
                "tokens_per_s": report["throughput_tokens_per_s"],
                "stages": stages,
                "trace_spans": sum(event["ph"] == "X" for event in events),
            }
        )
    )
    return 0


def prepare(folder: Path, layers: int) -> list[str]:
    """Write a small random model, a plan over two nodes, prompts and a token."""
    # The end that only changes a namespace's settings needs none of these.
    sys.path.insert(0, str(ROOT / "tests"))
    from helpers.ranks import make_plan  # noqa: PLC0415
    from helpers.tiny_models import save_tiny_model  # noqa: PLC0415

    from llmpq.spec.cluster import Cluster, DeviceGroup, LinkSpec, Node  # noqa: PLC0415
    from llmpq.spec.plan_io import write_plan  # noqa: PLC0415

    model = save_tiny_model("llama", folder / "model", seed=1, num_hidden_layers=layers)
    group = DeviceGroup(type="cpu", count=1, threads=1)
    nodes = tuple(Node(name=name, devices=(group,)) for name in ("a", "b"))
    link = LinkSpec(between=("a", "b"), bytes_per_s=125e6, latency_s=1e-3)
    plan = make_plan(
        (0, layers // 2, layers),
        prefill=2,
        decode=2,
        batch=8,
        new_tokens=32,
        cluster=Cluster(name="two", nodes=nodes, links=(link,)),
    )
    write_plan(folder / "strategy.json", plan)
    lines = [
        {"id": n, "prompt_token_ids": [1 + n % 9] * 12, "max_new_tokens": 32, "ignore_eos": True}
        for n in range(16)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(16))
    files = ["--strat_file_name", str(folder / "strategy.json"), "--model", str(model)]
    return [*files, "--token_file", str(token)]


def run_both(verb: str | None, words: list[str]) -> dict[str, object]:
    """Run the command on both hosts; return what the master's printed."""
    command = [sys.executable, "-m", "llmpq.cli.dist", *([verb] if verb else []), *words]
    command += ["--json", "--nnodes", "2", "--master_addr", ADDRESSES[0]]
    command += ["--master_port", str(PORT)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["GLOO_SOCKET_IFNAME"] = "eth0"
    ends = [
        subprocess.Popen(
            ["ip", "netns", "exec", host, *command, "--node_rank", str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, host in enumerate(HOSTS)
    ]
    try:
        outputs = [end.communicate(timeout=200)[0] for end in ends]
    finally:
        for end in ends:
            end.kill()
    codes = [end.returncode for end in ends]
    if not outputs[0].strip() or any(code not in (0, 2) for code in codes):
        raise SystemExit(f"{verb or 'run'}: exit statuses {codes}: {outputs[0][:500]}")
    return json.loads(outputs[0])


@contextlib.contextmanager
def hosts(rate_mbit: float, delay_ms: float) -> Iterator[None]:
    """Two namespaces and a wire between them."""
    pair = (f"lpqa{os.getpid() % 10000}", f"lpqb{os.getpid() % 10000}")
    try:
        for host, address, end in zip(HOSTS, ADDRESSES, pair, strict=True):
            ip("netns", "add", host)
            ip(
                "link",
                "add",
                end,
                "mtu",
                str(MTU),
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                host,
            )
            ip("-n", host, "link", "set", "eth0", "mtu", str(MTU))
            ip("-n", host, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", host, "link", "set", "lo", "up")
            ip("-n", host, "link", "set", "eth0", "up")
            ip("link", "set", end, "up")
            whole = [sys.executable, __file__, "whole"]
            subprocess.run(["ip", "netns", "exec", host, *whole], check=True)
            whole_packets(end)
        wire = os.fork()
        if wire == 0:
            try:
                carry(pair, rate_mbit * 1e6 / 8, delay_ms / 1e3)
            finally:
                os._exit(1)
        try:
            yield
        finally:
            os.kill(wire, signal.SIGKILL)
            os.waitpid(wire, 0)
    finally:
        for host, end in zip(HOSTS, pair, strict=True):
            for words in (("link", "del", end), ("netns", "del", host)):
                subprocess.run(["ip", *words], check=False, stderr=subprocess.DEVNULL)


def ip(*words: str) -> None:
    """Run ip, which says itself what is wrong."""
    subprocess.run(["ip", *words], check=True)


def whole_packets(interface: str) -> None:
    """Have a veth end send packets as a real card would: no larger ones, checksums filled in."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for command in _OFFLOADS:
            value = (ctypes.c_uint32 * 2)(command, 0)
            request = struct.pack("16sP", interface.encode(), ctypes.addressof(value))
            with contextlib.suppress(OSError):  # an offload this kernel does not have
                fcntl.ioctl(sock, _SIOCETHTOOL, request)


def carry(pair: tuple[str, str], bytes_per_s: float, delay_s: float) -> None:
    """Forward packets both ways, each at the rate and after the delay."""
    ends = []
    for interface in pair:
        sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        sock.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        sock.bind((interface, 0))
        sock.setblocking(False)
        ends.append(sock)
    waiting: list[tuple[float, int, int, bytes]] = []
    free_s = [0.0, 0.0]
    count = itertools.count()
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable, _, _ = select.select(ends, [], [], timeout)
        now = time.monotonic()
        for sock in readable:
            side = ends.index(sock)
            with contextlib.suppress(BlockingIOError):
                for _ in range(64):
                    data = sock.recv(65536)
                    free_s[side] = max(free_s[side], now) + len(data) / bytes_per_s
                    heapq.heappush(waiting, (free_s[side] + delay_s, next(count), 1 - side, data))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, side, data = heapq.heappop(waiting)
            with contextlib.suppress(OSError):
                ends[side].send(data)


if __name__ == "__main__":
    if sys.argv[1:] == ["whole"]:
        whole_packets("eth0")
        sys.exit(0)
    sys.exit(main())
