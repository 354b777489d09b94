"""Model files of Hugging Face: ``config.json`` and the GPTQ quantization settings."""
