"""The runtime on a device: quantized stages, their memory, tokens, pipelines, the profiler."""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from llmpq.batching.blocks import blocks_of
from llmpq.dist import generate_offline
from llmpq.dist.engine.batch_run import FinishedAnswer
from llmpq.dist.engine.cuda_graphs import CudaCapture, DecodeGraphs, DecodeSizes
from llmpq.dist.io.job import Job
from llmpq.dist.io.prompts import Prompt, Request
from llmpq.dist.kv.cache import KVCache
from llmpq.dist.launch.rank import RankContext, run_master
from llmpq.dist.metrics.progress import SilentProgress
from llmpq.dist.metrics.stats import synchronize
from llmpq.models import DecoderStage, PackedBatch, kv_shapes
from llmpq.quant.loading.loader import load_stage
from llmpq.quant.modules.layer import QuantLinear, stored_bytes
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
GRAPH_FAMILIES = ("llama", "opt", "bloom", "gemma2")
NEW_TOKENS = 12
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7], [2, 7, 1, 8, 2], list(range(20, 37))]
STAGE_BITS = (16, 8, 4, 3)
GPU = "H200"  # the catalogue's name of a device of CUDA's kind; only its kind matters here
STAGE_TOLERANCE = 0.03  # bf16 on both sides; 8 bits round their activations on one
REPLAY_TOLERANCE = 2 * STAGE_TOLERANCE  # other attention kernels; 8 bits round on both sides


def quantized_stage(setting: Setting) -> Iterator[Row]:
    """A layer at each bitwidth in bf16 on the device, against the reference kernels on the CPU."""
    model_dir = _model(setting, "llama", layers=4, hidden=256, intermediate=512)
    batch = PackedBatch.whole([9, 4])
    hidden = torch.randn(1, 13, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    errors: list[float] = []
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
        errors.append(((outputs[1] - outputs[0]).norm() / outputs[0].norm()).item())
        yield {"bits": bits, "backends": " ".join(sorted(names)), "error": errors[-1]}
    if not max(errors) < STAGE_TOLERANCE:
        raise FailedError(f"an error above {STAGE_TOLERANCE}")


def decode_graphs(setting: Setting) -> Iterator[Row]:
    """Decode steps replayed from graphs: the layers' numbers, and their time as a ratio.

    Heads have 128 features, as in models that people run, so that torch chooses the attention that
    it chooses there.
    """
    if setting.device.type != "cuda":
        raise SkippedError("a CPU captures nothing")
    shape = _graph_config(setting)
    rows: list[Row] = []
    for family in GRAPH_FAMILIES[: 1 if setting.is_quick else None]:
        is_main = family == "llama"
        model_dir = _model(setting, family, **(shape if is_main else {"layers": 4}))
        for bits in (*STAGE_BITS, "mixed") if is_main else (16,):
            widths = STAGE_BITS if bits == "mixed" else (bits,) * 4
            stage = load_stage(model_dir, 0, 4, widths, dtype=torch.bfloat16, device=setting.device)
            for count in (1, 3, 8):
                row: Row = {"family": family, "bits": bits, "rows": count}
                rows.append(row | _replayed(setting, stage, count))
                yield rows[-1]
    _check_replays(rows)


def _graph_config(setting: Setting) -> dict[str, int]:
    if setting.is_quick:
        return {"layers": 4, "hidden": 256, "intermediate": 512, "heads": 4, "kv_heads": 2}
    return {"layers": 4, "hidden": 2048, "intermediate": 5632, "heads": 16, "kv_heads": 4}


def kv8(setting: Setting) -> Iterator[Row]:
    """Graphs of 8-bit keys and values: few rows replayed after more and after prompts."""
    if setting.device.type != "cuda":
        raise SkippedError("a CPU captures nothing")
    shape = _graph_config(setting)
    model_dir = _model(setting, "llama", **shape)
    stage = load_stage(model_dir, 0, 4, [16] * 4, dtype=torch.bfloat16, device=setting.device)
    rows: list[Row] = []
    for count in (1, 4, 8):
        rows.append({"rows": count} | _replayed(setting, stage, count, kv_bits=8))
        yield rows[-1]
    _check_replays(rows)


def _check_replays(rows: Sequence[Row]) -> None:
    if any(not row["error"] < REPLAY_TOLERANCE for row in rows):
        raise FailedError(f"an error above {REPLAY_TOLERANCE}")
    if not all(row["graphs"] for row in rows):
        raise FailedError("a stage was not captured; the reason is in its standard error")


def _replayed(setting: Setting, stage: DecoderStage, count: int, kv_bits: int | None = None) -> Row:
    """Decode by layers and by graphs, each with a cache of its own.

    Every second step has one row alone, so that small and large shapes take turns. Between the
    steps a prompt is read, which takes other memory.
    """
    first, steps, size = 124, 6 if setting.is_quick else 40, stage.config.hidden_size
    width = blocks_of(first + steps)
    tables = [range(row * width, (row + 1) * width) for row in range(count + 1)]
    rng = torch.Generator().manual_seed(count)
    layers = len(stage.layers)
    caches = [
        KVCache(
            kv_shapes(stage.config, 0, layers), 0, num_blocks=(count + 1) * width,
            dtype=torch.bfloat16, device=setting.device, kv_bits=kv_bits,
        )
        for _ in range(2)
    ]  # fmt: skip
    graphs = DecodeGraphs(stage, caches[1], capture=CudaCapture(setting.device))
    sizes = DecodeSizes(rows=count, most_tokens=first + steps)
    start = time.perf_counter()
    graphs.capture(sizes.shapes(), sizes.most_tokens)
    capture_s = time.perf_counter() - start
    prompt = torch.randn(1, count * first, size, generator=rng).bfloat16().to(setting.device)
    for cache in caches:
        starts, counts = [0] * count, [first] * count
        stage(prompt, PackedBatch(block_tables=tables[:-1], starts=starts, counts=counts), cache)
    lengths = [first] * count
    errors: list[float] = []
    times: dict[str, list[float]] = {"layers": [], "graphs": []}
    for step in range(steps):
        rows = range(1) if step % 2 else range(count)
        batch = PackedBatch(
            block_tables=[tables[row] for row in rows],
            starts=[lengths[row] for row in rows],
            counts=[1] * len(rows),
        )
        for row in rows:
            lengths[row] += 1
        hidden = torch.randn(1, len(rows), size, generator=rng).bfloat16().to(setting.device)
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
        other = PackedBatch(block_tables=tables[-1:], starts=[0], counts=[first])
        stage(prompt[:, :first], other, caches[1])
    layers_s, graphs_s = (statistics.median(times[name]) for name in ("layers", "graphs"))
    return {
        "error": max(errors),
        "graphs": len(graphs.shapes),
        "capture s": round(capture_s, 2),
        "layers us": round(1e6 * layers_s, 1),
        "ratio": round(graphs_s / layers_s, 3),
    }


def stage_memory(setting: Setting) -> Iterator[Row]:
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
    yield row
    if not 0 <= kept - stored <= slack:
        raise FailedError("the stage takes other bytes than it says")


def tokens(setting: Setting) -> Iterator[Row]:
    """Greedy tokens in float32 of a single stage on the device, against transformers there."""
    families = FAMILIES[:1] if setting.is_quick else FAMILIES
    rows: list[Row] = []
    for family in families:
        model_dir = _model(setting, family)
        expected = _generated(model_dir, setting.device)
        plan = _plan((0, 3), [_type_of(setting.device)])
        answers: dict[object, list[int]] = {}

        def keep(answer: FinishedAnswer, to: dict[object, list[int]] = answers) -> None:
            to[answer.request.id] = list(answer.token_ids)

        paths = {name: model_dir / name for name in ("strategy", "prompts", "output")}
        job = Job(model_dir=model_dir, **paths)
        context = RankContext(job=job, plan=plan, rank=0, progress=SilentProgress())
        run_master(context, _requests(), keep)
        same = [answers[number] == made for number, made in enumerate(expected)]
        rows.append({"family": family, "prompts": len(same), "equal": sum(same)})
        yield rows[-1]
    _check_tokens(rows)


def mixed_pipeline(setting: Setting) -> Iterator[Row]:
    """Two processes over gloo, a CPU and the device in both orders: the tokens of one process."""
    own = _type_of(setting.device)
    yield from _pipelines(setting, [("here", "here", "cpu", own), ("here", "here", own, "cpu")])


def two_stages(setting: Setting) -> Iterator[Row]:
    """Two stages on one GPU, as devices of two nodes, which number their GPUs apart."""
    own = _type_of(setting.device)
    yield from _pipelines(setting, [("a", "b", own, own)])


def _pipelines(setting: Setting, kinds: Sequence[tuple[str, str, str, str]]) -> Iterator[Row]:
    model_dir = _model(setting, "llama")
    expected = _generated(model_dir, torch.device("cpu"))
    prompts = [
        Prompt(id=number, where="here", token_ids=tuple(prompt), max_new_tokens=NEW_TOKENS)
        for number, prompt in enumerate(PROMPTS)
    ]
    rows: list[Row] = []
    for first, second, *order in kinds:
        plan = _plan((0, 1, 3), order, nodes=(first, second))
        start = time.perf_counter()
        # A worker first imports torch and opens the GPU, which takes a bare machine a while.
        results = generate_offline(plan, prompts, model_dir=model_dir, step_timeout_s=60)
        same = [list(result.token_ids) == expected[int(result.id)] for result in results]
        rows.append(
            {
                "stages": " -> ".join(order),
                "prompts": len(same),
                "equal": sum(same),
                "s": round(time.perf_counter() - start, 1),
            }
        )
        yield rows[-1]
    _check_tokens(rows)


def _check_tokens(rows: Sequence[Row]) -> None:
    if any(row["equal"] != row["prompts"] for row in rows):
        raise FailedError("tokens differ from transformers' generate")


def profile_layer(setting: Setting) -> Iterator[Row]:
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
        raise FailedError(f"exit status {done.returncode}: {done.stderr[-3000:]}")
    yield {"table": "rows", "count": len(table.read_text(encoding="utf-8").splitlines())}


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


def _plan(cuts: Sequence[int], types: Sequence[str], nodes: Sequence[str] | None = None) -> Plan:
    """Return a plan of 16-bit stages ``[cuts[i], cuts[i + 1])``; its estimates are not used."""
    groups: dict[str, list[DeviceGroup]] = {}
    for name, kind in zip(nodes or ["here"] * len(types), types, strict=True):
        threads = 1 if kind == "cpu" else None
        groups.setdefault(name, []).append(DeviceGroup(type=kind, count=1, threads=threads))
    hosts = tuple(Node(name=name, devices=tuple(own)) for name, own in groups.items())
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
        cluster=Cluster(name="here", nodes=hosts),
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
