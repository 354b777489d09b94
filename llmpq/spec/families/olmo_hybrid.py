"""OLMo Hybrid: linear attention with six inputs in most layers, attention as in OLMo 2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmpq.spec.families import Family, LayerForm, olmo2
from llmpq.spec.huggingface import mixers
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.config import Config
from llmpq.spec.huggingface.sizes import Sizes


def _every_fourth(fields: Config) -> Sequence[bool]:
    """Return attention in every fourth layer, or in the last of fewer."""
    found = mixers.by_interval(fields)
    return found if any(found) else [*found[:-1], True]


def _form(config: Any, index: int) -> LayerForm:
    """Return the form of a layer: norms come before linear attention, and after attention."""
    return olmo2.FORM if config.layer_types[index] == "full_attention" else LayerForm()


FAMILY = Family(
    name="olmo_hybrid",
    form=_form,
    has_layer_classes=True,
    recurrence_bytes=160,
    sizes=Sizes(
        attention=mixers.Hybrid(
            attention=SelfAttention(norm="rows"),
            mixer=mixers.gated_delta_net(mixers.single_inputs, output="o_proj"),
            is_attention=_every_fourth,
        ),
    ),
)
