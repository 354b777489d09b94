"""A quantized LM head says what its dequantized weights say, in the bytes that are counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.ranks import make_plan, run_threads
from helpers.tiny_models import generate_alone, load_reference

from llmpq.costmodel.memory import master_bytes
from llmpq.dist.io.prompts import Request
from llmpq.errors import SpecError
from llmpq.kernels.cpu.native import library
from llmpq.quant.loading.master import head_key, load_master
from llmpq.quant.loading.weight_cache import WeightCache
from llmpq.quant.modules.layer import TiedEmbedding, stored_bytes
from llmpq.quant.quantizers.rtn import quantize
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.precision import default_precision

SHAPE = {"layers": 2, "hidden": 64, "intermediate": 128, "heads": 4, "kv_heads": 2, "vocab": 83}
TIED = {"llama": True, "gemma": True, "opt": True, "qwen3": False}
PROMPT = [1, 2, 3, 40, 5]


def model_of(tiny_model, family: str):
    own = {"tie_word_embeddings": TIED[family]}
    return tiny_model(family, seed=1, shape=SHAPE, **own)


def rounded(weight, bits: int):
    return quantize(weight, default_precision(bits), weight.dtype).dequantize(weight.dtype)


def dequantized_master(model_dir, bits: int):
    """A plain master whose head has the numbers that its codes stand for."""
    master = load_master(model_dir, dtype=torch.float32, device="cpu")
    weight = master.get_parameter(head_key(master))
    weight.copy_(rounded(weight, bits))
    return master


@pytest.mark.parametrize("bits", [8, 4, 3])
@pytest.mark.parametrize("family", TIED)
def test_scores_and_embeddings_are_those_of_the_dequantized_weight(tiny_model, family, bits):
    model_dir = model_of(tiny_model, family)
    found = load_master(model_dir, dtype=torch.float32, device="cpu", head_bits=bits)
    expected = dequantized_master(model_dir, bits)
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(found.logits(hidden), expected.logits(hidden), rtol=1e-4, atol=1e-5)
    ids = torch.tensor([[0, 82, 17, 17]])
    positions = torch.arange(4)[None]
    embedded = found.embed(ids, positions)
    torch.testing.assert_close(embedded, expected.embed(ids, positions), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bits", [16, 8, 4, 3])
@pytest.mark.parametrize("family", ["llama", "opt", "qwen3"])
def test_a_master_takes_the_bytes_that_are_counted(tiny_model, family, bits):
    model_dir = model_of(tiny_model, family)
    found = load_master(model_dir, dtype=torch.bfloat16, device="cpu", head_bits=bits)
    counted = master_bytes(
        load_model_dir(model_dir), "bfloat16", bits, on_cpu=library() is not None
    )
    assert stored_bytes(found) == counted


def test_a_tied_head_is_one_weight(tiny_model):
    model_dir = model_of(tiny_model, "llama")
    found = load_master(model_dir, dtype=torch.float32, device="cpu", head_bits=4)
    embedding = found.get_submodule(found.embedding_name)
    assert isinstance(embedding, TiedEmbedding)
    assert embedding.linear is found.lm_head.linear


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_tokens_are_those_of_transformers_with_the_dequantized_head(tiny_model, family, bits):
    model_dir = model_of(tiny_model, family)
    model = load_reference(model_dir)
    model.generation_config.eos_token_id = None
    weight = model.get_output_embeddings().weight
    weight.data = rounded(weight.data, bits)
    expected, _ = generate_alone(model, PROMPT, 8)
    plan = replace(make_plan((0, 1, 2), batch=1), head_bits=bits)
    request = Request(
        id=0, prompt_token_ids=tuple(PROMPT), max_new_tokens=8, stop_token_ids=frozenset()
    )
    answers, measurement = run_threads(plan, model_dir, [request])
    assert [*PROMPT, *answers[0][0]] == expected
    held = measurement.stages[0].held
    assert held.master == master_bytes(load_model_dir(model_dir), "float32", bits)


@pytest.mark.parametrize("kernel", [None, "reference"])
def test_a_head_of_the_store_is_the_same(tiny_model, tmp_path, kernel):
    model_dir = model_of(tiny_model, "llama")
    cache = WeightCache.opened(tmp_path / "store", 1 << 30)
    hidden = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))

    def scores(**options):
        options = {"dtype": torch.float32, "device": "cpu", "backend": kernel} | options
        return load_master(model_dir, head_bits=4, **options).logits(hidden)

    torch.testing.assert_close(scores(weight_cache=cache), scores(), rtol=0, atol=0)
    (entry,) = (tmp_path / "store").glob("*.safetensors")
    before = entry.read_bytes()
    torch.testing.assert_close(scores(weight_cache=cache), scores(), rtol=0, atol=0)
    assert entry.read_bytes() == before


def test_an_embedding_that_is_more_than_rows_keeps_16_bits():
    class Normed(torch.nn.Embedding):
        pass

    with pytest.raises(SpecError, match=r"Normed.* expected a head of 16 bits"):
        TiedEmbedding(None, Normed(2, 2))
