"""Keys and values at 8 and 4 bits: the error's bound, ragged rows, blocks used again, families."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.ranks import make_plan, run_threads
from helpers.tiny_models import Pipeline, Sequences, load_reference
from hypothesis import given
from hypothesis import strategies as st

from llmpq.batching.blocks import blocks_of
from llmpq.costmodel.memory import layer_kv_bytes
from llmpq.dist.io.prompts import Request
from llmpq.dist.kv.cache import (
    KVCache,
    packed_nibbles,
    quantize_keys_values,
    quantize_tokens,
    rotate_tokens,
    rotated,
    unpacked_numbers,
)
from llmpq.errors import SpecError
from llmpq.models import KVShape, PackedBatch, kv_shapes
from llmpq.spec.huggingface.families import load_model_dir

torch.set_num_threads(1)

SHAPE = KVShape(heads=2, head_dim=8)
WIDE = {"layers": 3, "hidden": 64, "intermediate": 96, "heads": 4, "kv_heads": 2}
"""Heads of 16 features, which 4 bits take."""


def _kept(values):
    """What remains of ``values`` in an 8-bit store, in float32."""
    codes, scales = quantize_tokens(values)
    return codes.float() * scales.float().unsqueeze(-1)


@given(
    exponents=st.lists(st.floats(-30, 30), min_size=1, max_size=6),
    head_dim=st.integers(1, 9),
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_value_comes_back_within_half_a_step(exponents, head_dim, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    size = 10.0 ** torch.tensor(exponents)[:, None]
    values = (torch.randn(len(exponents), head_dim, generator=generator) * size).to(dtype)
    codes, scales = quantize_tokens(values)
    assert codes.abs().max() <= 127
    error = (codes.float() * scales.float()[:, None] - values.float()).abs()
    assert bool((error <= 0.5001 * scales.float()[:, None]).all())
    peak = values.float().abs().amax(dim=-1)
    # bfloat16 keeps 8 binary digits of a scale.
    assert bool((scales.float() <= peak / 127 * (1 + 2**-8)).all())


@given(
    exponents=st.lists(st.floats(-30, 30), min_size=1, max_size=6),
    head_dim=st.sampled_from([16, 48, 64, 128]),
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_rotated_value_comes_back_within_half_a_step(exponents, head_dim, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    size = 10.0 ** torch.tensor(exponents)[:, None]
    values = (torch.randn(len(exponents), head_dim, generator=generator) * size).to(dtype)
    codes, scales = rotate_tokens(values)
    assert (codes.shape, codes.dtype) == ((len(exponents), head_dim // 2), torch.uint8)
    found = unpacked_numbers(codes).double() * scales.double()[:, None]
    right = values.double() @ _hadamard(head_dim)
    # bfloat16 keeps 8 binary digits of a scale, whose 16 half steps reach the largest value.
    assert bool(((found - right).abs() <= (1 + 17 * 2**-8) * scales.double()[:, None]).all())
    assert bool((scales.double() <= right.abs().amax(-1) / 16 * (1 + 2**-8)).all())


def _hadamard(dim):
    """Sylvester's matrices of the largest power of two that divides ``dim``, in float64."""
    matrix, size = torch.ones(1, 1, dtype=torch.float64), dim & -dim
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return torch.block_diag(*[matrix * size**-0.5] * (dim // size))


@pytest.mark.parametrize("dim", [16, 48, 80, 128, 512])
def test_a_rotation_is_undone_by_itself_and_keeps_products(dim):
    one, other = torch.randn(2, 3, 5, dim, generator=torch.Generator().manual_seed(dim))
    torch.testing.assert_close(rotated(one), (one.double() @ _hadamard(dim)).float())
    torch.testing.assert_close(rotated(rotated(one)), one)
    torch.testing.assert_close((rotated(one) * rotated(other)).sum(-1), (one * other).sum(-1),
                               atol=1e-4, rtol=1e-5)  # fmt: skip


@given(seed=st.integers(0, 2**16), sixteenths=st.integers(1, 5))
def test_packed_codes_are_those_that_were_packed(seed, sixteenths):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(16, (3, 16 * sixteenths), generator=generator, dtype=torch.uint8)
    found = unpacked_numbers(packed_nibbles(codes))
    assert torch.equal(found, 2.0 * codes - 15)


def test_a_large_feature_is_spread_over_the_head():
    """Without the rotation, all others would be rounded by a step of the largest."""
    values = torch.randn(200, 64, generator=torch.Generator().manual_seed(1))
    values[:, 7] *= 50
    codes, scales = rotate_tokens(values)
    found = rotated(unpacked_numbers(codes) * scales.float()[:, None])
    others = torch.arange(64) != 7
    step = values.abs().amax(-1, keepdim=True) / 8  # without it
    plain = ((values / step - 0.5).round() + 0.5) * step
    lost, lost_without = ((one - values)[:, others].pow(2).mean().sqrt() for one in (found, plain))
    assert lost < lost_without / 3


def test_zeros_and_peaks_of_either_sign_are_kept():
    values = torch.tensor([[0.0, 0.0], [127.0, -64.0], [-127.0, 1.0]])
    assert torch.equal(_kept(values), values)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_an_overflow_is_read_back_as_one(bad):
    values = torch.tensor([[1.0, bad, 2.0], [1.0, 1.0, 2.0]])
    found = _kept(values)
    assert not found[0].isfinite().any()
    assert found[1].isfinite().all()
    wide = torch.ones(2, 16)
    wide[0, 5] = bad
    codes, scales = rotate_tokens(wide)
    found = rotated(unpacked_numbers(codes) * scales.float()[:, None])
    assert not found[0].isfinite().any()
    assert found[1].isfinite().all()


def test_layers_read_into_one_buffer():
    cache = KVCache((SHAPE,) * 2, 0, num_blocks=2, dtype=torch.float32, kv_bits=8)
    batch = PackedBatch(block_tables=[(1,), (0,)], starts=[0, 0], counts=[5, 16])
    view, new = cache.view(batch), torch.randn(1, SHAPE.heads, 21, SHAPE.head_dim)
    read = []
    for layer in range(2):
        view.update(new, new, layer)
        read.append(view.read_rows([0, 1], torch.tensor([4, 15]))[0].data_ptr())
    assert read[0] == read[1]
    assert cache.buffer_bytes == 2 * 32 * SHAPE.heads * SHAPE.head_dim * 4


@pytest.mark.parametrize("shape", [(3, 50), (5, 100), (2, 300), (1, 129), (200, 1)])
@pytest.mark.parametrize(("bits", "quantize"), [(8, quantize_tokens), (4, rotate_tokens)])
def test_blocks_of_tokens_have_the_codes_of_the_whole(shape, bits, quantize):
    rows, width = shape
    key, value = torch.randn(2, rows, width, 2, 16).to(torch.bfloat16).transpose(2, 3)
    found = quantize_keys_values(key, value, bits)
    for made, right in zip(found, quantize(torch.cat((key, value), dim=1)), strict=True):
        assert torch.equal(made, right)


@pytest.mark.parametrize("family", ["opt", "llama", "bloom", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_the_planner_counts(tiny_model, family, dtype):
    """Allocated equals predicted, scales included, whatever the dtype of the run."""
    model_dir = tiny_model(family, seed=1, shape=WIDE)
    spec = load_model_dir(model_dir)
    shapes = kv_shapes(load_reference(model_dir).config, 0, 3)
    for kv_bits in (4, 8, 8 * dtype.itemsize):
        blocks = 5 * blocks_of(23)
        cache = KVCache(shapes, 0, num_blocks=blocks, dtype=dtype, kv_bits=kv_bits)
        kinds = [spec.layer_kinds[i] for i in range(3)]
        assert cache.nbytes == sum(layer_kv_bytes(spec, kind, 5, 23, kv_bits) for kind in kinds)


@pytest.mark.parametrize("kv_bits", [3, 16])
def test_other_widths_are_refused(kv_bits):
    with pytest.raises(SpecError, match="expected 4, 8 or the 32"):
        KVCache((SHAPE,), 0, num_blocks=1, dtype=torch.float32, kv_bits=kv_bits)


@pytest.mark.parametrize(
    ("shape", "device", "message"),
    [
        (SHAPE, "cpu", "found 4 bits for heads of 8 features, expected a multiple of 16"),
        (KVShape(heads=1, head_dim=32, value_dim=16), "cpu", "latent attention.*expected 32 bits"),
        (KVShape(heads=1, head_dim=32), "meta", "found 4 bits on 'meta', expected a CPU"),
    ],
)
def test_4_bits_are_refused_where_nothing_reads_them(shape, device, message):
    with pytest.raises(SpecError, match=message):
        KVCache((shape,), 0, num_blocks=1, dtype=torch.float32, device=device, kv_bits=4)


LONG, SHORT, MIDDLE, NEXT = [1, 2, 3, 4, 5, 11, 12, 13, 14], [7, 8], [9, 10, 11, 50, 51], [61]
CASES = {
    "opt": ("opt", {}),
    "bloom": ("bloom", {}),
    "llama-grouped": ("llama", {}),
    "mistral-sliding": ("mistral", {"sliding_window": 6}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3", {}),
}


def _pipeline(model_dir, kv_bits):
    return Pipeline(model_dir, [0, 2, 3], kv_bits=kv_bits)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kv_bits", [8, 4])
def test_ragged_rows_and_blocks_used_again_change_nothing(tiny_model, case, kv_bits):
    """A sequence's logits are those it has alone, in a fresh cache."""
    family, overrides = CASES[case]
    model_dir = tiny_model(family, seed=1, shape=WIDE, **overrides)
    run = Sequences(_pipeline(model_dir, kv_bits))
    run.prefill({"long": (3, LONG), "short": (0, SHORT), "middle": (4, MIDDLE)})
    run.decode(["long", "short", "middle"], 5)
    run.prefill({"next": (3, NEXT)})
    run.decode(["middle", "next", "short"], 6)

    prompts = {"long": LONG, "short": SHORT, "middle": MIDDLE, "next": NEXT}
    for name, prompt in prompts.items():
        alone = Sequences(_pipeline(model_dir, kv_bits))
        alone.prefill({name: (0, prompt)})
        alone.decode([name], len(run.logits[name]) - 1)
        assert alone.tokens[name] == run.tokens[name]
        # Float rounding of one batch shape or another may move a key across half a step.
        torch.testing.assert_close(
            torch.stack(alone.logits[name]), torch.stack(run.logits[name]), atol=2e-3, rtol=0
        )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("kv_bits", "near"), [(8, 0.05), (4, 0.05 * 16)])
def test_logits_stay_near_those_of_full_width(tiny_model, case, kv_bits, near):
    family, overrides = CASES[case]
    model_dir = tiny_model(family, seed=1, shape=WIDE, **overrides)
    rows = [(0, 0, LONG), (1, 0, MIDDLE)]
    full = _pipeline(model_dir, kv_bits=32).step(rows)
    quantized = _pipeline(model_dir, kv_bits).step(rows)
    assert not torch.equal(full, quantized)
    torch.testing.assert_close(full, quantized, atol=near * float(full.std()), rtol=0)


@pytest.mark.parametrize("kv_bits", [8, 4])
def test_a_plan_that_asks_for_fewer_bits_gets_them(tiny_model, kv_bits):
    """Three stages answer as one process with such a cache does."""
    model_dir = tiny_model("llama", seed=1, shape=WIDE)
    prompts = {"long": LONG, "short": SHORT, "middle": MIDDLE, "next": NEXT}
    requests = [
        Request(id=name, prompt_token_ids=tuple(prompt), max_new_tokens=8)
        for name, prompt in prompts.items()
    ]
    plan = replace(make_plan((0, 1, 2, 3), prefill=2, decode=3), kv_bits=kv_bits)
    answers, _ = run_threads(plan, model_dir, requests)
    for name, prompt in prompts.items():
        alone = Sequences(_pipeline(model_dir, kv_bits))
        alone.prefill({name: (0, prompt)})
        alone.decode([name], 7)
        assert list(answers[name][0]) == alone.tokens[name][len(prompt) :]
