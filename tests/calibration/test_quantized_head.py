"""A quantized LM head is written, read and planned as what its codes stand for."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace

import pytest
import torch
from helpers.builders import plan_request
from helpers.tiny_models import load_reference
from transformers import AutoModelForCausalLM

from llmpq.assigner.constraints.fixed_bits import with_stored_bits
from llmpq.assigner.constraints.resolve import Overrides
from llmpq.calibration import LayerWalk, synthetic_calibration
from llmpq.calibration.quantize import QuantizeJob, quantize_checkpoint
from llmpq.costmodel.memory import master_bytes
from llmpq.errors import SpecError
from llmpq.models import Checkpoint
from llmpq.quant.checkpoint.reader import GptqCheckpoint
from llmpq.quant.loading.loader import load_stage
from llmpq.quant.loading.master import load_master
from llmpq.quant.modules.layer import QuantHead, stored_bytes
from llmpq.quant.quantizers.gptq import GptqOptions
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.precision import Precision

torch.set_num_threads(1)

SHAPE = {"layers": 2, "hidden": 64, "intermediate": 96, "heads": 4, "kv_heads": 2, "vocab": 104}
LAYER = Precision(bits=4, method="gptq", symmetric=True)
HEADS = {
    4: LAYER,
    8: Precision(bits=8, method="gptq", group_size=None, symmetric=True),
}
DATA = synthetic_calibration(100, num_sequences=12, sequence_tokens=32)
TOKENS = torch.arange(3, 23).view(2, 10)


def written(tiny_model, output, bits=4, *, tied=False, layer=LAYER, **options):
    model_dir = tiny_model("llama", seed=1, shape=SHAPE, tie_word_embeddings=tied)
    job = QuantizeJob(
        model_dir=model_dir,
        precisions=(layer,) * 2,
        head=layer if bits == 4 else HEADS[bits],
        **{"calibration": DATA, **options},
    )
    quantize_checkpoint(job, output)
    return model_dir


def ours(model_dir, **options):
    """Logits of every token by our reader."""
    stage = load_stage(model_dir, 0, 2, None, dtype=torch.float32, device="cpu")
    master = load_master(model_dir, dtype=torch.float32, device="cpu", **options)
    hidden = master.embed(TOKENS, torch.arange(10).expand(2, -1))
    return master.logits(stage.run_whole(hidden).flatten(0, 1))


def head_of(output):
    return GptqCheckpoint(output).packed_head((104, 64), torch.float32).dequantize(torch.float32)


@pytest.mark.parametrize(
    ("bits", "tied", "order"),
    [(4, False, "none"), (4, True, "none"), (8, True, "none"), (4, False, "full")],
)
def test_a_written_head_runs_as_its_dequantized_weights(tiny_model, tmp_path, bits, tied, order):
    options = GptqOptions(order=order)
    model_dir = written(tiny_model, tmp_path / "out", bits, tied=tied, options=options)
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert fields["quantization_config"]["lm_head"] is True
    assert fields["tie_word_embeddings"] is False
    expected = load_reference(model_dir)
    source = GptqCheckpoint(tmp_path / "out")
    for index, layer in enumerate(expected.model.layers):
        for key in source.packed_keys(index):
            weight = source.packed(index, key.removesuffix(".weight"), torch.float32)
            layer.get_parameter(key).data = weight.dequantize(torch.float32)
    head = torch.nn.Linear(64, 104, bias=False)
    head.weight.data = head_of(tmp_path / "out")
    expected.lm_head = head
    with torch.inference_mode():
        logits = expected(TOKENS).logits.flatten(0, 1)
    torch.testing.assert_close(ours(tmp_path / "out"), logits, atol=2e-3, rtol=2e-3)
    master = load_master(tmp_path / "out", dtype=torch.bfloat16, device="cpu", head_bits=bits)
    assert isinstance(master.lm_head, QuantHead)
    model = load_model_dir(tmp_path / "out")
    assert model.stored_head == HEADS[bits]
    if order == "none":
        assert stored_bytes(master) == master_bytes(model, "bfloat16", bits)


def test_gptq_of_the_head_changes_its_outputs_less_than_rounding(tiny_model, tmp_path):
    model_dir = written(tiny_model, tmp_path / "gptq")
    written(tiny_model, tmp_path / "rtn", calibration=None)
    plain = load_master(model_dir, dtype=torch.float32, device="cpu")
    walk = LayerWalk(model_dir, DATA, finish=True)
    for _ in walk:
        pass
    x = torch.cat([plain.head_inputs(hidden.flatten(0, 1)) for hidden in walk.hidden])
    weight = plain.get_parameter("lm_head.weight")
    lost = {
        name: (x @ (head_of(tmp_path / name) - weight).T).square().mean()
        for name in ("gptq", "rtn")
    }
    assert lost["gptq"] < 0.9 * lost["rtn"]


@pytest.mark.parametrize("bits", [4, 8])
def test_compressed_tensors_keep_the_codes_of_the_head(tiny_model, tmp_path, bits):
    written(tiny_model, tmp_path / "ct", bits, format="compressed-tensors", calibration=None)
    written(tiny_model, tmp_path / "gptq", bits, calibration=None)
    weight = Checkpoint(tmp_path / "ct").master_state_dict()["lm_head.weight"]
    expected = head_of(tmp_path / "gptq")
    torch.testing.assert_close(weight, expected, rtol=0, atol=1e-6)
    master = load_master(tmp_path / "ct", dtype=torch.float32, device="cpu", head_bits=bits)
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    found, plain = master.logits(hidden), master.head_inputs(hidden) @ expected.T
    torch.testing.assert_close(found, plain, rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(
    importlib.util.find_spec("compressed_tensors") is None, reason="needs compressed-tensors"
)
def test_transformers_reads_the_head_with_the_format_s_library(tiny_model, tmp_path):
    # The library needs groups that divide the inputs.
    own = {"layer": replace(LAYER, group_size=32), "calibration": None}
    written(tiny_model, tmp_path / "ct", format="compressed-tensors", **own)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "ct", dtype=torch.float32)
    with torch.inference_mode():
        expected = model(TOKENS).logits.flatten(0, 1)
    written(tiny_model, tmp_path / "gptq", **own)
    torch.testing.assert_close(ours(tmp_path / "gptq"), expected, atol=2e-3, rtol=2e-3)


def test_plans_have_the_stored_bits_of_the_head(tiny_model, tmp_path):
    written(tiny_model, tmp_path / "out", calibration=None)
    model = load_model_dir(tmp_path / "out")
    assert with_stored_bits(plan_request(model=model)).head_choices == (4,)
    with pytest.raises(SpecError, match="--fix_bits head: found 8, expected 4"):
        with_stored_bits(plan_request(model=model, overrides=Overrides(head_bits=8)))
    with pytest.raises(SpecError, match="stored at 4 bits and the plan wants 16"):
        ours(tmp_path / "out", head_bits=16)


def test_a_configuration_that_says_otherwise_is_refused(tiny_model, tmp_path):
    written(tiny_model, tmp_path / "out", calibration=None)
    path = tmp_path / "out" / "config.json"
    text = path.read_text()
    for old, new, message in (
        ('"lm_head": true', '"lm_head": false', "found False, expected what is stored"),
        ('"lm_head": true', '"lm_head": 3', "found 3, expected 'False' or 'True'"),
        ('"tie_word_embeddings": false', '"tie_word_embeddings": true', "expected false"),
    ):
        assert old in text
        path.write_text(text.replace(old, new))
        with pytest.raises(SpecError, match=message):
            ours(tmp_path / "out")
