"""What benchmarks of whole runs share: the small random Llama, its prompts, our commands."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))

from scripts.docs_site.evidence import lines_of, with_numbers, with_run  # noqa: E402

PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}
"""For our processes. Rivals wait as they do for their users: llama.cpp's threads take four times as
long with it."""
THREADING = ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", "GOMP_SPINCOUNT", "OMP_PROC_BIND")
SMALL_LLAMA = {
    "layers": 12,
    "hidden": 768,
    "intermediate": 2048,
    "heads": 12,
    "kv_heads": 4,
    "vocab": 32000,
    "max_positions": 1024,
}
"""125 M parameters: the smallest whose layers take longer than the work around them."""
NATIVE = "native"
ISAS = (NATIVE, "avx512", "avx2")
"""What ``--cpu_isa`` takes: all that the processor has, AVX-512 without bfloat16 or byte products,
AVX2. llama.cpp is built for each (``rivals.py``)."""
ZEN = {23: "Zen", 25: "Zen 3", 26: "Zen 5"}
"""AMD's architectures by family; Zen 4 has the family of Zen 3."""


def make_model(path: Path, shape: Mapping[str, int] = SMALL_LLAMA, dtype: str = "bfloat16") -> None:
    """Write a random Llama, once."""
    if path.exists():
        return
    sizes = [word for name, value in shape.items() for word in (f"--{name}", str(value))]
    script = str(ROOT / "scripts" / "make_tiny_model.py")
    call([sys.executable, script, "--family", "llama", *sizes, "--dtype", dtype,
          "--output", str(path)])  # fmt: skip


def write_prompts(path: Path, lengths: Iterable[tuple[int, int]]) -> None:
    """Write one request a line.

    Args:
        path: of the prompt file.
        lengths: prompt tokens and new tokens of every request.
    """
    vocabulary = SMALL_LLAMA["vocab"]
    lines = (
        {
            "id": number,
            "prompt_token_ids": [(number * 997 + at * 31) % vocabulary for at in range(prompt)],
            "max_new_tokens": new,
            "ignore_eos": True,
        }
        for number, (prompt, new) in enumerate(lengths)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def cluster_text(devices: int, threads: int, cpu_isa: str = NATIVE) -> str:
    """Return a cluster of equal CPU workers, priced from the catalogue."""
    group: dict[str, Any] = {"type": "cpu", "count": devices, "threads": threads}
    if cpu_isa != NATIVE:
        group["cpu_isa"] = cpu_isa
    nodes = [{"name": "here", "devices": [group]}]
    return json.dumps({"schema": 1, "name": f"cpu{devices}", "nodes": nodes, "links": []})


def command(words: Sequence[str]) -> str:
    """Run one of the project's commands, of this environment; return what it prints."""
    return call([str(Path(sys.executable).parent / words[0]), *words[1:]])


def add_isa_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--cpu_isa`` to a program that calls ``restrict``."""
    parser.add_argument(
        "--cpu_isa", choices=ISAS, default=NATIVE,
        help="newest vector extension of all that runs; llama.cpp's build for it (default: native)",
    )  # fmt: skip


def restrict(cpu_isa: str) -> None:
    """Hold this process and all that it starts to a vector extension, ``native`` for none.

    It must run before torch computes anything. llama.cpp is held by how it was built.

    Raises:
        SystemExit: the processor lacks it.
    """
    # rivals.py imports this module where our package is not installed.
    from llmpq.dist.launch.process_environment import (  # noqa: PLC0415
        ISA_VARIABLES,
        isa_environment,
    )

    limit = None if cpu_isa == NATIVE else cpu_isa
    if instruction_set_of(cpu_isa) != (limit or instruction_set_of(NATIVE)):
        newest = set_name(instruction_set_of(NATIVE))
        raise SystemExit(f"--cpu_isa: found {cpu_isa}, expected one of a processor with {newest}")
    for name in ISA_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(isa_environment(limit))


def instruction_set_of(cpu_isa: str, cpuinfo: str | None = None) -> str:
    """Return the instruction set (``llmpq.profiler.device``) that ``--cpu_isa`` leaves."""
    from llmpq.profiler.device import instruction_set  # noqa: PLC0415  as in restrict

    return instruction_set(None if cpu_isa == NATIVE else cpu_isa, cpuinfo)


def set_name(instruction_set: str) -> str:
    """Return an instruction set as pages write it."""
    from llmpq.spec.cluster import INSTRUCTION_SETS  # noqa: PLC0415  as in restrict

    return INSTRUCTION_SETS[instruction_set]


def unset_threading() -> dict[str, str]:
    """Return the environment without variables that say how threads compute and wait."""
    return {name: value for name, value in os.environ.items() if name not in THREADING}


def call(words: Sequence[str], variables: Mapping[str, str] = PASSIVE) -> str:
    """Run a program from the root of the project; return what it prints.

    Args:
        words: program and arguments.
        variables: of its environment, beside those of this process that say nothing of threads.

    Raises:
        SystemExit: it failed; with the end of what it said.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in PASSIVE}
    done = subprocess.run(
        words,
        cwd=ROOT,
        env={**inherited, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{words[:4]}: status {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout


def run_rounds(
    kept: Path,
    cases: Sequence[Mapping[str, Any]],
    rounds: int,
    run: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    where: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Run every case once a round, and return all runs: the fields of a case with what it gave.

    Runs of another ``where``, which is a processor and ``cpu_isa``, neither count nor return.

    Args:
        kept: file of the runs, each added at once; what it has already is not run again.
        cases: fields that tell each from the others.
        rounds: runs of a case.
        run: of a case.
        where: fields that are kept with every run.
    """
    place = where or {}
    lines = kept.read_text().splitlines() if kept.exists() else []
    runs: list[dict[str, Any]] = [json.loads(line) for line in lines]
    for number in range(rounds):
        for case in cases:
            wanted = {**place, **case}
            if sum(wanted.items() <= one.items() for one in runs) <= number:
                runs.append({**wanted, **run(case)})
                with kept.open("a") as file:
                    file.write(json.dumps(runs[-1]) + "\n")
    found = (one for one in runs if place.items() <= one.items())
    return [{name: one[name] for name in one if name not in place} for one in found]


def here(cpu_isa: str) -> dict[str, str]:
    """Return the processor and ``cpu_isa``, by which results are kept."""
    return {"processor": processor(), "cpu_isa": cpu_isa}


def origin(topic: str, words: str, **versions: str) -> dict[str, Any]:
    """Return what a result file begins with: where its figures come from.

    ``words`` are the command, ``versions`` those of others than Python, torch and transformers.
    """
    return {
        "topic": topic,
        "command": words,
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers")},
            **versions,
        },
    }


def run_of(cpu_isa: str, words: str, **versions: str) -> dict[str, Any]:
    """Return what an entry of ``runs`` begins with: the processor, and where figures come from."""
    head = origin("", words, **versions)
    return {
        "processor": processor(),
        "cpu_isa": cpu_isa,
        "instruction_set": instruction_set_of(cpu_isa),
        "cores": len(os.sched_getaffinity(0)),
        **{name: head[name] for name in ("date", "command", "versions")},
    }


def keep_run(path: Path, topic: str, run: Mapping[str, Any]) -> None:
    """Write a run into a result file, in place of that of the same processor and ``cpu_isa``.

    What its tables print as numbers is kept as numbers.
    """
    found = json.loads(path.read_text()) if path.exists() else {"topic": topic, "runs": []}
    tables = {"tables": list(map(with_numbers, run["tables"]))} if "tables" in run else {}
    write_results(path, with_run(found, {**run, **tables}))


def keep_document(path: Path, document: Mapping[str, Any], cpu_isa: str = NATIVE) -> None:
    """Write a result of this machine, as ``origin`` begins it, as a run of its processor."""
    head = run_of(cpu_isa, document["command"])
    rest = {name: value for name, value in document.items() if name not in ("topic", "machine")}
    keep_run(path, document["topic"], {**head, **rest})


def text_of(table: Mapping[str, Any]) -> str:
    """Return a table as Markdown."""
    columns = table["columns"]
    lines = [columns, ("---",) * len(columns), *table["rows"]]
    rows = (f"| {' | '.join(map(str, cells))} |" for cells in lines)
    return "\n".join([f"**{table['title']}**", "", *rows])


def write_results(path: Path, document: Mapping[str, Any]) -> None:
    """Write results as JSON, a table row or another short value a line."""
    path.write_text(lines_of(document) + "\n")


def cpu_name() -> str:
    """Return the processor's name."""
    found = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout
    return _lscpu(found).get("Model name") or platform.machine()


def processor(lscpu: str | None = None, cpuinfo: str | None = None) -> str:
    """Return the processor's name with its architecture and newest instruction set.

    Virtual machines give many processors one name.
    """
    if lscpu is None:
        lscpu = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout
    fields, newest = _lscpu(lscpu), instruction_set_of(NATIVE, cpuinfo)
    known = [set_name(newest)]
    family = fields.get("CPU family", "")
    if fields.get("Vendor ID") == "AuthenticAMD" and family.isdigit() and int(family) in ZEN:
        has_more = family == "25" and newest.startswith("avx512")
        known.insert(0, "Zen 4" if has_more else ZEN[int(family)])
    name = re.sub(r"\((R|TM)\)", "", fields.get("Model name") or platform.machine())
    return f"{' '.join(name.split())} ({', '.join(known)})"


def _lscpu(text: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def machine() -> str:
    """Return the processor and the number of cores."""
    return f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores"
