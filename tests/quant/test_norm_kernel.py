"""The compiled norm against transformers' own."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from llmpq.quant.modules.layer import can_norm, rms_norm

pytestmark = pytest.mark.skipif(not can_norm(torch.ones(16)), reason="no C compiler")


@pytest.mark.parametrize("columns", [16, 48, 768])
@pytest.mark.parametrize("rows", [1, 16, 35])
def test_equals_the_librarys_in_float32(rows, columns):
    torch.manual_seed(rows)
    norm, x = LlamaRMSNorm(columns, eps=1e-5), torch.randn(rows, 1, columns) * 5
    norm.weight.data.normal_()

    made = rms_norm(x, norm.weight, 1e-5)

    assert torch.allclose(made, norm(x), rtol=1e-6, atol=1e-7)


def test_rounds_where_the_library_rounds():
    torch.manual_seed(0)
    norm, x = LlamaRMSNorm(256, eps=1e-6).bfloat16(), torch.randn(200, 256).bfloat16()
    norm.weight.data.normal_()

    made, right = rms_norm(x, norm.weight, 1e-6), norm(x)

    # The order of the sum may move the mean by a last bit, and then a few numbers by one of bf16.
    assert (made != right).float().mean() < 0.002
    assert torch.allclose(made.float(), right.float(), rtol=2**-6)


def test_what_is_not_a_number_stays_one():
    x = torch.ones(2, 16)
    x[0, 3] = torch.nan

    made = rms_norm(x, torch.ones(16), 1e-6)

    assert made[0].isnan().all()
    assert made[1].isfinite().all()
