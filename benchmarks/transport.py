"""Time frames between two ranks of one host, over sockets and over gloo, idle and with busy cores.

    python benchmarks/transport.py [--rounds 5] [--frames 200]

Two processes, each on a core of its own. A frame goes out and a small one returns; the figure is
half the median round trip of each round, and the spread over the rounds. "Busy" adds one process a
core that computes all the time, as a neighbour stage without a core of its own does. The
transports take turns within every round.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from llmpq.dist.io.job import Rendezvous
from llmpq.dist.transport.frames import Frame, FrameKind, FrameLimits, Row
from llmpq.dist.transport.rendezvous import RankIdentity, connect

SIZES = (16 << 10, 1 << 20, 16 << 20)
TRANSPORTS = ("auto", "gloo")
HIDDEN = 1024
LIMITS = FrameLimits(
    digest=b"transprt",
    num_blocks=1,
    block_size=max(SIZES) // (4 * HIDDEN),
    max_context=max(SIZES) // HIDDEN,
    prefill_rows=1,
    prefill_tokens=max(SIZES) // (4 * HIDDEN),
    decode_rows=1,
    hidden_size=HIDDEN,
    dtype=torch.float32,
)


def frame(size: int) -> Frame:
    """Return a frame with ``size`` bytes of hidden states."""
    tokens = size // (4 * HIDDEN)
    return Frame(
        kind=FrameKind.PREFILL,
        rows=(Row(blocks=(0,), first=0, length=tokens),),
        hidden=torch.ones(1, tokens, HIDDEN),
    )


def end(rank: int, transport: str, folder: str, plan: tuple[int, int, float], out) -> None:
    """Run one end: rank 0 times, rank 1 answers."""
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    identity = RankIdentity(
        rank=rank, world_size=2, name=f"rank {rank}", limits=LIMITS, timeout_s=30.0
    )
    communicator = connect(
        identity, Rendezvous(file=Path(folder) / "rendezvous"), transport
    ).communicator
    size, count, budget_s = plan
    there, back = frame(size), frame(4 * HIDDEN)
    times = []
    start = time.perf_counter()
    for number in range(count + 5):
        began = time.perf_counter()
        if rank == 0:
            is_last = number == count + 4 or time.perf_counter() - start > budget_s
            communicator.send(Frame(kind=FrameKind.STATS, text=b"last") if is_last else there)
            communicator.recv()
            if is_last:
                break
            times.append(time.perf_counter() - began)
        else:
            is_last = communicator.recv().kind is FrameKind.STATS
            communicator.send(back)
            if is_last:
                break
    communicator.close()
    if rank == 0:
        out.put(statistics.median(times[5:] or times))
    os._exit(0) if rank else None


def burn(core: int) -> None:
    """Compute on a core until killed."""
    os.sched_setaffinity(0, {core})
    while True:
        sum(range(10_000))


def measure(transport: str, plan: tuple[int, int, float]) -> float:
    """Return the median round trip in seconds of frames between two new processes."""
    context = multiprocessing.get_context("fork")
    out = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ends = [
            context.Process(target=end, args=(rank, transport, folder, plan, out), daemon=True)
            for rank in (0, 1)
        ]
        for one in ends:
            one.start()
        seconds = out.get()
        for one in ends:
            one.join(timeout=2)
            one.kill()
    return seconds


def main() -> None:
    """Measure every case in turns and print one JSON object a case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--frames", type=int, default=200)
    parser.add_argument("--budget", type=float, default=1.0, help="seconds a case at most")
    options = parser.parse_args()
    context = multiprocessing.get_context("fork")
    rows = []
    for is_busy in (False, True):
        burners = [
            context.Process(target=burn, args=(core,), daemon=True)
            for core in sorted(os.sched_getaffinity(0))
            if is_busy
        ]
        for one in burners:
            one.start()
        found: dict[tuple[str, int], list[float]] = {}
        for _ in range(options.rounds):
            for size in SIZES:
                for transport in TRANSPORTS:
                    seconds = measure(transport, (size, options.frames, options.budget))
                    found.setdefault((transport, size), []).append(seconds)
        for one in burners:
            one.kill()
        for (transport, size), times in found.items():
            half = sorted(value / 2e-6 for value in times)
            rows.append(
                {
                    "busy": is_busy,
                    "transport": transport,
                    "bytes": size,
                    "us": round(statistics.median(half), 1),
                    "spread_us": [round(half[0], 1), round(half[-1], 1)],
                }
            )
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
