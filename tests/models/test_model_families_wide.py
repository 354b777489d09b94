"""Every family in ``TESTED``, tiny: ragged rows, chunks, one to three stages, few bits."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers.tiny_configs import GEMMA4_EXPERTS, TESTED, tiny_config
from helpers.tiny_models import (
    Pipeline,
    Sequences,
    generate_alone,
    load_reference,
    make_tiny_model_script,
)

from llmpq.dist.kv.cache import KVCache
from llmpq.errors import SpecError
from llmpq.models import Checkpoint, DecoderStage, PackedBatch, kv_shapes, load_config
from llmpq.quant.loading.loader import load_stage
from llmpq.quant.modules.layer import matrices_of
from llmpq.quant.quantizers.rtn import quantize
from llmpq.spec.precision import default_precision

torch.set_num_threads(1)

PROMPTS = {"long": (3, [1, 2, 3, 4, 5, 11, 12, 13, 14]), "short": (0, [7, 8]), "one": (4, [61])}
LATER = {"later": (0, [21, 5, 60])}
CHUNKED = (1, [9, 3, 27, 44, 5, 5, 90, 12, 31, 2])
CUTS = ([0, 3], [0, 1, 3], [0, 1, 2, 3])
MORE = {
    "deepseek_v2 lite": ("deepseek_v2", {"q_lora_rank": None}),
    "deepseek_v3 yarn": (
        "deepseek_v3",
        {
            "rope_parameters": {
                "rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "mscale": 1.0,
                "mscale_all_dim": 1.0, "original_max_position_embeddings": 32,
            }
        },
    ),
    "falcon groups": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon heads": ("falcon", {"multi_query": False, "parallel_attn": False, "bias": True}),
    "falcon_h1 normed": ("falcon_h1", {"mamba_rms_norm": True, "mamba_n_groups": 2}),
    "gemma4 experts": ("gemma4_text", {**GEMMA4_EXPERTS, "head_dim": 16, "global_head_dim": 32}),
    "gpt_bigcode heads": ("gpt_bigcode", {"multi_query": False}),
    "jamba experts": ("jamba", {"expert_layer_period": 1}),
    "llama4 dense": ("llama4_text", {"interleave_moe_layer_step": 2, "num_experts_per_tok": 1}),
    "mpt three heads": ("mpt", {"n_heads": 3, "d_model": 24}),
    "qwen2_moe dense": ("qwen2_moe", {"mlp_only_layers": [1]}),
}  # fmt: skip
DIFFERENT = (
    "bloom", "dbrx", "deepseek_v3", "falcon_h1", "falcon groups", "gemma4 experts", "gpt_oss",
    "granitemoehybrid", "jamba", "jetmoe", "minimax", "llama", "llama4_text", "mpt", "nemotron_h",
    "opt", "phi3", "qwen3_next",
)  # fmt: skip
"""Whose matrices differ: in rows or columns, merged, of experts, of layers with a state."""
CASES = {**{name: (name, {}) for name in sorted(TESTED)}, **MORE}


def _save(folder, case):
    model_type, overrides = CASES[case]
    script = make_tiny_model_script()
    model = script.make_model(tiny_config(model_type, **overrides), seed=1)
    return script.save_model(model, folder, dtype=torch.float32)


@pytest.mark.parametrize("case", CASES)
def test_tested_family_generates_the_tokens_of_transformers(case, tmp_path):
    _assert_generates(_save(tmp_path, case), CUTS[len(case) % 3])


@pytest.mark.slow  # a minute: the other numbers of stages
@pytest.mark.parametrize("case", CASES)
def test_tested_family_generates_the_same_over_any_number_of_stages(case, tmp_path):
    folder = _save(tmp_path, case)
    for cuts in CUTS:
        _assert_generates(folder, cuts)


def _assert_generates(folder, cuts):
    run = Sequences(Pipeline(folder, cuts))
    run.prefill(PROMPTS)
    run.decode(list(PROMPTS), 3)
    slot, prompt = CHUNKED
    run.pipeline.step([(slot, 0, prompt[:6])])
    scores = run.pipeline.step([(slot, 6, prompt[6:])])[0]
    run.slots["chunked"], run.logits["chunked"] = slot, [scores]
    run.tokens["chunked"] = [*prompt, int(scores.argmax())]
    run.decode([*PROMPTS, "chunked"], 4)
    # Two sequences end, and another one takes the blocks of the first.
    run.prefill(LATER)
    run.decode([*LATER, "long", "chunked"], 1)

    reference = load_reference(folder)
    for name, (_, tokens) in {**PROMPTS, "chunked": CHUNKED, **LATER}.items():
        expected, logits = generate_alone(reference, tokens, len(run.logits[name]))
        assert run.tokens[name] == expected
        assert (torch.stack(run.logits[name]) - logits).abs().max() <= 1e-4


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in DIFFERENT else pytest.mark.slow) for case in CASES],
)
def test_quantized_stages_equal_one_quantized_process(case, tmp_path):
    folder = _save(tmp_path, case)
    found = [_quantized_logits(folder, cuts) for cuts in ([0, 3], [0, 1, 3])]
    torch.testing.assert_close(found[0], found[1], atol=0, rtol=0)
    assert found[0].isfinite().all()


def _quantized_logits(folder, cuts):
    bits, options = [4, 8, 4], {"dtype": torch.float32, "device": "cpu"}
    pipeline = Pipeline(folder, cuts)
    pipeline.stages = [
        load_stage(folder, first, end, bits[first:end], **options)
        for first, end in itertools.pairwise(cuts)
    ]
    pipeline.step([(0, 0, CHUNKED[1][:6]), (1, 0, [7, 8])])
    return pipeline.step([(0, 6, CHUNKED[1][6:]), (1, 2, [9])])


@pytest.mark.parametrize("case", ["dbrx", "gpt_oss", "jetmoe", "llama4_text"])
def test_quantized_experts_compute_with_their_dequantized_weights(case, tmp_path):
    folder, bits = _save(tmp_path, case), 4
    checkpoint = Checkpoint(folder)
    state = checkpoint.layer_state_dict(1)
    layer = checkpoint.empty_layer(1)
    matrices = matrices_of(layer)
    assert any(matrix.expert for matrix in matrices)
    for matrix in matrices:
        weight = state[matrix.key] if matrix.expert is None else state[matrix.key][matrix.expert]
        packed = quantize(weight, default_precision(bits), torch.float32)
        weight.copy_(packed.dequantize(torch.float32))
    layer.load_state_dict(state, assign=True)
    hidden = torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(0))
    batch = PackedBatch.whole([6, 3])
    expected = DecoderStage(checkpoint.config, [layer], 1)(hidden, batch)
    loaded = load_stage(folder, 1, 2, [bits], dtype=torch.float32, device="cpu")
    found = loaded(hidden, batch)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_latent_attention_stores_a_latent_vector_for_all_heads(tmp_path):
    config = Checkpoint(_save(tmp_path, "deepseek_v3")).config
    shapes = kv_shapes(config, 0, 2)
    cache = KVCache(shapes, 0, num_blocks=1, block_size=16, dtype=torch.float32)
    assert cache.nbytes == 2 * 16 * (config.kv_lora_rank + config.qk_rope_head_dim) * 4
    with pytest.raises(SpecError, match=r"8 bits for keys of 16 and values of 8 features"):
        KVCache(shapes, 0, num_blocks=1, dtype=torch.float32, kv_bits=8)


@pytest.mark.parametrize("field", ["num_kv_shared_layers", "hidden_size_per_layer_input"])
def test_families_whose_layers_need_more_than_hidden_states_are_named(field, tmp_path):
    tiny_config("llama", **{field: 2}).save_pretrained(tmp_path)
    with pytest.raises(SpecError, match=f"'{field}' = 2: .*planned, not run"):
        load_config(tmp_path)
