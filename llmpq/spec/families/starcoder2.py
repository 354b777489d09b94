"""StarCoder2: no gate, norms with a bias, windows."""

from __future__ import annotations

from llmpq.spec.families import Family
from llmpq.spec.huggingface import windows
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.feed_forward import Plain
from llmpq.spec.huggingface.sizes import Sizes

FAMILY = Family(
    name="starcoder2",
    sizes=Sizes(
        attention=SelfAttention(bias="use_bias"),
        feed_forward=Plain(names=("c_fc", "c_proj"), activation="act", bias="use_bias"),
        windows=windows.uniform,
        norm_tensors=2,
    ),
)
