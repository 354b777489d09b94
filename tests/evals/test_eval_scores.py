"""Scores against transformers' own loss and against a plain computation."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.tiny_models import load_reference
from hypothesis import given
from hypothesis import strategies as st

from llmpq.errors import LlmpqError, SpecError
from llmpq.evals import evaluate as evaluation
from llmpq.evals.evaluate import LayerSource, perplexity_and_kl, stream_hidden
from llmpq.evals.windows import Windows
from llmpq.quant.loading.master import load_master

torch.set_num_threads(1)
WIDE = {"layers": 3, "hidden": 64, "intermediate": 96, "heads": 4, "kv_heads": 2}
"""Heads of 16 features, which 4-bit keys and values take."""

CPU = torch.device("cpu")
FAMILIES = ["opt", "llama", "bloom"]


def _tokens(count, vocab_size=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (count,), generator=generator).tolist()


def _run(model_dir, windows, bits, dtype=torch.float32, **options):
    layers = 3
    master = load_master(model_dir, dtype=dtype, device="cpu")
    source = LayerSource(model_dir=model_dir, bits=(bits,) * layers, dtype=dtype, device=CPU)
    return master, stream_hidden(source, master, windows, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_perplexity_equals_the_loss_of_transformers(tiny_model, family):
    model_dir = tiny_model(family, seed=1)
    windows = Windows.cut(_tokens(47), window=10, rows=3)
    master, states = _run(model_dir, windows, 16)
    found = perplexity_and_kl(master, windows, states)

    model = load_reference(model_dir)
    total, count = 0.0, 0
    ids = _tokens(47)
    with torch.inference_mode():
        for first in range(0, 47, 10):
            row = torch.tensor([ids[first : first + 10]])
            total += float(model(row, labels=row).loss) * (row.shape[1] - 1)
            count += row.shape[1] - 1
    assert found.tokens == windows.tokens == count == 42
    assert found.perplexity == pytest.approx(math.exp(total / count), rel=2e-6)
    assert found.kl_to_16bit is None


@pytest.mark.parametrize("family", FAMILIES)
def test_divergence_equals_that_of_whole_models(tiny_model, family):
    """One model's scores against another's, by transformers and torch's own divergence."""
    model_dir, other_dir = tiny_model(family, seed=1), tiny_model(family, seed=2)
    windows = Windows.cut(_tokens(30), window=10, rows=2)
    # The two share one head here: only the layers' output differs.
    master, states = _run(model_dir, windows, 16)
    _, others = _run(other_dir, windows, 16)
    found = perplexity_and_kl(master, windows, states, others)

    flat = [torch.cat([state.flatten(0, 1) for state in run]) for run in (states, others)]
    p, q = (torch.log_softmax(master.logits(hidden).double(), -1) for hidden in flat)
    expected = torch.nn.functional.kl_div(p, q, reduction="batchmean", log_target=True)
    assert found.kl_to_16bit == pytest.approx(float(expected), rel=1e-5)
    assert found.kl_to_16bit > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_divergence_of_a_model_from_itself_is_zero(tiny_model, dtype):
    windows = Windows.cut(_tokens(60), window=8, rows=4)
    master, states = _run(tiny_model("llama", seed=1), windows, 16, dtype)
    _, again = _run(tiny_model("llama", seed=1), windows, 16, dtype)
    assert perplexity_and_kl(master, windows, states, again).kl_to_16bit == 0.0


def test_divergence_grows_with_fewer_bits(tiny_model):
    windows = Windows.cut(_tokens(200), window=20, rows=4)
    found = []
    _, reference = _run(tiny_model("llama", seed=1), windows, 16)
    for bits in (8, 4, 3):
        master, states = _run(tiny_model("llama", seed=1), windows, bits)
        found.append(perplexity_and_kl(master, windows, states, reference).kl_to_16bit)
    assert 0 < found[0] < found[1] < found[2]


def test_scores_do_not_depend_on_the_chunk_size(tiny_model, monkeypatch):
    windows = Windows.cut(_tokens(60), window=8, rows=4)
    master, states = _run(tiny_model("llama", seed=1), windows, 16)
    _, quantized = _run(tiny_model("llama", seed=1), windows, 4)
    whole = perplexity_and_kl(master, windows, quantized, states)
    monkeypatch.setattr(evaluation, "CHUNK_VALUES", 5 * 64)
    chunked = perplexity_and_kl(master, windows, quantized, states)
    assert chunked.perplexity == pytest.approx(whole.perplexity, rel=1e-6)
    assert chunked.kl_to_16bit == pytest.approx(whole.kl_to_16bit, rel=1e-4)


def test_scores_do_not_depend_on_the_rows_of_a_micro_batch(tiny_model):
    found = []
    for rows in (1, 3, 8):
        windows = Windows.cut(_tokens(75), window=8, rows=rows)
        found.append(perplexity_and_kl(*_scored(tiny_model("opt", seed=1), windows)).perplexity)
    assert found[1:] == pytest.approx(found[:1] * 2, rel=1e-6)


def _scored(model_dir, windows):
    master, states = _run(model_dir, windows, 16)
    return master, windows, states


@given(st.integers(0, 2**32), st.floats(0, 1e-6))
def test_divergence_is_never_negative(seed, size):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(4, 33, generator=generator)
    nearby = scores + size * torch.randn(4, 33, generator=generator)
    tally = evaluation.Tally()
    p, q = torch.log_softmax(scores, -1), torch.log_softmax(nearby, -1)
    tally.add(p, torch.zeros(4, dtype=torch.int64), q)
    assert tally.quality().kl_to_16bit >= 0


def test_nan_scores_raise_an_error(tiny_model):
    windows = Windows.cut(_tokens(20), window=8, rows=4)
    master, states = _run(tiny_model("llama", seed=1), windows, 16)
    with pytest.raises(LlmpqError, match="not numbers"):
        perplexity_and_kl(master, windows, [state * torch.inf for state in states])


def test_states_of_another_text_raise_an_error(tiny_model):
    windows = Windows.cut(_tokens(40), window=8, rows=2)
    master, states = _run(tiny_model("llama", seed=1), windows, 16)
    with pytest.raises(SpecError, match="of 2 micro-batches, expected 3"):
        perplexity_and_kl(master, windows, states[:2])


@given(count=st.integers(2, 60), window=st.integers(2, 12), rows=st.integers(1, 4))
def test_every_token_but_the_first_of_a_window_is_predicted_once(count, window, rows):
    ids = list(range(count))
    windows = Windows.cut(ids, window=window, rows=rows)
    seen = [int(t) for batch in windows.batches() for t in batch.targets.flatten()]
    assert seen == [i for i in ids if i % window]
    assert windows.tokens == len(seen)
    for batch in windows.batches():
        assert batch.inputs.shape[0] <= rows
        assert batch.inputs.shape[1] <= windows.longest
        assert torch.equal(batch.inputs + 1, batch.targets)


@pytest.mark.parametrize(
    "sizes", [{"window": 1}, {"rows": 0}, {"token_ids": [5]}, {"token_ids": []}]
)
def test_empty_windows_raise_an_error(sizes):
    with pytest.raises(SpecError):
        Windows.cut(
            sizes.get("token_ids", [1, 2, 3]),
            **{key: value for key, value in sizes.items() if key != "token_ids"},
        )


@pytest.mark.parametrize(("kv_bits", "most"), [(8, 1e-3), (4, 1e-3 * 16**2)])
def test_quantized_kv_cache_costs_little_and_equals_decode(tiny_model, kv_bits, most):
    """Teacher-forced through such a cache, in one piece and token by token."""
    model_dir = tiny_model("llama", seed=1, shape=WIDE)
    windows = Windows.cut(_tokens(40), window=20, rows=2)
    master, plain = _run(model_dir, windows, 16)
    _, cached = _run(model_dir, windows, 16, kv_bits=kv_bits)
    _, same = _run(model_dir, windows, 16, kv_bits=32)
    assert perplexity_and_kl(master, windows, same, plain).kl_to_16bit < 1e-6
    assert 0 < perplexity_and_kl(master, windows, cached, plain).kl_to_16bit < most
