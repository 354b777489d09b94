"""The compiled kernels against float64, on every instruction set that this machine can run."""

import hashlib
import itertools
import math
from dataclasses import replace

import pytest
import torch
from helpers.instruction_sets import OWN, RUNNABLE, those, using
from hypothesis import given, settings
from hypothesis import strategies as st

from llmpq.kernels.base import PACKED_BITS, PackedWeight, pack_codes
from llmpq.kernels.cpu.native import (
    TILE_COLUMNS,
    TILE_ROWS,
    TiledWeight,
    bf16_product,
    fits_tiles,
    float_product,
    has_bf16_products,
    has_int8,
    int8_product,
    library,
    packed_int8_product,
    prepared_tiles,
    rows_of_tiles,
    to_tiles,
)
from llmpq.spec.precision import Precision, linear_bytes

torch.set_num_threads(1)
pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler")

needs_bf16 = pytest.mark.skipif(not has_bf16_products(), reason="no bf16 products")
WITH_PIECES = [name for name in RUNNABLE if has_int8(name)]
PIECES = those(WITH_PIECES, "kernel of 8-bit activations: it needs AVX2 and a C compiler")
OLDER = those([name for name in WITH_PIECES if name != OWN], "older processor with that kernel")

precisions = st.builds(
    Precision,
    bits=st.sampled_from(PACKED_BITS),
    group_size=st.sampled_from([None, 32, 64, 96, 128, 256]),
    symmetric=st.booleans(),
)
shapes = st.tuples(
    st.sampled_from([16, 48, 64, 80, 208]),
    st.sampled_from([32, 64, 96, 128, 192, 256, 384, 512]),
)
row_counts = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 11, 16, 38, 193])
dtypes = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])


def in_tiles(packed):
    return prepared_tiles(to_tiles(packed), "cpu_packed")


def random_packed(shape, precision, dtype, seed=0):
    rng = torch.Generator().manual_seed(seed)
    rows, columns = shape
    groups = columns // precision.effective_group(columns)
    codes = torch.randint(0, 1 << precision.bits, (rows, columns), generator=rng)
    zeros = torch.randn(rows, groups, generator=rng).mul(0.02).to(dtype)
    return PackedWeight(
        out_features=rows,
        in_features=columns,
        precision=precision,
        codes=pack_codes(codes.to(torch.uint8), precision.bits),
        scales=torch.rand(rows, groups, generator=rng).add(0.5).mul(0.02).to(dtype),
        zeros=None if precision.symmetric else zeros,
    )


def worst_error(y, x, packed, bias):
    """Return the largest error in units of what the sizes of the summands allow to round."""
    weight = packed.dequantize(torch.float64)
    expected = x.double() @ weight.T + bias.double()
    size = x.double().abs() @ weight.abs().T + bias.double().abs()
    return ((y.double() - expected).abs() / size).max().item()


@settings(deadline=None, max_examples=30)
@given(precision=precisions, shape=shapes, count=row_counts, dtype=dtypes, seed=st.integers(0, 99))
def test_float_products_are_those_of_the_dequantized_weight(precision, shape, count, dtype, seed):
    packed = random_packed(shape, precision, dtype, seed)
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(count, shape[1], generator=rng)
    bias = torch.randn(shape[0], generator=rng)
    y = float_product(x, in_tiles(packed), bias)
    assert worst_error(y, x, packed, bias) < 1e-6


@needs_bf16
@settings(deadline=None, max_examples=30)
@given(
    precision=precisions,
    shape=shapes,
    count=row_counts,
    few_limit=st.sampled_from([0, 1000]),
    in_float=st.booleans(),
    seed=st.integers(0, 99),
)
def test_bf16_products_round_once(precision, shape, count, few_limit, in_float, seed):
    packed = random_packed(shape, precision, torch.bfloat16, seed)
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(count, shape[1], generator=rng).to(torch.bfloat16)
    bias = torch.randn(shape[0], generator=rng).to(torch.bfloat16)
    y = bf16_product(x, in_tiles(packed), bias, few_limit, in_float=in_float)
    # The answer is rounded to 8 bits of mantissa; everything before is float32.
    assert worst_error(y, x, packed, bias) < 2**-8


LLM_INT8 = Precision(bits=8, group_size=None, symmetric=True)


def for_llm_int8(packed):
    return prepared_tiles(to_tiles(packed), "cpu_llm_int8")


@pytest.mark.parametrize("name", PIECES)
@settings(deadline=None, max_examples=25)
@given(
    shape=shapes,
    count=row_counts,
    dtype=dtypes,
    threshold=st.sampled_from([0.0, 1.0, 6.0, float("inf")]),
    seed=st.integers(0, 99),
)
def test_int8_products_err_by_the_rounding_of_the_rest(name, shape, count, dtype, threshold, seed):
    packed = random_packed(shape, LLM_INT8, dtype, seed)
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(count, shape[1], generator=rng).mul(3).to(dtype)
    bias = torch.randn(shape[0], generator=rng).to(dtype)
    with using(name):
        y = int8_product(x, for_llm_int8(packed), bias, threshold).double()
    weight = packed.dequantize(torch.float64)
    expected = x.double() @ weight.T + bias.double()
    kept = torch.where(x.abs() < threshold, x.double().abs(), 0.0)  # below the threshold: rounded
    step = kept.amax(dim=1, keepdim=True) / 127
    rounded = 0.5 * step * ((kept > 0).double() @ weight.abs().T)
    last = expected.abs() * (0 if dtype == torch.float32 else torch.finfo(dtype).eps)
    size = x.double().abs() @ weight.abs().T + bias.double().abs()
    assert ((y - expected).abs() <= 1.001 * rounded + last + 1e-5 * size).all()


few_bits = st.builds(
    Precision,
    bits=st.sampled_from([3, 4]),
    group_size=st.sampled_from([None, 32, 64, 96, 128, 256]),
    symmetric=st.booleans(),
)


def in_blocks(x, packed):
    """``x`` rounded to 8 bits in blocks of columns, to the codes of float32 arithmetic.

    A block has 128 columns, or the largest half of them that divides a group.
    """
    block = math.gcd(128, packed.precision.effective_group(packed.in_features))
    blocks = x.float().view(len(x), -1, block)
    size = blocks.abs().amax(-1, keepdim=True)
    codes = (blocks * torch.full_like(size, 127).div(size)).round()  # 127 / size rounds twice
    return torch.where(size > 0, codes.double() * (size / 127), 0.0).view(x.shape)


def rounding_of(dtype):
    """Half the distance of two answers, relative to them, and float32's own rounding before."""
    return torch.finfo(dtype).eps / 2 + 1e-6


@pytest.mark.parametrize("name", PIECES)
@settings(deadline=None, max_examples=25)
@given(
    precision=few_bits,
    shape=shapes,
    count=row_counts,
    dtype=dtypes,
    outlier=st.sampled_from([1.0, 50.0]),
    seed=st.integers(0, 99),
)
def test_products_with_8_bit_blocks_are_those_of_rounded_activations(
    name, precision, shape, count, dtype, outlier, seed
):
    packed = random_packed(shape, precision, dtype, seed)
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(count, shape[1], generator=rng)
    x[:, 5] *= outlier
    x[0, 32:64] = 0.0
    x[-1] = 0.0
    x = x.to(dtype)
    bias = torch.randn(shape[0], generator=rng).to(dtype)
    with using(name):
        y = packed_int8_product(x, in_tiles(packed), bias)
    assert worst_error(y, in_blocks(x, packed), packed, bias) < rounding_of(dtype)
    rounded = (x.double() - in_blocks(x, packed)).abs() @ packed.dequantize(torch.float64).abs().T
    exact = x.double() @ packed.dequantize(torch.float64).T + bias.double()
    assert ((y.double() - exact).abs() <= rounded + exact.abs() * 2**-8 + 1e-2).all()


@pytest.mark.parametrize("name", OLDER)
@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_8_bit_blocks_give_the_same_bits_on_every_processor(name, bits, dtype):
    for symmetric, group in ((False, 64), (True, None)):
        precision = Precision(bits=bits, group_size=group, symmetric=symmetric)
        weight = in_tiles(random_packed((208, 256), precision, dtype))
        x = torch.randn(201, 256, generator=torch.Generator().manual_seed(2)).to(dtype)
        bias = torch.randn(208, generator=torch.Generator().manual_seed(3)).to(dtype)
        for count in (1, 2, 3, 4, 5, 6, 7, 8, 201):
            expected = packed_int8_product(x[:count], weight, bias)
            with using(name):
                assert torch.equal(packed_int8_product(x[:count], weight, bias), expected)


@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("count", [1, 9, 18])
def test_the_largest_sums_of_8_bit_blocks_do_not_saturate(name, bits, count):
    packed = random_packed((64, 256), Precision(bits=bits, group_size=64), torch.float32)
    packed = replace(packed, codes=torch.full_like(packed.codes, 255))
    x = torch.ones(count, 256)
    x[:, 128:] = -2.0
    x[-1] *= -1
    zero = torch.zeros(64)
    with using(name):
        y = packed_int8_product(x, in_tiles(packed), None)
    assert worst_error(y, x, packed, zero) < 1e-6


@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize("bits", [3, 4])
def test_a_row_of_8_bit_blocks_does_not_depend_on_its_company(name, bits):
    packed = random_packed((80, 256), Precision(bits=bits, group_size=64), torch.bfloat16)
    weight = in_tiles(packed)
    x = torch.randn(200, 256, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    with using(name):
        alone = torch.cat([packed_int8_product(row[None], weight, None) for row in x])
        for count in (1, 2, 3, 4, 5, 7, 16, 29, 200):
            for threads in (1, 2):
                y = packed_int8_product(x[:count], weight, None, threads=threads)
                assert torch.equal(y, alone[:count])


@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_8_bit_blocks_do_not_hide_what_is_not_finite(name, dtype, wrong):
    packed = random_packed((48, 128), Precision(bits=4, group_size=64), dtype)
    x = torch.ones(3, 128, dtype=dtype)
    x[1, 70] = wrong
    with using(name):
        y = packed_int8_product(x, in_tiles(packed), None)
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


def with_outliers(count, columns, dtype):
    """Rows of which some have outliers: in the same columns, or in columns of their own."""
    rng = torch.Generator().manual_seed(2)
    x = torch.randn(count, columns, generator=rng)
    x[:, 5::100] *= 20
    x[::3] += 40 * (torch.rand(x[::3].shape, generator=rng) < 0.02)
    x[1::7] = 0.0
    return x.to(dtype)


@pytest.mark.parametrize("name", OLDER)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(16, 32), (48, 64), (80, 288), (208, 320)])
def test_llm_int8_gives_the_same_bits_on_every_processor(name, dtype, rows, columns):
    weight = for_llm_int8(random_packed((rows, columns), LLM_INT8, dtype))
    x = with_outliers(245, columns, dtype)
    biases = None, torch.randn(rows, generator=torch.Generator().manual_seed(3)).to(dtype)
    for count in (*range(1, 41), 200, 245):
        bias = biases[count % 2]
        expected = int8_product(x[:count], weight, bias, 6.0)
        with using(name):
            assert torch.equal(int8_product(x[:count], weight, bias, 6.0), expected)


@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize("columns", [256, 4096])
def test_llm_int8_is_an_exact_product_of_rounded_rows(name, columns):
    packed = random_packed((80, columns), LLM_INT8, torch.float32)
    weight, codes = for_llm_int8(packed), packed.signed_rows(slice(None)).to(torch.int64)
    x = torch.randn(30, columns, generator=torch.Generator().manual_seed(5))
    steps = x.abs().amax(1, keepdim=True) / 127
    rounded = (x * (1 / steps)).round().clamp(-127, 127).to(torch.int64)
    expected = (rounded @ codes.T).float() * steps * packed.scales.T
    with using(name):
        for count in (1, 2, 3, 4, 5, 6, 7, 8, 13, 16, 17, 24, 25, 30):
            assert torch.equal(int8_product(x[:count], weight, None, 6.0), expected[:count])


@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize("columns", [256, 131072])
@pytest.mark.parametrize("codes", [0, 255])
def test_the_largest_sums_of_llm_int8_are_exact(name, columns, codes):
    """131,072 columns: 32 bits hold the sum of the products, but not that of unsigned codes."""
    packed = random_packed((16, columns), LLM_INT8, torch.float32)
    packed = replace(packed, codes=torch.full_like(packed.codes, codes))
    x = torch.full((9, columns), 127.0)
    x[1:5:2] *= -1
    x[3, ::2] *= -1
    x[5:, 1::2] = torch.arange(-127.0, 128.0).repeat(columns)[: columns // 2]
    weight = for_llm_int8(packed)
    sums = x.to(torch.int64) @ torch.full((columns, 1), codes - 128)
    expected = sums.float() * packed.scales.T
    with using(name):
        for count in (1, 4, 9):
            assert torch.equal(int8_product(x[:count], weight, None, math.inf), expected[:count])


@pytest.mark.parametrize("name", PIECES)
def test_a_row_of_llm_int8_does_not_depend_on_its_company(name):
    weight = for_llm_int8(random_packed((80, 256), LLM_INT8, torch.bfloat16))
    x = with_outliers(200, 256, torch.bfloat16)
    with using(name):
        alone = torch.cat([int8_product(row[None], weight, None, 6.0) for row in x])
        for count in (1, 2, 3, 4, 5, 7, 16, 25, 29, 200):
            for threads in (1, 2):
                y = int8_product(x[:count], weight, None, 6.0, threads)
                assert torch.equal(y, alone[:count])


@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_llm_int8_lets_what_is_not_finite_through(name, dtype):
    weight = for_llm_int8(random_packed((48, 128), LLM_INT8, dtype))
    x = torch.zeros(3, 128, dtype=dtype)
    x[0, 3], x[1, 40] = torch.nan, torch.inf
    with using(name):
        y = int8_product(x, weight, None, 6.0)
    assert y[0].isnan().all()
    assert not y[1].isfinite().any()
    assert torch.equal(y[2], torch.zeros(48, dtype=dtype))


@pytest.mark.parametrize("name", RUNNABLE)
@pytest.mark.parametrize("bits", PACKED_BITS)
def test_every_instruction_set_multiplies_the_same_tiles(name, bits):
    packed = random_packed((80, 192), Precision(bits=bits, group_size=64), torch.float16)
    x = torch.randn(13, 192, generator=torch.Generator().manual_seed(1))
    bias = torch.zeros(80)
    prepared = in_tiles(packed)
    with using(name):
        assert torch.equal(in_tiles(packed).tensors[0], prepared.tensors[0])
        assert worst_error(float_product(x, prepared, bias), x, packed, bias) < 1e-6


def tiled_weight(packed, cuts=()):
    """``packed`` in tiles, put in as blocks of rows that end at ``cuts``."""
    shape = (packed.out_features, packed.in_features)
    found = TiledWeight.empty(*shape, packed.precision, packed.dtype)
    edges = [0, *sorted(set(cuts) - {0}), packed.out_features]
    for first, end in itertools.pairwise(edges):
        found.put_rows(
            first,
            PackedWeight(
                out_features=end - first,
                in_features=packed.in_features,
                precision=packed.precision,
                codes=packed.codes[first:end],
                scales=packed.scales[first:end],
                zeros=None if packed.zeros is None else packed.zeros[first:end],
            ),
        )
    return found


def packed_rows(tiles, bits):
    """Return the packed rows ``[R, K b / 8]`` of tiles ``[R / 16, K b / 2 * 4]``, both of bytes."""
    blocks = tiles.shape[0]
    if bits == 3:
        return three_bit_rows(tiles)
    lanes = tiles.view(blocks, -1, TILE_ROWS, 4)  # [R/16, vectors, lane, byte]
    if bits == 4:
        low, high = lanes[..., :2], lanes[..., 2:]  # nibbles of even columns, of odd ones
        pairs = torch.stack(
            ((low & 0x0F) | (high << 4), (low >> 4) | (high & 0xF0)), dim=-1
        )  # [R/16, vectors, lane, 2, 2]
        lanes = pairs.view(lanes.shape)
    return lanes.transpose(1, 2).reshape(blocks * TILE_ROWS, -1)


def three_bit_rows(tiles):
    blocks = tiles.shape[0]
    vectors = tiles.clone().view(torch.int32).view(blocks, -1, 3, TILE_ROWS)  # [R/16, tiles, 3, 16]
    codes = torch.empty(
        (blocks, vectors.shape[1], TILE_ROWS, TILE_COLUMNS), dtype=torch.uint8, device=tiles.device
    )
    for column in range(TILE_COLUMNS):
        four, byte = column // 4, (0, 16, 8, 24)[column % 4]
        if four < 6:
            code = vectors[:, :, four // 2] >> (byte + 3 * (four % 2)) & 7
        else:  # the fours whose bits fill what the others leave over
            code = vectors[:, :, four - 6] >> (byte + 6) & 3
            code |= (vectors[:, :, 2] >> (byte + four) & 1) << 2
        codes[..., column] = code
    rows = codes.transpose(1, 2).reshape(blocks * TILE_ROWS, -1)  # [R, K]
    return pack_codes(rows, 3)


@settings(deadline=None, max_examples=60)
@given(precision=precisions, shape=shapes, dtype=dtypes, data=st.data())
def test_tiles_hold_every_code_for_any_blocks_of_rows(precision, shape, dtype, data):
    packed = random_packed(shape, precision, dtype)
    cuts = data.draw(st.sets(st.sampled_from(range(0, shape[0], 16))))
    found = tiled_weight(packed, cuts)
    whole = in_tiles(packed).tensors
    assert all(map(torch.equal, found.parts.values(), whole))
    assert torch.equal(
        packed_rows(found.tiles.view(shape[0] // TILE_ROWS, -1), precision.bits), packed.codes
    )
    assert torch.equal(found.scales.t(), packed.scales)
    assert packed.zeros is None or torch.equal(found.zeros.t(), packed.zeros)


@pytest.mark.parametrize(
    ("bits", "expected"),
    [(3, "809f9b79e2d4ca6c"), (4, "0b39bdf96c461b21"), (8, "10cc3ef96857982e")],
)
def test_the_layout_of_tiles_in_cached_files_is_unchanged(bits, expected):
    """A change of the tiles needs another ``weight_cache.FORMAT``."""
    packed = random_packed((48, 192), Precision(bits=bits, group_size=64), torch.float32)
    content = tiled_weight(packed).tiles.numpy().tobytes()
    assert hashlib.sha256(content).hexdigest()[:16] == expected


@pytest.mark.parametrize("bits", PACKED_BITS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_tiles_weigh_what_the_law_says(bits, symmetric):
    precision = Precision(bits=bits, group_size=64, symmetric=symmetric)
    packed = random_packed((48, 192), precision, torch.bfloat16)
    assert in_tiles(packed).nbytes == linear_bytes(48, 192, precision, 2)


def test_a_row_of_float32_does_not_depend_on_its_company():
    packed = random_packed((80, 256), Precision(bits=4, group_size=64), torch.float32)
    weight = in_tiles(packed)
    x = torch.randn(200, 256, generator=torch.Generator().manual_seed(2))
    together = float_product(x, weight, None)
    for row in (0, 5, 6, 191, 192, 199):
        assert torch.equal(float_product(x[row : row + 1], weight, None)[0], together[row])


@pytest.mark.parametrize("bits", PACKED_BITS)
def test_two_threads_give_the_answer_of_one(bits):
    packed = random_packed((208, 256), Precision(bits=bits), torch.float32)
    x = torch.randn(9, 256, generator=torch.Generator().manual_seed(3))
    alone = float_product(x, in_tiles(packed), None)
    torch.set_num_threads(2)
    try:
        assert torch.equal(float_product(x, in_tiles(packed), None), alone)
    finally:
        torch.set_num_threads(1)


def test_strided_and_empty_activations_are_taken():
    packed = random_packed((48, 64), Precision(bits=4, group_size=32), torch.float32)
    weight = in_tiles(packed)
    x = torch.randn(64, 5, generator=torch.Generator().manual_seed(4))
    assert torch.equal(
        float_product(x.t(), weight, None), float_product(x.t().contiguous(), weight, None)
    )
    assert float_product(torch.empty(2, 0, 64), weight, None).shape == (2, 0, 48)


@pytest.mark.parametrize(
    ("shape", "group", "fits"),
    [((16, 32), 32, True), ((24, 32), 32, False), ((16, 48), 48, False), ((16, 96), 16, False)],
)
def test_only_whole_tiles_fit(shape, group, fits):
    assert fits_tiles(*shape, group) is fits


@settings(deadline=None, max_examples=40)
@given(shape=shapes, precision=precisions, dtype=dtypes)
def test_single_rows_are_those_of_the_dequantized_weight(shape, precision, dtype):
    packed = random_packed(shape, precision, dtype)
    if not fits_tiles(*shape, precision.effective_group(shape[1])):
        return
    ids = torch.tensor([[0, shape[0] - 1], [5, 5]])
    found = rows_of_tiles(in_tiles(packed), ids, dtype)
    expected = packed.dequantize(dtype)[ids]
    torch.testing.assert_close(found, expected, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_a_row_that_does_not_exist_is_an_error():
    packed = random_packed((16, 32), Precision(bits=4), torch.float32)
    for row in (-1, 16):
        with pytest.raises(IndexError, match="expected one of"):
            rows_of_tiles(in_tiles(packed), torch.tensor([row]), torch.float32)
