"""Others that run the same models on the same cores: llama.cpp, and transformers' own pipeline.

    python benchmarks/rivals.py --folder DIR --cpu_isa native avx2   # builds llama.cpp, 15 minutes
                                                                     # each, at low priority
llama.cpp comes as the source of the package ``llama-cpp-python``; it and the ``gguf`` package live
in an environment under the folder, each build in ``build-ISA``. Its models are random ones of the
same shapes, in bf16, f16, Q8_0, Q4_0 and Q3_K. Other benchmarks time it beside ours.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench import ISAS, NATIVE, unset_threading

PACKAGE = "llama-cpp-python==0.3.36"
BITS = {"16": "BF16", "8": "Q8_0", "4": "Q4_0", "3": "Q3_K"}
F16 = "f16"
FORMATS = {**BITS, F16: "F16"}
"""Formats by the name of a model's file: 16 bits are written in both."""
_AVX2 = tuple(f"GGML_{name}" for name in ("AVX", "AVX2", "FMA", "F16C", "BMI2"))
ISA_OPTIONS = {NATIVE: ("GGML_NATIVE",), "avx512": (*_AVX2, "GGML_AVX512"), "avx2": _AVX2}
"""Options of a build that are on. ``GGML_AVX512`` is F, BW, CD, DQ and VL alone."""
SIZES = ("layers", "hidden", "intermediate", "heads", "kv_heads", "vocab")
EPSILON = 1e-5
DEVIATION = 0.02
"""Of random weights."""
BLOCKS = {"Q8_0": (0, 73.9), "Q4_0": (0, 4.61), "Q3_K": (-2, 42.3)}
"""Where a block of a format has its scale, and the deviation of random codes at a scale of 1."""
AMX_AFTER = "#include <type_traits>\n"
AMX_INTRINSICS = """#include <immintrin.h>
#undef _tile_loadd_internal
#define _tile_loadd_internal(dst, base, stride) __asm__ volatile(\\
    "tileloadd (%0,%1,1), %%tmm" #dst ::"r"(base), "r"((long)(stride)) : "memory")
#define _tile_loadconfig(p) \\
    __asm__ volatile("ldtilecfg %0" ::"m"(*(const char(*)[64])(p)) : "memory")
"""
SERVER_CASE = "online"
"""Models of this case have a vocabulary, for ``llama-server``."""


def main() -> int:
    """Build, or be one of the processes that need other packages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--cpu_isa", nargs="+", choices=ISAS, default=[NATIVE], help="of builds")
    parser.add_argument("--gguf", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--rank", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.gguf:
        write_gguf(options.folder, *options.gguf)
    elif options.rank:
        be_a_rank(options.folder, *map(int, options.rank))
    else:
        for cpu_isa in options.cpu_isa:
            build(options.folder.absolute(), cpu_isa)
    return 0


def build(folder: Path, cpu_isa: str) -> None:
    """Compile llama.cpp's batched benchmark and its server for an instruction set.

    The native build has the RPC worker (``two_machines.py``) and the command that answers a prompt
    (``first_answer.py``) too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    python = folder / "venv" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
        subprocess.run(
            [python, "-m", "pip", "install", "-q", "gguf", "scikit-build-core"], check=True
        )
    wanted = [bench_of(folder, cpu_isa), server_of(folder, cpu_isa)]
    wanted += [worker_of(folder), command_of(folder)] * (cpu_isa == NATIVE)
    if all(made.exists() for made in wanted):
        return
    if not list(folder.glob("llama_cpp_python-*/vendor")):
        pip = [str(python), "-m", "pip", "download", "-q", "--no-deps", "--no-build-isolation"]
        subprocess.run([*pip, "--no-binary", ":all:", "-d", str(folder), PACKAGE], check=True)
        with tarfile.open(next(folder.glob("llama_cpp_python*.tar.gz"))) as archive:
            archive.extractall(folder, filter="data")
    source = next(folder.glob("llama_cpp_python-*/")) / "vendor" / "llama.cpp"
    off = ["LLAMA_CURL", "LLAMA_OPENSSL", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES"]
    on = [*ISA_OPTIONS[cpu_isa], *(["GGML_RPC"] if cpu_isa == NATIVE else [])]
    off += [] if cpu_isa == NATIVE else ["GGML_NATIVE"]
    words = ["-DCMAKE_BUILD_TYPE=Release", *(f"-D{name}=ON" for name in on)]
    words += [f"-D{name}=OFF" for name in off]
    made = build_of(folder, cpu_isa)
    keep_amx(source / "ggml" / "src" / "ggml-cpu" / "amx" / "mmq.cpp")
    subprocess.run(["cmake", "-S", str(source), "-B", str(made), *words], check=True)
    target = ["--target", *(one.name for one in wanted), "-j", "2"]
    subprocess.run(["nice", "-n", "19", "cmake", "--build", str(made), *target], check=True)


def keep_amx(source: Path) -> None:
    """Replace AMX's intrinsics in a source: with those of GCC 12 llama.cpp ends with a SIGSEGV.

    They say neither that a load reads memory nor that shapes have 64 bytes.
    """
    text = source.read_text()
    if "ldtilecfg" not in text:
        source.write_text(text.replace(AMX_AFTER, AMX_AFTER + AMX_INTRINSICS, 1))


def build_of(folder: Path, cpu_isa: str) -> Path:
    """Where llama.cpp is compiled for an instruction set."""
    return folder / f"build-{cpu_isa}"


def bench_of(folder: Path, cpu_isa: str = NATIVE) -> Path:
    """Where llama.cpp's benchmark is."""
    return build_of(folder, cpu_isa) / "bin" / "llama-batched-bench"


def server_of(folder: Path, cpu_isa: str = NATIVE) -> Path:
    """Where llama.cpp's server is."""
    return build_of(folder, cpu_isa) / "bin" / "llama-server"


def worker_of(folder: Path) -> Path:
    """Where llama.cpp's RPC worker is."""
    return build_of(folder, NATIVE) / "bin" / "ggml-rpc-server"


def command_of(folder: Path) -> Path:
    """Where llama.cpp's command is that answers a prompt."""
    return build_of(folder, NATIVE) / "bin" / "llama-completion"


def prepare(folder: Path, case: str, shape: Mapping[str, int]) -> None:
    """Write llama.cpp's models of a case, where ``gguf`` was installed.

    ``shape`` is that of ``workbench.make_model``.
    """
    python = folder / "venv" / "bin" / "python"
    if not python.exists():
        return
    for bits in FORMATS:
        if not gguf_of(folder, case, bits).exists():
            sizes = [str(shape[name]) for name in SIZES]
            words = ["--folder", str(folder), "--gguf", case, bits, *sizes]
            subprocess.run([str(python), __file__, *words], check=True)


def gguf_of(folder: Path, case: str, bits: str) -> Path:
    """Where a model of llama.cpp is, by a key of ``FORMATS``."""
    return folder / f"{case}-{bits}.gguf"


def write_gguf(folder: Path, case: str, bits: str, *sizes: str) -> None:
    """Write a random Llama in llama.cpp's format (runs where ``gguf`` is installed)."""
    import gguf  # noqa: PLC0415
    import numpy as np  # noqa: PLC0415

    layers, hidden, inner, heads, kv_heads, vocabulary = map(int, sizes)
    width = hidden // heads
    kind = gguf.GGMLQuantizationType[FORMATS[bits]]
    writer = gguf.GGUFWriter(str(gguf_of(folder, case, bits)), "llama")
    writer.add_block_count(layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(width)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_vocab_size(vocabulary)
    if case == SERVER_CASE:
        add_words(writer, gguf.TokenType, vocabulary)
    else:
        writer.add_tokenizer_model("no_vocab")
    chance = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
            return
        writer.add_tensor(name, random_blocks(kind, shape, chance), raw_dtype=kind)

    add("token_embd.weight", vocabulary, hidden)
    add("output_norm.weight", hidden)
    add("output.weight", vocabulary, hidden)
    for layer in range(layers):
        for name, *shape in (
            ("attn_norm", hidden),
            ("attn_q", hidden, hidden),
            ("attn_k", kv_heads * width, hidden),
            ("attn_v", kv_heads * width, hidden),
            ("attn_output", hidden, hidden),
            ("ffn_norm", hidden),
            ("ffn_gate", inner, hidden),
            ("ffn_up", inner, hidden),
            ("ffn_down", hidden, inner),
        ):
            add(f"blk.{layer}.{name}.weight", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_blocks(kind: Any, shape: tuple[int, ...], chance: Any) -> Any:
    """Return a random matrix in a format of llama.cpp, as bytes; few-bit ones as random codes."""
    import gguf  # noqa: PLC0415
    import numpy as np  # noqa: PLC0415

    if kind.name not in BLOCKS:
        values = chance.standard_normal(shape, np.float32) * np.float32(DEVIATION)
        return gguf.quants.quantize(values, kind)
    (count, size), (at, deviation) = gguf.GGML_QUANT_SIZES[kind], BLOCKS[kind.name]
    blocks = chance.integers(0, 256, (shape[0], shape[1] // count, size), np.uint8)
    blocks[..., at], blocks[..., at + 1] = np.array([DEVIATION / deviation], "<f2").view(np.uint8)
    return blocks.reshape(shape[0], -1)


def add_words(writer: Any, kinds: Any, vocabulary: int) -> None:
    """Add a vocabulary of words, which a server needs to read and write text.

    WordPiece (``bert``) takes whole words; a SentencePiece vocabulary would need all their parts.
    """
    controls = {
        0: ("[UNK]", kinds.UNKNOWN),
        1: ("[CLS]", kinds.CONTROL),
        2: ("[SEP]", kinds.CONTROL),
    }
    tokens = [controls.get(token, (f"\u2581w{token}", kinds.NORMAL)) for token in range(vocabulary)]
    writer.add_tokenizer_model("bert")
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_types([int(kind) for _, kind in tokens])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_sep_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)


def llama_cpp(  # noqa: PLR0913  what a run is, and how
    folder: Path, case: str, bits: str, rows: int, prompt: int, new: int, words: Sequence[str] = (),
    cpu_isa: str = NATIVE,
) -> dict[str, float]:  # fmt: skip
    """Time llama.cpp: seconds of prompts and answers, and of the answers alone.

    ``bits`` are a key of ``FORMATS``, ``words`` further options of its benchmark.
    """
    model = gguf_of(folder, case, bits)
    last = batched_bench(
        folder, model, (rows, rows), (prompt, new), words, cpu_isa=cpu_isa
    )[-1]  # fmt: skip
    return {"seconds": last["t_pp"] + last["t_tg"], "decode": last["t_tg"]}


def batched_bench(  # noqa: PLR0913  what a run is, and how
    folder: Path, model: Path, rows: Sequence[int], lengths: tuple[int, int],
    words: Sequence[str] = (), before: Sequence[str] = (), cpu_isa: str = NATIVE,
) -> list[dict[str, float]]:  # fmt: skip
    """Run llama.cpp's benchmark with each number of ``rows`` in turn; return its results.

    ``lengths`` are tokens of a prompt and new tokens, ``words`` further options, ``cpu_isa`` is
    that of the build. ``before`` stands before the command and says where it runs.
    """
    context = 2 * max(rows) * sum(lengths)
    prompt, new = map(str, lengths)
    threads = str(len(os.sched_getaffinity(0)))
    done = subprocess.run(
        [
            *before, str(bench_of(folder, cpu_isa)), "-m", str(model), "-c", str(context),
            "-b", "2048", "-ub", "512", "-npp", prompt, "-ntg", new,
            "-npl", ",".join(map(str, rows)), "-t", threads, "--output-format", "jsonl", *words,
        ],
        env=unset_threading(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        check=True,
    )  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def transformers_pipeline(model_dir: Path, shape: tuple[int, int, int]) -> dict[str, float]:
    """Time ``generate`` over transformers' own pipeline: two ranks of one thread, split evenly."""
    environment = {
        **unset_threading(), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29711", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    words = [sys.executable, __file__, "--folder", str(model_dir), "--rank", *map(str, shape)]
    ranks = [
        subprocess.Popen(
            words,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    return dict(json.loads(outputs[0].splitlines()[-1]))


def be_a_rank(model_dir: Path, batch: int, prompt: int, new: int) -> None:
    """Be one of the two; the first prints its seconds, the better of two after a warm-up."""
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415
    from transformers.distributed import DistributedConfig  # noqa: PLC0415

    torch.set_num_threads(1)
    core = int(os.environ["RANK"]) % len(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[core]})
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.bfloat16, distributed_config=DistributedConfig(pp_size=2)
    ).eval()
    ids = torch.arange(batch * prompt).view(batch, prompt) % model.config.vocab_size
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=new,
            max_new_tokens=new, pad_token_id=0,
        )  # fmt: skip
        seconds.append(time.perf_counter() - start)
    if os.environ["RANK"] == "0":
        print(json.dumps({"seconds": min(seconds[1:])}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
