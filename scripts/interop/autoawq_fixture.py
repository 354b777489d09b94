"""Write tests/models/fixtures/autoawq: a tiny model quantized, saved and run by AutoAWQ.

Run in an environment of its own, on a CPU: pip install autoawq==0.2.9 "transformers<4.52" datasets;
python scripts/interop/autoawq_fixture.py
"""

import tempfile
from pathlib import Path

import torch
from awq import AutoAWQForCausalLM
from awq.modules.linear import gemm
from awq.utils.packing_utils import dequantize_gemm
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

OUTPUT = Path(__file__).parents[2] / "tests" / "models" / "fixtures" / "autoawq"
CONFIG = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=4,
    num_hidden_layers=2, vocab_size=128, max_position_embeddings=128, initializer_range=0.2,
)  # fmt: skip
QUANT_CONFIG = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
KEPT = ("k_proj", "down_proj")
PROMPT, NEW_TOKENS = list(range(3, 15)), 12


def main():
    """Write the checkpoint, what some of its weights mean, and the library's logits and tokens."""
    gemm.TRITON_AVAILABLE = False  # its kernels need a GPU
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as source:
        LlamaForCausalLM(CONFIG).half().save_pretrained(source)
        model = AutoAWQForCausalLM.from_pretrained(source, device_map="cpu", use_cache=False)
    samples = torch.randint(CONFIG.vocab_size, (16, 64)).tolist()
    model.quantize(
        tokenizer=None, quant_config=QUANT_CONFIG, calib_data=samples, max_calib_seq_len=64
    )
    model.save_quantized(str(OUTPUT))
    quantized = model.model.eval()  # what is on the disk: from_quantized wants a GPU
    expected = {
        f"{name}.weight": dequantize_gemm(
            part.qweight, part.qzeros, part.scales, part.w_bit, part.group_size
        ).T.contiguous()
        for name, part in quantized.named_modules()
        if isinstance(part, gemm.WQLinear_GEMM) and name.endswith(KEPT)
    }
    tokens = torch.tensor([PROMPT])
    with torch.inference_mode():
        expected["logits"] = quantized(tokens).logits.float()
        expected["tokens"] = quantized.generate(
            tokens, max_new_tokens=NEW_TOKENS, do_sample=False, use_cache=True
        )
    save_file(expected, OUTPUT / "expected.safetensors")


if __name__ == "__main__":
    main()
