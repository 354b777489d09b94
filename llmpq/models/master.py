"""Master: the modules before the first and after the last decoder layer.

Embeddings, learned positions, projections, the final norm and the LM head of transformers. A head
tied to the embedding is one tensor, stored and loaded once.

``TokenLayout`` is what travels between stages for each token besides its hidden state. Layers of
Gemma 3n and Gemma 4 add an embedding of their own, which the master makes from the token, and the
last layers read keys and values of earlier ones. Both travel behind the hidden states of a token,
in the same order on every stage::

    [ hidden states | embeddings of all layers | keys and values of every layer that others read ]

Shapes: R rows (sequences), N tokens of a step, T tokens of a row (or 1 row of all N tokens of a
step), H hidden size, V vocabulary, S hidden states of a token (4 in Gemma 3n, else 1), L layers, E
features of a layer's embedding, W all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from llmpq.models.adapter import Skeleton, fill_constants, kv_sources, layer_kv_shape
from llmpq.models.attention import KVShape

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


_LEAST_SQUARE = 1e-5


def is_tied(config: PreTrainedConfig) -> bool:
    """Whether the LM head is the token embedding."""
    return bool(getattr(config.get_text_config(), "tie_word_embeddings", False))


class Master(nn.Module):
    """The two ends of a pipeline; built on the meta device, weights from ``Checkpoint``.

    Submodules have their names in the decoder (``embed_tokens``, ``norm``, ...), and ``lm_head``
    exists if the head is not tied, or is quantized.

    Args:
        config: configuration from ``load_config``.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.config = config
        skeleton = Skeleton.of(config)
        self._parts = skeleton.family.parts
        self._layout = layout_of(config)
        for name in skeleton.known_parts:
            part = getattr(skeleton.decoder, name)
            if part is not None:
                fill_constants(part, skeleton.model)
                self.add_module(name, part)
        head = skeleton.model.get_submodule(skeleton.head_path)
        self.lm_head: nn.Module | None = None if is_tied(config) else head
        self.eval().requires_grad_(False)

    @property
    def embedding_name(self) -> str:
        """Name of the token embedding, such as ``embed_tokens``."""
        return self._parts.embedding

    @torch.inference_mode()
    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Return the input of the first layer.

        Args:
            token_ids: ``[1, N]`` int64.
            positions: ``[1, N]`` int64 absolute positions on any device.

        Returns:
            ``[1, N, H]`` in the weights' dtype; ``[1, N, W]`` where a token has a ``TokenLayout``.
        """
        parts = self._parts
        hidden: Tensor = self.get_submodule(parts.embedding)(token_ids)
        if parts.embedding_multiplier is not None:
            hidden = hidden * getattr(self.config, parts.embedding_multiplier)
        hidden = self._pass(parts.project_in, hidden)
        if parts.positions is not None:
            module = self.get_submodule(parts.positions)
            known = positions.to(token_ids.device)
            skips_mask = parts.positions_after_mask
            hidden = hidden + (module(None, position_ids=known) if skips_mask else module(known))
        hidden = self._pass(parts.embedding_norm, hidden)
        return hidden if self._layout is None else self._message(self._layout, token_ids, hidden)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the next token.

        Args:
            hidden: ``[R, H]`` or ``[R, W]``, one position per row.

        Returns:
            ``[R, V]`` float32.
        """
        return self.scores(self.head_inputs(hidden))

    @torch.inference_mode()
    def scores(self, states: Tensor) -> Tensor:
        """Return the logits ``[R, V]`` float32 of what :meth:`head_inputs` made."""
        parts = self._parts
        scores = self._head(states)
        if parts.logits_multiplier is not None:
            scores = scores * getattr(self.config, parts.logits_multiplier)
        if parts.logits_divisor is not None:
            scores = scores / getattr(self.config, parts.logits_divisor)
        cap = getattr(self.config, "final_logit_softcapping", None)
        if cap is not None:
            scores = torch.tanh(scores / cap) * cap
        return scores.float()

    @torch.inference_mode()
    def head_inputs(self, hidden: Tensor) -> Tensor:
        """Return what the head multiplies, ``[R, K]``, for ``hidden`` ``[R, H]`` or ``[R, W]``."""
        if self._layout is not None:
            hidden = self._merged(self._layout.hidden_of(hidden), self._layout)
        hidden = self._pass(self._parts.final_norm, hidden)
        return self._pass(self._parts.project_out, hidden)

    def _message(self, layout: TokenLayout, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """Return what travels for each token (Gemma 3n, Gemma 4): ``[R, T, W]``."""
        own = None
        if layout.own:
            table, projection, norm = map(self.get_submodule, self._parts.own_embeddings)
            assert isinstance(table, nn.Embedding)
            # Tokens beyond the table have the first row, as in Gemma 3n of transformers.
            known = torch.where(token_ids < table.num_embeddings, token_ids, 0)
            projected = projection(hidden) * layout.hidden_size**-0.5
            size = (*token_ids.shape, layout.layers, layout.own)
            own = (norm(projected.view(size)) + table(known).view(size)) * 2.0**-0.5
        if layout.streams > 1:
            magnitude = hidden.square().mean(-1, keepdim=True) ** 0.5
            made = (_scaled(part(hidden), magnitude) for part in self._streams(0))
            hidden = torch.stack([hidden, *made])
        return layout.join(TokenState(hidden=hidden, own=own, shared={}))

    def _merged(self, hidden: Tensor, layout: TokenLayout) -> Tensor:
        """Return one hidden state ``[R, H]`` of each token's several, ``[S, R, H]``."""
        if layout.streams == 1:
            return hidden
        magnitude = hidden[0].square().mean(-1, keepdim=True) ** 0.5
        parts = zip(self._streams(1), hidden[1:], strict=True)
        merged = [hidden[0], *(_scaled(part(one), magnitude) for part, one in parts)]
        return torch.stack(merged).mean(dim=0)

    def _streams(self, which: int) -> Iterable[nn.Module]:
        return self.get_submodule(self._parts.streams[which]).children()

    def _head(self, hidden: Tensor) -> Tensor:
        if self.lm_head is not None:
            scores: Tensor = self.lm_head(hidden)
            return scores
        embedding = self.get_submodule(self._parts.embedding)
        assert isinstance(embedding, nn.Embedding)
        return nn.functional.linear(hidden, embedding.weight)

    def _pass(self, name: str | None, hidden: Tensor) -> Tensor:
        part = None if name is None else self._modules.get(name)
        if part is None:
            return hidden
        result: Tensor = part(hidden)
        return result


def _scaled(values: Tensor, magnitude: Tensor) -> Tensor:
    """Scale rows to a root mean square (Gemma 3n)."""
    own = values.square().mean(-1, keepdim=True)
    return values * magnitude / torch.sqrt(own.clamp(min=_LEAST_SQUARE))
