"""Sliding windows: on how many tokens each layer looks back, as each family's files say it.

Every function returns one entry a layer, ``None`` where a layer sees all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llmpq.spec.model_config import Config


def no_windows(fields: Config) -> Sequence[int | None]:
    """No layer has one (Llama, Gemma)."""
    return [None] * fields.layers()


def windows_everywhere(default: int | None) -> Callable[[Config], Sequence[int | None]]:
    """Every layer looks back on ``sliding_window``; null is all tokens (Mistral, Phi-3)."""

    def windows(fields: Config) -> Sequence[int | None]:
        stated = fields.optional_size("sliding_window")
        missing = None if fields.has_key("sliding_window") else default
        return [stated or missing] * fields.layers()

    return windows


def windows_if_used(fields: Config) -> Sequence[int | None]:
    """Every layer, where ``use_sliding_window`` says so (Qwen3-MoE)."""
    used = fields.flag("use_sliding_window", default=False)
    return [_window(fields) if used else None] * fields.layers()


def windows_from_layer(fields: Config) -> Sequence[int | None]:
    """Layers from ``max_window_layers`` on, where ``use_sliding_window`` says so (Qwen)."""
    count = fields.layers()
    window = _window(fields) if fields.flag("use_sliding_window", default=False) else None
    first = fields.size("max_window_layers", default=28, minimum=0)
    return _by_name(fields, [window if index >= first else None for index in range(count)], window)


def windows_by_period(
    period: int, field: str | None = None
) -> Callable[[Config], Sequence[int | None]]:
    """All layers but every ``period``-th one (Gemma 2), or as ``field`` says (Gemma 3)."""

    def windows(fields: Config) -> Sequence[int | None]:
        window = _window(fields)
        every = period if field is None else fields.size(field, default=period)
        count = fields.layers()
        pattern = [window if (index + 1) % every else None for index in range(count)]
        return _by_name(fields, pattern, window)

    return windows


def _by_name(
    fields: Config, pattern: Sequence[int | None], window: int | None
) -> Sequence[int | None]:
    """Return what ``layer_types`` says where the file has it, ``pattern`` otherwise."""
    names = fields.names("layer_types", len(pattern), ("full_attention", "sliding_attention"))
    if names is None:
        return pattern
    return [window if name == "sliding_attention" else None for name in names]


def _window(fields: Config) -> int | None:
    missing = None if fields.has_key("sliding_window") else 4096
    return fields.optional_size("sliding_window") or missing
