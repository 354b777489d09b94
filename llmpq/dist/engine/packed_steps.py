"""StepRunner: computes packed steps, each a flat list of the tokens of several sequences.

Shapes: R rows with an output, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Ids = NDArray[np.int64]


class StepRow(NamedTuple):
    """Tokens ``[first, length)`` of a sequence in a step; ``blocks`` hold those before, too."""

    blocks: tuple[int, ...]
    first: int
    length: int


class StepRunner(Protocol):
    """Computes packed steps, in the order in which they are dispatched."""

    def dispatch(self, token_ids: Ids, rows: Sequence[StepRow], outputs: Sequence[int]) -> None:
        """Start a step.

        Args:
            token_ids: of all rows, one after the other.
            rows: of the step.
            outputs: rows whose last token's scores are wanted.

        Raises:
            StageError: a stage failed.
        """
        ...

    def has_result(self) -> bool:
        """Return whether :meth:`collect` would return or raise at once."""
        ...

    def await_result(self, longest_s: float) -> bool:
        """Wait until :meth:`collect` would return or raise at once; return whether it would."""
        ...

    def collect(self) -> Tensor | None:
        """Return the scores ``[R, V]`` of the oldest step, ``None`` where no row has an output.

        Raises:
            StageError: a stage failed or hangs.
        """
        ...

    def check(self) -> None:
        """Look whether all stages still work, while no step is in flight.

        Raises:
            StageError: why one of them does not.
        """
        ...
