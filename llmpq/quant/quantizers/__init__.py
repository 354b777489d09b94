"""Quantizers: round-to-nearest, GPTQ."""
