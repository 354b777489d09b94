"""Options of llmpq-serve and of batch files become what the server is given."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
from helpers.fake_engine import FakeEngine
from helpers.ranks import make_plan

from llmpq.batching.speculation import SpeculativeConfig, as_speculative_config
from llmpq.cli.commands import dist, serve
from llmpq.cli.engine_options import check_context_memory
from llmpq.cli.running import openai_batch
from llmpq.costmodel.memory import context_bytes
from llmpq.errors import SpecError
from llmpq.server.admission import prefill_tokens_per_s, queued_tokens_for, token_budget_for
from llmpq.server.app import ServerOptions
from llmpq.spec import catalog
from llmpq.spec.cluster import Cluster, DeviceGroup, Node
from llmpq.spec.plan import Fleet, FleetMember, read_plan, write_fleet, write_plan

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "models" / "demo"
PLAN = sorted((ROOT / "strategies").glob("opt-13b__*.json"))[0]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What ``run_server`` was given."""
    found: dict[str, Any] = {}

    class Engine:
        start_s: ClassVar = {"imports": 1.5}

        async def ready(self) -> FakeEngine:
            return FakeEngine()

        def kill(self) -> None:
            found.clear()

    def run_server(options: ServerOptions, start, load, on_ready) -> None:
        found.update(options=options, start=start)
        on_ready("http://127.0.0.1:8000")

    monkeypatch.setattr("llmpq.server.app.run_server", run_server)
    monkeypatch.setattr(serve, "launch_engine", lambda *_: Engine())
    return found


def run(*words: str) -> int:
    return serve.main(["--strat_file_name", str(PLAN), "--model", str(DEMO), *words])


def test_defaults_listen_on_this_host_without_limits(served, capsys):
    assert run() == 0
    options = served["options"]
    assert (options.host, options.port, options.model_dir) == ("127.0.0.1", 8000, DEMO)
    assert options.names == (read_plan(PLAN).model.name,)
    assert options.admission.max_num_queued_reqs is None
    assert options.admission.max_num_queued_tokens is None
    output = capsys.readouterr()
    assert output.out == "ready http://127.0.0.1:8000\n"
    assert output.err == "ready http://127.0.0.1:8000\n"


def test_a_model_alone_is_planned_for_this_host(served, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = ["--max_num_seqs", "2", "--max_model_len", "300", "--bits", "8"]
    assert serve.main([str(DEMO), *words]) == 0
    assert served["options"].model_dir == DEMO
    (file,) = (tmp_path / "llmpq" / "plans").iterdir()
    plan = read_plan(file)
    assert (plan.workload.batch, plan.workload.max_context_tokens) == (2, 300)
    assert set(plan.bits) == {8}
    shown = capsys.readouterr()
    assert "300 tokens each, 2 answers at the same time" in shown.err
    assert shown.out == "ready http://127.0.0.1:8000\n"


def test_a_request_longer_than_the_plan_needs_free_memory():
    plan, model = read_plan(PLAN), catalog.model("facebook/opt-13b")
    planned = plan.workload.max_context_tokens
    free = [one.capacity_bytes - one.memory.total for one in plan.estimate.stages]
    room = planned + min(free) // context_bytes(model, plan.dtype, 1, "cuda")
    for fits in (1, planned, room):
        check_context_memory(plan, model, fits)
    with pytest.raises(SpecError, match=f"--max_model_len: found {room + 1}, .* at most {room}: "):
        check_context_memory(plan, model, room + 1)


def test_ttft_bound_sets_the_queued_tokens(served, capsys):
    assert run("--ttft_bound", "100", "--max_num_queued_reqs", "7", "--json") == 0
    admission = served["options"].admission
    plan = read_plan(PLAN)
    assert admission.max_num_queued_tokens == queued_tokens_for(plan, 100)
    assert admission.max_num_queued_reqs == 7
    assert admission.prefill_tokens_per_s == prefill_tokens_per_s(plan)
    printed = json.loads(capsys.readouterr().out)
    assert printed["max_num_queued_tokens"] == admission.max_num_queued_tokens


def test_the_line_that_says_ready_has_the_steps_of_the_start(served, capsys):
    assert run("--json") == 0
    printed = json.loads(capsys.readouterr().out)
    total_s, *steps = printed["start_s"].values()
    assert list(printed["start_s"]) == ["total", "command", "packages", "ranks"]
    assert total_s == sum(steps)
    assert printed["rank_start_s"] == {"imports": 1.5}


def test_speculative_config_has_vllms_fields():
    text = '{"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 3}'
    expected = SpeculativeConfig(num_speculative_tokens=7, prompt_lookup_max=3)
    assert as_speculative_config(text) == expected
    assert as_speculative_config(None) is None
    text = '{"method": "draft_model", "model": "m", "num_speculative_tokens": 3, "bits": 4}'
    assert as_speculative_config(text) == SpeculativeConfig(
        method="draft_model", model="m", num_speculative_tokens=3, bits=4
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "--speculative_config: found no JSON"),
        ("5", "found 5, expected a JSON object"),
        ("{}", "'num_speculative_tokens' is missing"),
        ('{"method": "eagle", "num_speculative_tokens": 2}', "'method': found 'eagle'"),
        ('{"num_speculative_tokens": 2, "model": "x"}', "'model'"),
        ('{"num_speculative_tokens": 2, "bits": 4}', "and bits 4, expected 'model'"),
        ('{"num_speculative_tokens": 2, "method": "draft_model"}', "'draft_model' with model None"),
        (
            '{"num_speculative_tokens": 2, "method": "draft_model", "model": "x", "bits": 5}',
            "'bits': found 5",
        ),
        ('{"num_speculative_tokens": 99}', "'num_speculative_tokens': found 99"),
        ('{"num_speculative_tokens": 2, "prompt_lookup_min": 6}', "prompt_lookup_min 6"),
    ],
)
def test_a_speculative_config_that_cannot_be_used_names_its_field(capsys, text, message):
    assert run("--speculative_config", text) == 2
    assert message in capsys.readouterr().err


def test_itl_bound_sets_the_token_budget(served, capsys):
    assert run("--itl_bound", "1000", "--json") == 0
    plan = read_plan(PLAN)
    budget = token_budget_for(plan, 1000)
    assert json.loads(capsys.readouterr().out)["token_budget"] == budget
    sizes = plan.micro_batching
    assert budget == max(sizes.prefill * plan.workload.prompt_tokens, sizes.decode)


@pytest.mark.parametrize(
    "words",
    [
        ("--ttft_bound", "0.000001"),
        ("--max_num_queued_reqs", "0"),
        ("--drain_timeout", "-1"),
        ("--ttft_bound", "1", "--max_num_queued_tokens", "5"),
        ("--scheduler", "best"),
        ("--scheduler", "trail"),  # nothing predicts the lengths of answers
        ("--alpha", "1"),
        ("--alpha", "-1", "--scheduler", "larry"),
        ("--alpha", "nan", "--scheduler", "larry"),
        ("--token_budget", "0"),
        ("--itl_bound", "0.000001"),
        ("--itl_bound", "1", "--token_budget", "5"),
        ("--max_restarts", "-1"),
        ("--step_timeout", "0"),
        ("--form_timeout", "0"),
        ("--form_timeout", "nan"),
        ("--max_num_choices", "0"),
        ("--ttft_bound", "nan"),
        ("--ttft_bound", "inf"),
        ("--port", "65536"),
        ("--served_model_name", ""),
    ],
)
def test_bad_options_are_refused(served, words, capsys):
    assert run(*words) == 2
    assert words[0] in capsys.readouterr().err
    assert not served


TWO_NODES = sorted((ROOT / "strategies").glob("opt-30b__paper-03__*__llmpq.json"))[0]


def test_a_plan_over_several_hosts_is_refused(served, capsys):
    assert serve.main(["--strat_file_name", str(TWO_NODES), "--model", str(DEMO)]) == 2
    error = capsys.readouterr().err
    assert f"{TWO_NODES}: found stages on 2 nodes (node0, node1), expected one" in error
    assert "llmpq-dist --nnodes" in error
    assert not served


def test_a_fleet_over_several_hosts_is_refused(tmp_path, capsys):
    group = DeviceGroup(type="cpu", count=1, threads=1)
    cluster = Cluster(name="c", nodes=tuple(Node(name=n, devices=(group,)) for n in ("a", "b")))
    own = make_plan((0, 12), cluster=Cluster(name="own", nodes=cluster.nodes[:1]), source=DEMO)
    write_plan(tmp_path / "one.json", own)
    members = tuple(
        FleetMember(strategy="one.json", devices=(device.label,), requests_per_s=1)
        for device in cluster.devices
    )
    fleet = Fleet(
        model="tiny", replicas=members, requests_per_s=2, bound=2, status="optimal", cluster=cluster
    )
    write_fleet(tmp_path / "fleet.json", fleet)
    assert serve.main(["--fleet", str(tmp_path / "fleet.json")]) == 2
    assert "found replicas on 2 nodes (a, b), expected one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "my-model"], "found no plan, expected MODEL .*, --strat_file_name FILE"),
        ([], "found no plan, expected MODEL .*, --strat_file_name FILE"),
        (["my-model"], "my-model"),
        ([str(DEMO), "--model", str(DEMO)], "--model: found with '.*', expected one of them"),
        (["--strat_file_name", str(PLAN), "--bits", "4"], "--bits, .* found with a plan"),
        ([str(PLAN)], "found '.*' alone, expected --strat_file_name"),
        (["x", "--strat_file_name", str(PLAN)], "found 'x' and a plan, expected one"),
    ],
)
def test_without_a_plan_the_answer_says_how_to_make_one(served, capsys, words, message):
    assert serve.main(words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert re.search(message, lines[0])


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start_engine(options, plan, model_dir) -> FakeEngine:
        return FakeEngine()

    monkeypatch.setattr(openai_batch, "start_engine", start_engine)


def batch(tmp_path: Path, lines: list[object], *words: str) -> int:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    files = ["--prompts", str(source), "--output", str(tmp_path / "out.jsonl")]
    start = ["--strat_file_name", str(PLAN), "--model", str(DEMO), "--format", "openai_batch"]
    return dist.main([*start, *files, *words])


LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi"}}


def test_batch_file_is_answered(fake_engine, tmp_path, capsys):
    assert batch(tmp_path, [LINE], "--json") == 0
    found = json.loads((tmp_path / "out.jsonl").read_text(encoding="utf-8"))
    assert found["response"]["body"]["usage"]["completion_tokens"] == 16
    summary = json.loads(capsys.readouterr().out)
    assert (summary["requests"], summary["errors"], summary["generated_tokens"]) == (1, 0, 16)


def test_batch_lines_without_an_id_give_status_2(fake_engine, tmp_path, capsys):
    assert batch(tmp_path, [LINE, {"url": "x"}]) == 2
    assert "in.jsonl: line 2" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").exists()
    (tmp_path / "out.jsonl").unlink()
    assert batch(tmp_path, [LINE, {"url": "x"}], "--bad_prompts", "refuse") == 2
    assert not (tmp_path / "out.jsonl").exists()
