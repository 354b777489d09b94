"""Long runs with occasional kills, and what runs leave open to other users.

Shared machines pause processes: figures of time are of this machine at that moment.
"""

from __future__ import annotations

import os
import random
import signal
import stat
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from bench import Answers, execute, prompts_of, send, workers_of
from deaths import command, wait_for
from processes import open_files, resident_bytes

from inputs import BAD_LINES, CANARY
from llmpq.dist.metrics.progress import Event

SOAK_STAGES = 2
SOAK_REQUESTS = 2000
SOAK_TOKENS = 12
CALM_REQUESTS = 4000
"""In the last run, without kills, which shows whether a rank's memory goes on growing: in its first
thousand requests its allocator still gets memory, and few lives with kills are longer."""
SAMPLE_S = 2.0
LEAST_SAMPLES = 5
LEAST_SERVED = 200
"""Requests a process must have seen for its slope to be told."""


class Samples:
    """Memory and descriptors of the launcher and of the ranks, beside requests served."""

    def __init__(self) -> None:
        self.served = 0.0
        self.rows: list[tuple[int, float, int, int]] = []  # pid, served, bytes, descriptors
        self._names: dict[tuple[int, int], list[str]] = {}  # of a process with so many

    def take(self) -> None:
        """Take one sample of each process."""
        for pid in (os.getpid(), *workers_of(os.getpid()).values()):
            names = open_files(pid)
            self._names[pid, len(names)] = names
            self.rows.append((pid, self.served, resident_bytes(pid), len(names)))

    def slopes(self, pid: int) -> tuple[float, int] | None:
        """Return MB per 1,000 requests, and descriptors gained, over the later half of a life."""
        rows = self._later(pid)
        served = [row[1] for row in rows]
        if len(rows) < LEAST_SAMPLES or max(served) - min(served) < LEAST_SERVED:
            return None
        slope = statistics.linear_regression(served, [row[2] for row in rows]).slope
        first, last = self._usual(rows)
        return slope * 1000 / 1e6, last - first

    def gained(self, pid: int) -> list[str]:
        """Return what the descriptors are of that a process gained."""
        first, last = self._usual(self._later(pid))
        names = Counter(self._names[pid, last])
        return sorted((names - Counter(self._names[pid, first])).elements())

    def most(self, pid: int) -> list[str]:
        """Return what was open beside the usual when most was, if only for a moment."""
        usual = self._usual(self._later(pid))[1]
        most = max(count for one, count in self._names if one == pid)
        names = Counter(self._names[pid, most])
        return sorted((names - Counter(self._names[pid, usual])).elements())

    def _later(self, pid: int) -> list[tuple[int, float, int, int]]:
        rows = [row for row in self.rows if row[0] == pid and row[2]]
        return rows[len(rows) // 2 :]

    @staticmethod
    def _usual(rows: list[tuple[int, float, int, int]]) -> tuple[int, int]:
        """Return how many were open at first and at last; a file being read is not counted."""
        ends = rows[:LEAST_SAMPLES], rows[-LEAST_SAMPLES:]
        first, last = (statistics.median_low([row[3] for row in end]) for end in ends)
        return first, last


class Soak:
    """Serves run after run, killing a random rank every so often.

    Args:
        folder: holds the model.
        every_s: between two kills.
    """

    def __init__(self, folder: Path, every_s: float) -> None:
        self.samples = Samples()
        self.kills = self.served = self.runs = 0
        self.bad: list[str] = []
        self.calm: set[int] = set()  # processes of the run without kills
        self.longest_silence_s = 0.0
        self._folder = folder
        self._every_s = every_s
        self._prompts = prompts_of(CALM_REQUESTS, SOAK_TOKENS)
        total = sum(prompt.max_new_tokens or 0 for prompt in self._prompts)
        self._tokens_a_request = total / len(self._prompts)
        self._expected: Answers = {}
        self._before = self._done = 0  # tokens of earlier starts, and of this one
        self._sampled_s = 0.0
        self._heard_s = time.monotonic()

    def run(self, duration_s: float, least: int) -> None:
        """Go on for at least so long, and until so many requests are answered.

        A longer run without kills follows.
        """
        end_s = time.monotonic() + duration_s
        is_over = threading.Event()
        killer = threading.Thread(target=self._kill_until, args=(is_over,))
        killer.start()
        try:
            while time.monotonic() < end_s or self.served < least:
                self._run_once(SOAK_REQUESTS)
        finally:
            is_over.set()
            killer.join()
        before = len(self.samples.rows)
        self._run_once(CALM_REQUESTS)
        self.calm = {row[0] for row in self.samples.rows[before:]}

    def _run_once(self, requests: int) -> None:
        self._heard_s = time.monotonic()
        self._before, self._done = self._before + self._done, 0
        prompts = self._prompts[:requests]
        outcome = execute(self._folder, SOAK_STAGES, prompts, self._hear, max_restarts=10_000)
        self.runs += 1
        self.served += len(outcome.answers)
        same = all(
            self._expected.get(key, value) == value for key, value in outcome.answers.items()
        )
        self._expected |= outcome.answers
        if outcome.error or outcome.left or not same:
            self.bad.append(f"run {self.runs}: {outcome.error} {outcome.left}")
        if outcome.lines != requests:
            self.bad.append(f"run {self.runs}: {outcome.lines} answers")
        print(f"  soak: {self.served} requests, {self.kills} kills", file=sys.stderr, flush=True)

    def _hear(self, event: Event) -> None:
        now_s = time.monotonic()
        self.longest_silence_s = max(self.longest_silence_s, now_s - self._heard_s)
        self._heard_s = now_s
        if event.kind == "tokens":
            self._before += self._done if event.done < self._done else 0
            self._done = event.done
            self.samples.served = (self._before + self._done) / self._tokens_a_request
        if now_s - self._sampled_s >= SAMPLE_S:
            self._sampled_s = now_s
            self.samples.take()

    def _kill_until(self, is_over: threading.Event) -> None:
        chance = random.Random(0)
        while not is_over.wait(self._every_s):
            # Two kills in a row before any token would end the run, as they should.
            while not (self._done or is_over.is_set()):
                time.sleep(0.1)
            self._before, self._done = self._before + self._done, 0
            self.kills += send(chance.randrange(SOAK_STAGES), signal.SIGKILL)


def soak(folder: Path, duration_s: float, least: int, every_s: float) -> dict[str, Any]:
    """Serve for a while under kills; look for hangs, leaks, and answers that differ or repeat."""
    start_s = time.monotonic()
    run = Soak(folder, every_s)
    run.run(duration_s, least)
    lives = {pid: run.samples.slopes(pid) for pid in {row[0] for row in run.samples.rows}}
    names = {
        "launcher_gained": run.samples.gained(os.getpid()),
        "launcher_at_times": run.samples.most(os.getpid()),
    }
    launcher = lives.pop(os.getpid(), None)
    slopes = [one[0] for pid, one in lives.items() if one is not None and pid in run.calm]
    gained = max([one[1] for one in lives.values() if one is not None], default=0)
    grows = max([*slopes, launcher[0] if launcher else 0.0])
    leaks = gained > 0 or (launcher is not None and launcher[1] > 0)
    is_met = not run.bad and not leaks and len(slopes) == SOAK_STAGES and grows < 1.0
    return {
        "total_s": time.monotonic() - start_s,
        "count": run.served,
        "runs": run.runs,
        "kills": run.kills,
        "silence_s": run.longest_silence_s,
        "launcher_mb_per_1000": launcher and launcher[0],
        "launcher_fds": launcher and launcher[1],
        "ranks_mb_per_1000": max(slopes, default=None),
        "ranks_measured": len(slopes),
        "ranks_fds": gained,
        **names,
        "bad": run.bad,
        "ok": is_met,
    }


def listeners(pids: list[int]) -> set[str]:
    """Return the addresses, in hex, at which processes listen over TCP."""
    inodes = set()
    for pid in pids:
        try:
            links = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        inodes |= {link[8:-1] for link in links if link.startswith("socket:[")}
    found = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            columns = line.split()
            # A datagram socket has no state of listening: 07 is bound.
            if columns[3] in ("0A", "07") and columns[9] in inodes:
                found.add(f"{table} {columns[1]}")
    return found


@contextmanager
def watched(seen: set[str]) -> Iterator[None]:
    """Gather everything that this process's workers listen at, from their first moment on."""
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(0.05):
            seen.update(listeners([os.getpid(), *workers_of(os.getpid()).values()]))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def sockets(folder: Path, transport: Literal["auto", "gloo"]) -> dict[str, Any]:
    """Look for listening sockets from start to end of a run."""
    seen: set[str] = set()
    with watched(seen):
        outcome = execute(folder, 3, prompts_of(8, 100), transport=transport)
    beyond = {one for one in seen if not one.split()[1].startswith("0100007F:")}
    return {"seen": sorted(seen), "ok": not beyond and not outcome.error}


def traces(folder: Path) -> dict[str, Any]:
    """Run prompts with a canary in them; look for it in what the run says, and at file modes."""
    canary = "".join(f'{{"id": "c{n}", "prompt": "{CANARY}"}}\n' for n in range(3))
    good = '{"id": "good", "prompt_token_ids": [1, 2, 3], "max_new_tokens": 400}\n'
    good += good.replace("good", "fine")
    text = good + canary + "\n".join(line for line in BAD_LINES if len(line) < 1000) + "\n"
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        own = Path(name)
        health = own / "health.json"
        launcher = command(
            own, folder, [], "--verbose", "--health", str(health), lines=text.encode()
        )
        wait_for(lambda: health.exists() and "serving" in health.read_text(encoding="utf-8"))
        wide, quoted = [], []
        for path in [own / "results.jsonl", *own.glob("llmpq-*"), *own.glob("llmpq-*/*")]:
            try:
                mode = path.lstat().st_mode
                if stat.S_ISREG(mode) and CANARY in path.read_text(errors="replace"):
                    quoted.append(path.name)
            except OSError:
                continue
            if stat.S_IMODE(mode) & 0o077:
                wide.append(f"{path.name} {stat.S_IMODE(mode):o}")
        status = launcher.wait(timeout=60)
        said = (own / "stdout").read_text() + (own / "stderr").read_text()
    quoted += ["the command"] if CANARY in said else []
    # Files inside a folder that only this user can enter are as private as the folder.
    return {"wide": wide, "quoted": quoted, "status": status, "ok": not quoted and not wide}
