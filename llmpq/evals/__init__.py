"""Evaluation of quantized models: perplexity, and divergence from the 16-bit model.

A model runs layer by layer on one host (``stream``) or on the ranks of a plan (``pipeline``). Both
return the hidden states after the last layer, which ``score`` compares.
"""
