#!/usr/bin/env python3
"""What rounding activations to 8 bits costs a model, by the columns that share a scale.

    python benchmarks/activation_blocks.py --model models/demo --text models/demo/heldout.txt \
        --json FILE.json

Every linear operator of the layers gets its input rounded as ``cpu_packed_int8`` does, in float32,
so that no kernel's error is included. The loss is the Kullback-Leibler divergence from the model as
it is, a token. Weights are rounded to 4 bits, or exact with some channels of the normed hidden
states 30 times as large (and their weights 1/30): outliers as large models have them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer
from workbench import origin, text_of, write_results

from llmpq.quant import quantize
from llmpq.spec.precision import default_precision

BLOCKS = (None, 32, 64, 128, 256)
WINDOW, WINDOWS = 512, 12
OUTLIERS, TIMES = 4, 30.0
NORMS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
NOTE = (
    "Mean Kullback-Leibler divergence a token from the model as it is; 'exact': activations are "
    f"not rounded. Outliers: {OUTLIERS} channels {TIMES:g} times as large, weights exact."
)


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ids = AutoTokenizer.from_pretrained(options.model)(options.text.read_text("utf-8")).input_ids
    windows = torch.tensor(ids[: WINDOW * WINDOWS]).view(-1, WINDOW)
    plain = _scores(_model(options.model), windows)
    cases = {"4-bit weights": _round_weights, "outliers": _add_outliers}
    rows = []
    for name, change in cases.items():
        found = []
        for block in BLOCKS:
            model = _model(options.model)
            change(model)
            if block is not None:
                _round_inputs(model, block)
            found.append(_divergence(plain, _scores(model, windows)))
        rows.append([name, *(f"{one:.5f}" for one in found)])
    columns = ["model", *("exact" if block is None else f"{block} columns" for block in BLOCKS)]
    table = {"title": "Divergence", "note": NOTE, "columns": columns, "rows": rows}
    print(text_of(table))
    if options.json is not None:
        words = "python benchmarks/activation_blocks.py --model models/demo --text models/demo/..."
        write_results(options.json, {**origin("activations", words), "tables": [table]})
    return 0


def _model(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.inference_mode()
def _scores(model: Any, windows: Tensor) -> list[Tensor]:
    return [F.log_softmax(model(window[None]).logits[0], dim=-1) for window in windows]


def _divergence(plain: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    lost = [
        F.kl_div(q, p, log_target=True, reduction="batchmean")
        for p, q in zip(plain, found, strict=True)
    ]
    return float(torch.stack(lost).mean())


def _round_weights(model: Any) -> None:
    for part in model.model.layers.modules():
        if isinstance(part, nn.Linear):
            packed = quantize(part.weight.data, default_precision(4), torch.bfloat16)
            part.weight.data = packed.dequantize(torch.float32)


def _add_outliers(model: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    for layer in model.model.layers:
        for norm, linears in NORMS.items():
            channels = torch.randperm(model.config.hidden_size, generator=generator)[:OUTLIERS]
            layer.get_submodule(norm).weight.data[channels] *= TIMES
            for name in linears:
                layer.get_submodule(name).weight.data[:, channels] /= TIMES


def _round_inputs(model: Any, block: int) -> None:
    def rounded(_module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        x = inputs[0]
        width = block
        while x.shape[-1] % width:
            width //= 2
        blocks = x.view(*x.shape[:-1], -1, width)
        step = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
        return ((blocks / step).round_().mul_(step).view(x.shape),)

    for part in model.model.layers.modules():
        if isinstance(part, nn.Linear):
            part.register_forward_pre_hook(rounded)


if __name__ == "__main__":
    raise SystemExit(main())
