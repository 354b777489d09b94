"""Codes in the plan's own bits and groups are kept; others are rounded to the plan's bits."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmpq.calibration.quantize import QuantizeJob, quantize_checkpoint
from llmpq.models.tensor_files import AWQ_ORDER
from llmpq.quant import stored_bytes
from llmpq.quant.loading.loader import load_stage
from llmpq.quant.loading.master import load_master
from llmpq.quant.loading.weight_cache import WeightCache
from llmpq.spec.precision import Precision, default_precision

torch.set_num_threads(1)

SHAPE = {"layers": 2, "hidden": 128, "intermediate": 256, "heads": 4, "kv_heads": 2}
TOKENS = torch.arange(3, 23).view(2, 10)


def run(model_dir, bits, dtype=torch.float32, **options):
    """Logits of one stage, and the text of each layer's progress."""
    texts = []
    stage = load_stage(
        model_dir,
        0,
        2,
        bits,
        dtype=dtype,
        device="cpu",
        progress=lambda *found: texts.append(found[2]),
        **options,
    )
    master = load_master(model_dir, dtype=dtype, device="cpu")
    hidden = stage.run_whole(master.embed(TOKENS, torch.arange(10).expand(2, -1)))
    return master.logits(hidden.flatten(0, 1)), texts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("bits", [(4, 8), (3, 4)])
def test_compressed_tensors_runs_as_the_same_gptq_file(family, bits, dtype, tiny_model, tmp_path):
    model_dir = tiny_model(family, seed=5, shape=SHAPE)
    precisions = tuple(default_precision(width) for width in bits)
    for kind in ("gptq", "compressed-tensors"):
        job = QuantizeJob(model_dir=model_dir, precisions=precisions, format=kind)
        quantize_checkpoint(job, tmp_path / kind)
    expected, _ = run(tmp_path / "gptq", None, dtype)
    found, texts = run(tmp_path / "compressed-tensors", bits, dtype)
    assert torch.equal(found, expected)
    assert all(text.endswith("as stored") for text in texts)


def test_symmetric_codes_get_zeros_of_zero(tiny_model, tmp_path):
    model_dir = tiny_model("llama", seed=5, shape=SHAPE)
    precisions = (Precision(bits=4, symmetric=True), Precision(bits=3, symmetric=True))
    for kind in ("gptq", "compressed-tensors"):
        job = QuantizeJob(model_dir=model_dir, precisions=precisions, format=kind)
        quantize_checkpoint(job, tmp_path / kind)
    expected, _ = run(tmp_path / "gptq", None)
    found, texts = run(tmp_path / "compressed-tensors", [4, 3])
    assert torch.allclose(found, expected, atol=1e-5)
    assert all(text.endswith("as stored") for text in texts)


@pytest.fixture
def awq(tiny_model, tmp_path):
    """A checkpoint in AWQ's layout, and one with the weights that it stands for."""
    plain = tiny_model("llama", seed=6, shape=SHAPE)
    config = json.loads((plain / "config.json").read_text())
    tensors, weights = {}, {}
    generator = torch.Generator().manual_seed(0)
    for name, weight in load_file(plain / "model.safetensors").items():
        tensors[name] = weights[name] = weight
        if "_proj" not in name:
            continue
        module, (rows, columns) = name.removesuffix(".weight"), weight.shape
        groups = columns // 128
        codes = torch.randint(0, 16, (columns, rows), generator=generator)
        zeros = torch.randint(1, 16, (groups, rows), generator=generator)
        scales = torch.rand(groups, rows, generator=generator).add(0.5).mul(0.01).half()
        del tensors[name]
        tensors |= {
            f"{module}.qweight": words(codes),
            f"{module}.qzeros": words(zeros),
            f"{module}.scales": scales,
        }
        spread = [one.repeat_interleave(128, 0) for one in (zeros, scales.float())]
        weights[name] = ((codes - spread[0]) * spread[1]).T.contiguous()
    for folder, content in (("awq", tensors), ("twin", weights)):
        (tmp_path / folder).mkdir()
        save_file(content, tmp_path / folder / "model.safetensors")
        (tmp_path / folder / "config.json").write_text(json.dumps(config))
        config["quantization_config"] = None
    config["quantization_config"] = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "version": "gemm",
        "zero_point": True,
    }
    (tmp_path / "awq" / "config.json").write_text(json.dumps(config))
    return tmp_path / "awq", tmp_path / "twin"


def words(codes):
    found = torch.zeros(codes.shape[0], codes.shape[1] // 8, dtype=torch.int64)
    for column, place in enumerate(AWQ_ORDER):
        found |= codes[:, column::8] << (4 * place)
    return found.to(torch.int32)


def test_awq_codes_are_kept_at_4_bits_and_rounded_at_8(awq):
    quantized, twin = awq
    exact, _ = run(twin, [16, 16])
    kept, texts = run(quantized, [4, 4])
    assert torch.allclose(kept, exact, rtol=1e-4, atol=1e-4)
    assert all(text.endswith("as stored") for text in texts)
    assert torch.equal(run(quantized, [8, 8])[0], run(twin, [8, 8])[0])
    stages = [load_stage(folder, 0, 2, [4, 4], dtype=torch.float32, device="cpu") for folder in awq]
    assert stored_bytes(stages[0]) == stored_bytes(stages[1])


def test_kept_codes_come_from_the_cache(awq, tmp_path):
    quantized, _ = awq
    expected, _ = run(quantized, [4, 8])
    cache = WeightCache.opened(tmp_path / "store", 1 << 30)
    for _ in range(2):
        assert torch.equal(run(quantized, [4, 8], weight_cache=cache)[0], expected)


def test_scales_that_do_not_fit_the_run_are_rounded_instead(awq):
    quantized, _ = awq
    tensors = load_file(quantized / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.scales"
    tensors[name][0, 0] = 0
    save_file(tensors, quantized / "model.safetensors")
    found, texts = run(quantized, [4, 4])
    assert torch.isfinite(found).all()
    assert len(texts) == 2
