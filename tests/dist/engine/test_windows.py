"""Layers with windows keep the blocks of their window: the tokens are those of transformers.

Sequences are longer than the window and a chunk, so that blocks are used again.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.ranks import make_plan, make_split_plan, run_threads, serve_script
from helpers.scripted_channel import Script
from helpers.tiny_configs import TESTED, stored_fields, tiny_config
from helpers.tiny_models import generate_alone, load_reference, load_stage

from llmpq.assigner.forecast import stage_memory
from llmpq.batching.blocks import blocks_of
from llmpq.costmodel import build_costs
from llmpq.costmodel.memory import layer_kv_bytes
from llmpq.dist.engine.executor import StageRunner, slot_row
from llmpq.dist.io.generation import GenerationRequest
from llmpq.dist.io.prompts import Request
from llmpq.dist.io.sampling_params import SamplingParams
from llmpq.dist.kv.cache import KVCache
from llmpq.dist.launch.rank import window_blocks_of, window_of
from llmpq.errors import StageError
from llmpq.models import PackedBatch, kv_shapes, load_config
from llmpq.models.adapter import largest_window
from llmpq.options.engine import EngineOptions
from llmpq.spec.huggingface.families import load_model_dir, model_from_config, model_types
from llmpq.spec.runtime_constants import KV_BLOCK_SIZE, PROMPT_CHUNK_TOKENS, kept_blocks

torch.set_num_threads(1)

CUTS = {1: (0, 3), 2: (0, 1, 3)}
LONG = PROMPT_CHUNK_TOKENS + 150
NEW = 6
PREFIX = [(7 * number) % 90 + 3 for number in range(LONG)]
PROMPTS = [PREFIX, [*PREFIX[: LONG - 40], *range(5, 25)], [3, 4, 5]]
SPAN = {"max_position_embeddings": 2048}
FAMILIES = {
    "mistral": {"sliding_window": 6, **SPAN},
    "gemma2": {"sliding_window": 20, **SPAN},
    "gemma3": {"sliding_window": 9, **SPAN},
}
WIDE = {"layers": 3, "hidden": 128, "intermediate": 192, "heads": 4, "kv_heads": 2}
"""Wide enough for compiled steps."""


def plan_of(num_stages, **options):
    sizes = {"batch": 3, "prompt_tokens": LONG, "new_tokens": NEW, "prefill": 2, "decode": 3}
    return make_plan(CUTS[num_stages], **{**sizes, **options})


def expected_tokens(model_dir):
    model = load_reference(model_dir)
    model.generation_config.eos_token_id = None
    return [generate_alone(model, prompt, NEW)[0][len(prompt) :] for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("shape", "planned"),
    [(None, LONG), (WIDE, LONG), (None, PROMPT_CHUNK_TOKENS + 60)],
    ids=["small", "wide", "longer than planned"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_offline_tokens_equal_generate(tiny_model, family, shape, planned):
    model_dir = tiny_model(family, seed=1, shape=shape, **FAMILIES[family])
    plan = plan_of(2, prompt_tokens=planned)
    window = window_of(plan, load_config(model_dir))
    assert window == FAMILIES[family]["sliding_window"]
    assert window_blocks_of(plan, load_config(model_dir)) < 3 * blocks_of(LONG + NEW)
    requests = [
        Request(id=number, prompt_token_ids=tuple(prompt), max_new_tokens=NEW)
        for number, prompt in enumerate(PROMPTS)
    ]
    answers, _ = run_threads(plan, model_dir, requests)
    for number, tokens in enumerate(expected_tokens(model_dir)):
        assert list(answers[number][0]) == tokens


@pytest.mark.parametrize("is_split", [False, True], ids=["one ring", "waa"])
def test_stages_keep_the_bytes_that_the_plan_counts(tiny_model, is_split):
    """Stages that send keys and values keep all tokens, in the plan and in the runtime."""
    model_dir = tiny_model("gemma2", seed=1, **FAMILIES["gemma2"])
    plan = plan_of(2)
    if is_split:
        sizes = {"batch": 3, "prompt_tokens": LONG, "new_tokens": NEW, "prefill": 2, "decode": 3}
        plan = make_split_plan((0, 1, 3), (0, 2, 3), **sizes)
    requests = [
        Request(id=number, prompt_token_ids=tuple(prompt), max_new_tokens=NEW)
        for number, prompt in enumerate(PROMPTS)
    ]
    answers, made = run_threads(plan, model_dir, requests)
    for number, tokens in enumerate(expected_tokens(model_dir)):
        assert list(answers[number][0]) == tokens
    costs = build_costs(
        load_model_dir(model_dir), plan.cluster, dtype="float32", kv_bits=32, latency="roofline"
    )
    planned = [stage_memory(plan, costs, stage).kv for stage in plan.stages]
    assert [stage.held.kv for stage in made.stages] == planned
    all_tokens = 3 * blocks_of(LONG + NEW) * KV_BLOCK_SIZE * 2 * 2 * 8 * 4
    assert (planned[0] == all_tokens) == is_split


def serve(model_dir, num_stages, prompts, kv_bits=32, **options):
    """Serve prompts one after the other, so that each may find the prefix of those before."""
    plan = replace(plan_of(num_stages), kv_bits=kv_bits)
    script = Script()
    for number, prompt in enumerate(prompts):
        item = GenerationRequest(
            id=str(number),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(ignore_eos=True, max_tokens=NEW),
        )
        script.add(1 + 4 * number, item)
    serve_script(plan, model_dir, script, EngineOptions(**options))
    assert not script.refused
    return [script.tokens(str(number)) for number in range(len(prompts))]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"token_budget": 300},
        {"token_budget": 2000},
        {"num_blocks": blocks_of(LONG + NEW) + 6},
        {"prefix_caching": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("num_stages", [1, 2])
def test_online_tokens_equal_generate(tiny_model, num_stages, options):
    model_dir = tiny_model("gemma3", seed=1, shape=WIDE, **FAMILIES["gemma3"])
    expected = expected_tokens(model_dir)
    assert serve(model_dir, num_stages, PROMPTS, **options) == expected


@pytest.mark.parametrize("kv_bits", [8, 4])
def test_fewer_bits_change_no_token_by_the_way_that_blocks_are_kept(tiny_model, kv_bits):
    model_dir = tiny_model("mistral", seed=1, shape=WIDE, **FAMILIES["mistral"])
    found = serve(model_dir, 1, PROMPTS, kv_bits=kv_bits, token_budget=400)
    options = {"token_budget": 64, "prefix_caching": False}
    assert found == serve(model_dir, 1, PROMPTS, kv_bits=kv_bits, **options)


@pytest.mark.parametrize("attends", [True, False], ids=["kernel", "gathered"])
@pytest.mark.parametrize("family", [*FAMILIES, "llama"])
def test_chunks_compute_what_a_whole_prompt_does(tiny_model, family, attends, monkeypatch):
    """A prompt of several chunks, a shorter one, and the next token of a third, with a draft."""
    if not attends:
        monkeypatch.setattr("llmpq.dist.kv.cache.can_attend", lambda *_: False)
    stage = load_stage(tiny_model(family, seed=1, **FAMILIES.get(family, {})), 0, 3)
    shapes, most, size = kv_shapes(stage.config, 0, 3), 64, 5
    window = largest_window(stage.config)
    torch.manual_seed(0)
    first = torch.randn(1, 7, stage.config.hidden_size)
    rest = torch.randn(1, 47 + 4 + 2, stage.config.hidden_size)
    steps = [[(2, (0, 7))], [(0, (0, 47)), (1, (0, 4)), (2, (7, 8)), (2, (8, 9))]]
    for is_last in (False, True):
        outputs = []
        for chunk in (size, 10**6):
            own, blocks = window if chunk == size else None, 3 * blocks_of(most)
            cache = KVCache(
                shapes, 0, num_blocks=blocks, dtype=torch.float32,
                num_window_blocks=None if own is None else blocks,
            )  # fmt: skip
            runner = StageRunner(
                layers=stage, cache=cache, device=torch.device("cpu"), is_last=is_last,
                chunk_tokens=chunk,
            )  # fmt: skip
            made = [
                runner.run(
                    hidden, [slot_row(slot, tokens, most, window=own) for slot, tokens in rows]
                )
                for hidden, rows in zip((first, rest), steps, strict=True)
            ]
            outputs.append(made[1])
        torch.testing.assert_close(*outputs, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("model_type", sorted(TESTED & set(model_types())))
def test_blocks_of_a_family_are_allocated_as_planned(model_type):
    """Its configuration says the same windows to the planner and to the runtime."""
    config, tokens, slots = tiny_config(model_type), 3000, 3
    model = model_from_config(stored_fields(config), "tiny", "config.json")
    window = largest_window(config)
    assert model.window_tokens == window
    cache = KVCache(
        kv_shapes(config, 0, model.num_layers),
        0,
        num_blocks=slots * blocks_of(tokens),
        num_window_blocks=None if window is None else slots * kept_blocks(tokens, window),
        dtype=torch.float32,
    )
    kinds = model.layer_kinds
    states = 4 * slots * sum(layer.state_values for layer in model.layers)
    planned = sum(layer_kv_bytes(model, kind, slots, tokens, 32) for kind in kinds)
    assert cache.nbytes + states == planned


def test_tables_of_windows_are_checked(tiny_model):
    config = load_config(tiny_model("mistral", sliding_window=6))
    cache = KVCache(
        kv_shapes(config, 0, 1), 0, num_blocks=4, num_window_blocks=2, dtype=torch.float32
    )
    rows = {"block_tables": [(0, 1, 2)], "starts": [40], "counts": [1]}
    cache.view(PackedBatch(**rows, window_tables=[(0, 1, 0)]))
    for tables in ([], [(0, 1)], [(0, 1, 2)], [(0, -1, 1)]):
        with pytest.raises(StageError, match="layers with windows"):
            cache.view(PackedBatch(**rows, window_tables=tables))


def test_windows_longer_than_sequences_have_no_blocks_of_their_own(tiny_model):
    config = load_config(tiny_model("mistral", sliding_window=64))
    assert window_of(plan_of(1, prompt_tokens=500), config) is None
    assert window_of(plan_of(1), config) == 64
    assert window_blocks_of(plan_of(1, prompt_tokens=500), config) is None
