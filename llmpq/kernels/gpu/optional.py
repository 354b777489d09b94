"""Packages that make some backends faster and that nobody has to install: triton, bitsandbytes.

A backend asks here and is simply not offered where its package is missing or broken; this module
refuses to install anything, and to hide why a package cannot be used.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import lru_cache
from types import ModuleType


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


def is_usable(package: str) -> bool:
    """Return whether ``package`` is installed and imports."""
    return why_missing(package) is None


def optional_module(package: str) -> ModuleType:
    """Return ``package``, which its caller has found usable."""
    return importlib.import_module(package)
