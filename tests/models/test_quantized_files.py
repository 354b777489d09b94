"""FP8, compressed-tensors, AWQ and MXFP4 weights are what their own libraries decode them to.

``*_fixture.py`` in ``scripts/interop`` make the fixtures.
"""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from llmpq.errors import SpecError
from llmpq.models import Checkpoint, tensor_files
from llmpq.models.tensor_files import AWQ_ORDER
from llmpq.models.weights import QuantizedFiles
from llmpq.quant.loading.loader import load_stage
from llmpq.quant.loading.master import load_master
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.huggingface.quantization import codes_config

torch.set_num_threads(1)

FIXTURES = Path(__file__).parent / "fixtures"
FIXTURE = FIXTURES / "compressed-tensors"
SHAPE = {"layers": 2, "hidden": 64, "intermediate": 160, "heads": 4, "kv_heads": 2}


def config_of(fields):
    return codes_config(fields, "config.json")


def files_of(folder, tensors, fields):
    save_file(
        {name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors"
    )
    return QuantizedFiles(folder, config_of(fields))


@pytest.mark.parametrize("block_weights", [1 << 21, 3 * 128])
def test_weights_are_those_of_compressed_tensors(block_weights, monkeypatch):
    monkeypatch.setattr(tensor_files, "BLOCK_WEIGHTS", block_weights)
    files = QuantizedFiles(
        FIXTURE, config_of(json.loads((FIXTURE / "quantization.json").read_text()))
    )
    expected = load_file(FIXTURE / "expected.safetensors")
    assert sorted(files.names) == sorted([*expected, "embedding"])
    for name, weight in expected.items():
        found = files.load(files.source(name))
        assert found.dtype == torch.float32
        assert torch.equal(found.half(), weight), name


@pytest.mark.parametrize("scale_format", ["float", "ue8m0"])
def test_fp8_matrices_that_transformers_writes_are_read_as_it_reads_them(scale_format, tmp_path):
    config = FineGrainedFP8Config(weight_block_size=(32, 48), scale_fmt=scale_format)
    writer = Fp8Quantize(SimpleNamespace(quantization_config=config))
    written = writer.convert({"m.weight": torch.randn(64, 96)})
    files = files_of(tmp_path, written | {"norm.weight": torch.ones(4)}, config.to_dict())
    stored = written["m.weight"], written["m.weight_scale_inv"]
    expected = Fp8Dequantize(None)._dequantize_one(*stored, torch.float32)
    assert torch.equal(files.load(files.source("m.weight")), expected)


def fp8_of(weight, block):
    """Codes and scales of a matrix in FP8, one scale a block; the last blocks may be smaller."""
    rows, columns = weight.shape
    height, width = block
    scales = torch.empty(-(-rows // height), -(-columns // width))
    codes = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    for i, j in itertools.product(range(scales.shape[0]), range(scales.shape[1])):
        part = (slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width))
        scales[i, j] = weight[part].abs().max() / 448
        codes[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
    return codes, scales


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_fp8_blocks_are_those_of_transformers(scale_dtype, tmp_path):
    codes, scales = fp8_of(torch.randn(64, 96), (32, 48))
    scales = scales.to(scale_dtype)
    tensors = {"m.weight": codes, "m.weight_scale_inv": scales, "norm.weight": torch.ones(4)}
    files = files_of(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [32, 48]})
    found = files.load(files.source("m.weight"))
    expected = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.float32)
    assert torch.equal(found, expected)


def test_ragged_blocks(tmp_path):
    weight = torch.randn(70, 100)
    codes, scales = fp8_of(weight, (32, 48))
    tensors = {"m.weight": codes, "m.weight_scale_inv": scales, "norm.weight": torch.ones(4)}
    files = files_of(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [32, 48]})
    found = files.load(files.source("m.weight"))
    spread = scales.repeat_interleave(32, 0)[:70].repeat_interleave(48, 1)[:, :100]
    assert torch.equal(found, codes.float() * spread)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_fp8_model_is_quantized_like_its_decoded_weights(family, tiny_model, tmp_path):
    """Read layer by layer, quantized to the plan's bits and counted as a plain model."""
    plain = tiny_model(family, seed=2, shape=SHAPE)
    quantized, twin = tmp_path / "fp8", tmp_path / "decoded"
    quantized.mkdir()
    twin.mkdir()
    tensors, weights = {}, {}
    for name, weight in load_file(plain / "model.safetensors").items():
        tensors[name] = weights[name] = weight
        if weight.dim() == 2 and "layers." in name and ".gate.weight" not in name:
            codes, scales = fp8_of(weight, (128, 128))
            tensors[name], tensors[f"{name}_scale_inv"] = codes, scales
            spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
            weights[name] = codes.float() * spread[: weight.shape[0], : weight.shape[1]]
    config = json.loads((plain / "config.json").read_text())
    (twin / "config.json").write_text(json.dumps(config))
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (quantized / "config.json").write_text(json.dumps(config))
    save_file(tensors, quantized / "model.safetensors")
    save_file(weights, twin / "model.safetensors")
    bits = [4, 16]
    assert torch.equal(logits(quantized, bits), logits(twin, bits))
    assert load_model_dir(quantized).layer_types == load_model_dir(plain).layer_types
    assert load_model_dir(quantized).stored == ()


def logits(model_dir, bits, tokens=None):
    tokens = torch.arange(3, 23).view(2, 10) if tokens is None else tokens
    stage = load_stage(model_dir, 0, 2, bits, dtype=torch.float32, device="cpu")
    master = load_master(model_dir, dtype=torch.float32, device="cpu")
    positions = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
    hidden = stage.run_whole(master.embed(tokens, positions))
    return master.logits(hidden.flatten(0, 1))


def test_weights_are_those_of_autoawq():
    tensors = Checkpoint(FIXTURES / "autoawq").tensors
    expected = load_file(FIXTURES / "autoawq" / "expected.safetensors")
    names = [name for name in expected if name.endswith("weight")]
    assert len(names) == 4
    for name in names:
        assert torch.equal(tensors.load(tensors.source(name)).half(), expected[name]), name


def test_logits_and_tokens_are_those_of_autoawq():
    folder = FIXTURES / "autoawq"
    expected = load_file(folder / "expected.safetensors")
    prompt = expected["logits"].shape[1]
    found = logits(folder, [16, 16], expected["tokens"])
    # AutoAWQ computed in float16.
    assert (found[:prompt] - expected["logits"][0]).abs().max() <= 1e-2 * found.abs().max()
    assert found.argmax(-1)[prompt - 1 : -1].tolist() == expected["tokens"][0, prompt:].tolist()


def test_awq_follows_its_order_of_codes(tmp_path):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (64, 24), generator=generator)  # [K, N]
    zeros = torch.randint(0, 16, (2, 24), generator=generator)
    scales = torch.rand(2, 24, generator=generator).half()
    tensors = {"m.qweight": awq_words(codes), "m.qzeros": awq_words(zeros), "m.scales": scales}
    files = files_of(tmp_path, tensors, {"quant_method": "awq", "bits": 4, "group_size": 32})
    expected = (codes - zeros.repeat_interleave(32, 0)) * scales.float().repeat_interleave(32, 0)
    assert torch.equal(files.load(files.source("m.weight")), expected.T)


def awq_words(codes):
    """AutoAWQ's WQLinear_GEMM.from_linear: eight outputs a word in the order 0 2 4 6 1 3 5 7."""
    words = torch.zeros(codes.shape[0], codes.shape[1] // 8, dtype=torch.int64)
    for place, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        words |= codes[:, column::8] << (4 * place)
        assert AWQ_ORDER[column] == place
    return words.to(torch.int32)


def test_mxfp4_experts_are_those_of_transformers(tmp_path):
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 24, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(120, 132, (3, 24, 2), generator=generator, dtype=torch.uint8)
    tensors = {"e.down_proj_blocks": blocks, "e.down_proj_scales": scales, "n": torch.ones(2)}
    files = files_of(tmp_path, tensors, {"quant_method": "mxfp4"})
    source = files.source("e.down_proj")
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert source.shape == tuple(expected.mT.shape) == (3, 24, 64)
    assert torch.equal(files.load(source), expected.mT)
    assert torch.equal(files.load(list(source.rows())[1]), expected[1].T)


def test_mxfp4_experts_are_those_of_triton_kernels():
    files = QuantizedFiles(FIXTURES / "mxfp4", config_of({"quant_method": "mxfp4"}))
    expected = load_file(FIXTURES / "mxfp4" / "expected.safetensors")["e.down_proj"]
    assert torch.equal(files.load(files.source("e.down_proj")), expected)


def test_mxfp4_model_runs_as_its_decoded_weights(tiny_model, tmp_path):
    plain = tiny_model("gpt_oss", shape=SHAPE)
    config = json.loads((plain / "config.json").read_text())
    tensors, weights = {}, {}
    generator = torch.Generator().manual_seed(0)
    for name, weight in load_file(plain / "model.safetensors").items():
        tensors[name] = weights[name] = weight
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, columns, rows = weight.shape
            shape = (experts, rows, columns // 32)
            blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(120, 124, shape, generator=generator, dtype=torch.uint8)
            del tensors[name]
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            expanded = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            weights[name] = expanded.contiguous()
    for folder, content in (("twin", weights), ("mxfp4", tensors)):
        (tmp_path / folder).mkdir()
        save_file(content, tmp_path / folder / "model.safetensors")
        (tmp_path / folder / "config.json").write_text(json.dumps(config))
        config["quantization_config"] = {"quant_method": "mxfp4"}
    found, expected = (logits(tmp_path / name, [16, 16]) for name in ("mxfp4", "twin"))
    assert torch.equal(found, expected)


GOOD = {
    "quant_method": "compressed-tensors",
    "config_groups": {"a": {"weights": {"num_bits": 4}, "format": "pack-quantized"}},
}


def rotated(*locations):
    """A configuration with Hadamard rotations at these places, as llm-compressor writes them."""
    applied = [{"location": one, "targets": ["re:.*down_proj$"]} for one in locations]
    group = {"type": "hadamard", "apply": applied}
    return GOOD | {"transform_config": {"config_groups": {"R": group}}}


def test_rotations_that_the_weights_already_have_are_read():
    plain = config_of(GOOD)
    assert config_of(rotated("weight_input", "weight_output")) == plain
    assert config_of(GOOD | {"transform_config": {}}) == plain


BAD = {"config_groups": {"a": {"weights": {"num_bits": 4}, "format": "marlin-24"}}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quant_method": "exl3"}, r"quant_method': found 'exl3', expected gptq, auto-round, fp8"),
        ({"quant_method": "awq", "bits": 3}, "quantization_config.bits"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "two sizes"),
        ({"quant_method": "compressed-tensors"}, "config_groups"),
        (
            {"quant_method": "compressed-tensors"} | BAD,
            r"config_groups.a.format': found 'marlin-24",
        ),
        (rotated("weight_output", "input"), r"transform_config.config_groups.R.*found 'input'"),
        (rotated("output"), "transform_config"),
        (GOOD | {"transform_config": {"config_groups": [1]}}, "an object of groups"),
    ],
)
def test_configuration_that_is_not_read(fields, message):
    with pytest.raises(SpecError, match=message):
        config_of(fields)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"m.weight": torch.zeros(4, 4, dtype=torch.int8)}, "codes without a scale"),
        (
            {"m.weight": torch.zeros(4, 4, dtype=torch.int8), "m.weight_scale": torch.ones(3, 1)},
            "found shape",
        ),
        (
            {
                "m.weight_packed": torch.zeros(4, 1, dtype=torch.int16),
                "m.weight_scale": torch.ones(4, 1),
            },
            "expected int32 words",
        ),
    ],
)
def test_tensors_that_do_not_fit(tensors, message, tmp_path):
    with pytest.raises(SpecError, match=message):
        files_of(tmp_path, tensors, {"quant_method": "fp8"})


def test_unknown_method_is_one_error(tiny_model, tmp_path):
    config = json.loads((tiny_model("llama") / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "exl3"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SpecError, match=r"found 'exl3', expected gptq"):
        Checkpoint(tmp_path)
