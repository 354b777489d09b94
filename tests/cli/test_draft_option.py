"""llmpq-algo --speculative_model: whether a draft model pays, in the strategy file."""

from __future__ import annotations

import json

import pytest

from llmpq.cli.commands.algo import main as algo
from llmpq.cli.commands.check import main as check
from llmpq.options.engine import EngineOptions
from llmpq.options.limits import engine_limits, mtp_bytes, planned_speculation
from llmpq.spec import catalog
from llmpq.spec.plan import read_plan
from llmpq.spec.runtime_constants import KV_BLOCK_SIZE

COMMAND = [
    *["--model", "facebook/opt-13b", "--device_names", "V100-32G", "--device_numbers", "2"],
    *["--global_bz", "1", "--s", "128", "--n", "100", "--no_explain"],
]


def test_a_draft_model_that_pays_is_in_the_plan(tmp_path, capsys):
    path = tmp_path / "plan.json"
    options = ["--speculative_model", "facebook/opt-125m", "--speculative_bits", "8"]
    options += ["--acceptance_rate", "0.8", "--num_speculative_tokens", "6"]
    assert algo([*COMMAND, *options, "--output", str(path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    record = printed["draft"]
    plan = read_plan(path)
    places = {place["device"]: place["speedup"] for place in printed["draft_places"]}
    assert sorted(places) == [0, 1]
    assert max(places.values()) == places[record["device"]] == record["speedup"]
    assert plan.draft is not None
    assert record["model"] == plan.draft.model == "facebook/opt-125m"
    assert (plan.draft.bits, plan.draft.acceptance_rate) == (8, 0.8)
    assert 1 <= plan.draft.num_speculative_tokens <= 6
    assert plan.draft.speedup > 1.2
    assert check([str(path)]) == 0
    assert "draft model    facebook/opt-125m at 8 bits on " in capsys.readouterr().out
    assert algo([*COMMAND, *options, "--output", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "draft model    facebook/opt-125m at 8 bits on " in printed
    assert f"{plan.draft.speedup:.2f} times as fast if 80% are accepted" in printed
    label = plan.cluster.devices[plan.draft.device].label
    best = f"{plan.draft.speedup:.2f} times with {plan.draft.num_speculative_tokens} tokens"
    assert f"  on {label}, stage " in printed
    assert best in printed


def test_one_that_does_not_pay_is_not(tmp_path, capsys):
    path = tmp_path / "plan.json"
    options = ["--speculative_model", "facebook/opt-6.7b", "--acceptance_rate", "0.2"]
    assert algo([*COMMAND, *options, "--output", str(path)]) == 0
    assert "draft model    facebook/opt-6.7b does not pay: none" in capsys.readouterr().out
    assert read_plan(path).draft is None


@pytest.mark.parametrize("more", [[], ["--kv_bits", "8"]])  # the layer's have 16
def test_the_models_own_layer_runs_with_the_master(tmp_path, capsys, more):
    path = tmp_path / "plan.json"
    options = ["--model", "Qwen/Qwen3.5-9B", *COMMAND[2:], "--speculative_model", "mtp", *more]
    assert algo([*options, "--acceptance_rate", "0.8", "--output", str(path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    plan, model = read_plan(path), catalog.model("Qwen/Qwen3.5-9B")
    draft = plan.draft
    assert draft is not None
    assert (draft.model, draft.device) == ("mtp", plan.stages[0].device)
    assert draft.bits == plan.stages[-1].bits[-1]
    config = planned_speculation(plan)
    assert config is not None
    assert (config.method, config.bits, config.model) == ("mtp", draft.bits, None)
    weights, block = mtp_bytes(plan, config, model)
    blocks = -(-plan.workload.max_context_tokens // KV_BLOCK_SIZE)
    assert draft.memory_bytes == pytest.approx(weights + blocks * block, rel=0.02)
    (other,) = [place for place in printed["draft_places"] if place["device"] != draft.device]
    assert other["obstacle"] == "reads hidden states, runs with rank 0"
    limits = engine_limits(plan, EngineOptions(speculative_config=config)).draft
    assert limits is not None
    assert (limits.reads_states, limits.cost, limits.stage) == (True, draft.cost, 0)
    assert check([str(path)]) == 0
    assert f"draft model    mtp at {draft.bits} bits on " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--speculative_model", "mtp"], "found 'mtp' with facebook/opt-13b, of family opt, exp"),
        (["--speculative_bits", "4"], "--speculative_bits: found without --speculative_model"),
        (["--acceptance_rate", "1.5"], "--acceptance_rate: found 1.5, expected at most 1"),
        (["--num_speculative_tokens", "0"], "--num_speculative_tokens: found 0"),
        (["--method", "all"], "--speculative_model: found with --method all"),
        (["--pareto", "3"], "--speculative_model: found with --pareto"),
        (["--speculative_model", "bigscience/bloom-560m"], "'vocab_size': found 250880"),
        (["--speculative_model", "nowhere"], "nowhere"),
    ],
)
def test_options_that_cannot_be_used_are_named(tmp_path, capsys, options, message):
    if options[0] != "--speculative_bits":
        options = ["--speculative_model", "facebook/opt-125m", *options]
    assert algo([*COMMAND, *options, "--output", str(tmp_path / "plan.json")]) == 2
    assert message in capsys.readouterr().err
