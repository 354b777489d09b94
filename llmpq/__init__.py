"""llmpq: plan and run large language models on heterogeneous devices."""

__version__ = "0.1.0"
