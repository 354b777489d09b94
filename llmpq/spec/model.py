"""ModelSpec: the sizes of a model, without weights or framework.

A decoder layer is the list of its linear operators plus the tensors that stay unquantized. Layers
of one kind are identical in time and memory, which the planner uses. ``spec.huggingface.families``
reads a ``config.json``; ``spec.catalog`` has named models.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

from llmpq.errors import SpecError
from llmpq.spec.fields import Rule
from llmpq.spec.precision import (
    DTYPE_BYTES,
    Dtype,
    Precision,
    default_precision,
    heaviest,
    linear_bytes,
)
from llmpq.spec.runtime_constants import HEAD_LANES, KV_CODE_BITS


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSpec:
    """One linear operator of a decoder layer, weight ``[out_features, in_features]``.

    Attributes:
        name: its module path inside the layer, such as ``self_attn.q_proj``.
        bias: whether it adds a bias (kept in the run's dtype).
        count: how many such matrices the layer holds (the experts of a mixture).
        active: how many of them one token visits.
        quantizable: false for routers, which stay in the run's dtype.
    """

    name: str
    out_features: Annotated[int, Rule(minimum=1)]
    in_features: Annotated[int, Rule(minimum=1)]
    bias: Annotated[bool, Rule(optional=True)] = False
    count: Annotated[int, Rule(optional=True, minimum=1)] = 1
    active: Annotated[int, Rule(optional=True, minimum=1)] = 1
    quantizable: Annotated[bool, Rule(optional=True)] = True

    @property
    def weight_parameters(self) -> int:
        """Weights of all its matrices, biases apart."""
        return self.count * self.out_features * self.in_features

    @property
    def bias_parameters(self) -> int:
        """Biases of all its matrices."""
        return self.count * self.out_features if self.bias else 0

    @property
    def active_weight_parameters(self) -> int:
        """Weights that one token is multiplied with."""
        return self.active * self.out_features * self.in_features


def most_absorbed(latent: int, rotated: int, plain: int, width: int) -> int:
    """Return the tokens of a row up to which absorbing them takes less arithmetic than expanding.

    Of latent attention (DeepSeek-V2, Sec. 2.1): for each head and token so far, keys and values
    take ``(n + v) L`` products once, and then a token of the row ``n + r + v``; absorbed, it takes
    ``2 (L + r)``, as all cached features are summed. At least 1: a single token is in no block
    before it attends.

    Args:
        latent: L, features of a latent vector.
        rotated: r, of the rotated part of a key.
        plain: n, of the rest.
        width: v, of a value.
    """
    more = 2 * (latent + rotated) - (plain + rotated + width)
    return max(1, (plain + width) * latent // more) if more > 0 else sys.maxsize


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One kind of decoder layer.

    Attributes:
        norm_parameters: parameters of its norms (and any other small tensors), never quantized.
        num_heads, num_kv_heads: query heads ``q`` and key-value heads ``k``; no key-value heads in
            a layer without attention.
        head_dim: features of a head ``d``, as its keys are cached.
        sliding_window: tokens a query looks back on, ``None`` for all.
        value_dim: features of a cached value if they are not ``head_dim``. Latent attention caches
            one head: the latent vector as key, the rotated part of the keys as value.
        state_values: numbers that a sequence keeps in this layer whatever its length (state-space
            layers, linear attention).
        kv_source: the earlier layer whose keys and values this layer reads in place of its own
            (Gemma 3n, Gemma 4); heads and window are those of what it reads.
    """

    linears: tuple[LinearSpec, ...]
    norm_parameters: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: Annotated[int | None, Rule(minimum=1)] = None
    value_dim: Annotated[int | None, Rule(minimum=1)] = None
    state_values: Annotated[int, Rule(optional=True)] = 0
    kv_source: Annotated[int | None, Rule(optional=True)] = None

    @property
    def num_experts(self) -> int:
        """Routed experts, 0 without any."""
        return max((op.count for op in self.linears if op.count > 1), default=0)

    @property
    def read_values_per_token(self) -> int:
        """Numbers of one token in the keys and values that this layer reads (``2 k d`` in most)."""
        value_dim = self.head_dim if self.value_dim is None else self.value_dim
        return self.num_kv_heads * (self.head_dim + value_dim)

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that one token leaves in this layer's cache; 0 where it reads another layer's."""
        return self.read_values_per_token if self.kv_source is None else 0

    def kv_obstacle(self, bits: int) -> str | None:
        """Return why keys and values cannot be cached at so few bits, ``None`` if they can."""
        if bits not in KV_CODE_BITS or not self.num_kv_heads:
            return None
        if self.value_dim is not None:
            sizes = f"keys of {self.head_dim} and values of {self.value_dim} features"
            return f"{sizes} (latent attention)"
        if bits == 4 and self.head_dim % HEAD_LANES:
            return f"heads of {self.head_dim} features, not a multiple of {HEAD_LANES}"
        return None

    @property
    def parameters(self) -> int:
        """All parameters of the layer."""
        linear = sum(op.weight_parameters + op.bias_parameters for op in self.linears)
        return linear + self.norm_parameters

    @property
    def active_weight_parameters(self) -> int:
        """Linear weights that one token is multiplied with."""
        return sum(op.active_weight_parameters for op in self.linears)

    def weight_bytes(self, precision: Precision, dtype_bytes: int) -> int:
        """Bytes of the layer stored at ``precision``; norms, biases and routers stay in the dtype.

        LLM-PQ, Sec. 4.1, with the real operators and the quantizer's scales and zero points.
        """
        total = self.norm_parameters * dtype_bytes
        for op in self.linears:
            if op.quantizable:
                one = linear_bytes(op.out_features, op.in_features, precision, dtype_bytes)
            else:
                one = op.out_features * op.in_features * dtype_bytes
            total += op.count * one + op.bias_parameters * dtype_bytes
        return total

    def kv_bytes_per_token(self, kv_value_bytes: float) -> float:
        """Bytes of keys and values that one token leaves in this layer."""
        return self.kv_values_per_token * kv_value_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only model: its layers with their operators, embedding, head.

    Attributes:
        name: public repository id or directory name.
        family: ``model_type`` of its configuration.
        hidden_size, vocab_size: ``h`` and ``V``.
        head_in_features: inputs of the LM head (OPT-350m projects before it).
        max_positions: longest sequence, ``None`` when unlimited.
        layer_types: the kinds of decoder layer, each once.
        layer_kinds: index into ``layer_types`` for every layer; its length is ``L``.
        embedding_parameters: token and position embeddings, their norm and projections.
        final_parameters: the norm before the head.
        head_parameters: the LM head, its matrix only if it is not tied to the token embedding.
        dtype: the checkpoint's own number format.
        stored: precision of every layer in a quantized checkpoint, empty for any other. Such a
            layer can be served only as it is stored.
        stored_head: the same of the LM head.
        sent_features: numbers that a stage sends for each token, where more than the hidden states
            travel: embeddings of single layers, keys and values that later layers read.
    """

    name: str
    family: str
    hidden_size: Annotated[int, Rule(minimum=1)]
    vocab_size: Annotated[int, Rule(minimum=1)]
    head_in_features: Annotated[int, Rule(minimum=1)]
    max_positions: Annotated[int | None, Rule(minimum=1)] = None
    layer_types: tuple[LayerSpec, ...]
    layer_kinds: tuple[int, ...]
    embedding_parameters: int
    final_parameters: int
    head_parameters: int
    dtype: Dtype
    stored: Annotated[tuple[Precision, ...], Rule(optional=True)] = ()
    stored_head: Precision | None = None
    sent_features: Annotated[int | None, Rule(minimum=1)] = None

    def __post_init__(self) -> None:
        if self.stored and len(self.stored) != len(self.layer_kinds):
            raise SpecError(f"model {self.name}: expected a stored precision for every layer")
        if not self.layer_kinds:
            raise SpecError(f"model {self.name}: found no decoder layers, expected at least one")
        if not all(0 <= kind < len(self.layer_types) for kind in self.layer_kinds):
            raise SpecError(f"model {self.name}: a layer names a kind that does not exist")
        for index, layer in enumerate(self.layers):
            source = layer.kv_source
            if source is not None and not 0 <= source < index:
                raise SpecError(
                    f"model {self.name}: layer {index} reads keys and values of layer {source}, "
                    "expected an earlier one"
                )

    @property
    def message_features(self) -> int:
        """Numbers that a stage sends for each token: ``h``, and what travels beside it."""
        return self.sent_features or self.hidden_size

    def copied_kinds(self, first_layer: int, end_layer: int) -> tuple[int, ...]:
        """Return the kinds of earlier layers whose keys and values a stage keeps a copy of.

        They are those that layers ``[first_layer, end_layer)`` read and that are before them.
        """
        sources = (layer.kv_source for layer in self.layers[first_layer:end_layer])
        before = {source for source in sources if source is not None and source < first_layer}
        return tuple(self.layer_kinds[source] for source in sorted(before))

    @property
    def has_states(self) -> bool:
        """Whether layers have a recurrent state."""
        return any(layer.state_values for layer in self.layer_types)

    def state_bytes(self, first_layer: int = 0, end_layer: int | None = None) -> int:
        """Return the bytes of a sequence's recurrent states in some layers, by default all."""
        layers = self.layers[first_layer:end_layer]
        return DTYPE_BYTES["float32"] * sum(layer.state_values for layer in layers)

    @property
    def window_tokens(self) -> int | None:
        """Largest window of its layers, for which their blocks are allocated; ``None``: none."""
        windows = [layer.sliding_window or 0 for layer in self.layer_types]
        return max(windows) or None

    @property
    def mtp_layer(self) -> int:
        """The last layer with attention, which one for multi-token prediction is like."""
        return max(i for i, layer in enumerate(self.layers) if layer.kv_values_per_token)

    @property
    def num_layers(self) -> int:
        """Decoder layers ``L``."""
        return len(self.layer_kinds)

    @property
    def parameters(self) -> int:
        """All parameters, tied ones once."""
        return self.master_parameters + sum(layer.parameters for layer in self.layers)

    @property
    def master_parameters(self) -> int:
        """Parameters of the master: embeddings, final norm and head."""
        return self.embedding_parameters + self.final_parameters + self.head_parameters

    @property
    def head_weights(self) -> int:
        """Weights of the LM head's matrix, tied or not."""
        return self.vocab_size * self.head_in_features

    def head_precision(self, bits: int) -> Precision:
        """Return the precision of the head's matrix at ``bits``: the stored one, or the default."""
        stored = self.stored_head
        return default_precision(bits) if stored is None or stored.bits != bits else stored

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The layer of every index, in order."""
        return tuple(self.layer_types[kind] for kind in self.layer_kinds)

    def precision(self, bits: int) -> Precision:
        """Return the precision of a bitwidth: that of stored layers, else the default.

        If stored layers of one bitwidth differ in groups, the one with the most bytes counts.
        """
        found = [precision for precision in self.stored if precision.bits == bits]
        return heaviest(found) if found else default_precision(bits)
