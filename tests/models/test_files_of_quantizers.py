"""bitsandbytes, ModelOpt, NVFP4 and AutoRound: read as their own libraries read them.

``*_fixture.py`` in ``scripts/interop`` make the fixtures.
"""

import json
from pathlib import Path

import bitsandbytes
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from llmpq.errors import SpecError
from llmpq.models import Checkpoint
from llmpq.models.weights import QuantizedFiles
from llmpq.quant.checkpoint.reader import GptqCheckpoint
from llmpq.quant.loading.loader import load_stage
from llmpq.quant.loading.master import load_master
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.huggingface.quantization import codes_config, find_config, is_gptq

torch.set_num_threads(1)

FIXTURES = Path(__file__).parent / "fixtures"
SHAPE = {"layers": 2, "hidden": 64, "intermediate": 192, "heads": 4, "kv_heads": 2}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
FP4 = {
    "quant_method": "compressed-tensors",
    "config_groups": {"a": {"weights": {"num_bits": 4}, "format": "nvfp4-pack-quantized"}},
}


def files_of(folder, tensors, fields):
    stored = {name: value.contiguous() for name, value in tensors.items()}
    save_file(stored | {"norm.weight": torch.ones(4)}, folder / "model.safetensors")
    return QuantizedFiles(folder, codes_config(fields, "config.json"))


def logits(model_dir, tokens, bits=(16, 16)):
    stage = load_stage(model_dir, 0, 2, list(bits), dtype=torch.float32, device="cpu")
    master = load_master(model_dir, dtype=torch.float32, device="cpu")
    hidden = stage.run_whole(master.embed(tokens, torch.arange(tokens.shape[1]).expand(1, -1)))
    return master.logits(hidden.flatten(0, 1))


@settings(max_examples=30, deadline=None)
@given(
    kind=st.sampled_from(["nf4", "fp4"]),
    nested=st.booleans(),
    rows=st.integers(1, 70),
    columns=st.integers(1, 150),
    block=st.sampled_from([64, 128]),
    cut=st.tuples(st.integers(0, 69), st.integers(1, 70)),
)
def test_4_bits_are_those_of_bitsandbytes(
    tmp_path_factory, kind, nested, rows, columns, block, cut
):
    folder = tmp_path_factory.mktemp("bnb")
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    codes, state = quantize_4bit(
        weight, blocksize=block, quant_type=kind, compress_statistics=nested
    )
    parts = {f"m.weight.{name}": one for name, one in state.as_dict(packed=True).items()}
    files = files_of(folder, {"m.weight": codes} | parts, BNB)
    source = files.source("m.weight")
    assert sorted(files.names) == ["m.weight", "norm.weight"]
    assert source.shape == (rows, columns)
    found = files.load(source)
    if columns % block == 0:
        torch.testing.assert_close(found, dequantize_4bit(codes, state), rtol=2e-7, atol=0)
    # Of other rows, bitsandbytes 0.50 decodes some with a neighbour's scale on CPUs. Levels are at
    # most a third of the largest weight apart.
    padded = torch.nn.functional.pad(weight.view(-1), (0, -rows * columns % block))
    largest = padded.view(-1, block).abs().amax(1).repeat_interleave(block)[: rows * columns]
    assert ((found - weight).abs().view(-1) <= 0.2 * largest).all()
    first, end = min(cut[0], rows - 1), min(max(cut), rows)
    if first < end:
        part = files.load(source.block(first, end))
        assert torch.equal(part, files.load(source)[first:end])


@pytest.mark.parametrize(
    "options",
    [
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
        {"load_in_8bit": True},
    ],
    ids=["nf4", "fp4", "int8"],
)
def test_model_that_transformers_saves_with_bitsandbytes(options, tiny_model, tmp_path):
    plain = tiny_model("llama", seed=3, shape=SHAPE)
    config = BitsAndBytesConfig(bnb_4bit_compute_dtype=torch.float32, **options)
    model = AutoModelForCausalLM.from_pretrained(
        plain, quantization_config=config, dtype=torch.float32, device_map="cpu"
    )
    model.save_pretrained(tmp_path)
    names = [name for name, part in model.named_modules() if hasattr(part, "quant_state")
             or isinstance(part, bitsandbytes.nn.Linear8bitLt)]  # fmt: skip
    assert len(names) == 14
    tensors = Checkpoint(tmp_path).tensors
    decoded = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    for name in names:
        part = model.get_submodule(name)
        if isinstance(part, bitsandbytes.nn.Linear8bitLt):
            expected = part.weight.data.float() * part.weight.SCB[:, None] / 127
        else:
            expected = dequantize_4bit(part.weight.data, part.weight.quant_state)
        found = tensors.load(tensors.source(f"{name}.weight"))
        torch.testing.assert_close(found, expected, rtol=3e-7, atol=0)
        decoded.get_submodule(name).weight.data.copy_(expected)
    tokens = torch.arange(3, 15)[None]
    with torch.inference_mode():
        expected = decoded(tokens).logits[0]
    assert (logits(tmp_path, tokens) - expected).abs().max() <= 1e-4
    assert load_model_dir(tmp_path).layer_types == load_model_dir(plain).layer_types
    assert logits(tmp_path, tokens, bits=(4, 8)).isfinite().all()


def fp4_tensors(overall, group, scale_dtype, generator):
    """Codes, scales and the matrix that they stand for, by compressed-tensors' unpacking."""
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    numbers = table[torch.randint(0, 8, (12, 96), generator=generator)]
    numbers *= torch.randint(0, 2, numbers.shape, generator=generator) * 2 - 1
    packed = pack_fp4_to_uint8(numbers)
    exponents = torch.randint(118, 130, (12, 96 // group), generator=generator, dtype=torch.uint8)
    if scale_dtype == torch.uint8:
        scales, stored = torch.exp2(exponents.float() - 127), exponents
    else:
        stored = torch.rand(12, 96 // group, generator=generator).to(scale_dtype)
        scales = stored.float()
    unpacked = unpack_fp4_from_uint8(packed, 12, 96, torch.float32)
    return packed, stored, unpacked * (scales * overall).repeat_interleave(group, 1)


def test_nvfp4_and_mxfp4_of_compressed_tensors(tmp_path):
    generator = torch.Generator().manual_seed(0)
    packed, scales, expected = fp4_tensors(1 / 64.0, 16, torch.float8_e4m3fn, generator)
    names = ("m.weight_packed", "m.weight_scale", "m.weight_global_scale")
    tensors = dict(zip(names, (packed, scales, torch.tensor([64.0])), strict=True))
    files = files_of(tmp_path, tensors | {"m.input_global_scale": torch.ones(1)}, FP4)
    assert sorted(files.names) == ["m.weight", "norm.weight"]
    assert torch.equal(files.load(files.source("m.weight")), expected)

    packed, scales, expected = fp4_tensors(1.0, 32, torch.uint8, generator)
    files = files_of(tmp_path, {"m.weight_packed": packed, "m.weight_scale": scales}, FP4)
    assert torch.equal(files.load(files.source("m.weight")), expected)


def test_nvfp4_of_modelopt(tmp_path):
    generator = torch.Generator().manual_seed(1)
    packed, scales, expected = fp4_tensors(0.125, 16, torch.float8_e4m3fn, generator)
    tensors = {
        "m.weight": packed,
        "m.weight_scale": scales,
        "m.weight_scale_2": torch.tensor(0.125),
        "m.input_scale": torch.ones(()),
        "a.k_scale": torch.ones(()),
    }
    files = files_of(tmp_path, tensors, MODELOPT)
    assert sorted(files.names) == ["m.weight", "norm.weight"]
    assert torch.equal(files.load(files.source("m.weight")), expected)


@pytest.mark.parametrize("shape", [(), (6,), (2, 1, 3, 1)])
def test_fp8_of_modelopt(shape, tmp_path):
    """A scale of the matrix, of every output, or of blocks of 3 by 8 weights."""
    codes = torch.randn(6, 24).to(torch.float8_e4m3fn)
    scales = torch.rand(shape) + 0.5
    tensors = {"m.weight": codes, "m.weight_scale": scales, "m.input_scale": torch.ones(())}
    fields = MODELOPT | {"quant_algo": "FP8_PB_WO" if len(shape) == 4 else "FP8"}
    if len(shape) == 4:
        fields |= {"weight_block_size": [3, 8]}
        spread = scales.squeeze().repeat_interleave(3, 0).repeat_interleave(8, 1)
    else:
        spread = scales.view(-1, 1)
    files = files_of(tmp_path, tensors, fields)
    assert torch.equal(files.load(files.source("m.weight")), codes.float() * spread)


def test_modelopt_says_its_format_in_a_file_of_its_own(tiny_model, tmp_path):
    (tmp_path / "config.json").write_bytes((tiny_model("llama") / "config.json").read_bytes())
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    assert find_config(tmp_path) == {"quant_algo": "FP8", "quant_method": "modelopt"}
    said["quantization"]["quant_algo"] = "W4A8_AWQ"
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    with pytest.raises(SpecError, match=r"quant_algo': found 'W4A8_AWQ', expected one of FP8"):
        is_gptq(tmp_path)


def mixture(**algorithms):
    modules = {name: {"quant_algo": one} for name, one in algorithms.items()}
    return {**MODELOPT, "quant_algo": "MIXED_PRECISION", "quantized_layers": modules}


def test_every_module_of_a_mixture_of_modelopt_is_checked():
    assert codes_config(mixture(a="FP8", b="NVFP4"), "config.json") is not None
    with pytest.raises(SpecError, match=r"quantized_layers': found 'W4A8_AWQ', expected one of"):
        codes_config(mixture(a="FP8", b="W4A8_AWQ"), "config.json")
    with pytest.raises(SpecError, match="expected an object of modules"):
        codes_config({**MODELOPT, "quant_algo": "MIXED_PRECISION"}, "config.json")


def test_nvfp4_weights_are_those_that_modelopt_decodes():
    folder = FIXTURES / "modelopt" / "nvfp4"
    files = QuantizedFiles(folder, codes_config(MODELOPT, "config.json"))
    expected = load_file(folder / "expected.safetensors")["m.weight"]
    assert torch.equal(files.load(files.source("m.weight")), expected)


def test_fp8_weights_of_modelopt_are_those_before_but_for_rounding():
    tensors = Checkpoint(FIXTURES / "modelopt" / "fp8").tensors
    before = load_file(FIXTURES / "modelopt" / "fp8" / "before.safetensors")
    assert len(before) == 2
    for name, stored in before.items():
        found, weight = tensors.load(tensors.source(name)), stored.float()
        # Three bits after the first, in bfloat16's arithmetic; subnormal codes are 2^-9 apart.
        step = weight.abs().max() / 448 * 2**-9
        torch.testing.assert_close(found, weight, rtol=2**-4 + 2**-8, atol=float(step))


def test_model_of_modelopt_runs():
    folder = FIXTURES / "modelopt" / "fp8"
    assert load_model_dir(folder).dtype == "bfloat16"
    assert logits(folder, torch.arange(3, 15)[None], bits=(4, 16)).isfinite().all()


@pytest.mark.parametrize("name", ["symmetric", "asymmetric"])
def test_codes_of_autoround_are_kept(name):
    folder = FIXTURES / "autoround" / name
    stored = load_model_dir(folder).stored
    assert [(one.bits, one.group_size, one.symmetric) for one in stored] == [
        (4, 32, name == "symmetric")
    ] * 2
    checkpoint = GptqCheckpoint(folder)
    expected = load_file(folder / "expected.safetensors")
    for index, matrix in ((0, "self_attn.k_proj"), (1, "self_attn.k_proj"), (0, "mlp.down_proj")):
        weight = expected[f"model.layers.{index}.{matrix}.weight"]
        packed = checkpoint.packed(index, matrix, torch.float32)
        # Rounded to bfloat16 by AutoRound, with scales that had not been rounded to float16.
        torch.testing.assert_close(packed.dequantize(torch.float32), weight, rtol=2**-8, atol=1e-4)
    assert checkpoint.packed(1, "mlp.down_proj", torch.float32) is None  # left at 16 bits
    assert logits(folder, torch.arange(3, 15)[None], bits=(4, 4)).isfinite().all()


def folder_with(fields, folder, tiny_model):
    config = json.loads((tiny_model("llama") / "config.json").read_text())
    config["quantization_config"] = fields
    (folder / "config.json").write_text(json.dumps(config))
    return folder


AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True}


def test_fields_of_autoround_are_those_of_the_format_of_its_codes(tiny_model, tmp_path):
    fields = AUTO_ROUND | {
        "packing_format": "auto_round:auto_gptq",
        "data_type": "int",
        "extra_config": {
            "model.layers.0.mlp.gate": {"bits": 16, "data_type": "float"},
            "model.layers.1.mlp.up_proj": {"bits": 8, "group_size": -1, "act_bits": 16},
            r"shared_expert\..*": {"bits": 16},
            "model.layers.2.mlp.up_proj": {"act_bits": 16},
        },
    }
    folder = folder_with(fields, tmp_path, tiny_model)
    assert is_gptq(folder)
    assert find_config(folder) == {
        "quant_method": "gptq", "packing_format": "auto_round:auto_gptq", "lm_head": False,
        "bits": 4, "group_size": 32, "sym": True,
        "dynamic": {
            r"-:model\.layers\.0\.mlp\.gate$": None,
            r"+:model\.layers\.1\.mlp\.up_proj$": {"bits": 8, "group_size": -1},
            r"-:.*(?:shared_expert\..*)": None,
        },
    }  # fmt: skip
    folder_with(AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}, tmp_path, tiny_model)
    assert find_config(folder)["quant_method"] == "awq"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"packing_format": "auto_round:exl3"}, "packing_format.*found 'auto_round:exl3'"),
        ({"data_type": "mx_fp"}, "data_type.*found 'mx_fp'"),
        ({"extra_config": ["lm_head"]}, "extra_config.*expected an object of modules"),
        ({"extra_config": {"lm_head": 16}}, "extra_config.*expected an object of modules"),
    ],
)
def test_fields_of_autoround_that_are_not_read(fields, message, tiny_model, tmp_path):
    with pytest.raises(SpecError, match=message):
        find_config(folder_with(AUTO_ROUND | fields, tmp_path, tiny_model))


@pytest.mark.parametrize("change", ["state", "codes", "scales", "table", "tables", "layout"])
def test_damaged_tensors_of_bitsandbytes_are_one_error(change, tmp_path):
    codes, state = quantize_4bit(torch.randn(8, 64), quant_type="nf4", compress_statistics=True)
    parts = {f"m.weight.{name}": one for name, one in state.as_dict(packed=True).items()}
    tensors = {"m.weight": codes} | parts
    message = "expected two codes a byte of a matrix"
    if change == "state":
        tensors["m.weight.quant_state.bitsandbytes__nf4"] = torch.tensor([123, 125]).byte()
        message = "found no readable state of codes"
    elif change == "codes":
        tensors["m.weight"] = codes[:-1]
    elif change == "scales":
        tensors["m.weight.absmax"] = tensors["m.weight.absmax"][1:]
    elif change == "table":
        tensors["m.weight.quant_map"] = tensors["m.weight.quant_map"][1:]
    elif change == "tables":
        tensors["m.weight.nested_quant_map"] = tensors["m.weight.nested_quant_map"][1:]
    else:
        tensors = {"m.weight": torch.zeros(4, 4, dtype=torch.int8), "m.SCB": torch.ones(4)}
        tensors["m.weight_format"] = torch.tensor(2).byte()
        message = "expected 0, codes row by row"
    with pytest.raises(SpecError, match=message):
        files_of(tmp_path, tensors, BNB)


@pytest.mark.parametrize(
    ("codes", "scales"),
    [
        (torch.zeros(4, 8, dtype=torch.uint8), torch.ones(3, 1)),
        (torch.zeros(4, 8, dtype=torch.uint8), torch.ones(4, 3)),
        (torch.zeros(4, 8, dtype=torch.int16), torch.ones(4, 1)),
    ],
)
def test_fp4_codes_that_do_not_fit_their_scales_are_one_error(codes, scales, tmp_path):
    tensors = {"m.weight": codes, "m.weight_scale": scales, "m.weight_scale_2": torch.ones(())}
    with pytest.raises(SpecError, match=r"m\.weight"):
        files_of(tmp_path, tensors, MODELOPT)
