"""The backends for GPUs, as far as a machine without one can tell: layouts, bytes, arithmetic."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from llmpq.errors import SpecError
from llmpq.kernels import BACKENDS, choose_backend
from llmpq.kernels.base import PackedWeight, pack_codes
from llmpq.kernels.gpu.cuda import (
    BitsAndBytesInt8Backend,
    CudaInt4Backend,
    CudaInt8Backend,
    inner_tiles,
    swapped_halves,
)
from llmpq.kernels.gpu.triton_int import why_missing
from llmpq.spec.precision import Precision, default_precision, linear_bytes

torch.set_num_threads(1)

ROWS, COLUMNS = 48, 256
INT8 = default_precision(8)
# Activations rounded to 8 bits: a 254th of the range, about .008 of Gaussian rows.
INT8_TOLERANCE = 0.012

needs_bitsandbytes = pytest.mark.skipif(
    why_missing("bitsandbytes") is not None, reason="bitsandbytes is not installed"
)
INT8_BACKENDS = [
    CudaInt8Backend("cpu"),
    pytest.param(BitsAndBytesInt8Backend("cpu"), marks=needs_bitsandbytes),
]


@pytest.fixture(autouse=True)
def _exact_int8_products(monkeypatch):
    """GPUs add up exactly; oneDNN held to AVX2 on a processor with VNNI saturates pairs."""
    monkeypatch.setattr(torch, "_int_mm", lambda rows, codes: rows.int() @ codes.int())


def int8_weight(dtype, rows=ROWS, columns=COLUMNS):
    rng = torch.Generator().manual_seed(8)
    codes = torch.randint(1, 256, (rows, columns), generator=rng)
    return PackedWeight(
        out_features=rows,
        in_features=columns,
        precision=INT8,
        codes=pack_codes(codes.to(torch.uint8), 8),
        scales=torch.rand(rows, 1, generator=rng).add(1).mul(0.001).to(dtype),
        zeros=None,
    )


def relative_error(got, expected):
    return ((got.double() - expected).norm() / expected.norm()).item()


def gaussian(tokens, dtype=torch.float32):
    return torch.randn(tokens, COLUMNS, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("backend", INT8_BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 16, 17, 45])
def test_int8_rounds_activations_and_nothing_else(backend, dtype, tokens):
    packed = int8_weight(dtype)
    weight = backend.prepare(packed)
    assert weight.nbytes == backend.stored_bytes(INT8, dtype, ROWS, COLUMNS)
    x = gaussian(tokens, dtype)
    bias = torch.randn(ROWS, generator=torch.Generator().manual_seed(2)).to(dtype)
    for added in (None, bias):
        before = x.clone()
        got = backend.linear(x, weight, added)
        expected = F.linear(x.double(), packed.dequantize(torch.float64))
        expected = expected if added is None else expected + added.double()
        assert got.dtype == dtype
        assert relative_error(got, expected) < INT8_TOLERANCE
        assert torch.equal(x, before)


@pytest.mark.parametrize("backend", INT8_BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("tokens", [1, 20])
def test_outlier_columns_stay_in_floats(backend, tokens):
    packed = int8_weight(torch.float32)
    weight = backend.prepare(packed)
    x = gaussian(tokens)
    x[:, [3, 77, 200]] *= 40
    x[:, [3, 77, 200]] += 8  # beyond the threshold in every row
    expected = F.linear(x.double(), packed.dequantize(torch.float64))
    assert relative_error(backend.linear(x, weight, None), expected) < 0.003
    assert backend.linear(x.view(tokens, 1, COLUMNS), weight, None).shape == (tokens, 1, ROWS)
    assert backend.linear(x[:0], weight, None).shape == (0, ROWS)


@pytest.mark.parametrize("backend", INT8_BACKENDS, ids=lambda backend: backend.name)
def test_a_row_of_zeros_gives_zeros(backend):
    weight = backend.prepare(int8_weight(torch.float32))
    x = gaussian(20)
    x[4] = 0
    got = backend.linear(x, weight, None)
    assert torch.equal(got[4], torch.zeros(ROWS))
    assert bool(got.isfinite().all())


def test_a_row_does_not_depend_on_its_neighbours():
    weight = CudaInt8Backend("cpu").prepare(int8_weight(torch.float32))
    x = gaussian(20)
    alone = CudaInt8Backend("cpu").linear(x[3:4], weight, None)
    x[0] *= 1000
    together = CudaInt8Backend("cpu").linear(x, weight, None)
    torch.testing.assert_close(together[3:4], alone, rtol=1e-6, atol=1e-6)


def test_8_bit_shapes_outside_the_rule_are_refused():
    with pytest.raises(SpecError, match="kernel 'cuda_int8'"):
        CudaInt8Backend("cpu").prepare(int8_weight(torch.float32, rows=12))


def test_int4_gives_torch_the_even_inputs_in_the_upper_half():
    codes = torch.arange(16, dtype=torch.uint8).view(1, 16)
    swapped = swapped_halves(pack_codes(codes, 4))
    assert torch.equal(swapped >> 4, codes[:, ::2])
    assert torch.equal(swapped & 15, codes[:, 1::2])


@pytest.mark.parametrize(("columns", "tiles"), [(32, 2), (96, 2), (64, 4), (128, 8), (11008, 8)])
def test_int4_reads_as_many_tiles_at_once_as_divide_the_inputs(columns, tiles):
    assert inner_tiles(columns) == tiles


@pytest.mark.parametrize("columns", [32, 64, 4096])
def test_int4_layout_has_the_bytes_of_the_law(columns, monkeypatch):
    monkeypatch.setattr("llmpq.kernels.gpu.cuda._is_offered", lambda *_: True)
    monkeypatch.setattr("llmpq.kernels.gpu.cuda._can_read_back", lambda _: False)
    backend = CudaInt4Backend()
    precision = Precision(bits=4, group_size=32)
    with FakeTensorMode():
        groups = columns // 32
        packed = PackedWeight(
            out_features=64,
            in_features=columns,
            precision=precision,
            codes=torch.empty(64, columns // 2, dtype=torch.uint8, device="cuda"),
            scales=torch.empty(64, groups, dtype=torch.bfloat16, device="cuda"),
            zeros=torch.empty(64, groups, dtype=torch.bfloat16, device="cuda"),
        )
        weight = backend.prepare(packed)
        assert weight.nbytes == linear_bytes(64, columns, precision, 2)
        x = torch.empty(2, 3, columns, dtype=torch.bfloat16, device="cuda")
        y = backend.linear(x, weight, torch.empty(64, dtype=torch.bfloat16, device="cuda"))
    assert y.shape == (2, 3, 64)
    assert y.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("precision", "dtype", "rows", "columns"),
    [
        (Precision(bits=4, symmetric=True), torch.bfloat16, 64, 128),
        (Precision(bits=4, group_size=24), torch.bfloat16, 64, 192),
        (Precision(bits=4), torch.float16, 64, 128),
        (Precision(bits=4), torch.bfloat16, 60, 128),
        (Precision(bits=3), torch.bfloat16, 64, 128),
    ],
)
def test_int4_leaves_other_weights_to_others(precision, dtype, rows, columns, monkeypatch):
    monkeypatch.setattr("llmpq.kernels.gpu.cuda._is_offered", lambda *_: True)
    assert CudaInt4Backend().supports("cuda", Precision(bits=4), torch.bfloat16, 64, 128)
    assert not CudaInt4Backend().supports("cuda", precision, dtype, rows, columns)


def test_the_table_tells_what_gpus_have():
    on_cuda = [name for name, b in BACKENDS.items() if "cuda" in b.capability.device_types]
    assert on_cuda == ["cuda_int4", "triton_int", "bnb_int8", "cuda_int8"]
    assert BACKENDS["bnb_int8_cpu"].capability.default_dtypes == ()


@needs_bitsandbytes
def test_bitsandbytes_runs_on_a_cpu_when_asked_for_by_name():
    chosen = choose_backend("cpu", INT8, torch.bfloat16, 64, 64, prefer="bnb_int8_cpu")
    assert chosen.name == "bnb_int8_cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_without_a_gpu_only_the_reference_is_offered(bits):
    precision = default_precision(bits)
    offered = [
        name
        for name, backend in BACKENDS.items()
        if backend.supports("cuda", precision, torch.bfloat16, 1024, 1024)
    ]
    assert offered == ["reference"]


def test_a_missing_package_says_so():
    assert why_missing("no_such_package") == "no_such_package is not installed"
