"""Write the files with which another engine runs a plan.

Every engine gets one script a node with its environment and command, ``engine.json`` with the same
for programs, the plan, and the script that makes its checkpoint. A plan that the engine cannot run
as it is made is refused; nothing is changed silently.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

from llmpq.assigner.export.llama_cpp import llama_cpp_commands
from llmpq.assigner.export.pipeline import Command, Export
from llmpq.assigner.export.servers import sglang_commands, vllm_commands
from llmpq.errors import SpecError
from llmpq.spec.fields import write_text
from llmpq.spec.plan import Plan, plan_text

_ENGINES: Mapping[str, Callable[[Plan], Export]] = {
    "vllm": vllm_commands,
    "sglang": sglang_commands,
    "llama.cpp": llama_cpp_commands,
}
ENGINES = tuple(_ENGINES)
"""The engines that plans are exported to."""

PLAN_FILE = "plan.json"


def export_plan(plan: Plan, engine: str) -> Export:
    """Return the commands with which an engine runs a plan.

    Raises:
        SpecError: the engine cannot run the plan; the message says why.
    """
    if plan.is_split:
        raise SpecError(
            f"export to {engine}: found stages that only prefill or only decode, expected stages "
            "that do both (plan without --schedule waa)"
        )
    empty = [stage.rank for stage in plan.stages if not stage.num_layers]
    if empty:
        raise SpecError(
            f"export to {engine}: found no layers on stage {empty[0]}, expected at least one on "
            "each; the engine has no master apart from its stages"
        )
    return _ENGINES[engine](plan)


def write_export(plan: Plan, engine: str, output: Path | str) -> Export:
    """Write the files of an export into a new directory.

    Returns:
        Its commands; each has a script of its name.

    Raises:
        SpecError: as :func:`export_plan`, or the directory exists.
    """
    found = export_plan(plan, engine)
    folder = Path(output)
    if folder.exists():
        raise SpecError(f"{folder}: exists already, expected a new directory")
    files = {
        PLAN_FILE: plan_text(plan),
        "engine.json": json.dumps(_record(plan, engine, found), indent=2) + "\n",
        **found.files,
    }
    scripts = {f"{command.name}.sh": _script(command) for command in found.commands}
    for name, text in (files | scripts).items():
        write_text(folder / name, text)
    for name in scripts:
        (folder / name).chmod(0o755)
    return found


def _record(plan: Plan, engine: str, export: Export) -> dict[str, object]:
    return {
        "engine": engine,
        "model": plan.model.name,
        "layers": [stage.num_layers for stage in plan.stages],
        "bits": list(plan.bits),
        "commands": [
            {
                "name": command.name,
                "node": command.node,
                "environment": dict(command.environment),
                "arguments": list(command.arguments),
            }
            for command in export.commands
        ],
        "notes": list(export.notes),
    }


def _script(command: Command) -> str:
    """Return a command as a shell script."""
    settings = [f"export {name}={shlex.quote(text)}" for name, text in command.environment.items()]
    return "\n".join(
        (
            "#!/usr/bin/env bash",
            f"# {command.purpose}",
            "set -euo pipefail",
            'cd "$(dirname "$0")"',
            *settings,
            f"exec {shlex.join(command.arguments)}" + ' "$@"',
            "",
        )
    )
