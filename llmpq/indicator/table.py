"""From an indicator's raw scores to the table that a planner reads.

Scores are made monotone (within a layer, more bits never score worse) and divided by what all
layers at 4 bits score together. The table says which model, text and method it comes from.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

from llmpq import __version__
from llmpq.errors import SpecError
from llmpq.indicator.base import UNIT_BITS, Scores, Subject
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.precision import default_precision
from llmpq.spec.sensitivity import (
    SHAPES_KEY,
    WEIGHTS_KEY,
    SensitivityTable,
    shapes_digest,
    weights_digest,
)

WEIGHTS_ONLY = "none: an estimate by the weights alone, G(X) = 1"


def sensitivity_table(
    subject: Subject, method: str, scores: Scores, notes: Mapping[str, str] | None = None
) -> SensitivityTable:
    """Make the table of an indicator's scores.

    Args:
        subject: what was scored.
        method: the indicator's name.
        scores: raw, as the indicator gave them.
        notes: more provenance, such as the command.

    Raises:
        SpecError: the scores are not finite, or all layers at 4 bits together score nothing.
    """
    model = load_model_dir(subject.model_dir)
    tokens = subject.calibration
    provenance = {
        "version": __version__,
        SHAPES_KEY: shapes_digest(model),
        WEIGHTS_KEY: weights_digest(subject.model_dir),
        "precisions": ", ".join(str(default_precision(width)) for width in subject.bits),
        "dtype": str(subject.dtype).removeprefix("torch."),
        "calibration": WEIGHTS_ONLY if tokens is None else tokens.source,
        **({} if tokens is None else {"calibration_sha256": tokens.digest}),
        **(notes or {}),
    }
    if method == "random":
        for key in ("precisions", "dtype", "calibration", "calibration_sha256"):
            provenance.pop(key, None)
    normalised = normalise(monotone(scores), str(subject.model_dir))
    return SensitivityTable(
        model=model.name,
        method=method,
        omega=tuple((width, normalised[width]) for width in sorted(normalised)),
        provenance=tuple(provenance.items()),
    )


def monotone(scores: Scores) -> dict[int, tuple[float, ...]]:
    """Raise scores so that within a layer fewer bits never score less than more bits do."""
    result: dict[int, tuple[float, ...]] = {}
    floor: tuple[float, ...] | None = None
    for width in sorted(scores, reverse=True):
        column = scores[width]
        floor = column if floor is None else tuple(map(max, column, floor))
        result[width] = floor
    return result


def normalise(scores: Scores, where: str) -> dict[int, tuple[float, ...]]:
    """Divide by the sum of the 4-bit column, so that "every layer at 4 bits" is 1.

    Raises:
        SpecError: a score is not finite, or the sum is not positive.
    """
    if not all(isfinite(value) for column in scores.values() for value in column):
        raise SpecError(
            f"{where}: found scores that are not finite, expected numbers; the weights or the "
            "activations overflow, perhaps: try --dtype float32"
        )
    unit = sum(scores[UNIT_BITS])
    if unit <= 0:
        raise SpecError(
            f"{where}: found no loss at all with every layer at {UNIT_BITS} bits, expected some; "
            "are all weights equal?"
        )
    return {width: tuple(value / unit for value in column) for width, column in scores.items()}
