"""Run plans exported to llama.cpp on two RPC servers of this host; compare layers and tokens.

    cmake -B build -DGGML_RPC=ON && cmake --build build --target llama-server ggml-rpc-server \\
        llama-quantize llama-gguf-split
    python scripts/llama_cpp_rpc.py --binaries build/bin

Plans the shipped model on two CPU workers with unequal numbers of layers, writes it with
``llmpq-algo --export llama.cpp`` and starts the export's own scripts: a server a stage, then the
main one. Two plans are run: float32, and 4 and 8 bits by layer where ``llama-quantize`` is among
the binaries. For each

* the device of every layer, from the main server's log, is the stage that the plan gives it;
* greedy tokens are compared: float32 with transformers', few bits with the same file in a single
  process of ``llama-server``.

The GGUF file of the float32 weights is written here: llama.cpp's converter knows no tokenizer of
the shipped model. Exit status 1 if layers or float32 tokens differ.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import gguf
import torch
from transformers import AutoModelForCausalLM

from llmpq.assigner.export.export import RPC_PORT
from llmpq.spec.plan import Plan, read_plan

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

from helpers.gguf_writer import write_gguf  # noqa: E402
from rivals import add_words  # noqa: E402
from workbench import command  # noqa: E402

BITS = {"float32": ("--bits", "16"), "4 and 8 bits": ("--bits", "4", "8", "--fix_bits", "3:9=4")}
SPLIT = ("--fix_layers", "here/cpu#0=0:7", "here/cpu#1=7:12")
PROMPTS = ((5, 900, 12, 77, 1300, 42), (4000, 3, 2048), (17,) * 40)
NEW_TOKENS = 24
CONTEXT = 64
WAIT_S = 300.0
_LAYER = re.compile(r"load_tensors: layer +(\d+) assigned to device (\S+),")


def main() -> int:
    """Run both plans; print what was found; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--binaries", type=Path, nargs="+", required=True,
        help="directories of llama-server, ggml-rpc-server and llama-quantize, built with RPC",
    )  # fmt: skip
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "demo")
    options = parser.parse_args()
    status = 0
    for title, bits in BITS.items():
        if title != "float32" and not found_in(options.binaries, "llama-quantize"):
            print(f"{title}: skipped, no llama-quantize among the binaries")
            continue
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "export"
            plan = exported(options.model, Path(folder), output, bits)
            status |= check(title, plan, output, options.model, options.binaries)
    return status


def exported(model: Path, folder: Path, output: Path, bits: Sequence[str]) -> Plan:
    """Plan with an unequal split and export; return the plan."""
    cluster = folder / "cluster.json"
    devices = [{"type": "cpu", "count": 2, "threads": 1}]
    cluster.write_text(
        json.dumps({"schema": 1, "name": "two", "nodes": [{"name": "here", "devices": devices}]})
    )
    command([
        "llmpq-algo", "--model", str(model.resolve()), "--cluster", str(cluster), "--global_bz",
        str(len(PROMPTS)), "--s", "32", "--n", str(CONTEXT - 32), "--dtype", "float32",
        "--theta", "0", *SPLIT, *bits, "--no_explain", "--export", "llama.cpp",
        "--output", str(output),
    ])  # fmt: skip
    return read_plan(output / "plan.json")


def check(title: str, plan: Plan, output: Path, model: Path, binaries: Sequence[Path]) -> int:
    """Run one export; return 1 if layers, or tokens of float32, differ."""
    write_gguf(model, output / "model-plain.gguf", extra=[_vocabulary(model)])
    if (output / "quantize.sh").exists():
        _run(output / "quantize.sh", binaries)
    log = output / "main.log"
    with contextlib.ExitStack() as stack:
        for stage in plan.stages:
            script = output / f"stage-{stage.rank}.sh"
            stack.enter_context(_started([script], binaries, output / f"{script.stem}.log"))
        for stage in plan.stages:
            wait_for_listener(RPC_PORT + stage.rank)
        port = free_port()
        words = ["--port", str(port), "--verbose", "--no-warmup"]
        stack.enter_context(_started([output / "main.sh", *words], binaries, log))
        wait_for(port, log)
        found = [complete(port, prompt) for prompt in PROMPTS]
    places = layer_places(log.read_text(errors="replace"))
    expected = [rank for rank, stage in enumerate(plan.stages) for _ in range(stage.num_layers)]
    print(f"{title}: layers of the plan {counts(expected)}, of llama.cpp {counts(places)}")
    if title == "float32":
        other, tokens = "transformers", [generate(model, prompt) for prompt in PROMPTS]
    else:
        other = "one process"
        tokens = alone(output / "model.gguf", binaries, output / "alone.log")
    same = sum(a == b for ours, theirs in zip(found, tokens, strict=True)
               for a, b in zip(ours, theirs, strict=True))  # fmt: skip
    print(f"{title}: {same} of {len(PROMPTS) * NEW_TOKENS} greedy tokens are those of {other}")
    return int(places != expected or (title == "float32" and found != tokens))


def layer_places(log: str) -> list[int]:
    """Return the number of the RPC device of every layer, the output after the last left out.

    Raises:
        SystemExit: the log names no layers, or a layer on another device.
    """
    found = {int(layer): device for layer, device in _LAYER.findall(log)}
    if not found:
        raise SystemExit(f"found no layers in the log of llama-server:\n{log[-2000:]}")
    other = next((one for one in found.values() if not one.startswith("RPC")), None)
    if other is not None:
        raise SystemExit(f"found a layer on {other}, expected RPC servers only")
    return [int(found[layer].removeprefix("RPC")) for layer in sorted(found)[:-1]]


def counts(places: Sequence[int]) -> list[int]:
    """Return how many layers every server has."""
    return [places.count(rank) for rank in sorted(set(places))]


def complete(port: int, prompt: Sequence[int]) -> list[int]:
    """Return the greedy tokens of llama-server."""
    body = {
        "prompt": list(prompt), "n_predict": NEW_TOKENS, "temperature": 0, "return_tokens": True,
        "ignore_eos": True, "cache_prompt": False, "samplers": ["temperature"],
    }  # fmt: skip
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/completion", json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        tokens: list[int] = json.load(answer)["tokens"]
    return tokens


def generate(model: Path, prompt: Sequence[int]) -> list[int]:
    """Return the greedy tokens of transformers in float32."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        answer = reference.generate(
            torch.tensor([list(prompt)]), do_sample=False, max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    tokens: list[int] = answer[0, len(prompt) :].tolist()
    return tokens


def alone(file: Path, binaries: Sequence[Path], log: Path) -> list[list[int]]:
    """Return the greedy tokens of one process of llama-server without RPC."""
    port = free_port()
    words = ["llama-server", "--model", file, "--port", str(port), "--ctx-size", str(CONTEXT * 3)]
    with _started([*words, "--no-warmup", "--threads", "1"], binaries, log):
        wait_for(port, log)
        return [complete(port, prompt) for prompt in PROMPTS]


def found_in(binaries: Sequence[Path], name: str) -> bool:
    """Whether one of the directories has a program."""
    return any((folder / name).exists() for folder in binaries)


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_for(port: int, log: Path) -> None:
    """Wait until a server answers.

    Raises:
        SystemExit: it does not in time; with the end of its log.
    """
    end_s = time.monotonic() + WAIT_S
    while time.monotonic() < end_s:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return
        time.sleep(0.2)
    raise SystemExit(f"llama-server does not answer:\n{log.read_text(errors='replace')[-3000:]}")


def wait_for_listener(port: int) -> None:
    """Wait until a program listens on a port of this host.

    Raises:
        SystemExit: none does in time.
    """
    end_s = time.monotonic() + WAIT_S
    while time.monotonic() < end_s:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5):
            return
        time.sleep(0.2)
    raise SystemExit(f"found no RPC server on port {port}")


@contextlib.contextmanager
def _started(words: Sequence[str | Path], binaries: Sequence[Path], log: Path) -> Iterator[None]:
    """Run a program; SIGTERM at the end."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=_environment(binaries)
        )
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()


def _run(script: Path, binaries: Sequence[Path]) -> None:
    done = subprocess.run(
        [script], env=_environment(binaries), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{script.name}: status {done.returncode}\n{done.stderr[-2000:]}")


def _environment(binaries: Sequence[Path]) -> dict[str, str]:
    folders = [str(folder.resolve()) for folder in binaries]
    paths = {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", "")}
    return {**os.environ} | {name: ":".join([*folders, own]) for name, own in paths.items()}


def _vocabulary(model: Path) -> Callable[[gguf.GGUFWriter], None]:
    """Return what adds a vocabulary, of words that mean nothing."""
    size = json.loads((model / "config.json").read_text())["vocab_size"]

    def add(writer: gguf.GGUFWriter) -> None:
        add_words(writer, gguf.TokenType, size)

    return add


if __name__ == "__main__":
    sys.exit(main())
