"""The KV store against a dictionary of tokens, its bytes, and slots with one owner."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmpq.dist.kv.cache import KVCache
from llmpq.errors import CapacityError, SpecError, StageError
from llmpq.models import KVShape, MicroBatch

SHAPES = (KVShape(heads=2, head_dim=3), KVShape(heads=1, head_dim=4))


def _cache(num_slots=4, max_tokens=12, dtype=torch.float32):
    return KVCache(SHAPES, 5, num_slots=num_slots, max_tokens=max_tokens, dtype=dtype)


def _new(rows, width, layer=0, first=1.0):
    shape = SHAPES[layer]
    size = (rows, shape.heads, width, shape.head_dim)
    return torch.arange(first, first + torch.Size(size).numel()).reshape(size)


@given(
    shapes=st.lists(
        st.builds(KVShape, heads=st.integers(1, 4), head_dim=st.integers(1, 8)), max_size=4
    ),
    num_slots=st.integers(1, 5),
    max_tokens=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_bytes_are_those_of_the_formula(shapes, num_slots, max_tokens, dtype):
    cache = KVCache(shapes, 0, num_slots=num_slots, max_tokens=max_tokens, dtype=dtype)
    values = sum(2 * num_slots * s.heads * max_tokens * s.head_dim for s in shapes)
    assert cache.nbytes == values * dtype.itemsize


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.permutations(range(4)), st.lists(st.integers(1, 3), min_size=1, max_size=4)),
        max_size=4,
    )
)
def test_rows_read_what_their_slots_were_given(steps):
    cache = _cache()
    lengths = [0] * 4
    expected = {slot: torch.zeros(2, 0, 3) for slot in range(4)}
    for number, (order, counts) in enumerate(steps):
        slots = order[: len(counts)]
        batch = MicroBatch.build(slots, [lengths[s] for s in slots], counts)
        key = _new(len(slots), batch.width, first=1000.0 * number)
        keys, values = cache.view(batch).update(key, -key, 5)
        for row, (slot, count) in enumerate(zip(slots, counts, strict=True)):
            lengths[slot] += count
            expected[slot] = torch.cat([expected[slot], key[row, :, :count]], dim=1)
            assert torch.equal(keys[row, :, : lengths[slot]], expected[slot])
            assert torch.equal(values[row, :, : lengths[slot]], -expected[slot])
        assert keys.shape[2] == batch.longest == max(lengths[s] for s in slots)


def test_padding_is_never_stored():
    cache = _cache()
    cache.view(MicroBatch.build([1, 2], [0, 0], [1, 3])).update(_new(2, 3), _new(2, 3), 5)
    keys, _ = cache.view(MicroBatch.build([1], [3], [1])).update(_new(1, 1), _new(1, 1), 5)
    assert not keys[0, :, 1:3].any()


@pytest.mark.parametrize(("slots", "is_shared"), [([1, 2, 3], True), ([2, 1, 3], False)])
def test_slots_side_by_side_are_read_without_a_copy(slots, is_shared):
    view = _cache().view(MicroBatch.build(slots, [0] * 3, [2] * 3))
    first, _ = view.update(_new(3, 2), _new(3, 2), 5)
    again, _ = view.update(_new(3, 2), _new(3, 2), 5)
    assert (first.data_ptr() == again.data_ptr()) == is_shared


def test_rows_may_fill_their_slots_to_the_end():
    cache = _cache()
    # The short row's padding would lie beyond the slot: it must not be written at all.
    batch = MicroBatch.build([0, 3], [11, 0], [1, 4])
    keys, _ = cache.view(batch).update(_new(2, 4), _new(2, 4), 5)
    assert torch.equal(keys[0, :, 11], _new(2, 4)[0, :, 0])


def test_rows_may_end_together_and_begin_apart():
    batch = MicroBatch.build([0, 1], [2, 4], [3, 1])
    keys, _ = _cache().view(batch).update(_new(2, 3), _new(2, 3), 5)
    assert torch.equal(keys[0, :, 2:], _new(2, 3)[0])
    assert torch.equal(keys[1, :, 4], _new(2, 3)[1, :, 0])
    assert not keys[1, :, :4].any()


def test_layers_do_not_share_memory():
    cache = _cache()
    view = cache.view(MicroBatch.build([0], [0], [1]))
    view.update(_new(1, 1), _new(1, 1), 5)
    keys, _ = view.update(_new(1, 1, layer=1), _new(1, 1, layer=1), 6)
    assert torch.equal(keys, _new(1, 1, layer=1))


def test_cleared_slot_forgets_and_its_neighbour_does_not():
    cache = _cache()
    batch = MicroBatch.build([0, 1], [0, 0], [2, 2])
    cache.view(batch).update(torch.full((2, 2, 2, 3), torch.inf), _new(2, 2), 5)
    cache.clear([1])
    next_step = MicroBatch.build([0, 1], [2, 2], [1, 1])
    keys, _ = cache.view(next_step).update(_new(2, 1), _new(2, 1), 5)
    assert keys[0, :, :2].isinf().all()
    assert not keys[1, :, :2].any()


@pytest.mark.parametrize("slots", [[0, 0], [-1], [4]])
def test_slots_that_cannot_be_are_refused(slots):
    with pytest.raises(StageError, match="found slots"):
        _cache().view(MicroBatch.build(slots, [0] * len(slots), [1] * len(slots)))


def test_row_longer_than_a_slot_is_refused():
    with pytest.raises(CapacityError, match="13 tokens, a slot holds 12"):
        _cache().view(MicroBatch.build([0], [12], [1]))


@pytest.mark.parametrize("layer", [4, 7])
def test_layer_of_another_stage_is_refused(layer):
    view = _cache().view(MicroBatch.build([0], [0], [1]))
    with pytest.raises(StageError, match=f"layer {layer}"):
        view.update(_new(1, 1), _new(1, 1), layer)


def test_keys_unlike_the_configuration_are_refused():
    view = _cache().view(MicroBatch.build([0], [0], [1]))
    with pytest.raises(SpecError, match="makes 1 heads of 4, its configuration says 2 of 3"):
        view.update(_new(1, 1, layer=1), _new(1, 1, layer=1), 5)


@pytest.mark.parametrize("size", [{"num_slots": 0}, {"max_tokens": 0}])
def test_cache_of_nothing_is_refused(size):
    with pytest.raises(CapacityError):
        _cache(**size)
