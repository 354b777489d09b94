"""llmpq-algo and llmpq-dist on a checkpoint that is quantized already: its bits, and no others."""

from __future__ import annotations

import json

import pytest
from helpers.ranks import make_plan, run_threads

from llmpq.calibration import synthetic_calibration
from llmpq.calibration.quantize import QuantizeJob, quantize_checkpoint
from llmpq.cli.commands.algo import main as plan_main
from llmpq.cli.commands.dist import main as serve_main
from llmpq.dist.io.prompts import Prompt, Request, write_prompts
from llmpq.dist.io.results import read_results
from llmpq.quant.checkpoint.reader import GptqCheckpoint
from llmpq.quant.quantizers.gptq import GptqOptions
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.plan import read_plan
from llmpq.spec.precision import Precision, linear_bytes, unquantized

SHAPE = {"layers": 3, "hidden": 64, "intermediate": 128, "heads": 4, "kv_heads": 2}
TOKENS = [[5, 9, 2, 7], [11, 3], [8, 8, 1, 4, 60, 17]]
NEW_TOKENS = 8
FOUR = Precision(bits=4, method="gptq", group_size=32)
UNIFORM = (FOUR,) * 3
MIXED = (FOUR, unquantized(), Precision(bits=3, method="gptq", group_size=64, symmetric=True))


def quantized(tiny_model, tmp_path, precisions, family="llama", *, act_order=False, shape=SHAPE):
    data = synthetic_calibration(100, num_sequences=8, sequence_tokens=32)
    output = tmp_path / "gptq"
    job = QuantizeJob(
        model_dir=tiny_model(family, seed=1, shape=shape),
        precisions=precisions,
        calibration=data,
        options=GptqOptions(order="full" if act_order else "none"),
    )
    quantize_checkpoint(job, output)
    return output


def planned(tmp_path, model_dir, *more):
    cluster = {
        "schema": 1,
        "name": "two",
        "nodes": [{"name": "here", "devices": [{"type": "cpu", "count": 2, "threads": 1}]}],
        "links": [],
    }
    (tmp_path / "cluster.json").write_text(json.dumps(cluster))
    words = ["--model", str(model_dir), "--cluster", str(tmp_path / "cluster.json")]
    words += ["--global_bz", "3", "--s", "6", "--n", str(NEW_TOKENS), "--no_explain"]
    return plan_main([*words, "--output", str(tmp_path / "plan.json"), *more])


def served(tmp_path, model_dir):
    prompts = [
        Prompt(id=n, where="", token_ids=tuple(t), max_new_tokens=NEW_TOKENS, ignore_eos=True)
        for n, t in enumerate(TOKENS)
    ]
    write_prompts(tmp_path / "prompts.jsonl", prompts)
    words = {
        "--strat_file_name": tmp_path / "plan.json",
        "--model": model_dir,
        "--prompts": tmp_path / "prompts.jsonl",
        "--output": tmp_path / "results.jsonl",
    }
    assert serve_main([str(word) for option in words.items() for word in option]) == 0
    found = read_results(tmp_path / "results.jsonl")
    return {result.id: result.token_ids for result in found}


def in_one_process(bits, model_dir):
    requests = [
        Request(id=n, prompt_token_ids=tuple(t), max_new_tokens=NEW_TOKENS)
        for n, t in enumerate(TOKENS)
    ]
    plan = make_plan((0, len(bits)), bits=list(bits), batch=4, new_tokens=NEW_TOKENS)
    found, _ = run_threads(plan, model_dir, requests)
    return {name: tokens for name, (tokens, _) in found.items()}


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    ("precisions", "act_order"), [(UNIFORM, False), (MIXED, False), (UNIFORM, True)]
)
def test_a_quantized_checkpoint_is_planned_and_served(tiny_model, tmp_path, precisions, act_order):
    model_dir = quantized(tiny_model, tmp_path, precisions, act_order=act_order)
    bits = [precision.bits for precision in precisions]
    assert planned(tmp_path, model_dir) == 0
    plan = read_plan(tmp_path / "plan.json")
    assert [width for stage in plan.stages for width in stage.bits] == bits
    assert served(tmp_path, model_dir) == in_one_process(bits, model_dir)


@pytest.mark.dist
@pytest.mark.slow
def test_quantized_experts_are_planned_and_served(tiny_model, tmp_path):
    model_dir = quantized(tiny_model, tmp_path, (FOUR,) * 3, "mixtral", shape=None)
    keys = GptqCheckpoint(model_dir).packed_keys(0)
    assert {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"} <= keys
    assert planned(tmp_path, model_dir) == 0
    assert served(tmp_path, model_dir) == in_one_process([4, 4, 4], model_dir)


def test_memory_is_that_of_the_stored_groups(tiny_model, tmp_path):
    model_dir = quantized(tiny_model, tmp_path, MIXED)
    model = load_model_dir(model_dir)
    assert model.stored == MIXED
    assert model.precision(4) == FOUR
    assert model.precision(8).group_size is None  # of no layer here: as a loader would
    layer = model.layer_types[0]
    fine = sum(linear_bytes(op.out_features, op.in_features, FOUR, 4) for op in layer.linears)
    assert layer.weight_bytes(model.precision(4), 4) == fine + 4 * layer.norm_parameters


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--bits", "8", "16"], "--bits: found [8, 16], expected [4] among them"),
        (["--fix_bits", "0:1=8"], "--fix_bits: found with"),
        (["--average_bits", "5"], "--average_bits: found with"),
    ],
)
def test_other_bits_are_refused(tiny_model, tmp_path, capsys, words, said):
    model_dir = quantized(tiny_model, tmp_path, UNIFORM)
    assert planned(tmp_path, model_dir, *words) == 2
    assert said in capsys.readouterr().err


def test_a_checkpoint_of_another_method_is_refused(tiny_model, tmp_path, capsys):
    model_dir = tiny_model("llama", seed=1, shape=SHAPE)
    config = json.loads((model_dir / "config.json").read_text())
    folder = tmp_path / "quip"
    folder.mkdir()
    config["quantization_config"] = {"quant_method": "quip"}
    (folder / "config.json").write_text(json.dumps(config))
    assert planned(tmp_path, folder) == 2
    assert "found 'quip', expected gptq, auto-round, fp8" in capsys.readouterr().err
