"""Model families: a record of each, in a file of its own that is named after its ``model_type``.

A family is added with one file: ``FAMILY`` states what differs from Llama, the default of every
field. A file of another model type with the record of a family says that both are the same on text.
The records import no torch: planner, loader and runtime read the same.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from llmpq.errors import bad_field
from llmpq.spec.huggingface.attention import SelfAttention
from llmpq.spec.huggingface.feed_forward import Experts, Gated
from llmpq.spec.huggingface.mixers import Hybrid
from llmpq.spec.huggingface.sizes import Sizes
from llmpq.spec.model_files.gguf_form import GgufForm, TextSplit
from llmpq.spec.model_files.weight_headers import GgufHeader


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParts:
    """Names of the modules before and after the layers, and of the fields that scale.

    Attributes:
        embedding: the token embedding.
        positions: learned position embedding, if any.
        positions_after_mask: whether the module ``positions`` has a mask as first argument, which
            it does not read where positions are given.
        project_in: projection of embeddings narrower than the residual stream.
        embedding_norm: norm applied to the embeddings.
        final_norm: norm after the last layer; optional in a model.
        project_out: projection before the head.
        stored_head: name of the head in checkpoints, if it differs from that in transformers.
        own_embeddings: what makes the embeddings of single layers; optional in a model.
        streams: what makes the hidden states of a token from its embedding, and one of them again.
        embedding_multiplier: configuration field that scales embeddings.
        logits_multiplier: configuration field that scales logits.
        logits_divisor: configuration field that divides logits.
        applied_scales: configuration fields of scales that transformers' modules apply.
    """

    embedding: str = "embed_tokens"
    positions: str | None = None
    positions_after_mask: bool = False
    project_in: str | None = None
    embedding_norm: str | None = None
    final_norm: str = "norm"
    project_out: str | None = None
    stored_head: str | None = None
    own_embeddings: tuple[str, ...] = ()
    streams: tuple[str, ...] = ()
    embedding_multiplier: str | None = None
    logits_multiplier: str | None = None
    logits_divisor: str | None = None
    applied_scales: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Alibi:
    """Linear bias of the scores by key (Press et al., "Train Short, Test Long", 2022).

    Attributes:
        argument: of a layer that takes the bias.
        largest: dotted configuration field of the largest exponent of the slopes, which are not
            rounded then; ``None`` for powers of the number of heads.
    """

    argument: str = "alibi"
    largest: str | None = None


OwnModule = Literal[
    "alibi", "position_bias", "fused_rotary", "complex_rotary", "split_scores",
    "biased_experts", "routed_experts", "scaled_experts", "input_factors", "decays",
]  # fmt: skip
"""Modules of ``llmpq.models`` that take the place of those of transformers."""
DEFAULT_MODEL_TYPE = "llama"
"""The family of which a record has all defaults."""

Norms = tuple[str | None, str | None, str | None, str | None]
"""Names of the norms before and after attention, before and after the MLP."""


PIECE_TOKENS = 64
"""Tokens of a chunk of transformers' recurrences: fewer take as much memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerForm:
    """How the modules of a layer are combined; compiled steps are verified against the layer.

    Names of the other modules are in the sizes of the family.

    Attributes:
        norms: of the hidden states.
        rotation: features rotated together: half of them apart, or neighbours. ``short``: half of
            them apart, with tables that have each angle once. ``None`` for a layer without
            rotation.
        norms_late: whether the heads are normed after the rotation.
        is_parallel: whether the MLP reads the input of the layer, not the output of attention.
        by_heads: whether a single projection makes query, key and value head by head.
    """

    norms: Norms = ("input_layernorm", None, "post_attention_layernorm", None)
    rotation: Literal["halves", "pairs", "short"] | None = "halves"
    norms_late: bool = False
    is_parallel: bool = False
    by_heads: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpNames:
    """Names of the layer for multi-token prediction in a checkpoint (DeepSeek-V3, Sec. 2.2).

    It is a layer as the model's last one with attention, behind a projection of the hidden state of
    a token and the embedding of the next one.

    Attributes:
        folder: what all of its names begin with; ``None`` for a layer that follows the model's.
        layer: what the names of the layer's own tensors begin with, after ``folder``.
        embedding_norm, hidden_norm: norms before the projection.
        projection: of both, one behind the other.
        final_norm: before the model's head.
    """

    folder: str | None = None
    layer: str = ""
    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    projection: str = "eh_proj"
    final_norm: str = "shared_head.norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """All that planner and runtime know of the models of one ``model_type``.

    Attributes:
        name: ``model_type`` of transformers.
        sizes: operators and parameters; ``None`` if they are only described
            (``llmpq-profile describe``).
        parts: modules around the layers.
        form: of every layer, or a function of transformers' configuration and a layer's number.
        has_layer_classes: whether transformers has a class for each kind of layer.
        recurrence_bytes: bytes that transformers' recurrence makes for a channel of a token, where
            no kernel computes it: ``PIECE_TOKENS`` of a prompt at a time; ``None`` elsewhere.
        alibi: bias of the scores, if any.
        writes_scores: whether attention writes out its scores, as they are capped or have sinks.
        own_modules: paths in a layer whose modules of transformers are replaced, and by what, or
            get constants.
        has_formula: whether the activation of a layer is a formula of tensor operations, which is
            computed blockwise.
        attends_to_cache: whether a layer attends to its cached keys and values unchanged, query
            heads of a group next to each other.
        sends_more: whether stages may send more than hidden states (``models.master``).
        gguf: how llama.cpp's converter stores the models; ``None`` if such files are not read.
        mtp: names of the layer for multi-token prediction; ``None`` where none is known.
        is_tested: whether tokens and logits are tested against transformers. A family without is
            run with a warning.
        block: names of the operators behind attention where the sizes have a rule, as far as one
            record names them.
        unsupported: why it cannot be run although its modules are of the usual shape.
    """

    name: str
    sizes: Sizes | None = None
    parts: ModelParts = ModelParts()
    form: LayerForm | Callable[[Any, int], LayerForm] = LayerForm()
    has_layer_classes: bool = False
    recurrence_bytes: int | None = None
    alibi: Alibi | None = None
    writes_scores: bool = False
    own_modules: tuple[tuple[str, OwnModule], ...] = ()
    has_formula: bool = False
    attends_to_cache: bool = True
    sends_more: bool = False
    gguf: GgufForm | None = None
    mtp: MtpNames | None = None
    is_tested: bool = True
    block: Gated | Experts | None = None
    unsupported: str | None = None

    def form_of(self, config: Any, layer: int) -> LayerForm:
        """Return how the modules of a layer are combined.

        Args:
            config: of transformers.
            layer: its number in the model.
        """
        return self.form if isinstance(self.form, LayerForm) else self.form(config, layer)

    @property
    def attention(self) -> SelfAttention:
        """Names of the operators of attention; those of Llama where the sizes have a rule."""
        found = None if self.sizes is None else self.sizes.attention
        if isinstance(found, Hybrid):
            found = found.attention
        return found if isinstance(found, SelfAttention) else SelfAttention()

    @property
    def feed_forward(self) -> Gated | Experts:
        """Names of the operators behind attention; those of Llama where the sizes have a rule."""
        found = None if self.sizes is None else self.sizes.feed_forward
        if isinstance(found, (Gated, Experts)):
            return found
        return Gated() if self.block is None else self.block


def find_mtp(family: Family, layers: int, names: Iterable[str]) -> tuple[str, MtpNames] | None:
    """Find the layer for multi-token prediction among the tensors of a checkpoint.

    Args:
        family: of the model.
        layers: of the model, without that one.
        names: of the stored tensors.

    Returns:
        What its names begin with, and its names; ``None`` where it is not stored, or the names of
        the family are not known.
    """
    if family.mtp is None:
        return None
    # Behind the model's layers it has the same names in all families, as in GGUF files.
    known = [("blk.{}.nextn.", MtpNames()), ("layers.{}.", MtpNames())]
    if family.mtp.folder is not None:
        known.append((family.mtp.folder, family.mtp))
    for name in names:
        for folder, own in known:
            tail = f"{folder.format(layers)}{own.projection}.weight"
            if name == tail or name.endswith(f".{tail}"):
                return name.removesuffix(f"{own.projection}.weight"), own
    return None


@cache
def family_of(model_type: str) -> Family:
    """Return the record of a model type; one with the defaults if there is none."""
    if model_type not in _model_types():
        return Family(name=model_type, is_tested=False)
    record: Family = importlib.import_module(f"{__name__}.{model_type}").FAMILY
    return record


def known_families() -> Iterator[Family]:
    """Yield the record of every family, by name."""
    for model_type in sorted(_model_types()):
        family = family_of(model_type)
        if family.name == model_type:
            yield family


@cache
def _model_types() -> frozenset[str]:
    return frozenset(module.name for module in pkgutil.iter_modules(__path__))


_BYTE_PAIRS = "gpt2"
"""What GGUF files call tokenizers that merge pairs of bytes."""


def text_split(header: GgufHeader) -> TextSplit | None:
    """Return how the tokenizer of a GGUF file splits texts; ``None`` for one that does not.

    Raises:
        SpecError: the way to split is not known.
    """
    if header.metadata.get("tokenizer.ggml.model") != _BYTE_PAIRS:
        return None
    forms = [family.gguf for family in known_families() if family.gguf is not None]
    known = {name: split for form in forms for split in form.splits for name in split.names}
    key = "tokenizer.ggml.pre"
    found = header.metadata.get(key, "default")
    if not isinstance(found, str) or found not in known:
        expected = f"one of {', '.join(sorted(known))}, or a tokenizer.json beside the file"
        raise bad_field(str(header.path), key, found, expected)
    return known[found]
