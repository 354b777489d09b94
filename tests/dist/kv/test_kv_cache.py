"""The KV store against a dictionary of tokens, its bytes, and blocks with one writer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmpq.batching.blocks import blocks_of, slot_blocks
from llmpq.dist.kv.cache import (
    KVCache,
    quantize_tokens,
    rotate_tokens,
    rotated,
    unpacked_numbers,
)
from llmpq.errors import CapacityError, SpecError, StageError
from llmpq.kernels.cpu.paged_attention import can_attend
from llmpq.models import KVShape, PackedBatch
from llmpq.models.attention import ScoreOptions

SHAPES = (KVShape(heads=2, head_dim=3), KVShape(heads=1, head_dim=4))
KERNEL_SHAPE = KVShape(heads=2, head_dim=16)


def _cache(num_blocks=6, block_size=4, dtype=torch.float32, shapes=SHAPES, kv_bits=None):
    return KVCache(
        shapes, 5, num_blocks=num_blocks, block_size=block_size, dtype=dtype, kv_bits=kv_bits
    )


def _new(tokens, layer=0, first=1.0):
    shape = SHAPES[layer]
    size = (1, shape.heads, tokens, shape.head_dim)
    return torch.arange(first, first + torch.Size(size).numel()).reshape(size)


def _batch(tables, starts, counts):
    return PackedBatch(block_tables=tables, starts=starts, counts=counts)


@given(
    shapes=st.lists(
        st.builds(KVShape, heads=st.integers(1, 4), head_dim=st.integers(1, 8)), max_size=4
    ),
    num_blocks=st.integers(1, 5),
    block_size=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_bytes_are_those_of_the_formula(shapes, num_blocks, block_size, dtype):
    cache = _cache(num_blocks, block_size, dtype, shapes)
    values = sum(2 * num_blocks * s.heads * block_size * s.head_dim for s in shapes)
    assert cache.nbytes == values * dtype.itemsize


def test_slots_are_runs_of_blocks_of_their_own():
    assert [slot_blocks(slot, 33, 17) for slot in range(3)] == [(0, 1), (3, 4), (6, 7)]
    assert slot_blocks(1, 33, 33) == (3, 4, 5)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 7)), max_size=4), max_size=4),
    st.permutations(range(40)),
    st.sampled_from(
        [(None, SHAPES[0]), (8, SHAPES[0]), *((b, KERNEL_SHAPE) for b in (None, 8, 4))]
    ),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_rows_read_what_they_wrote(steps, free, stored, dtype):
    """Any rows in any blocks, by the kernel where there is one and by torch elsewhere."""
    kv_bits, shape = stored
    size = 16 if shape is KERNEL_SHAPE else 4
    cache = _cache(40, size, dtype, (shape,), kv_bits)
    stored_as = {None: dtype, 8: torch.int8, 4: torch.uint8}[kv_bits]
    has_kernel = can_attend(dtype, stored_as, shape.head_dim, size)
    assert cache.attends == has_kernel
    tables = [[] for _ in range(4)]
    expected = [torch.zeros(2, shape.heads, 0, shape.head_dim, dtype=dtype) for _ in range(4)]
    free = list(free)
    for number, rows in enumerate(steps):
        chosen = dict(rows)
        if not chosen:
            continue
        starts = [expected[i].shape[2] for i in chosen]
        for i, start in zip(chosen, starts, strict=True):
            while len(tables[i]) < blocks_of(start + chosen[i], size):
                tables[i].append(free.pop())
        batch = _batch([tuple(tables[i]) for i in chosen], starts, list(chosen.values()))
        generator = torch.Generator().manual_seed(number)
        new_size = (1, shape.heads, batch.tokens, shape.head_dim)
        key = torch.randn(new_size, generator=generator).to(dtype)
        view = cache.view(batch)
        view.update(key, -key, 5)
        if view.attends and batch.is_decode:  # stored when it attends
            view.attend(torch.zeros_like(key), ScoreOptions(scaling=1.0))
        for row, i in enumerate(chosen):
            own = key[0, :, batch.offsets[row] : batch.offsets[row] + chosen[i]]
            kept = torch.stack([_kept(one, kv_bits) for one in (own, -own)])
            expected[i] = torch.cat([expected[i], kept], dim=2)
            keys, values = view.read(row)
            assert keys.dtype == dtype
            assert torch.equal(torch.cat((keys, values)), expected[i])
        places = torch.tensor(batch.starts)
        read = view.read_rows(range(len(chosen)), places)
        keys, values, found = [part.clone() for part in read]
        assert torch.equal(found, places)
        for row, i in enumerate(chosen):
            length = expected[i].shape[2]
            assert torch.equal(keys[row, :, :length], expected[i][0])
            assert torch.equal(values[row, :, :length], expected[i][1])


def _kept(own, kv_bits):
    """What remains of ``[h, T, d]`` in a store, in its dtype."""
    if kv_bits is None:
        return own
    codes, scales = (quantize_tokens if kv_bits == 8 else rotate_tokens)(own)
    numbers = codes.float() if kv_bits == 8 else unpacked_numbers(codes)
    found = numbers * scales.float().unsqueeze(-1)
    return (found if kv_bits == 8 else rotated(found)).to(own.dtype)


def test_all_keys_and_values_come_one_row_after_the_other():
    cache = _cache()
    first = _batch([(3, 1), (0,)], [0, 0], [5, 2])
    cache.view(first).update(_new(7), -_new(7), 5)
    later = _batch([(0,), (3, 1)], [2, 5], [1, 2])
    keys, values = cache.view(later, returns_all=True).update(_new(3, first=90), _new(3), 5)
    assert keys.shape == values.shape == (1, 2, 3 + 7, 3)
    old = _new(7)[0]
    new = _new(3, first=90)[0]
    assert torch.equal(keys[0], torch.cat([old[:, 5:], new[:, :1], old[:, :5], new[:, 1:]], 1))


def test_rows_may_fill_their_blocks_to_the_end():
    cache = _cache()
    batch = _batch([(0, 2), (3,)], [7, 0], [1, 4])
    view = cache.view(batch)
    view.update(_new(5), _new(5), 5)
    assert torch.equal(view.read(0)[0][0, :, 7], _new(5)[0, :, 0])
    assert torch.equal(view.read(1)[0][0], _new(5)[0, :, 1:])


def test_layers_do_not_share_memory():
    view = _cache().view(_batch([(0,)], [0], [1]))
    view.update(_new(1), _new(1), 5)
    view.update(_new(1, layer=1), _new(1, layer=1), 6)
    assert torch.equal(view.read(0)[0], _new(1, layer=1))


@pytest.mark.parametrize("kv_bits", [None, 8])
def test_cleared_blocks_forget_and_others_do_not(kv_bits):
    cache = _cache(kv_bits=kv_bits)
    batch = _batch([(0,), (1,)], [0, 0], [2, 2])
    cache.view(batch).update(torch.full((1, 2, 4, 3), torch.inf), _new(4), 5)
    cache.clear([1])
    view = cache.view(_batch([(0,), (1,)], [2, 2], [1, 1]))
    view.update(_new(2), _new(2), 5)
    kept = view.read(0)[0][0, :, :2]
    assert kept.isinf().all() if kv_bits is None else not kept.isfinite().any()
    assert not view.read(1)[0][0, :, :2].any()


@pytest.mark.parametrize(
    ("tables", "found"),
    [([(0,), (0,)], "written twice"), ([(-1,)], "found blocks"), ([(6,)], "found blocks")],
)
def test_blocks_that_cannot_be_are_refused(tables, found):
    with pytest.raises(StageError, match=found):
        _cache().view(_batch(tables, [0] * len(tables), [1] * len(tables)))


def test_rows_may_share_blocks_that_they_only_read():
    _cache().check(_batch([(0, 1), (0, 2)], [4, 5], [2, 1]))
    _cache().check(_batch([(0,), (0,)], [0, 2], [2, 1]))  # rows of one sequence
    with pytest.raises(StageError, match="written"):
        _cache().check(_batch([(0, 1), (0, 2)], [3, 3], [2, 2]))


def test_row_longer_than_its_blocks_is_refused():
    with pytest.raises(CapacityError, match="9 tokens, its blocks hold 8"):
        _cache().view(_batch([(0, 1)], [8], [1]))


@pytest.mark.parametrize("layer", [4, 7])
def test_layer_of_another_stage_is_refused(layer):
    view = _cache().view(_batch([(0,)], [0], [1]))
    with pytest.raises(StageError, match=f"layer {layer}"):
        view.update(_new(1), _new(1), layer)


def test_keys_of_another_shape_are_refused():
    view = _cache().view(_batch([(0,)], [0], [1]))
    with pytest.raises(SpecError, match="makes 1 heads of 4, its configuration says 2 of 3"):
        view.update(_new(1, layer=1), _new(1, layer=1), 5)


@pytest.mark.parametrize("size", [{"num_blocks": 0}, {"block_size": 0}])
def test_cache_of_nothing_is_refused(size):
    with pytest.raises(CapacityError):
        _cache(**size)
