"""Ranks and launchers that die, hang or receive a signal to end."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench import (
    ROOT,
    Answers,
    execute,
    is_running,
    model_for,
    plan_of,
    prompts_of,
    send,
    shared_memory,
    workers_of,
    write_plan,
    write_prompts,
)

from llmpq.dist.launch.signals import StopRequest
from llmpq.dist.metrics.progress import Event
from llmpq.errors import StageError

PHASES = ("loading", "prefill", "decode", "idle", "drain")
STAGES = 3
STEP_TIMEOUT_S = 3.0
IDLE_S = 1.0
DRAIN_AFTER_S = 0.2


class Moment:
    """Does something once, when a run is in a phase."""

    def __init__(self, phase: str, action: Callable[[], object], stop: StopRequest) -> None:
        self._phase = phase
        self._action = action
        self._stop = stop
        self._is_set = False
        self.time_s: float | None = None

    def __call__(self, event: Event) -> None:
        """Look at an event, and act when it is the one."""
        if self._is_set:
            return
        is_tokens = event.kind == "tokens"
        if self._phase == "loading":
            self._set(0.0, event.kind == "load")
        elif self._phase == "prefill":
            self._set(0.0, is_tokens)
        elif self._phase == "decode":
            self._set(0.0, is_tokens and event.done >= 60)
        elif self._phase == "idle":
            self._set(IDLE_S, is_tokens and event.done >= 4)  # the first prompt's whole answer
        elif is_tokens and event.done >= 60:
            self._stop.request("SIGTERM")
            self._set(DRAIN_AFTER_S, True)

    def _set(self, after_s: float, is_now: bool) -> None:
        if not is_now:
            return
        self._is_set = True
        if after_s:
            threading.Timer(after_s, self._act).start()
        else:
            self._act()

    def _act(self) -> None:
        self.time_s = time.monotonic()
        self._action()


def strike(folder: Path, number: signal.Signals, stage: int, phase: str) -> dict[str, Any]:
    """Kill or stop one stage in one phase; tell what the run said, and after how long."""
    prompts = prompts_of(8, 4 if phase == "idle" else 500, 60.0 if phase == "idle" else 0.0)
    stop = StopRequest()
    moment = Moment(phase, partial(send, stage, number), stop)
    outcome = execute(folder, STAGES, prompts, moment, stop=stop, step_timeout_s=STEP_TIMEOUT_S)
    struck_s = moment.time_s or outcome.end_s
    # While loading it was never healthy.
    sick = [at_s - struck_s for at_s, is_healthy in outcome.health if not is_healthy]
    sick = [seconds for seconds in sick if seconds >= 0] or [0.0][: phase == "loading"]
    limit_s = 1.0 if number is signal.SIGKILL else STEP_TIMEOUT_S + 1.0
    seconds = outcome.end_s - struck_s
    names = f"stage {stage} (rank {stage}, " in str(outcome.error)
    is_typed = isinstance(outcome.error, StageError) and names
    return {
        "seconds": seconds,
        "limit_s": limit_s,
        "health_s": sick[0] if sick else None,
        "ok": moment.time_s is not None and is_typed and not outcome.left and seconds <= limit_s,
        "error": str(outcome.error),
        "left": outcome.left,
    }


def orphan(folder: Path, phase: str) -> dict[str, Any]:
    """Kill the launching command; tell how long anything of its run stays."""
    shared = shared_memory()
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        own = Path(name)
        health = own / "health.json"
        launcher = command(own, folder, prompts_of(8, 500), "--health", str(health))
        wanted = "starting" if phase == "loading" else "serving"
        wait_for(lambda: health.exists() and wanted in health.read_text(encoding="utf-8"))
        wait_for(lambda: len(workers_of(launcher.pid)) == STAGES)
        workers = list(workers_of(launcher.pid).values())
        launcher.kill()
        start_s = time.monotonic()
        launcher.wait()

        def is_clean() -> bool:
            folders = list(own.glob("llmpq-*/job.json"))
            return not (folders or any(is_running(pid) for pid in workers))

        wait_for(is_clean)
        seconds = time.monotonic() - start_s
        left = sorted(shared_memory() - shared)
    return {"seconds": seconds, "limit_s": 5.0, "ok": seconds <= 5.0 and not left, "left": left}


def command(
    own: Path, folder: Path, prompts: list[Any], *more: str, lines: bytes | None = None
) -> subprocess.Popen[str]:
    """Start ``llmpq-dist`` in a session of its own, its private folders inside ``own``."""
    write_plan(own / "strategy.json", plan_of(STAGES))
    write_prompts(own / "prompts.jsonl", prompts)
    if lines is not None:
        (own / "prompts.jsonl").write_bytes(lines)
    files = ["--strat_file_name", "strategy.json", "--prompts", "prompts.jsonl"]
    files += ["--output", "results.jsonl", "--model", str(model_for(STAGES, folder)), *more]
    with (own / "stdout").open("wb") as out, (own / "stderr").open("wb") as told:
        return subprocess.Popen(
            [sys.executable, "-m", "llmpq.cli.commands.dist", *files],
            cwd=own,
            env=os.environ | {"TMPDIR": str(own), "PYTHONPATH": str(ROOT)},
            stdout=out,
            stderr=told,
            text=True,
            start_new_session=True,
        )


def wait_for(is_there: Callable[[], object], limit_s: float = 60.0) -> None:
    """Wait until something is there."""
    end_s = time.monotonic() + limit_s
    while not is_there():
        if time.monotonic() > end_s:
            raise TimeoutError("it did not come")
        time.sleep(0.01)


def recover(folder: Path, seed: int, kills: int, expected: Answers) -> dict[str, Any]:
    """Kill a random rank at a random token, start after start, and compare every answer.

    ``seconds`` is the longest time from a kill to the first token after it; the median beside it.
    """
    chance = random.Random(seed)
    struck_s: list[float] = []
    back_s: list[float] = []
    plans = [(chance.randrange(1, 400), chance.randrange(STAGES)) for _ in range(kills)]
    state = {"done": 0}

    def act(event: Event) -> None:
        if event.kind != "tokens":
            return
        # Every start says 0 tokens first.
        is_back = state["done"] == 0 and event.done > 0
        if len(back_s) < len(struck_s) and is_back:
            back_s.append(time.monotonic() - struck_s[-1])
        if len(struck_s) == len(back_s) < kills:
            tokens, rank = plans[len(struck_s)]
            if event.done >= tokens and send(rank, signal.SIGKILL):
                struck_s.append(time.monotonic())
        state["done"] = event.done

    prompts = prompts_of(len(expected), RECOVER_TOKENS)
    outcome = execute(folder, STAGES, prompts, act, max_restarts=kills)
    same = outcome.answers == expected
    once = outcome.lines == len(expected) and len(struck_s) == kills
    worst = max(back_s, default=0.0)
    return {
        "kills": len(struck_s),
        "restarts": len(outcome.measurement.restarts) if outcome.measurement else None,
        "seconds": worst,
        "median_s": sorted(back_s)[len(back_s) // 2] if back_s else None,
        "limit_s": 30.0,
        "ok": same and once and not outcome.error and not outcome.left and worst <= 30.0,
        "identical": same,
        "once": once,
        "error": str(outcome.error),
    }


RECOVER_TOKENS = 100
RECOVER_REQUESTS = 60


def drain(folder: Path, twice: bool) -> dict[str, Any]:
    """SIGTERM a serving command, once or twice; tell how long it took and what it left."""
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        own = Path(name)
        health = own / "health.json"
        launcher = command(own, folder, prompts_of(40, 200), "--health", str(health))
        wait_for(lambda: health.exists() and "serving" in health.read_text(encoding="utf-8"))
        workers = list(workers_of(launcher.pid).values())
        time.sleep(0.5)
        start_s = time.monotonic()
        launcher.send_signal(signal.SIGTERM)
        if twice:
            wait_for(lambda: "draining" in health.read_text(encoding="utf-8"))
            start_s = time.monotonic()
            launcher.send_signal(signal.SIGTERM)
        status = launcher.wait(timeout=60)
        seconds = time.monotonic() - start_s
        answers = (own / "results.jsonl").read_bytes().count(b"\n")
        left = [pid for pid in workers if is_running(pid)]
    # Eight slots: whatever had begun is finished, in whole batches of answers.
    ok = status == 130 and not left and (twice or answers >= 8)
    limit_s = 1.0 if twice else 30.0
    return {
        "seconds": seconds,
        "limit_s": limit_s,
        "ok": ok and seconds <= limit_s,
        "status": status,
        "answers": answers,
    }
