"""Packing is exact at every width and shape, and weighs what the planner's law says."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmpq.errors import SpecError
from llmpq.kernels.base import (
    PACKED_BITS,
    PackedWeight,
    pack_codes,
    packed_row_bytes,
    row_blocks,
    unpack_signed,
)
from llmpq.spec.precision import Precision, linear_bytes

torch.set_num_threads(1)


def random_packed(
    rows: int,
    columns: int,
    precision: Precision,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> PackedWeight:
    rng = torch.Generator().manual_seed(seed)
    groups = columns // precision.effective_group(columns)
    codes = torch.randint(0, 1 << precision.bits, (rows, columns), generator=rng)
    zeros = None if precision.symmetric else torch.randn(rows, groups, generator=rng).to(dtype)
    return PackedWeight(
        out_features=rows,
        in_features=columns,
        precision=precision,
        codes=pack_codes(codes.to(torch.uint8), precision.bits),
        scales=torch.rand(rows, groups, generator=rng).add(0.1).to(dtype),
        zeros=zeros,
    )


precisions = st.builds(
    Precision,
    bits=st.sampled_from(PACKED_BITS),
    group_size=st.sampled_from([None, 8, 16, 32, 128]),
    symmetric=st.booleans(),
)


@settings(deadline=None)  # the first call of a kernel loads it
@given(
    bits=st.sampled_from(PACKED_BITS),
    rows=st.integers(1, 5),
    columns=st.integers(1, 70),
    seed=st.integers(0, 2**16),
)
def test_unpacking_undoes_packing(bits, rows, columns, seed):
    rng = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=rng).to(torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed.shape == (rows, packed_row_bytes(columns, bits))
    signed = unpack_signed(packed, bits, columns)
    assert torch.equal(signed.to(torch.int16) + (1 << (bits - 1)), codes.to(torch.int16))


@pytest.mark.parametrize("bits", PACKED_BITS)
def test_codes_lie_in_a_little_endian_bit_stream(bits):
    codes = torch.arange(241, 254).bitwise_and((1 << bits) - 1).to(torch.uint8).unsqueeze(0)
    number = sum(int(code) << (bits * k) for k, code in enumerate(codes[0]))
    expected = number.to_bytes(packed_row_bytes(13, bits), "little")
    assert bytes(pack_codes(codes, bits)[0].tolist()) == expected


@settings(deadline=None)  # the first call of a kernel loads it
@given(
    precision=precisions,
    rows=st.integers(1, 6),
    columns=st.sampled_from([1, 7, 8, 24, 32, 48, 96, 128, 256]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_bytes_equal_the_law(precision, rows, columns, dtype):
    packed = random_packed(rows, columns, precision, dtype)
    assert packed.nbytes == linear_bytes(rows, columns, precision, dtype.itemsize)


@settings(deadline=None)  # the first call of a kernel loads it
@given(precision=precisions, columns=st.sampled_from([7, 24, 32, 128]))
def test_dequantize_follows_the_formula(precision, columns):
    packed = random_packed(3, columns, precision)
    group = precision.effective_group(columns)
    signed = packed.signed_rows(slice(None)).double().view(3, -1, group)
    expected = signed * packed.scales.double().unsqueeze(-1)
    if packed.zeros is not None:
        expected = expected + packed.zeros.double().unsqueeze(-1)
    got = packed.dequantize(torch.float32)
    torch.testing.assert_close(got.double(), expected.view(3, columns), rtol=1e-6, atol=1e-6)


def test_dequantize_to_bfloat16_rounds_once():
    packed = random_packed(64, 256, Precision(bits=4))
    expected = packed.dequantize(torch.float32).to(torch.bfloat16)
    assert torch.equal(packed.dequantize(torch.bfloat16), expected)


def test_dequantize_does_not_depend_on_the_blocks():
    # 600 x 1024 is more than two blocks; every row alone is one block.
    packed = random_packed(600, 1024, Precision(bits=3))
    whole = packed.dequantize(torch.float32)
    for row in (0, 255, 256, 599):
        one = dataclasses.replace(
            packed,
            out_features=1,
            codes=packed.codes[row : row + 1],
            scales=packed.scales[row : row + 1],
            zeros=packed.zeros[row : row + 1],
        )
        assert torch.equal(one.dequantize(torch.float32)[0], whole[row])


@settings(deadline=None)  # the first call of a kernel loads it
@given(
    rows=st.integers(0, 5000),
    elements=st.integers(0, 1 << 20),
    multiple=st.sampled_from([1, 64]),
)
def test_row_blocks_cover_every_row_once(rows, elements, multiple):
    blocks = list(row_blocks(rows, elements, multiple))
    covered = [row for block in blocks for row in range(block.start, block.stop)]
    assert covered == list(range(rows))
    assert all((block.stop - block.start) % multiple == 0 for block in blocks[:-1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codes": torch.zeros(4, 63, dtype=torch.uint8)}, "found codes"),
        ({"codes": torch.zeros(4, 64, dtype=torch.int8)}, "found codes"),
        ({"scales": torch.ones(4, 2)}, "found scales"),
        ({"scales": torch.ones(4, 1, dtype=torch.float64)}, "found scales"),
        ({"zeros": torch.zeros(4, 1, dtype=torch.bfloat16)}, "found zeros"),
        ({"zeros": None}, "found no zeros"),
        ({"precision": Precision(bits=16, method="none")}, "found 16 bits"),
    ],
)
def test_malformed_weights_are_refused(change, message):
    packed = random_packed(4, 128, Precision(bits=4))
    with pytest.raises(SpecError, match=message):
        dataclasses.replace(packed, **change)
