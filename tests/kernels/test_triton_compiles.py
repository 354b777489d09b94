"""The Triton kernels compile to machine code for GPUs this machine does not have.

The compiler and the assembler need no GPU; a kernel they refuse would only fail at a user's. What
they make of each is in ``benchmarks/results/gpu-kernels.json``, with a digest of what was compiled:
only ``scripts/lanes`` compiles again while neither kernels nor variants change.
"""

import json
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.gpu_checks import compiled

RECORD = json.loads(compiled.OUTPUT.read_text())


@pytest.fixture(scope="module")
def made():
    return compiled.compile_all()


@pytest.mark.slow
def test_every_kernel_compiles_without_spilling_for_every_architecture(made):
    assert compiled.failures(made) == []
    assert {(one.name, one.architecture) for one in made} == {
        (variant.name, architecture)
        for variant in compiled.variants()
        for architecture in compiled.ARCHITECTURES
    }


@pytest.mark.slow
def test_many_rows_are_multiplied_by_the_tensor_cores_of_each_architecture(made):
    found = {one.architecture: one.product for one in made if one.name.endswith("64 rows")}
    assert found == {80: "HMMA", 90: "HGMMA", 120: "HMMA"}


@pytest.mark.slow
@pytest.mark.skipif(
    RECORD["versions"]["triton"] != version("triton"), reason="recorded with another Triton"
)
def test_the_record_is_what_the_compiler_makes(made):
    """After a change of a kernel: ``python -m scripts.gpu_checks.compiled``."""
    assert [compiled.recorded(one) for one in made] == RECORD["kernels"]


def test_the_record_is_of_these_kernels():
    """After a change of a kernel: ``python -m scripts.gpu_checks.compiled``."""
    assert RECORD["inputs"] == compiled.inputs_digest()


def test_the_record_names_every_kernel():
    names = {variant.name for variant in compiled.variants()}
    assert {kernel["name"] for kernel in RECORD["kernels"]} == names
    assert {variant.kernel for variant in compiled.variants()} == {
        "matrix_kernel",
        "dequantize_kernel",
        "sum_parts_kernel",
        "read_int4pack_kernel",
        "convolve_kernel",
        "delta_kernel",
        "delta_gate_kernel",
        "mamba_kernel",
        "mamba_norm_kernel",
        "paged_decode_kernel",
        "join_splits_kernel",
        "add_norm_kernel",
        "gate_kernel",
        "rotate_store_kernel",
    }


@pytest.mark.parametrize(("bits", "most"), [(3, 9.5), (4, 6.0), (8, 6.5)])
def test_few_instructions_multiply_a_weight(bits, most):
    """Of decode steps; a row took 15 at 4 bits and 23 to 30 at 3 when every weight was scaled."""
    found = [
        kernel["per_weight"]
        for kernel in RECORD["kernels"]
        if kernel["name"] in (f"matrix {bits} bits, {form}, 16 rows" for form in ("groups", "rows"))
    ]
    assert len(found) == 2 * len(compiled.ARCHITECTURES)
    assert max(found) < most


def test_a_kernel_that_spills_or_takes_too_much_shared_memory_is_named():
    good = compiled.Made(
        name="sum of 4 parts", architecture=120, registers=40, spill_bytes=0, shared_bytes=0,
        product="", loop_instructions=0, per_weight=None, seconds=1.0,
    )  # fmt: skip
    assert compiled.failures([good]) == []
    assert compiled.failures([replace(good, spill_bytes=8)]) == [
        "sum of 4 parts on 120 spills 8 bytes, allowed 0"
    ]
    large = replace(good, shared_bytes=120 << 10)
    assert compiled.failures([replace(large, architecture=90)]) == []
    assert len(compiled.failures([large])) == 1


def test_the_inner_loop_is_the_shortest_backward_jump():
    code = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;   /* 0x00 */
        /*0010*/                   IADD3 R2, R2, 1 ;        /* 0x00 */
        /*0020*/                   FADD R3, R3, R4 ;        /* 0x00 */
        /*0030*/              @P0  BRA 0x20 ;               /* 0x00 */
        /*0040*/              @P1  BRA 0x10 ;               /* 0x00 */
        /*0050*/                   BRA 0x50 ;               /* 0x00 */
        /*0060*/              @!P2 BRA 0x70 ;               /* 0x00 */
    """
    assert compiled.inner_loop(code) == 2
    assert compiled.inner_loop("/*0000*/ EXIT ;") == 0
