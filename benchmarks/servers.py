"""Models, plans and servers of benchmarks that send requests over HTTP: ours and two others."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rivals import SERVER_CASE, gguf_of
from workbench import (
    NATIVE,
    PASSIVE,
    ROOT,
    SMALL_LLAMA,
    cluster_text,
    command,
    make_model,
    unset_threading,
)

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 30.0
MAX_CONTEXT = SMALL_LLAMA["max_positions"]

VLLM_BENCH = """
import argparse, sys
from vllm.benchmarks.serve import add_cli_args, main
try:
    from vllm.utils.argparse_utils import FlexibleArgumentParser as Parser
except ImportError:
    Parser = argparse.ArgumentParser
parser = Parser()
add_cli_args(parser)
main(parser.parse_args(sys.argv[1:]))
"""
"""Runs ``vllm bench serve`` where only what it needs of vLLM is installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A server that answers.

    Attributes:
        port: on 127.0.0.1.
        pid: of its first process.
        log: file with what it prints.
    """

    port: int
    pid: int
    log: Path


def make_text_model(path: Path) -> None:
    """Write a random Llama of 125 M parameters with a tokenizer of one token a word, once."""
    make_model(path)
    if not (path / "tokenizer.json").exists():
        write_word_tokenizer(path, SMALL_LLAMA["vocab"])
    # No token ends an answer: all servers make as many as they are asked for.
    config = json.loads((path / "config.json").read_text())
    config["eos_token_id"] = None
    (path / "config.json").write_text(json.dumps(config, indent=1))
    (path / "generation_config.json").write_text('{"eos_token_id": null, "pad_token_id": 0}')


def write_word_tokenizer(path: Path, vocabulary: int) -> None:
    """Write a tokenizer whose token ``i`` is the word ``w<i>``."""
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415

    words = {f"w{token}": token for token in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "w0", "unk_token": "w0"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def text_of(token_ids: Sequence[int]) -> str:
    """Return the text that the word tokenizer turns into these tokens."""
    return " ".join(f"w{token}" for token in token_ids)


def make_plan(  # noqa: PLR0913  what a plan is for
    model: Path,
    output: Path,
    *,
    bits: int,
    batch: int = 16,
    prompt_tokens: int = 256,
    new_tokens: int = 256,
    stages: int = 1,
    threads: int | None = None,
    dtype: str = "auto",
    profile: Path | None = None,
    cpu_isa: str = NATIVE,
) -> Path:
    """Plan for CPU workers of this host, once; return the strategy file.

    ``threads`` are those of each worker, by default its share of the cores.
    """
    if not output.exists():
        threads = threads or max(1, len(os.sched_getaffinity(0)) // stages)
        cluster = output.with_name(f"cluster-{stages}-{cpu_isa}.json")
        cluster.write_text(cluster_text(stages, threads, cpu_isa))
        command([
            "llmpq-algo", "--model", str(model), "--cluster", str(cluster), "--bits", str(bits),
            "--global_bz", str(batch), "--s", str(prompt_tokens), "--n", str(new_tokens),
            "--theta", "0", "--dtype", dtype, "--output", str(output), "--no_explain",
            *(["--profile", str(profile), "--fit"] if profile else []),
        ])  # fmt: skip
    return output


@contextlib.contextmanager
def llmpq_serve(
    model: Path, plan: Path, log: Path, *words: str, name: str = "model", core: int | None = None
) -> Iterator[Running]:
    """Run our server, on one core if it is given."""
    port = free_port()
    pinned = [] if core is None else ["taskset", "-c", str(core)]
    program = [*pinned, sys.executable, "-m", "llmpq.cli.commands.serve"]
    files = ["--strat_file_name", str(plan), "--model", str(model), "--port", str(port)]
    program = [*program, *files, "--served_model_name", name, *words]
    with running(program, port, log, variables=PASSIVE) as found:
        yield found


@contextlib.contextmanager
def llama_server(
    binary: Path, folder: Path, bits: str, log: Path, slots: int, *words: str
) -> Iterator[Running]:
    """Run llama.cpp's server with a slot for each request under way, and continuous batching.

    ``bits`` are a key of ``rivals.FORMATS``.
    """
    port, threads = free_port(), str(len(os.sched_getaffinity(0)))
    program = [
        str(binary), "-m", str(gguf_of(folder, SERVER_CASE, bits)), "--port", str(port),
        "--host", "127.0.0.1", "-c", str(slots * MAX_CONTEXT), "-np", str(slots), "-b", "2048",
        "-ub", "512", "-t", threads, "-tb", threads, "-cb", *words,
    ]  # fmt: skip
    with running(program, port, log) as found:
        yield found


@contextlib.contextmanager
def transformers_serve(model: Path, log: Path, *words: str) -> Iterator[Running]:
    """Run transformers' server, in bfloat16."""
    port = free_port()
    program = [str(Path(sys.executable).parent / "transformers"), "serve", str(model)]
    settings = ["--port", str(port), "--device", "cpu", "--dtype", "bfloat16"]
    with running([*program, *settings, *words], port, log, "/health") as found:
        yield found


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def running(
    words: Sequence[str],
    port: int,
    log: Path,
    path: str = "/health",
    variables: Mapping[str, str] | None = None,
) -> Iterator[Running]:
    """Run a server; SIGTERM at the end.

    Raises:
        SystemExit: it ends, or does not answer in time; with the end of its log.
    """
    with log.open("ab") as file:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            cwd=ROOT,
            env={**unset_threading(), **OFFLINE, **(variables or {})},
        )
    try:
        end_s = time.monotonic() + START_TIMEOUT_S
        while not answers(port, path):
            if process.poll() is not None or time.monotonic() > end_s:
                tail = log.read_text(errors="replace")[-2000:]
                raise SystemExit(f"{words[0]}: status {process.poll()}\n{tail}")
            time.sleep(0.1)
        yield Running(port=port, pid=process.pid, log=log)
    finally:
        stop(process)


OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def stop(process: subprocess.Popen[bytes]) -> int:
    """End a process; return its exit status."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait()


def answers(port: int, path: str = "/health") -> bool:
    """Return whether a server answers with status 200."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False
