"""Every family against transformers itself: same parameters, same operators, same windows."""

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from llmpq.errors import SpecError
from llmpq.spec.huggingface.families import load_model_dir, model_from_config
from llmpq.spec.model import ModelSpec

torch.set_num_threads(1)

ROPE = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 160,
    "max_position_embeddings": 128,
}
MHA = {key: value for key, value in ROPE.items() if key != "num_key_value_heads"}
OPT = {
    "model_type": "opt",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_dim": 256,
    "vocab_size": 160,
    "max_position_embeddings": 32,
}

CASES: dict[str, dict[str, Any]] = {
    "opt": OPT,
    "opt untied": {**OPT, "tie_word_embeddings": False},
    "opt-350m": {**OPT, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
    "opt no bias": {**OPT, "enable_bias": False, "layer_norm_elementwise_affine": False},
    "opt old": {**OPT, "_remove_final_layer_norm": True},
    "bloom": {
        "model_type": "bloom", "n_embed": 64, "n_layer": 2, "num_attention_heads": 4,
        "vocab_size": 160,
    },
    "bloom n_head": {
        "model_type": "bloom", "hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 160,
    },
    "gpt_neox": {**MHA, "model_type": "gpt_neox"},
    "gpt_neox no bias": {**MHA, "model_type": "gpt_neox", "attention_bias": False},
    "llama": {**ROPE, "model_type": "llama"},
    "llama tied": {**ROPE, "model_type": "llama", "tie_word_embeddings": True},
    "llama biased": {
        **ROPE, "model_type": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 32,
    },
    "mistral": {**ROPE, "model_type": "mistral", "sliding_window": 16},
    "mistral wide heads": {**ROPE, "model_type": "mistral", "head_dim": 24, "sliding_window": None},
    "qwen2": {**ROPE, "model_type": "qwen2"},
    "qwen2 windows": {
        **ROPE, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16,
        "max_window_layers": 1,
    },
    "qwen3": {**ROPE, "model_type": "qwen3", "head_dim": 32},
    "qwen3 default head": {**ROPE, "model_type": "qwen3"},
    "qwen3 layer types": {
        **ROPE, "model_type": "qwen3", "head_dim": 16, "use_sliding_window": True,
        "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "gemma": {**ROPE, "model_type": "gemma", "head_dim": 32},
    "gemma default head": {**ROPE, "model_type": "gemma"},
    "gemma2": {**ROPE, "model_type": "gemma2", "head_dim": 32, "sliding_window": 16},
    "gemma3": {**ROPE, "model_type": "gemma3_text", "head_dim": 32, "num_hidden_layers": 7},
    "gemma3 pattern": {
        **ROPE, "model_type": "gemma3_text", "head_dim": 32, "sliding_window_pattern": 3,
    },
    "phi": {**ROPE, "model_type": "phi"},
    "phi qk norm": {**ROPE, "model_type": "phi", "qk_layernorm": True},
    "phi3": {
        **ROPE, "model_type": "phi3", "sliding_window": 64, "pad_token_id": 0, "eos_token_id": 1,
    },
    "mixtral": {**ROPE, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        **ROPE, "model_type": "qwen3_moe", "moe_intermediate_size": 48, "num_experts": 8,
        "num_experts_per_tok": 2, "head_dim": 32,
    },
    "qwen3_moe dense layers": {
        **ROPE, "model_type": "qwen3_moe", "moe_intermediate_size": 48, "num_experts": 8,
        "num_experts_per_tok": 2, "num_hidden_layers": 5, "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
    },
}  # fmt: skip


def build(values: dict[str, Any]) -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))


def spec_of(values: dict[str, Any]) -> ModelSpec:
    # Through JSON, for that is how a file arrives.
    return model_from_config(json.loads(json.dumps(values)), "tiny", "config.json")


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList)]
    return lists[0]


@pytest.mark.parametrize("values", CASES.values(), ids=CASES.keys())
def test_parameters_equal_those_of_transformers(values):
    model, spec = build(values), spec_of(values)
    assert spec.num_layers == len(decoder_layers(model))
    assert spec.parameters == sum(p.numel() for p in model.parameters())
    for layer, one in zip(decoder_layers(model), spec.layers, strict=True):
        assert one.parameters == sum(p.numel() for p in layer.parameters())


@pytest.mark.parametrize("values", CASES.values(), ids=CASES.keys())
def test_operators_are_those_of_transformers(values):
    model, spec = build(values), spec_of(values)
    for layer, one in zip(decoder_layers(model), spec.layers, strict=True):
        linears = {name for name, part in layer.named_modules() if isinstance(part, nn.Linear)}
        matrices = {name for name, p in layer.named_parameters() if p.dim() == 3}
        dense = {op.name for op in one.linears if op.count == 1 and op.quantizable}
        experts = {op.name for op in one.linears if op.count > 1}
        assert dense == linears
        assert experts == matrices
        for op in one.linears:
            found = layer.get_submodule(op.name) if op.name in linears else None
            if found is not None:
                assert tuple(found.weight.shape) == (op.out_features, op.in_features)
                assert (found.bias is not None) == op.bias
            elif op.count > 1:
                shape = tuple(layer.get_parameter(op.name).shape)
                assert shape == (op.count, op.out_features, op.in_features)
                assert op.active == values["num_experts_per_tok"]
            else:
                assert not op.quantizable
                assert layer.get_parameter(f"{op.name}.weight").shape == (
                    op.out_features,
                    op.in_features,
                )


@pytest.mark.parametrize("values", CASES.values(), ids=CASES.keys())
def test_head_and_embedding_equal_those_of_transformers(values):
    model, spec = build(values), spec_of(values)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = head.weight is embedding.weight
    bias = 0 if head.bias is None else head.bias.numel()
    assert (spec.vocab_size, spec.head_in_features) == tuple(head.weight.shape)
    assert spec.head_parameters == bias + (0 if is_tied else head.weight.numel())
    assert spec.hidden_size == model.config.hidden_size


@pytest.mark.parametrize("values", CASES.values(), ids=CASES.keys())
def test_windows_and_heads_equal_those_of_transformers(values):
    config, spec = build(values).config, spec_of(values)
    names = getattr(config, "layer_types", None)
    for index, layer in enumerate(spec.layers):
        window = getattr(config, "sliding_window", None)
        if names is not None and names[index] != "sliding_attention":
            window = None
        assert layer.sliding_window == window
        assert layer.num_heads == config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        assert layer.num_kv_heads == kv_heads
        assert layer.head_dim == (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )


@pytest.mark.parametrize(
    ("family", "missing"),
    [
        ("llama", "num_key_value_heads"),
        ("mistral", "sliding_window"),
        ("qwen3", "tie_word_embeddings"),
        ("gemma2", "sliding_window"),
        ("gemma", "tie_word_embeddings"),
        ("opt", "ffn_dim"),
        ("opt", "max_position_embeddings"),
        ("mixtral", "num_experts_per_tok"),
        ("qwen3_moe dense layers", "moe_intermediate_size"),
    ],
)
def test_a_missing_field_means_what_it_means_to_transformers(family, missing):
    values = {key: value for key, value in CASES[family].items() if key != missing}
    model, spec = build(values), spec_of(values)
    assert spec.parameters == sum(p.numel() for p in model.parameters())
    assert spec.layers[0].sliding_window == getattr(model.config, "sliding_window", None)


@pytest.mark.parametrize(
    ("family", "missing"), [("mistral", 8), ("qwen2", 32), ("gemma", 16), ("gemma2", 4)]
)
def test_missing_key_value_heads_differ_by_family(family, missing):
    values = {**CASES[family], "hidden_size": 256, "num_attention_heads": 32, "head_dim": 8}
    del values["num_key_value_heads"]
    assert spec_of(values).layer_types[0].num_kv_heads == missing
    assert spec_of(values).parameters == sum(p.numel() for p in build(values).parameters())


def test_null_key_value_heads_are_as_many_as_query_heads():
    values = {**CASES["mistral"], "num_key_value_heads": None}
    assert spec_of(values).layer_types[0].num_kv_heads == 4


@settings(max_examples=15, deadline=None)
@given(
    heads=st.integers(1, 4), groups=st.integers(1, 3), head_dim=st.sampled_from([2, 4, 6, 16]),
    layers=st.integers(1, 3), inner=st.integers(1, 40), vocab=st.integers(2, 60),
    tied=st.booleans(), bias=st.booleans(),
)  # fmt: skip
def test_llama_of_any_size_has_transformers_parameters(
    heads, groups, head_dim, layers, inner, vocab, tied, bias
):
    values = {
        "model_type": "llama",
        "hidden_size": heads * groups * head_dim,
        "num_hidden_layers": layers,
        "num_attention_heads": heads * groups,
        "num_key_value_heads": heads,
        "intermediate_size": inner,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "attention_bias": bias,
        "mlp_bias": bias,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    assert spec_of(values).parameters == sum(p.numel() for p in build(values).parameters())


@settings(max_examples=15, deadline=None)
@given(
    heads=st.integers(1, 4), head_dim=st.integers(1, 9), layers=st.integers(1, 3),
    inner=st.integers(1, 40), vocab=st.integers(2, 60), projected=st.integers(1, 20),
    positions=st.integers(1, 40), tied=st.booleans(), before=st.booleans(), bias=st.booleans(),
)  # fmt: skip
def test_opt_of_any_size_has_transformers_parameters(
    heads, head_dim, layers, inner, vocab, projected, positions, tied, before, bias
):
    values = {
        "model_type": "opt",
        "hidden_size": heads * head_dim,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "ffn_dim": inner,
        "vocab_size": vocab,
        "word_embed_proj_dim": projected,
        "max_position_embeddings": positions,
        "tie_word_embeddings": tied,
        "do_layer_norm_before": before,
        "enable_bias": bias,
        "pad_token_id": 1,
    }
    assert spec_of(values).parameters == sum(p.numel() for p in build(values).parameters())


def test_layers_of_one_kind_share_it():
    spec = spec_of(CASES["qwen3_moe dense layers"])
    assert spec.layer_kinds == (0, 1, 0, 0, 0)
    assert len(spec.layer_types) == 2


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": "torch.float16"}, "float16"),
        ({"dtype": "bfloat16", "torch_dtype": "float16"}, "bfloat16"),
        ({"dtype": None, "torch_dtype": "float16"}, "float16"),
        ({}, "bfloat16"),
    ],
)
def test_dtype_is_the_stated_one_or_bfloat16(stated, expected):
    assert spec_of({**OPT, **stated}).dtype == expected


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model_type": "t5"}, "model_type"),
        ({"model_type": None}, "model_type"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": -64}, "hidden_size"),
        ({"hidden_size": 64.0}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": 2**40}, "hidden_size"),
        ({"hidden_size": 66}, "num_attention_heads"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads"),
        ({"vocab_size": {}}, "vocab_size"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype"),
        ({"torch_dtype": 16}, "torch_dtype"),
        ({"dtype": ["float16"]}, "dtype"),
        ({"intermediate_size": None}, "intermediate_size"),
        ({"model_type": "qwen3", "layer_types": ["full_attention"]}, "layer_types"),
        ({"model_type": "qwen3", "layer_types": [1, {}, []]}, "layer_types"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": ["0"]}, "mlp_only_layers"),
    ],
)
def test_nonsense_is_refused_by_file_and_field(change, field):
    values = {**ROPE, "model_type": "llama", **change}
    with pytest.raises(
        SpecError, match=rf"^dir/config\.json: field '{field}'(: found| is missing$)"
    ):
        model_from_config(values, "tiny", "dir/config.json")


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(case=st.sampled_from(sorted(CASES)), junk=JUNK, data=st.data())
def test_any_junk_in_any_field_is_read_or_refused_properly(case, junk, data):
    values = dict(CASES[case])
    fields = [*values, "tie_word_embeddings", "dtype", "head_dim", "layer_types", "sliding_window"]
    values[data.draw(st.sampled_from(sorted(set(fields))))] = junk
    try:
        spec = model_from_config(values, "tiny", "config.json")
    except SpecError as error:
        assert "config.json: field" in str(error)  # noqa: PT017  either outcome is right
    else:
        assert spec.parameters > 0


def test_a_config_that_is_no_object_is_refused():
    with pytest.raises(SpecError, match="expected a JSON object"):
        model_from_config([], "tiny", "config.json")


def test_a_directory_names_the_model_and_the_missing_file(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    with pytest.raises(SpecError, match=r"config\.json: no such file"):
        load_model_dir(folder)
    (folder / "config.json").write_text(json.dumps(OPT))
    assert load_model_dir(folder).name == "my-model"


@pytest.mark.parametrize(
    ("fields", "positions"),
    [
        ({}, 128),
        # As the model card of Qwen3 says; its own length is stated beside it.
        (
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 100,
                }
            },
            400,
        ),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2}}, 256),
        # As DeepSeek-V3 and gpt-oss: the stated length is YaRN's.
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4,
                    "original_max_position_embeddings": 32,
                }
            },
            128,
        ),
        # Of kinds of layers that all have it, the shortest.
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "yarn", "factor": 8.0},
                    "sliding_attention": {"rope_type": "yarn", "factor": 2.0},
                }
            },
            256,
        ),
        # Files with these state the length after them.
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 128),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, 128),
    ],
)
def test_yarn_stretches_the_longest_sequence(fields, positions):
    config = {**ROPE, "model_type": "llama", **fields}
    assert model_from_config(config, "config.json", "tiny").max_positions == positions
