"""The Triton kernels compile to machine code for GPUs this machine does not have.

The compiler and the assembler need no GPU; a kernel they refuse would only fail at a user's.
"""

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from llmpq.kernels.gpu import triton_kernels  # noqa: E402
from llmpq.kernels.gpu.triton_int import _tiles  # noqa: E402

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}
INTEGERS = {"M", "N", "K", "group_size", "size"}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compiled(kernel, architecture, pointers, constants, **options):
    """Compile with pointers and integers that are multiples of 16, as those of real models are."""
    signature, known, aligned = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            known[(index,)] = constants[name]
            continue
        signature[name] = "i32" if name in INTEGERS else pointers[name]
        aligned[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, known, aligned)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def product_pointers(name):
    names = ("x_ptr", "scales_ptr", "zeros_ptr", "bias_ptr", "y_ptr", "out_ptr")
    return {"codes_ptr": "*u8"} | dict.fromkeys(names, f"*{name}")


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("rows", [1, 64])
def test_products_compile_and_fit_shared_memory(architecture, bits, rows):
    tiles = _tiles(rows, bits, torch.float16)
    constants = {"STEPS": 4, "BITS": bits, "TILE_IN_GROUP": True, "IN_FLOAT32": False}
    constants |= {"BLOCK_M": tiles.rows, "BLOCK_N": tiles.outputs, "BLOCK_J": tiles.bytes}
    kernel = triton_kernels.vector_kernel if rows == 1 else triton_kernels.matrix_kernel
    made = compiled(
        kernel, architecture, product_pointers("fp16"), constants,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    assert made.metadata.shared <= SHARED_BYTES[architecture]
    assert len(made.asm["cubin"]) > 0
    if rows > 1 and architecture == 90:
        assert "wgmma" in made.asm["ptx"]


def test_the_weight_is_written_out_by_compiled_kernels():
    blocks = {"BLOCK_N": 16, "BLOCK_J": 128}
    constants = {"BITS": 3, "TILE_IN_GROUP": False, "zeros_ptr": None} | blocks
    pointers = product_pointers("bf16")
    made = compiled(triton_kernels.dequantize_kernel, 90, pointers, constants)
    assert len(made.asm["cubin"]) > 0
    pointers = {"words_ptr": "*i32", "affine_ptr": "*bf16", "out_ptr": "*bf16"}
    constants = {"INNER_TILES": 8, "BLOCK_N": 16, "BLOCK_K": 128}
    made = compiled(triton_kernels.read_int4pack_kernel, 90, pointers, constants)
    assert len(made.asm["cubin"]) > 0


def test_parts_are_summed_by_a_compiled_kernel():
    pointers = {"parts_ptr": "*fp32", "bias_ptr": "*bf16", "y_ptr": "*bf16"}
    constants = {"P": 4, "BLOCK": 1024}
    made = compiled(triton_kernels.sum_parts_kernel, 90, pointers, constants)
    assert len(made.asm["cubin"]) > 0
