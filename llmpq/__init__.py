"""llmpq: plan and run large language models on unlike devices."""

__version__ = "0.1.0"
