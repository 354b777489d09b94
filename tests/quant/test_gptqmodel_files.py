"""Checkpoints that gptqmodel made are read as gptqmodel reads them.

The fixtures come from ``scripts/gptqmodel_interop --fixtures tests/quant/fixtures``, which also
shows the other direction and more cases.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from llmpq.quant.checkpoint.reader import GptqCheckpoint
from llmpq.quant.loading.loader import load_stage
from llmpq.quant.loading.master import load_master

torch.set_num_threads(1)

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = ["gptqmodel-mixed", "gptqmodel-asymmetric"]


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_that_gptqmodel_reads(name):
    source, compared = GptqCheckpoint(FIXTURES / name), 0
    expected = load_file(FIXTURES / name / "expected.safetensors")
    for path, weight in expected.items():
        if not path.startswith("model.layers."):
            continue
        index, _, module = path.removeprefix("model.layers.").partition(".")
        found = source.packed(int(index), module, torch.float32)
        assert (found.dequantize(torch.float32) - weight.float()).abs().max() <= 1e-3
        compared += 1
    assert compared >= 6


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_gptqmodel(name):
    expected = load_file(FIXTURES / name / "expected.safetensors")
    prompt = expected["prompt"]
    stage = load_stage(FIXTURES / name, 0, 4, None, dtype=torch.float32, device="cpu")
    master = load_master(FIXTURES / name, dtype=torch.float32, device="cpu")
    rows, width = prompt.shape
    hidden = master.embed(prompt, torch.arange(width).expand(rows, -1))
    hidden = stage.run_whole(hidden)
    found = master.logits(hidden.flatten(0, 1)).view(rows, width, -1)
    # gptqmodel computed in float16.
    assert (found - expected["logits"]).abs().max() <= 1e-2 * found.abs().max()


def test_bits_follow_the_dynamic_rules():
    source = GptqCheckpoint(FIXTURES / "gptqmodel-mixed")
    assert [source.bits(index) for index in range(4)] == [4, 8, 3, 16]
    packed = source.packed(0, "mlp.down_proj", torch.float32)
    assert packed.order is not None
    assert str(packed.precision) == "w4-gptq-g32"
    assert str(source.packed(1, "mlp.down_proj", torch.float32).precision) == "w8-gptq-gc"
