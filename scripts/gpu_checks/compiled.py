"""Compile every Triton kernel for GPUs that this machine lacks, and record what the compiler made.

    python -m scripts.gpu_checks.compiled [--output FILE] [--only NAME ...]

The compiler and the assembler come with the triton package and need no GPU. Recorded for a kernel
and compute capability: registers of a thread, bytes spilled, shared memory of a program, and the
instructions of the inner loop (the shortest backward jump of the disassembly), in all and for each
weight. A kernel that spills more than its bound, or does not compile, fails the command.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from llmpq.kernels.base import PreparedWeight
from llmpq.kernels.gpu import triton_attention, triton_kernels, triton_recurrence, triton_rows
from llmpq.kernels.gpu.paged_decode import tiles_of
from llmpq.kernels.gpu.triton_int import TritonIntBackend, _tiles, segments
from llmpq.kernels.gpu.triton_mixers import BLOCK_CHANNELS, STATE_NUMBERS
from llmpq.spec.precision import Precision
from scripts.gpu_checks.harness import ROOT

OUTPUT = ROOT / "benchmarks" / "results" / "gpu-kernels.json"
ARCHITECTURES = (80, 90, 120)
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 120: 99 << 10}
"""Most shared memory of a program, by compute capability."""
MODULES = (triton_kernels, triton_recurrence, triton_attention, triton_rows)
INTEGERS = {"N", "K", "J", "group_size", "size", "C", "stride", "channels", "key_dim", "value_dim",
            "head_dim", "state_dim", "width", "normed", "query_head", "query_token", "table_stride",
            "block_stride", "head_stride", "value_block_stride", "value_head_stride",
            "scale_block_stride", "scale_head_stride", "columns", "made_row", "gate_row", "up_row",
            "query_row", "key_row", "key_head", "value_row", "value_head"}  # fmt: skip
"""Integers that are multiples of 16 in models as they are."""
COUNTS = {"heads", "share", "splits", "M", "steps", "parts", "part_stride", "up_parts",
          "up_part_stride", "query_parts", "query_part", "key_parts", "key_part", "value_parts",
          "value_part"}  # fmt: skip
"""Integers that may be any."""
FLOATS = {"scale", "epsilon", "least", "most", "scaling", "softcap", "factor", "inner_epsilon",
          "query_epsilon", "key_epsilon"}  # fmt: skip
_SCALES = ("key_scales_ptr", "value_scales_ptr")
ZEROS = "groups with zeros"
FORMS = ("groups", ZEROS, "rows")
"""Of scales: for 128 inputs each, alone or with zeros, or for all inputs of an output."""
SPILLED: Mapping[tuple[int, str, int], int] = {}
"""Bytes that a thread spills today, by bits, form and rows; all others have registers enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A kernel as the runtime launches it.

    Attributes:
        name: of the variant.
        kernel: function of one of ``MODULES``.
        pointers: type of each pointer.
        constants: arguments that are known when it is compiled.
        warps, stages: of the launch.
        loop_weights: weights that one turn of the inner loop multiplies; 0 where that says nothing.
        spill_bytes: most bytes that a thread may spill.
    """

    name: str
    kernel: str
    pointers: Mapping[str, str]
    constants: Mapping[str, object]
    warps: int = 4
    stages: int = 3
    loop_weights: int = 0
    spill_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What the compiler made of a variant.

    Attributes:
        name: of the variant.
        architecture: compute capability, 90 for 9.0.
        registers: of a thread.
        spill_bytes: stored and loaded again by a thread, for lack of registers.
        shared_bytes: of a program.
        product: instruction of the tensor cores, empty where there is none.
        loop_instructions: of a warp, in one turn of the inner loop.
        per_weight: instructions of the loop for each weight and thread.
        seconds: compiling took.
    """

    name: str
    architecture: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    product: str
    loop_instructions: int
    per_weight: float | None
    seconds: float


def variants() -> list[Variant]:
    """Return what a run with bfloat16 activations launches, one variant for each way."""
    found = []
    for bits in (3, 4, 8):
        for rows in (16, 64):
            for form in FORMS:
                tiles = _tiles(rows, _weight_of(bits, form), torch.bfloat16)
                # Parts of the inputs are summed in float32, and their bias is added afterwards.
                constants = {
                    "BITS": bits, "GROUP": 0 if form == "rows" else 128,
                    "TILE_IN_GROUP": True, "IN_FLOAT32": False,
                    "BLOCK_M": tiles.rows, "BLOCK_N": tiles.outputs, "BLOCK_J": tiles.bytes,
                    "bias_ptr": None,
                }  # fmt: skip
                if form != ZEROS:
                    constants["zeros_ptr"] = None
                found.append(
                    Variant(
                        name=f"matrix {bits} bits, {form}, {rows} rows",
                        kernel="matrix_kernel",
                        pointers=_product_pointers("fp32"),
                        constants=constants,
                        warps=tiles.warps,
                        stages=tiles.stages,
                        loop_weights=tiles.outputs * tiles.bytes * segments(bits),
                        spill_bytes=SPILLED.get((bits, form, rows), 0),
                    )
                )
        blocks = {"BITS": bits, "GROUP": 128, "BLOCK_N": 16, "BLOCK_J": 128}
        found.append(
            Variant(
                name=f"write out {bits} bits",
                kernel="dequantize_kernel",
                pointers=_product_pointers("bf16"),
                constants=blocks,
            )
        )
    found.append(
        Variant(
            name="sum of 4 parts",
            kernel="sum_parts_kernel",
            pointers={"parts_ptr": "*fp32", "bias_ptr": "*bf16", "y_ptr": "*bf16"},
            constants={"BLOCK": 1024},
        )
    )
    found.append(
        Variant(
            name="write out torch's 4 bits",
            kernel="read_int4pack_kernel",
            pointers={"words_ptr": "*i32", "affine_ptr": "*bf16", "out_ptr": "*bf16"},
            constants={"INNER_TILES": 8, "BLOCK_N": 16, "BLOCK_K": 128},
        )
    )
    return [*found, *_recurrences(), *_attention(), *_rows()]


def _weight_of(bits: int, form: str) -> PreparedWeight:
    """Return a weight without tensors, of which only the form counts."""
    group = None if form == "rows" else 128
    return PreparedWeight(
        backend=TritonIntBackend.name,
        out_features=4096,
        in_features=4096,
        precision=Precision(bits=bits, group_size=group, symmetric=form != ZEROS),
        tensors=(),
    )


def _attention() -> list[Variant]:
    """Return decode attention as models launch it, at both widths of keys and values.

    Those are Llama 3 and a model of as many key heads, Phi 2 (80 features), Gemma 2 (256, with a
    bound and a window), the layers of 512 features of Gemma 4, and a run in float32.
    """
    found = []
    for name, dim, group, dtype, more in (
        ("128 features, 4 heads a key", 128, 4, torch.bfloat16, {}),
        ("128 features, 1 head a key", 128, 1, torch.bfloat16, {}),
        ("80 features", 80, 1, torch.bfloat16, {}),
        ("256 features, bounded", 256, 2, torch.bfloat16, {"HAS_SOFTCAP": True, "WINDOW": 4096}),
        ("512 features", 512, 8, torch.bfloat16, {}),
        ("128 features in float32", 128, 4, torch.float32, {}),
    ):
        block = 1 << (dim - 1).bit_length()
        plain = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}[dtype]
        for kv_bits in (16, 8):
            keys, warps, stages = tiles_of(block, dtype, is_coded=kv_bits == 8)
            stored, scales = (plain, None) if kv_bits == 16 else ("*i8", "*bf16")
            found.append(
                Variant(
                    name=f"decode, {name}, {'8 bits' if kv_bits == 8 else 'as they are'}",
                    kernel="paged_decode_kernel",
                    pointers={
                        "query_ptr": plain, "keys_ptr": stored, "values_ptr": stored,
                        "tables_ptr": "*i32", "positions_ptr": "*i64", "parts_ptr": "*fp32",
                        "lse_ptr": "*fp32",
                    } | ({} if scales is None else dict.fromkeys(_SCALES, scales)),
                    constants={
                        "HEADS": 8 * group, "KEY_HEADS": 8, "HEAD_DIM": dim, "VALUE_DIM": dim,
                        "WINDOW": 0, "CHUNK": 0, "HAS_SOFTCAP": False, "ROUNDS": False,
                        "IN_FLOAT32": False, "BLOCK": 16, "BLOCK_G": 16, "BLOCK_D": block,
                        "BLOCK_E": block, "KEYS": keys, "slopes_ptr": None, "tokens_ptr": None,
                    } | more | ({} if scales is not None else dict.fromkeys(_SCALES)),
                    warps=warps,
                    stages=stages,
                    loop_weights=2 * keys * block,
                )
            )  # fmt: skip
    joined = {"HEADS": 32, "VALUE_DIM": 128, "BLOCK_S": 16, "BLOCK_E": 128}
    found.append(
        Variant(
            name="join of splits",
            kernel="join_splits_kernel",
            pointers={"parts_ptr": "*fp32", "lse_ptr": "*fp32", "out_ptr": "*bf16"},
            constants=joined | {"sinks_ptr": None, "tokens_ptr": None},
        )
    )
    return found


def _recurrences() -> list[Variant]:
    """Return what layers of Qwen3.5, LFM2 and Granite 4 launch."""
    floats = ("weight_ptr", "bias_ptr", "rate_ptr", "skip_ptr", "norm_ptr", "states_ptr", "raw_ptr",
              "convolved_ptr")  # fmt: skip
    halves = ("input_ptr", "factor_ptr", "gate_ptr", "beta_ptr", "decay_ptr", "dt_ptr", "out_ptr")
    pointers = dict.fromkeys(floats, "*fp32") | dict.fromkeys(halves, "*bf16")
    pointers["rows_ptr"] = "*i64"
    convolution = {"BLOCK_C": BLOCK_CHANNELS}
    before = convolution | {"KERNEL": 4, "IS_ACTIVATED": True, "factor_ptr": None, "gate_ptr": None}
    alone = convolution | {"KERNEL": 3, "IS_ACTIVATED": False, "bias_ptr": None}
    blocks = STATE_NUMBERS // 128
    return [
        Variant(name="convolution before", kernel="convolve_kernel",
                pointers=pointers | {"out_ptr": "*fp32"}, constants=before),
        Variant(name="convolution alone", kernel="convolve_kernel", pointers=pointers,
                constants=alone),
        Variant(name="gated delta rule", kernel="delta_kernel", pointers=pointers,
                constants={"BLOCK_D": 128, "BLOCK_E": blocks}),
        Variant(name="gated norm of heads", kernel="delta_gate_kernel", pointers=pointers,
                constants={"BLOCK_E": 128}),
        Variant(name="state space", kernel="mamba_kernel", pointers=pointers,
                constants={"BLOCK_P": blocks, "BLOCK_N": 128}),
        Variant(name="gated norm", kernel="mamba_norm_kernel", pointers=pointers,
                constants={"BLOCK": 8192}),
    ]  # fmt: skip


def _rows() -> list[Variant]:
    """Return what layers of Llama 3, Gemma 2 and Qwen3 launch between their products."""
    plain = ("hidden_ptr", "total_ptr", "out_ptr", "cos_ptr", "sin_ptr", "rotated_ptr",
             "new_keys_ptr", "new_values_ptr")  # fmt: skip
    norms = ("weight_ptr", "inner_weight_ptr", "query_weight_ptr", "key_weight_ptr")
    made = ("made_ptr", "gate_ptr", "up_ptr", "query_ptr", "key_ptr", "value_ptr")
    pointers = dict.fromkeys(plain, "*bf16") | dict.fromkeys((*norms, *made), "*fp32")
    pointers |= {"blocks_ptr": "*i64", "offsets_ptr": "*i64"}
    no_bias = dict.fromkeys(("made_bias_ptr", "inner_bias_ptr", "bias_ptr"))
    norm = {"C": 4096, "IS_SCALED": False, "INNER_CENTERS": False, "INNER_ROUNDS": False,
            "CENTERS": False, "ROUNDS": True, "BLOCK": 4096} | no_bias  # fmt: skip
    inner = norm | {"HAS_INNER": True}
    alone = norm | {"HAS_INNER": False, "inner_weight_ptr": None}
    heads = {
        "HEADS": 32, "KEY_HEADS": 8, "HEAD_DIM": 128, "VALUE_DIM": 128, "TURNED": 128, "TABLE": 128,
        "QUERY_ROUNDS": True, "KEY_ROUNDS": True, "IS_LATE": False, "BLOCK_D": 128, "BLOCK_E": 128,
    } | dict.fromkeys(("query_bias_ptr", "key_bias_ptr", "value_bias_ptr"))  # fmt: skip
    no_norms = dict.fromkeys(("query_weight_ptr", "key_weight_ptr"))
    stored = {"keys_ptr": "*bf16", "values_ptr": "*bf16"}
    codes = {"keys_ptr": "*i8", "values_ptr": "*i8"} | dict.fromkeys(_SCALES, "*bf16")
    return [
        Variant(name="sum and norm", kernel="add_norm_kernel", pointers=pointers, constants=alone,
                warps=8),
        Variant(name="norm, sum and norm", kernel="add_norm_kernel", pointers=pointers,
                constants=inner, warps=8),
        Variant(name="activation", kernel="gate_kernel", pointers=pointers,
                constants={"ACTIVATION": 0, "BLOCK": 1024, "gate_bias_ptr": None,
                           "up_bias_ptr": None}),
        Variant(name="rotation and store", kernel="rotate_store_kernel", pointers=pointers | stored,
                constants=heads | no_norms | dict.fromkeys(_SCALES), warps=1),
        Variant(name="norm, rotation and store as codes", kernel="rotate_store_kernel",
                pointers=pointers | codes, constants=heads, warps=1),
    ]  # fmt: skip


def _product_pointers(result: str) -> dict[str, str]:
    names = ("x_ptr", "scales_ptr", "zeros_ptr", "bias_ptr")
    both = {"y_ptr": f"*{result}", "out_ptr": f"*{result}"}
    return {"codes_ptr": "*u8"} | dict.fromkeys(names, "*bf16") | both


def compiled(variant: Variant, architecture: int) -> Made:
    """Compile a variant with pointers and integers that are multiples of 16, as in real models."""
    start = time.perf_counter()
    kernel = next(getattr(one, variant.kernel) for one in MODULES if hasattr(one, variant.kernel))
    signature, known, aligned = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in variant.constants:
            signature[name] = "constexpr"
            known[(index,)] = variant.constants[name]
            continue
        if name in FLOATS:
            signature[name] = "fp32"
            continue
        signature[name] = "i32" if name in INTEGERS | COUNTS else variant.pointers[name]
        if name not in COUNTS:
            aligned[(index,)] = [["tt.divisibility", 16]]
    try:
        made = triton.compile(
            ASTSource(kernel, signature, known, aligned),
            target=GPUTarget("cuda", architecture, 32),
            options={"num_warps": variant.warps, "num_stages": variant.stages},
        )
    except Exception as error:
        raise RuntimeError(f"{variant.name} on {architecture}: {error}") from error
    registers, spilled, code = _assembled(made.asm["cubin"])
    loop = inner_loop(code)
    threads = 32 * variant.warps
    return Made(
        name=variant.name,
        architecture=architecture,
        registers=registers,
        spill_bytes=spilled,
        shared_bytes=made.metadata.shared,
        product=_product(code),
        loop_instructions=loop,
        per_weight=round(loop * threads / variant.loop_weights, 2)
        if variant.loop_weights
        else None,
        seconds=round(time.perf_counter() - start, 1),
    )


def _assembled(cubin: bytes) -> tuple[int, int, str]:
    """Return the registers of a thread, the bytes it spills, and the disassembly."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (
            subprocess.run(command, capture_output=True, text=True, check=True).stdout
            for command in (
                [str(tools / "cuobjdump"), "--dump-resource-usage", file.name],
                [str(tools / "cuobjdump"), "-sass", file.name],
            )
        )
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return found["REG"], found["STACK"] + found["LOCAL"], code


def _product(code: str) -> str:
    found = re.search(r"\b([A-Z]*MMA)\b", code)
    return "" if found is None else found[1]


def inner_loop(code: str) -> int:
    """Return the instructions of the shortest loop of a disassembly; 0 where there is none.

    A loop ends with a jump to an earlier address; its instructions lie between the two.
    """
    addresses, jumps = [], []
    for line in code.splitlines():
        match = re.search(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", line)
        if match is None:
            continue
        address = int(match[1], 16)
        addresses.append(address)
        target = re.search(r"\bBRA(?:\.\S+)?\s+(?:\S+,\s*)*`?\(?(?:0x)?([0-9a-f]+)\)?", match[2])
        if target is not None and (goal := int(target[1], 16)) < address:
            jumps.append((goal, address))
    loops = [sum(first <= one <= last for one in addresses) for first, last in jumps]
    return min(loops, default=0)


def recorded(made: Made) -> dict[str, object]:
    """Return what is recorded: all but the seconds."""
    return {name: value for name, value in asdict(made).items() if name != "seconds"}


def inputs_digest() -> str:
    """Return the SHA-256 of what is compiled: the kernels' source and the variants."""
    source = "".join(Path(str(one.__file__)).read_text(encoding="utf-8") for one in MODULES)
    return hashlib.sha256(f"{source}{variants()}".encode()).hexdigest()


def failures(found: Sequence[Made]) -> list[str]:
    """Return what is wrong with what was made."""
    bounds = {variant.name: variant.spill_bytes for variant in variants()}
    wrong = []
    for made in found:
        where = f"{made.name} on {made.architecture}"
        if made.spill_bytes > bounds[made.name]:
            wrong.append(f"{where} spills {made.spill_bytes} bytes, allowed {bounds[made.name]}")
        if made.shared_bytes > SHARED_BYTES[made.architecture]:
            wrong.append(f"{where} takes {made.shared_bytes} bytes of shared memory")
    return wrong


def compile_all(only: Sequence[str] = ()) -> list[Made]:
    """Compile all variants for all architectures, in as many processes as there are cores."""
    jobs = [
        (variant, architecture)
        for variant in variants()
        if not only or variant.name in only
        for architecture in ARCHITECTURES
    ]
    with (
        tempfile.TemporaryDirectory(prefix="gpu-kernels-") as folder,
        ProcessPoolExecutor(
            len(os.sched_getaffinity(0)), initializer=_use_cache, initargs=(folder,)
        ) as pool,
    ):
        return list(pool.map(compiled, *zip(*jobs, strict=True)))


def _use_cache(folder: str) -> None:
    os.environ["TRITON_CACHE_DIR"] = folder
    os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"  # today's default, which is about to change


def main(argv: Sequence[str] | None = None) -> int:
    """Compile, write and print; 1 when something is wrong."""
    parser = argparse.ArgumentParser(
        prog="scripts.gpu_checks.compiled", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="FILE")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these variants")
    options = parser.parse_args(argv)
    found = compile_all(options.only)
    document = {
        "topic": OUTPUT.stem,
        "command": "python -m scripts.gpu_checks.compiled",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": "none: compiled without a GPU",
        "versions": {"triton": version("triton")},
        "inputs": inputs_digest(),
        "kernels": [recorded(made) for made in found],
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for made in found:
        print(
            f"{made.name:48} {made.architecture:4} {made.registers:4} registers "
            f"{made.spill_bytes:4} spilled {made.shared_bytes:7} shared "
            f"{made.loop_instructions:5} in the loop {made.per_weight or '-'} a weight"
        )
    wrong = failures(found)
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
