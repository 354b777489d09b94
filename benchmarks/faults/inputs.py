"""Bad prompts, files and frames, and a planner whose time limit has passed."""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench import ROOT, Answers, model_for, plan_of, prompts_of, write_plan, write_prompts
from deaths import STAGES, command

from llmpq.dist.io.prompts import Prompt, read_prompts
from llmpq.dist.io.results import read_results
from llmpq.dist.transport.frames import (
    Frame,
    FrameKind,
    FrameLimits,
    Row,
    decode_header,
    encode_header,
)
from llmpq.errors import LlmpqError
from llmpq.spec.cluster import load_cluster
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.plan import read_plan
from llmpq.spec.tables import read_latency_table
from llmpq.spec.workload import load_workload

CANARY = "canary-7f3a91"
BAD_TOKENS = 40
BAD_LINES = [
    "",
    "{",
    "[]",
    "null",
    '"' + "x" * 5000 + '"',
    '{"id": "b1"}',
    '{"id": "b2", "prompt_token_ids": []}',
    '{"id": "b3", "prompt_token_ids": [-1]}',
    '{"id": "b4", "prompt_token_ids": [1e99]}',
    '{"id": "b5", "prompt_token_ids": [9223372036854775808]}',
    '{"id": "b6", "prompt_token_ids": [true]}',
    '{"id": "b7", "prompt_token_ids": "abc"}',
    '{"id": "b8", "prompt": "' + CANARY + '"}',
    '{"id": "b9", "prompt": 7}',
    '{"id": "b10", "prompt": "a", "prompt_token_ids": [1]}',
    '{"id": "b11", "prompt_token_ids": [1], "max_new_tokens": 0}',
    '{"id": "b12", "prompt_token_ids": [1], "max_new_tokens": -3}',
    '{"id": "b13", "prompt_token_ids": [1], "max_new_tokens": 9223372036854775808}',
    '{"id": "b14", "prompt_token_ids": [1], "max_new_tokens": NaN}',
    '{"id": "b15", "prompt_token_ids": [1], "max_new_tokens": 1000000}',
    '{"id": "b16", "prompt_token_ids": [1], "max_new_tokens": "many"}',
    '{"id": "b17", "prompt_token_ids": [1], "stop_token_ids": [-5]}',
    '{"id": "b18", "prompt_token_ids": [1], "stop_token_ids": [99999999]}',
    '{"id": "b19", "prompt_token_ids": [1], "arrival_s": Infinity}',
    '{"id": "b20", "prompt_token_ids": [1], "arrival_s": -1}',
    '{"id": "b21", "prompt_token_ids": [1], "ignore_eos": "yes"}',
    '{"id": "b22", "prompt_token_ids": [1], "unknown": 1}',
    '{"id": 1.5, "prompt_token_ids": [1]}',
    '{"id": "", "prompt_token_ids": [1]}',
    '{"id": 0, "prompt_token_ids": [2]}',
    '{"id": "b23", "prompt_token_ids": [' + ",".join(["1"] * 5000) + "]}",
    "[" * 100_000,
]


def bad_requests(folder: Path, expected: Answers) -> dict[str, Any]:
    """Run good prompts among bad ones of every kind; the good ones must not notice."""
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        own = Path(name)
        good = [json.dumps(line) for line in map(_line, prompts_of(len(expected), BAD_TOKENS))]
        bad = [line.encode() for line in BAD_LINES] + [b'{"id": "\xff\xfe", "prompt": "a"}']
        lines = [line.encode() for line in good] + bad
        random.Random(1).shuffle(lines)
        # The first of two equal ids counts.
        lines.sort(key=lambda line: b'"id": 0,' in line and b"[2]" in line)
        launcher = command(own, folder, [], "--json", lines=b"\n".join(lines) + b"\n")
        status = launcher.wait(timeout=240)
        said = (own / "stdout").read_text() + (own / "stderr").read_text()
        results = read_results(own / "results.jsonl")
        refused = json.loads((own / "stdout").read_text())["faults"]["refused"]
    same = {result.id: result.token_ids for result in results} == expected
    expected_bad = sum(bool(line.strip()) for line in bad)
    return {
        "count": len(refused),
        "ok": same and len(refused) == expected_bad and status == 2 and CANARY not in said,
        "identical": same,
        "status": status,
    }


def _line(prompt: Prompt) -> dict[str, Any]:
    return {
        "id": prompt.id,
        "prompt_token_ids": prompt.token_ids,
        "max_new_tokens": prompt.max_new_tokens,
        "ignore_eos": True,
    }


def mutate(data: bytes, chance: random.Random) -> bytes:
    """Damage a file: bytes anywhere, or one value of its JSON."""
    if chance.random() < 0.5:
        return _mutate_bytes(bytearray(data), chance)
    try:
        lines = data.splitlines()
        value = json.loads(lines[chance.randrange(len(lines))] if len(lines[0]) > 2 else data)
    except ValueError:
        return _mutate_bytes(bytearray(data), chance)
    _mutate_value(value, chance)
    return json.dumps(value).encode()


def _mutate_bytes(data: bytearray, chance: random.Random) -> bytes:
    for _ in range(chance.randrange(1, 6)):
        at = chance.randrange(len(data) + 1)
        how = chance.randrange(4)
        if how == 0 and at < len(data):
            data[at] = chance.randrange(256)
        elif how == 1:
            data[at:at] = bytes(chance.randrange(256) for _ in range(chance.randrange(1, 9)))
        elif how == 2:
            del data[at : at + chance.randrange(1, 40)]
        else:
            data[at:at] = data[at : at + chance.randrange(1, 40)]
    return bytes(data)


STRANGE = (
    None, True, -1, 0, 2**63, 2**4000, 1e308, float("nan"), float("inf"), -0.0, "", "x", "\ud800",
    "../../etc/passwd", [], {}, [[]], {"a": 1}, "9" * 5000,
)  # fmt: skip


def _mutate_value(value: Any, chance: random.Random) -> None:
    """Put something strange at a random place of a JSON value."""
    while isinstance(value, dict | list) and value:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = chance.choice(keys)
        if not isinstance(value[key], dict | list) or not value[key] or chance.random() < 0.2:
            how = chance.randrange(3)
            if how == 0:
                del value[key]
            else:
                value[key] = chance.choice(STRANGE)
            return
        value = value[key]


def files(folder: Path, kind: str, count: int, seed: int) -> dict[str, Any]:
    """Read damaged files; anything but a typed error is a failure."""
    source, read = _readers(folder)[kind]
    data, chance = source.read_bytes(), random.Random(seed)
    bad: list[str] = []
    refused, slowest = 0, 0.0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory(prefix="faults-", dir="/dev/shm") as name:
        path = Path(name) / ("config.json" if kind == "model" else "file")
        for _ in range(count):
            path.write_bytes(mutate(data, chance))
            start_s = time.perf_counter()
            try:
                read(path)
            except LlmpqError:
                refused += 1
            except Exception as error:  # what the count is of
                bad.append(f"{type(error).__name__}: {error}"[:200])
            slowest = max(slowest, time.perf_counter() - start_s)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {
        "count": count,
        "refused": refused,
        "bad": len(bad),
        "examples": sorted(set(bad))[:5],
        "seconds": slowest,
        "limit_s": 1.0,
        "grown_mib": grown,
        "ok": not bad and slowest <= 1.0 and grown <= 100,
    }


def _readers(folder: Path) -> dict[str, tuple[Path, Callable[[Path], object]]]:
    """Return a good file of every kind and who reads it."""
    work = folder / "files"
    work.mkdir(exist_ok=True)
    write_plan(work / "plan.json", plan_of(STAGES))
    write_prompts(work / "prompts.jsonl", prompts_of(4, 5))
    (work / "table.csv").write_text(
        "# model: x\n# device: cpu\n# dtype: bfloat16\n# threads: 1\n"
        "phase,bits,batch,tokens,seconds\nprefill,16,1,128,0.0093\ndecode,16,4,128,0.00102\n"
    )
    inputs = ROOT / "inputs"
    return {
        "plan": (sorted((ROOT / "strategies").glob("*llmpq.json"))[0], read_plan),
        "cluster": (sorted((inputs / "clusters").glob("*.json"))[0], load_cluster),
        "workload": (sorted((inputs / "workloads").glob("*.json"))[0], load_workload),
        "prompts": (work / "prompts.jsonl", read_prompts),
        "table": (work / "table.csv", read_latency_table),
        "model": (model_for(STAGES, folder) / "config.json", lambda p: load_model_dir(p.parent)),
    }


def frames(count: int, seed: int) -> dict[str, Any]:
    """Decode damaged headers; every one that is accepted must be the very one that was sent."""
    limits = FrameLimits(
        digest=b"12345678",
        num_blocks=6,
        max_context=40,
        prefill_rows=3,
        prefill_tokens=20,
        decode_rows=5,
        hidden_size=8,
        dtype=torch.bfloat16,
    )
    rows = tuple(Row(blocks=(slot,), first=0, length=4) for slot in range(2))
    hidden = torch.zeros(1, 8, 8, dtype=torch.bfloat16)
    good = encode_header(Frame(kind=FrameKind.PREFILL, rows=rows, hidden=hidden), limits, 5)
    chance = random.Random(seed)
    accepted = other = 0
    start_s = time.perf_counter()
    for _ in range(count):
        data = bytearray(good)
        for _ in range(chance.randrange(1, 4)):
            data[chance.randrange(len(data))] ^= chance.randrange(1, 256)
        if chance.random() < 0.1:
            del data[chance.randrange(len(data)) :]
        try:
            decode_header(bytes(data), limits, 5)
            accepted += bytes(data) != good
        except LlmpqError:
            pass
        except Exception:  # what the count is of
            other += 1
    seconds = time.perf_counter() - start_s
    return {
        "count": count,
        "accepted": accepted,
        "bad": other,
        "total_s": seconds,
        "ok": not accepted and not other,
    }


def planner(folder: Path, solver: str, limit_s: float) -> dict[str, Any]:
    """Plan with next to no time; the best plan so far must come, and say that it is no more.

    ``seconds`` is the whole command, its libraries loaded and its fits made anew.
    """
    start_s = time.monotonic()
    main = "import sys; from llmpq.cli.commands.algo import main; sys.exit(main())"
    words = [sys.executable, "-c", main, "--model-name", "opt", "--model_size", "66b"]
    words += ["--cluster", str(ROOT / "inputs" / "clusters" / "paper-06.json")]
    words += ["--solver", solver, "--time_limit", str(limit_s), "--json", "--no_explain"]
    words += ["--orders", "all", "--gap", "0"]
    words += ["--workload", str(ROOT / "inputs" / "workloads" / "s512-n100-b32.json")]
    words += ["--output", str(folder / f"planned-{solver}.json")]
    cold = os.environ | {"XDG_CACHE_HOME": str(folder / f"cold-{solver}-{limit_s}")}
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT, env=cold)
    seconds = time.monotonic() - start_s
    report = json.loads(done.stdout) if done.stdout.strip() else {}
    return {
        "seconds": seconds,
        "planning_s": report.get("planning_s"),
        "status": report.get("status"),
        "gap": report.get("gap"),
        "error": done.stderr[-300:],
        "limit_s": limit_s + 1.0,
        "ok": report.get("status") == "feasible" and seconds <= limit_s + 1.0,
    }
