"""Steps in one compiled call, against transformers' generate and the layers themselves."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch
from helpers.decode_steps import (
    HAS_STEPS,
    batch_of,
    cache_of,
    compiled,
    generate,
    random_prompts,
)
from helpers.instruction_sets import OWN, RUNNABLE, those, using
from helpers.tiny_models import generate_alone, load_reference

from llmpq.costmodel.memory import ForwardShape, compiled_bytes
from llmpq.dist.engine import compiled_steps
from llmpq.dist.engine.compiled_steps import (
    LIMITS,
    CompiledSteps,
    checked_layers,
    step_runner_of,
)
from llmpq.dist.kv.cache import KVCache
from llmpq.kernels.cpu.step import FEW_ROWS
from llmpq.models import PackedBatch, kv_shapes
from llmpq.quant.loading.loader import load_stage
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.runtime_constants import STEP_ROWS

pytestmark = pytest.mark.skipif(not HAS_STEPS, reason="needs AVX2 and a C compiler")

SHAPE = {"layers": 2, "hidden": 128, "intermediate": 192, "heads": 4, "kv_heads": 2}
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 5},
    "qwen2": {},
    "qwen3": {},
}
OLDER = those([name for name in RUNNABLE if name not in (OWN, "baseline")], "older processor")
ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "relu")
LENGTHS = (3, 21, 1, 16, 9)


def _stage(tiny_model, family, bits=16, dtype=torch.float32):
    path = tiny_model(family, shape=SHAPE, **FAMILIES.get(family, {}))
    return path, load_stage(path, 0, 2, [bits] * 2, dtype=dtype, device="cpu")


@pytest.mark.parametrize(
    ("family", "threads"), [("llama", 2), ("mistral", 1), ("qwen2", 2), ("qwen3", 1)]
)
def test_tokens_are_those_of_generate(tiny_model, family, threads):
    path, stage = _stage(tiny_model, family)
    steps, reference = compiled(stage, cache_of(stage)), load_reference(path)
    prompts = random_prompts(LENGTHS)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rows = generate(path, steps, prompts, 5)
    finally:
        torch.set_num_threads(before)
    assert rows == [generate_alone(reference, prompt, 5)[0] for prompt in prompts]


@pytest.mark.parametrize(("bits", "kv_bits"), [(3, 8), (4, 16), (8, 8), (8, 4), (8, 16), (16, 16)])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_numbers_are_those_of_the_layers(tiny_model, bits, kv_bits, rows, dtype):
    path = tiny_model("qwen2", shape=SHAPE, seed=3)
    _check_numbers(path, bits, kv_bits, rows, dtype)


@pytest.mark.parametrize("name", OLDER)
@pytest.mark.parametrize(("bits", "kv_bits"), [(3, 16), (4, 8), (4, 4), (16, 16)])
def test_bf16_numbers_are_those_of_the_layers_on_older_processors(tiny_model, name, bits, kv_bits):
    path = tiny_model("qwen2", shape=SHAPE, seed=3)
    with using(name):
        _check_numbers(path, bits, kv_bits, 5, torch.bfloat16)


@pytest.mark.parametrize("name", OLDER)
@pytest.mark.parametrize(("bits", "kernel"), [(4, "cpu_packed_int8"), (16, None)])
def test_float32_numbers_are_those_of_the_layers_on_older_processors(
    tiny_model, name, bits, kernel
):
    path = tiny_model("qwen3", shape=SHAPE, seed=3)
    with using(name):
        _check_numbers(path, bits, None, 3, torch.float32, kernel)


@pytest.mark.parametrize("name", OLDER)
@pytest.mark.parametrize("kernel", ["cpu_llm_int8", "cpu_packed"])
def test_products_of_8_bits_run_in_compiled_steps_on_older_processors(tiny_model, name, kernel):
    path = tiny_model("llama", shape=SHAPE, seed=3)
    with using(name):
        _check_numbers(path, 8, 16, 3, torch.bfloat16, kernel)


def _check_numbers(path, bits, kv_bits, rows, dtype, kernel=None):
    """Compare three steps with the layers, whose functions of e^x differ in the last place."""
    stage = load_stage(path, 0, 2, [bits] * 2, dtype=dtype, device="cpu", backend=kernel)
    caches = cache_of(stage, kv_bits, dtype), cache_of(stage, kv_bits, dtype)
    steps = compiled(stage, caches[0])
    generator = torch.Generator().manual_seed(2)
    lengths = LENGTHS[:rows]
    prompt = torch.randn(1, sum(lengths), 128, generator=generator).to(dtype)
    prompt[0, :, 5] *= 40  # outliers of LLM.int8()
    for cache in caches:
        stage(prompt, batch_of(lengths, list(lengths)), cache)
    for step in range(1, 4):
        hidden = prompt[:, :rows] * step
        batch = batch_of([length + step for length in lengths], [1] * rows)
        found = steps.forward(hidden, batch)
        expected = stage(hidden, batch, caches[1])
        added = (expected - hidden).float().norm()
        # The last place of float32 seldom decides what is rounded to fewer bits.
        limit = 1e-5 if dtype == torch.float32 and bits == 16 else 0.004
        assert (found - expected).float().norm() < limit * added
        for layer in range(2):
            stored = [cache.heads_of(layer).keys.float() for cache in caches]
            torch.testing.assert_close(*stored, rtol=0.02, atol=1.0 if kv_bits == 8 else 0.02)


@pytest.mark.parametrize(
    ("dtype", "kv_bits"), [(torch.float32, None), (torch.bfloat16, 8), (torch.bfloat16, 4)]
)
def test_rows_may_be_consecutive_tokens_of_a_sequence(tiny_model, monkeypatch, dtype, kv_bits):
    _, stage = _stage(tiny_model, "mistral", 8 if kv_bits else 16, dtype)
    caches = cache_of(stage, kv_bits, dtype), cache_of(stage, kv_bits, dtype)
    steps = compiled(stage, caches[0])
    generator = torch.Generator().manual_seed(4)
    prompt = torch.randn(1, 14 + 3, 128, generator=generator).to(dtype)
    for cache in caches:
        stage(prompt, batch_of([14, 3], [14, 3]), cache)
    hidden = torch.randn(1, 7, 128, generator=generator).to(dtype)
    # Four tokens of the first sequence, on both sides of a block's end, and three of the other.
    tables = [[23, 22]] * 4 + [[19]] * 3
    places = [14, 15, 16, 17, 3, 4, 5]
    batch = PackedBatch(block_tables=tables, starts=places, counts=[1] * 7)
    monkeypatch.setattr(stage, "forward", lambda *_: pytest.fail("not compiled"))
    found = steps.forward(hidden, batch)
    monkeypatch.undo()
    chunks = PackedBatch(block_tables=[[23, 22], [19]], starts=[14, 3], counts=[4, 3])
    expected = stage(hidden, chunks, caches[1])
    added = (expected - hidden).float().norm()
    assert (found - expected).float().norm() < (1e-5 if dtype == torch.float32 else 0.02) * added


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_other_activations_are_recognized_by_their_values(tiny_model, activation):
    path = tiny_model("llama", shape=SHAPE, hidden_act=activation)
    stage = load_stage(path, 0, 2, [16] * 2, dtype=torch.float32, device="cpu")
    compiled(stage, cache_of(stage))  # compares every layer with the module's own activation


def _damage_activation(layer):
    forward = layer.mlp.forward
    layer.mlp.forward = lambda x: forward(x) * 1.01


def _damage_norm(layer):
    norm = layer.post_attention_layernorm
    norm.forward = lambda x: type(norm).forward(norm, x) + 0.01


def _damage_residual(layer):
    forward = layer.forward
    layer.forward = lambda hidden, **kwargs: forward(hidden, **kwargs) + 0.01 * hidden


@pytest.mark.parametrize("damage", [_damage_activation, _damage_norm, _damage_residual])
def test_a_layer_that_computes_something_else_runs_as_it_is(tiny_model, damage, caplog):
    _, stage = _stage(tiny_model, "llama")
    cache = cache_of(stage)
    assert step_runner_of(stage, cache) is not None
    damage(stage.layers[1])
    with caplog.at_level(logging.INFO, logger="llmpq"):
        assert step_runner_of(stage, cache) is None
    assert "layer 1: computes something else" in caplog.text


def test_layers_of_every_kind_are_checked(tiny_model):
    shape = {**SHAPE, "layers": 8, "hidden": 32, "intermediate": 64, "heads": 2, "kv_heads": 1}
    path = tiny_model("llama", shape=shape)
    bits = [8, 4, 8, 8, 4, 8, 8, 8]
    stage = load_stage(path, 0, 8, bits, dtype=torch.float32, device="cpu")
    assert checked_layers(stage) == [0, 1, 2, 4, 7]
    stage.layers[5].self_attn.scaling *= 2
    assert checked_layers(stage) == [0, 1, 2, 4, 5, 7]
    stage.layers[3].mlp.act_fn.forward = torch.nn.functional.gelu
    stage.layers[6].mlp.act_fn.forward = lambda x: x
    assert checked_layers(stage) == [0, 1, 2, 3, 4, 5, 6, 7]


def test_wrong_addresses_are_found(tiny_model, monkeypatch):
    _, stage = _stage(tiny_model, "llama")
    append = compiled_steps.append_layer

    def swapped(program, layer, step):
        rotary = None if step.rotary is None else step.rotary[::-1]
        append(program, layer, dataclasses.replace(step, rotary=rotary))

    monkeypatch.setattr(compiled_steps, "append_layer", swapped)
    assert step_runner_of(stage, cache_of(stage)) is None


def test_many_rows_of_plain_weights_run_operator_by_operator(tiny_model, monkeypatch):
    _, stage = _stage(tiny_model, "llama")
    steps = compiled(stage, cache_of(stage))
    assert not steps.takes_prompts
    monkeypatch.setattr(CompiledSteps, "run", lambda *_: pytest.fail("compiled"))
    hidden = torch.randn(1, FEW_ROWS + 1, 128, generator=torch.Generator().manual_seed(4))
    prompt = PackedBatch(block_tables=[range(5)], starts=[0], counts=[FEW_ROWS + 1])
    assert torch.equal(steps.forward(hidden, prompt), stage(hidden, prompt, cache_of(stage)))
    tables = [[i % 24] for i in range(FEW_ROWS + 1)]
    starts = [i // 24 for i in range(FEW_ROWS + 1)]
    steps.forward(hidden, PackedBatch(block_tables=tables, starts=starts, counts=[1] * len(tables)))


PROMPTS = ((40, 40), (9, 9), (30, 1), (48, 18), (21, 21))
"""Tokens of each row and how many of them are new: prompts, a decode row, a chunk."""


@pytest.mark.parametrize("most", [STEP_ROWS, 32, 17])
@pytest.mark.parametrize(
    ("family", "bits", "kv_bits"),
    [("llama", 4, 16), ("mistral", 3, 8), ("qwen3", 8, 16), ("qwen2", 8, 8), ("llama", 8, 4)],
)
def test_prompts_are_those_of_the_layers(tiny_model, monkeypatch, family, bits, kv_bits, most):
    _, stage = _stage(tiny_model, family, bits, torch.bfloat16)
    _check_prompts(stage, kv_bits, monkeypatch, most)


@pytest.mark.parametrize("bits", [3, 8, 16])
def test_prompts_in_float16_are_those_of_the_layers(tiny_model, monkeypatch, bits):
    _, stage = _stage(tiny_model, "llama", bits, torch.float16)
    _check_prompts(stage, 16, monkeypatch, 32, torch.float16)


@pytest.mark.parametrize("bits", [4, 16])
@pytest.mark.parametrize("name", OLDER)
def test_prompts_are_those_of_the_layers_on_older_processors(tiny_model, monkeypatch, name, bits):
    with using(name):
        _, stage = _stage(tiny_model, "mistral", bits, torch.bfloat16)
        _check_prompts(stage, 8, monkeypatch, 32)


def _check_prompts(stage, kv_bits, monkeypatch, most, dtype=torch.bfloat16):
    """Compare a step of prompts and others with the layers, ``most`` tokens at a time."""
    caches = cache_of(stage, kv_bits, dtype), cache_of(stage, kv_bits, dtype)
    steps = compiled(stage, caches[0])
    assert steps.takes_prompts
    monkeypatch.setattr(steps._program, "most_rows", most)
    lengths, counts = zip(*PROMPTS, strict=True)
    generator = torch.Generator().manual_seed(5)
    before = [length - count for length, count in PROMPTS if length > count]
    rows = [row for row, (length, count) in enumerate(PROMPTS) if length > count]
    whole = batch_of(lengths, counts)
    earlier = PackedBatch(
        block_tables=[whole.block_tables[row] for row in rows],
        starts=[0] * len(rows),
        counts=before,
    )
    hidden = torch.randn(1, sum(before), 128, generator=generator).to(dtype)
    for cache in caches:
        stage(hidden, earlier, cache)
    hidden = torch.randn(1, sum(counts), 128, generator=generator).to(dtype)
    hidden[0, :, 5] *= 40  # outliers of LLM.int8()
    expected = stage(hidden, whole, caches[1])
    with monkeypatch.context() as patch:
        patch.setattr(stage, "forward", lambda *_: pytest.fail("not compiled"))
        found = steps.forward(hidden, whole)
    added = (expected - hidden).float().norm()
    assert (found - expected).float().norm() < 0.004 * added
    for layer in range(2):
        stored = [cache.heads_of(layer).keys.float() for cache in caches]
        torch.testing.assert_close(*stored, rtol=0.02, atol=1.0 if kv_bits == 8 else 0.02)


def test_positions_beyond_the_first_table_of_angles(tiny_model):
    path = tiny_model("llama", shape={**SHAPE, "max_positions": 4096})
    stage = load_stage(path, 0, 2, [16] * 2, dtype=torch.float32, device="cpu")
    shapes = kv_shapes(stage.config, 0, 2)
    caches = [KVCache(shapes, 0, num_blocks=80, dtype=torch.float32) for _ in range(2)]
    steps = compiled(stage, caches[0])
    hidden = torch.randn(1, 1, 128, generator=torch.Generator().manual_seed(5))
    for position in (1100, 1200):
        batch = PackedBatch(block_tables=[range(80)], starts=[position], counts=[1])
        found, expected = steps.forward(hidden, batch), stage(hidden, batch, caches[1])
        added = (expected - hidden).norm()
        assert (found - expected).norm() < LIMITS[torch.float32] * added


@pytest.mark.parametrize(
    ("family", "bits"),
    [("llama", 4), ("llama", 8), ("qwen3", 3), ("opt", 4), ("phi3", 4), ("mixtral", 4)],
)
def test_memory_of_buffers_is_forecast(tiny_model, family, bits):
    path, stage = _stage(tiny_model, family, bits, torch.bfloat16)
    program = compiled(stage, cache_of(stage, dtype=torch.bfloat16))._program
    model = load_model_dir(path)
    tokens = program.most_rows  # and no outliers: their buffers are reserved, not touched
    buffers = {key: one.nbytes for key, one in program._buffers.items() if "outlier" not in key[0]}
    step = ForwardShape(
        model=model, dtype="bfloat16", kv_bits=16, batch=1, tokens=tokens, context=tokens
    )
    # Two bytes a code are counted, for processors that multiply 8 bits without VNNI; codes of
    # fewer bits have a byte, and 5 in 32 for scales and sums.
    codes = sum(size for key, size in buffers.items() if key[0] == "codes" and key[3].itemsize == 1)
    unused = codes if bits == 8 else 27 * codes // 32
    assert 0.99 < (compiled_bytes(step) - unused) / sum(buffers.values()) < 1.1, buffers
