"""Write tests/models/fixtures/modelopt: what NVIDIA's ModelOpt rounds and exports.

Run in an environment of its own, on a CPU: pip install nvidia-modelopt==0.47.0; python
scripts/interop/modelopt_fixture.py
"""

import shutil
from pathlib import Path

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

OUTPUT = Path(__file__).parents[2] / "tests" / "models" / "fixtures" / "modelopt"
CONFIG = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=4,
    num_hidden_layers=2, vocab_size=128, max_position_embeddings=128, initializer_range=0.2,
    architectures=["LlamaForCausalLM"],
)  # fmt: skip
KEPT = ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj")


def main():
    """Write a checkpoint in FP8 with weights before, and a matrix in NVFP4 with what it decodes to.

    Whole models are rounded to NVFP4 on GPUs alone; the library packs a matrix anywhere.
    """
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).bfloat16()
    samples = torch.randint(CONFIG.vocab_size, (4, 32))
    before = {f"{name}.weight": model.get_submodule(name).weight.detach().clone() for name in KEPT}
    mtq.quantize(model, mtq.FP8_DEFAULT_CFG, lambda quantized: quantized(samples))
    shutil.rmtree(OUTPUT, ignore_errors=True)
    export_hf_checkpoint(model, export_dir=str(OUTPUT / "fp8"))
    save_file(before, OUTPUT / "fp8" / "before.safetensors")

    weight = torch.randn(48, 64)
    packed, scales, overall = NVFP4QTensor.quantize(weight.clone(), 16)
    unpacked = packed.dequantize(
        dtype=torch.float32, scale=scales, double_scale=overall, block_sizes={-1: 16}
    )
    (OUTPUT / "nvfp4").mkdir()
    tensors = {
        "m.weight": packed._quantized_data,
        "m.weight_scale": scales,
        "m.weight_scale_2": overall,
        "norm.weight": torch.ones(4),
    }
    save_file(tensors, OUTPUT / "nvfp4" / "model.safetensors")
    save_file({"m.weight": unpacked}, OUTPUT / "nvfp4" / "expected.safetensors")


if __name__ == "__main__":
    main()
