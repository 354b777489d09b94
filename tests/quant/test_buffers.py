"""Memory is lent again when nobody refers to it any more, and never before."""

import gc
import random

import torch

from llmpq.quant.loading.buffers import BufferPool

BF16 = torch.bfloat16
PAGE = 4096


def test_memory_is_lent_again_once_its_tensor_is_gone():
    pool = BufferPool(10**6)
    first = pool.lend((8, 16), BF16)
    place = first.data_ptr()
    del first
    again = pool.lend((3000,), BF16)  # of any size
    assert again.data_ptr() <= place < again.data_ptr() + again.nbytes


def test_a_view_keeps_the_loan():
    pool = BufferPool(10**6)
    first = pool.lend((8, 16), torch.float32)
    kept = first.fill_(7)[2:4].t()
    del first
    gc.collect()
    pool.lend((8, 16), torch.float32).zero_()
    assert torch.equal(kept, torch.full((16, 2), 7.0))


def test_small_loans_leave_room_for_a_large_one():
    pool = BufferPool(16 * PAGE)
    small = [pool.lend((PAGE,), torch.uint8) for _ in range(8)]
    small = small[1::2]  # what is left is scattered
    large = pool.lend((8 * PAGE,), torch.uint8).fill_(1)
    rest = [pool.lend((PAGE,), torch.uint8).zero_() for _ in range(4)]
    assert large.eq(1).all()
    assert {one.data_ptr() // PAGE for one in (*small, *rest)} == {
        large.data_ptr() // PAGE + 8 + page for page in range(8)
    }


def test_gaps_that_touch_become_one():
    pool = BufferPool(4 * PAGE)
    parts = [pool.lend((PAGE,), torch.uint8) for _ in range(4)]
    place = parts[1].data_ptr()
    del parts[2], parts[1]  # the two in the middle
    assert pool.lend((2 * PAGE,), torch.uint8).data_ptr() == place


def test_a_loan_beyond_the_limit_is_memory_of_its_own():
    pool = BufferPool(2 * PAGE)
    first = pool.lend((PAGE + 1,), torch.uint8).fill_(1)  # two pages
    second = pool.lend((PAGE,), torch.uint8).fill_(2)
    assert first.eq(1).all()
    assert second.eq(2).all()
    place = first.data_ptr()
    del second, first
    assert pool.lend((2 * PAGE,), torch.uint8).data_ptr() == place


def test_loans_alive_at_once_never_overlap():
    drawn = random.Random(0)
    pool = BufferPool(64 * PAGE)
    alive = {}
    for step in range(500):
        tensor = pool.lend((drawn.randrange(1, 12 * PAGE),), torch.uint8).fill_(step % 251)
        alive[step] = tensor
        for gone in drawn.sample(sorted(alive), len(alive) // 3):
            del alive[gone]
        assert all(tensor.eq(mark % 251).all() for mark, tensor in alive.items())
        del tensor


def test_an_empty_tensor_needs_no_memory():
    pool = BufferPool(0)
    assert pool.lend((0, 4), torch.float32).shape == (0, 4)
