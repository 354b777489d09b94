"""Options of llmpq-serve and of batch files become what the server is given."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from helpers.fake_engine import FakeEngine
from helpers.ranks import make_plan

from llmpq.batching.speculation import SpeculativeConfig, as_speculative_config
from llmpq.cli.commands import dist, serve
from llmpq.cli.engine_options import check_context_memory, engine_words
from llmpq.cli.running import openai_batch
from llmpq.costmodel.memory import context_bytes
from llmpq.errors import SpecError
from llmpq.server.admission import prefill_tokens_per_s, queued_tokens_for, token_budget_for
from llmpq.server.app import ServerOptions
from llmpq.spec import catalog
from llmpq.spec.cluster import Cluster, DeviceGroup, Node
from llmpq.spec.plan import (
    Fleet,
    FleetMember,
    read_fleet,
    read_plan,
    write_fleet,
    write_plan,
)

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
    monkeypatch.setattr(serve, "launch_engine", lambda *_, **__: Engine())
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
    words.append("--no_measure")
    assert serve.main([str(DEMO), *words]) == 0
    assert served["options"].model_dir == DEMO
    (file,) = (tmp_path / "llmpq" / "plans").iterdir()
    plan = read_plan(file)
    assert (plan.workload.batch, plan.workload.max_context_tokens) == (2, 300)
    assert set(plan.bits) == {8}
    shown = capsys.readouterr()
    assert "300 tokens each, 2 answers at the same time" in shown.err
    assert shown.out == "ready http://127.0.0.1:8000\n"
    assert serve.main([str(DEMO), *words, "--json"]) == 0
    decisions = json.loads(capsys.readouterr().out)["decisions"]
    assert (decisions["context"], decisions["sequences"]) == (300, 2)
    assert (decisions["plan"], decisions["is_new_plan"]) == (str(file), False)


@pytest.mark.parametrize("model", [0, 2, 4, 9])
def test_workers_get_the_options_of_the_engine(model):
    words = ["--kernel", "x", "--workers", "a", "--key_file", "k", "--no_prefix_caching"]
    words = ["--step", "5", *words, "--port", "80", "--max_num_seqs", "2", "--bits", "8", "-v"]
    words.insert(model, "MODEL")
    options = serve._parser().parse_args(words)
    assert options.given == "MODEL"
    expected = ["--step_timeout", "5", "--kernel", "x", "--no_prefix_caching"]
    assert engine_words(options) == expected


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
        ("--scheduler", "trail"),  # without a predictor of the lengths of answers
        ("--predictor", "lengths.json"),  # that no scheduler reads
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


def test_a_plan_over_several_hosts_names_the_command_of_each(served, capsys):
    words = ["--strat_file_name", str(TWO_NODES), "--model", str(DEMO), "--token_budget", "64"]
    http = ["--port", "80", "--served_model_name", "a", "b", "--ttft_bound", "5", "--json"]
    assert serve.main([*words, *http]) == 2
    error = capsys.readouterr().err
    assert f"{TWO_NODES}: found stages on 2 nodes (node0, node1), expected one" in error
    hosts = "--nnodes 2 --master_addr ADDRESS --token_file FILE --node_rank"
    assert error.splitlines()[1:] == [
        f"  node0: {' '.join(['llmpq-serve', *words, *http, hosts])} 0",
        f"  node1: {' '.join(['llmpq-serve', *words, hosts])} 1",
    ]
    assert not served


def test_what_is_known_of_the_hosts_is_in_their_commands(served, capsys):
    given = ["--master_addr", "10.0.0.1", "--token_file", "token"]
    assert serve.main(["--strat_file_name", str(TWO_NODES), "--model", str(DEMO), *given]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.endswith("--master_addr 10.0.0.1 --token_file token --nnodes 2 --node_rank 1")


HOSTS = ["--nnodes", "2", "--master_addr", "10.0.0.1", "--token_file", "token"]


def test_a_host_without_the_master_runs_its_stages_alone(served, capsys, monkeypatch):
    found = []
    monkeypatch.setattr(serve, "run_stages", lambda *given: found.append(given))
    words = ["--strat_file_name", str(TWO_NODES), "--model", str(DEMO), "--itl_bound", "1000"]
    assert serve.main([*words, *HOSTS, "--node_rank", "1"]) == 0
    ((options, plan, _, hosts, _),) = found
    assert options.token_budget == token_budget_for(plan, 1000)
    assert (hosts.num_nodes, hosts.node_rank, hosts.address) == (2, 1, ("10.0.0.1", 29500))
    assert hosts.token_file == Path("token").resolve()
    shown = capsys.readouterr()
    assert not shown.out
    assert "llmpq-serve: host 1 of 2 (node1): with rank" in shown.err
    assert shown.err.endswith("host 1 of 2 (node1): done\n")
    assert not served


def test_the_host_of_the_master_says_what_to_start_on_the_other(served, capsys):
    words = ["--strat_file_name", str(TWO_NODES), "--model", str(DEMO)]
    assert serve.main([*words, *HOSTS, "--port", "80"]) == 0
    shown = capsys.readouterr()
    other = " ".join(["start there: llmpq-serve", *words, *HOSTS, "--node_rank 1"])
    assert other in shown.err
    assert shown.out == "ready http://127.0.0.1:8000\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--strat_file_name", str(TWO_NODES), "--nnodes", "2"], "expected --master_addr too"),
        (["--strat_file_name", str(TWO_NODES), *HOSTS, "--node_rank", "2"], "2 and 2, expected 1"),
        (["--strat_file_name", str(PLAN), *HOSTS], "nnodes, node_rank: found 2 and 0"),
        ([str(DEMO), *HOSTS], "--nnodes: found without --strat_file_name"),
        (["--fleet", "fleet.json", *HOSTS], "--nnodes: found without --strat_file_name"),
    ],
)
def test_hosts_that_cannot_serve_are_refused(served, capsys, words, message):
    model = [] if str(DEMO) in words else ["--model", str(DEMO)]
    assert serve.main([*words, *model]) == 2
    assert message in capsys.readouterr().err
    assert not served


@pytest.fixture
def fleet_file(tmp_path) -> str:
    """Replica 0 on nodes a and b, replica 1 on b alone."""
    group = DeviceGroup(type="cpu", count=2, threads=1)
    cluster = Cluster(name="c", nodes=tuple(Node(name=n, devices=(group,)) for n in ("a", "b")))
    one = DeviceGroup(type="cpu", count=1, threads=1)
    both = Cluster(name="both", nodes=tuple(Node(name=n, devices=(one,)) for n in ("a", "b")))
    own = Cluster(name="own", nodes=(Node(name="b", devices=(one,)),))
    write_plan(tmp_path / "both.json", make_plan((0, 6, 12), cluster=both, source=DEMO))
    write_plan(tmp_path / "own.json", make_plan((0, 12), cluster=own, source=DEMO))
    labels = {"both.json": ("a/cpu#0", "b/cpu#0"), "own.json": ("b/cpu#1",)}
    members = tuple(
        FleetMember(strategy=name, devices=devices, requests_per_s=1)
        for name, devices in labels.items()
    )
    fleet = Fleet(
        model="tiny", replicas=members, requests_per_s=2, bound=2, status="optimal", cluster=cluster
    )
    write_fleet(tmp_path / "fleet.json", fleet)
    return str(tmp_path / "fleet.json")


ADDRESSES = ["--node_addr", "a=10.0.0.1", "b=fd00::2"]
SECRETS = ["--token_file", "token", "--api_key_file", "keys"]


def test_a_fleet_over_several_hosts_names_the_command_of_each(fleet_file, capsys):
    assert serve.main(["--fleet", fleet_file, "--port", "9000"]) == 2
    error = capsys.readouterr().err
    assert "found replicas on 2 nodes (a, b), expected one, or --node" in error
    command = f"llmpq-serve --fleet {fleet_file} --port 9000 --token_file FILE --api_key_file KEYS"
    assert error.splitlines()[1:] == [f"  {name}: {command} --node {name}" for name in "ab"]


def test_the_first_host_of_a_fleet_has_the_router(fleet_file, monkeypatch, capsys):
    given = []
    monkeypatch.setattr("llmpq.server.router.fleet.run_fleet", lambda *found: given.append(found))
    words = ["--fleet", fleet_file, "--port", "9000", *SECRETS, "--alpha", "2"]
    assert serve.main([*words, "--node", "a", *ADDRESSES, "--scheduler", "larry"]) == 0
    ((options, commands, *_),) = given
    assert options.port == 9000
    first, second = commands
    assert (second.words, second.address) == ((), "http://[fd00::2]:9002")
    assert first.address is None
    place = ["--nnodes", "2", "--node_rank", "0", "--master_addr", "10.0.0.1"]
    listen = ["--host", "127.0.0.1", "--port", "0"]
    engine = ["--alpha", "2", "--scheduler", "larry"]
    assert first.words[4:] == [
        str(Path(fleet_file).with_name("both.json")),
        "--in_fleet", *SECRETS, *engine, *listen, *place, "--master_port", "29500",
    ]  # fmt: skip
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "llmpq-serve: node a: the router, replica 0 (host 0 of 2)"
    assert lines[1].startswith(f"llmpq-serve: start on b: llmpq-serve --fleet {fleet_file} ")
    assert lines[1].endswith("--scheduler larry --node b")


def test_another_host_of_a_fleet_starts_its_parts(fleet_file, monkeypatch, capsys):
    given = []
    monkeypatch.setattr(
        "llmpq.server.router.fleet.run_replicas", lambda *found: given.append(found)
    )
    words = ["--fleet", fleet_file, "--port", "9000", *SECRETS, "--node", "b", *ADDRESSES]
    assert serve.main([*words, "--drain_timeout", "7"]) == 0
    (((first, second), drain_timeout_s),) = given
    assert drain_timeout_s == 7
    place = ["--nnodes", "2", "--node_rank", "1", "--master_addr", "10.0.0.1"]
    assert first.words[-8:] == [*place, "--master_port", "29500"]
    assert "--port" not in first.words
    assert second.words[-4:] == ["--host", "fd00::2", "--port", "9002"]
    assert "--nnodes" not in second.words
    assert "node b: replica 0 (host 1 of 2), replica 1\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--node", "c"], "--node: found 'c', expected one of a, b"),
        (["--node", "a", "--port", "0"], "--port: found 0, expected a number"),
        (["--node", "a", "--node_addr", "c=d"], "--node_addr: found 'c=d', expected NAME=ADDRESS"),
        (["--node", "a", "--node_addr", "a"], "--node_addr: found 'a', expected NAME=ADDRESS"),
        (["--node_addr", "a=b"], "found replicas on 2 nodes"),
    ],
)
def test_a_host_that_a_fleet_lacks_is_refused(fleet_file, capsys, words, message):
    assert serve.main(["--fleet", fleet_file, *words]) == 2
    assert message in capsys.readouterr().err


def test_a_replica_whose_nodes_differ_from_the_fleets_is_refused(fleet_file, capsys):
    fleet = read_fleet(fleet_file)
    moved = replace(fleet.replicas[0], devices=("a/cpu#0", "a/cpu#1"))
    write_fleet(fleet_file, replace(fleet, replicas=(moved, *fleet.replicas[1:])))
    assert serve.main(["--fleet", fleet_file, "--node", "a"]) == 2
    assert "replica 0: found nodes a in the fleet and a, b in its strategy" in (
        capsys.readouterr().err
    )


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
    class Launched:
        async def ready(self) -> FakeEngine:
            return FakeEngine()

    def launch_engine(options, plan, model_dir, *, hosts, progress, monitor) -> Launched:
        assert hosts.num_nodes == options.nnodes
        assert monitor is None
        return Launched()

    monkeypatch.setattr(openai_batch, "launch_engine", launch_engine)


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


def test_batch_files_are_answered_over_several_hosts(fake_engine, tmp_path, capsys, monkeypatch):
    words = ["--strat_file_name", str(TWO_NODES), *HOSTS]
    assert batch(tmp_path, [LINE], *words) == 0
    assert "waiting at 10.0.0.1:29500 for host 1 (node1); start there: " in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").exists()
    (tmp_path / "out.jsonl").unlink()
    found = []
    monkeypatch.setattr(openai_batch, "run_stages", lambda *given: found.append(given))
    assert batch(tmp_path, [LINE], *words, "--node_rank", "1") == 0
    ((_, _, model_dir, hosts, _),) = found
    assert (model_dir, hosts.node_rank) == (DEMO, 1)
    assert not (tmp_path / "out.jsonl").exists()


def test_batch_lines_without_an_id_give_status_2(fake_engine, tmp_path, capsys):
    assert batch(tmp_path, [LINE, {"url": "x"}]) == 2
    assert "in.jsonl: line 2" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").exists()
    (tmp_path / "out.jsonl").unlink()
    assert batch(tmp_path, [LINE, {"url": "x"}], "--bad_prompts", "refuse") == 2
    assert not (tmp_path / "out.jsonl").exists()
