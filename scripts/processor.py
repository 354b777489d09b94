"""This processor, its instruction set, and the variables that hold a process to older ones.

python -m scripts.processor          # the processor and what this process may use of it
python -m scripts.processor older    # the older vector extensions to run tests with
python -m scripts.processor avx2     # the variables of a process that is held to one, for env
"""

from __future__ import annotations

import os
import sys

from llmpq.dist.launch.process_environment import cpu_environment, usable_isas
from llmpq.kernels.cpu.native import instruction_set
from llmpq.profiler.device import available_cores, cpu_name


def described() -> str:
    """Return the processor, the cores of this process, and the instruction set it computes with."""
    return f"{cpu_name()}, {len(available_cores())} cores, {instruction_set()}"


def older() -> tuple[str, ...]:
    """Return the vector extensions that are older than the newest of this process."""
    return usable_isas(os.environ)[:-1]


if __name__ == "__main__":
    asked = sys.argv[1] if len(sys.argv) > 1 else None
    if asked is None:
        print(described())
    elif asked == "older":
        print(*older())
    else:
        print(*(f"{name}={value}" for name, value in cpu_environment(1, asked).items()))
