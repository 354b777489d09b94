"""The operators of a decode step on single rows, against torch and transformers."""

import pytest
import torch
from torch.nn import functional
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as pairs
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as halves
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from llmpq.kernels.cpu.native import has_steps, instruction_set, library
from llmpq.kernels.cpu.paged_attention import PagedTokens
from llmpq.kernels.cpu.step import ACTIVATIONS, StepProgram, UnsupportedStepError
from llmpq.quant.modules.step_compiler import activation_like, norm_like

HAS_STEPS = library() is not None and has_steps(instruction_set())
pytestmark = pytest.mark.skipif(not HAS_STEPS, reason="needs AVX-512 and a C compiler")

ROWS, HEADS, DIM = 3, 4, 48
DTYPES = (torch.float32, torch.bfloat16)
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 2**-7}
"""Largest difference, relative to the largest number."""
NORMS = {
    "llama": lambda: LlamaRMSNorm(DIM, eps=1e-5),
    "weight plus one": lambda: Gemma2RMSNorm(DIM),
    "weight in float32": lambda: Olmo2RMSNorm(DIM),
    "layer norm": lambda: torch.nn.LayerNorm(DIM, eps=1e-4),
    "layer norm without bias": lambda: torch.nn.LayerNorm(DIM, bias=False),
    "layer norm without weight": lambda: OlmoLayerNorm(DIM),
    "layer norm plus one": lambda: NemotronLayerNorm1P(DIM),
    "heads of their own": lambda: CohereLayerNorm((HEADS, DIM)),
}


def _random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _run(program):
    program.run(PagedTokens([[0]] * ROWS, [0] * ROWS, [1] * ROWS))


def _assert_close(found, expected):
    difference = (found.float() - expected.float()).abs().max()
    assert difference <= CLOSE[expected.dtype] * expected.float().abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", NORMS)
def test_norm_of_a_part_of_rows_is_recognized_by_its_values(kind, dtype):
    module = NORMS[kind]()
    for seed, vector in enumerate(module.parameters()):
        vector.data += 0.1 * _random(*vector.shape, seed=seed)
    module.to(dtype).requires_grad_(False)
    program = StepProgram(dtype)
    wide = program.buffer("x", 2 * HEADS * DIM)
    wide.copy_(_random(*wide.shape, dtype=dtype) * 3 + 1)
    part = wide[:, HEADS * DIM :].unflatten(1, (HEADS, DIM))
    expected, before = module(part[None, :ROWS].clone())[0], wide.clone()

    program.norm(part, part, norm_like(module, DIM, dtype))
    _run(program)

    _assert_close(part[:ROWS], expected)
    assert torch.equal(wide[:, : HEADS * DIM], before[:, : HEADS * DIM])
    assert torch.equal(part[ROWS:], before[ROWS:, HEADS * DIM :].unflatten(1, (HEADS, DIM)))


def test_norm_of_another_kind_is_an_error():
    with pytest.raises(UnsupportedStepError, match="the norm Tanh"):
        norm_like(torch.nn.Tanh(), DIM, torch.float32)


@pytest.mark.parametrize(("dtype", "table"), [*((d, d) for d in DTYPES), DTYPES[::-1]])
@pytest.mark.parametrize("turned", [48, 32, 10])
@pytest.mark.parametrize("rotate", [halves, pairs])
def test_rotation_of_some_features_of_heads_between_others(rotate, turned, dtype, table):
    program = StepProgram(dtype)
    wide = program.buffer("x", HEADS * 3 * DIM)
    wide.copy_(_random(*wide.shape, dtype=dtype))
    angles = _random(ROWS, turned // 2).repeat(1, 2)
    tables = [program.buffer(name, turned, table) for name in ("cos", "sin")]
    for place, values in zip(tables, (angles.cos(), angles.sin()), strict=True):
        place[:ROWS] = values.to(table)
    query = wide.unflatten(1, (HEADS, 3, DIM))[:, :, 1]
    before = wide.clone()
    cos, sin = (place[None, :ROWS] for place in tables)
    heads = query[None, :ROWS, :, :turned].transpose(1, 2)
    expected = rotate(heads, heads, cos, sin)[0][0].transpose(0, 1).to(dtype)

    program.rotate(query, *tables, pairs=rotate is pairs)
    _run(program)

    _assert_close(query[:ROWS, :, :turned], expected)
    query[:ROWS, :, :turned] = before.unflatten(1, (HEADS, 3, DIM))[:ROWS, :, 1, :turned]
    assert torch.equal(wide, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_with_and_without_what_it_multiplies(activation, dtype):
    modules = {
        "silu": torch.nn.SiLU(),
        "gelu": torch.nn.GELU(),
        "gelu_tanh": torch.nn.GELU(approximate="tanh"),
        "relu": torch.nn.ReLU(),
        "relu2": lambda x: functional.relu(x).square(),
        "sigmoid": torch.nn.Sigmoid(),
    }
    assert activation_like(modules[activation]) == activation
    program = StepProgram(dtype)
    fused, y, single = program.buffer("x", 96), program.buffer("y", 48), program.buffer("z", 96)
    fused.copy_(_random(*fused.shape, dtype=dtype))
    gate, up = fused.chunk(2, dim=1)

    program.gate(gate, up, y, activation)
    program.gate(fused, None, single, activation)
    _run(program)

    function = modules[activation]
    _assert_close(y[:ROWS], function(gate[:ROWS]) * up[:ROWS])
    _assert_close(single[:ROWS], function(fused[:ROWS]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_residuals_with_a_factor(dtype):
    program = StepProgram(dtype)
    x, more = program.buffer("x", 32), program.buffer("more", 32)
    for seed, buffer in enumerate((x, more)):
        buffer.copy_(_random(*x.shape, dtype=dtype, seed=seed))
    expected = (x + more * 0.7) * 1.5

    program.add(x, more, 0.7)
    program.scale(x, 1.5)
    _run(program)

    _assert_close(x[:ROWS], expected[:ROWS])
    assert not torch.allclose(x[ROWS:], expected[ROWS:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_copy_of_heads_changes_nothing_between_them(dtype):
    program = StepProgram(dtype)
    joined, apart = program.buffer("joined", HEADS * 3 * 5), program.buffer("apart", 7 + HEADS * 5)
    joined.copy_(_random(*joined.shape, dtype=dtype))
    apart.fill_(-1.0)
    part = joined.unflatten(1, (HEADS, 3 * 5))[:, :, 5:10]

    program.copy(part, apart[:, 7:].unflatten(1, (HEADS, 5)))
    _run(program)

    assert torch.equal(apart[:ROWS, 7:], part[:ROWS].flatten(1))
    assert (apart[:, :7] == -1).all()
    assert (apart[ROWS:] == -1).all()


def test_rows_of_other_sizes_have_no_operators():
    program = StepProgram(torch.float32)
    odd = program.buffer("odd", 24)
    with pytest.raises(UnsupportedStepError, match="rows of 24 numbers"):
        program.add(odd, odd)
    with pytest.raises(UnsupportedStepError, match="rows of 24 numbers"):
        program.gate(odd, None, odd, "relu")
    with pytest.raises(UnsupportedStepError, match="a norm of 1 heads of 24 numbers"):
        program.norm(odd[:, None], odd[:, None], norm_like(torch.nn.LayerNorm(24), 24, odd.dtype))
    with pytest.raises(UnsupportedStepError, match="a rotary embedding of 24 of 16 features"):
        program.rotate(odd[:, None, :16], odd, odd, pairs=False)
