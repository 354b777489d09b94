"""Jobs of a child process for tests: results, errors, loops, and too much memory."""

from __future__ import annotations

import os
import time

from llmpq.dist.limited.limited_process import serve_jobs

START_PRIORITY = os.getpriority(os.PRIO_PROCESS, 0)


def load(setup):
    def do(job):
        if job == "loop":
            while True:
                pass
        if job == "wait":
            time.sleep(1e6)
        if job == "memory":
            return len(bytearray(8 << 30))
        if job == "abort":
            os.abort()
        if job == "priority":
            return START_PRIORITY, os.getpriority(os.PRIO_PROCESS, 0)
        if job == "error":
            raise SystemError("a text of the job")
        return [setup, job, os.getpid()]

    return do


if __name__ == "__main__":
    serve_jobs(load)
