"""Units: seconds and bytes inside, scaled only here when a person reads them."""

from __future__ import annotations

KIB = 1024
MIB = 1024**2
GIB = 1024**3
MS = 1e-3
US = 1e-6

_BYTE_UNITS = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
_SECOND_UNITS = ((1.0, "s"), (MS, "ms"), (US, "us"))


def format_bytes(count: float) -> str:
    """Return ``count`` bytes as text with three significant digits, such as ``1.42 GiB``."""
    for unit, name in _BYTE_UNITS:
        if abs(count) >= unit:
            return f"{_three_digits(count / unit)} {name}"
    return f"{count:.0f} B"


def format_number(value: float) -> str:
    """Return a number with three significant digits and no exponent, such as ``1,230`` or ``4.50``.

    Below 0.001 it has the digits that it needs, such as ``2.1e-05``.
    """
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return _three_digits(value) if abs(value) >= 1 else f"{value:.3g}"


def format_seconds(seconds: float) -> str:
    """Return a duration as text, such as ``12.3 ms`` or ``4.1 s``; two minutes and up as m:ss."""
    if seconds >= 120:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes}:{rest:02d} min"
    for unit, name in _SECOND_UNITS:
        if abs(seconds) >= unit:
            return f"{_three_digits(seconds / unit)} {name}"
    return "0 s" if seconds == 0 else f"{seconds / US:.3g} us"


def format_duration(seconds: float) -> str:
    """Return a long duration as text, such as ``6 h 51 min`` or ``3 d 4 h``; a short one precisely.

    Below two minutes it is that of ``format_seconds``.
    """
    if seconds < 120:
        return format_seconds(seconds)
    minutes = round(seconds / 60)
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if hours else f"{minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def _three_digits(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
