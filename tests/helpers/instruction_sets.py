"""The compiled kernels of every instruction set that this machine can run."""

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from unittest import mock

import pytest

from llmpq.dist.engine import compiled_steps
from llmpq.kernels import registry
from llmpq.kernels.cpu import (
    dense,
    native,
    paged_attention,
    step,
    torch_kernels,
)
from llmpq.kernels.cpu.native import (
    FLAGS,
    WITH_BF16,
    WITH_VNNI,
    has_avx_vnni,
    instruction_set,
    library,
    load,
)

OWN = instruction_set()
IS_EMULATED = OWN == "avx512_bf16"
"""Whether AMX runs with its tiles in plain C (``csrc/amx_emulated.h``), as there are none here."""
RUNNABLE = [
    name
    for name in list(FLAGS)[0 if IS_EMULATED else list(FLAGS).index(OWN) :]
    if library() is not None and (name != "avx2_vnni" or has_avx_vnni())
]
"""The newest first; none without a compiler."""


def those(names: Iterable[str], what: str) -> list[object]:
    """Return instruction sets to parametrize a test with, or one skip that says what is missing."""
    found = list(names)
    return found or [pytest.param(None, marks=pytest.mark.skip(reason=f"found no {what}"))]


@cache
def _loaded(name: str) -> ctypes.CDLL:
    if name != "amx" or not IS_EMULATED:
        return load(name)
    with mock.patch.dict(FLAGS, amx=(*FLAGS["amx"], "-DEMULATES_AMX")):
        return load.__wrapped__(name)


@contextmanager
def using(name: str) -> Iterator[None]:
    """Let this process choose and run kernels as one that has instruction set ``name`` does."""
    loaded = _loaded(name)
    replaced = {
        "library": lambda: loaded,
        "instruction_set": lambda: name,
        "has_bf16_products": lambda: name in WITH_BF16,
        "has_u8_matmul": lambda: name in WITH_VNNI,
    }
    modules = (compiled_steps, dense, paged_attention, registry, step, torch_kernels)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(native, "library", replaced["library"]))
        for module in modules:
            for function, by in replaced.items():
                if hasattr(module, function):
                    stack.enter_context(mock.patch.object(module, function, by))
        yield
