"""A buffer is lent again when nobody refers to it any more, and never before."""

import gc

import torch

from llmpq.quant.buffers import BufferPool

BF16 = torch.bfloat16


def test_memory_is_lent_again_once_its_tensor_is_gone():
    pool = BufferPool(10**6)
    first = pool.lend((8, 16), BF16)
    place = first.data_ptr()
    del first
    again = pool.lend((128,), BF16)  # as many bytes, another shape
    assert again.data_ptr() == place
    assert pool.total_bytes == 256


def test_a_view_keeps_the_loan():
    pool = BufferPool(10**6)
    first = pool.lend((8, 16), torch.float32)
    kept = first.fill_(7)[2:4].t()
    del first
    gc.collect()
    pool.lend((8, 16), torch.float32).zero_()
    assert torch.equal(kept, torch.full((16, 2), 7.0))


def test_free_buffers_go_before_the_limit_is_passed():
    pool = BufferPool(1000)
    for size in (400, 500, 300, 400):
        tensor = pool.lend((size,), torch.uint8)
        assert tensor.shape == (size,)
        del tensor
        assert pool.total_bytes <= 1000


def test_lent_buffers_may_pass_the_limit_but_free_ones_do_not_stay():
    pool = BufferPool(100)
    lent = [pool.lend((80,), torch.uint8) for _ in range(3)]
    assert len({tensor.data_ptr() for tensor in lent}) == 3
    del lent
    pool.lend((10,), torch.uint8)
    assert pool.total_bytes <= 100


def test_an_empty_tensor_needs_no_buffer():
    pool = BufferPool(100)
    assert pool.lend((0, 4), torch.float32).shape == (0, 4)
    assert pool.total_bytes == 0
