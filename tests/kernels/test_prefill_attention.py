"""Attention of prompts and chunks on blocks against float64, on every instruction set."""

import math

import pytest
import torch
from helpers.instruction_sets import RUNNABLE, those, using
from hypothesis import given, settings
from hypothesis import strategies as st

from llmpq.dist.kv.cache import rotate_tokens, rotated, unpacked_numbers
from llmpq.kernels.cpu.native import WITH_BF16
from llmpq.kernels.cpu.paged_attention import MAX_SINGLE_TOKENS, PagedCall, PagedHeads, can_attend

torch.set_num_threads(1)
pytestmark = pytest.mark.skipif(
    not can_attend(torch.float32, torch.float32, 32, 16), reason="no C compiler"
)
CLOSE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def _blocks(rows, shape, block_size, dtype, stored, rng):
    """Blocks of all rows in random order, and the tables of the rows."""
    kv_heads, dim = shape
    counts = [-(-length // block_size) for length in rows]
    order = torch.randperm(sum(counts), generator=rng)
    tables = [tuple(part.tolist()) for part in order.split(counts)]
    size = (sum(counts), kv_heads, block_size, dim)
    if stored == torch.uint8:
        return _rotated_blocks(size, rng), tables
    if stored == torch.int8:
        parts = [torch.randint(-127, 128, size, generator=rng).to(torch.int8) for _ in range(2)]
        scales = [torch.rand(size[:3], generator=rng).div(60).bfloat16() for _ in range(2)]
        names = dict(zip(("key_scales", "value_scales"), scales, strict=True))
        return PagedHeads(keys=parts[0], values=parts[1], **names), tables
    parts = [torch.randn(size, generator=rng).to(dtype) for _ in range(2)]
    return PagedHeads(keys=parts[0], values=parts[1]), tables


def _rotated_blocks(size, rng):
    """Random codes of 4 bits, with scales of their own."""
    packed = (*size[:-1], size[-1] // 2)
    parts = [torch.randint(256, packed, generator=rng, dtype=torch.uint8) for _ in range(2)]
    scales = [torch.rand(size[:3], generator=rng).div(8).bfloat16() for _ in range(2)]
    return PagedHeads(keys=parts[0], values=parts[1], key_scales=scales[0], value_scales=scales[1])


def _wide(heads):
    """Keys and values in float64."""
    if heads.keys.dtype == torch.uint8:
        pairs = (heads.keys, heads.key_scales), (heads.values, heads.value_scales)
        return [
            rotated(unpacked_numbers(codes).double() * scales.double()[..., None])
            for codes, scales in pairs
        ]
    scales = heads.key_scales, heads.value_scales
    return [
        part.double() * (1 if scale is None else scale.double()[..., None])
        for part, scale in zip((heads.keys, heads.values), scales, strict=True)
    ]


def _expected(query, keys, values, places, options):
    """One row: queries [H, T, d] at ``places``, keys and values [h, S, d]."""
    group = query.shape[0] // keys.shape[0]
    keys, values = (part.repeat_interleave(group, 0) for part in (keys, values))
    scores = query.double() @ keys.mT * options["scaling"]
    if options.get("softcap"):
        scores = torch.tanh(scores / options["softcap"]) * options["softcap"]
    if options.get("bias") is not None:
        scores = scores + options["bias"].double()[:, None, : keys.shape[1]]
    at, here = torch.arange(keys.shape[1]), places[:, None]
    seen = at <= here
    if options.get("window"):
        seen &= at > here - options["window"]
    if options.get("chunk"):
        seen &= at >= here // options["chunk"] * options["chunk"]
    scores = scores.masked_fill(~seen, -math.inf)
    if options.get("sinks") is not None:
        sinks = options["sinks"].double()[:, None, None].expand(*scores.shape[:2], 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ values).transpose(0, 1)  # [T, H, d]


def _check(made, query, heads, tables, starts, counts, options, close):
    wide, first = _wide(heads), 0
    for table, start, count in zip(tables, starts, counts, strict=True):
        dense = [
            part[list(table)].transpose(0, 1).flatten(1, 2)[:, : start + count] for part in wide
        ]
        own = slice(first, first + count)
        places = torch.arange(start, start + count)
        right = _expected(query[0, :, own], *dense, places, options)
        error = (made[0, own].double() - right).abs().max().item()
        assert error <= close * max(1.0, right.abs().max().item())
        first += count


rows = st.lists(
    st.tuples(st.sampled_from([0, 1, 16, 50, 100]), st.sampled_from([1, 5, 17, 40, 64, 67, 131])),
    min_size=1,
    max_size=3,
)


@settings(deadline=None, max_examples=40)
@given(
    rows=rows,
    heads=st.sampled_from([(1, 1), (6, 2), (4, 4), (7, 1), (40, 1)]),
    dim=st.sampled_from([16, 48, 64, 80, 512, 576]),
    block_size=st.sampled_from([16, 32]),
    kind=st.sampled_from(
        [
            (torch.float32, torch.float32),
            (torch.bfloat16, torch.bfloat16),
            (torch.float16, torch.float16),
            (torch.float32, torch.int8),
            (torch.bfloat16, torch.int8),
            (torch.float32, torch.uint8),
            (torch.bfloat16, torch.uint8),
        ]
    ),
    window=st.sampled_from([None, None, 1, 20, 70]),
    chunk=st.sampled_from([None, None, 48]),
    extras=st.sets(st.sampled_from(["softcap", "sinks", "bias"])),
    seed=st.integers(0, 99),
)
def test_prompts_and_chunks_are_those_of_float64(
    rows, heads, dim, block_size, kind, window, chunk, extras, seed
):
    rng = torch.Generator().manual_seed(seed)
    starts, counts = map(list, zip(*rows, strict=True))
    lengths = [start + count for start, count in rows]
    dtype, stored = kind
    blocks, tables = _blocks(lengths, (heads[1], dim), block_size, dtype, stored, rng)
    query = torch.randn(1, sum(counts), heads[0], dim, generator=rng).to(dtype).transpose(1, 2)
    options = {"scaling": dim**-0.5, "window": window, "chunk": chunk}
    if "softcap" in extras:
        options["softcap"] = 2.0
    if "sinks" in extras:
        options["sinks"] = torch.randn(heads[0], generator=rng)
    if "bias" in extras:
        options["bias"] = torch.randn(heads[0], max(lengths) + 3, generator=rng)

    made = PagedCall(tables, starts, counts).attend(query, blocks, **options)

    assert made.shape == (1, sum(counts), heads[0], dim)
    assert made.dtype == dtype
    _check(made, query, blocks, tables, starts, counts, options, CLOSE[dtype])


@pytest.mark.parametrize("name", RUNNABLE)
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.int8, torch.uint8])
def test_every_instruction_set_stores_and_attends(name, stored):
    rng = torch.Generator().manual_seed(3)
    starts, counts = [30, 0, 90], [70, 40, 1]
    lengths = [100, 40, 91]
    blocks, tables = _blocks(lengths, (2, 32), 16, torch.bfloat16, stored, rng)
    query = torch.randn(1, 6, 111, 32, generator=rng).bfloat16()
    new = tuple(torch.randn(1, 2, 111, 32, generator=rng).bfloat16() for _ in range(2))
    call = PagedCall(tables, starts, counts)

    with using(name):
        call.store(new, blocks)
        made = call.attend(query, blocks, scaling=0.2)

    _check(made, query, blocks, tables, starts, counts, {"scaling": 0.2}, 2e-2)
    wide, first = _wide(blocks), 0
    for table, start, count in zip(tables, starts, counts, strict=True):
        for part, given_part in zip(wide, new, strict=True):
            kept = part[list(table)].transpose(0, 1).flatten(1, 2)[:, start : start + count]
            given_row = given_part[0, :, first : first + count].double()
            if stored == torch.uint8:
                kept, given_row = rotated(kept), rotated(given_row)
            largest = given_row.abs().amax(-1, keepdim=True)
            half = {torch.bfloat16: 0, torch.int8: 1 / 254, torch.uint8: 1 / 16}[stored]
            assert ((kept - given_row).abs() <= largest * half * 1.08).all()
        first += count


@pytest.mark.parametrize("name", RUNNABLE)
@pytest.mark.parametrize("dim", [16, 48, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_of_4_bits_are_those_of_torch(name, dim, dtype):
    """The C kernel of every instruction set writes what the store's own code does."""
    rng = torch.Generator().manual_seed(dim)
    blocks = _rotated_blocks((3, 2, 16, dim), rng)
    new = [torch.randn(1, 2, 40, dim, generator=rng).to(dtype) for _ in range(2)]
    new[0][0, 1, 3] = 0
    with using(name):
        PagedCall([(2, 0, 1)], [0], [40]).store(tuple(new), blocks)
    pairs = (blocks.keys, blocks.key_scales), (blocks.values, blocks.value_scales)
    for (codes, scales), own in zip(pairs, new, strict=True):
        right, right_scales = rotate_tokens(own[0])
        found = codes[[2, 0, 1]].transpose(0, 1).flatten(1, 2)[:, :40]
        assert torch.equal(found, right)
        assert torch.equal(scales[[2, 0, 1]].transpose(0, 1).flatten(1, 2)[:, :40], right_scales)


def test_neither_chunks_nor_threads_change_a_token():
    rng = torch.Generator().manual_seed(4)
    blocks, tables = _blocks([200], (2, 64), 16, torch.float32, torch.float32, rng)
    query = torch.randn(1, 6, 200, 64, generator=rng)
    for window in (None, 50):
        whole = PagedCall(tables, [0], [200]).attend(query, blocks, scaling=0.1, window=window)
        for sizes in ((100, 100), (17, 183), (150, 50)):
            starts = [sum(sizes[:index]) for index in range(len(sizes))]
            assert min(sizes) > MAX_SINGLE_TOKENS
            for threads in (1, 3):
                torch.set_num_threads(threads)
                call = PagedCall(tables * len(sizes), starts, sizes)
                made = call.attend(query, blocks, scaling=0.1, window=window)
                torch.set_num_threads(1)
                assert torch.equal(made, whole)


def test_what_no_token_of_a_prompt_sees_is_never_read():
    keys, values = (torch.full((6, 1, 16, 16), math.nan) for _ in range(2))
    keys.view(-1, 16)[30:90], values.view(-1, 16)[30:90] = 1.0, 2.0
    made = PagedCall([range(6)], [50], [40]).attend(
        torch.ones(1, 1, 40, 16), PagedHeads(keys=keys, values=values), scaling=1.0, window=21
    )
    assert torch.allclose(made, torch.full((1, 40, 1, 16), 2.0))


def test_a_number_that_is_none_stays_one():
    keys, values = (torch.zeros(3, 1, 16, 16) for _ in range(2))
    keys[1, 0, 4, 3] = math.nan
    made = PagedCall([(0, 1, 2)], [0], [40]).attend(
        torch.ones(1, 1, 40, 16), PagedHeads(keys=keys, values=values), scaling=1.0
    )
    assert made[0, 20:].isnan().all()
    assert made[0, :18].isfinite().all()  # whole strips of queries before it


@pytest.mark.parametrize(
    "name",
    those([name for name in RUNNABLE if name in WITH_BF16], "bf16 products on this processor"),
)
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.int8, torch.uint8])
@pytest.mark.parametrize("dim", [32, 64, 96])
def test_an_answer_in_bf16_is_wrong_by_its_own_rounding_alone(name, stored, dim):
    rng = torch.Generator().manual_seed(5)
    starts, counts, lengths = [30, 0], [170, 90], [200, 90]
    blocks, tables = _blocks(lengths, (2, dim), 16, torch.bfloat16, stored, rng)
    query = torch.randn(1, 260, 6, dim, generator=rng).bfloat16().transpose(1, 2)
    options = {"scaling": dim**-0.5}
    with using(name):
        made = PagedCall(tables, starts, counts).attend(query, blocks, **options)
    wide, first = _wide(blocks), 0
    for table, start, count in zip(tables, starts, counts, strict=True):
        dense = [
            part[list(table)].transpose(0, 1).flatten(1, 2)[:, : start + count] for part in wide
        ]
        own, places = slice(first, first + count), torch.arange(start, start + count)
        right = _expected(query[0, :, own], *dense, places, options)
        error = (made[0, own].double() - right).abs()
        assert (error <= right.abs() * 2**-8 + 2**-14 * right.abs().max()).all()
        first += count
