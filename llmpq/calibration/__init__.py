"""Calibration: tokens through a model, one decoder layer at a time, and what its operators see.

``read_calibration`` makes token sequences of a text, ``LayerWalk`` runs them through a checkpoint
in the memory of one layer and the activations between two, ``Moments`` and ``Hessian`` are what is
kept of an operator's inputs.
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
