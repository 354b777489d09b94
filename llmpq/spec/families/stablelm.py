"""StableLM: norms with a bias, attention and feed-forward side by side if the file says."""

from __future__ import annotations

from llmpq.spec.families import Family
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.sizes import Sizes, one_if

FAMILY = Family(
    name="stablelm",
    sizes=Sizes(
        attention=SelfAttention(
            bias="use_qkv_bias", out_bias=False, norm="rows", norm_if="qk_layernorm"
        ),
        norms=one_if("use_parallel_residual", default=False, count=1, otherwise=2),
        norm_tensors=2,
    ),
)
