#!/usr/bin/env python3
"""From a model's name to the first answer: seconds, and how well the plan's forecast holds.

    benchmarks/first_answer.py models/demo DIR ... [--starts 3] [--repeats 5] [--json FILE]
    benchmarks/first_answer.py models/demo DIR ... --folder DIR     # with llama.cpp (rivals.py)

Each start begins with an empty cache: devices are measured and the plan is made. The runs after it
find both. Seconds are those from the command to the first byte of the answer. With ``--folder``
each model, which has the shipped model's tokenizer, is written as GGUF, and llama.cpp answers from
that file in turn with us: its command, and its server with a request as soon as it is healthy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from load import request
from rivals import command_of, server_of
from servers import answers, free_port, stop
from workbench import ROOT, keep_document, origin, text_of, unset_threading

PROMPT, TOKENS = "Once upon a time", 256


SERVED = 16
"""Tokens of a server's first answer."""
PROGRAM = (sys.executable, "-m", "llmpq.cli.front.program")
START_LIMIT_S = 120.0


def command(model: str, *words: str) -> list[str]:
    """Return the command that answers."""
    return [*PROGRAM, "run", model, "--prompt", PROMPT, "--max_tokens", str(TOKENS), *words]


def rival_command(folder: Path, file: Path) -> list[str]:
    """Return llama.cpp's."""
    words = ["-m", str(file), "-p", PROMPT, "-n", str(TOKENS), "--temp", "0", "--no-display-prompt"]
    return [str(command_of(folder)), *words, "-no-cnv", "-t", str(len(os.sched_getaffinity(0)))]


def variables(cache: Path) -> dict[str, str]:
    """Return the environment of a command with a cache of its own."""
    own = {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(cache), "HF_HUB_OFFLINE": "1"}
    return {**unset_threading(), **own}


def first_byte_s(words: Sequence[str], environment: Mapping[str, str]) -> float:
    """Return the seconds to the first byte of an answer."""
    start_s = time.monotonic()
    with subprocess.Popen(
        words, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        found = os.read(process.stdout.fileno(), 1)
        seconds = time.monotonic() - start_s
        process.stdout.read()
    if not found or process.returncode:
        raise SystemExit(f"{words[:4]}: status {process.returncode}")
    return seconds


def served_s(words: Sequence[str], port: int, environment: Mapping[str, str]) -> float:
    """Return the seconds from a server's command to the end of its first answer."""
    start_s = time.monotonic()
    process = subprocess.Popen(
        [*words, "--port", str(port)], env=environment, cwd=ROOT, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        while not answers(port):
            if process.poll() is not None or time.monotonic() - start_s > START_LIMIT_S:
                raise SystemExit(f"{words[:4]}: status {process.returncode}")
            time.sleep(0.02)
        body = {"prompt": PROMPT, "max_tokens": SERVED}
        status = asyncio.run(request(port, "/v1/completions", body, START_LIMIT_S))
        if status != 200:
            raise SystemExit(f"{words[:4]}: HTTP status {status}")
        return time.monotonic() - start_s
    finally:
        stop(process)


def report_of(model: str, cache: Path) -> dict[str, Any]:
    """Return what a run says with ``--json``."""
    done = subprocess.run(
        command(model, "--json"), env=variables(cache), cwd=ROOT, check=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def play(model: str, repeats: int) -> dict[str, Any]:
    """Return the figures of a start and of the runs after it."""
    with tempfile.TemporaryDirectory(prefix="first-answer-") as name:
        cache = Path(name)
        words, environment = command(model), variables(cache)
        first_s = first_byte_s(words, environment)
        later_s = [first_byte_s(words, environment) for _ in range(repeats)]
        reports = [report_of(model, cache) for _ in range(repeats)]
    return {
        "model": Path(model).resolve().name,
        "first_s": first_s,
        "later_s": later_s,
        "figures": reports[0]["devices"][0]["figures"],
        "forecast_tokens_per_s": reports[0]["forecast_tokens_per_s"],
        "tokens_per_s": [one["tokens_per_s"] for one in reports],
    }


def beside(model: Path, folder: Path, repeats: int) -> dict[str, Any]:
    """Return the seconds of our commands and llama.cpp's from one file, in turn."""
    file = gguf_of(model, folder)
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="first-answer-") as name:
        own, rival = variables(Path(name)), unset_threading()
        first = [*PROGRAM, "serve", str(file)]
        server = [str(server_of(folder)), "-m", str(file), "-t", str(len(os.sched_getaffinity(0)))]
        first_byte_s(command(str(file)), own)  # devices are measured, the plan is made
        served_s(first, free_port(), own)
        for _ in range(repeats):
            for title, found_s in (
                ("llmpq run", first_byte_s(command(str(file)), own)),
                ("llama-completion", first_byte_s(rival_command(folder, file), rival)),
                ("llmpq serve", served_s(first, free_port(), own)),
                ("llama-server", served_s(server, free_port(), rival)),
            ):
                seconds.setdefault(title, []).append(found_s)
    return {"model": file.stem, "bytes": file.stat().st_size, "seconds": seconds}


def gguf_of(model: Path, folder: Path) -> Path:
    """Write a model as GGUF, once: matrices at 8 bits, the tokenizer of the shipped model."""
    file = folder / f"{model.resolve().name}-q8_0.gguf"
    if not file.exists():
        sys.path.insert(0, str(ROOT / "tests"))
        from helpers.gguf_writer import demo_tokenizer, write_gguf  # noqa: PLC0415  it loads torch

        write_gguf(model, file, "Q8_0", demo_tokenizer()[1])
    return file


def table_beside(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a row for each model; a rival's seconds are its best."""
    titles = ["llmpq run", "llama-completion", "llmpq serve", "llama-server"]
    rows = [
        [
            one["model"],
            *((min if "llama" in title else median)(one["seconds"][title]) for title in titles),
        ]
        for one in found
    ]
    return {
        "title": "Beside llama.cpp, from the same GGUF file",
        "columns": ["Model", *(f"{title}, s" for title in titles)],
        "rows": rows,
        "formats": ["", *["{:.1f}"] * 4],
    }


def table(starts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a row for each start."""
    rows = [
        [
            one["model"],
            one["first_s"],
            median(one["later_s"]),
            one["forecast_tokens_per_s"],
            median(one["tokens_per_s"]),
            one["forecast_tokens_per_s"] / median(one["tokens_per_s"]),
        ]
        for one in starts
    ]
    columns = ["Model", "First answer, s", "Later, s", "Forecast, tokens/s", "Found", "Ratio"]
    return {
        "title": "From a model's name to its answer",
        "columns": columns,
        "rows": rows,
        "formats": ["", "{:.1f}", "{:.1f}", "{:,.0f}", "{:,.0f}", "{:.2f}"],
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="of llama.cpp (rivals.py)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    starts = [play(one, options.repeats) for one in options.models for _ in range(options.starts)]
    tables, rivals = [table(starts)], []
    if options.folder is not None:
        folder = options.folder.absolute()
        rivals = [beside(Path(one), folder, options.repeats) for one in options.models]
        tables.append(table_beside(rivals))
    print("\n\n".join(map(text_of, tables)))
    if options.json is not None:
        names = " ".join(Path(one).resolve().name for one in options.models)
        words = f"benchmarks/first_answer.py {names} --starts {options.starts}"
        words += f" --repeats {options.repeats}" + " --folder DIR" * bool(rivals)
        document = origin("first-answer", words)
        more = {"starts": starts, "beside": rivals}
        keep_document(options.json, {**document, "tables": tables, **more})
    return 0


if __name__ == "__main__":
    sys.exit(main())
