"""What serving does, at the sizes of an 8-billion-parameter Llama: four of its layers."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

from llmpq.batching.blocks import blocks_of
from llmpq.dist.engine.cuda_graphs import CudaCapture, DecodeGraphs, DecodeSizes
from llmpq.dist.engine.engine import Choice, SamplingState, ScoredRows
from llmpq.dist.io.sampling_params import SamplingParams
from llmpq.dist.kv.cache import KVCache
from llmpq.kernels.gpu.paged_decode import DecodeRows, attend
from llmpq.kernels.gpu.triton_int import launch_failure
from llmpq.models import DecoderStage, KVShape, PackedBatch, kv_shapes
from llmpq.models.adapter import Skeleton
from llmpq.quant.loading.loader import load_stage
from llmpq.quant.modules.layer import fuse_norms_, quantize_layer_, stored_bytes
from scripts.gpu_checks.harness import FailedError, Row, Setting, SkippedError
from scripts.gpu_checks.machine import best_s, copied_bytes_per_s

LAYERS = 4
BITS = (16, 8, 4, 3)
STEPS = ((1, 1024), (16, 1024), (64, 1024), (1, 8192), (16, 8192))
"""Rows and tokens of each of the timed decode steps."""
VOCABULARY = 128_256
SHOWN_KERNELS = 12
MOST_GROWTH = 1.1
"""Most memory of any graphs, in that of the largest for short sequences."""
MOST_ATTENTION_ERROR = 0.02
"""Of the norm of the outputs: weights and results are rounded to bf16."""


def step(setting: Setting) -> Iterator[Row]:
    """Decode steps at each bitwidth: ms in graphs and without, GB/s of weights and KV, kernels."""
    copied = 2 * copied_bytes_per_s(setting.device)
    yield {"bits": "copy", "GB/s": copied / 1e9}
    for bits in BITS[:1] if setting.is_quick else BITS:
        stage = random_stage(setting, bits)
        for rows, tokens in ((2, 128),) if setting.is_quick else STEPS:
            for row in _one_shape(setting, stage, rows, tokens):
                share = {"share of copy": row["GB/s"] * 1e9 / copied} if "GB/s" in row else {}
                yield {"bits": bits, "rows": rows, "tokens": tokens} | row | share


def _one_shape(setting: Setting, stage: DecoderStage, rows: int, tokens: int) -> Iterator[Row]:
    """Time one shape; profile one of them."""
    device = setting.device
    cache = _cache(setting, stage, rows * blocks_of(tokens + 1))
    batch, hidden = _decode_step(setting, stage, rows, tokens)

    def run_layers() -> object:
        return stage(hidden, batch, cache)

    spent_s = best_s(run_layers, device)
    row: Row = {"eager ms": 1e3 * spent_s}
    if device.type == "cuda":
        graphs = DecodeGraphs(stage, cache, capture=CudaCapture(device))
        graphs.capture([rows], tokens + 1)
        row["graph ms"] = None
        if graphs.shapes:
            spent_s = best_s(lambda: graphs.forward(hidden, batch), device)
            row["graph ms"] = 1e3 * spent_s
        row["reserved GB"] = torch.cuda.memory_reserved(device) / 1e9
    read = stored_bytes(stage) + cache.nbytes * tokens * rows // cache.num_tokens
    yield row | {"GB/s": read / spent_s / 1e9}
    if device.type == "cuda" and (rows, tokens) == STEPS[1]:
        yield from _kernels_of(run_layers)


def _kernels_of(work: Callable[[], object]) -> Iterator[Row]:
    """Profile one uncaptured step: how many kernels, and those that take longest."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        work()
        torch.cuda.synchronize()
    kernels = [
        one for one in profile.key_averages() if one.device_type == torch.autograd.DeviceType.CUDA
    ]
    count = sum(one.count for one in kernels)
    total_us = sum(one.self_device_time_total for one in kernels)
    yield {"kernels": count, "kernel": "all", "kernel ms": total_us / 1e3}
    kernels.sort(key=lambda one: -one.self_device_time_total)
    for one in kernels[:SHOWN_KERNELS]:
        spent_ms = one.self_device_time_total / 1e3
        yield {"kernels": one.count, "kernel": one.key[:60], "kernel ms": spent_ms}


def growth(setting: Setting) -> Iterator[Row]:
    """Memory that graphs take for sequences of 1k to 8k tokens, and that of all numbers of rows."""
    device = setting.device
    if device.type != "cuda":
        raise SkippedError("a CPU captures nothing")
    rows, lengths = (4, (128, 256)) if setting.is_quick else (16, (1024, 2048, 4096, 8192))
    stage = random_stage(setting, 16)
    cache = _cache(setting, stage, rows * blocks_of(max(lengths)))
    held = []
    for shapes, tokens in [
        *(((rows,), tokens) for tokens in lengths),
        (DecodeSizes(rows=rows, most_tokens=max(lengths)).shapes(), max(lengths)),
    ]:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(device)
        graphs = DecodeGraphs(stage, cache, capture=CudaCapture(device))
        start = time.perf_counter()
        graphs.capture(shapes, tokens)
        spent_s = time.perf_counter() - start
        torch.cuda.empty_cache()
        held.append(torch.cuda.memory_reserved(device) - before)
        yield {
            "shapes": len(graphs.shapes), "tokens": tokens, "held GB": held[-1] / 1e9, "s": spent_s
        }  # fmt: skip
        if len(graphs.shapes) < len(shapes):
            raise FailedError("some shapes were not captured; the reason is in the standard error")
        del graphs
    if max(held) > MOST_GROWTH * held[0]:
        raise FailedError(f"graphs hold up to {max(held) / held[0]:.2f} times what the first holds")


def attention(setting: Setting) -> Iterator[Row]:
    """Decode attention of one layer on blocks in place: ms, GB/s of KV, error against float64."""
    device = setting.device
    config = KVShape(heads=8, head_dim=128)
    missing = launch_failure(device, torch.bfloat16)
    if missing is not None:
        raise SkippedError(missing)
    copied = 2 * copied_bytes_per_s(device)
    steps = ((2, 128),) if setting.is_quick else (*STEPS, (64, 8192))
    for kv_bits in (None, 8):
        for rows, tokens in steps:
            blocks = blocks_of(tokens)
            cache = KVCache(
                [config], 0, num_blocks=rows * blocks, dtype=torch.bfloat16, device=device,
                kv_bits=kv_bits,
            )  # fmt: skip
            _fill(setting, cache, rows, tokens)
            order = torch.randperm(rows * blocks, device=device).int()
            where = DecodeRows(
                tables=order.view(rows, blocks),
                positions=torch.full((rows,), tokens - 1, dtype=torch.int32, device=device),
            )
            query = _random(setting, (1, 32, rows, 128))
            out = torch.empty(1, rows, 32, 128, dtype=torch.bfloat16, device=device)
            run = partial(attend, query, cache.heads_of(0), where, out, scaling=128**-0.5)
            spent_s = best_s(run, device)
            read = cache.nbytes / spent_s
            error = _attention_error(cache, query[0, :, 0], where.tables[:1], out[0, 0], tokens)
            yield {
                "kv bits": kv_bits or 16, "rows": rows, "tokens": tokens, "ms": 1e3 * spent_s,
                "GB/s": read / 1e9, "share of copy": read / copied, "error": error,
            }  # fmt: skip
            if not error < MOST_ATTENTION_ERROR:
                raise FailedError(f"an error above {MOST_ATTENTION_ERROR}")


def _fill(setting: Setting, cache: KVCache, rows: int, tokens: int) -> None:
    """Store random keys and values in all blocks, a row at a time."""
    width = blocks_of(tokens)
    for row in range(rows):
        batch = PackedBatch(
            block_tables=[range(row * width, (row + 1) * width)], starts=[0], counts=[tokens]
        )
        new = _random(setting, (2, 1, 8, tokens, 128))
        cache.view(batch).update(new[0], new[1], 0)


def _attention_error(
    cache: KVCache, query: Tensor, table: Tensor, found: Tensor, tokens: int
) -> float:
    """Return the error of the first row relative to the norm of the answer."""
    keys, values = (
        part[0, :, :tokens].double().repeat_interleave(4, 0)
        for part in cache.layer(0).read(table, torch.bfloat16)
    )
    weights = (torch.einsum("hd,hsd->hs", query.double(), keys) * 128**-0.5).softmax(-1)
    right = torch.einsum("hs,hsd->hd", weights, values)
    return ((found.double() - right).norm() / right.norm()).item()


def mixed(setting: Setting) -> Iterator[Row]:
    """A step of 16 decode rows and a chunk of 512 tokens of a prompt, as servers run it."""
    rows, context, chunk = (2, 32, 32) if setting.is_quick else (16, 1024, 512)
    stage = random_stage(setting, 16)
    width = blocks_of(context + chunk + 1)
    cache = _cache(setting, stage, (rows + 1) * width)
    tables = [range(row * width, (row + 1) * width) for row in range(rows + 1)]
    for name, starts, counts in (
        ("decode rows", [context] * rows, [1] * rows),
        ("first chunk", [0], [chunk]),
        ("later chunk", [context], [chunk]),
        ("decode rows and later chunk", [context] * (rows + 1), [1] * rows + [chunk]),
    ):
        batch = PackedBatch(block_tables=tables[-len(counts) :], starts=starts, counts=counts)
        hidden = _random(setting, (1, sum(counts), stage.config.hidden_size))
        spent_s = best_s(lambda: stage(hidden, batch, cache), setting.device)  # noqa: B023
        yield {"step": name, "tokens": sum(counts), "ms": 1e3 * spent_s}


def sampling(setting: Setting) -> Iterator[Row]:
    """Choosing tokens of a large vocabulary: ms, and waits of the host for the GPU."""
    vocabulary = 1000 if setting.is_quick else VOCABULARY
    kinds = {
        "greedy": SamplingParams(),
        "temperature": SamplingParams(temperature=0.8, seed=1),
        "top_p": SamplingParams(temperature=0.8, top_p=0.9, seed=1),
    }
    for rows in (1, 4) if setting.is_quick else (1, 16, 64):
        logits = torch.randn(rows, vocabulary, device=setting.device)
        for name, params in kinds.items():
            states = [
                SamplingState(params, request=str(row), prompt_token_ids=(1,))
                for row in range(rows)
            ]
            choose = partial(_choose, logits, states)
            spent_s, waits = best_s(choose, setting.device), _waits(choose, setting.device)
            yield {"rows": rows, "kind": name, "ms": 1e3 * spent_s, "waits": waits}


def _choose(logits: Tensor, states: Sequence[SamplingState]) -> None:
    scored = ScoredRows(logits, [Choice(row, state) for row, state in enumerate(states)])
    for row, state in enumerate(states):
        scored.sample(row, state)


def _waits(work: Callable[[], object], device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(one.message) for one in caught)


def prompts(setting: Setting) -> Iterator[Row]:
    """Prompts of 20 lengths, twice each, with and without cuDNN's attention: seconds of a pass.

    A first pass that takes much longer than the second builds something for every length.
    """
    lengths = range(20, 24) if setting.is_quick else range(200, 1000, 40)
    stage = random_stage(setting, 16)
    cache = _cache(setting, stage, blocks_of(max(lengths) + 2))
    for cudnn in (False, True):
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        for part in ("whole prompts", "later chunks"):
            spent_s = []
            for _ in range(2):
                _synchronize(setting.device)
                start = time.perf_counter()
                for length in lengths:
                    first = 0 if part == "whole prompts" else 16
                    # Lengths of their own for each way: what is built for one is not met again.
                    own = length + 2 * cudnn
                    batch = PackedBatch(
                        block_tables=[range(cache.num_blocks)], starts=[first], counts=[own - first]
                    )
                    stage(
                        _random(setting, (1, own - first, stage.config.hidden_size)), batch, cache
                    )
                _synchronize(setting.device)
                spent_s.append(time.perf_counter() - start)
            yield {
                "step": part,
                "cuDNN": "allowed" if cudnn else "disabled, as in a rank",
                "first pass s": spent_s[0],
                "second pass s": spent_s[1],
            }


def loading(setting: Setting) -> Iterator[Row]:
    """Loading four layers of a bfloat16 checkpoint at each bitwidth: seconds, and GB/s read."""
    stage = random_stage(setting, 16)
    folder = setting.folder / "model"
    folder.mkdir()
    size = sum(tensor.nbytes for tensor in _checkpoint(stage).values())
    save_file(_checkpoint(stage), folder / "model.safetensors")
    config = stage.config.to_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    del stage
    for bits in (16, *BITS):  # the first one reads the file into memory
        taken = []
        for _ in range(2):
            _synchronize(setting.device)
            start = time.perf_counter()
            load_stage(
                folder, 0, LAYERS, [bits] * LAYERS, dtype=torch.bfloat16, device=setting.device
            )
            _synchronize(setting.device)
            taken.append(time.perf_counter() - start)
        yield {
            "bits": bits,
            "first s": taken[0],
            "second s": taken[1],
            "GB/s": size / taken[1] / 1e9,
        }


def _checkpoint(stage: DecoderStage) -> dict[str, Tensor]:
    config = stage.config
    shape = (config.vocab_size, config.hidden_size)
    found = {
        "model.embed_tokens.weight": torch.zeros(shape, dtype=torch.bfloat16),
        "lm_head.weight": torch.zeros(shape, dtype=torch.bfloat16),
        "model.norm.weight": torch.ones(config.hidden_size, dtype=torch.bfloat16),
    }
    for index, layer in enumerate(stage.layers):
        for name, tensor in layer.state_dict().items():
            found[f"model.layers.{index}.{name}"] = tensor.detach().to("cpu").contiguous()
    return found


def random_stage(setting: Setting, bits: int) -> DecoderStage:
    """Return four layers of Llama-3-8B's sizes with random weights, made on the device."""
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
        num_hidden_layers=LAYERS, vocab_size=1000, max_position_embeddings=16384,
    )  # fmt: skip
    if setting.is_quick:
        config = LlamaConfig(
            hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2,
            num_hidden_layers=LAYERS, vocab_size=100, max_position_embeddings=4096,
        )  # fmt: skip
    config._attn_implementation = "sdpa"
    skeleton = Skeleton.of(config)
    layers = []
    with torch.no_grad():
        for index in range(LAYERS):
            layer = skeleton.build_layer(config, index).to(torch.bfloat16)
            layer.to_empty(device=setting.device)
            for parameter in layer.parameters():
                parameter.normal_(0, 0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
            if bits < 16:
                quantize_layer_(layer, bits, torch.bfloat16)
            fuse_norms_(layer)
            layers.append(layer)
    return DecoderStage(config, layers, 0, skeleton).to(setting.device)


def _cache(setting: Setting, stage: DecoderStage, blocks: int) -> KVCache:
    return KVCache(
        kv_shapes(stage.config, 0, LAYERS), 0, num_blocks=blocks, dtype=torch.bfloat16,
        device=setting.device,
    )  # fmt: skip


def _decode_step(
    setting: Setting, stage: DecoderStage, rows: int, tokens: int
) -> tuple[PackedBatch, Tensor]:
    width = blocks_of(tokens + 1)
    batch = PackedBatch(
        block_tables=[range(row * width, (row + 1) * width) for row in range(rows)],
        starts=[tokens] * rows,
        counts=[1] * rows,
    )
    return batch, _random(setting, (1, rows, stage.config.hidden_size))


def _random(setting: Setting, shape: Sequence[int]) -> Tensor:
    return torch.randn(*shape, device=setting.device, dtype=torch.bfloat16)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
