"""The indicator interface, the random baseline, and the table made of the scores.

Shape legend: L layers, B bitwidths.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Protocol

import torch

from llmpq import __version__
from llmpq.calibration import CalibrationSet, LayerWalk
from llmpq.calibration.walk import Progress
from llmpq.errors import SpecError
from llmpq.models import load_config
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.huggingface.quantization import is_gptq
from llmpq.spec.precision import BITS, default_precision
from llmpq.spec.tables import (
    NATS_KEY,
    SHAPES_KEY,
    WEIGHTS_KEY,
    SensitivityTable,
    shapes_digest,
    weights_digest,
)

Scores = Mapping[int, tuple[float, ...]]
"""One value per layer for every bitwidth, in a unit of the indicator."""

UNIT_BITS = 4
"""Scores are normalised to all layers at this bitwidth, which is therefore always scored."""

WEIGHTS_ONLY = "none: an estimate by the weights alone, G(X) = 1"
"""Provenance of a table without calibration tokens."""

BATCH_TOKENS = 512
"""Tokens of one forward pass: activations stay small compared with the weights of a layer."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IndicatorInput:
    """A model to score and the settings of the scoring.

    Attributes:
        model_dir: directory with ``config.json`` and safetensors weights, not quantized.
        calibration: calibration tokens, ``None`` to use the weights alone.
        bits: bitwidths below 16 to score; 4 is added when missing.
        dtype: dtype of the computation. At 8 bits a layer loses less than bfloat16 rounding does.
        device: device of the computation.
        batch_tokens: maximum tokens of one forward pass; at least one sequence.

    Raises:
        SpecError: a bitwidth is unknown, or the checkpoint is quantized.
    """

    model_dir: Path
    calibration: CalibrationSet | None
    bits: tuple[int, ...] = (3, 4, 8)
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    batch_tokens: int = BATCH_TOKENS

    def __post_init__(self) -> None:
        allowed = sorted(set(BITS) - {16})
        if not set(self.bits) <= set(allowed):
            raise SpecError(f"bits: found {list(self.bits)}, expected some of {allowed}")
        if is_gptq(self.model_dir):
            raise SpecError(
                f"{self.model_dir}: found a quantized checkpoint, expected the one it was made of"
            )
        object.__setattr__(self, "bits", tuple(sorted({*self.bits, UNIT_BITS})))

    def tokens_for(self, method: str) -> CalibrationSet:
        """Return the calibration tokens, which the indicator ``method`` requires.

        Raises:
            SpecError: there are no calibration tokens.
        """
        if self.calibration is None:
            raise SpecError(
                f"indicator {method}: expected a text to calibrate on; only variance and random "
                "can use the weights alone"
            )
        return self.calibration

    def walk(self, method: str, progress: Progress | None) -> LayerWalk:
        """Return a walk over the layers; errors as :meth:`tokens_for`."""
        return LayerWalk(
            self.model_dir,
            self.tokens_for(method),
            dtype=self.dtype,
            device=self.device,
            batch_tokens=self.batch_tokens,
            progress=progress,
        )


class Indicator(Protocol):
    """Estimates the quality loss of a model with one layer at fewer bits."""

    def score(self, subject: IndicatorInput, progress: Progress | None = None) -> Scores:
        """Score every layer at every bitwidth of ``subject``.

        Returns:
            Raw values >= 0, higher is worse; 16 bits, which is 0, is not included.

        Raises:
            SpecError: the model or the calibration text cannot be used.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Random:
    """Random baseline: uniform draws, sorted within a layer (LLM-PQ, Sec. 6.5)."""

    seed: int = 0

    def score(self, subject: IndicatorInput, progress: Progress | None = None) -> Scores:
        """Draw one value for every layer and bitwidth."""
        count = load_config(subject.model_dir).num_hidden_layers
        generator = random.Random(self.seed)
        rows = [
            sorted((generator.random() for _ in subject.bits), reverse=True) for _ in range(count)
        ]
        if progress is not None:
            progress(count, count, "drawn")
        return {width: tuple(row[at] for row in rows) for at, width in enumerate(subject.bits)}


def sensitivity_table(
    subject: IndicatorInput,
    method: str,
    scores: Scores,
    notes: Mapping[str, str] | None = None,
    *,
    head: Mapping[int, float] | None = None,
) -> SensitivityTable:
    """Return the sensitivity table of an indicator's scores.

    Args:
        subject: the scored model.
        method: name of the indicator.
        scores: raw scores of the indicator.
        notes: additional provenance, such as the command.
        head: raw scores of the head by bitwidth, ``None`` if it was not scored.

    Raises:
        SpecError: a score is not finite, or the 4-bit scores sum to 0.
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
    unit = sum(monotone(scores)[UNIT_BITS])
    if method == "divergence":  # its scores are nats
        provenance[NATS_KEY] = f"{unit:.6g}"
    raised = monotone({} if head is None else {width: (value,) for width, value in head.items()})
    return SensitivityTable(
        model=model.name,
        method=method,
        omega=tuple((width, normalised[width]) for width in sorted(normalised)),
        head=tuple((width, raised[width][0] / unit) for width in sorted(raised)) or None,
        provenance=tuple(provenance.items()),
    )


def monotone(scores: Scores) -> dict[int, tuple[float, ...]]:
    """Raise scores so that fewer bits of a layer never score lower than more bits."""
    result: dict[int, tuple[float, ...]] = {}
    floor: tuple[float, ...] | None = None
    for width in sorted(scores, reverse=True):
        column = scores[width]
        floor = column if floor is None else tuple(map(max, column, floor))
        result[width] = floor
    return result


def normalise(scores: Scores, where: str) -> dict[int, tuple[float, ...]]:
    """Divide by the sum of the 4-bit scores, so that all layers at 4 bits score 1.

    Raises:
        SpecError: a score is not finite, or the sum is not positive.
    """
    if not all(isfinite(value) for column in scores.values() for value in column):
        raise SpecError(
            f"{where}: found scores that are not finite, expected numbers; the weights or the "
            "activations may overflow: try --dtype float32"
        )
    unit = sum(scores[UNIT_BITS])
    if unit <= 0:
        raise SpecError(
            f"{where}: found no loss at all with every layer at {UNIT_BITS} bits, expected some; "
            "are all weights equal?"
        )
    return {width: tuple(value / unit for value in column) for width, column in scores.items()}
