"""Time and memory of loading a random model: its parts, the whole, and from the cache.

    OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 python benchmarks/loader.py [--rounds 3] [--json FILE]

Makes a bf16 Llama of about 550 M parameters in a temporary folder. Every trial is a process of its
own, trials are interleaved, and the table shows medians with their range. The files are dropped
from the page cache before each reading. One thread computes, as in a worker of one thread; in
``one_core`` the whole process runs on one core.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from llmpq.dist.launch.process_environment import tune_malloc_for_loading
from llmpq.kernels import choose_backend
from llmpq.models import Checkpoint
from llmpq.quant import QuantLinear, quantize, stored_bytes
from llmpq.quant.loading.loader import load_stage
from llmpq.quant.loading.weight_cache import WeightCache
from llmpq.quant.modules.layer import matrices_of
from llmpq.spec.precision import default_precision

DTYPE = torch.bfloat16
PARTS = ("read", "quantize", "place")
Figures = dict[str, float]


def main() -> int:
    """Measure and print."""
    options = _parse()
    if options.trial is not None:
        print(json.dumps(TRIALS[options.trial](options)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        options.folder = Path(folder)
        parameters = make_model(options.folder / "model", options)
        print(f"{parameters / 1e6:.0f} M parameters in {options.layers} layers")
        report = {str(bits): measure(bits, options) for bits in options.bits}
    for bits, found in report.items():
        print(table(int(bits), found))
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bits", type=int, nargs="+", default=[4])
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--trial", choices=sorted(TRIALS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def make_model(directory: Path, options: argparse.Namespace) -> int:
    """Write a random checkpoint, a shard for each layer; return its number of parameters."""
    directory.mkdir()
    config = LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 11 // 4,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64,
        num_key_value_heads=options.hidden // 64,
        vocab_size=8000,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    config.save_pretrained(directory)
    weight_map: dict[str, str] = {}
    seeded = torch.Generator().manual_seed(0)
    parameters = 0
    for file, shapes in _shards(config):
        tensors = {
            name: torch.empty(shape).normal_(0, 0.02, generator=seeded).to(DTYPE)
            for name, shape in shapes.items()
        }
        save_file(tensors, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        parameters += sum(tensor.numel() for tensor in tensors.values())
    index = {"metadata": {"total_size": 2 * parameters}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return parameters


def _shards(config: LlamaConfig) -> Iterator[tuple[str, dict[str, tuple[int, ...]]]]:
    hidden, features = config.hidden_size, config.intermediate_size
    ends = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    yield "ends.safetensors", ends | {"lm_head.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_hidden_layers):
        shapes: dict[str, tuple[int, ...]] = {
            **{f"self_attn.{name}_proj.weight": (hidden, hidden) for name in "qkvo"},
            "mlp.gate_proj.weight": (features, hidden),
            "mlp.up_proj.weight": (features, hidden),
            "mlp.down_proj.weight": (hidden, features),
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }
        prefix = f"model.layers.{layer}."
        yield (
            f"layer-{layer:03}.safetensors",
            {prefix + name: shape for name, shape in shapes.items()},
        )


def measure(bits: int, options: argparse.Namespace) -> dict[str, list[Figures]]:
    """Return the figures of every round, by trial."""
    found: dict[str, list[Figures]] = {name: [] for name in TRIALS}
    for _ in range(options.rounds):
        for name, figures in found.items():
            figures.append(tried(name, bits, options))
    return found


def tried(name: str, bits: int, options: argparse.Namespace) -> Figures:
    """Return the figures of a trial in a process of its own."""
    words = [sys.executable, __file__, "--trial", name, "--bits", str(bits)]
    words += [
        "--layers",
        str(options.layers),
        "--hidden",
        str(options.hidden),
        "--folder",
        str(options.folder),
    ]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def table(bits: int, found: Mapping[str, list[Figures]]) -> str:
    """Return the figures of one bitwidth as text."""
    lines = [f"{bits} bits"]
    for name, rounds in found.items():
        for key in rounds[0]:
            lines.append(_line(f"{name}: {key}", [figures[key] for figures in rounds]))
    loads, parts, stores = (found[name] for name in ("load", "parts", "store"))
    slowest = [max(one[key] for key in PARTS) for one in parts]
    over_slowest = [load["seconds"] / part for load, part in zip(loads, slowest, strict=True)]
    lines.append(_line("load / slowest part", over_slowest))
    over_second = [one["first_s"] / one["second_s"] for one in stores]
    lines.append(_line("first start / second start", over_second))
    return "\n".join(lines)


def _line(label: str, values: list[float]) -> str:
    spread = f"({min(values):.3f}-{max(values):.3f})"
    return f"  {label:<36}{statistics.median(values):8.3f} {spread}"


def _parts(options: argparse.Namespace) -> Figures:
    """Read, quantize and place everything, one after the other."""
    precision = default_precision(options.bits[0])
    checkpoint = Checkpoint(options.folder / "model")
    seconds = dict.fromkeys(PARTS, 0.0)
    drop_caches(options.folder)
    buffer = torch.empty(2 * 4 * options.hidden * options.hidden * 11 // 4, dtype=torch.uint8)

    def reused(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        return buffer[:nbytes].view(dtype).view(shape)

    for index in range(options.layers):
        sources = checkpoint.layer_sources(index)
        with _timed(seconds, "read"):
            for source in sources.values():
                checkpoint.tensors.load(source, reused)
    for index in range(options.layers):
        layer = checkpoint.empty_layer(index)
        matrices = matrices_of(layer) if precision.bits != 16 else []
        state = checkpoint.layer_state_dict(index)
        weights = [state.pop(matrix.key) for matrix in matrices]
        with _timed(seconds, "quantize"):
            packed = [quantize(weight, precision, DTYPE) for weight in weights]
        with _timed(seconds, "place"):
            layer.load_state_dict(state, strict=False, assign=True)
            for matrix, item in zip(matrices, packed, strict=True):
                shape = (matrix.out_features, matrix.in_features)
                kernel = choose_backend("cpu", precision, DTYPE, *shape)
                layer.set_submodule(matrix.module, QuantLinear(item, None, kernel))
    return seconds


class _timed:  # noqa: N801  reads as a word
    def __init__(self, seconds: Figures, name: str) -> None:
        self._seconds, self._name = seconds, name

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._name] += time.perf_counter() - self._start


def _load(options: argparse.Namespace) -> Figures:
    """Load without a cache; the peak is by how much the process grew."""
    bits = options.bits * options.layers
    layer_bytes = stored_bytes(_stage(options, [16]))
    drop_caches(options.folder)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = _status("VmRSS")
    start = time.perf_counter()
    stage = _stage(options, bits)
    seconds = time.perf_counter() - start
    grown, final = _status("VmHWM") - before, stored_bytes(stage)
    return {
        "seconds": seconds,
        "final_mib": final / 2**20,
        "peak_mib": grown / 2**20,
        "layers_above_final": (grown - final) / layer_bytes,
    }


def _one_core(options: argparse.Namespace) -> Figures:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    return {"seconds": _load(options)["seconds"]}


def _store(options: argparse.Namespace) -> Figures:
    """Load with an empty cache, from the cache on disk, and from its pages in memory."""
    bits = options.bits * options.layers
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        cache = WeightCache.opened(Path(folder) / "store", 2**40)
        seconds = []
        for is_cold in (True, True, False):
            if is_cold:
                drop_caches(options.folder)
            start = time.perf_counter()
            _stage(options, bits, cache)
            seconds.append(time.perf_counter() - start)
    return dict(zip(("first_s", "second_s", "cached_s"), seconds, strict=True))


def _stage(
    options: argparse.Namespace, bits: list[int], cache: WeightCache | None = None
) -> torch.nn.Module:
    model = options.folder / "model"
    return load_stage(model, 0, len(bits), bits, dtype=DTYPE, device="cpu", weight_cache=cache)


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def drop_caches(folder: Path) -> None:
    """Drop every weight file under ``folder`` from the page cache."""
    for path in folder.rglob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _warmed(trial: Callable[[argparse.Namespace], Figures]) -> Callable[..., Figures]:
    """Run a trial with a worker's memory settings, after loading one layer to warm up."""

    def run(options: argparse.Namespace) -> Figures:
        torch.set_num_threads(1)
        tune_malloc_for_loading()
        _stage(options, options.bits)
        return trial(options)

    return run


TRIALS = {
    "parts": _warmed(_parts),
    "load": _warmed(_load),
    "one_core": _warmed(_one_core),
    "store": _warmed(_store),
}


if __name__ == "__main__":
    sys.exit(main())
