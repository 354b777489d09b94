"""What every indicator is given, what it gives back, and how both are checked.

Shape legend: L layers, B bitwidths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from llmpq.calibration import CalibrationSet
from llmpq.errors import SpecError
from llmpq.quant.checkpoint.reader import is_gptq
from llmpq.spec.precision import BITS

Progress = Callable[[int, int, str], None]
"""Called with the work done, the work in all, in units of its own, and what was done."""

Scores = Mapping[int, tuple[float, ...]]
"""For every bitwidth one value a layer, in units of the indicator's own."""

UNIT_BITS = 4
"""Every layer at this many bits is the unit of degradation: it is always scored."""

BATCH_TOKENS = 512
"""Tokens of one forward pass: enough to keep a processor busy, few enough that activations stay
small compared with the weights of a layer.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Subject:
    """A model and what it is to be judged by.

    Attributes:
        model_dir: directory with ``config.json`` and safetensors weights, not quantized.
        calibration: tokens to run, ``None`` to go by the weights alone.
        bits: bitwidths below 16 to score; 4 is added when missing.
        dtype: what everything is computed in. At 8 bits a layer loses less than bfloat16 itself.
        device: where.
        batch_tokens: tokens of one forward pass, at most; at least one sequence.

    Raises:
        SpecError: no such bitwidth, or the checkpoint is quantized already.
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
        """Return the calibration tokens of an indicator that cannot do without.

        Raises:
            SpecError: there are none.
        """
        if self.calibration is None:
            raise SpecError(
                f"indicator {method}: expected a text to calibrate on; only variance and random "
                "go by the weights alone"
            )
        return self.calibration


class Indicator(Protocol):
    """A way to tell how much a model loses with one layer at fewer bits."""

    def score(self, subject: Subject, progress: Progress | None = None) -> Scores:
        """Score every layer at every bitwidth of ``subject``.

        Returns:
            Raw values, not negative; more is worse, 16 bits is 0 and not listed.

        Raises:
            SpecError: the model or the calibration text cannot be used.
        """
        ...
