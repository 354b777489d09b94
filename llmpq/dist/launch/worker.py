"""The process of one rank, which ``launch`` starts.

``python -m llmpq.dist.launch.worker JOB_FILE RANK EVENTS_DESCRIPTOR``: exits with the status of its
error and leaves the error, or the master's measurement, as a file beside the job. Importing this
module loads no torch; :func:`main` does.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from llmpq.dist.io.job import BEATS_PER_TIMEOUT, Job, read_job
from llmpq.dist.launch.ranks import ErrorRecord, measurement_file, write_error_record
from llmpq.dist.launch.signals import end_with
from llmpq.dist.metrics.measurement import StartLog
from llmpq.dist.metrics.progress import EventPipe, Heartbeat
from llmpq.dist.transport.errors import PeerLostError
from llmpq.errors import LlmpqError
from llmpq.logging import configure_logging
from llmpq.spec.fields import dump_json, to_json, write_text

_PR_SET_NAME = 15
NAME = "llmpq-rank-"
"""Name of a rank's process in ``ps`` and ``top``, before its number."""


def main(argv: Sequence[str], imports: Sequence[tuple[str, float]] = ()) -> int:
    """Run one rank to its end and return its exit status.

    ``imports`` has what this process imported before, each with the time of its end.
    """
    job_file, rank, descriptor = Path(argv[0]), int(argv[1]), int(argv[2])
    job = read_job(job_file)
    os.umask(0o077)  # only this user can read what a run writes
    die_with(job.launcher_pid)
    name_process(f"{NAME}{rank}")
    configure_logging(rank=rank)
    from llmpq.dist.launch.rank_tasks import run_rank  # noqa: PLC0415  imports torch

    start = start_log(job)
    for name, end_s in imports:
        start.mark(name, end_s)
    start.mark("imports")
    progress = EventPipe(descriptor)
    pulse = Heartbeat(progress, rank, job.step_timeout_s / BEATS_PER_TIMEOUT)
    try:
        measurement = run_rank(job, rank, progress, start)
    except Exception as error:
        found = error
        if not isinstance(found, LlmpqError):
            traceback.print_exc()
            found = LlmpqError(f"{type(error).__name__}: {error}")
        record = ErrorRecord(
            rank=rank,
            message=str(found),
            exit_status=found.exit_status,
            lost_rank=found.rank if isinstance(found, PeerLostError) else None,
            time_s=time.monotonic(),
            is_permanent=found.is_permanent,
        )
        write_error_record(job_file.parent, record)
        return found.exit_status
    finally:
        pulse.stop()
    if measurement is not None:
        write_text(measurement_file(job_file.parent), dump_json(to_json(measurement)))
    return 0


def start_log(job: Job) -> StartLog:
    """Return the steps until this process was started, if the job says when the command began."""
    launch_s = time.perf_counter() if job.launch_s is None else job.launch_s
    log = StartLog(launch_s if job.start_s is None else job.start_s)
    if job.start_s is not None:
        log.mark("command", launch_s)
    return log


def die_with(launcher_pid: int) -> None:
    """Make the kernel end this process when its launcher ends, however that happens."""
    if launcher_pid == 0 or not sys.platform.startswith("linux"):
        return
    end_with(launcher_pid)


def name_process(name: str) -> None:
    """Set the name of this process; the kernel keeps 15 characters."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


def import_tasks() -> list[tuple[str, float]]:
    """Import what a rank runs, for a process that runs nothing else.

    Imports make many objects that live until the end: garbage collections find nothing and take a
    tenth of the time. Later ones need not look at these objects either.

    Returns:
        What was imported, each with the time of its end (``time.perf_counter``).
    """
    ends = [("interpreter", time.perf_counter())]
    gc.disable()
    try:
        from llmpq.dist.block_unused_imports import import_transformers  # noqa: PLC0415  torch

        ends.append(("torch", time.perf_counter()))
        import_transformers()
        ends.append(("transformers", time.perf_counter()))
        importlib.import_module("llmpq.dist.launch.rank_tasks")
    finally:
        gc.freeze()
        gc.enable()
    return ends


if __name__ == "__main__":
    code = main(sys.argv[1:], import_tasks())
    sys.stderr.flush()
    # A rank that failed may have a thread inside gloo, whose destructors would wait for its peer.
    os._exit(code)
