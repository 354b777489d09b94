"""llmpq-dist loads what was quantized before: by an earlier run of its own, or as GPTQ files."""

from __future__ import annotations

import json

import pytest
import torch
from helpers.ranks import make_plan, run_threads
from helpers.tiny_models import load_reference

from llmpq.calibration import synthetic_calibration
from llmpq.calibration.quantize import QuantizeJob, quantize_checkpoint
from llmpq.cli.commands.dist import main
from llmpq.dist.io.prompts import Prompt, Request, write_prompts
from llmpq.dist.io.results import read_results
from llmpq.quant.checkpoint.reader import GptqCheckpoint
from llmpq.spec.plan import write_plan
from llmpq.spec.precision import Precision, unquantized

pytestmark = [pytest.mark.dist, pytest.mark.slow]

SHAPE = {"layers": 3, "hidden": 64, "intermediate": 128, "heads": 4, "kv_heads": 2}
MIXED = (
    Precision(bits=4, method="gptq", group_size=32),
    unquantized(),
    Precision(bits=3, method="gptq", group_size=64, symmetric=True),
)
TOKENS = [[5, 9, 2, 7], [11, 3], [8, 8, 1, 4, 60, 17]]
NEW_TOKENS = 12


def options(folder, plan, model_dir):
    write_plan(folder / "strategy.json", plan)
    prompts = [
        Prompt(id=n, where="", token_ids=tuple(t), max_new_tokens=NEW_TOKENS, ignore_eos=True)
        for n, t in enumerate(TOKENS)
    ]
    write_prompts(folder / "prompts.jsonl", prompts)
    words = {
        "--strat_file_name": folder / "strategy.json",
        "--model": model_dir,
        "--prompts": folder / "prompts.jsonl",
        "--output": folder / "results.jsonl",
    }
    return [str(word) for option in words.items() for word in option]


def answers(folder):
    return {result.id: result.token_ids for result in read_results(folder / "results.jsonl")}


def in_one_process(plan, model_dir):
    requests = [
        Request(id=n, prompt_token_ids=tuple(t), max_new_tokens=NEW_TOKENS)
        for n, t in enumerate(TOKENS)
    ]
    found, _ = run_threads(plan, model_dir, requests)
    return {name: tokens for name, (tokens, _) in found.items()}


def test_gptq_files_answer_as_the_model_they_stand_for(tiny_model, tmp_path):
    model_dir = tiny_model("llama", seed=1, shape=SHAPE)
    data = synthetic_calibration(100, num_sequences=8, sequence_tokens=32)
    quantized = tmp_path / "gptq"
    quantize_checkpoint(
        QuantizeJob(model_dir=model_dir, precisions=MIXED, calibration=data), quantized
    )
    source, model = GptqCheckpoint(quantized), load_reference(model_dir)
    for index, layer in enumerate(model.model.layers):
        state = layer.state_dict()
        for key in source.packed_keys(index):
            packed = source.packed(index, key.removesuffix(".weight"), torch.float32)
            state[key].copy_(packed.dequantize(torch.float32))
    model.save_pretrained(tmp_path / "restored")
    plan = make_plan((0, 1, 3), bits=[4, 16, 3], batch=4, new_tokens=NEW_TOKENS)
    assert main(options(tmp_path, plan, quantized)) == 0
    whole = make_plan((0, 3), bits=[16] * 3, batch=4, new_tokens=NEW_TOKENS)
    assert answers(tmp_path) == in_one_process(whole, tmp_path / "restored")


def test_a_plan_at_other_bits_than_the_files_is_refused(tiny_model, tmp_path, capsys):
    model_dir = tiny_model("llama", seed=1, shape=SHAPE)
    quantized = tmp_path / "gptq"
    precisions = (Precision(bits=4, method="rtn", group_size=32),) * 3
    quantize_checkpoint(
        QuantizeJob(model_dir=model_dir, precisions=precisions, calibration=None), quantized
    )
    plan = make_plan((0, 1, 3), bits=[4, 8, 4], batch=4, new_tokens=NEW_TOKENS)
    assert main(options(tmp_path, plan, quantized)) == 2
    assert "layer 1 is stored at 4 bits and the plan wants 8" in capsys.readouterr().err


def test_the_second_run_and_another_plan_take_layers_from_the_store(tiny_model, tmp_path, capsys):
    model_dir = tiny_model("llama", seed=1, shape=SHAPE)
    store = tmp_path / "store"
    found = []
    for run, cuts in enumerate([(0, 1, 3), (0, 1, 3), (0, 2, 3)]):
        folder = tmp_path / f"run{run}"
        folder.mkdir()
        plan = make_plan(cuts, bits=[4, 3, 16], batch=4, new_tokens=NEW_TOKENS)
        assert main([*options(folder, plan, model_dir), "--json", "--store", str(store)]) == 0
        assert json.loads(capsys.readouterr().out)["status"] == "done"
        entries = {path.name: path.stat().st_ino for path in store.iterdir()}
        found.append((answers(folder), entries))
    assert len(found[0][1]) == 2
    assert found[0] == found[1] == found[2]
