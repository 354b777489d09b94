"""Evaluation of quantized models: perplexity, and divergence from the 16-bit model.

A model runs layer by layer on one host (``stream``) or on the ranks of a plan (``pipeline``). Both
return the hidden states after the last layer, which ``score`` compares.
"""

from llmpq.evals.pipeline import pipeline_hidden
from llmpq.evals.score import Quality, perplexity_and_kl
from llmpq.evals.stream import LayerSource, stream_hidden
from llmpq.evals.windows import Windows, read_windows

__all__ = [
    "LayerSource",
    "Quality",
    "Windows",
    "perplexity_and_kl",
    "pipeline_hidden",
    "read_windows",
    "stream_hidden",
]
