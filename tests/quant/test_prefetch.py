"""The prefetcher keeps the order, holds at most its slots, and ends with the first error."""

import gc
import threading
import weakref
from contextlib import closing

import pytest
import torch

from llmpq.quant.loading.loader import Prefetcher

LIMIT_S = 30.0


def numbered_slots(prefetcher, count, seen=None):
    """Yield pairs of a number and the slot that was taken for it."""
    for number in range(count):
        slot = prefetcher.acquire()
        if seen is not None:
            seen.append(number)
        yield number, slot


def test_items_arrive_in_order():
    prefetcher = Prefetcher(2)
    found = []
    for number, slot in prefetcher.iterate(numbered_slots(prefetcher, 100)):
        found.append(number)
        slot.release()
    assert found == list(range(100))


def test_reading_runs_ahead_as_far_as_the_slots_allow():
    prefetcher = Prefetcher(2)
    third_is_read = threading.Event()

    def items():
        yield 0, prefetcher.acquire()
        yield 1, prefetcher.acquire()
        slot = prefetcher.acquire()
        third_is_read.set()
        yield 2, slot

    with closing(prefetcher.iterate(items())) as ahead:
        (_, first), (_, second) = next(ahead), next(ahead)
        assert not third_is_read.wait(0.01)
        first.release()
        assert third_is_read.wait(LIMIT_S)
        second.release()
        assert next(ahead)[0] == 2


@pytest.mark.parametrize("count", [1, 2, 3])
def test_no_more_items_are_held_than_there_are_slots(count):
    prefetcher = Prefetcher(count)
    read = []
    placed = 0
    for _, slot in prefetcher.iterate(numbered_slots(prefetcher, 50, read)):
        assert len(read) - placed <= count
        placed += 1
        slot.release()
    assert placed == 50


def test_the_memory_of_a_slot_is_reused_and_grows():
    prefetcher = Prefetcher(1)
    slot = prefetcher.acquire()
    small = slot.allocate((4, 3), torch.bfloat16)
    large = slot.allocate((100,), torch.float32)
    again = slot.allocate((5, 7), torch.float32)
    assert small.shape == (4, 3)
    assert small.dtype == torch.bfloat16
    assert again.shape == (5, 7)
    assert again.data_ptr() == large.data_ptr()
    assert slot.allocate((0, 4), torch.float32).shape == (0, 4)


def test_the_memory_of_slots_is_freed_without_the_garbage_collector():
    def is_freed():
        prefetcher, buffers = Prefetcher(2), []

        def items():
            for _ in range(4):
                slot = prefetcher.acquire()
                buffers.append(weakref.ref(slot.allocate((100,), torch.float32)._base))
                yield slot

        for slot in prefetcher.iterate(items()):
            slot.release()
        del slot
        return [buffer() for buffer in buffers] == [None] * 4

    gc.disable()
    try:  # SlipCover holds frames that it meets by chance, but not each time
        assert any(is_freed() for _ in range(3))
    finally:
        gc.enable()


def test_an_error_of_the_reader_is_raised_after_the_items_before_it():
    prefetcher = Prefetcher(2)

    def items():
        yield from numbered_slots(prefetcher, 3)
        raise ValueError("read failed")

    found = []

    def consume():
        for number, slot in prefetcher.iterate(items()):
            found.append(number)
            slot.release()

    with pytest.raises(ValueError, match="read failed"):
        consume()
    assert found == [0, 1, 2]


@pytest.mark.parametrize("held", [0, 1, 2])
def test_the_thread_ends_when_the_caller_stops(held):
    before = threading.active_count()
    prefetcher = Prefetcher(2)
    with closing(prefetcher.iterate(numbered_slots(prefetcher, 1000))) as ahead:
        for _ in range(held):
            next(ahead)
    assert threading.active_count() == before
