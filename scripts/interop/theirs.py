"""gptqmodel's side of ``scripts/gptqmodel_interop``: quantize its cases and read ours.

Runs in gptqmodel's own environment and imports nothing of llmpq. For every checkpoint it leaves
``<case>.weights.safetensors`` (what every quantized weight means) and the same of its logits; for
what transformers itself loads, both again under ``<case>.transformers``.
"""

import json
import sys
from pathlib import Path

import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from gptqmodel.nn_modules.qlinear import BaseQuantLinear
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM


def main() -> None:
    work = Path(sys.argv[1])
    cases = json.loads((work / "cases.json").read_text())
    tokens = load_file(work / "tokens.safetensors")
    for name, fields in cases["theirs"].items():
        make(work / "source", work / name, fields, tokens["calibration"])
    for name in [*cases["theirs"], *cases["ours"]]:
        read(work, name, tokens["prompt"])
    through_transformers(work, [*cases["ours"], *cases["mixed"]], tokens["prompt"])


def make(source: Path, output: Path, fields: dict, calibration: torch.Tensor) -> None:
    samples = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in calibration.tolist()]
    model = GPTQModel.load(str(source), QuantizeConfig(**fields, device="cpu"))
    model.quantize(samples, batch_size=4)
    model.save(str(output))


def read(work: Path, name: str, prompt: torch.Tensor) -> None:
    # Its plain torch kernel takes no float32.
    model = GPTQModel.load(
        str(work / name), device="cpu", backend=BACKEND.GPTQ_TORCH, dtype=torch.float16
    ).model
    weights = {
        path: module.dequantize_weight().T.float().contiguous()
        for path, module in model.named_modules()
        if hasattr(module, "dequantize_weight")
    }
    save_file(weights, work / f"{name}.weights.safetensors")
    with torch.inference_mode():
        save_file({"logits": model(prompt).logits.float()}, work / f"{name}.logits.safetensors")


def through_transformers(work: Path, names: list[str], prompt: torch.Tensor) -> None:
    """Load ours with transformers itself, where its own requirements are met."""
    said = {}
    for name in names:
        try:
            model = AutoModelForCausalLM.from_pretrained(work / name, dtype=torch.float32)
            with torch.inference_mode():
                logits = model(prompt).logits.float()
            save_file({"logits": logits}, work / f"{name}.transformers.logits.safetensors")
            weights = {
                path: multiplied(module)
                for path, module in model.named_modules()
                if isinstance(module, BaseQuantLinear)
            }
            save_file(weights, work / f"{name}.transformers.weights.safetensors")
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    (work / "transformers.json").write_text(json.dumps(said))


@torch.inference_mode()
def multiplied(module: BaseQuantLinear) -> torch.Tensor:
    """Return the weight that an operator multiplies with, whatever its kernel keeps of it."""
    product = module(torch.eye(module.in_features))
    if module.bias is not None:
        product = product - module.bias
    return product.T.float().contiguous()


main()
