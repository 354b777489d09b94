"""Indicators: how much a model loses with one layer at fewer bits (LLM-PQ, Sec. 4.2).

All of them read a checkpoint layer by layer and give one table, ``llmpq.spec.tables``: the paper's
variance, its two rivals, and the divergence we measure. Which one to believe is measured in
``docs/how/quantization.md`` and shown in ``notebooks``.
"""

from llmpq.indicator.base import UNIT_BITS, Indicator, Progress, Scores, Subject
from llmpq.indicator.divergence import Divergence
from llmpq.indicator.hessian import HessianEigenvalue, top_eigenvalue
from llmpq.indicator.random import Random
from llmpq.indicator.table import monotone, normalise, sensitivity_table
from llmpq.indicator.variance import Variance

INDICATORS: dict[str, Indicator] = {
    "divergence": Divergence(),
    "variance": Variance(),
    "hessian": HessianEigenvalue(),
    "random": Random(),
}
"""Every indicator with its default settings, by the name that tables carry."""

__all__ = [
    "INDICATORS",
    "UNIT_BITS",
    "Divergence",
    "HessianEigenvalue",
    "Indicator",
    "Progress",
    "Random",
    "Scores",
    "Subject",
    "Variance",
    "monotone",
    "normalise",
    "sensitivity_table",
    "top_eigenvalue",
]
