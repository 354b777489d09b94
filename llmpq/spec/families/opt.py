"""OPT: learned positions, norms with a bias, no gate."""

from __future__ import annotations

from llmpq.spec.families import Family, LayerForm, ModelParts
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.config import Config
from llmpq.spec.huggingface.feed_forward import Plain
from llmpq.spec.huggingface.sizes import Sizes, one_if


def _final_norms(fields: Config) -> int:
    is_removed = fields.flag_or("_remove_final_layer_norm", default=False)
    return int(fields.flag_or("do_layer_norm_before", default=True) and not is_removed)


FAMILY = Family(
    name="opt",
    sizes=Sizes(
        attention=SelfAttention(
            names=("k_proj", "v_proj", "q_proj", "out_proj"),
            bias="enable_bias",
            head_dim=Config.head_share,
            kv_heads=lambda fields: fields.size("num_attention_heads"),
        ),
        feed_forward=Plain(
            prefix="",
            names=("fc1", "fc2"),
            activation="activation_fn",
            widths=("ffn_dim",),
            bias="enable_bias",
        ),
        norm_tensors=one_if("layer_norm_elementwise_affine", default=True, count=2),
        final_norms=_final_norms,
        positions=2,  # the rows of padding
        width=lambda fields: fields.size("word_embed_proj_dim", "hidden_size"),
    ),
    parts=ModelParts(
        positions="embed_positions",
        positions_after_mask=True,
        project_in="project_in",
        final_norm="final_layer_norm",
        project_out="project_out",
    ),
    form=LayerForm(norms=("self_attn_layer_norm", None, "final_layer_norm", None), rotation=None),
)
