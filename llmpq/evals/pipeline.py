"""Run the ranks of a plan on given tokens (teacher forcing) and return the hidden states.

The ranks run as processes of this host with the devices, layer ranges and bits of the plan; the
windows replace its workload.

Shapes: R windows, T tokens of each, H hidden size.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from llmpq.dist import Job, Prompt, run_job
from llmpq.dist.io.prompts import write_prompts
from llmpq.dist.metrics.progress import RunProgress
from llmpq.errors import StageError
from llmpq.evals.windows import Windows
from llmpq.spec.model_files.config import absolute_model_path
from llmpq.spec.plan import MicroBatching, Plan, write_plan
from llmpq.spec.workload import Workload


def pipeline_hidden(
    plan: Plan,
    model_dir: Path,
    windows: Windows,
    *,
    step_timeout_s: float = 10.0,
    progress: RunProgress | None = None,
    kernel: str | None = None,
) -> list[Tensor]:
    """Run all windows through the ranks of ``plan``.

    Args:
        plan: the plan.
        model_dir: directory with the weights.
        windows: the text.
        step_timeout_s: seconds without a message after which a rank has failed.
        progress: called with the events of the ranks: layers loaded, then tokens done.
        kernel: preferred kernel; ``None`` for the default.

    Returns:
        Hidden states after the last layer, ``[R, T, H]`` for each micro-batch of ``windows``.

    Raises:
        LlmpqError: ``SpecError`` when the plan is for another model, ``CapacityError`` when memory
            is exhausted, ``StageError`` when a rank dies, hangs or fails.
    """
    with tempfile.TemporaryDirectory(prefix="llmpq-eval-") as name:
        folder = Path(name)
        job = Job(
            strategy=folder / "strategy.json",
            model_dir=absolute_model_path(model_dir),
            prompts=folder / "windows.jsonl",
            output=folder / "hidden.safetensors",
            task="hidden",
            step_timeout_s=step_timeout_s,
            kernel=kernel,
        )
        write_plan(job.strategy, evaluation_plan(plan, windows))
        write_prompts(job.prompts, list(_prompts(windows)))
        run_job(job, progress=progress)
        return _read(job.output, windows)


def evaluation_plan(plan: Plan, windows: Windows) -> Plan:
    """Return ``plan`` with the windows as its workload and the same devices, layers and bits."""
    workload = Workload(batch=windows.rows, prompt_tokens=windows.longest, new_tokens=1)
    sizes = MicroBatching(prefill=windows.rows, decode=1)
    return replace(plan, workload=workload, micro_batching=sizes)


def _prompts(windows: Windows) -> Iterator[Prompt]:
    rows = (row for batch in windows.batches() for row in batch.inputs.tolist())
    for number, row in enumerate(rows):
        yield Prompt(id=number, where="windows", token_ids=tuple(row), max_new_tokens=1)


def _read(path: Path, windows: Windows) -> list[Tensor]:
    states = []
    with safe_open(path, framework="pt") as file:
        for number, batch in enumerate(windows.batches()):
            state: Tensor = file.get_tensor(str(number)).clone()  # [R, T, H]
            if state.shape[:2] != batch.inputs.shape:
                raise StageError(
                    f"micro-batch {number}: found states {list(state.shape)} for windows "
                    f"{list(batch.inputs.shape)}"
                )
            states.append(state)
    return states
