"""Safetensors without torch: which files hold a model's weights, and what their headers say."""
