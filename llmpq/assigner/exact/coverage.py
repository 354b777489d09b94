"""What the exact search refuses, told apart from what has no plan."""

from __future__ import annotations

from llmpq.errors import SolverError


class NotCoveredError(SolverError):
    """The exact search does not cover this; the integer program does.

    Raised before any search: no compiled core and no compiler, more kinds of layers and bitwidths
    than a stage's counts can be keyed by, or more device orders than the lattice may have.
    """
