"""Evaluation: what fewer bits cost, as perplexity and as divergence from the 16-bit model.

Every way to run a model ends in the hidden states after its last layer, window by window: layer by
layer on one host (``stream``), with one layer changed at a time (``sweep``) or by the ranks of a
plan (``pipeline``). One scorer (``score``) turns two such runs into figures, so that figures differ
only where the models do.
"""

from llmpq.evals.pipeline import pipeline_hidden
from llmpq.evals.score import Quality, perplexity_and_kl
from llmpq.evals.stream import Layers, LayerSource, stream_hidden
from llmpq.evals.sweep import Sweep, sweep_layers
from llmpq.evals.windows import Windows, read_windows

__all__ = [
    "LayerSource",
    "Layers",
    "Quality",
    "Sweep",
    "Windows",
    "perplexity_and_kl",
    "pipeline_hidden",
    "read_windows",
    "stream_hidden",
    "sweep_layers",
]
