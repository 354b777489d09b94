"""Where the compiled core comes from.

A wheel may bring it compiled (``_core*.so`` next to this module); otherwise the first use compiles
``csrc/``, about two seconds (``llmpq.compiled``). Without a compiler the exact search is not
covered.
"""

from __future__ import annotations

import math
from pathlib import Path

from llmpq.assigner.exact.coverage import NotCoveredError
from llmpq.compiled import NotCompiledError, library_path

FLAGS = ("-std=c11", "-D_POSIX_C_SOURCE=200809L", "-O3", "-ffp-contract=off", "-fPIC", "-shared")
"""Contraction is off so that a plan does not depend on whether a machine has fused operations."""


def core_path(here: Path | None = None, limit_s: float = math.inf) -> Path:
    """Return the compiled core, compiling it unless it is there already.

    Args:
        here: the package's folder.
        limit_s: seconds that compiling may take.

    Raises:
        NotCoveredError: there is none, and it cannot be compiled or kept.
    """
    try:
        return library_path(here or Path(__file__).parent, "exact", FLAGS, "_core*.so", limit_s)
    except NotCompiledError as error:
        raise NotCoveredError(f"the core of the exact search: {error}") from error
