"""GGUF files: header, metadata and the configuration that follows from them."""
