"""llmpq: plan and run large language models on heterogeneous devices.

::

    from llmpq import plan, Pipeline

    strategy = plan("path/to/model", cluster="cluster.json", batch=8, prompt=512, new=100)
    with Pipeline(strategy) as llm:
        print(llm.generate("Hello")[0].text)

``import llmpq`` loads the standard library only; the names of ``llmpq.api`` load on first use.
"""

from importlib import import_module as _import_module

__version__ = "0.2.0"
__all__ = [
    "AsyncEngine",
    "GenerationRequest",
    "Output",
    "OutputChunk",
    "Pipeline",
    "SamplingParams",
    "StructuredOutputsParams",
    "TokenOutput",
    "load_plan",
    "plan",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'llmpq' has no attribute '{name}'")
    return getattr(_import_module("llmpq.api"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
