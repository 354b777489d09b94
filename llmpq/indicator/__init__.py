"""Indicators of a model's quality loss with one layer at fewer bits (LLM-PQ, Sec. 4.2).

Each indicator reads a checkpoint layer by layer and scores every layer at every bitwidth.
``sensitivity_table`` turns the scores into the table that the planner reads. The guide
``docs/how/quantization.md`` compares the indicators.
"""

from llmpq.indicator.base import Indicator, IndicatorInput, Random, sensitivity_table
from llmpq.indicator.divergence import Divergence
from llmpq.indicator.expert_use import expert_use
from llmpq.indicator.hessian import HessianEigenvalue
from llmpq.indicator.variance import Variance

INDICATORS: dict[str, Indicator] = {
    "divergence": Divergence(),
    "variance": Variance(),
    "hessian": HessianEigenvalue(),
    "random": Random(),
}
"""Indicators with default settings, by the method name in tables."""

__all__ = [
    "INDICATORS",
    "Divergence",
    "Indicator",
    "IndicatorInput",
    "Random",
    "Variance",
    "expert_use",
    "sensitivity_table",
]
