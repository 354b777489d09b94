"""Symmetric files of 4 and 8 bits are what vLLM 0.33 reads: fields, names, shapes, rules.

vLLM itself needs a GPU; these tests check what its ``auto_gptq`` and ``gptq_utils`` check, and ask
its own configuration classes where it is installed.
"""

from __future__ import annotations

import importlib.util
import json
import re

import pytest
from safetensors.torch import load_file

from llmpq.calibration.quantize import QuantizeJob, quantize_checkpoint
from llmpq.spec.precision import Precision, unquantized

SHAPE = {"layers": 3, "hidden": 64, "intermediate": 128, "heads": 4, "kv_heads": 2}
FOUR = Precision(bits=4, method="rtn", group_size=32, symmetric=True)
EIGHT = Precision(bits=8, method="rtn", group_size=None, symmetric=True)
# Operators as vLLM names them: fused ones are looked up under their own names.
OPERATORS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")


@pytest.fixture
def stored(tiny_model, tmp_path):
    output = tmp_path / "gptq"
    job = QuantizeJob(
        model_dir=tiny_model("llama", seed=1, shape=SHAPE),
        precisions=(FOUR, EIGHT, unquantized()),
        calibration=None,
    )
    quantize_checkpoint(job, output)
    config = json.loads((output / "config.json").read_text())["quantization_config"]
    return config, load_file(output / "model.safetensors")


def overridden(config, prefix):
    """Fields of one operator; ``None`` where a rule leaves it out: vLLM's ``override_config``."""
    fields = {key: config[key] for key in ("bits", "group_size", "desc_act", "sym")}
    for text, fields_of_rule in config["dynamic"].items():
        if re.match(text[2:], prefix):
            return None if text.startswith("-:") else fields | fields_of_rule
    return fields


def test_every_operator_has_a_type_that_vllm_supports(stored):
    config, _ = stored
    assert (config["quant_method"], config["lm_head"]) == ("gptq", False)
    assert config["checkpoint_format"] == "gptq"
    for layer, expected in enumerate([(4, 32), (8, -1), None]):
        for operator in OPERATORS:
            found = overridden(config, f"model.layers.{layer}.{operator}")
            if expected is None:
                assert found is None
            else:
                assert (found["bits"], found["group_size"], found["sym"]) == (*expected, True)


def test_the_head_has_the_fields_that_vllm_looks_up(tiny_model, tmp_path):
    shape = {**SHAPE, "vocab": 104}
    job = QuantizeJob(
        model_dir=tiny_model("llama", seed=1, shape=shape), precisions=(FOUR,) * 3, head=EIGHT
    )
    quantize_checkpoint(job, tmp_path / "gptq")
    config = json.loads((tmp_path / "gptq" / "config.json").read_text())["quantization_config"]
    assert config["lm_head"] is True
    assert overridden(config, "lm_head")["bits"] == 8
    assert overridden(config, "model.layers.0.mlp.down_proj")["bits"] == 4
    codes = load_file(tmp_path / "gptq" / "model.safetensors")["lm_head.qweight"]
    assert tuple(codes.shape) == (64 // 4, 104)


def test_tensors_have_the_shapes_that_vllm_allocates(stored):
    _, tensors = stored
    for layer, (bits, groups) in enumerate([(4, 64 // 32), (8, 1)]):
        parts = {
            part: tensors[f"model.layers.{layer}.self_attn.k_proj.{part}"]
            for part in ("qweight", "qzeros", "scales", "g_idx")
        }  # K = 64 inputs, N = 32 outputs
        pack = 32 // bits
        assert tuple(parts["qweight"].shape) == (64 // pack, 32)
        assert tuple(parts["qzeros"].shape) == (groups, 32 // pack)
        assert tuple(parts["scales"].shape) == (groups, 32)
        assert tuple(parts["g_idx"].shape) == (64,)


def test_only_quantized_operators_have_tensors_that_are_not_floating(stored):
    _, tensors = stored
    owners = {name.rpartition(".")[0] for name, t in tensors.items() if not t.is_floating_point()}
    assert owners == {name.removesuffix(".qweight") for name in tensors if name.endswith("qweight")}
    assert not any(".layers.2." in name for name in owners)


THREE = Precision(bits=3, method="rtn", group_size=32, symmetric=True)
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm")


@pytest.fixture
def vllm_platform(monkeypatch):
    """Let a CUDA build of vLLM answer on a host without GPUs."""
    from vllm import platforms  # noqa: PLC0415
    from vllm.platforms.cpu import CpuPlatform  # noqa: PLC0415

    monkeypatch.setattr(platforms, "_current_platform", CpuPlatform())


@needs_vllm
def test_vllm_reads_the_bits_of_gptq_rules(stored, vllm_platform):
    from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig  # noqa: PLC0415
    from vllm.model_executor.layers.quantization.utils import gptq_utils  # noqa: PLC0415

    for layer, expected in enumerate([(4, 32), (8, -1), None]):
        for operator in OPERATORS:
            prefix = f"model.layers.{layer}.{operator}"
            found = AutoGPTQConfig.from_config(stored[0])
            if expected is None:
                assert gptq_utils.get_dynamic_override(found, prefix) is False
            else:
                gptq_utils.override_config(found, prefix)
                assert (found.weight_bits, found.group_size, found.is_sym) == (*expected, True)


@needs_vllm
@pytest.mark.parametrize("head", [None, EIGHT])
def test_vllm_reads_the_bits_of_compressed_tensors_groups(
    head, vllm_platform, tiny_model, tmp_path
):
    from torch.nn import Linear  # noqa: PLC0415
    from vllm.model_executor.layers.quantization.compressed_tensors import (  # noqa: PLC0415
        compressed_tensors,
    )

    job = QuantizeJob(
        model_dir=tiny_model("llama", seed=1, shape={**SHAPE, "vocab": 104, "layers": 4}),
        precisions=(THREE, FOUR, EIGHT, unquantized()),
        head=head,
        format="compressed-tensors",
    )
    quantize_checkpoint(job, tmp_path / "out")
    fields = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    read = compressed_tensors.CompressedTensorsConfig.from_config(fields)
    read.packed_modules_mapping = FUSED
    names = [f"model.layers.{layer}.{one}" for layer in range(4) for one in OPERATORS]
    expected = [one for one in ((3, 32), (4, 32), (8, -1), None) for _ in OPERATORS]
    for name, bits in zip(
        [*names, "lm_head"], [*expected, None if head is None else (8, -1)], strict=True
    ):
        found = read.get_scheme(Linear(2, 2), name)
        assert (None if found is None else (found.num_bits, found.group_size)) == bits, name
