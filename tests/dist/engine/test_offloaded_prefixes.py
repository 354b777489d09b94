"""Conversations in turn, in a pool too small for all: their tokens are those of transformers.

What leaves the pool is kept in host memory and in files, on every stage its own layers' part.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers.block_steps import BlockSteps
from helpers.online_runs import BLOCK, FREE, greedy, limits, request
from helpers.online_runs import serve as serve_steps
from helpers.ranks import make_plan, serve_script
from helpers.scripted_channel import Script
from helpers.tiny_models import generate_alone, load_reference
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmpq.batching.blocks import OffloadLimits, blocks_of
from llmpq.dist.engine.online_run import OnlineRun
from llmpq.dist.io.generation import GenerationRequest
from llmpq.dist.io.sampling_params import SamplingParams
from llmpq.dist.kv.offload import OffloadedKV
from llmpq.dist.launch import rank as rank_module
from llmpq.dist.launch.rank import block_bytes, window_blocks_of
from llmpq.models import load_config
from llmpq.options.engine import EngineOptions
from llmpq.spec.runtime_constants import PROMPT_CHUNK_TOKENS

torch.set_num_threads(1)
WIDE = {"layers": 3, "hidden": 64, "intermediate": 96, "heads": 4, "kv_heads": 2}
"""Heads of 16 features, which 4-bit keys and values take."""

CUTS = {1: (0, 3), 2: (0, 1, 3), 3: (0, 1, 2, 3)}
NEW = 6


@pytest.fixture(scope="module")
def steps(tiny_model) -> BlockSteps:
    return BlockSteps(tiny_model("llama", seed=1), num_blocks=64, block_size=BLOCK)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    turns=st.lists(
        st.tuples(st.integers(0, 2), st.lists(st.integers(3, 8), min_size=1, max_size=6)),
        min_size=2,
        max_size=9,
    ),
    budget=st.integers(4, 24),
    num_blocks=st.integers(9, 14),
    kept=st.sampled_from([(0, 0), (3, 0), (40, 0), (0, 6), (0, 40), (2, 40), (8, 8)]),
    most=st.integers(1, 3),
    gap=st.integers(1, 40),
    damage=st.randoms(use_true_random=False),
)
def test_random_conversations_get_the_tokens_of_generate(
    steps, turns, budget, num_blocks, kept, most, gap, damage
):
    """Each turn sends all that its conversation has so far; some files are damaged."""
    so_far: dict[int, list[int]] = {}
    script, prompts = Script(), []
    for number, (conversation, words) in enumerate(turns):
        own = so_far.setdefault(conversation, [conversation + 3] * 5)
        own += words
        del own[24:]
        prompts.append([*own])
        script.add(1 + gap * number, request(number, own, replace(FREE, max_tokens=4)))
    steps.kept.clear()
    steps.misses = lambda: damage.random() < 0.25
    host, disk = kept
    offload = OffloadLimits(host_blocks=host, disk_blocks=disk)
    options = limits(
        token_budget=budget, num_blocks=num_blocks, steps_in_flight=most, offload=offload
    )
    engine = serve_steps(steps, script, options)
    for number, prompt in enumerate(prompts):
        assert script.tokens(f"r{number}") == greedy(steps, prompt, 4)
    assert engine.scheduler.free_blocks == num_blocks
    assert all(place < {"host": host, "disk": disk}[tier] for tier, place in steps.kept)


def plan_of(model_dir, num_stages, kv_bits=32, prompt_tokens=48):
    """A plan whose memory is that of its blocks."""
    plan = make_plan(CUTS[num_stages], batch=4, prompt_tokens=prompt_tokens, new_tokens=16)
    plan, config = replace(plan, kv_bits=kv_bits), load_config(model_dir)
    each, window = block_bytes(plan, config)
    blocks = plan.workload.batch * blocks_of(plan.workload.max_context_tokens)
    kv = blocks * each + (window_blocks_of(plan, config) or 0) * window
    first, *others = plan.estimate.stages
    stages = (replace(first, memory=replace(first.memory, kv=kv - len(others))), *others)
    return replace(plan, estimate=replace(plan.estimate, stages=stages)), kv // blocks


def play(plan, model_dir, prompts, transport="threads", **options):
    script = Script()
    for number, prompt in enumerate(prompts):
        item = GenerationRequest(
            id=str(number),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(ignore_eos=True, max_tokens=NEW),
        )
        script.add(1 + 40 * number, item)
    serve_script(plan, model_dir, script, EngineOptions(**options), transport)
    assert not script.refused
    return [script.tokens(str(number)) for number in range(len(prompts))]


def expected_tokens(model_dir, prompts):
    model = load_reference(model_dir)
    model.generation_config.eos_token_id = None
    return [generate_alone(model, prompt, NEW)[0][len(prompt) :] for prompt in prompts]


def growing(starts, turns, length):
    """The prompts of conversations that take turns and grow."""
    return [
        [(start * place) % 90 + 3 for place in range(length + 9 * turn)]
        for turn in range(turns)
        for start in starts
    ]


@pytest.fixture
def made(monkeypatch):
    """What the ranks of a run keep in host memory, and the master's run."""
    found = SimpleNamespace(kept=[], runs=[])

    def recorded(kind, made):
        class Recorded(kind):
            def __init__(self, *values, **options):
                super().__init__(*values, **options)
                made.append(self)

        monkeypatch.setattr(rank_module, kind.__name__, Recorded)

    recorded(OffloadedKV, found.kept)
    recorded(OnlineRun, found.runs)
    return found


@pytest.mark.parametrize(
    ("num_stages", "transport", "kv_bits", "host", "disk"),
    [
        (1, "threads", 32, 40, 0),
        (1, "threads", 8, 3, 30),
        (2, "threads", 32, 0, 40),
        (2, "sockets", 8, 40, 0),
        (2, "threads", 4, 3, 30),
        (3, "torch", 32, 3, 30),
    ],
)
def test_prefixes_are_found_again_and_change_no_token(
    tiny_model, tmp_path, made, num_stages, transport, kv_bits, host, disk
):
    shape = WIDE if kv_bits == 4 else {}
    model_dir = tiny_model("llama", seed=1, shape=shape)
    prompts = growing((7, 11, 5), 2, 38)
    plan, block = plan_of(model_dir, num_stages, kv_bits)
    options = {
        "num_blocks": 5,
        "token_budget": 24,
        "kv_offloading_bytes": host * block,
        "kv_offloading_folder": tmp_path if disk else None,
        "kv_offloading_disk_bytes": disk * (block + num_stages * 128),
    }
    found = play(plan, model_dir, prompts, transport, **options)
    stats = made.runs[0].stats()
    if kv_bits == 32:
        assert found == expected_tokens(model_dir, prompts)
    else:
        alone = {"prefix_caching": False, "token_budget": 24}
        assert found == play(plan, model_dir, prompts, **alone)
    # Each of three conversations finds the two full blocks of its first turn.
    tiers = stats.prefix_tier_hits
    assert stats.prefix_cache_hits == sum(tiers.values()) == 3 * 2 * 16
    assert (tiers["host"] > 0, tiers["disk"] > 0) == (host > 0, disk > 0)
    assert stats.kv_offload_unread == 0
    for tier, most in (("host", host), ("disk", disk)):
        assert 0 <= stats.kv_offload_bytes[tier] <= most * block
        assert bool(stats.kv_offload_saves[tier]) == bool(most)
    assert len(made.kept) == num_stages
    assert sum(one.nbytes for one in made.kept) == host * block
    files = [path for path in tmp_path.rglob("block-*")]
    assert sum(path.stat().st_size for path in files) <= options["kv_offloading_disk_bytes"]
    assert {path.parent.name for path in files} == {
        f"rank-{rank}" for rank in range(num_stages if disk else 0)
    }


def test_layers_with_windows_are_kept_apart_and_change_no_token(tiny_model, made):
    shape = {"sliding_window": 9, "max_position_embeddings": 2048}
    model_dir, long = tiny_model("gemma3", seed=1, **shape), PROMPT_CHUNK_TOKENS + 150
    prompts = growing((7, 11), 2, long)
    plan, block = plan_of(model_dir, 2, prompt_tokens=long)
    budget = 3 * blocks_of(long) * block
    options = {"num_blocks": blocks_of(long + NEW) + 6, "kv_offloading_bytes": budget}
    assert play(plan, model_dir, prompts, **options) == expected_tokens(model_dir, prompts)
    assert made.runs[0].stats().prefix_tier_hits["host"] > long
    assert 0 < sum(one.nbytes for one in made.kept) <= budget


@pytest.mark.parametrize("num_stages", [1, 3])
def test_files_survive_a_restart_of_the_ranks(tiny_model, tmp_path, made, num_stages):
    model_dir, prompts = tiny_model("llama", seed=1), growing((7, 11, 5), 1, 38)
    plan, block = plan_of(model_dir, num_stages)
    options = {
        "num_blocks": 3,  # of one conversation
        "kv_offloading_folder": tmp_path,
        "kv_offloading_disk_bytes": 40 * (block + num_stages * 128),
    }
    expected = expected_tokens(model_dir, prompts)
    for _ in range(2):
        assert play(plan, model_dir, prompts, **options) == expected
    first, second = (run.stats().prefix_tier_hits["disk"] for run in made.runs)
    assert (first, second) == (0, 2 * 32)  # the blocks of the last one were not taken


def test_damaged_files_of_one_stage_are_computed_again(tiny_model, tmp_path, monkeypatch, made):
    """A stage that is not the master's misses what it wrote: all stages compute it."""
    model_dir, prompts = tiny_model("llama", seed=1), growing((7, 11, 5), 2, 38)
    plan, block = plan_of(model_dir, 2)

    def damage(self, name, key, data):
        self._write(name, key, data)
        path = self.folder / name
        if self.folder.name == "rank-1":
            path.write_bytes(path.read_bytes()[:-1] + b"x")

    monkeypatch.setattr(rank_module.BlockFiles, "write", damage)
    found = play(
        plan, model_dir, prompts, num_blocks=5, token_budget=24, kv_offloading_folder=tmp_path,
        kv_offloading_disk_bytes=40 * (block + 256),
    )  # fmt: skip
    assert found == expected_tokens(model_dir, prompts)
    stats = made.runs[0].stats()
    assert stats.prefix_cache_hits == 0
    assert stats.kv_offload_unread > 0
