"""The plan side's laws of stored bytes against every kernel of the registry."""

import pytest
import torch

from llmpq.kernels import BACKENDS
from llmpq.quant import quantize
from llmpq.spec.precision import LAWS, Precision, stored_bytes

torch.set_num_threads(1)

PRECISIONS = [
    Precision(bits=bits, group_size=group, symmetric=symmetric)
    for bits in (3, 4, 8)
    for group in (None, 32, 64, 128)
    for symmetric in (True, False)
]
SHAPES = [(64, 128), (128, 256), (24, 100), (7, 33)]
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@pytest.mark.parametrize("name", BACKENDS)
def test_every_kernel_says_what_the_law_says(name):
    backend = BACKENDS[name]
    for precision in PRECISIONS:
        for dtype_name, dtype in DTYPES.items():
            for shape in SHAPES:
                devices = backend.capability.device_types or ("cpu",)
                if not any(backend.supports(d, precision, dtype, *shape) for d in devices):
                    continue
                found = backend.stored_bytes(precision, dtype, *shape)
                assert found == stored_bytes(name, precision, dtype_name, *shape)


@pytest.mark.parametrize("name", BACKENDS)
def test_every_kernel_holds_what_the_law_says(name):
    backend, held = BACKENDS[name], 0
    for precision in PRECISIONS:
        for dtype_name, dtype in DTYPES.items():
            for shape in SHAPES:
                if not backend.supports("cpu", precision, dtype, *shape):
                    continue
                packed = quantize(torch.randn(shape).to(dtype), precision, dtype)
                expected = stored_bytes(name, precision, dtype_name, *shape)
                assert backend.prepare(packed).nbytes == expected
                held += 1
    if name == "reference":  # the others may need a compiler, a processor or a device
        assert held == len(PRECISIONS) * len(DTYPES) * len(SHAPES)


def test_laws_are_of_kernels_there_are():
    assert set(LAWS) <= set(BACKENDS)
