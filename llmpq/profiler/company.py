"""Company: processes that keep the host's other cores busy with the same kind of work.

A worker seldom computes alone: the other stages of its host stream weights through the same
memory and last cache, and a processor's clock follows how many of its cores work. So the profiler
starts companions, which time nothing; it lets them go on and stops them by signals, and compares
the same trial with and without them, one right after the other: what else goes on in a shared
machine is in both.

``python -m llmpq.profiler.company CORE`` is one companion. It reads a job from its standard input,
says ``ready``, and repeats the job's trials in a random order until it is killed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from llmpq.dist.launch.worker import die_with
from llmpq.errors import StageError
from llmpq.profiler.bench import Bench, LayerJob
from llmpq.profiler.grid import Shape
from llmpq.spec.fields import dump_json
from llmpq.spec.precision import Phase

_READY = "ready"


class Company:
    """Companions of one measurement, stopped until they are let go.

    Args:
        job: what they repeat.
        cores: one companion is pinned to each.

    Raises:
        StageError: a companion ended before it was ready.
    """

    def __init__(self, job: LayerJob, cores: Sequence[int]) -> None:
        self._companions: list[subprocess.Popen[str]] = []
        try:
            for core in cores:
                self._companions.append(_start(job, core))
            for one in self._companions:
                assert one.stdout is not None
                if one.stdout.readline().strip() != _READY:
                    raise StageError("profile: a companion ended before it was ready")
            self._signal(signal.SIGSTOP)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Company:
        """Let the companions work."""
        self._signal(signal.SIGCONT)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop them until the next time."""
        self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """End them."""
        for one in self._companions:
            one.kill()
            one.communicate()

    def _signal(self, number: signal.Signals) -> None:
        for one in self._companions:
            one.send_signal(number)


def job_to_json(job: LayerJob) -> dict[str, Any]:
    """Return a job as another process reads it."""
    return {
        "model_dir": str(job.model_dir),
        "bits": list(job.bits),
        "shapes": [[shape.phase.value, shape.batch, shape.tokens] for shape in job.shapes],
        "dtype": str(job.dtype).removeprefix("torch."),
        "device": str(job.device),
        "layers": job.layers,
        "threads": torch.get_num_threads(),
    }


def job_from_json(found: dict[str, Any], seed: int) -> LayerJob:
    """Return the job that another process described."""
    return LayerJob(
        model_dir=Path(found["model_dir"]),
        bits=tuple(found["bits"]),
        shapes=tuple(
            Shape(phase=Phase(phase), batch=batch, tokens=tokens)
            for phase, batch, tokens in found["shapes"]
        ),
        dtype=getattr(torch, found["dtype"]),
        device=torch.device(found["device"]),
        layers=found["layers"],
        seed=seed,
    )


def _start(job: LayerJob, core: int) -> subprocess.Popen[str]:
    found = subprocess.Popen(
        [sys.executable, "-P", "-m", "llmpq.profiler.company", str(core), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert found.stdin is not None
    found.stdin.write(dump_json(job_to_json(job)))
    found.stdin.close()
    found.stdin = None
    return found


def main(argv: Sequence[str]) -> int:
    """Be a companion until somebody ends this process."""
    core, parent = int(argv[0]), int(argv[1])
    die_with(parent)
    os.sched_setaffinity(0, {core})
    found = json.load(sys.stdin)
    torch.set_num_threads(found["threads"])
    job = job_from_json(found, seed=core)
    bench = Bench(job)
    trials = list(chain.from_iterable(bench.trials()))
    shuffle = random.Random(job.seed)
    bench.run(trials[0])
    sys.stdout.write(_READY + "\n")
    sys.stdout.flush()
    while True:
        for trial in shuffle.sample(trials, len(trials)):
            bench.run(trial)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
