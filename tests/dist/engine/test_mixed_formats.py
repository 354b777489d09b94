"""Stages that compute in different number formats: what they hand over, and their tokens."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from helpers.ranks import make_plan, run_threads
from helpers.tiny_models import load_reference, save_tiny_model
from hypothesis import given
from hypothesis import strategies as st

from llmpq.batching.blocks import blocks_of, slot_blocks
from llmpq.dist.engine.executor import cast_hidden_states
from llmpq.dist.io.prompts import Request
from llmpq.dist.kv.cache import KVCache
from llmpq.errors import LlmpqError, StageError
from llmpq.models import PackedBatch, kv_shapes
from llmpq.quant.loading.loader import load_stage
from llmpq.quant.loading.master import load_master
from llmpq.spec.cluster import Cluster, DeviceGroup, Node

torch.set_num_threads(1)

CPU = torch.device("cpu")
FORMATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
PROMPTS = [[1, 2, 3, 4, 5], [7, 8], [9, 10, 11, 50]]
NEW_TOKENS = 6
ROUNDOFF = torch.finfo(torch.bfloat16).eps / 2
"""Of the coarsest format here."""
CUTS = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save_tiny_model("llama", tmp_path_factory.mktemp("formats") / "llama")


def mixed_plan(formats, run="bfloat16", bits=(16, 8, 4)):
    groups = tuple(DeviceGroup(type="cpu", count=1, threads=1, dtype=one) for one in formats)
    cluster = Cluster(name="mixed", nodes=(Node(name="box", devices=groups),))
    cuts = CUTS if len(formats) == 3 else (0, 3)
    plan = make_plan(cuts, bits=bits, prefill=2, decode=2, batch=3, cluster=cluster)
    stages = tuple(
        replace(stage, dtype=None if form == run else form)
        for stage, form in zip(plan.stages, formats, strict=True)
    )
    return replace(plan, dtype=run, kv_bits=32 if run == "float32" else 16, stages=stages)


def scores_of_one_process(plan, model_dir, prompt, made):
    """Logits before each made token ``[N, V]``: the layers one after the other, casts between."""
    formats = [FORMATS[plan.dtype_of(stage)] for stage in plan.stages]
    master = load_master(model_dir, dtype=formats[0], device=CPU)
    layers, caches = [], []
    for stage, dtype in zip(plan.stages, formats, strict=True):
        first, end = stage.first_layer, stage.end_layer
        layers.append(load_stage(model_dir, first, end, stage.bits, dtype=dtype, device=CPU))
        shapes = kv_shapes(master.config, first, end)
        caches.append(
            KVCache(
                shapes, first, num_blocks=blocks_of(64), dtype=dtype, kv_bits=8 * dtype.itemsize
            )
        )
    scores, start = [], 0
    for end in range(len(prompt), len(prompt) + len(made)):
        new = [*prompt, *made][start:end]
        batch = PackedBatch(
            block_tables=[slot_blocks(0, 64, end)], starts=[start], counts=[len(new)]
        )
        hidden = master.embed(torch.tensor([new]), batch.positions)
        for stage, cache, dtype in zip(layers, caches, formats, strict=True):
            hidden = stage(hidden.to(dtype), batch, cache)
        start = end
        scores.append(master.logits(hidden[0, -1:].to(formats[0]))[0].float())
    return torch.stack(scores)


def assert_best(made, scores):
    """Every token has the highest score, or one that rounding in 16 bits cannot tell from it.

    Libraries add up the rows of a batch in another order than one row: some 20 roundings of random
    sign in three layers, four times their root between two scores, which spread over five times
    their deviation.
    """
    near = 4 * (2 * 20) ** 0.5 / 5 * ROUNDOFF
    gaps = (scores.max(dim=1).values[:, None] - scores) / (scores.amax() - scores.amin())
    assert bool((gaps[torch.arange(len(made)), torch.tensor(made)] <= near).all())
    return int(((gaps <= near).sum(dim=1) == 1).sum())


@pytest.mark.parametrize("formats", list(itertools.permutations(FORMATS)), ids="-".join)
def test_tokens_are_those_of_one_process_that_casts_between_stages(formats, model_dir):
    plan = mixed_plan(formats)
    requests = [
        Request(id=str(number), prompt_token_ids=tuple(prompt), max_new_tokens=NEW_TOKENS)
        for number, prompt in enumerate(PROMPTS)
    ]
    answers, _ = run_threads(plan, model_dir, requests)
    clear = 0
    for number, prompt in enumerate(PROMPTS):
        made = list(answers[str(number)][0])
        assert len(made) == NEW_TOKENS
        clear += assert_best(made, scores_of_one_process(plan, model_dir, prompt, made))
    assert clear > len(PROMPTS) * NEW_TOKENS / 2  # tokens that rounding does not decide


@pytest.mark.parametrize(
    "formats", [("float16", "float32", "bfloat16"), ("float32", "float16", "float32")]
)
def test_tokens_are_about_the_best_of_transformers(formats, model_dir):
    """Unquantized: every token is the best of the float32 model, within 16 bits' rounding."""
    plan = mixed_plan(formats, bits=(16, 16, 16))
    requests = [
        Request(id=str(number), prompt_token_ids=tuple(prompt), max_new_tokens=NEW_TOKENS)
        for number, prompt in enumerate(PROMPTS)
    ]
    answers, _ = run_threads(plan, model_dir, requests)
    model = load_reference(model_dir)
    for number, prompt in enumerate(PROMPTS):
        made = list(answers[str(number)][0])
        with torch.inference_mode():
            scores = model(torch.tensor([[*prompt, *made]])).logits[0, len(prompt) - 1 : -1]
        assert_best(made, scores)


def test_one_stage_may_run_in_another_format_than_the_plan(model_dir):
    plan = mixed_plan(("float16",), bits=(16, 16, 16))
    request = Request(id="0", prompt_token_ids=tuple(PROMPTS[0]), max_new_tokens=NEW_TOKENS)
    answers, _ = run_threads(plan, model_dir, [request])
    made = list(answers["0"][0])
    assert_best(made, scores_of_one_process(plan, model_dir, PROMPTS[0], made))


def test_a_state_too_large_for_float16_ends_the_run_with_its_reason(model_dir, monkeypatch):
    plan = mixed_plan(("bfloat16", "float16", "bfloat16"))
    original = torch.nn.Embedding.forward
    monkeypatch.setattr(torch.nn.Embedding, "forward", lambda self, ids: original(self, ids) * 1e8)
    request = Request(id="0", prompt_token_ids=(1, 2), max_new_tokens=2)
    with pytest.raises(LlmpqError, match=r"expected at most 6\.55e\+04, the largest float16"):
        run_threads(plan, model_dir, [request])


# The hand-over itself


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=8))
def test_float32_takes_both_16_bit_formats_exactly(values):
    for dtype in (torch.float16, torch.bfloat16):
        sent = torch.tensor(values).to(dtype)
        assert torch.equal(cast_hidden_states(sent, CPU, torch.float32).to(dtype), sent)
        assert torch.equal(cast_hidden_states(sent, CPU, torch.float32), sent.float())


def test_float16_takes_every_bfloat16_of_its_normal_range_exactly():
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    exact = every[(every.abs().float() >= 2.0**-14) & (every.abs().float() <= 65504)]
    assert len(exact) > 7000
    assert torch.equal(cast_hidden_states(exact, CPU, torch.float16).to(torch.bfloat16), exact)
    small = every[every.abs().float() < 2.0**-14]
    error = cast_hidden_states(small, CPU, torch.float16).float() - small.float()
    assert error.abs().max() <= 2.0**-25


def test_bfloat16_takes_every_float16_within_its_rounding():
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    every = every[every.isfinite()]
    error = cast_hidden_states(every, CPU, torch.bfloat16).float() - every.float()
    assert bool((error.abs() <= 2.0**-8 * every.float().abs() + 2.0**-133).all())


@pytest.mark.parametrize(
    ("value", "sent", "to"),
    [(1e5, torch.bfloat16, torch.float16), (65520.0, torch.float32, torch.float16),
     (3.4e38, torch.float32, torch.bfloat16)],
)  # fmt: skip
def test_a_number_beyond_a_format_is_an_error_and_never_infinity(value, sent, to):
    with pytest.raises(StageError, match="hidden states of another stage: found up to"):
        cast_hidden_states(torch.tensor([[1.0, -value]], dtype=sent), CPU, to)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_was_not_finite_stays_so(value):
    found = cast_hidden_states(torch.tensor([value]), CPU, torch.float16)
    assert not found.isfinite().any()
