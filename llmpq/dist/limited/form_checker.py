"""Checks that a form can be compiled, in child processes with limits of time and memory.

A form of 40 bytes may take forever, or all memory. So the ranks get only forms that a child process
has compiled within its limits. Needs no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import OrderedDict
from pathlib import Path

from llmpq.dist.io.sampling_params import StructuredOutputsParams
from llmpq.dist.io.structured_outputs import GrammarCompiler
from llmpq.dist.limited.limited_process import (
    Handle,
    JobLimitError,
    JobLimits,
    LimitedProcesses,
    serve_jobs,
)
from llmpq.errors import SpecError
from llmpq.spec.fields import Fields, from_json, to_json

MAX_CHECKED = 4096
"""Forms whose result is kept, as a digest."""


class FormChecker:
    """Checks the forms of answers; a form is compiled once, whatever the number of its answers.

    Args:
        model_dir: directory of the model, or its GGUF file.
        timeout_s: processor time to compile a form.
    """

    def __init__(self, model_dir: Path, timeout_s: float) -> None:
        self._processes = LimitedProcesses(
            "llmpq.dist.limited.form_checker", str(model_dir), JobLimits(cpu_s=timeout_s)
        )
        self._problems: OrderedDict[bytes, str | None] = OrderedDict()

    async def check(self, form: StructuredOutputsParams) -> None:
        """Check a form.

        Raises:
            SpecError: it is not valid, or takes more time or memory than the limits.
            StageError: the child process failed.
        """
        job = to_json(form)
        key = hashlib.blake2b(repr(job).encode(errors="surrogatepass"), digest_size=16).digest()
        if key not in self._problems:
            self._problems[key] = await self._compile(job)
            if len(self._problems) > MAX_CHECKED:
                self._problems.popitem(last=False)
        problem = self._problems[key]
        if problem is not None:
            raise SpecError(problem)

    def close(self) -> None:
        """End the child processes."""
        self._processes.close()

    async def _compile(self, job: object) -> str | None:
        """Return what is wrong with a form, ``None`` if nothing is."""
        try:
            problem: str | None = await self._processes.run(job)
        except JobLimitError as error:
            return (
                f"structured_outputs: found a form that takes {error} to compile, expected a "
                "simpler one (--form_timeout)"
            )
        return problem


def _load(model_dir: str) -> Handle:
    compiler = GrammarCompiler(Path(model_dir), (), max_compiled=0)
    with contextlib.suppress(SpecError):  # every job has it as its result
        compiler.load_tokenizer()

    def check(job: dict[str, object]) -> str | None:
        try:
            compiler.compile(from_json(StructuredOutputsParams, Fields(job, "structured_outputs")))
        except SpecError as error:
            return str(error)
        return None

    return check


if __name__ == "__main__":
    serve_jobs(_load)
