"""GPTQ checkpoints: read and write."""
