"""Decoders of transformers without a record: each runs, or is refused in one sentence."""

from __future__ import annotations

import pytest
import torch
import transformers
from helpers.tiny_configs import tiny_config
from helpers.tiny_models import (
    Pipeline,
    Sequences,
    generate_alone,
    load_reference,
    make_tiny_model_script,
)
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from llmpq.errors import SpecError
from llmpq.models.adapter import prepare_config
from llmpq.spec.families import Family, family_of

torch.set_num_threads(1)

_LATENT = {"num_key_value_heads": 4, "head_dim": ...}
RUN = (
    "aria_text", "axk1", "cwm", "flint", "gemma4_unified_text", "gpt-sw3", "kolibri1", "laguna",
    "minimax_m3_vl_text",
)  # fmt: skip
"""Run with a warning."""
ENCODERS = frozenset((
    "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie",
    "megatron-bert", "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert",
    "roformer", "trocr", "xlm", "xlm-roberta", "xlm-roberta-xl", "xlnet", "xmod",
))  # fmt: skip
"""Encoders that can be made decoders."""
DRAFTERS = frozenset(("gemma4_assistant", "gemma4_unified_assistant"))
"""Of other models, whose keys and values they read."""
REFUSED = {
    "axk2": "'layer_types[0]': found 'indexed_attention'",
    "beam": "'rope_parameters.full_attention': found None",
    "biogpt": "found no 'norm'",
    "cohere2_moe": "'logit_scale' = 0.7 is not supported",
    "cohere_compass_text": "cannot be built",
    "cpmant": "found no 'embed_tokens'",
    "ctrl": "found no 'embed_tokens'",
    "deepseek_v32": "'layer_types[0]': found 'indexed_attention'",
    "deepseek_v4": "'layer_types[0]': found 'heavily_compressed_attention'",
    "dots3_note_text": "'layer_types[0]': found 'indexed_attention'",
    "glm_moe_dsa": "'layer_types[0]': found 'indexed_attention'",
    "gpt_neo": "found no 'embed_tokens'",
    "gpt_neox_japanese": "found no 'embed_tokens'",
    "granite_swa": "'embedding_multiplier' = 0.7 is not supported",
    "granitemoe_swa": "'embedding_multiplier' = 0.7 is not supported",
    "granitemoeshared": "'embedding_multiplier' = 0.7 is not supported",
    "hrm_text": "found no 'embed_tokens'",
    "hy_v4": "'layer_types[0]': found 'indexed_attention'",
    "hyperclovax": "'embedding_multiplier' = 0.7 is not supported",
    "inkling2_text": "'layer_types[0]': found 'hybrid_sliding'",
    "inkling_text": "'layer_types[0]': found 'hybrid_sliding'",
    "lfm3": "found no 'norm'",
    "longcat_flash": "'num_layers': found 2",
    "mimo_v2_flash": "'v_head_dim': found 12",
    "modernbert-decoder": "found no 'embed_tokens'",
    "openai-gpt": "found no 'embed_tokens'",
    "qwen4_exp_text": "found no 'norm'",
    "recurrent_gemma": "found no 'norm'",
    "rwkv": "found no 'embed_tokens'",
    "xglm": "found no 'norm'",
    "xlstm": "found no",
    "zamba": "'layer_types[2]': found 'hybrid'",
    "zamba2": "'layer_types[2]': found 'hybrid'",
    "zaya": "'layer_types[0]': found 'hybrid'",
}
"""And what the sentence says."""
FIELDS = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v32", "glm_moe_dsa"), _LATENT),
    "cwm": {"bos_token_id": 1, "eos_token_id": 2},
    "dots3_note_text": {"num_key_value_heads": 4},
    "gpt_neo": {"num_hidden_layers": 3, "attention_types": [[["global", "local", "global"], 1]]},
    "longcat_flash": {**_LATENT, "num_layers": 2, "num_hidden_layers": ...},
    "modernbert-decoder": {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "xlstm": {"v_head_dim": ...},
    "zamba2": {"layer_types": ["mamba", "mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}
"""Fields that a tiny model of these needs."""


def _no_record(model_type):
    return Family(name=model_type, is_tested=False)


def is_other(model_type):
    """Return whether transformers has a decoder of text alone that has no record here."""
    if model_type in ENCODERS | DRAFTERS or family_of(model_type) != _no_record(model_type):
        return False
    own = CONFIG_MAPPING[model_type]()
    return not own.sub_configs and not getattr(own, "is_encoder_decoder", False)


def test_every_decoder_of_transformers_is_here():
    if transformers.__version__ != "5.23.0":
        pytest.skip("the list is that of transformers 5.23")
    found = {name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if is_other(name)}
    assert found == {*RUN, *REFUSED}


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_decoder_that_is_not_run_is_refused_in_one_sentence(model_type):
    config = tiny_config(model_type, **FIELDS.get(model_type, {}))
    with pytest.raises(SpecError) as caught:
        prepare_config(config)
    assert REFUSED[model_type] in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model_type", RUN)
def test_a_usual_decoder_makes_the_tokens_of_transformers(model_type, tmp_path):
    script = make_tiny_model_script()
    model = script.make_model(tiny_config(model_type, **FIELDS.get(model_type, {})), seed=1)
    script.save_model(model, tmp_path, dtype=torch.float32)
    reference = load_reference(tmp_path)
    reference.generation_config.eos_token_id = None
    prompt = [(7 * number) % 90 + 3 for number in range(11)]
    expected, _ = generate_alone(reference, prompt, 6)
    run = Sequences(Pipeline(tmp_path, (0, 1, reference.config.num_hidden_layers)))
    run.prefill({"one": (0, prompt)})
    run.decode(["one"], 5)
    assert run.tokens["one"] == expected
