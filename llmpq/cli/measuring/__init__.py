"""The verbs of ``llmpq-profile``."""
