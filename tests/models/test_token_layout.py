"""Layers that read keys and values of others, and embeddings of their own, over any stages."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers.tiny_configs import GEMMA3N_SHARED, GEMMA4_SHARED, tiny_config
from helpers.tiny_models import (
    Pipeline,
    Sequences,
    generate_alone,
    load_reference,
    make_tiny_model_script,
)

from llmpq.costmodel.memory import layer_kv_bytes
from llmpq.models.adapter import kv_sources
from llmpq.models.master import layout_of
from llmpq.quant.loading.loader import load_stage
from llmpq.spec.huggingface.families import load_model_dir

torch.set_num_threads(1)

CASES = {
    "gemma3n kernel": ("gemma3n_text", {**GEMMA3N_SHARED, "head_dim": 16}),
    "gemma4": ("gemma4_text", GEMMA4_SHARED),
    "gemma4 kernel": ("gemma4_text", {**GEMMA4_SHARED, "head_dim": 16, "global_head_dim": 32}),
}
CUTS = ([0, 6], [0, 3, 6], [0, 2, 4, 5, 6])
PROMPTS = {"long": (3, [1, 2, 3, 4, 5, 11, 12, 13, 14]), "short": (0, [7, 8]), "one": (4, [61])}
CHUNKED = (1, [9, 3, 27, 44, 5, 5, 90, 12, 31, 2])


@pytest.fixture(scope="module", params=CASES)
def folder(request, tmp_path_factory):
    model_type, overrides = CASES[request.param]
    script = make_tiny_model_script()
    model = script.make_model(tiny_config(model_type, **overrides), seed=1)
    return script.save_model(model, tmp_path_factory.mktemp("model"), dtype=torch.float32)


@pytest.fixture(scope="module")
def expected(folder):
    reference = load_reference(folder)
    prompts = {name: tokens for name, (_, tokens) in {**PROMPTS, "chunked": CHUNKED}.items()}
    return {name: generate_alone(reference, tokens, 6) for name, tokens in prompts.items()}


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_any_stages_generate_the_tokens_of_transformers(folder, expected, cuts):
    pipeline = Pipeline(folder, cuts)
    run = Sequences(pipeline)
    run.prefill(PROMPTS)
    run.decode(list(PROMPTS), 2)
    slot, prompt = CHUNKED
    run.pipeline.step([(slot, 0, prompt[:6])])
    scores = run.pipeline.step([(slot, 6, prompt[6:])])[0]
    run.slots["chunked"], run.logits["chunked"] = slot, [scores]
    run.tokens["chunked"] = [*prompt, int(scores.argmax())]
    run.decode([*PROMPTS, "chunked"], 3)
    for name, (tokens, logits) in expected.items():
        count = len(run.logits[name])
        assert run.tokens[name] == tokens[: len(run.tokens[name])]
        assert (torch.stack(run.logits[name]) - logits[:count]).abs().max() <= 1e-4
    check_planned_bytes(load_model_dir(folder), pipeline, cuts)


def check_planned_bytes(model, pipeline, cuts):
    """The plan knows what stages send and keep."""
    config, tokens = pipeline.master.config, pipeline.num_blocks * 16
    assert model.message_features == layout_of(config).features
    assert kv_sources(config) == tuple(layer.kv_source for layer in model.layers)
    for (first, end), cache in zip(itertools.pairwise(cuts), pipeline.caches, strict=True):
        kinds = (*model.layer_kinds[first:end], *model.copied_kinds(first, end))
        assert cache.nbytes == sum(layer_kv_bytes(model, kind, 1, tokens, 32) for kind in kinds)


def test_few_bits_give_equal_numbers_over_any_stages(folder):
    found = [_quantized_logits(folder, cuts) for cuts in (CUTS[0], CUTS[-1])]
    torch.testing.assert_close(found[1], found[0], atol=0, rtol=0)
    assert found[0].isfinite().all()


def _quantized_logits(folder, cuts):
    bits, options = [4, 8, 3, 4, 8, 16], {"dtype": torch.float32, "device": "cpu"}
    pipeline = Pipeline(folder, cuts, kv_bits=8)
    pipeline.stages = [
        load_stage(folder, first, end, bits[first:end], **options)
        for first, end in itertools.pairwise(cuts)
    ]
    pipeline.step([(0, 0, CHUNKED[1][:6]), (1, 0, [7, 8])])
    return pipeline.step([(0, 6, CHUNKED[1][6:]), (1, 2, [9])])
