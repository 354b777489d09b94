"""Checkpoints written by llmpq-quantize are read back and run."""

import json
import shutil

import pytest
import torch
from helpers.tiny_models import load_reference
from safetensors.torch import load_file

from llmpq.calibration import synthetic_calibration
from llmpq.calibration.quantize import QuantizeJob, quantize_checkpoint
from llmpq.errors import SpecError
from llmpq.models import load_config
from llmpq.quant import QuantLinear
from llmpq.quant.checkpoint.reader import GptqCheckpoint
from llmpq.quant.loading.loader import load_stage
from llmpq.quant.loading.master import load_master
from llmpq.quant.quantizers.gptq import GptqOptions
from llmpq.spec.huggingface.quantization import is_gptq
from llmpq.spec.precision import Precision, unquantized

torch.set_num_threads(1)

SHAPE = {"layers": 3, "hidden": 64, "intermediate": 128, "heads": 4, "kv_heads": 2}
FAMILIES = ["llama", "opt", "bloom", "gpt_neox", "mixtral", "qwen3_moe"]
MIXED = (
    Precision(bits=4, method="gptq", group_size=32),
    unquantized(),
    Precision(bits=3, method="gptq", group_size=64, symmetric=True),
)


def job(model_dir, precisions=MIXED, **options):
    data = synthetic_calibration(100, num_sequences=8, sequence_tokens=32)
    return QuantizeJob(
        model_dir=model_dir,
        precisions=precisions,
        calibration=data if options.pop("calibrated", True) else None,
        **options,
    )


def logits(model_dir, token_ids):
    """Logits of the last token from a quantized checkpoint, read with our own reader."""
    count = load_config(model_dir).num_hidden_layers
    stage = load_stage(model_dir, 0, count, None, dtype=torch.float32, device="cpu")
    master = load_master(model_dir, dtype=torch.float32, device="cpu")
    rows, width = token_ids.shape
    hidden = master.embed(token_ids, torch.arange(width).expand(rows, -1))
    return master.logits(stage.run_whole(hidden)[:, -1])


def dequantized_copy(model_dir, output):
    """Return the plain model with every quantized weight replaced by its dequantized value."""
    source = GptqCheckpoint(output)
    model = load_reference(model_dir)
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    for index, layer in enumerate(layers):
        state = layer.state_dict()
        for key in source.packed_keys(index):
            names = [key.removesuffix(".weight")]
            if state[key].dim() == 3:
                names = [f"{key}.{e}" for e in range(len(state[key]))]
            weights = [source.packed(index, n, torch.float32) for n in names]
            restored = torch.stack([w.dequantize(torch.float32) for w in weights])
            state[key].copy_(restored.view(state[key].shape))
    return model


TOKENS = torch.randint(0, 100, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("order", ["none", "full"])
def test_a_written_checkpoint_runs_as_the_dequantized_model(tiny_model, tmp_path, family, order):
    model_dir, output = tiny_model(family, seed=1, shape=SHAPE), tmp_path / "out"
    told = []
    quantize_checkpoint(
        job(model_dir, options=GptqOptions(order=order)), output, lambda *a: told.append(a[:2])
    )
    assert told == [(1, 3), (2, 3), (3, 3)]
    with torch.inference_mode():
        expected = dequantized_copy(model_dir, output)(TOKENS).logits[:, -1]
        plain = load_reference(model_dir)(TOKENS).logits[:, -1]
    found = logits(output, TOKENS)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
    assert (found - plain).abs().max() > 1e-3  # the bits did something
    source = GptqCheckpoint(output)
    assert [source.bits(i) for i in range(3)] == [4, 16, 3]


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_calibration_brings_the_logits_closer(tiny_model, tmp_path, family):
    model_dir = tiny_model(family, seed=1, shape=SHAPE)
    precisions = (Precision(bits=3, method="gptq", group_size=32),) * 3
    quantize_checkpoint(job(model_dir, precisions), tmp_path / "gptq")
    quantize_checkpoint(job(model_dir, precisions, calibrated=False), tmp_path / "rtn")
    tokens = synthetic_calibration(100, num_sequences=32, sequence_tokens=16, seed=7).token_ids
    with torch.inference_mode():
        plain = load_reference(model_dir)(tokens).logits[:, -1]
    gptq, rtn = ((logits(tmp_path / n, tokens) - plain).square().mean() for n in ("gptq", "rtn"))
    assert gptq < 0.9 * rtn


def test_same_tokens_give_the_same_files(tiny_model, tmp_path):
    model_dir = tiny_model("qwen3_moe", seed=1, shape=SHAPE)
    for name in ("a", "b"):
        quantize_checkpoint(job(model_dir), tmp_path / name)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_shards_hold_the_same_tensors_as_one_file(tiny_model, tmp_path):
    model_dir = tiny_model("llama", seed=1, shape=SHAPE)
    quantize_checkpoint(job(model_dir), tmp_path / "one")
    report = quantize_checkpoint(job(model_dir, shard_bytes=30_000), tmp_path / "many")
    one = load_file(tmp_path / "one" / "model.safetensors")
    shards = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(shards) > 2
    assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    many = {k: v for shard in shards for k, v in load_file(shard).items()}
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)
    assert report.weights_bytes == sum(tensor.nbytes for tensor in one.values())
    assert torch.equal(logits(tmp_path / "one", TOKENS), logits(tmp_path / "many", TOKENS))


def test_rarely_used_experts_are_rounded_and_named(tiny_model, tmp_path):
    model_dir = tiny_model("mixtral", seed=1, shape=SHAPE)
    data = synthetic_calibration(100, num_sequences=1, sequence_tokens=20)
    work = QuantizeJob(model_dir=model_dir, precisions=MIXED, calibration=data)
    report = quantize_checkpoint(work, tmp_path / "out")
    assert any("mlp.experts.down." in name for name in report.rounded)
    assert all(name.startswith(("layer 0 ", "layer 2 ")) for name in report.rounded)
    assert logits(tmp_path / "out", TOKENS).isfinite().all()


def test_the_configuration_describes_the_quantization(tiny_model, tmp_path):
    model_dir = tiny_model("llama", seed=1, shape=SHAPE)
    quantize_checkpoint(job(model_dir), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    found = config.pop("quantization_config")
    assert config == json.loads((model_dir / "config.json").read_text())
    assert (found["bits"], found["group_size"], found["sym"]) == (4, 32, False)
    assert found["dynamic"] == {
        r"-:.*\.layers\.(?:1)\..*": {},
        r"+:.*\.layers\.(?:2)\..*": {"bits": 3, "group_size": 64, "sym": True},
    }
    assert found["checkpoint_format"] == "gptq_v2"
    assert is_gptq(tmp_path / "out")
    assert not is_gptq(model_dir)


def test_symmetric_files_have_version_1(tiny_model, tmp_path):
    model_dir = tiny_model("llama", seed=1, shape=SHAPE)
    quantize_checkpoint(job(model_dir, (unquantized(), *[MIXED[2]] * 2)), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["checkpoint_format"] == "gptq"
    stored = load_file(tmp_path / "out" / "model.safetensors")
    words = stored["model.layers.1.self_attn.q_proj.qzeros"].view(torch.uint8)
    assert words.unique().tolist() == [0b01101101, 0b10110110, 0b11011011]  # threes, of three bits


def test_nothing_is_overwritten_and_nothing_is_left_behind(tiny_model, tmp_path, monkeypatch):
    model_dir = tiny_model("llama", seed=1, shape=SHAPE)
    (tmp_path / "there").mkdir()
    with pytest.raises(SpecError, match="exists already"):
        quantize_checkpoint(job(model_dir), tmp_path / "there")

    def fail(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(job(model_dir), tmp_path / "out", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_unsupported_jobs_are_refused(tiny_model, tmp_path):
    model_dir = tiny_model("llama", seed=1, shape=SHAPE)
    group = Precision(bits=4, method="gptq", group_size=48)
    with pytest.raises(SpecError, match="groups of 48 do not divide the 64 inputs"):
        quantize_checkpoint(job(model_dir, (group,) * 3), tmp_path / "out")
    with pytest.raises(SpecError, match="3 layers and precisions of 2"):
        quantize_checkpoint(job(model_dir, MIXED[:2]), tmp_path / "out")
    with pytest.raises(SpecError, match="only layers of 16 bits"):
        quantize_checkpoint(job(model_dir, (unquantized(),) * 3), tmp_path / "out")
    quantize_checkpoint(job(model_dir), tmp_path / "out")
    with pytest.raises(SpecError, match="quantized already"):
        quantize_checkpoint(job(tmp_path / "out"), tmp_path / "again")


@pytest.fixture
def quantized(tiny_model, tmp_path):
    quantize_checkpoint(job(tiny_model("llama", seed=1, shape=SHAPE)), tmp_path / "out")
    return tmp_path / "out"


def change_config(model_dir, **fields):
    path = model_dir / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= fields
    path.write_text(json.dumps(config))


def test_a_plan_with_other_bits_is_refused(quantized):
    source = GptqCheckpoint(quantized)
    source.check_bits(1, (16, 3))
    with pytest.raises(SpecError, match="layer 2 is stored at 3 bits and the plan wants 4"):
        source.check_bits(0, (4, 16, 4))


def test_layers_have_the_stored_weights(quantized):
    source = GptqCheckpoint(quantized)
    layer = load_stage(quantized, 2, 3, None, dtype=torch.bfloat16, device="cpu").layers[0]
    assert isinstance(layer.self_attn.q_proj, QuantLinear)
    assert str(layer.self_attn.q_proj.precision) == "w3-gptq-g64"
    assert layer.input_layernorm.weight.dtype == torch.bfloat16
    plain = load_stage(quantized, 1, 2, None, dtype=torch.float32, device="cpu").layers[0]
    assert isinstance(plain.mlp.up_proj, torch.nn.Linear)
    assert source.packed(1, "mlp.up_proj", torch.float32) is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quant_method": "quip"}, "found 'quip', expected gptq, auto-round, fp8"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format"),
        ({"lm_head": True}, "lm_head"),
        ({"bits": 5}, "expected one of"),
        ({"group_size": 0}, "group_size"),
        ({"sym": 3}, "sym"),
        ({"dynamic": {"+:(": {}}}, "regular expression"),
        ({"dynamic": {"-:.*": {}}}, "expected 'dynamic' to say so"),
        ({"group_size": 64, "dynamic": {}}, "qzeros: found"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(quantized, fields, message):
    change_config(quantized, **fields)
    with pytest.raises(SpecError, match=message):
        logits(quantized, TOKENS)


def test_checkpoints_with_quantize_config_json_are_read(quantized, tmp_path):
    expected = logits(quantized, TOKENS)
    old = shutil.copytree(quantized, tmp_path / "old")
    config = json.loads((old / "config.json").read_text())
    fields = config.pop("quantization_config")
    del fields["quant_method"]
    (old / "config.json").write_text(json.dumps(config))
    (old / "quantize_config.json").write_text(json.dumps(fields))
    assert torch.equal(logits(old, TOKENS), expected)


@pytest.mark.parametrize("family", ["gpt_oss", "jetmoe"])
def test_experts_without_a_layout_in_files_are_refused(tiny_model, tmp_path, family):
    with pytest.raises(SpecError, match=f"the quantized experts of {family}"):
        quantize_checkpoint(job(tiny_model(family, shape=SHAPE), MIXED), tmp_path / "out")
