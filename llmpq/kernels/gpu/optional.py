"""Optional packages of some backends: triton and bitsandbytes.

A backend whose package is missing or does not import is not offered; ``why_missing`` gives the
reason.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import lru_cache


@lru_cache(maxsize=8)
def why_missing(package: str) -> str | None:
    """Return why ``package`` cannot be used, or ``None`` when it can; imports it to find out."""
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    try:
        importlib.import_module(package)
    except Exception as error:  # native libraries fail in ways of their own (OSError, RuntimeError)
        return f"{package} cannot be imported: {type(error).__name__}: {error}"
    return None
