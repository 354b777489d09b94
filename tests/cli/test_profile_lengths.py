"""llmpq-profile lengths: a predictor of answer lengths, and the commands that use it."""

from __future__ import annotations

import json
import random

import pytest

from llmpq.batching.length.learned import read_length_model
from llmpq.cli.commands.profile import main as profile
from llmpq.cli.commands.sim import main as sim

PLAN = "strategies/opt-13b__paper-01__s128-n200-b32__llmpq.json"


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    rows = [f"0,{prompt},{1 + prompt}" for prompt in [4, 9, 30, 90] * 160]
    path.write_text("\n".join(["arrival_s,prompt_tokens,new_tokens", *rows]) + "\n")
    return path


def test_a_trace_teaches_what_simulations_ask(trace, tmp_path, capsys):
    output = tmp_path / "lengths.json"
    words = ["lengths", "--trace", str(trace), "--output", str(output)]
    assert profile([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["samples"] == 640
    assert found["rank_correlation"] > 0.9
    assert found["accuracy"]["4"] == 1.0
    model = read_length_model(output)
    assert model.vocab_size is None
    assert dict(model.provenance)["trace"] == "trace.csv"
    rates = {}
    asked = ["--strategy", PLAN, "--trace", str(trace), "--policy", "multibin", "--bins", "4"]
    for predictor in ("oracle", "empirical", str(output)):
        assert sim([*asked, "--predictor", predictor, "--json"]) == 0
        rates[predictor] = json.loads(capsys.readouterr().out)["throughput_requests_per_s"]
    assert rates["empirical"] < rates[str(output)] == pytest.approx(rates["oracle"], rel=0.01)


def test_people_are_told_where_prompts_say_nothing(tmp_path, capsys):
    path, chance = tmp_path / "trace.csv", random.Random(0)
    rows = [f"{number},7,{chance.randint(1, 99)}" for number in range(200)]
    path.write_text("\n".join(["arrival_s,prompt_tokens,new_tokens", *rows]) + "\n")
    assert profile(["lengths", "--trace", str(path), "--output", str(tmp_path / "l.json")]) == 0
    assert "these prompts do not say how long" in capsys.readouterr().out


@pytest.mark.parametrize("is_batch", [False, True])
def test_answers_of_a_run_teach_lengths(is_batch, tiny_model, tmp_path, capsys):
    model = tiny_model("llama")
    prompts, results = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    chance = random.Random(0)
    lines: dict[str, list[str]] = {"prompts": [], "results": []}
    for number in range(120):
        tokens = [chance.randrange(10, 60) for _ in range(20)] + [3 + number % 2]
        count = 40 if number % 2 else 5
        if is_batch:
            body = {"model": "m", "prompt": tokens}
            lines["prompts"].append(json.dumps(
                {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions",
                 "body": body}
            ))  # fmt: skip
            answer = {"choices": [{}], "usage": {"completion_tokens": count}}
            lines["results"].append(json.dumps(
                {"custom_id": f"r{number}", "response": {"status_code": 200, "body": answer}}
            ))  # fmt: skip
        else:
            lines["prompts"].append(json.dumps({"id": number, "prompt_token_ids": tokens}))
            lines["results"].append(json.dumps(
                {"id": number, "token_ids": [1] * count, "text": "", "finish_reason": "stop"}
            ))  # fmt: skip
    prompts.write_text("\n".join(lines["prompts"]) + "\n")
    results.write_text("\n".join(lines["results"][:100]) + "\n")  # some are not answered yet
    words = ["lengths", "--model", str(model), "--prompts", str(prompts), "--results", str(results)]
    words += ["--output", str(tmp_path / "l.json"), "--json"]
    words += ["--format", "openai_batch"] * is_batch
    assert profile(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["samples"] == 100
    assert found["accuracy"]["2"] > 0.9


def test_an_unknown_predictor_is_named_with_the_known_ones(trace, capsys):
    words = ["--strategy", PLAN, "--trace", str(trace), "--policy", "multibin"]
    assert sim([*words, "--predictor", "orcale"]) == 2
    assert "--predictor: found 'orcale', expected one of oracle, noisy" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--trace: found none, expected one, or model, prompts and results"),
        (["--trace", "x.csv", "--model", "m"], "--trace: found with model"),
        (["--trace", "missing.csv"], "missing.csv"),
    ],
)
def test_mistakes_exit_with_2(words, message, tmp_path, capsys):
    assert profile(["lengths", *words, "--output", str(tmp_path / "l.json")]) == 2
    assert message in capsys.readouterr().err
