"""Sizes of a family: a family states only what it has in place of Llama's parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llmpq.spec.huggingface.attention import Attentions, SelfAttention
from llmpq.spec.huggingface.config import HIDDEN, POSITIONS, SCALING, Config, scaled_positions
from llmpq.spec.huggingface.feed_forward import FeedForwards, Gated
from llmpq.spec.huggingface.windows import Windows


def positions_of(fields: Config) -> int | None:
    """Return the longest sequence that the file states, or YaRN's where that is longer."""
    names = [name for name in POSITIONS if fields.has(name)]
    stated = fields.size(*names) if names else None
    scaled = scaled_positions({name: fields.take(name) for name in SCALING if fields.has(name)})
    return stated if stated is None or scaled is None else max(stated, scaled)


def hidden_of(fields: Config) -> int:
    """Return the hidden size."""
    return fields.size(*HIDDEN)


def unlimited(fields: Config) -> None:
    """Return ``None``: there is no last position, as with ALiBi."""
    del fields


def nothing(fields: Config) -> None:
    """Return ``None``: nothing is sent but hidden states."""
    del fields


_ATTENTION, _FEED_FORWARD = SelfAttention(), Gated()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Operators and parameters of the layers of a family, and those around the layers.

    The default of every field is Llama's: separate projections, a gated feed-forward, two root mean
    square norms, rotary positions.

    Attributes:
        attention, feed_forward, windows: of every layer; no windows: ``None``.
        norms: norms of the hidden size in a layer.
        norm_tensors: parameters of each and feature: 2 with a bias, 0 without any.
        final_norms: such norms after the last layer.
        positions: rows of a table of learned positions beyond the longest sequence; ``None``
            without a table.
        max_positions: longest sequence; ``None`` when unlimited.
        embedding_norms: norms of the embeddings.
        other_embeddings: further parameters before the first layer (Gemma 3n, Gemma 4).
        sent_features: numbers that a stage sends for each token; ``None`` for the hidden states.
        width: features of an embedding.
        head_bias: whether the head has a bias.
    """

    attention: Attentions = _ATTENTION
    feed_forward: FeedForwards = _FEED_FORWARD
    windows: Windows | None = None
    norms: int | Callable[[Config], int] = 2
    norm_tensors: int | Callable[[Config], int] = 1
    final_norms: int | Callable[[Config], int] = 1
    positions: int | None = None
    max_positions: Callable[[Config], int | None] = positions_of
    embedding_norms: int = 0
    other_embeddings: int | Callable[[Config], int] = 0
    sent_features: Callable[[Config], int | None] = nothing
    width: Callable[[Config], int] = hidden_of
    head_bias: bool | str = False

    def norm_parameters(self, fields: Config) -> int:
        """Return the parameters of a norm of the hidden size."""
        return _value(self.norm_tensors, fields) * fields.size(*HIDDEN)

    def layer_norm_parameters(self, fields: Config) -> int:
        """Return the parameters of a layer's norms of the hidden size."""
        return _value(self.norms, fields) * self.norm_parameters(fields)

    def final_parameters(self, fields: Config) -> int:
        """Return the parameters of the norm before the head."""
        return _value(self.final_norms, fields) * self.norm_parameters(fields)

    def embedding_parameters(self, fields: Config) -> int:
        """Return the parameters before the first layer."""
        hidden, width = fields.size(*HIDDEN), self.width(fields)
        total = fields.size("vocab_size") * width + self.embedding_norms * self.norm_parameters(
            fields
        )
        total += _value(self.other_embeddings, fields)
        if self.positions is not None:
            total += (fields.size(*POSITIONS) + self.positions) * hidden
        # OPT-350m projects in and out of the hidden size.
        return total + (0 if width == hidden else 2 * width * hidden)

    def head_parameters(self, fields: Config) -> int:
        """Return the parameters of the LM head, its matrix only if it is not tied."""
        vocab = fields.size("vocab_size")
        bias = (
            fields.flag_or(self.head_bias, default=False)
            if isinstance(self.head_bias, str)
            else self.head_bias
        )
        is_tied = fields.flag_or("tie_word_embeddings", default=True)
        return (0 if is_tied else vocab * self.width(fields)) + (vocab if bias else 0)


def _value(rule: int | Callable[[Config], int], fields: Config) -> int:
    return rule if isinstance(rule, int) else rule(fields)


def one_if(
    field: str, default: bool, count: int = 1, otherwise: int = 0
) -> Callable[[Config], int]:
    """Return a rule: ``count`` if the flag is set, else ``otherwise``."""
    return lambda fields: count if fields.flag_or(field, default) else otherwise
