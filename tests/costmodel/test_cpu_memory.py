"""A CPU worker's temporaries against the tensors that are alive while layers run."""

from __future__ import annotations

import json

import pytest
import torch
from helpers.live_tensors import LiveTensors
from helpers.tiny_configs import stored_fields, tiny_config

from llmpq.batching.blocks import blocks_of, slot_blocks
from llmpq.costmodel import memory
from llmpq.costmodel.memory import (
    MASTER_BYTES,
    ForwardShape,
    context_bytes,
    live_bytes,
    loading_bytes,
    temporary_bytes,
)
from llmpq.dist.engine.executor import StageRunner, slot_row
from llmpq.dist.kv.cache import KVCache
from llmpq.models import DecoderStage, PackedBatch, build_layer, kv_shapes, load_config
from llmpq.quant.modules.latent import absorb_latents_
from llmpq.quant.modules.layer import fuse_norms_, quantize_layer_
from llmpq.spec import catalog
from llmpq.spec.huggingface.families import load_model_dir, model_from_config
from llmpq.spec.plan import MicroBatching
from llmpq.spec.runtime_constants import kept_blocks
from llmpq.spec.workload import Workload

torch.set_num_threads(1)

OPT_30B = catalog.model("facebook/opt-30b")


SIZES = {
    "hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 8, "vocab_size": 100,
    "max_position_embeddings": 512,
}  # fmt: skip
GATED = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 352}
LIVE = {
    "llama": {**GATED, "model_type": "llama"},
    "qwen2": {**GATED, "model_type": "qwen2"},
    "qwen3": {**GATED, "model_type": "qwen3", "head_dim": 16},
    "gemma2": {**GATED, "model_type": "gemma2", "head_dim": 16},
    "mixtral": {**GATED, "model_type": "mixtral"},
    "phi": {**SIZES, "model_type": "phi", "intermediate_size": 512},
    "opt": {**SIZES, "model_type": "opt", "ffn_dim": 512},
    "bloom": {
        "model_type": "bloom", "hidden_size": 128, "n_layer": 1, "n_head": 8, "vocab_size": 100,
    },
}  # fmt: skip


SIZES_OF_A_PROMPT = {
    **SIZES, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "intermediate_size": 176,
    "query_pre_attn_scalar": 16, "moe_intermediate_size": 48,
}  # fmt: skip


# Prompts of one length run together, and of different lengths row by row.
PREFILL = (4, 250, [0] * 4, [250] * 4)
RAGGED = (4, 250, [0] * 4, [250, 249, 248, 247])
DECODE = (8, 1, [299 - row for row in range(8)], [1] * 8)


def lived_bytes(folder, step, *, bits, dtype, kv_bits, size=1.0):
    """Return the most bytes of tensors alive while one layer runs, its input among them.

    ``size`` is that of the input's numbers; at 0 every token goes to the same experts.
    """
    config = load_config(folder)
    layer = build_layer(config, 0).to_empty(device="cpu")
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    quantize_layer_(layer, bits, dtype)
    fuse_norms_(layer)
    stage = DecoderStage(config, [layer], 0)
    cache = KVCache(kv_shapes(config, 0, 1), 0, num_blocks=8 * 19, dtype=dtype, kv_bits=kv_bits)
    rows, _, starts, counts = step
    tables = [slot_blocks(slot, 300, 300) for slot in reversed(range(rows))]
    batch = PackedBatch(block_tables=tables, starts=starts, counts=counts)
    hidden = (torch.randn(1, batch.tokens, 128) * size).to(dtype)
    cache.view(batch)  # the first one looks for the processor's kernels
    with LiveTensors() as live:
        stage(hidden, batch, cache)
    return live.peak + hidden.nbytes


def counted_bytes(folder, step, *, dtype, kv_bits):
    """Return what the cost model counts for the same step."""
    rows, width, starts, _ = step
    name = str(dtype).removeprefix("torch.")
    width_bits = kv_bits or 8 * dtype.itemsize
    return live_bytes(
        ForwardShape(
            model=load_model_dir(folder),
            dtype=name,
            kv_bits=width_bits,
            batch=rows,
            tokens=width,
            context=starts[0] + width,
        )
    )


@pytest.mark.parametrize("kv_bits", [None, 8, 4])
@pytest.mark.parametrize("step", [PREFILL, RAGGED, DECODE], ids=["prefill", "ragged", "decode"])
@pytest.mark.parametrize("family", LIVE)
def test_the_bound_covers_the_tensors_that_are_alive(tmp_path, family, step, kv_bits):
    (tmp_path / "config.json").write_text(json.dumps(LIVE[family]))
    lived = lived_bytes(tmp_path, step, bits=3, dtype=torch.bfloat16, kv_bits=kv_bits)
    counted = counted_bytes(tmp_path, step, dtype=torch.bfloat16, kv_bits=kv_bits)
    assert lived <= 1.01 * counted
    assert counted <= 2.2 * lived


@pytest.mark.parametrize("bits", [16, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "opt", "bloom", "mixtral"])
def test_the_bound_covers_every_dtype_and_bitwidth(tmp_path, family, dtype, bits):
    (tmp_path / "config.json").write_text(json.dumps(LIVE[family]))
    counted = counted_bytes(tmp_path, PREFILL, dtype=dtype, kv_bits=None)
    lived = 0
    for step in (RAGGED, PREFILL):
        lived = lived_bytes(tmp_path, step, bits=bits, dtype=dtype, kv_bits=None)
        assert lived <= 1.01 * counted
        assert counted <= 2.2 * lived
    predicted = temporary_bytes(
        load_model_dir(tmp_path),
        Workload(batch=8, prompt_tokens=250, new_tokens=50),
        MicroBatching(prefill=4, decode=8),
        dtype=str(dtype).removeprefix("torch."),
        device_kind="cpu",
        is_master=False,
    )
    decoding = lived_bytes(tmp_path, DECODE, bits=bits, dtype=dtype, kv_bits=None)
    assert max(lived, decoding) <= predicted
    assert predicted < 6 * max(lived, decoding)


@pytest.mark.parametrize("kv_bits", [None, 8, 4])
@pytest.mark.parametrize("family", LIVE)
def test_a_longer_context_of_a_chunk_takes_what_is_counted(tmp_path, family, kv_bits):
    (tmp_path / "config.json").write_text(json.dumps(LIVE[family]))
    sizes = [(1, 40, [before], [40]) for before in (256, 160)]
    long, short = (
        lived_bytes(tmp_path, size, bits=16, dtype=torch.float32, kv_bits=kv_bits, size=0.0)
        for size in sizes
    )
    counted = context_bytes(load_model_dir(tmp_path), "float32", 96, "cpu")
    assert 0.5 * counted <= long - short <= counted


WINDOW = {"sliding_window": 100, "num_key_value_heads": 2}
LONG = {
    "llama": ("llama", {}),
    "bloom": ("bloom", {}),
    "a window": ("mistral", WINDOW),
    "windows and capped scores": ("gemma2", WINDOW),
    "windows and sinks": ("gpt_oss", WINDOW),
    "latent vectors": ("deepseek_v3", {}),
}  # fmt: skip


@pytest.mark.parametrize("attends", [True, False], ids=["in place", "gathered"])
@pytest.mark.parametrize("case", LONG)
def test_a_prompt_of_three_chunks_is_within_the_bound(tmp_path, monkeypatch, case, attends):
    """3,000 tokens: the outputs of the chunks are joined, beside the message with its input."""
    if not attends:  # heads that the kernel does not take
        monkeypatch.setattr("llmpq.dist.kv.cache.can_attend", lambda *_: False)
        monkeypatch.setattr(memory, "fits_kernel", lambda _: False)
        monkeypatch.setattr(memory, "absorbs_latents", lambda _: False)
    model_type, changes = LONG[case]
    span = {"num_hidden_layers": 1, "max_position_embeddings": 4096, "n_layer": 1}
    fields = stored_fields(tiny_config(model_type, {**SIZES_OF_A_PROMPT, **span}, **changes))
    (tmp_path / "config.json").write_text(json.dumps(fields))
    model, config = load_model_dir(tmp_path), load_config(tmp_path)
    layer = build_layer(config, 0).to_empty(device="cpu")
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    quantize_layer_(layer, 16, torch.bfloat16)
    fuse_norms_(layer)
    tokens, window = 3000, model.window_tokens
    cache = KVCache(
        kv_shapes(config, 0, 1),
        0,
        num_blocks=blocks_of(tokens),
        num_window_blocks=None if window is None else kept_blocks(tokens, window),
        dtype=torch.bfloat16,
    )
    stage = DecoderStage(config, [layer], 0)
    stage.absorbs_latents = absorb_latents_(stage, torch.bfloat16)
    device = torch.device("cpu")
    runner = StageRunner(layers=stage, cache=cache, device=device, is_last=False)
    hidden = torch.randn(1, tokens, model.hidden_size).to(torch.bfloat16)
    with LiveTensors() as live:
        runner.run(hidden, [slot_row(0, (0, tokens), tokens, window=window)])
    step = ForwardShape.of_prompts(model, "bfloat16", 16, 1, tokens)
    counted = step.message + step.joined + live_bytes(step)
    lived = hidden.nbytes + live.peak
    assert lived <= 1.01 * counted
    # What is gathered is counted of the whole context, whatever the window.
    assert counted <= (2.2 if attends else 3.5) * lived


def test_a_long_context_takes_no_memory_where_blocks_are_read_in_place():
    def of(head_dim, context):
        config = {**LIVE["llama"], "head_dim": head_dim}
        model = model_from_config(config, "m", "here")
        return live_bytes(
            ForwardShape(
                model=model, dtype="bfloat16", kv_bits=16, batch=8, tokens=1, context=context
            )
        )  # fmt: skip

    assert of(16, 64) == of(16, 4096)
    assert of(20, 4096) > 8 * 4096 * 2 * 2 * 40  # picked: two of 2 bytes for each of 2 heads of 20


def peak(model, workload, micro_batching, *, dtype="bfloat16", **known):
    sizes = MicroBatching(prefill=micro_batching, decode=micro_batching)
    known = {"is_master": False, **known}
    return temporary_bytes(model, workload, sizes, dtype=dtype, device_kind="cpu", **known)


def test_the_peak_of_loading_excludes_blocks():
    model = model_from_config(LIVE["opt"], "m", "here")
    work = Workload(batch=1, prompt_tokens=4, new_tokens=2)

    def of(kv_bytes):
        return peak(model, work, 1, kv_bytes=kv_bytes)

    loading, step = of(0), of(10**12)
    assert loading == loading_bytes(model) > step > 0
    for kv_bytes in (1, loading // 2, loading - step, loading):
        assert of(kv_bytes) + kv_bytes == max(loading, step + kv_bytes)


@pytest.mark.parametrize(("prompt", "places"), [(10, 1), (1000, 2)])
def test_hidden_states_are_held_for_every_link_of_a_stage(prompt, places):
    model = model_from_config(LIVE["opt"], "m", "here")
    work = Workload(batch=4, prompt_tokens=prompt, new_tokens=2)
    of_a_link = places * 4 * prompt * 128 * 2  # 10 KiB travel in the stream, 1 MiB is shared
    held = {"kv_bytes": 10**9}  # more than loading takes
    middle, last = peak(model, work, 4, **held), peak(model, work, 4, is_last=True, **held)
    assert middle - last == of_a_link
    first = peak(model, work, 4, is_master=True, **held)
    assert first - last == MASTER_BYTES
    alone = peak(model, work, 4, is_master=True, is_last=True, **held)
    assert first - alone == of_a_link - 4 * prompt * 128 * 2  # its embedded tokens


def test_a_small_step_takes_the_peak_of_loading():
    tiny = Workload(batch=1, prompt_tokens=1, new_tokens=1)
    assert peak(OPT_30B, tiny, 1, dtype="float16") == loading_bytes(OPT_30B)
    assert loading_bytes(OPT_30B) == 3 * 2 * 7168 * 4 * 7168  # three matrices at 16 bits


def test_an_expert_is_counted_on_twice_its_share_of_the_rows(monkeypatch):
    monkeypatch.setattr(memory, "compiled_bytes", lambda _: 0)  # whose slots are those of all
    fewer, more = (
        model_from_config({**LIVE["mixtral"], "num_local_experts": count}, "m", "here")
        for count in (4, 64)
    )
    work = Workload(batch=8, prompt_tokens=30, new_tokens=2)
    dense = model_from_config(LIVE["llama"], "m", "here")
    sizes = [peak(one, work, 8) for one in (dense, fewer, more)]
    # With 4 experts, 2 of them chosen, one of them may see every row.
    assert sizes[0] <= sizes[1]
    assert sizes[2] < sizes[1]
