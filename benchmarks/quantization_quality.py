#!/usr/bin/env python3
"""Held-out perplexity of a model at every bitwidth and group size, rounded and with GPTQ.

    benchmarks/quantization_quality.py --model models/demo \
        --calibration models/demo/calibration.txt --text models/demo/heldout.txt --bits 4 3

Each line is one model made by ``llmpq.calibration.quantize`` (or rounded by ``llmpq.quant``, as a
plan's bitwidth is), dequantized and run by transformers in float32, so that no kernel's error is
included. With ``--results FILE`` an interrupted run continues where it stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from llmpq.calibration import read_calibration
from llmpq.calibration.quantize import QuantizeJob, quantize_checkpoint
from llmpq.models import Checkpoint
from llmpq.quant import quantize
from llmpq.quant.checkpoint.reader import GptqCheckpoint
from llmpq.quant.modules.layer import matrices_of
from llmpq.spec.precision import Precision, default_precision

WINDOW = 512


def main(argv: Sequence[str] | None = None) -> int:
    """Print one JSON line for every precision."""
    options = _parse(argv)
    windows = _windows(options)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    original = {name: value.clone() for name, value in model.state_dict().items()}
    results = _Results(options)
    base = results.perplexity("16 bits", lambda: perplexity(model, windows))
    results.print(precision="16 bits", perplexity=base, tokens=_scored(windows))

    def measure(precision: Precision) -> float:
        weights = _weights(Path(options.model), precision, options)
        model.load_state_dict(original | weights)
        return perplexity(model, windows)

    for bits in options.bits:
        lost: dict[str, float] = {}
        for precision in _precisions(bits, options):
            found = results.perplexity(str(precision), lambda: measure(precision))  # noqa: B023
            lost[precision.method] = found / base - 1
            line = {"precision": str(precision), "perplexity": found, "lost": found / base - 1}
            if precision.method == "gptq":
                line["of_rounding"] = lost["gptq"] / lost["rtn"]
            results.print(**line)
    return 0


class _Results:
    """The results, and those of an earlier run with the same text and settings.

    Args:
        options: of the command; ``results`` names the file that keeps the figures between runs.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._path: Path | None = options.results
        paths = (Path(options.model) / "model.safetensors", options.calibration, options.text)
        digests = [hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16] for path in paths]
        self._run = [*digests, options.sequences, options.max_windows]
        self._found: dict[str, float] = {}
        if self._path is not None and self._path.exists():
            records = [json.loads(line) for line in self._path.read_text().splitlines()]
            self._found = {
                r["precision"]: r["perplexity"] for r in records if r["run"] == self._run
            }

    def perplexity(self, precision: str, measure: Callable[[], float]) -> float:
        """Return the perplexity at ``precision``; measure it unless an earlier run did."""
        if precision not in self._found:
            self._found[precision] = measure()
            if self._path is not None:
                record = {"run": self._run, "precision": precision}
                with self._path.open("a") as stream:
                    stream.write(json.dumps(record | {"perplexity": self._found[precision]}) + "\n")
        return self._found[precision]

    def print(self, **line: object) -> None:
        """Print one line."""
        print(json.dumps(line), flush=True)


def perplexity(model: PreTrainedModel, windows: Sequence[Tensor]) -> float:
    """Return the perplexity over every token but the first of each window."""
    total = 0.0
    with torch.inference_mode():
        for rows in windows:
            scores = model(rows).logits[:, :-1].flatten(0, 1)
            total += F.cross_entropy(scores, rows[:, 1:].flatten(), reduction="sum").item()
    return math.exp(total / _scored(windows))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--bits", type=int, nargs="+", choices=(3, 4, 8), default=[8, 4, 3])
    parser.add_argument("--group_size", type=int, nargs="+", default=[128, 64, -1])
    parser.add_argument("--sequences", type=int, default=128, help="to calibrate with, of 512")
    parser.add_argument("--max_windows", type=int, help="of the text, to score")
    parser.add_argument("--results", type=Path, help="keeps each figure; a later run goes on here")
    return parser.parse_args(argv)


def _windows(options: argparse.Namespace) -> list[Tensor]:
    text = Path(options.text).read_text(encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(options.model, local_files_only=True)
    stream = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    full = stream[: len(stream) // WINDOW * WINDOW].view(-1, WINDOW)[: options.max_windows]
    windows = list(full.split(8))
    if options.max_windows is None and len(stream) % WINDOW > 1:
        windows.append(stream[len(stream) // WINDOW * WINDOW :][None])
    return windows


def _scored(windows: Sequence[Tensor]) -> int:
    return sum(rows[:, 1:].numel() for rows in windows)


def _precisions(bits: int, options: argparse.Namespace) -> Iterator[Precision]:
    default = default_precision(bits)
    groups = [None if size == -1 else size for size in options.group_size]
    for group in groups:
        for method in ("rtn", "gptq"):
            yield Precision(bits=bits, method=method, group_size=group, symmetric=default.symmetric)


def _weights(
    model_dir: Path, precision: Precision, options: argparse.Namespace
) -> dict[str, Tensor]:
    """Return every quantized weight, dequantized, by its name in the whole model."""
    if precision.method == "rtn":
        checkpoint = Checkpoint(model_dir)
        found = {}
        for index in range(checkpoint.config.num_hidden_layers):
            state = checkpoint.layer_state_dict(index)
            for matrix in matrices_of(checkpoint.empty_layer(index)):
                packed = quantize(state[matrix.key].float(), precision, torch.float32)
                name = checkpoint.layer_prefix(index) + matrix.key
                found[name] = packed.dequantize(torch.float32)
        return found
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "quantized"
        data = read_calibration(options.calibration, model_dir, num_sequences=options.sequences)
        layers = Checkpoint(model_dir).config.num_hidden_layers
        job = QuantizeJob(model_dir=model_dir, precisions=(precision,) * layers, calibration=data)
        quantize_checkpoint(job, output)
        source = GptqCheckpoint(output)
        found = {}
        for index in range(layers):
            for matrix in matrices_of(source.checkpoint.empty_layer(index)):
                packed = source.packed(index, matrix.name, torch.float32)
                assert packed is not None
                name = source.checkpoint.layer_prefix(index) + matrix.key
                found[name] = packed.dequantize(torch.float32)
        return found


if __name__ == "__main__":
    sys.exit(main())
