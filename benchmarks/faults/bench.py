"""A bench for faults: a tiny float32 model, plans for it, and runs that something is done to.

Runs are started in this process by ``run_job``, as the command does, so that the moment of a fault
and that of its error are read on one clock.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from helpers.processes import is_running, workers_of  # noqa: E402
from helpers.ranks import make_plan  # noqa: E402
from helpers.tiny_models import save_tiny_model  # noqa: E402

from llmpq.dist import run_job  # noqa: E402
from llmpq.dist.io.job import Job  # noqa: E402
from llmpq.dist.io.prompts import Prompt, write_prompts  # noqa: E402
from llmpq.dist.io.results import read_results  # noqa: E402
from llmpq.dist.launch.signals import StopRequest  # noqa: E402
from llmpq.dist.metrics.measurement import Measurement  # noqa: E402
from llmpq.dist.metrics.progress import Event  # noqa: E402
from llmpq.errors import LlmpqError  # noqa: E402
from llmpq.options.run import Transport  # noqa: E402
from llmpq.spec.plan import Plan, write_plan  # noqa: E402

Answers = dict[str | int, tuple[int, ...]]


def plan_of(stages: int) -> Plan:
    """Return a plan of one layer a stage, small micro-batches and room for long answers."""
    cuts = tuple(range(stages + 1))
    return make_plan(cuts, prefill=2, decode=2, batch=8, prompt_tokens=64, new_tokens=600)


def model_for(stages: int, folder: Path) -> Path:
    """Write a model of one layer a stage, once."""
    path = folder / f"model-{stages}"
    if not path.exists():
        save_tiny_model(
            "llama", path, seed=1, num_hidden_layers=stages, max_position_embeddings=1024
        )
    return path


def prompts_of(count: int, new_tokens: int, late_s: float = 0.0) -> list[Prompt]:
    """Return prompts of different lengths; all but the first arrive ``late_s`` later."""
    return [
        Prompt(
            id=number,
            where="",
            token_ids=tuple(1 + (number * 7 + place) % 40 for place in range(3 + number % 9)),
            max_new_tokens=new_tokens + number % 5,
            ignore_eos=True,
            arrival_s=late_s if number else 0.0,
        )
        for number in range(count)
    ]


@dataclass(slots=True, kw_only=True)
class Outcome:
    """How a run ended.

    Attributes:
        error: what it raised, ``None`` when it ended well.
        end_s: when, on the monotonic clock.
        measurement: what it returned.
        answers: what stands in the result file.
        lines: how many answers stand there, repeated ones included.
        health: changes of ``is_healthy`` in the health file: when, and to what.
        left: processes, shared memory and folders that outlived it.
    """

    error: LlmpqError | None
    end_s: float
    measurement: Measurement | None
    answers: Answers = field(default_factory=dict)
    lines: int = 0
    health: list[tuple[float, bool]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


class Listener:
    """Progress that hands every event to a function, and remembers every worker."""

    def __init__(self, act: Callable[[Event], None]) -> None:
        self._act = act

    def report(self, event: Event) -> None:
        """Pass the event on."""
        self._act(event)


def shared_memory() -> set[str]:
    """Return the names of what is in shared memory.

    Left out are this bench's own files and semaphores, which llmpq has none of: other programs do.
    """
    names = {path.name for path in Path("/dev/shm").iterdir()}
    return {name for name in names if "faults-" not in name and not name.startswith("sem.")}


def execute(  # noqa: PLR0913  what a run is made of
    folder: Path,
    stages: int,
    prompts: Sequence[Prompt],
    act: Callable[[Event], None] = lambda _: None,
    *,
    stop: StopRequest | None = None,
    max_restarts: int = 0,
    step_timeout_s: float = 10.0,
    transport: Transport = "auto",
) -> Outcome:
    """Run prompts and tell how that ended.

    Args:
        folder: holds the model; what the run writes goes into a folder of its own, removed after.
        stages: of the plan.
        prompts: to answer.
        act: called with every event of a rank.
        stop: as for ``run_job``.
        max_restarts: as for ``run_job``.
        step_timeout_s: as for a job.
        transport: as for a job.
    """
    shared = shared_memory()
    with tempfile.TemporaryDirectory(prefix="faults-") as name, private_temp(Path(name)):
        own = Path(name)
        plan = plan_of(stages)
        write_plan(own / "strategy.json", plan)
        write_prompts(own / "prompts.jsonl", prompts)
        health = own / "health.json"
        job = Job(
            strategy=own / "strategy.json",
            model_dir=model_for(stages, folder),
            prompts=own / "prompts.jsonl",
            output=own / "results.jsonl",
            step_timeout_s=step_timeout_s,
            transport=transport,
        )
        outcome = Outcome(error=None, end_s=0.0, measurement=None)
        with followed(health) as outcome.health:
            try:
                outcome.measurement = run_job(
                    job,
                    progress=Listener(act),
                    stop=stop,
                    max_restarts=max_restarts,
                    health=health,
                )
            except LlmpqError as error:
                outcome.error = error
            outcome.end_s = time.monotonic()
            time.sleep(0.2)  # for a reader of the health file
        if job.output.exists():
            results = read_results(job.output)
            outcome.lines = len(results)
            outcome.answers = {result.id: result.token_ids for result in results}
        outcome.left = [f"process {pid}" for pid in workers_of(os.getpid()).values()]
        outcome.left += [str(path.name) for path in own.glob("llmpq-*/job.json")]
        outcome.left += sorted(shared_memory() - shared)
    return outcome


@contextmanager
def private_temp(folder: Path) -> Iterator[None]:
    """Have runs make their private folders inside ``folder``."""
    before = tempfile.tempdir
    tempfile.tempdir = str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before


@contextmanager
def followed(path: Path) -> Iterator[list[tuple[float, bool]]]:
    """Look at a health file many times a second."""
    changes: list[tuple[float, bool]] = []
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(0.02):
            if path.exists():
                is_healthy = bool(json.loads(path.read_text(encoding="utf-8"))["is_healthy"])
                if not changes or changes[-1][1] != is_healthy:
                    changes.append((time.monotonic(), is_healthy))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield changes
    finally:
        is_over.set()
        thread.join()


def send(rank: int, number: signal.Signals, parent: int | None = None) -> bool:
    """Send a signal to a worker of this process; tell whether it was there."""
    pid = workers_of(parent or os.getpid()).get(rank)
    if pid is None or not is_running(pid):
        return False
    os.kill(pid, number)
    return True


def as_json(value: Any) -> str:
    """Return one line of a journal."""
    return json.dumps(value, ensure_ascii=False)
