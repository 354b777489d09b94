"""Attention of single tokens on blocks against torch's own, row by row."""

import math

import pytest
import torch
from helpers.rounding import attention_error

from llmpq.dist.kv.cache import rotated, unpacked_numbers
from llmpq.kernels.cpu.paged_attention import PagedCall, PagedHeads, can_attend

pytestmark = pytest.mark.skipif(
    not can_attend(torch.float32, torch.float32, 32, 16), reason="no C compiler"
)


def _expected(query, keys, values, length, window, scaling):
    """One row in float64, and the error that is allowed: query [H, d], keys [h, T, d]."""
    group = query.shape[0] // keys.shape[0]
    first = max(0, length - window) if window else 0
    dtype, query = query.dtype, query.double() * scaling
    keys = keys[:, first:length].double().repeat_interleave(group, 0)
    values = values[:, first:length].double().repeat_interleave(group, 0)
    weights = torch.einsum("hd,htd->ht", query, keys).softmax(-1)
    right = torch.einsum("ht,htd->hd", weights, values)
    return right, attention_error(query, keys, values, weights, dtype)


def _call(block_tables, lengths):
    """A decode call of rows with so many tokens, the new one included."""
    return PagedCall(block_tables, [length - 1 for length in lengths], [1] * len(lengths))


def _dense(blocks, table):
    """The tokens of a row, ``[h, T, d]``, from ``[blocks, h, B, d]``."""
    return blocks[list(table)].transpose(0, 1).flatten(1, 2)


def _tables(lengths, block_size, seed):
    """Blocks of each row in random order."""
    counts = [-(-length // block_size) for length in lengths]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed))
    return [tuple(part.tolist()) for part in order.split(counts)]


def _numbers(codes):
    return unpacked_numbers(codes) if codes.dtype == torch.uint8 else codes.float()


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(12, 4, 64), (4, 4, 16), (10, 2, 80), (7, 1, 128), (4, 2, 512), (20, 1, 576)],
)
@pytest.mark.parametrize("window", [None, 20])
def test_each_row_attends_to_its_own_tokens(dtype, heads, kv_heads, dim, window, block_size):
    torch.manual_seed(heads)
    lengths = [1, 17, 200, 64]
    tables = _tables(lengths, block_size, heads)
    blocks = sum(map(len, tables))
    keys, values = (torch.randn(blocks, kv_heads, block_size, dim).to(dtype) for _ in range(2))
    before = keys.clone()
    query = (torch.randn(1, 4, heads, dim) * 2).to(dtype).transpose(1, 2)
    new = tuple(torch.randn(1, 4, kv_heads, dim).to(dtype).transpose(1, 2) for _ in range(2))

    made = _call(tables, lengths).attend(
        query, PagedHeads(keys=keys, values=values), scaling=0.3, window=window, new=new
    )

    assert made.shape == (1, 4, heads, dim)
    assert made.dtype == dtype
    for row, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        key, value = _dense(keys, table), _dense(values, table)
        assert torch.equal(key[:, length - 1], new[0][0, :, row])
        assert torch.equal(value[:, length - 1], new[1][0, :, row])
        place = table[(length - 1) // block_size], slice(None), (length - 1) % block_size
        before[place] = new[0][0, :, row]
        right, error = _expected(query[0, :, row], key, value, length, window, 0.3)
        assert bool(((made[0, row].double() - right).abs() <= error).all())
    assert torch.equal(keys, before)  # nothing but the new tokens was written


@pytest.mark.parametrize("stored", [torch.float32, torch.int8, torch.uint8])
def test_tokens_of_a_chunk_attend_as_single_ones(stored):
    torch.manual_seed(1)
    starts, counts = [0, 30, 5], [3, 9, 1]
    tables = _tables([3, 39, 6], 16, 1)
    size = (sum(map(len, tables)), 2, 16, 32)
    has_codes = stored in (torch.int8, torch.uint8)
    scales = [torch.rand(size[:3]).bfloat16() for _ in range(2)] if has_codes else []
    size = (*size[:-1], 16) if stored == torch.uint8 else size
    together, alone = (
        PagedHeads(
            keys=torch.full(size, 3).to(stored),
            values=torch.full(size, 2).to(stored),
            **dict(zip(("key_scales", "value_scales"), [s.clone() for s in scales], strict=False)),
        )
        for _ in range(2)
    )
    query, (key, value) = torch.randn(1, 4, 13, 32), torch.randn(2, 1, 2, 13, 32)

    call = PagedCall(tables, starts, counts)
    call.store((key, value), together)
    made = call.attend(query, together, scaling=0.2)

    token = 0
    for table, start, count in zip(tables, starts, counts, strict=True):
        for position in range(start, start + count):
            own = slice(token, token + 1)
            one = PagedCall([table], [position], [1]).attend(
                query[:, :, own], alone, scaling=0.2, new=(key[:, :, own], value[:, :, own]),
            )  # fmt: skip
            assert torch.equal(made[:, own], one)
            token += 1
    assert torch.equal(together.keys, alone.keys)
    assert torch.equal(together.values, alone.values)


def test_what_follows_in_a_block_is_never_read():
    keys, values = (torch.full((3, 1, 16, 16), math.nan) for _ in range(2))
    keys[1, :, :9], values[1, :, :9] = 1.0, 2.0
    new = tuple(torch.ones(1, 1, 1, 16) for _ in range(2))

    made = _call([(1, 0)], [9]).attend(
        torch.ones(1, 1, 1, 16), PagedHeads(keys=keys, values=values), new=new, scaling=1.0
    )

    assert torch.allclose(made, torch.full((1, 1, 1, 16), (8 * 2.0 + 1.0) / 9))


def test_what_is_before_the_window_is_never_read():
    keys, values = (torch.full((2, 1, 16, 16), math.nan) for _ in range(2))
    keys[0, :, 9:], values[0, :, 9:], keys[1], values[1] = 1.0, 2.0, 1.0, 2.0
    new = tuple(torch.ones(1, 1, 1, 16) for _ in range(2))

    made = _call([(0, 1)], [24]).attend(
        torch.ones(1, 1, 1, 16), PagedHeads(keys=keys, values=values),
        new=new, scaling=1.0, window=15,
    )  # fmt: skip

    assert torch.allclose(made, torch.full((1, 1, 1, 16), (14 * 2.0 + 1.0) / 15))


@pytest.mark.parametrize(("length", "seen"), [(24, 9), (30, 15), (31, 1)])
def test_what_is_before_the_chunk_is_never_read(length, seen):
    keys, values = (torch.full((2, 1, 16, 16), math.nan) for _ in range(2))
    first = length - seen
    keys.view(-1, 16)[first:], values.view(-1, 16)[first:] = 1.0, 2.0
    new = tuple(torch.ones(1, 1, 1, 16) for _ in range(2))

    made = _call([(0, 1)], [length]).attend(
        torch.ones(1, 1, 1, 16), PagedHeads(keys=keys, values=values),
        new=new, scaling=1.0, chunk=15,
    )  # fmt: skip

    assert torch.allclose(made, torch.full((1, 1, 1, 16), ((seen - 1) * 2.0 + 1.0) / seen))


def test_a_number_that_is_none_stays_one():
    keys, values = (torch.zeros(6, 1, 16, 16) for _ in range(2))
    keys[1, 0, 4, 3] = math.nan
    new = tuple(torch.ones(1, 1, 2, 16) for _ in range(2))

    made = _call([(0, 1, 2), (3, 4, 5)], [40, 40]).attend(
        torch.ones(1, 1, 2, 16), PagedHeads(keys=keys, values=values), new=new, scaling=1.0
    )

    assert made[0, 0].isnan().all()
    assert made[0, 1].isfinite().all()


def test_far_scores_neither_overflow_nor_vanish():
    keys, values = torch.zeros(9, 1, 16, 16), torch.zeros(9, 1, 16, 16)
    flat = keys.view(-1, 16)
    flat[:130, 0] = torch.linspace(-500, 400, 130)
    values.view(-1, 16)[128] = 7.0
    new = (flat[128].clone().view(1, 1, 1, 16), values.view(-1, 16)[128].clone().view(1, 1, 1, 16))
    query = torch.zeros(1, 1, 1, 16)
    query[..., 0] = 1.0

    made = _call([range(9)], [129]).attend(
        query, PagedHeads(keys=keys, values=values), scaling=1.0, new=new
    )

    dense = [_dense(part, range(9)) for part in (keys, values)]
    right, _ = _expected(query[0, :, 0], *dense, 129, None, 1.0)
    assert torch.allclose(made[0, 0].double(), right, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 20])
def test_a_bias_of_the_keys_is_added_to_the_scores_of_its_head(window):
    torch.manual_seed(3)
    lengths = [77, 130]
    tables = _tables(lengths, 16, 3)
    keys, values = (torch.randn(sum(map(len, tables)), 2, 16, 16) for _ in range(2))
    query = torch.randn(1, 6, 2, 16)
    new = tuple(torch.randn(1, 2, 2, 16) for _ in range(2))
    bias = torch.randn(6, 200)[:, :131] * 3
    call, heads = _call(tables, lengths), PagedHeads(keys=keys, values=values)

    made = call.attend(query, heads, scaling=0.3, window=window, bias=bias, new=new)
    plain = call.attend(query, heads, scaling=0.3, window=window)

    for row, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        # A further part of queries and keys whose product is the bias.
        for head in range(6):
            one = torch.cat((query[0, head, row] * 0.3, torch.ones(1)))[None]  # [1, d + 1]
            own = _dense(keys, table)[head // 3, :length]
            key = torch.cat((own, bias[head, :length, None]), 1)
            value = _dense(values, table)[head // 3, :length]
            right, error = _expected(one, key[None], value[None], length, window, 1.0)
            assert bool(((made[0, row, head].double() - right[0]).abs() <= error[0]).all())
    assert not torch.allclose(made, plain, atol=0.1)
    unbiased = _call(tables, lengths).attend(query, heads, scaling=0.3, window=window)
    assert torch.equal(plain, unbiased)


@pytest.mark.parametrize("stored", [torch.float32, torch.int8, torch.uint8])
@pytest.mark.parametrize(("window", "sinks"), [(None, True), (1500, False), (700, True)])
def test_pieces_of_a_long_sequence_are_put_together(stored, window, sinks):
    torch.manual_seed(5)
    lengths, heads, kv_heads, dim = [1024, 3333, 1, 2049], 6, 2, 16
    tables = _tables(lengths, 16, 5)
    size = (sum(map(len, tables)), kv_heads, 16, dim)
    keys, values = (torch.randint(-127, 128, size).to(stored) for _ in range(2))
    scales = [torch.rand(size[:3]).div(50).bfloat16() for _ in range(2)]
    if stored == torch.uint8:
        keys, values = (torch.randint(256, (*size[:-1], dim // 2)).to(stored) for _ in range(2))
        scales = [scale.mul(8) for scale in scales]
    if stored == torch.float32:
        blocks = PagedHeads(keys=keys.div(50), values=values)
        wide = blocks.keys, values
    else:
        blocks = PagedHeads(keys=keys, values=values, key_scales=scales[0], value_scales=scales[1])
        pairs = zip((keys, values), scales, strict=True)
        wide = tuple(_numbers(part) * scale.float()[..., None] for part, scale in pairs)
        wide = wide if stored == torch.int8 else tuple(map(rotated, wide))
    query = torch.randn(1, heads, 4, dim) * 3
    sink = torch.randn(heads) * 3 if sinks else None
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append(
            _call(tables, lengths).attend(query, blocks, scaling=0.3, window=window, sinks=sink)
        )
    torch.set_num_threads(1)

    assert torch.equal(*found)
    for row, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        dense = [_dense(part, table)[:, :length] for part in wide]
        first = max(0, length - window) if window else 0
        seen = [part[:, first:].double().repeat_interleave(heads // kv_heads, 0) for part in dense]
        scores = torch.einsum("hd,htd->ht", query[0, :, row].double(), seen[0]) * 0.3
        if sink is not None:
            scores = torch.cat((scores, sink[:, None].double()), 1)
        weights = scores.softmax(-1)[:, : seen[1].shape[1]]
        right = torch.einsum("ht,htd->hd", weights, seen[1])
        assert torch.allclose(found[0][0, row].double(), right, rtol=1e-4, atol=1e-4)
