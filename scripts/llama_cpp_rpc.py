"""Run plans exported to llama.cpp on RPC servers of this host; compare layers and tokens.

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

A third and a fourth plan have a random model with experts on a GPU beside a host, which holds the
experts of some of its layers. An RPC server stands for the GPU, so that the log of the export's one
process tells which tensors it left on its CPU; with few bits the host's experts have other bits
than the layers.

The GGUF file of the float32 weights is written here: llama.cpp's converter knows no tokenizer of
the models. Exit status 1 if layers, experts, types of tensors or float32 tokens differ.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
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

from llmpq.assigner.export.export import RPC_PORT, write_export
from llmpq.spec.plan import Plan, read_plan

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

from helpers.gguf_writer import write_gguf  # noqa: E402
from rivals import add_words  # noqa: E402
from workbench import call, command  # noqa: E402

BITS = {"float32": ("--bits", "16"), "4 and 8 bits": ("--bits", "4", "8", "--fix_bits", "3:9=4")}
SPLIT = ("--fix_layers", "here/cpu#0=0:7", "here/cpu#1=7:12")
PROMPTS = ((5, 900, 12, 77, 1300, 42), (4000, 3, 2048), (17,) * 40)
NEW_TOKENS = 24
CONTEXT = 64
WAIT_S = 300.0
EXPERT_MODEL = {"layers": 6, "hidden": 256, "intermediate": 256, "vocab": 4096}
_LAYER = re.compile(r"load_tensors: layer +(\d+) assigned to device (\S+),")
_OVERRIDDEN = re.compile(r"tensor blk\.(\d+)\.(\w+)\.weight .* buffer type overridden to CPU")
TYPES = {16: "F32", 8: "Q8_0", 4: "Q4_K", 3: "Q3_K"}


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
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "export"
            model = expert_model(Path(folder) / "model")
            plan = exported_with_experts(model, Path(folder), output, title == "float32")
            status |= check_experts(title, plan, output, model, options.binaries)
    return status


def expert_model(folder: Path) -> Path:
    """Write a random Qwen3-MoE; return its folder."""
    sizes = [word for name, value in EXPERT_MODEL.items() for word in (f"--{name}", str(value))]
    call([sys.executable, str(ROOT / "scripts" / "make_tiny_model.py"), "--family", "qwen3_moe",
          *sizes, "--set", "norm_topk_prob=true", "--output", str(folder)])  # fmt: skip
    return folder


def exported_with_experts(model: Path, folder: Path, output: Path, is_float32: bool) -> Plan:
    """Plan on a GPU too small for all experts, beside a host; export; return the plan.

    With few bits, the experts on the host get other bits than their layers.
    """
    cluster, strategy = folder / "cluster.json", folder / "plan.json"
    host = {"type": "host", "threads": 1, "memory_bytes": 10**9}

    def planned(memory_bytes: int) -> Plan:
        devices = [{"type": "RTX3060-12G", "count": 1, "memory_bytes": memory_bytes, "host": host}]
        cluster.write_text(
            json.dumps({
                "schema": 1, "name": "one", "nodes": [{"name": "here", "devices": devices}],
                "device_types": [{"type": "host", "like": "cpu", "gather_bytes_per_s": 1e10}],
            })
        )  # fmt: skip
        command([
            "llmpq-algo", "--model", str(model.resolve()), "--cluster", str(cluster), "--global_bz",
            str(len(PROMPTS)), "--s", "32", "--n", str(CONTEXT - 32), "--dtype", "float32",
            "--theta", "0", "--bits", "16" if is_float32 else "8", "--no_explain",
            "--output", str(strategy),
        ])  # fmt: skip
        return read_plan(strategy)

    whole = planned(10**10)
    (stage,) = whole.estimate.stages
    plan = planned(stage.memory.total - stage.memory.weights // 2)
    (own,) = plan.stages
    assert own.experts is not None, "the GPU has no room for all experts"
    if not is_float32:
        layers = tuple(dataclasses.replace(one, bits=4) for one in own.experts.layers)
        experts = dataclasses.replace(own.experts, layers=layers)
        plan = dataclasses.replace(plan, stages=(dataclasses.replace(own, experts=experts),))
    write_export(plan, "llama.cpp", output)
    return plan


def check_experts(
    title: str, plan: Plan, output: Path, model: Path, binaries: Sequence[Path]
) -> int:
    """Run an export with experts on the host; return 1 if anything differs."""
    write_gguf(model, output / "model-plain.gguf", extra=[_vocabulary(model)])
    file = output / "model-plain.gguf"
    if (output / "quantize.sh").exists():
        _run(output / "quantize.sh", binaries)
        file = output / "model.gguf"
    log, port, rpc = output / "main.log", free_port(), free_port()
    server = ["ggml-rpc-server", "--host", "127.0.0.1", "--port", str(rpc), "--device", "CPU"]
    with contextlib.ExitStack() as stack:
        stack.enter_context(_started(server, binaries, output / "gpu.log"))
        wait_for_listener(rpc)
        words = ["--rpc", f"127.0.0.1:{rpc}", "--port", str(port), "--verbose", "--no-warmup"]
        stack.enter_context(_started([output / "main.sh", *words], binaries, log))
        wait_for(port, log)
        found = [complete(port, prompt) for prompt in PROMPTS]
    text = log.read_text(errors="replace")
    (experts,) = (stage.experts for stage in plan.stages)
    assert experts is not None, "the plan has experts on the host"
    apart = {one.layer for one in experts.layers if one.resident is not None}
    is_same = overridden(text) == {
        (layer, f"ffn_{part}_exps") for layer in apart for part in ("gate", "up", "down")
    }
    places = layer_places(text)
    print(f"{title}: experts of layers {sorted(apart)} on the host, by llama.cpp's log "
          f"{sorted({layer for layer, _ in overridden(text)})}; {len(places)} layers on "
          f"{counts(places)}")  # fmt: skip
    is_same &= places == [0] * plan.model.num_layers
    is_same &= types_of(file) == expected_types(plan, has_experts=True)
    tokens = (
        [generate(model, prompt) for prompt in PROMPTS]
        if title == "float32"
        else alone(file, binaries, output / "alone.log")
    )
    return int(not is_same or not tokens_equal(title, found, tokens))


def overridden(log: str) -> set[tuple[int, str]]:
    """Return the tensors that llama.cpp left on its CPU, by layer and name."""
    return {(int(layer), name) for layer, name in _OVERRIDDEN.findall(log)}


def types_of(file: Path) -> dict[tuple[int, bool], set[str]]:
    """Return the types of the matrices of every layer of a GGUF file, of its experts or others."""
    found: dict[tuple[int, bool], set[str]] = {}
    for tensor in gguf.GGUFReader(file).tensors:
        place, _, name = tensor.name.removeprefix("blk.").partition(".")
        if place.isdigit() and len(tensor.shape) > 1 and "ffn_gate_inp" not in name:
            key = int(place), "_exps" in name
            found.setdefault(key, set()).add(tensor.tensor_type.name)
    return found


def expected_types(plan: Plan, *, has_experts: bool) -> dict[tuple[int, bool], set[str]]:
    """Return the same of a plan."""
    own = {
        one.layer: one.bits
        for stage in plan.stages
        if stage.experts is not None
        for one in stage.experts.layers
        if one.bits is not None
    }
    return {
        (layer, is_expert): {TYPES[own.get(layer, bits) if is_expert else bits]}
        for layer, bits in enumerate(plan.bits)
        for is_expert in ((False, True) if has_experts else (False,))
    }


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
    tokens = (
        [generate(model, prompt) for prompt in PROMPTS]
        if title == "float32"
        else alone(output / "model.gguf", binaries, output / "alone.log")
    )
    is_same = tokens_equal(title, found, tokens) and places == expected
    if title != "float32":
        is_same &= types_of(output / "model.gguf") == expected_types(plan, has_experts=False)
    return int(not is_same)


def tokens_equal(title: str, found: list[list[int]], tokens: list[list[int]]) -> bool:
    """Print how many tokens are equal; return whether all are that have to be."""
    same = sum(a == b for ours, theirs in zip(found, tokens, strict=True)
               for a, b in zip(ours, theirs, strict=True))  # fmt: skip
    other = "transformers" if title == "float32" else "one process"
    print(f"{title}: {same} of {len(PROMPTS) * NEW_TOKENS} greedy tokens are those of {other}")
    return title != "float32" or found == tokens


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
