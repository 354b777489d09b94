"""Triton's decode attention in its interpreter, in a process of its own, and its sizes."""

from pathlib import Path

import pytest
import torch
from helpers.triton_interpreter import needs_triton, run_interpreted
from hypothesis import given
from hypothesis import strategies as st

from llmpq.kernels.gpu.paged_decode import tiles_of
from llmpq.spec.runtime_constants import DECODE_PROGRAMS, MAX_DECODE_SPLITS, decode_splits


@needs_triton
def test_attention_is_that_of_float64_in_the_interpreter():
    run_interpreted(Path(__file__).with_name("paged_decode_interpreted.py"), "-x")


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
