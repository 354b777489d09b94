"""How llama.cpp's converter stores a family: metadata as fields, names of tensors."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llmpq.errors import SpecError, bad_field
from llmpq.spec.model_files.weight_headers import GgufHeader

LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_qkv.weight": "self_attn.qkv_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_output.bias": "self_attn.o_proj.bias",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "ffn_gate.bias": "mlp.gate_proj.bias",
    "ffn_up.bias": "mlp.up_proj.bias",
    "ffn_down.bias": "mlp.down_proj.bias",
    "ffn_gate_inp.weight": "mlp.gate.weight",
}
"""Tensors of a layer, by the part of their name after its number."""
EXPERT_NAMES = {
    "ffn_gate_exps": "gate_proj",
    "ffn_up_exps": "up_proj",
    "ffn_down_exps": "down_proj",
}
"""Tensors of all experts of a layer, and the matrix of one."""
OTHER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
"""Tensors outside the layers."""
IN_CONFIG = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
"""Tensors whose numbers are in the configuration."""
FOUR_NORMS = (
    ("post_attention_norm.weight", "post_attention_layernorm.weight"),
    ("ffn_norm.weight", "pre_feedforward_layernorm.weight"),
    ("post_ffw_norm.weight", "post_feedforward_layernorm.weight"),
)
"""Names of a layer with norms before and after attention and feed-forward."""
GELU = {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufForm:
    """How the converter stores the models of a family.

    Attributes:
        architecture: its name.
        fields: reads the fields of ``config.json`` that are not those of every family.
        has_experts: whether the architecture means this family for models with experts, or for
            those without; ``None`` for all.
        names: tensors of a layer that are stored under names that mean others elsewhere.
        interleaves_heads: whether queries and keys are stored with the halves of every head
            interleaved.
        has_shifted_norms: whether norms multiply by 1 + weight, and the sum is stored.
    """

    architecture: str
    fields: Callable[[GgufMetadata], dict[str, Any]]
    has_experts: bool | None = None
    names: tuple[tuple[str, str], ...] = ()
    interleaves_heads: bool = False
    has_shifted_norms: bool = False

    def layer_names(self) -> Mapping[str, str]:
        """Return the name in transformers of every tensor of a layer."""
        return LAYER_NAMES | dict(self.names)

    def means(self, metadata: GgufMetadata) -> bool:
        """Return whether a file is of this family."""
        if metadata.architecture != self.architecture:
            return False
        return self.has_experts in (None, metadata.whole("expert_count", 0) != 0)


class GgufMetadata:
    """Typed access to the metadata of a model; keys without the architecture's prefix.

    Args:
        header: of the file.
    """

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        self.architecture = str(header.metadata.get("general.architecture", ""))

    def has(self, key: str) -> bool:
        """Return whether the file has a key."""
        return f"{self.architecture}.{key}" in self.header.metadata

    def whole(self, key: str, default: int | None = None) -> int:
        """Return a size; arrays with a value for each layer must have one value."""
        found = self._get(key, default)
        if isinstance(found, tuple) and len(set(found)) == 1:
            found = found[0]
        if type(found) is not int:
            raise self.error(key, found, "one whole number")
        return found

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number."""
        found = self._get(key, default)
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise self.error(key, found, "a number")
        return float(found)

    def has_tensor(self, name: str) -> bool:
        """Return whether the file has a tensor."""
        return name in self.header.tensors

    def floats(self, name: str) -> list[float]:
        """Return the numbers of a small float32 tensor."""
        tensor = self.header.tensors[name]
        if tensor.type.name != "F32" or len(tensor.shape) != 1 or tensor.nbytes > 1 << 16:
            raise SpecError(f"{tensor.file}: tensor '{name}': expected a short list in F32")
        with tensor.file.open("rb") as stream:
            stream.seek(tensor.begin)
            return list(struct.unpack(f"<{tensor.shape[0]}f", stream.read(tensor.nbytes)))

    def error(self, key: str, found: object, expected: str) -> SpecError:
        """Return the error of a key: what was found, and what was expected."""
        return bad_field(str(self.header.path), f"{self.architecture}.{key}", found, expected)

    def _get(self, key: str, default: object) -> object:
        found = self.header.metadata.get(f"{self.architecture}.{key}", default)
        if found is None:
            raise self.error(key, None, "this key to be present")
        return found


def head_dim(metadata: GgufMetadata) -> int:
    """Return the size of a head, all of whose features are rotated."""
    hidden, heads = metadata.whole("embedding_length"), metadata.whole("attention.head_count")
    default = metadata.whole("attention.key_length", hidden // max(1, heads))
    rotated = metadata.whole("rope.dimension_count", default)
    for key, found in (
        ("rope.dimension_count", rotated),
        ("attention.value_length", metadata.whole("attention.value_length", default)),
    ):
        if found != default:
            raise metadata.error(key, found, f"{default}, as 'attention.key_length'")
    return default


def rotation(metadata: GgufMetadata) -> dict[str, Any]:
    """Return the ``rope_parameters``."""
    found: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": metadata.number("rope.freq_base", 10_000.0),
    }
    kind = metadata.header.metadata.get(f"{metadata.architecture}.rope.scaling.type", "none")
    if metadata.has_tensor("rope_factors_short.weight"):
        return found | _long_rope(metadata)
    if metadata.has_tensor("rope_freqs.weight"):
        # Frequencies that the converter divides by these factors.
        return found | _factors(metadata, metadata.floats("rope_freqs.weight"))
    if kind == "linear":
        return found | {"rope_type": "linear", "factor": metadata.number("rope.scaling.factor")}
    if kind == "yarn" and not any(".yarn_" in key for key in metadata.header.metadata):
        return found | {
            "rope_type": "yarn",
            "factor": metadata.number("rope.scaling.factor"),
            "original_max_position_embeddings": metadata.whole(
                "rope.scaling.original_context_length"
            ),
        }
    if kind != "none":
        raise metadata.error("rope.scaling.type", kind, "none, linear or plain yarn")
    return found


def _factors(metadata: GgufMetadata, factors: list[float]) -> dict[str, Any]:
    """Return scaling that divides every frequency by a factor, at any length."""
    return {
        "rope_type": "longrope",
        "factor": 1.0,
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": 1.0,
        "original_max_position_embeddings": metadata.whole("context_length"),
    }


def _long_rope(metadata: GgufMetadata) -> dict[str, Any]:
    original = metadata.whole("rope.scaling.original_context_length")
    return {
        "rope_type": "longrope",
        "factor": metadata.whole("context_length") / original,
        "short_factor": metadata.floats("rope_factors_short.weight"),
        "long_factor": metadata.floats("rope_factors_long.weight"),
        "attention_factor": metadata.number("rope.scaling.attn_factor", 1.0),
        "original_max_position_embeddings": original,
    }


def query_scalar(metadata: GgufMetadata, layers_of_27b: int) -> int:
    """Return the number whose root divides queries; the 27B models differ from their head size."""
    if metadata.whole("block_count") != layers_of_27b:
        return head_dim(metadata)
    return metadata.whole("embedding_length") // metadata.whole("attention.head_count")
