"""Decoder layers of transformers as the operators of a compiled step."""
