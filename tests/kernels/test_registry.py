"""The choice of a backend follows the capability table."""

import pytest
import torch
from helpers.instruction_sets import RUNNABLE, using

from llmpq.errors import SpecError
from llmpq.kernels import BACKENDS, choose_backend
from llmpq.kernels.cpu.native import has_int8, has_u8_matmul, instruction_set, library
from llmpq.spec.precision import Precision, default_precision

HAS_U8 = has_u8_matmul()
COMPILED = "cpu_packed" if library() is not None else "reference"
HAS_INT8 = has_int8(instruction_set()) and library() is not None
PIECES = "cpu_packed_int8" if HAS_INT8 else COMPILED
WITHOUT_COMPILER = "cpu_int8" if HAS_U8 else "reference"
INT8 = "cpu_llm_int8" if HAS_INT8 else COMPILED if library() is not None else WITHOUT_COMPILER


@pytest.mark.parametrize(
    ("bits", "dtype", "expected"),
    [
        (4, torch.bfloat16, PIECES),
        (4, torch.float16, PIECES),
        (4, torch.float32, COMPILED),
        (3, torch.bfloat16, PIECES),
        (3, torch.float16, PIECES),
        (3, torch.float32, COMPILED),
        (8, torch.float32, COMPILED),
        (8, torch.bfloat16, INT8),
        (8, torch.float16, INT8),
    ],
)
def test_defaults_on_a_cpu(bits, dtype, expected):
    assert choose_backend("cpu", default_precision(bits), dtype, 1024, 1024).name == expected


@pytest.mark.parametrize("name", RUNNABLE)
def test_defaults_of_every_instruction_set(name):
    with using(name):
        for bits in (3, 4):
            pieces = "cpu_packed" if name == "baseline" else "cpu_packed_int8"
            for dtype, expected in ((torch.bfloat16, pieces), (torch.float32, "cpu_packed")):
                chosen = choose_backend("cpu", default_precision(bits), dtype, 1024, 1024)
                assert chosen.name == expected
        chosen = choose_backend("cpu", default_precision(8), torch.bfloat16, 1024, 1024)
        assert chosen.name == ("cpu_packed" if name == "baseline" else "cpu_llm_int8")
        chosen = choose_backend("cpu", default_precision(8), torch.float32, 1024, 1024)
        assert chosen.name == "cpu_packed"


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rounded_activations_can_be_asked_for_and_avoided(bits, dtype):
    if not HAS_INT8:
        pytest.skip("needs AVX2 and a C compiler")
    for name in ("cpu_packed", "cpu_packed_int8"):
        chosen = choose_backend("cpu", default_precision(bits), dtype, 64, 128, prefer=name)
        assert chosen.name == name


@pytest.mark.parametrize(
    ("bits", "dtype", "expected"),
    [
        (4, torch.bfloat16, "cpu_int4"),
        (4, torch.float16, "reference"),
        (4, torch.float32, "reference"),
        (3, torch.bfloat16, "reference"),
        (3, torch.float32, "reference"),
        (8, torch.float32, "reference"),
        (8, torch.bfloat16, WITHOUT_COMPILER),
        (8, torch.float16, WITHOUT_COMPILER),
    ],
)
def test_defaults_without_a_compiler(bits, dtype, expected, monkeypatch):
    monkeypatch.setattr("llmpq.kernels.registry.library", lambda: None)
    assert choose_backend("cpu", default_precision(bits), dtype, 1024, 1024).name == expected


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_shape_on_every_device_has_a_backend(bits, dtype):
    chosen = choose_backend("cuda", default_precision(bits), dtype, 37, 41)
    assert chosen.name == "reference"


@pytest.mark.parametrize(
    ("out_features", "in_features", "precision"),
    [
        (1000, 1024, Precision(bits=4)),
        (1024, 80, Precision(bits=4)),
        (1024, 1024, Precision(bits=4, group_size=16)),
    ],
)
def test_shapes_outside_the_rule_fall_back(out_features, in_features, precision):
    chosen = choose_backend("cpu", precision, torch.bfloat16, out_features, in_features)
    assert chosen.name == "reference"


def test_prefer_overrides_the_default_where_it_can():
    precision = default_precision(4)
    asked = choose_backend("cpu", precision, torch.bfloat16, 64, 128, prefer="cpu_int4")
    assert asked.name == "cpu_int4"
    odd_shape = choose_backend("cpu", precision, torch.bfloat16, 63, 128, prefer="cpu_int4")
    assert odd_shape.name == "reference"


def test_an_unknown_preference_names_the_known():
    with pytest.raises(SpecError, match=r"found 'fast'.*reference"):
        choose_backend("cpu", default_precision(4), torch.float32, 64, 64, prefer="fast")


def test_unpacked_precisions_have_no_backend():
    with pytest.raises(SpecError, match="no backend supports w16"):
        choose_backend("cpu", default_precision(16), torch.float32, 64, 64)


def test_the_table_has_one_row_a_backend():
    table = [backend.capability for backend in BACKENDS.values()]
    assert all(row.bits and row.dtypes and row.stored and row.cost for row in table)
