"""The sizes of Triton's decode attention; its kernels: ``paged_decode_interpreted``."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmpq.kernels.gpu.paged_decode import tiles_of
from llmpq.spec.runtime_constants import DECODE_PROGRAMS, MAX_DECODE_SPLITS, decode_splits


@given(st.integers(1, 2048), st.integers(1, 64))
def test_keys_are_split_until_there_are_programs_enough(rows, kv_heads):
    splits = decode_splits(rows, kv_heads)
    assert 1 <= splits <= MAX_DECODE_SPLITS
    programs = rows * kv_heads * splits
    assert splits == 1 or programs <= DECODE_PROGRAMS
    assert splits == MAX_DECODE_SPLITS or 2 * programs > DECODE_PROGRAMS


@pytest.mark.parametrize("features", [16, 64, 128, 256, 512])
def test_tiles_are_such_as_tensor_cores_take(features):
    for dtype in (torch.bfloat16, torch.float32):
        keys, _, _ = tiles_of(features, dtype, is_coded=False)
        assert keys >= 16
        assert keys & (keys - 1) == 0
