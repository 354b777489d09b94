"""Run by ``test_triton_kernels.py`` under ``TRITON_INTERPRET=1``: cases of ``test_mixers.py``."""

import pytest
import test_mixers
import torch
from test_mixers import DeltaCase, MambaCase, check, check_convolution

from llmpq.kernels.gpu.triton_mixers import TritonConvolution, TritonGatedDelta, TritonMamba2

torch.set_num_threads(1)
COUNTS = [[1, 1, 3], [9], [2, 1, 5, 1]]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    for name, kind in (
        ("ShortConvolution", TritonConvolution),
        ("GatedDelta", TritonGatedDelta),
        ("Mamba2", TritonMamba2),
    ):
        monkeypatch.setattr(test_mixers, name, kind)
    # The interpreter cuts bf16 numbers off where a GPU rounds them.
    monkeypatch.setitem(test_mixers.UNIT, torch.bfloat16, 2.0**-7)


@pytest.mark.parametrize("seed", range(4))
def test_gated_deltas(seed):
    sizes = {"key_heads": 1 + seed % 2, "share": 1 + seed % 3, "width": 2 + seed}
    case = DeltaCase(seed, key_dim=(16, 48, 128, 20)[seed], value_dim=(32, 24, 48, 16)[seed],
                     counts=COUNTS[seed % 3], dtype=DTYPES[seed % 3], **sizes)  # fmt: skip
    check(case, case.key_dim)


@pytest.mark.parametrize("seed", range(4))
def test_mamba_2(seed):
    limits = [(0.0, float("inf")), (0.001, 0.1)][seed % 2]
    sizes = {"head_dim": (16, 48, 64, 20)[seed], "state_dim": (16, 48, 128, 24)[seed]}
    sizes |= {"groups": 1 + seed % 2, "share": 1 + seed % 3, "bias": seed % 2 == 0}
    counts, dtype = COUNTS[seed % 3], DTYPES[seed % 3]
    case = MambaCase(seed, counts=counts, dtype=dtype, limits=limits, **sizes)
    check(case, case.state_dim)


@pytest.mark.parametrize("dtype", DTYPES[:2])  # its products are rounded
def test_gated_convolutions(dtype):
    for seed, counts in enumerate(COUNTS):
        check_convolution(seed, 80, 2 + seed, counts, dtype, has_bias=seed % 2 == 0)
