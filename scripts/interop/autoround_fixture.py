"""Write tests/models/fixtures/autoround: a tiny model quantized and saved by AutoRound.

Run in an environment of its own, on a CPU: pip install auto-round "transformers<5.18"; python
scripts/interop/autoround_fixture.py
"""

import shutil
import tempfile
from pathlib import Path

import torch
from auto_round import AutoRound
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

OUTPUT = Path(__file__).parents[2] / "tests" / "models" / "fixtures" / "autoround"
CONFIG = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=4,
    num_hidden_layers=2, vocab_size=128, max_position_embeddings=128, initializer_range=0.2,
    architectures=["LlamaForCausalLM"],
)  # fmt: skip
KEPT = ("k_proj", "down_proj")


class Tokenizer:
    """What AutoRound asks of a tokenizer while the texts are given as tokens."""

    def save_pretrained(self, *_args, **_options):
        return ()


def main():
    """Write two checkpoints, and what some of their weights are rounded to."""
    torch.manual_seed(0)
    samples = list(torch.randint(CONFIG.vocab_size, (8, 1, 32)))
    with tempfile.TemporaryDirectory() as source:
        LlamaForCausalLM(CONFIG).save_pretrained(source)
        for name, symmetric in (("symmetric", True), ("asymmetric", False)):
            shutil.rmtree(OUTPUT / name, ignore_errors=True)
            model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
            rounding = AutoRound(
                model, Tokenizer(), bits=4, group_size=32, sym=symmetric, iters=4, seqlen=32,
                nsamples=len(samples), batch_size=4, dataset=samples,
                layer_config={"model.layers.1.mlp.down_proj": {"bits": 16}},
            )  # fmt: skip
            rounded, _ = rounding.quantize()
            expected = {
                f"{name}.weight": part.weight.detach().float().clone()
                for name, part in rounded.named_modules()
                if name.endswith(KEPT)
            }
            made = Path(source) / name
            rounding.save_quantized(str(made), format="auto_round:auto_gptq")
            shutil.move(next(made.glob("**/config.json")).parent, OUTPUT / name)
            save_file(expected, OUTPUT / name / "expected.safetensors")


if __name__ == "__main__":
    main()
