"""Where commands keep fitted latency curves between runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def fit_cache(environ: Mapping[str, str]) -> Path | None:
    """Return the folder of fits in the user's cache directory, ``None`` without a home.

    Args:
        environ: of the process; ``XDG_CACHE_HOME`` comes before ``HOME``.
    """
    home, cache = environ.get("HOME"), environ.get("XDG_CACHE_HOME")
    if not home and not cache:
        return None
    base = Path(cache) if cache else Path(home or "") / ".cache"
    return base / "llmpq" / "fits"
