"""Which tokens each layer attends to: the rules of the families."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llmpq.spec.huggingface.config import Config

Windows = Callable[[Config], Sequence[int | None]]
"""Reads the sliding window of every layer, ``None`` for all tokens."""

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
ATTENTION = (FULL, "attention")
"""Names of layers that attend to all tokens: today's, and that of older files."""
LINEAR = ("linear_attention", "mamba", "conv")
"""Names of layers that have a state in place of keys and values."""
BOTH = "hybrid"
"""Name of layers that have keys and values and a state side by side (Falcon-H1)."""
FEED_FORWARD = ("mlp", "moe")
"""Names of layers that have neither (Nemotron-H)."""
_WINDOW_KINDS = (*ATTENTION, SLIDING, CHUNKED, *LINEAR)


def everywhere(fields: Config) -> Sequence[int | None]:
    """Return ``sliding_window`` for all layers; null is none (Mistral, Phi-3)."""
    return by_name(fields, [_window(fields)] * fields.layers())


def uniform(fields: Config) -> Sequence[int | None]:
    """Return ``sliding_window`` for all layers whatever ``layer_types`` says (Ministral 3)."""
    return [_window(fields)] * fields.layers()


def if_used(fields: Config) -> Sequence[int | None]:
    """Return windows of all layers if ``use_sliding_window`` is set (Qwen3-MoE)."""
    return by_name(fields, [_used_window(fields)] * fields.layers())


def without_positions(fields: Config) -> Sequence[int | None]:
    """Return windows of the layers that rotate nothing, if used (SmolLM3)."""
    window, count = _used_window(fields), fields.layers()
    every = fields.size("no_rope_layer_interval")
    rotates: Sequence[object] = [(index + 1) % every for index in range(count)]
    if fields.has("no_rope_layers"):
        rotates = fields.take("no_rope_layers")
        if not isinstance(rotates, list) or len(rotates) != count:
            raise fields.error("no_rope_layers", rotates, f"one entry for each of {count} layers")
    return by_name(fields, [None if rotated else window for rotated in rotates])


def from_layer(fields: Config) -> Sequence[int | None]:
    """Return windows from ``max_window_layers`` on, if used (Qwen)."""
    return _from_layer(fields, _used_window(fields))


def always_from_layer(fields: Config) -> Sequence[int | None]:
    """Return windows from ``max_window_layers`` on (dots.llm1)."""
    return _from_layer(fields, _window(fields))


def _from_layer(fields: Config, window: int | None) -> Sequence[int | None]:
    first = fields.size("max_window_layers", minimum=0)
    pattern = [window if index >= first else None for index in range(fields.layers())]
    return by_name(fields, pattern)


def every_other(fields: Config) -> Sequence[int | None]:
    """Return windows of every other layer before ``max_window_layers``, if used (Qwen2-MoE)."""
    window, end = _used_window(fields), fields.size("max_window_layers", minimum=0)
    pattern = [
        window if index % 2 == 0 and index < end else None for index in range(fields.layers())
    ]
    return by_name(fields, pattern)


def by_period(period: int, field: str | None = None) -> Windows:
    """Return a reader of windows except in every ``period``-th layer (Gemma 2, 3).

    ``field`` of the file overrides the period.
    """

    def windows(fields: Config) -> Sequence[int | None]:
        every = period if field is None else fields.size(field, default=period)
        window = _window(fields)
        pattern = [window if (index + 1) % every else None for index in range(fields.layers())]
        return by_name(fields, pattern)

    return windows


def named(fields: Config) -> Sequence[int | None]:
    """Return windows where ``layer_types`` says, else none (Mellum)."""
    return by_name(fields, [None] * fields.layers())


def chunks(fields: Config) -> Sequence[int | None]:
    """Return ``attention_chunk_size`` where positions are rotated (Llama 4)."""
    count, chunk = fields.layers(), fields.size("attention_chunk_size")
    every = fields.size("no_rope_layer_interval")
    pattern = [chunk if (index + 1) % every else None for index in range(count)]
    if fields.has("no_rope_layers") and fields.take("no_rope_layers"):
        stated = fields.take("no_rope_layers")
        if not isinstance(stated, list) or len(stated) != count:
            raise fields.error("no_rope_layers", stated, f"one entry for each of {count} layers")
        pattern = [chunk if rotates else None for rotates in stated]
    return by_name(fields, pattern, chunk)


def by_name(
    fields: Config, pattern: Sequence[int | None], window: int | None = None
) -> Sequence[int | None]:
    """Return the windows by ``layer_types`` if the file has it, else ``pattern``."""
    names = fields.words("layer_types", len(pattern), _WINDOW_KINDS)
    if names is None:
        return pattern
    window = _window(fields) if window is None else window
    return [window if name in (SLIDING, CHUNKED) else None for name in names]


def _used_window(fields: Config) -> int | None:
    return _window(fields) if fields.flag_or("use_sliding_window", default=False) else None


def _window(fields: Config) -> int | None:
    has_field = fields.has("sliding_window")
    return (fields.size("sliding_window", minimum=0) if has_field else 0) or None
