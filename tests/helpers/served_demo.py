"""The demo model on hosts that are too small for it alone, and its answer to one prompt."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
from helpers.clocks import PATIENCE_S
from helpers.hosts import ROOT, TestHost

DEMO = ROOT / "models" / "demo"
PROMPT, NEW = "The server listens on", 48
HOST = "tests.helpers.small_host"
PLAN = ["--max_num_seqs", "64", "--max_model_len", "512", "--bits", "16", "--no_measure"]


def answer_of_one_host(mebibytes: str, cache: Path) -> str:
    """Return the answer of a host with so much memory."""
    words = [mebibytes, "run", str(DEMO), "-p", PROMPT, "--max_tokens", str(NEW), "--json", *PLAN]
    done = subprocess.run(
        [sys.executable, "-m", HOST, *words],
        env=os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(cache)},
        stdout=subprocess.PIPE,
        check=True,
    )
    found = json.loads(done.stdout)
    assert len(found["devices"]) == 1
    return str(found["text"])


def url_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("ready ")
    return line.split()[1]


def ask(host: TestHost, url: str, at_half: Callable[[], None] = lambda: None) -> str:
    """Return a streamed answer; call ``at_half`` once half of it is here."""
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": NEW, "temperature": 0, "stream": True}

    def stream() -> str:
        texts: list[str] = []
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_S) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    texts.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
                    if len(texts) == NEW // 2:
                        at_half()
        return "".join(texts)

    return host.call(stream)
