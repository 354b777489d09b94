"""How llama.cpp's converter stores a family: metadata as fields, names of tensors, what it changes.

Every key of the model itself has to be read, or to mean nothing here: a key that changes what the
model computes and that is not read would give wrong answers without a word.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

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
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "ffn_gate.bias": "mlp.gate_proj.bias",
    "ffn_up.bias": "mlp.up_proj.bias",
    "ffn_down.bias": "mlp.down_proj.bias",
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
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
FOUR_NORMS = (("ffn_norm.weight", "pre_feedforward_layernorm.weight"),)
"""Names of a layer with norms before and after attention and feed-forward."""
_MEANINGLESS = frozenset((
    "vocab_size", "rope.scaling.finetuned", "tensor_data_layout", "rope.dimension_sections",
    "n_deepstack_layers", "pooling_type", "leading_dense_block_count", "nextn_predict_layers",
    "feed_forward_length", "interleave_moe_layer_step",
))  # fmt: skip
"""Keys that repeat what tensors say, belong to other inputs than text, or are checked elsewhere."""
_STATE_SPACE = (
    ("ssm_a", "A_log"),
    ("ssm_d", "D"),
    *(
        (f"ssm_{name}.{kind}", f"{module}.{kind}")
        for name, module in (("in", "in_proj"), ("conv1d", "conv1d"), ("out", "out_proj"))
        for kind in ("weight", "bias")
    ),
)
MAMBA1_NAMES = (
    *_STATE_SPACE,
    ("ssm_x.weight", "x_proj.weight"),
    ("ssm_dt.weight", "dt_proj.weight"),
    ("ssm_dt.bias", "dt_proj.bias"),
)
"""Tensors of a layer of Mamba 1, by their name in its module."""
MAMBA_NAMES = (
    *_STATE_SPACE,
    ("ssm_dt.bias", "dt_bias"),
    ("ssm_norm.weight", "norm.weight"),
)
"""Tensors of a layer of Mamba 2, by their name in its module."""
FEED_FORWARD_NAMES = tuple(
    (f"ffn_{one}.{kind}", f"feed_forward.{one}_proj.{kind}")
    for one in ("gate", "up", "down")
    for kind in ("weight", "bias")
)
"""Tensors of a gated feed-forward of that name."""
GELU = {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}


Change = Literal[
    "interleaved_queries", "interleaved_keys", "one_added", "negative_exp", "single_row",
    "single_channels", "flat", "single_heads", "tiled_values", "tiled_values_last", "tiled_columns",
]  # fmt: skip
"""What the converter does to a tensor: halves of every head interleaved; one added to a norm; -exp
of its numbers; dimensions of size one left out; a vector made a matrix; value heads of linear
attention in another order (of all rows, of the rows behind those of the keys, of the columns)."""
Joining = Literal["key_heads", "alternating", "latent", "in_turn", "channels"]
"""How a tensor of transformers is made from several of a file: rows of one key head after those of
another, single rows in turn, the keys and values of latent attention by head, all rows of one after
those of another, or all channels of a convolution."""
INTERLEAVED_HEADS: tuple[tuple[str, tuple[Change, ...]], ...] = (
    ("self_attn.q_proj.weight", ("interleaved_queries",)),
    ("self_attn.q_proj.bias", ("interleaved_queries",)),
    ("self_attn.k_proj.weight", ("interleaved_keys",)),
    ("self_attn.k_proj.bias", ("interleaved_keys",)),
)
SHIFTED_NORMS: tuple[tuple[str, tuple[Change, ...]], ...] = (("norm.weight", ("one_added",)),)


def mamba_changes(module: str) -> tuple[tuple[str, tuple[Change, ...]], ...]:
    """Return what the converter does to the tensors of Mamba 2 in a module of a layer."""
    return (
        (f"{module}.A_log", ("negative_exp", "flat")),
        (f"{module}.D", ("flat",)),
        (f"{module}.norm.weight", ("flat",)),
        (f"{module}.conv1d.weight", ("single_channels",)),
    )


def mamba1_changes(module: str) -> tuple[tuple[str, tuple[Change, ...]], ...]:
    """Return what the converter does to the tensors of Mamba 1 in a module of a layer."""
    return (
        (f"{module}.A_log", ("negative_exp",)),
        (f"{module}.conv1d.weight", ("single_channels",)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A tensor of a layer that is stored as several.

    Attributes:
        name: in transformers.
        parts: names in the file, in order.
        how: the rows of the parts follow each other.
    """

    name: str
    parts: tuple[str, ...]
    how: Joining


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSplit:
    """How a tokenizer of byte pairs splits a text before it merges, as ``tokenizer.json`` says.

    Attributes:
        names: of ``tokenizer.ggml.pre`` in a file.
        patterns: regular expressions; each splits the parts that those before it left.
        keeps_tokens: whether a part that is a token stays whole.
    """

    names: tuple[str, ...]
    patterns: tuple[str, ...]
    keeps_tokens: bool = False


_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"


def words(digits: int, *, letters: str = r"\p{L}", after_marks: str = r"[\r\n]*") -> str:
    """Return the pattern of words, numbers and marks that most tokenizers have.

    Args:
        digits: of a part of a number.
        letters: classes of characters of a word.
        after_marks: what follows marks.
    """
    inside = letters if letters == r"\p{L}" else f"[{letters}]"
    number = r"\p{N}" if digits == 1 else rf"\p{{N}}{{1,{digits}}}"
    marks = rf" ?[^\s{letters}\p{{N}}]+{after_marks}"
    return f"{_ENDINGS}|{_LEAD}{inside}+|{number}|{marks}|{_SPACES}"


def cased_words(digits: int, *, endings: bool) -> str:
    """Return the pattern that splits words before upper-case letters, too.

    Args:
        digits: of a part of a number.
        endings: whether endings such as ``'s`` stay with their word.
    """
    ending = f"{_ENDINGS}?" if endings else ""
    number = r"\p{N}" if digits == 1 else rf"\p{{N}}{{1,{digits}}}"
    return (
        f"{_LEAD}{_UPPER}*{_LOWER}+{ending}|{_LEAD}{_UPPER}+{_LOWER}*{ending}|{number}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


PLAIN_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The pattern of OpenAI's second model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufForm:
    """How the converter stores the models of a family.

    Attributes:
        architecture: its name.
        fields: reads the fields of ``config.json`` that are not those of every family; ``...``
            leaves out one of those.
        other_architectures: names of others that it writes for the same family.
        is_meant: whether a file of the architecture is of this family.
        names: tensors of a layer that are stored under names that mean others elsewhere.
        other_names: the same for tensors outside the layers.
        experts: module of the experts of a layer.
        changes: endings of names in transformers, and what the converter does to these tensors, in
            order; the first ending that fits.
        joins: tensors that are stored as several.
        splits: how tokenizers of the family, and of those that took them over, split texts.
    """

    architecture: str
    fields: Callable[[GgufMetadata], dict[str, Any]]
    other_architectures: tuple[str, ...] = ()
    is_meant: Callable[[GgufMetadata], bool] = lambda _: True
    names: tuple[tuple[str, str], ...] = ()
    other_names: tuple[tuple[str, str], ...] = ()
    experts: str = "mlp.experts"
    changes: tuple[tuple[str, tuple[Change, ...]], ...] = ()
    joins: tuple[Join, ...] = ()
    splits: tuple[TextSplit, ...] = ()

    def layer_names(self) -> Mapping[str, str]:
        """Return the name in transformers of every tensor of a layer."""
        return LAYER_NAMES | dict(self.names)

    def outer_names(self) -> Mapping[str, str]:
        """Return the name in transformers of every tensor outside the layers."""
        return OTHER_NAMES | dict(self.other_names)

    def changes_of(self, name: str) -> tuple[Change, ...]:
        """Return what the converter does to a tensor, by its name in transformers."""
        return next((found for ending, found in self.changes if name.endswith(ending)), ())

    def means(self, metadata: GgufMetadata) -> bool:
        """Return whether a file is of this family."""
        names = (self.architecture, *self.other_architectures)
        return metadata.architecture in names and self.is_meant(metadata)


def has_experts(metadata: GgufMetadata) -> bool:
    """Return whether the layers of a file have experts."""
    return metadata.whole("expert_count", 0) != 0


def has_none(metadata: GgufMetadata) -> bool:
    """Return whether the layers of a file have no experts."""
    return not has_experts(metadata)


class GgufMetadata:
    """Typed access to the metadata of a model; keys without the architecture's prefix.

    Args:
        header: of the file.
    """

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        self.architecture = str(header.metadata.get("general.architecture", ""))
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        """Return whether the file has a key."""
        return f"{self.architecture}.{key}" in self.header.metadata

    def check_all_read(self) -> None:
        """Check that no key of the model was left unread.

        Raises:
            SpecError: a key that may change what the model computes was not.
        """
        for name, found in self.header.metadata.items():
            key = name.removeprefix(f"{self.architecture}.")
            is_empty = isinstance(found, bool | int | float) and not found
            if key == name or key in self._read or key in _MEANINGLESS or is_empty:
                continue
            raise self.error(key, found, f"no such key in a {self.architecture} model")

    def expect(self, key: str, value: object) -> None:
        """Check a key that has one possible value where it is present.

        Raises:
            SpecError: it has another.
        """
        found = self._get(key, value)
        if found != value:
            raise self.error(key, found, repr(value))

    def flag(self, key: str, *, default: bool) -> bool:
        """Return a truth value."""
        found = self._get(key, default)
        if not isinstance(found, bool):
            raise self.error(key, found, "true or false")
        return found

    def each(self, key: str, count: int) -> list[int]:
        """Return a size for each of ``count`` layers; one number stands for all."""
        found = self._get(key, None)
        values = list(found) if isinstance(found, tuple) else [found] * count
        whole = [int(one) for one in values if isinstance(one, int)]
        if len(values) < count or len(whole) != len(values):
            raise self.error(key, found, f"whole numbers for {count} layers")
        return whole[:count]

    def text(self, key: str, default: str) -> str:
        """Return a word."""
        found = self._get(key, default)
        if not isinstance(found, str):
            raise self.error(key, found, "a word")
        return found

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
        self._read.add(key)
        found = self.header.metadata.get(f"{self.architecture}.{key}", default)
        if found is None:
            raise self.error(key, None, "this key to be present")
        return found


def layer_count(metadata: GgufMetadata) -> int:
    """Return the number of layers, without those that draft tokens."""
    count = metadata.whole("block_count")
    drafting = metadata.whole("nextn_predict_layers", 0)
    if not 0 <= drafting < count:
        raise metadata.error("nextn_predict_layers", drafting, f"fewer than {count} layers")
    return count - drafting


def head_dim(metadata: GgufMetadata) -> int:
    """Return the size of a head, all of whose features are rotated."""
    size = head_size(metadata)
    rotated = metadata.whole("rope.dimension_count", size)
    if rotated != size:
        raise metadata.error("rope.dimension_count", rotated, f"{size}, the size of a head")
    return size


def head_size(metadata: GgufMetadata) -> int:
    """Return the size of a head."""
    hidden, heads = metadata.whole("embedding_length"), metadata.whole("attention.head_count")
    size = metadata.whole("attention.key_length", hidden // max(1, heads))
    values = metadata.whole("attention.value_length", size)
    if values != size:
        raise metadata.error("attention.value_length", values, f"{size}, as 'attention.key_length'")
    return size


def partly_rotated(metadata: GgufMetadata) -> dict[str, Any]:
    """Return the fields of heads of which some features are rotated."""
    size = head_size(metadata)
    rotated = metadata.whole("rope.dimension_count", size)
    if not 0 < rotated <= size:
        raise metadata.error("rope.dimension_count", rotated, f"at most {size}, the size of a head")
    share = {"partial_rotary_factor": rotated / size}
    return {"head_dim": size, "rope_parameters": rotation(metadata) | share}


def layer_norms(metadata: GgufMetadata) -> dict[str, Any]:
    """Return the fields of norms that subtract the mean."""
    return {
        "layer_norm_eps": metadata.number("attention.layer_norm_epsilon"),
        "rms_norm_eps": ...,
    }


def window_kinds(metadata: GgufMetadata, period: int) -> list[str]:
    """Return the kind of every layer of a model with windows in some.

    Args:
        metadata: of the file, which has a truth value for each layer, a period, or nothing.
        period: every how many layers there is one without a window, if the file does not say.
    """
    count, key = layer_count(metadata), "attention.sliding_window_pattern"
    found = metadata.each(key, count) if metadata.has(key) else [period] * count
    if not isinstance(metadata.header.metadata.get(f"{metadata.architecture}.{key}"), tuple):
        found = [int((i + 1) % max(1, every) != 0) for i, every in enumerate(found)]
    return ["sliding_attention" if has_window else "full_attention" for has_window in found]


def has_any(metadata: GgufMetadata, *endings: str) -> bool:
    """Return whether some tensor has a name with one of the endings, such as ``ssm_in.bias``."""
    return any(name.endswith(endings) for name in metadata.header.tensors)


def has_bias(metadata: GgufMetadata, tensor: str) -> bool:
    """Return whether a tensor of the first layer, such as ``attn_q``, has a bias."""
    return metadata.has_tensor(f"blk.0.{tensor}.bias")


def routed_experts(metadata: GgufMetadata, count: str) -> dict[str, Any]:
    """Return the fields of the experts; ``count`` is the name of their number."""
    return {
        count: metadata.whole("expert_count"),
        "num_experts_per_tok": metadata.whole("expert_used_count"),
        "moe_intermediate_size": metadata.whole("expert_feed_forward_length"),
    }


def attention_layers(metadata: GgufMetadata) -> tuple[list[bool], int]:
    """Return which layers have keys and values, and of how many heads."""
    heads = metadata.each("attention.head_count_kv", layer_count(metadata))
    counts = {count for count in heads if count}
    if len(counts) != 1:
        raise metadata.error("attention.head_count_kv", tuple(heads), "one number, or 0")
    return [bool(count) for count in heads], counts.pop()


def state_space(metadata: GgufMetadata, names: tuple[str, str, str, str, str]) -> dict[str, Any]:
    """Return the fields of Mamba 2.

    Args:
        metadata: of the file.
        names: of the fields of heads, features of a head, features of a state, groups and the width
            of the convolution.
    """
    heads, inner = metadata.whole("ssm.time_step_rank"), metadata.whole("ssm.inner_size")
    if heads < 1 or inner % heads:
        raise metadata.error("ssm.inner_size", inner, f"a multiple of {heads} heads")
    sizes = (
        heads, inner // heads, metadata.whole("ssm.state_size"), metadata.whole("ssm.group_count"),
        metadata.whole("ssm.conv_kernel"),
    )  # fmt: skip
    return dict(zip(names, sizes, strict=True))


SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3
"""Scores of a router, as numbers of a file."""


def rotation(metadata: GgufMetadata) -> dict[str, Any]:
    """Return the ``rope_parameters``."""
    found: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": metadata.number("rope.freq_base", 10_000.0),
    }
    # llama.cpp scales linearly where a factor has no type.
    implied = "linear" if metadata.number("rope.scaling.factor", 1.0) != 1 else "none"
    kind = metadata.text("rope.scaling.type", implied)
    if metadata.has_tensor("rope_factors_short.weight"):
        return found | _long_rope(metadata)
    if metadata.has_tensor("rope_freqs.weight"):
        # Frequencies that the converter divides by these factors.
        return found | _factors(metadata, metadata.floats("rope_freqs.weight"))
    if kind == "linear":
        return found | {"rope_type": "linear", "factor": metadata.number("rope.scaling.factor")}
    if kind == "yarn":
        return found | _yarn(metadata)
    if kind != "none":
        raise metadata.error("rope.scaling.type", kind, "none, linear or yarn")
    return found


def _yarn(metadata: GgufMetadata) -> dict[str, Any]:
    metadata.expect("rope.scaling.yarn_ext_factor", 1.0)
    original = metadata.whole("rope.scaling.original_context_length")
    found: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": metadata.number("rope.scaling.factor"),
        "original_max_position_embeddings": original,
    }
    for key, field in (
        ("yarn_beta_fast", "beta_fast"),
        ("yarn_beta_slow", "beta_slow"),
        ("yarn_attn_factor", "attention_factor"),
        ("yarn_log_multiplier", "mscale_all_dim"),
    ):
        if metadata.has(f"rope.scaling.{key}"):
            found[field] = metadata.number(f"rope.scaling.{key}")
    return found | ({"mscale": 1.0} if "mscale_all_dim" in found else {})


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
