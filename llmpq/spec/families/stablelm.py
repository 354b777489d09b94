"""StableLM: norms with a bias, attention and feed-forward side by side if the file says."""

from __future__ import annotations

from typing import Any

from llmpq.spec.families import Family, LayerForm
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.sizes import Sizes, one_if


def _form(config: Any, layer: int) -> LayerForm:
    del layer
    return LayerForm(is_parallel=config.use_parallel_residual)


FAMILY = Family(
    name="stablelm",
    sizes=Sizes(
        attention=SelfAttention(
            bias="use_qkv_bias", out_bias=False, norm="rows", norm_if="qk_layernorm"
        ),
        norms=one_if("use_parallel_residual", default=False, count=1, otherwise=2),
        norm_tensors=2,
    ),
    form=_form,
)
