"""Which norms are replaced."""

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm

from llmpq.quant.modules.layer import FusedNorm, can_norm, fuse_norms_

pytestmark = pytest.mark.skipif(not can_norm(torch.ones(16)), reason="no C compiler")


@pytest.mark.parametrize("kind", [LlamaRMSNorm, MistralRMSNorm])
def test_norms_that_compute_what_llamas_does_are_replaced(kind):
    torch.manual_seed(0)
    module, x = nn.Sequential(kind(32)), torch.randn(3, 5, 32)
    right = module(x)

    fuse_norms_(module)

    assert isinstance(module[0], FusedNorm)
    assert torch.allclose(module(x), right, rtol=1e-6, atol=1e-7)


def test_other_norms_are_not_replaced():
    module = nn.Sequential(GemmaRMSNorm(32), nn.LayerNorm(32), LlamaRMSNorm(24))
    before = list(module)

    fuse_norms_(module)

    assert list(module) == before
