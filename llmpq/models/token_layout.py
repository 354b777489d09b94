"""TokenLayout: what travels between stages for each token besides its hidden state.

Layers of Gemma 3n and Gemma 4 add an embedding of their own, which the master makes from the token,
and the last layers read keys and values of earlier ones. Both travel behind the hidden states of a
token, in the same order on every stage::

    [ hidden states | embeddings of all layers | keys and values of every layer that others read ]

Shapes: R rows, T tokens of a row (or 1 row of all N tokens of a step), H hidden size, S hidden
states of a token (4 in Gemma 3n, else 1), L layers, E features of a layer's embedding, W all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from llmpq.models.attention import KVShape
from llmpq.models.config import kv_sources, layer_kv_shape

SharedKV = dict[str | int, tuple[Tensor, Tensor]]
"""Keys and values of a step, ``[1, h, N, d]`` each, by kind or by index of the layer that made
them: transformers names them by index in 5.17 (Gemma 3n), else by kind."""


@dataclass(slots=True, kw_only=True, eq=False)
class TokenState:
    """The parts of a message while a stage computes.

    Attributes:
        hidden: ``[R, T, H]``, or ``[S, R, T, H]`` where a token has several.
        own: embeddings of the layers, ``[R, T, L, E]``; ``None`` without.
        shared: keys and values that later layers read.
    """

    hidden: Tensor
    own: Tensor | None
    shared: SharedKV


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLayout:
    """Where the parts of a message are.

    Attributes:
        hidden_size: ``H``.
        streams: ``S``.
        layers: ``L``.
        own: ``E``, 0 without embeddings of single layers.
        sources: shapes of the keys and values of every layer that others read, by its index.
        kinds: kinds of these layers.
    """

    hidden_size: int
    streams: int
    layers: int
    own: int
    sources: Mapping[int, KVShape]
    kinds: Mapping[int, str]

    @property
    def hidden_features(self) -> int:
        """Numbers of the hidden states: ``S H``."""
        return self.streams * self.hidden_size

    @property
    def features(self) -> int:
        """All numbers of a token: ``W``."""
        read = sum(shape.heads * sum(shape.dims) for shape in self.sources.values())
        return self.hidden_features + self.layers * self.own + read

    def split(self, message: Tensor, first_layer: int) -> TokenState:
        """Take a message ``[R, T, W]`` apart.

        Keys and values of layers from ``first_layer`` on are not made yet, and left out.
        """
        end = self.hidden_features + self.layers * self.own
        own = message[..., self.hidden_features : end]
        own = own.reshape(*own.shape[:-1], self.layers, self.own)
        shared: SharedKV = {}
        for source, shape in self.sources.items():
            pair = []
            for features in shape.dims:
                part = message[..., end : end + shape.heads * features].contiguous()
                pair.append(part.view(*part.shape[:-1], shape.heads, features).transpose(1, 2))
                end += shape.heads * features
            if source < first_layer:
                shared[source] = shared[self.kinds[source]] = pair[0], pair[1]
        return TokenState(
            hidden=self.hidden_of(message), own=own if self.own else None, shared=shared
        )

    def join(self, state: TokenState) -> Tensor:
        """Return the message ``[R, T, W]``; keys and values that are not made yet are zeros."""
        hidden = state.hidden
        if self.streams > 1:
            hidden = hidden.movedim(0, -2).flatten(-2)
        parts = [hidden] if state.own is None else [hidden, state.own.flatten(-2)]
        for source, shape in self.sources.items():
            pair = self.made_by(source, state.shared)
            if pair is None:
                width = shape.heads * sum(shape.dims)
                parts.append(hidden.new_zeros(*hidden.shape[:-1], width))
            else:
                parts += [part.transpose(1, 2).flatten(-2) for part in pair]
        return torch.cat(parts, -1)

    def hidden_of(self, message: Tensor) -> Tensor:
        """Return the hidden states ``[..., H]`` of ``[..., W]``, or ``[S, ..., H]``."""
        hidden = message[..., : self.hidden_features]
        if self.streams == 1:
            return hidden
        size = (*hidden.shape[:-1], self.streams, self.hidden_size)
        return hidden.reshape(size).movedim(-2, 0)

    def made_by(self, source: int, shared: SharedKV) -> tuple[Tensor, Tensor] | None:
        """Return the keys and values of a layer, ``None`` before it has run."""
        return shared.get(source) or shared.get(self.kinds[source])


def layout_of(config: PreTrainedConfig) -> TokenLayout | None:
    """Return the layout of a model's messages; ``None`` where they are the hidden states."""
    own: int = getattr(config, "hidden_size_per_layer_input", None) or 0
    streams: int = getattr(config, "altup_num_inputs", 1)
    read = sorted({source for source in kv_sources(config) if source is not None})
    if not (own or read or streams > 1):
        return None
    return TokenLayout(
        hidden_size=config.hidden_size,
        streams=streams,
        layers=config.num_hidden_layers,
        own=own,
        sources={source: layer_kv_shape(config, source) for source in read},
        kinds={source: config.layer_types[source] for source in read},
    )


def message_features(config: PreTrainedConfig) -> int:
    """Return the numbers that a stage sends for each token."""
    layout = layout_of(config)
    return int(config.hidden_size) if layout is None else layout.features
