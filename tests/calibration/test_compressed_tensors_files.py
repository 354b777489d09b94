"""Files of compressed-tensors hold what GPTQ files of the same job hold."""

import importlib.util
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from llmpq.calibration.quantize import QuantizeJob, quantize_checkpoint
from llmpq.errors import SpecError
from llmpq.models import Checkpoint
from llmpq.quant.checkpoint.reader import GptqCheckpoint
from llmpq.spec.precision import Precision, unquantized

torch.set_num_threads(1)

SHAPE = {"layers": 4, "hidden": 64, "intermediate": 96, "heads": 4, "kv_heads": 2}
MIXED = (
    Precision(bits=3, method="rtn", group_size=32, symmetric=True),
    Precision(bits=4, method="rtn", group_size=32),
    unquantized(),
    Precision(bits=8, method="rtn", group_size=None, symmetric=True),
)


def quantized(model_dir, output, kind):
    job = QuantizeJob(model_dir=model_dir, precisions=MIXED, format=kind)
    quantize_checkpoint(job, output)
    return output


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_weights_are_those_of_the_gptq_file(family, tiny_model, tmp_path):
    model_dir = tiny_model(family, seed=4, shape=SHAPE)
    stored = Checkpoint(quantized(model_dir, tmp_path / "ct", "compressed-tensors"))
    gptq = GptqCheckpoint(quantized(model_dir, tmp_path / "gptq", "gptq"))
    for index, precision in enumerate(MIXED):
        weights = stored.layer_state_dict(index)
        plain = Checkpoint(model_dir).layer_state_dict(index)
        for key in gptq.packed_keys(index):
            name = key.removesuffix(".weight")
            is_stack = weights[key].dim() == 3
            names = [f"{name}.{i}" for i in range(len(weights[key]))] if is_stack else [name]
            found = weights[key] if is_stack else weights[key][None]
            for one, weight in zip(names, found, strict=True):
                expected = gptq.packed(index, one, torch.float32).dequantize(torch.float32)
                assert torch.allclose(weight, expected, rtol=0, atol=1e-6), one
        others = plain.keys() - (gptq.packed_keys(index) if precision.bits != 16 else set())
        assert all(torch.equal(weights[key], plain[key]) for key in others)


def test_configuration_has_a_group_for_each_precision(tiny_model, tmp_path):
    out = quantized(tiny_model("llama", shape=SHAPE), tmp_path / "ct", "compressed-tensors")
    fields = json.loads((out / "config.json").read_text())["quantization_config"]
    groups = list(fields["config_groups"].values())
    assert [group["weights"]["num_bits"] for group in groups] == [3, 4, 8]
    assert [group["weights"]["strategy"] for group in groups] == ["group", "group", "channel"]
    assert groups[0]["targets"] == [r"re:.*\.layers\.(0)\..*"]
    assert fields["ignore"] == [
        "lm_head",
        r"re:.*\.(gate|router|shared_expert_gate)$",
        r"re:.*\.layers\.(2)\..*",
    ]


@pytest.mark.skipif(
    importlib.util.find_spec("compressed_tensors") is None, reason="needs compressed-tensors"
)
def test_transformers_loads_the_same_weights(tiny_model, tmp_path):
    # transformers 5.23 does not load packed zero points: symmetric codes only.
    precisions = tuple(replace(one, symmetric=True) for one in MIXED)
    model_dir, out = tiny_model("llama", seed=4, shape=SHAPE), tmp_path / "ct"
    work = QuantizeJob(model_dir=model_dir, precisions=precisions, format="compressed-tensors")
    quantize_checkpoint(work, out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokens = torch.arange(3, 23).view(2, 10)
    with torch.inference_mode():
        model(tokens)  # decompresses
    names = [name for name in load_file(out / "model.safetensors") if name.endswith("_packed")]
    stored = Checkpoint(out)
    for name in names:
        module = name.removesuffix(".weight_packed")
        expected = stored.tensors.load(stored.tensors.source(f"{module}.weight"))
        weight = model.get_submodule(module).weight
        assert torch.allclose(weight, expected, rtol=2**-8, atol=1e-6), module


def test_jobs_that_the_format_does_not_hold_are_refused(tiny_model, tmp_path):
    model_dir = tiny_model("llama", shape=SHAPE)
    odd = (Precision(bits=3, method="rtn", group_size=None),) * 4
    narrow = tiny_model("llama", shape=SHAPE | {"hidden": 48, "heads": 3, "kv_heads": 3})
    job = QuantizeJob(model_dir=narrow, precisions=odd, format="compressed-tensors")
    with pytest.raises(SpecError, match="fill words of 32 bits"):
        quantize_checkpoint(job, tmp_path / "narrow")
    plain = QuantizeJob(
        model_dir=model_dir, precisions=(unquantized(),) * 4, format="compressed-tensors"
    )
    with pytest.raises(SpecError, match="only layers of 16 bits"):
        quantize_checkpoint(plain, tmp_path / "plain")
