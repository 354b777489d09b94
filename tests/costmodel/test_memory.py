"""Bytes against the paper's formulas, against each other, and against what a loaded layer keeps."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmpq.costmodel.memory import (
    layer_kv_bytes,
    layer_weight_bytes,
    master_bytes,
    temporary_bytes,
    token_kv_bytes,
)
from llmpq.dist.kv.cache import KVCache
from llmpq.models import build_layer, kv_shapes, load_config
from llmpq.quant.modules.layer import QuantLinear, quantize_layer_, stored_bytes
from llmpq.spec import catalog
from llmpq.spec.huggingface.families import load_model_dir, model_from_config
from llmpq.spec.plan import MicroBatching
from llmpq.spec.precision import BITS, DTYPE_BYTES, LAWS
from llmpq.spec.runtime_constants import PROMPT_CHUNK_TOKENS
from llmpq.spec.workload import Workload
from llmpq.units import GIB, MIB

torch.set_num_threads(1)

OPT_30B = catalog.model("facebook/opt-30b")
ENDS = ("is_master", "is_last")
WORK = Workload(batch=32, prompt_tokens=512, new_tokens=100)


def peak(model, eta=4, xi=8, workload=WORK, dtype="float16", kind="cuda", **known):
    return temporary_bytes(
        model,
        workload,
        MicroBatching(prefill=eta, decode=xi),
        dtype=dtype,
        device_kind=kind,
        **{"is_master": False, **known},
    )


def random_layer(config):
    layer = build_layer(config, 0).to_empty(device="cpu")
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return layer


def test_weights_of_an_opt_layer_are_the_papers_formula():
    h, f = 7168, 4 * 7168
    matrices, biases_and_norms = 4 * h * h + 2 * h * f, (4 * h + f + h + 4 * h) * 2
    for bits, groups_bytes in ((16, 0), (4, 4), (3, 4)):
        scales = matrices // 128 * groups_bytes
        expected = matrices * bits // 8 + scales + biases_and_norms
        assert layer_weight_bytes(OPT_30B, 0, bits, "float16") == expected
    channels = 4 * h + f + h
    expected = matrices + channels * 2 + biases_and_norms
    assert layer_weight_bytes(OPT_30B, 0, 8, "float16") == expected


@given(
    name=st.sampled_from(catalog.model_names()), dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    kind=st.sampled_from(["cpu", "cuda"]),
)  # fmt: skip
def test_more_bits_never_take_fewer_bytes(name, dtype, kind):
    model = catalog.model(name)
    for index in range(len(model.layer_types)):
        sizes = [layer_weight_bytes(model, index, bits, dtype, kind) for bits in sorted(BITS)]
        assert sizes == sorted(sizes)
        assert len(set(sizes)) == len(sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_weight_bytes_are_those_of_the_loaded_layer(tiny_model, family, bits, dtype):
    folder = tiny_model(family)
    layer = random_layer(load_config(folder))
    quantize_layer_(layer, bits, dtype)
    name = str(dtype).removeprefix("torch.")
    kernels = {m.backend_name for m in layer.modules() if isinstance(m, QuantLinear)}
    kernel = next(iter(kernels & set(LAWS)), None)  # where there is no compiler
    assert stored_bytes(layer) == layer_weight_bytes(load_model_dir(folder), 0, bits, name, kernel)


@given(
    slots=st.integers(1, 64), tokens=st.integers(1, 4096), kv_bits=st.sampled_from([4, 8, 16, 32])
)
def test_kv_bytes_are_two_k_d_values_a_token(slots, tokens, kv_bits):
    model = catalog.model("meta-llama/Llama-3.1-70B")
    scales = 2 * 8 * 2 if kv_bits <= 8 else 0  # 16 bits for each key and value of a head
    per_token = 2 * 8 * 128 * kv_bits // 8 + scales
    assert token_kv_bytes(model, 0, tokens, kv_bits) == tokens * per_token
    blocks = slots * -(-tokens // 16)
    assert layer_kv_bytes(model, 0, slots, tokens, kv_bits) == blocks * 16 * per_token


def test_kv_bytes_are_those_of_the_cache(tiny_model):
    folder = tiny_model("llama")
    model = load_model_dir(folder)
    cache = KVCache(
        kv_shapes(load_config(folder), 0, model.num_layers),
        0,
        num_blocks=3 * 2,
        dtype=torch.bfloat16,
    )
    predicted = [layer_kv_bytes(model, kind, 3, 20, 16) for kind in model.layer_kinds]
    assert cache.nbytes == sum(predicted)


def test_tied_embeddings_count_once():
    config = {
        "model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 4, "vocab_size": 100,
    }  # fmt: skip
    tied, apart = (
        model_from_config({**config, "tie_word_embeddings": flag}, "m", "c")
        for flag in (True, False)
    )
    assert master_bytes(tied, "float16") == (100 * 8 + 8) * 2
    assert master_bytes(apart, "float32") == (2 * 100 * 8 + 8) * 4


@given(
    name=st.sampled_from(catalog.model_names()), eta=st.integers(1, 16), xi=st.integers(1, 16),
    kind=st.sampled_from(["cpu", "cuda"]), dtype=st.sampled_from(sorted(DTYPE_BYTES)),
)  # fmt: skip
def test_larger_micro_batches_and_longer_sequences_never_need_less(name, eta, xi, kind, dtype):
    model = catalog.model(name)
    here = peak(model, eta, xi, dtype=dtype, kind=kind)
    assert peak(model, eta + 1, xi, dtype=dtype, kind=kind) >= here
    assert peak(model, eta, xi + 1, dtype=dtype, kind=kind) >= here
    longer = Workload(batch=32, prompt_tokens=600, new_tokens=200)
    assert peak(model, eta, xi, workload=longer, dtype=dtype, kind=kind) >= here
    # The first stage and the last have one link each.
    ends = [peak(model, eta, xi, dtype=dtype, kind=kind, **{end: True}) for end in ENDS]
    assert ends[0] >= ends[1]
    assert here >= ends[1]


@given(
    name=st.sampled_from(catalog.model_names()),
    tokens=st.integers(PROMPT_CHUNK_TOKENS + 1, 2**21),
    kind=st.sampled_from(["cpu", "cuda"]),
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    eta=st.integers(1, 8),
)
def test_memory_never_grows_with_the_square_of_the_prompt(name, tokens, kind, dtype, eta):
    model = catalog.model(name)

    def of(tokens):
        work = Workload(batch=8, prompt_tokens=tokens, new_tokens=1)
        return peak(model, eta, 1, workload=work, dtype=dtype, kind=kind)

    assert of(tokens) <= of(2 * tokens) <= 2 * of(tokens) + MIB


def test_a_prompt_takes_the_memory_of_a_chunk_and_of_its_context():
    """Llama-3.1-8B at 16 bits with 131,072 tokens runs on 48 GB (vllm#34076 and others)."""
    model = catalog.model("meta-llama/Llama-3.1-8B")
    work = Workload(batch=1, prompt_tokens=131_000, new_tokens=72)
    found = peak(model, 1, 1, workload=work, dtype="bfloat16", is_master=True)
    # Keys and values of a sequence in one layer, gathered and repeated for four query heads each.
    gathered = 2 * (8 + 32) * 128 * 2 * 131_072
    assert gathered < found < gathered + 3 * GIB
    whole = Workload(batch=1, prompt_tokens=PROMPT_CHUNK_TOKENS, new_tokens=72)
    assert peak(model, 1, 1, workload=whole, dtype="bfloat16", is_master=True) < 0.5 * GIB


GEMMA3_27B = {
    "model_type": "gemma3_text", "hidden_size": 5376, "num_hidden_layers": 62,
    "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128,
    "intermediate_size": 21504, "vocab_size": 262208, "sliding_window": 1024,
    "sliding_window_pattern": 6,
}  # fmt: skip


@pytest.mark.parametrize(("tokens", "of_windows"), [(32_768, 2.91), (131_072, 10.41)])
def test_layers_with_windows_keep_their_window_and_a_chunk(tokens, of_windows):
    """Reported: 10.4 GiB for Gemma 3 27B at 131,072 tokens, not 62 (unsloth#4757)."""
    model = model_from_config(GEMMA3_27B, "gemma-3-27b", "config.json")
    sizes = [layer_kv_bytes(model, kind, 1, tokens, 16) for kind in model.layer_kinds]
    published = catalog.model("google/gemma-3-27b-it")
    assert sizes == [
        layer_kv_bytes(published, kind, 1, tokens, 16) for kind in published.layer_kinds
    ]
    sliding = sum(layer.sliding_window is not None for layer in model.layers)
    assert sliding == 52
    token_bytes = 2 * 16 * 128 * 2
    chunk = sliding * (PROMPT_CHUNK_TOKENS + 2 * 16) * token_bytes
    exact = of_windows * GIB
    assert 0.999 * exact <= sum(sizes) <= 1.001 * exact + chunk
    kept = [layer_kv_bytes(model, kind, 1, tokens, 16, keeps_all=True) for kind in (0, 1)]
    assert kept == [tokens * token_bytes] * 2
