"""Gemma 3n: several hidden states a token (AltUp), low-rank residuals (LAuReL), own embeddings.

Keys and values are shared, and layers have embeddings of their own, as in Gemma 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llmpq.spec.families import Family, ModelParts, gemma2, gemma4_text
from llmpq.spec.huggingface.attention import AttentionSizes, SelfAttention
from llmpq.spec.huggingface.config import HIDDEN, Config
from llmpq.spec.huggingface.feed_forward import FeedForward, Gated, linear
from llmpq.spec.huggingface.sizes import Sizes
from llmpq.spec.huggingface.windows import FULL, SLIDING

_PERIOD = 5
_WIDTH = "intermediate_size"


def _attention(fields: Config) -> Sequence[AttentionSizes]:
    """Return the attention of every layer; one that reads another's cache has no keys or values."""
    own = SelfAttention(norm="heads")(fields)
    sources = gemma4_text.kv_sources(fields, _kinds(fields))
    return [
        layer if source is None else _reading(layer, source)
        for layer, source in zip(own, sources, strict=True)
    ]


def _windows(fields: Config) -> Sequence[int | None]:
    """Return the window of every layer."""
    window = fields.size("sliding_window")
    return [window if kind == SLIDING else None for kind in _kinds(fields)]


def _feed_forward(fields: Config) -> Sequence[FeedForward]:
    """Return the feed-forward of every layer, with what the layer has beside it."""
    hidden, rank = fields.size(*HIDDEN), fields.size("laurel_rank")
    streams = fields.size("altup_num_inputs")
    laurel = (
        linear("laurel.linear_left", rank, hidden),
        linear("laurel.linear_right", hidden, rank),
    )
    altup = (
        linear("altup.correction_coefs", streams, streams),
        linear("altup.prediction_coefs", streams * streams, streams),
        linear("altup.modality_router", streams, hidden),
    )
    beside = gemma4_text.own_embedding(fields)
    return [
        FeedForward(
            linears=(
                *Gated().of_width(fields, width).linears,
                *beside.linears,
                *laurel,
                *(replace(op, quantizable=False) for op in altup),
            ),
            others=beside.others + 3 * hidden,  # norms of both, and the scale of the output
        )
        for width in _widths(fields)
    ]


def _embedding_parameters(fields: Config) -> int:
    """Return the parameters of the layers' own embeddings, and of AltUp's projections."""
    projections = 2 * (fields.size("altup_num_inputs") - 1)  # before the first, after the last
    return gemma4_text.embedding_parameters(fields) + projections * fields.size(*HIDDEN) ** 2


def _sent_features(fields: Config) -> int | None:
    """Return the numbers that a stage sends for each token."""
    streams = fields.size("altup_num_inputs") * fields.size(*HIDDEN)
    return gemma4_text.sent_beside(fields, _attention(fields), streams)


def _reading(layer: AttentionSizes, source: int) -> AttentionSizes:
    query, _, _, out = layer.linears
    return replace(
        layer, linears=(query, out), others=layer.others - layer.head_dim, kv_source=source
    )


def _kinds(fields: Config) -> tuple[str, ...]:
    count = fields.layers()
    stated = fields.words("layer_types", count, (FULL, SLIDING))
    if stated is not None:
        return stated
    return tuple(SLIDING if (index + 1) % _PERIOD else FULL for index in range(count))


def _widths(fields: Config) -> list[int]:
    """Return the inner size of every layer: one for all, or a list."""
    count, stated = fields.layers(), fields.take(_WIDTH)
    if not isinstance(stated, list):
        return [fields.size(_WIDTH)] * count
    if len(stated) != count or not all(type(width) is int and width > 0 for width in stated):
        raise fields.error(_WIDTH, stated, f"one positive size for each of {count} layers")
    return stated


FAMILY = Family(
    name="gemma3n_text",
    sizes=Sizes(
        attention=_attention,
        feed_forward=_feed_forward,
        windows=_windows,
        norms=4,
        other_embeddings=_embedding_parameters,
        sent_features=_sent_features,
    ),
    parts=ModelParts(
        own_embeddings=gemma4_text.OWN_EMBEDDINGS,
        streams=("altup_projections", "altup_unembed_projections"),
    ),
    form=gemma2.FORM,
    sends_more=True,
)
