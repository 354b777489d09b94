"""StableLM: norms with a bias, attention and feed-forward side by side if the file says."""

from __future__ import annotations

from typing import Any

from llmpq.spec.families import Family, LayerForm
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.sizes import Sizes, one_if


def _form(config: Any, layer: int) -> LayerForm:
    del layer
    if config.use_parallel_residual:
        return LayerForm(norms=("input_layernorm", None, None, None), is_parallel=True)
    return LayerForm()


FAMILY = Family(
    name="stablelm",
    sizes=Sizes(
        attention=SelfAttention(
            bias="use_qkv_bias",
            out_bias=False,
            norm="rows",
            norm_names=("q_layernorm", "k_layernorm"),
            norm_if="qk_layernorm",
        ),
        norms=one_if("use_parallel_residual", default=False, count=1, otherwise=2),
        norm_tensors=2,
    ),
    form=_form,
)
