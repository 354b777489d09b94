"""Importing this module keeps unused packages out of a worker.

transformers imports SciPy, where it is installed, for losses of object detectors, and scikit-learn
needs it: 36 MB of every worker. torch's compiler imports Triton, 80 MB, which only GPUs use.
Packages that are already loaded stay.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import torch

from llmpq.dist.model_listing import list_models_when_asked

UNUSED = ("scipy", "sklearn", *(() if torch.cuda.is_available() else ("triton",)))

for _name in UNUSED:
    # An import of the name now raises ImportError.
    sys.modules.setdefault(_name, None)  # type: ignore[arg-type]

_COMPILER = ("torch._dynamo", "torch._dynamo._trace_wrapped_higher_order_op")
_MARKS = ("allow_in_graph", "assume_constant_result", "disable", "TransformGetItemToIndex")
"""What torch and transformers apply to functions for the compiler."""


def import_transformers() -> None:
    """Import transformers' model code without what a worker never uses.

    transformers lists the names of all its models (see ``dist.model_listing``), marks functions for
    ``torch.compile`` and imports ``DTensor`` and accelerate. A worker uses none of them, and with
    them its imports take twice as long. While transformers is imported here, ``torch._dynamo`` is a
    module whose marks change nothing, and ``torch.distributed`` is not available; later imports
    find the real ones.

    For a process that only runs a rank. Where there is a CUDA device, only the lists are left out.
    """
    list_models_when_asked()
    if torch.cuda.is_available():
        return
    compiler: Any = ModuleType(_COMPILER[0])
    for mark in _MARKS:
        setattr(compiler, mark, _unchanged)
    absent = [name for name in _COMPILER if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent, compiler))
    sys.modules.setdefault("accelerate", None)  # type: ignore[arg-type]
    is_available = torch.distributed.is_available
    torch.distributed.is_available = lambda: False
    try:
        for name in ("modeling_utils", "masking_utils"):
            importlib.import_module(f"transformers.{name}")
    finally:
        torch.distributed.is_available = is_available
        for name in absent:
            del sys.modules[name]


def _unchanged(function: Any = None, *_: object, **__: object) -> Any:
    """Return the function that is marked, or this mark if it has only options."""
    return _unchanged if function is None else function
