"""Applications of several models: described in a file, planned and simulated (SamuLLM)."""
