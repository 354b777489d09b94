"""Every family: a pipeline on ragged rows generates the tokens of transformers."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from helpers.tiny_models import Pipeline, Sequences, generate_alone, load_reference
from safetensors.torch import load_file, save_file

from llmpq.dist.kv.cache import KVCache
from llmpq.errors import SpecError
from llmpq.models import PackedBatch, kv_shapes

torch.set_num_threads(1)

LONG, SHORT, MIDDLE, NEXT = [1, 2, 3, 4, 5, 11, 12, 13, 14], [7, 8], [9, 10, 11, 50, 51], [61]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 8,
}

CASES = {
    "opt": ("opt", {}),
    "opt-350m": ("opt", {"word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    "opt-untied": ("opt", {"tie_word_embeddings": False}),
    "bloom": ("bloom", {}),
    "bloom-3-heads": ("bloom", {"n_head": 3, "hidden_size": 24}),
    "llama": ("llama", {}),
    "llama-biased-tied": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-dynamic-rope": (
        "llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
            "max_position_embeddings": 8,
        },
    ),
    "mistral-sliding": ("mistral", {"sliding_window": 6}),
    "qwen2": ("qwen2", {}),
    "qwen2-mixed-windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 2.0}),
    "gemma3": ("gemma3", {}),
    "cohere": ("cohere", {"logit_scale": 0.3}),
    "granite": (
        "granite",
        {"embedding_multiplier": 1.5, "logits_scaling": 0.3, "residual_multiplier": 0.7},
    ),
    "phi": ("phi", {"qk_layernorm": True}),
    "phi3": ("phi3", {}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox-serial": ("gpt_neox", {"use_parallel_residual": False}),
    "mixtral": ("mixtral", {}),
    "qwen3_moe": ("qwen3_moe", {"mlp_only_layers": [1]}),
}


@pytest.mark.parametrize("case", CASES)
def test_pipeline_generates_the_tokens_of_transformers(tiny_model, case):
    family, overrides = CASES[case]
    model_dir = tiny_model(family, seed=1, **overrides)
    run = Sequences(Pipeline(model_dir, [0, 1, 2, 3]))

    # Slots out of order; then one is given up and taken by a shorter prompt while others go on.
    run.prefill({"long": (3, LONG), "short": (0, SHORT), "middle": (4, MIDDLE)})
    run.decode(["long", "short", "middle"], 5)
    run.prefill({"next": (3, NEXT)})
    run.decode(["middle", "next", "short"], 6)

    model = load_reference(model_dir)
    prompts = {"long": LONG, "short": SHORT, "middle": MIDDLE, "next": NEXT}
    for name, prompt in prompts.items():
        tokens, logits = generate_alone(model, prompt, len(run.logits[name]))
        assert run.tokens[name] == tokens
        assert (torch.stack(run.logits[name]) - logits).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("family", "overrides", "other"),
    [
        # Beyond the original length and within it; twice beyond it, one further than the other.
        ("phi3", {"rope_parameters": LONGROPE}, SHORT),
        (*CASES["llama-dynamic-rope"], LONG),
    ],
    ids=["longrope", "dynamic"],
)
def test_rotary_factors_of_a_row_do_not_depend_on_other_rows(tiny_model, family, overrides, other):
    model_dir = tiny_model(family, seed=1, **overrides)
    run = Sequences(Pipeline(model_dir, [0, 3]))
    prompts = {"long": LONG + LONG[::-1], "other": other}
    run.prefill({name: (1 - i, prompt) for i, (name, prompt) in enumerate(prompts.items())})
    run.decode(["long", "other"], 4)
    for name, prompt in prompts.items():
        # A fresh model each: transformers' own keeps the factors of the longest prompt it met.
        tokens, logits = generate_alone(load_reference(model_dir), prompt, 5)
        assert run.tokens[name] == tokens
        assert (torch.stack(run.logits[name]) - logits).abs().max() <= 1e-4


@pytest.mark.parametrize("case", ["llama", "bloom", "gemma3", "mistral-sliding"])
def test_prefill_in_chunks_equals_prefill_at_once(tiny_model, case):
    family, overrides = CASES[case]
    model_dir = tiny_model(family, seed=1, **overrides)
    pipeline = Pipeline(model_dir, [0, 2, 3])
    whole = pipeline.step([(1, 0, LONG), (2, 0, MIDDLE)])
    pipeline.step([(4, 0, LONG[:4]), (0, 0, MIDDLE[:1])])
    chunked = pipeline.step([(4, 4, LONG[4:]), (0, 1, MIDDLE[1:])])
    torch.testing.assert_close(chunked, whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [("phi3", {"rope_parameters": LONGROPE}), CASES["llama-dynamic-rope"]],
    ids=["longrope", "dynamic"],
)
def test_chunks_of_a_prompt_have_the_angles_of_the_whole_prompt(tiny_model, family, overrides):
    model_dir = tiny_model(family, seed=1, **overrides)
    pipeline, blocks, prompt = Pipeline(model_dir, [0, 3]), (0, 1), LONG + LONG[::-1]
    tokens, logits = generate_alone(load_reference(model_dir), prompt, 4)
    # A preempted answer is computed again, too; only longrope gives its prompt other angles then.
    lengths = [len(prompt)] if family == "llama" else [len(prompt) + 3]
    for start, end in ((0, 5), (5, 11), (11, 18)):
        found = pipeline.packed_step([(blocks, start, prompt[start:end])], lengths)
    torch.testing.assert_close(found[0], logits[0], atol=1e-4, rtol=0)
    for start, end in ((0, 6), (6, 19), (19, 21)):
        found = pipeline.packed_step([(blocks, start, tokens[start:end])], lengths)
    torch.testing.assert_close(found[0], logits[3], atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", ["llama", "bloom", "gemma2", "mistral-sliding"])
def test_stage_without_a_cache_equals_prefill(tiny_model, case):
    family, overrides = CASES[case]
    model_dir = tiny_model(family, seed=1, **overrides)
    pipeline = Pipeline(model_dir, [0, 3])
    expected = pipeline.step([(0, 0, LONG), (1, 0, MIDDLE)])

    batch = PackedBatch.whole([len(LONG), len(MIDDLE)])
    hidden = pipeline.master.embed(torch.tensor([LONG + MIDDLE]), batch.positions)
    hidden = pipeline.stages[0](hidden, batch)
    found = pipeline.master.logits(hidden[0, batch.last_tokens])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_whole_sequences_of_one_length_equal_packed_ones(tiny_model):
    stage = Pipeline(tiny_model("llama", seed=1), [0, 3]).stages[0]
    hidden = torch.randn(2, 5, 32)
    packed = stage(hidden.view(1, 10, 32), PackedBatch.whole([5, 5]))
    torch.testing.assert_close(stage.run_whole(hidden), packed.view(2, 5, 32), atol=0, rtol=0)


def test_a_row_does_not_depend_on_its_neighbours(tiny_model):
    pipeline = Pipeline(tiny_model("llama", seed=1), [0, 3])
    alone = pipeline.step([(0, 0, SHORT)])[0]
    together = pipeline.step([(2, 0, LONG), (0, 0, SHORT)])[1]
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["llama", "bloom", "gemma2"])
def test_bfloat16_follows_transformers(tiny_model, family):
    model_dir = tiny_model(family, seed=1, dtype=torch.bfloat16)
    found = Pipeline(model_dir, [0, 2, 3]).step([(3, 0, MIDDLE), (1, 0, SHORT)])
    _, expected = generate_alone(load_reference(model_dir, torch.bfloat16), MIDDLE, 1)
    torch.testing.assert_close(found[:1], expected, atol=0.05, rtol=0.02)


def test_the_last_learned_position_is_known(tiny_model):
    model_dir = tiny_model("opt", seed=1, shape={"max_positions": 12})
    alone = Pipeline(model_dir, [0, 3]).step([(0, 0, [*LONG, 5, 6, 7])])[0]
    pipeline = Pipeline(model_dir, [0, 3])
    pipeline.step([(1, 0, LONG)])
    together = pipeline.step([(1, len(LONG), [5, 6, 7]), (2, 0, MIDDLE)])[0]
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


def test_hidden_states_of_another_shape_raise_an_error(tiny_model):
    stage = Pipeline(tiny_model("llama", seed=1), [0, 3]).stages[0]
    with pytest.raises(SpecError, match=r"hidden states \[2, 1, 32\] for 6 tokens"):
        stage(torch.zeros(2, 1, 32), PackedBatch.whole([3, 3]))


def test_late_rows_without_a_cache_raise_an_error(tiny_model):
    stage = Pipeline(tiny_model("llama", seed=1), [0, 3]).stages[0]
    with pytest.raises(SpecError, match="begin at position 0"):
        stage(torch.zeros(1, 2, 32), PackedBatch(block_tables=[()], starts=[1], counts=[2]))


def test_tied_head_is_stored_once(tiny_model):
    master = Pipeline(tiny_model("opt", seed=1), [0, 3]).master
    untied = Pipeline(tiny_model("opt", seed=1, tie_word_embeddings=False), [0, 3]).master
    count = sum(p.numel() for p in master.parameters())
    assert sum(p.numel() for p in untied.parameters()) == count + 100 * 32


def test_logits_are_float32_for_every_dtype(tiny_model):
    master = Pipeline(tiny_model("gemma2", seed=1), [0, 3]).master.bfloat16()
    assert master.embed(torch.tensor([[1]]), torch.tensor([[0]])).dtype == torch.bfloat16
    assert master.logits(torch.ones(2, 32, dtype=torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize("family", ["opt", "bloom", "gemma2", "gemma3", "llama"])
def test_all_weights_move_to_the_device(tiny_model, family):
    # The meta device mixes with no other: a tensor left on the host would raise here.
    pipeline = Pipeline(tiny_model(family, seed=1), [0, 3])
    master, stage = pipeline.master.to("meta"), pipeline.stages[0].to("meta")
    shapes = kv_shapes(master.config, 0, 3)
    cache = KVCache(shapes, 0, num_blocks=3, dtype=torch.float32, device="meta")
    for starts, counts in (([0, 0], [4, 2]), ([2, 4], [1, 1]), ([4, 0], [3, 5])):
        batch = PackedBatch(block_tables=[(2,), (0,)], starts=starts, counts=counts)
        token_ids = torch.zeros(1, batch.tokens, dtype=torch.int64, device="meta")
        hidden = stage(master.embed(token_ids, batch.positions), batch, cache)
        assert master.logits(hidden[0]).device.type == "meta"


def _with_fields(model_dir, folder, **fields):
    """Copy a model and change fields of its configuration."""
    shutil.copytree(model_dir, folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return folder


def _assert_tokens_of(reference_dir, model_dir):
    """Compare the tokens of a model with those of transformers on a directory."""
    run = Sequences(Pipeline(model_dir, [0, 1, 3]))
    run.prefill({"long": (1, LONG), "middle": (0, MIDDLE)})
    run.decode(["long", "middle"], 7)
    model = load_reference(reference_dir)
    for name, prompt in (("long", LONG), ("middle", MIDDLE)):
        tokens, logits = generate_alone(model, prompt, 8)
        assert run.tokens[name] == tokens
        assert (torch.stack(run.logits[name]) - logits).abs().max() <= 1e-4


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "opt"])
def test_a_stored_head_is_used_whatever_the_flag_says(tiny_model, tmp_path, family):
    untied = tiny_model(family, seed=1, tie_word_embeddings=False)
    model_dir = _with_fields(untied, tmp_path / "model", tie_word_embeddings=True)
    _assert_tokens_of(model_dir, model_dir)


def test_a_tied_matrix_that_is_stored_as_the_head_is_both(tiny_model, tmp_path):
    model_dir = _with_fields(tiny_model("llama", seed=1, tie_word_embeddings=True), tmp_path / "m")
    file = model_dir / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    _assert_tokens_of(model_dir, model_dir)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_windows_by_layer_need_no_flag(tiny_model, tmp_path, family):
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    windows = {"sliding_window": 4, "layer_types": kinds}
    plain = tiny_model(family, seed=1)
    # transformers raises a TypeError without the flag.
    reference = _with_fields(plain, tmp_path / "reference", use_sliding_window=True, **windows)
    model_dir = _with_fields(plain, tmp_path / "model", **windows)
    fields = json.loads((model_dir / "config.json").read_text())
    fields.pop("use_sliding_window", None)
    (model_dir / "config.json").write_text(json.dumps(fields))
    _assert_tokens_of(reference, model_dir)
