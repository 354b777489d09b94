"""Evaluation of quantized models: perplexity, and divergence from the 16-bit model."""
