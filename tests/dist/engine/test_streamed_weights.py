"""Weights that rest on disk: the tokens are those of generate, or of weights in memory."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.online_runs import request
from helpers.ranks import (
    make_plan,
    make_split_plan,
    run_threads,
    serve_script,
    with_weights_on_disk,
)
from helpers.scripted_channel import Script
from helpers.tiny_models import generate_alone, load_reference

from llmpq.dist.engine.compiled_steps import CompiledSteps, step_runner_of
from llmpq.dist.io.prompts import Request
from llmpq.dist.kv.cache import KVCache
from llmpq.errors import SpecError
from llmpq.models import PackedBatch, kv_shapes
from llmpq.options.engine import EngineOptions
from llmpq.quant.loading.loader import load_stage
from llmpq.quant.loading.streaming import read_bytes_per_s
from llmpq.quant.loading.weight_cache import WeightCache
from llmpq.spec.plan import default_schedule
from llmpq.spec.precision import LayerExperts, StageExperts
from llmpq.spec.runtime_constants import STREAM_BUFFERS
from llmpq.units import MIB

torch.set_num_threads(1)

LAYERS = 6
SHAPE = {"layers": LAYERS, "hidden": 128, "intermediate": 192, "heads": 4, "kv_heads": 2}
CUTS = {1: (0, 6), 2: (0, 2, 6), 3: (0, 1, 3, 6)}
FAMILIES = ["llama", "opt", "bloom", "gpt_neox", "mixtral", "qwen3_moe"]
PROMPTS = [[1, 2, 3, 4, 5, 11, 12], [7, 8], [9, 10, 11, 50, 51], [61], [90, 3, 90]]
NEW = 6


@pytest.fixture
def tiny_model(tiny_model):
    """As in ``conftest``; a file younger than 30 ms is not stored."""

    def made(family: str, **options: object) -> Path:
        path = tiny_model(family, **options)
        time.sleep(0.05)
        return path

    return made


def requests() -> list[Request]:
    return [
        Request(id=n, prompt_token_ids=tuple(prompt), max_new_tokens=NEW)
        for n, prompt in enumerate(PROMPTS)
    ]


def tokens_of(plan, model_dir: Path, store: Path | None, **options) -> dict[int, list[int]]:
    answers, _ = run_threads(plan, model_dir, requests(), store=store, **options)
    return {int(name): list(tokens) for name, (tokens, _) in answers.items()}


@pytest.mark.parametrize(("family", "stages"), [(f, 1 + n % 3) for n, f in enumerate(FAMILIES)])
def test_tokens_are_those_of_generate(tiny_model, tmp_path, family, stages):
    model_dir = tiny_model(family, seed=1, shape=SHAPE)
    reference = load_reference(model_dir)
    plan = make_plan(CUTS[stages], prefill=2, decode=3, batch=4)
    expected = {
        n: generate_alone(reference, one, NEW)[0][len(one) :] for n, one in enumerate(PROMPTS)
    }
    for on_disk in (None, {0, 3, 4}):  # written to the store, then read from it
        streamed = with_weights_on_disk(plan, on_disk)
        assert tokens_of(streamed, model_dir, tmp_path / "store") == expected


def test_other_layers_have_experts_on_the_host(tiny_model, tmp_path):
    model_dir = tiny_model("mixtral", seed=1, shape=SHAPE)
    plan = make_plan(CUTS[2], bits=[8] * LAYERS, prefill=2, decode=2)
    expected = tokens_of(plan, model_dir, None)
    streamed = with_weights_on_disk(plan, {0, 3, 4})
    experts = (LayerExperts(layer=1, resident=(0,)), LayerExperts(layer=2, resident=()))
    stages = [
        replace(stage, experts=StageExperts(layers=(own,)))
        for stage, own in zip(streamed.stages, experts, strict=True)
    ]
    both = replace(streamed, stages=tuple(stages))
    assert tokens_of(both, model_dir, tmp_path / "store") == expected


@pytest.mark.parametrize("captures", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_tokens_are_those_of_weights_in_memory(tiny_model, tmp_path, dtype, captures):
    model_dir = tiny_model("qwen3", seed=2, shape=SHAPE)
    kv_bits = 32 if dtype == "float32" else 16
    plan = make_plan(CUTS[2], bits=(16, 8, 4, 3, 16, 4), prefill=2, decode=2)
    plan = replace(plan, dtype=dtype, kv_bits=kv_bits)
    expected = tokens_of(plan, model_dir, None, captures=captures)
    streamed = with_weights_on_disk(plan)
    assert tokens_of(streamed, model_dir, tmp_path / "store", captures=captures) == expected


@pytest.mark.parametrize("policy", ["hybrid", "static", "iteration", "rra", "multibin"])
def test_every_policy_streams(tiny_model, tmp_path, policy):
    model_dir = tiny_model("llama", seed=1, shape=SHAPE)
    plan = make_plan(CUTS[2], bits=[4] * LAYERS, prefill=2, decode=2)
    plan = replace(plan, schedule=default_schedule(policy, 4))
    expected = tokens_of(plan, model_dir, None)
    assert tokens_of(with_weights_on_disk(plan), model_dir, tmp_path / "store") == expected


def test_stages_of_one_phase_stream(tiny_model, tmp_path):
    model_dir = tiny_model("llama", seed=1, shape=SHAPE)
    plan = make_split_plan((0, 2, 6), (0, 6), bits=[8] * LAYERS)
    expected = tokens_of(plan, model_dir, None)
    assert tokens_of(with_weights_on_disk(plan), model_dir, tmp_path / "store") == expected


@pytest.mark.parametrize("transport", ["threads", "sockets"])
def test_the_server_streams(tiny_model, tmp_path, transport):
    model_dir = tiny_model("qwen3", seed=1, shape=SHAPE)
    reference = load_reference(model_dir)
    plan = with_weights_on_disk(make_plan(CUTS[3], batch=4, prompt_tokens=32, new_tokens=16))
    script = Script()
    for number, prompt in enumerate(PROMPTS):
        script.add(1 + 3 * number, request(number, prompt))
    options = EngineOptions(token_budget=9)
    serve_script(plan, model_dir, script, options, transport, store=tmp_path / "store")
    for number, prompt in enumerate(PROMPTS):
        expected = generate_alone(reference, prompt, NEW)[0][len(prompt) :]
        assert script.tokens(f"r{number}") == expected


@pytest.fixture
def stage(tiny_model, tmp_path):
    """A stage with weights on disk, its store, and the same stage in memory."""
    model_dir = tiny_model("llama", seed=1, shape=SHAPE)
    cache = WeightCache.opened(tmp_path / "store", 10**9)
    bits = [4, 8, 3, 4, 4, 16]
    options = {"dtype": torch.float32, "device": "cpu", "weight_cache": cache}
    found = load_stage(model_dir, 0, LAYERS, bits, on_disk=range(1, LAYERS), **options)
    yield found, load_stage(model_dir, 0, LAYERS, bits, **options)
    found.streamed.close()


def test_layers_are_right_in_any_order(stage):
    streamed, resident = stage
    chance, hidden = random.Random(0), torch.randn(1, 4, 128)
    batch = PackedBatch(block_tables=[[0]], starts=[0], counts=[4], slots=[0])
    for _ in range(60):
        only = sorted(chance.sample(range(LAYERS), chance.randint(1, LAYERS)))
        assert torch.equal(streamed(hidden, batch, None, only), resident(hidden, batch, None, only))


def test_each_pass_reads_each_layer_once(stage):
    streamed, _ = stage
    hidden = torch.randn(1, 4, 128)
    batch = PackedBatch(block_tables=[[0]], starts=[0], counts=[4], slots=[0])
    streamed(hidden, batch)
    before = streamed.streamed.read_bytes
    for _ in range(10):
        streamed(hidden, batch)
    read = streamed.streamed.read_bytes - before
    largest = streamed.streamed.nbytes
    assert abs(read - 10 * streamed.streamed.nbytes) <= largest * STREAM_BUFFERS / (LAYERS - 1) * 2


def test_a_prompt_in_parts_reads_each_layer_once(stage):
    streamed, resident = stage
    tokens = 1100  # three parts of a compiled step
    outputs = []
    for one in (streamed, resident):
        shapes = kv_shapes(one.config, 0, LAYERS)
        cache = KVCache(shapes, 0, num_blocks=-(-tokens // 16), dtype=torch.float32, kv_bits=32)
        steps = step_runner_of(one, cache)
        assert isinstance(steps, CompiledSteps)
        before = 0 if one.streamed is None else one.streamed.read_bytes
        hidden = torch.randn(1, tokens, 128, generator=torch.Generator().manual_seed(1))
        blocks = range(-(-tokens // 16))
        batch = PackedBatch(block_tables=[blocks], starts=[0], counts=[tokens], slots=[0])
        outputs.append(steps.forward(hidden, batch))
        if one.streamed is not None:
            assert one.streamed.read_bytes - before <= 2 * one.streamed.nbytes
    assert torch.equal(*outputs)


def test_pages_are_let_go(stage):
    streamed, _ = stage
    hidden = torch.randn(1, 4, 128)
    batch = PackedBatch(block_tables=[[0]], starts=[0], counts=[4], slots=[0])
    streamed(hidden, batch)
    held = {index for index in streamed.streamed.layers if index in streamed.streamed._held}
    assert len(held) <= STREAM_BUFFERS


def test_without_a_store_it_is_an_error(tiny_model):
    model_dir = tiny_model("llama", seed=1, shape=SHAPE)
    with pytest.raises(SpecError, match="layer 2: its weights rest on disk, but found no store"):
        load_stage(model_dir, 0, 4, [4] * 4, dtype=torch.float32, device="cpu", on_disk=[2])


def test_a_store_that_is_too_small_is_an_error(tiny_model, tmp_path):
    model_dir = tiny_model("llama", seed=1, shape=SHAPE)
    cache = WeightCache.opened(tmp_path / "store", 1000)
    with pytest.raises(SpecError, match=r"layer 0: .* cannot hold it; raise --store_limit"):
        load_stage(
            model_dir, 0, 4, [4] * 4, dtype=torch.float32, device="cpu", on_disk=[0],
            weight_cache=cache,
        )  # fmt: skip


def test_a_disk_is_measured_with_a_file_that_is_deleted(tmp_path, monkeypatch):
    assert read_bytes_per_s(tmp_path, 32 * MIB, 1) > MIB
    assert not list(tmp_path.iterdir())
    full = SimpleNamespace(free=100 * MIB)
    monkeypatch.setattr("shutil.disk_usage", lambda _: full)
    assert read_bytes_per_s(tmp_path, 32 * MIB, 1) is None
