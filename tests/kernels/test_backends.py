"""Every backend gives the answer of the dequantized weight, and keeps the bytes it says."""

import threading

import pytest
import torch
from torch.nn import functional as F

from llmpq.errors import SpecError
from llmpq.kernels import BACKENDS, PackedWeight
from llmpq.kernels.base import pack_codes
from llmpq.kernels.registry import Scratch
from llmpq.spec.precision import Precision, linear_bytes

torch.set_num_threads(1)

ROWS, COLUMNS = 192, 256
# Relative error of the product against float64, of the norm of each answer. LLM.int8() rounds the
# activations to 8 bits: uniform errors of a 254th of the range are about .008 on Gaussian rows.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}
INT8_TOLERANCE = 0.02
INT8_NAMES = ("cpu_llm_int8", "cpu_int8", "bnb_int8_cpu", "cpu_packed_int8")


def random_packed(precision: Precision, dtype: torch.dtype, rows=ROWS, columns=COLUMNS):
    rng = torch.Generator().manual_seed(precision.bits)
    groups = columns // precision.effective_group(columns)
    codes = torch.randint(0, 1 << precision.bits, (rows, columns), generator=rng)
    zeros = torch.randn(rows, groups, generator=rng).mul(0.01).to(dtype)
    return PackedWeight(
        out_features=rows,
        in_features=columns,
        precision=precision,
        codes=pack_codes(codes.to(torch.uint8), precision.bits),
        scales=torch.rand(rows, groups, generator=rng).add(1).mul(0.01).to(dtype),
        zeros=None if precision.symmetric else zeros,
    )


CASES = [
    (backend.name, Precision(bits=bits, group_size=group, symmetric=symmetric), dtype)
    for backend in BACKENDS.values()
    for bits in backend.capability.bits
    for group in (32, 128, None)
    for symmetric in (True, False)
    for dtype in backend.capability.dtypes
    if backend.supports(
        "cpu",
        Precision(bits=bits, group_size=group, symmetric=symmetric),
        dtype,
        ROWS,
        COLUMNS,
    )
]


def case_id(case):
    return f"{case[0]}-{case[1]}-{str(case[2]).removeprefix('torch.')}"


def relative_error(got, expected):
    return ((got.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_linear_matches_the_dequantized_weight(case):
    name, precision, dtype = case
    packed = random_packed(precision, dtype)
    prepared = BACKENDS[name].prepare(packed)
    x = torch.randn(2, 5, COLUMNS, generator=torch.Generator().manual_seed(1)).to(dtype)
    bias = torch.randn(ROWS, generator=torch.Generator().manual_seed(2)).to(dtype)
    tolerance = INT8_TOLERANCE if name in INT8_NAMES else TOLERANCE[dtype]
    weight = packed.dequantize(torch.float64)
    for added in (None, bias):
        got = BACKENDS[name].linear(x, prepared, added)
        expected = F.linear(x.double(), weight, None if added is None else added.double())
        assert got.dtype == dtype
        assert got.shape == (2, 5, ROWS)
        assert relative_error(got, expected) < tolerance


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_prepared_bytes_are_those_declared(case):
    name, precision, dtype = case
    backend = BACKENDS[name]
    prepared = backend.prepare(random_packed(precision, dtype))
    assert prepared.nbytes == backend.stored_bytes(precision, dtype, ROWS, COLUMNS)


DEFAULTS = [(name, dtype) for name, b in BACKENDS.items() for dtype in b.capability.default_dtypes]


@pytest.mark.parametrize(("name", "dtype"), DEFAULTS)
def test_a_default_backend_keeps_the_bytes_that_plans_count(name, dtype):
    backend = BACKENDS[name]
    for bits in backend.capability.bits:
        precision = Precision(bits=bits, group_size=None if bits == 8 else 128, symmetric=bits == 8)
        law = linear_bytes(4096, 4096, precision, dtype.itemsize)
        assert law <= backend.stored_bytes(precision, dtype, 4096, 4096) <= 1.001 * law


@pytest.mark.parametrize("rows", [16, 48, 64, 80, 208])
def test_int4_layout_in_blocks_is_that_of_the_whole(rows, monkeypatch):
    monkeypatch.setattr("llmpq.kernels.base._BLOCK_ELEMENTS", 64 * COLUMNS)
    packed = random_packed(Precision(bits=4), torch.bfloat16, rows=rows)
    layout, _ = BACKENDS["cpu_int4"].prepare(packed).tensors
    codes = packed.signed_rows(slice(None)).to(torch.int32) + 8
    assert torch.equal(layout, torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1))


@pytest.mark.parametrize("rows", [64, 80])
@pytest.mark.parametrize("has_bias", [True, False])
def test_int4_gives_one_answer_for_few_rows_and_for_many(rows, has_bias):
    backend = BACKENDS["cpu_int4"]
    prepared = backend.prepare(random_packed(Precision(bits=4), torch.bfloat16, rows))
    x = torch.randn(2, 70, COLUMNS, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    bias = torch.randn(rows).to(torch.bfloat16) if has_bias else None
    many = backend.linear(x, prepared, bias)
    few = backend.linear(x[:, :5], prepared, bias)
    assert many.shape == (2, 70, rows)
    torch.testing.assert_close(many[:, :5], few, atol=0.02, rtol=0.02)


# bitsandbytes takes a column out of every row's 8-bit product when one row has an outlier there.
@pytest.mark.parametrize("name", INT8_NAMES[:2])
def test_int8_rounds_each_row_of_activations_on_its_own(name):
    backend = BACKENDS[name]
    precision = Precision(bits=8, group_size=None, symmetric=True)
    if not backend.supports("cpu", precision, torch.float32, ROWS, COLUMNS):
        pytest.skip("this CPU has no u8 x s8 matmul")
    prepared = backend.prepare(random_packed(precision, torch.float32))
    x = torch.randn(4, COLUMNS, generator=torch.Generator().manual_seed(3))
    alone = backend.linear(x[1:2], prepared, None)
    x[0] *= 1000.0
    x[2] = 0.0
    together = backend.linear(x, prepared, None)
    assert torch.equal(together[1:2], alone)
    assert torch.equal(together[2], torch.zeros(ROWS))


@pytest.mark.parametrize("name", INT8_NAMES[:3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_int8_keeps_its_precision_beside_outlier_channels(name, dtype, rows):
    backend = BACKENDS[name]
    precision = Precision(bits=8, group_size=None, symmetric=True)
    if not backend.supports("cpu", precision, dtype, ROWS, 1024):
        pytest.skip("this CPU has no u8 x s8 matmul")
    packed = random_packed(precision, dtype, columns=1024)
    x = torch.randn(rows, 1024, generator=torch.Generator().manual_seed(5))
    x[:, 5::128] *= 40.0
    x = x.to(dtype)
    expected = x.double() @ packed.dequantize(torch.float64).T
    got = backend.linear(x, backend.prepare(packed), None)
    assert relative_error(got, expected) < 0.01  # .045 when outliers share a scale with the rest


@pytest.mark.parametrize(
    "name", ["cpu_int4", "cpu_int8", "cpu_packed", "cpu_packed_int8", "cpu_llm_int8"]
)
def test_a_backend_refuses_what_it_does_not_support(name):
    bits = BACKENDS[name].capability.bits[0]
    precision = Precision(bits=bits, group_size=24, symmetric=bits == 8)
    with pytest.raises(SpecError, match=f"kernel '{name}'"):
        BACKENDS[name].prepare(random_packed(precision, torch.float32, rows=48, columns=48))


def test_reference_keeps_the_packed_tensors_themselves():
    packed = random_packed(Precision(bits=3), torch.float32)
    prepared = BACKENDS["reference"].prepare(packed)
    assert prepared.tensors[0] is packed.codes
    assert prepared.nbytes == packed.nbytes


def test_scratch_is_reused_and_grows():
    scratch = Scratch()
    big = scratch.take(8, 16, torch.float32)
    small = scratch.take(4, 4, torch.bfloat16)
    assert small.data_ptr() == big.data_ptr()
    assert scratch.take(16, 16, torch.float32).shape == (16, 16)


def test_scratch_is_not_shared_between_threads():
    scratch = Scratch()
    addresses = [scratch.take(8, 8, torch.float32).data_ptr()]
    worker = threading.Thread(
        target=lambda: addresses.append(scratch.take(8, 8, torch.float32).data_ptr())
    )
    worker.start()
    worker.join()
    assert len(set(addresses)) == 2
