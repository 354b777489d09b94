"""The runtime on a device: quantized stages, their memory, tokens, pipelines, the profiler."""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from llmpq.dist import generate_offline
from llmpq.dist.engine.cuda_graphs import Capture, CudaCapture, DecodeGraphs, Work
from llmpq.dist.io.job import Job
from llmpq.dist.io.prompts import Prompt, Request
from llmpq.dist.kv.blocks import blocks_of
from llmpq.dist.kv.cache import KVCache
from llmpq.dist.launch.rank import RankContext, run_master
from llmpq.dist.metrics.progress import SilentProgress
from llmpq.dist.metrics.stats import synchronize
from llmpq.models import DecoderStage, PackedBatch, kv_shapes
from llmpq.quant.loading.loader import load_stage
from llmpq.quant.modules.layer import stored_bytes
from llmpq.quant.modules.linear import QuantLinear
from llmpq.spec.cluster import Cluster, DeviceGroup, Node
from llmpq.spec.plan import (
    MemoryParts,
    MicroBatching,
    ModelRef,
    Plan,
    PlanEstimate,
    Provenance,
    Search,
    StageAssignment,
    StageEstimate,
)
from llmpq.spec.workload import Workload
from scripts import make_tiny_model
from scripts.gpu_checks.harness import FailedError, Row, Setting, SkippedError

FAMILIES = ("llama", "opt", "bloom", "gemma2", "mixtral")
NEW_TOKENS = 12
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7], [2, 7, 1, 8, 2], list(range(20, 37))]
STAGE_BITS = (16, 8, 4, 3)
GPU = "H200"  # the catalogue's name of a device of CUDA's kind; only its kind matters here
STAGE_TOLERANCE = 0.03  # bf16 on both sides; 8 bits round their activations on one
REPLAY_TOLERANCE = 2 * STAGE_TOLERANCE  # other attention kernels; 8 bits round on both sides


def quantized_stage(setting: Setting) -> list[Row]:
    """A layer at each bitwidth in bf16 on the device, against the reference kernels on the CPU."""
    model_dir = _model(setting, "llama", layers=4, hidden=256, intermediate=512)
    batch = PackedBatch.whole([9, 4])
    hidden = torch.randn(1, 13, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows: list[Row] = []
    for index, bits in enumerate(STAGE_BITS):
        outputs: list[Tensor] = []
        names: set[str] = set()
        for device, backend in (
            (torch.device("cpu"), "reference"),
            (setting.device, None),
        ):
            stage = load_stage(
                model_dir,
                index,
                index + 1,
                [bits],
                dtype=torch.bfloat16,
                device=device,
                backend=backend,
            )
            made = stage(hidden.to(device), batch)
            outputs.append(made[0].float().cpu())
            names = {m.backend_name for m in stage.modules() if isinstance(m, QuantLinear)}
        error = ((outputs[1] - outputs[0]).norm() / outputs[0].norm()).item()
        rows.append({"bits": bits, "backends": " ".join(sorted(names)), "error": error})
    if any(not row["error"] < STAGE_TOLERANCE for row in rows):
        raise FailedError(f"an error above {STAGE_TOLERANCE}", rows)
    return rows


def decode_graphs(setting: Setting) -> list[Row]:
    """Decode steps replayed from graphs: the layers' numbers, and their time as a ratio.

    On a CPU nothing is captured; the same steps at fixed places are then called again.
    """
    sizes = {"layers": 4, "hidden": 256, "intermediate": 512}
    if not setting.is_quick:
        sizes = {"layers": 8, "hidden": 2048, "intermediate": 5632}
    model_dir = _model(setting, "llama", **sizes)
    is_gpu = setting.device.type == "cuda"
    rows: list[Row] = []
    for bits in (*STAGE_BITS, "mixed"):
        widths = STAGE_BITS if bits == "mixed" else (bits,) * 4
        stage = load_stage(model_dir, 0, 4, widths, dtype=torch.bfloat16, device=setting.device)
        for count in (1, 8):
            capture = CudaCapture(setting.device) if is_gpu else _called_again
            rows.append({"bits": bits, "rows": count} | _replayed(setting, stage, count, capture))
    if any(not row["error"] < REPLAY_TOLERANCE for row in rows):
        raise FailedError(f"an error above {REPLAY_TOLERANCE}", rows)
    if is_gpu and not all(row["graphs"] for row in rows):
        raise FailedError("a stage was not captured", rows)
    return rows


def _called_again(work: Work) -> Work:
    return work


def _replayed(setting: Setting, stage: DecoderStage, count: int, capture: Capture) -> Row:
    """Decode over the edge of a shape, by layers and by graphs, each with a cache of its own."""
    first, steps, size = 126, 4 if setting.is_quick else 40, stage.config.hidden_size
    width = blocks_of(first + steps)
    tables = [range(row * width, (row + 1) * width) for row in range(count)]
    rng = torch.Generator().manual_seed(count)
    caches = [
        KVCache(
            kv_shapes(stage.config, 0, 4), 0, num_blocks=count * width,
            dtype=torch.bfloat16, device=setting.device,
        )
        for _ in range(2)
    ]  # fmt: skip
    graphs = DecodeGraphs(stage, caches[1], full_rows=count, capture=capture)
    prompt = torch.randn(1, count * first, size, generator=rng).bfloat16().to(setting.device)
    for cache in caches:
        starts, counts = [0] * count, [first] * count
        stage(prompt, PackedBatch(block_tables=tables, starts=starts, counts=counts), cache)
    errors: list[float] = []
    times: dict[str, list[float]] = {"layers": [], "graphs": []}
    for step in range(steps):
        starts = [first + step] * count
        batch = PackedBatch(block_tables=tables, starts=starts, counts=[1] * count)
        hidden = torch.randn(1, count, size, generator=rng).bfloat16().to(setting.device)
        made: list[Tensor] = []
        for name, forward in (
            ("layers", partial(stage, cache=caches[0])),
            ("graphs", graphs.forward),
        ):
            synchronize(setting.device)
            start = time.perf_counter()
            made.append(forward(hidden, batch))
            synchronize(setting.device)
            times[name].append(time.perf_counter() - start)
        errors.append(((made[1] - made[0]).norm() / made[0].norm()).item())
    layers_s, graphs_s = (statistics.median(times[name]) for name in ("layers", "graphs"))
    return {
        "error": max(errors),
        "graphs": len(graphs.shapes),
        "layers us": round(1e6 * layers_s, 1),
        "ratio": round(graphs_s / layers_s, 3),
    }


def stage_memory(setting: Setting) -> list[Row]:
    """Bytes allocated by loading a stage, against those it says it stores."""
    if setting.device.type != "cuda":
        raise SkippedError("only CUDA's allocator counts exactly")
    model_dir = _model(setting, "llama", layers=4, hidden=512, intermediate=1024)

    row: Row = {}

    def load() -> tuple[int, int, int]:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        stage = load_stage(model_dir, 0, 4, STAGE_BITS, dtype=torch.bfloat16, device=setting.device)
        torch.cuda.synchronize()
        tensors = len([*stage.parameters(), *stage.buffers()])
        tensors += 3 * sum(isinstance(module, QuantLinear) for module in stage.modules())
        kept = torch.cuda.memory_allocated() - before
        peak = torch.cuda.max_memory_allocated() - before
        slack = 512 * tensors
        row.update(stored=stored_bytes(stage), allocated=kept, peak=peak, slack=slack)
        return kept, stored_bytes(stage), slack

    load()  # decoding tables and trial products are kept for good from the first time on
    kept, stored, slack = load()
    if not 0 <= kept - stored <= slack:
        raise FailedError("the stage takes other bytes than it says", [row])
    return [row]


def tokens(setting: Setting) -> list[Row]:
    """Greedy tokens in float32 of a single stage on the device, against transformers there."""
    families = FAMILIES[:1] if setting.is_quick else FAMILIES
    rows: list[Row] = []
    for family in families:
        model_dir = _model(setting, family)
        expected = _generated(model_dir, setting.device)
        plan = _plan((0, 3), [_type_of(setting.device)])
        answers: dict[object, list[int]] = {}

        def keep(request: Request, made: Sequence[int], _: object, to=answers) -> None:
            to[request.id] = list(made)

        paths = {name: model_dir / name for name in ("strategy", "prompts", "output")}
        job = Job(model_dir=model_dir, **paths)
        context = RankContext(job=job, plan=plan, rank=0, progress=SilentProgress())
        run_master(context, _requests(), keep)
        same = [answers[number] == made for number, made in enumerate(expected)]
        rows.append({"family": family, "prompts": len(same), "equal": sum(same)})
    if any(row["equal"] != row["prompts"] for row in rows):
        raise FailedError("tokens differ from transformers' generate", rows)
    return rows


def mixed_pipeline(setting: Setting) -> list[Row]:
    """Two processes over gloo, a CPU and the device in both orders: the tokens of one process."""
    model_dir = _model(setting, "llama")
    expected = _generated(model_dir, torch.device("cpu"))
    prompts = [
        Prompt(id=number, where="here", token_ids=tuple(prompt), max_new_tokens=NEW_TOKENS)
        for number, prompt in enumerate(PROMPTS)
    ]
    own = _type_of(setting.device)
    rows: list[Row] = []
    for order in (["cpu", own], [own, "cpu"]):
        # A worker first imports torch and opens the GPU, which takes a bare machine a while.
        results = generate_offline(
            _plan((0, 1, 3), order), prompts, model_dir=model_dir, step_timeout_s=60
        )
        same = [list(result.token_ids) == expected[int(result.id)] for result in results]
        rows.append({"stages": " -> ".join(order), "prompts": len(same), "equal": sum(same)})
    if any(row["equal"] != row["prompts"] for row in rows):
        raise FailedError("tokens differ from transformers' generate", rows)
    return rows


def profile_layer(setting: Setting) -> list[Row]:
    """A short ``llmpq-profile layer`` on the device: a table comes out."""
    model_dir = _model(setting, "llama", layers=2, hidden=256, intermediate=512)
    table = setting.folder / "table.csv"
    command = [
        sys.executable,
        "-m",
        "llmpq.cli.commands.profile",
        "layer",
        "--model",
        str(model_dir),
    ]
    command += ["--device", str(setting.device), "--device_type", _type_of(setting.device)]
    command += ["--bits", *map(str, STAGE_BITS), "--layers", "2", "--budget", "5"]
    command += ["--batches", "1", "4", "--prompt_tokens", "16", "--context_tokens", "32"]
    done = subprocess.run(
        [*command, "--output", str(table)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0 or not table.exists():
        raise FailedError(f"exit status {done.returncode}: {done.stderr[-1500:]}")
    return [{"table": "rows", "count": len(table.read_text(encoding="utf-8").splitlines())}]


def _model(setting: Setting, family: str, **sizes: int) -> Path:
    folder = setting.folder / family
    if not folder.exists():
        shape = make_tiny_model.Shape(**sizes)
        model = make_tiny_model.make_model(make_tiny_model.make_config(family, shape), seed=0)
        make_tiny_model.save_model(model, folder, dtype=torch.float32)
    return folder


def _generated(model_dir: Path, device: torch.device) -> list[list[int]]:
    """Return what transformers generates for every prompt alone."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model.to(device).eval()
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device=device)
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS
        )
        found.append(made[0, len(prompt) :].tolist())
    return found


def _requests() -> list[Request]:
    return [
        Request(id=number, prompt_token_ids=tuple(prompt), max_new_tokens=NEW_TOKENS)
        for number, prompt in enumerate(PROMPTS)
    ]


def _type_of(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else GPU


def _plan(cuts: Sequence[int], types: Sequence[str]) -> Plan:
    """Return a plan of 16-bit stages ``[cuts[i], cuts[i + 1])``; its estimates are not used."""
    groups = tuple(
        DeviceGroup(type=kind, count=1, threads=1 if kind == "cpu" else None) for kind in types
    )
    memory = MemoryParts(weights=1, kv=1, temporary=1, master=1, runtime=1)
    estimate = StageEstimate(
        prefill_s=1.0,
        decode_s=1.0,
        send_prefill_s=1.0,
        send_decode_s=1.0,
        memory=memory,
        capacity_bytes=5,
    )
    stages = tuple(
        StageAssignment(
            rank=rank, device=rank, first_layer=first, end_layer=end, bits=(16,) * (end - first)
        )
        for rank, (first, end) in enumerate(itertools.pairwise(cuts))
    )
    return Plan(
        model=ModelRef(name="tiny", source=None, num_layers=cuts[-1]),
        cluster=Cluster(name="here", nodes=(Node(name="here", devices=groups),)),
        workload=Workload(batch=4, prompt_tokens=20, new_tokens=NEW_TOKENS),
        dtype="float32",
        kv_bits=32,
        micro_batching=MicroBatching(prefill=2, decode=2),
        stages=stages,
        dropped_devices=(),
        estimate=PlanEstimate(
            latency_s=1.0, quality=0.0, objective_s=1.0, stages=(estimate,) * len(stages)
        ),
        search=Search(method="by hand"),
        provenance=Provenance(command="scripts/gpu_check", version="0"),
    )
