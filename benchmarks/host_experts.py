"""Experts in host memory: measured beside the law and beside whole layers, on two groups of cores.

    python benchmarks/host_experts.py --folder DIR --results benchmarks/results

A random model with the shapes of Qwen3-MoE has 1.2 G parameters in routed experts. Core 0 is the
"device", core 1 the "host". Each case runs in a process of its own:

* *apart*: dense parts and a share of the experts on core 0, the other experts on core 1;
* *one core*: all on core 0. Whole layers on both cores take as long for one micro-batch, which is
  on one of them at a time, whatever of the memory of core 0 they fill: the cores are alike.

The law is ``llmpq.costmodel.host_experts``, with a gather rate, hops and seconds of rows that are
measured by themselves; the dense part is that of the run on one core.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from workbench import NATIVE, keep_run, run_of, text_of

from llmpq.batching.blocks import blocks_of, slot_blocks
from llmpq.costmodel.host_experts import HostExperts
from llmpq.dist.engine.compiled_steps import step_runner_of
from llmpq.dist.engine.executor import StageRunner
from llmpq.dist.kv.cache import KVCache
from llmpq.dist.transport.frames import Row
from llmpq.kernels.cpu.experts import HostPool
from llmpq.models import kv_shapes
from llmpq.profiler.whole_device import DeviceJob, gather_bytes_per_s
from llmpq.quant.loading.loader import load_stage
from llmpq.quant.modules.experts import row_experts
from llmpq.quant.modules.layer import QuantExperts, stored_bytes
from llmpq.spec.precision import LayerExperts, StageExperts

TOPIC = "host-experts"
SHAPE: dict[str, Any] = {
    "vocab_size": 2048, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 12,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64,
    "moe_intermediate_size": 512, "num_experts": 64, "num_experts_per_tok": 8,
    "max_position_embeddings": 4096, "dtype": "bfloat16",
}  # fmt: skip
LAYERS, EXPERTS, CHOSEN = 12, 64, 8
DENSE_BITS, EXPERT_BITS = 8, 4
CONTEXT = 32
DEVICE_CORE, HOST_CORE = 0, 1
SHARES = (1.0, 0.7)
"""Shares of the experts on the host."""
BATCHES, PROMPTS = (1, 8), (128, 512, 2048)


def main() -> int:
    """Prepare, measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="model")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--results", type=Path, help="folder of result files")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.folder / "model", json.loads(options.one))))
        return 0
    prepare(options.folder / "model")
    kinds: list[dict[str, Any]] = [
        *({"kind": "apart", "share": share} for share in SHARES),
        {"kind": "one core", "share": 0.0},
        {"kind": "rates"},
    ]
    samples = []
    for number in range(options.rounds):
        for case in kinds:
            command = [sys.executable, __file__, "--folder", str(options.folder)]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
            made = subprocess.run(
                [*command, "--one", json.dumps(case)], env=environment, check=True,
                stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            samples.append({"round": number, **case, **json.loads(made.stdout.splitlines()[-1])})
            print(samples[-1], file=sys.stderr, flush=True)
    tables = tables_of(samples)
    for table in tables:
        print(text_of(table), end="\n\n")
    if options.results is not None:
        words = "python benchmarks/host_experts.py --folder DIR"
        run = {**run_of(NATIVE, words), "samples": samples, "tables": tables}
        keep_run(options.results / f"{TOPIC}.json", TOPIC, run)
    return 0


def prepare(folder: Path) -> None:
    """Write the model, once."""
    if folder.exists():
        return

    config = Qwen3MoeConfig(**SHAPE, tie_word_embeddings=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    state = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        made = torch.ones(tensor.shape) if "norm" in name else None
        if made is None:
            made = torch.empty(tensor.shape, dtype=torch.bfloat16)
            made.normal_(std=0.02, generator=generator)
        state[name] = made.to(torch.bfloat16)
    folder.mkdir(parents=True)
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(folder)
    stacked = {}
    for name, tensor in state.items():
        if name.endswith("experts.gate_up_proj"):
            start = name.removesuffix("gate_up_proj")
            for expert, weight in enumerate(tensor):
                gate, up = weight.chunk(2)
                stacked[f"{start}{expert}.gate_proj.weight"] = gate.contiguous()
                stacked[f"{start}{expert}.up_proj.weight"] = up.contiguous()
        elif name.endswith("experts.down_proj"):
            start = name.removesuffix("down_proj")
            for expert, weight in enumerate(tensor):
                stacked[f"{start}{expert}.down_proj.weight"] = weight.contiguous()
        else:
            stacked[name] = tensor
    save_file(stacked, folder / "model.safetensors", metadata={"format": "pt"})


def measure(model: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Return seconds of steps through the layers of a case, by phase and size."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    os.sched_setaffinity(0, {DEVICE_CORE})
    if case["kind"] == "rates":
        return rates(model)
    stage, pool = stage_of(model, case["share"])
    found = {"decode_s": {}, "prompt_s": {}}
    for batch in BATCHES:
        found["decode_s"][str(batch)] = timed(stage, [(CONTEXT, CONTEXT + 1)] * batch, 15)
    for tokens in PROMPTS:
        found["prompt_s"][str(tokens)] = timed(stage, [(0, tokens)], 2)
    if pool is not None:
        pool.close()
    return found


def stage_of(model: Path, share: float, layers: tuple[int, int] = (0, LAYERS)) -> Any:
    """Load layers with a share of the experts on the host; return them with the host's threads."""
    resident = tuple(range(round((1 - share) * EXPERTS))) if share else None
    own = StageExperts(
        layers=tuple(
            LayerExperts(layer=layer, bits=EXPERT_BITS, resident=resident)
            for layer in range(*layers)
        )
    )
    pool = HostPool(1, [HOST_CORE]) if share else None
    stage = load_stage(
        model, *layers, [DENSE_BITS] * (layers[1] - layers[0]), dtype=torch.bfloat16, device="cpu",
        experts=own, host=pool,
    )  # fmt: skip
    return stage, pool


def timed(stage: Any, rows: list[tuple[int, int]], rounds: int) -> dict[str, float]:
    """Return the median, least and most seconds of a step through a stage.

    Args:
        stage: of the layers.
        rows: first token of each sequence in the step, and its length after it.
        rounds: timed, after one that is not.
    """
    longest = max(length for _, length in rows)
    cache = KVCache(
        kv_shapes(stage.config, stage.first_layer, stage.end_layer), stage.first_layer,
        num_blocks=len(rows) * blocks_of(longest), dtype=torch.bfloat16, device="cpu",
    )  # fmt: skip
    runner = StageRunner(
        layers=stage, cache=cache, device=torch.device("cpu"), is_last=False,
        steps=step_runner_of(stage, cache), dtype=torch.bfloat16, chunk_tokens=sys.maxsize,
    )  # fmt: skip
    assert runner.steps is not None
    own = [
        Row(blocks=slot_blocks(slot, longest, length), first=first, length=length)
        for slot, (first, length) in enumerate(rows)
    ]
    tokens = sum(length - first for first, length in rows)
    seconds = []
    for number in range(rounds + 1):
        generator = torch.Generator().manual_seed(number)
        hidden = torch.randn(1, tokens, SHAPE["hidden_size"], generator=generator)
        start_s = time.perf_counter()
        runner.run(hidden.to(torch.bfloat16), own)
        seconds.append(time.perf_counter() - start_s)
    return {
        "median": statistics.median(seconds[1:]), "least": min(seconds[1:]),
        "most": max(seconds[1:]),
    }  # fmt: skip


def rates(model: Path) -> dict[str, Any]:
    """Return what the law needs: the gather rate, the hop, and seconds of a row."""
    found: dict[str, Any] = {
        "gather_bytes_per_s": gather_bytes_per_s(
            DeviceJob(device=torch.device("cpu"), features=SHAPE["hidden_size"]), "bfloat16",
            cores=[HOST_CORE],
        ),
    }  # fmt: skip
    stage, _ = stage_of(model, 0.0, (0, 1))
    experts = next(part for part in stage.modules() if isinstance(part, QuantExperts))
    found["expert_bytes"] = stored_bytes(experts.gate_up[0]) + stored_bytes(experts.down[0])
    pool = HostPool(1, [HOST_CORE])
    hidden = SHAPE["hidden_size"]
    layer = pool.layer(torch.bfloat16, hidden, CHOSEN, row_experts(experts, [True] * EXPERTS))

    def job_s(rows: int, chosen: torch.Tensor, rounds: int) -> float:
        x = torch.randn(rows, hidden).to(torch.bfloat16)
        y, weights, seconds = torch.empty_like(x), torch.ones(rows, CHOSEN), []
        for _ in range(rounds):
            start_s = time.perf_counter()
            pool.submit(layer, (x, chosen.contiguous(), weights), y)()
            seconds.append(time.perf_counter() - start_s)
        return statistics.median(seconds[1:])

    none = torch.full((1, CHOSEN), EXPERTS, dtype=torch.int32)
    found["hop_s"] = job_s(1, none, 200) / 2
    spread = torch.rand(2048, EXPERTS).topk(CHOSEN).indices.int()
    found["host_row_s"] = job_s(2048, spread, 3) / (2048 * CHOSEN)
    pool.close()
    return found


def tables_of(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return measured and forecast milliseconds of every case, for decode steps and prompts."""

    def mid(kind: str, share: float, phase: str, size: int) -> float:
        own = [s for s in samples if s["kind"] == kind and s["share"] == share]
        return statistics.median(s[phase][str(size)]["median"] for s in own)

    one = [s for s in samples if s["kind"] == "rates"]
    figure = {
        name: statistics.median(s[name] for s in one)
        for name in ("gather_bytes_per_s", "expert_bytes", "hop_s", "host_row_s")
    }

    def law(on_host: int) -> HostExperts:
        return HostExperts(
            experts=EXPERTS, chosen=CHOSEN, on_host=on_host,
            expert_bytes=figure["expert_bytes"], hop_s=figure["hop_s"],
            gather_bytes_per_s=figure["gather_bytes_per_s"], row_s=figure["host_row_s"],
        )  # fmt: skip

    found = []
    for title, phase, name, sizes in (
        ("Decode", "decode_s", "sequences", BATCHES), ("Prompts", "prompt_s", "tokens", PROMPTS)
    ):  # fmt: skip
        rows = []
        for size in sizes:
            whole_s = mid("one core", 0.0, phase, size)
            for share in SHARES:
                on_host = EXPERTS - round((1 - share) * EXPERTS)
                host = law(on_host)
                # The cores are alike: on one of them, experts take what the law says of either.
                dense_s = max(0.0, whole_s / LAYERS - law(EXPERTS).host_s(size))
                beside_s = law(EXPERTS - on_host).host_s(size)
                forecast_s = LAYERS * host.layer_s(size, dense_s, beside_s)
                apart_s = mid("apart", share, phase, size)
                rows.append([
                    size, f"{share:.0%}", f"{1e3 * apart_s:.1f}", f"{1e3 * forecast_s:.1f}",
                    f"{100 * (forecast_s / apart_s - 1):+.0f} %", f"{1e3 * whole_s:.1f}",
                    f"{whole_s / apart_s:.2f}",
                ])  # fmt: skip
        columns = [
            name, "experts on the host", "ms a step", "forecast", "error", "whole layers",
            "faster by",
        ]  # fmt: skip
        found.append({"title": title, "keys": 2, "columns": columns, "rows": rows})
    return found


if __name__ == "__main__":
    sys.exit(main())
