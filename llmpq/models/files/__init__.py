"""Model files: safetensors headers and tensors."""
