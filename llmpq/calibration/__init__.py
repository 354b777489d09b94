"""Calibration: run tokens through a model layer by layer and collect statistics of inputs.

``read_calibration`` makes token sequences from a text, ``LayerWalk`` runs them through a checkpoint
with one layer in memory, ``Moments`` and ``Hessian`` are statistics of an operator's inputs.
"""

from llmpq.calibration.data import CalibrationSet, read_calibration, synthetic_calibration
from llmpq.calibration.stats import Collector, Hessian, Moments
from llmpq.calibration.walk import LayerWalk, WalkedLayer

__all__ = [
    "CalibrationSet",
    "Collector",
    "Hessian",
    "LayerWalk",
    "Moments",
    "WalkedLayer",
    "read_calibration",
    "synthetic_calibration",
]
