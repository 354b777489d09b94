"""Workloads: usual lengths, and the context that sequences may reach."""

import json
from dataclasses import replace

import pytest

from llmpq import plan
from llmpq.cli.commands.algo import main
from llmpq.costmodel import build_costs
from llmpq.errors import SpecError
from llmpq.spec import catalog
from llmpq.spec.cluster import cluster_of_types
from llmpq.spec.fields import Fields, from_json, to_json
from llmpq.spec.plan import MicroBatching, read_plan
from llmpq.spec.workload import Workload

USUAL = Workload(batch=4, prompt_tokens=256, new_tokens=64)
ROOMY = replace(USUAL, context_tokens=4096)
MODEL = "facebook/opt-1.3b"


def test_a_context_is_at_least_prompt_and_answer():
    assert (USUAL.max_context_tokens, USUAL.max_prompt_tokens) == (320, 256)
    assert (ROOMY.max_context_tokens, ROOMY.max_prompt_tokens) == (4096, 4095)
    assert replace(USUAL, context_tokens=320).max_context_tokens == 320
    for context in (319, 0, -1, 10**9):
        with pytest.raises(SpecError, match=rf"context_tokens': found {context}, expected .*\[320"):
            replace(USUAL, context_tokens=context)


def test_names_and_titles_state_a_context_only_where_there_is_one():
    assert USUAL.name == "s256-n64-b4"
    assert ROOMY.name == "s256-n64-b4-c4096"
    assert USUAL.text == "4 x 256 prompt tokens, 64 new tokens each"
    assert ROOMY.text == f"{USUAL.text}, room for 4,096 each"


@pytest.mark.parametrize("work", [USUAL, ROOMY])
def test_a_workload_is_written_and_read(work):
    record = json.loads(json.dumps(to_json(work)))
    assert ("context_tokens" in record) == (work is ROOMY)
    assert from_json(Workload, Fields(record, "file")) == work


def test_memory_is_for_the_context_and_seconds_are_of_usual_lengths():
    cluster = cluster_of_types({"V100-32G": 1})
    costs = build_costs(catalog.model(MODEL), cluster, dtype="float16", kv_bits=16)
    assert ROOMY.mean_context_tokens == USUAL.mean_context_tokens == 288
    (device,), sizes = cluster.devices, MicroBatching(prefill=2, decode=4)
    long = replace(USUAL, prompt_tokens=4095, new_tokens=1)
    usual, roomy, whole = (
        costs.temporary_bytes(device, work, sizes, is_master=True) for work in (USUAL, ROOMY, long)
    )
    assert usual < roomy == whole
    options = {"device_names": ["V100-32G"], "batch": 4, "prompt": 256, "new": 64}
    short = plan(MODEL, **options)
    longer = plan(MODEL, **options, max_model_len=2048)
    assert longer.estimate.latency_s == short.estimate.latency_s
    ((one,), (two,)) = (found.estimate.stages for found in (short, longer))
    assert two.memory.kv == pytest.approx(one.memory.kv * 2048 / 320, rel=0.01)
    assert two.memory.weights == one.memory.weights


def test_the_command_takes_a_context(tmp_path, capsys):
    file = tmp_path / "plan.json"
    lengths = ["--global_bz", "4", "--s", "256", "--n", "64", "--max_model_len", "1024"]
    argv = ["--model", MODEL, "--device_names", "V100-32G", *lengths, "--output", str(file)]
    assert main(argv) == 0
    assert read_plan(file).workload == replace(USUAL, context_tokens=1024)
    assert "room for 1,024 each" in capsys.readouterr().out
    assert main([*argv, "--max_model_len", "100"]) == 2
    assert "context_tokens" in capsys.readouterr().err
