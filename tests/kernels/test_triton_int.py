"""The Triton backend's layout, and what it says without a GPU; kernels: ``triton_interpreted``."""

import pytest
import torch

from llmpq.kernels.base import unpack_signed
from llmpq.kernels.gpu.triton_int import TritonIntBackend, launch_failure, segments, to_planes
from llmpq.spec.precision import Precision


def read_planes(planes, bits, columns):
    """The layout's description in a loop: code ``s J + j`` from the bytes ``j`` of every plane."""
    length = columns // segments(bits)
    codes = torch.empty(planes.shape[0], columns, dtype=torch.int64)
    for k in range(columns):
        s, j = divmod(k, length)
        if bits == 4:
            codes[:, k] = (planes[:, j] >> (4 * s)) & 15
        else:
            pair = planes[:, j + (0 if s < 4 else length)] >> (2 * (s % 4))
            codes[:, k] = (pair & 3) + 4 * ((planes[:, j + 2 * length] >> s) & 1)
    return codes


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("columns", [8, 24, 128])
def test_planes_hold_every_code_in_the_bytes_of_the_packed_form(bits, columns):
    rng = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 1 << bits, (5, columns), generator=rng)
    signed = (codes - (1 << (bits - 1))).to(torch.int8)
    planes = to_planes(signed, bits)
    assert planes.shape == (5, columns * bits // 8)
    assert torch.equal(read_planes(planes, bits, columns), codes)


def test_planes_of_an_unpacked_row_are_of_the_signed_codes():
    packed = torch.arange(24, dtype=torch.uint8).view(2, 12)
    signed = unpack_signed(packed, 4, 24)
    assert torch.equal(read_planes(to_planes(signed, 4), 4, 24) - 8, signed.to(torch.int64))


def test_without_a_gpu_nothing_is_offered_and_the_reason_is_told():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    backend = TritonIntBackend()
    assert not backend.supports("cuda", Precision(bits=3), torch.bfloat16, 128, 128)
    assert launch_failure(torch.device("cuda"), torch.bfloat16) in (
        "triton is not installed",
        "no CUDA device",
    )
