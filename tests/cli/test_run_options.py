"""Options of a run: faults, exit status, and the cache of quantized layers."""

from __future__ import annotations

import argparse
import inspect
from dataclasses import replace

import pytest
from helpers.ranks import make_plan

from llmpq.cli.common import make_parser
from llmpq.cli.run_options import (
    HostProgress,
    add_fault_options,
    add_host_options,
    add_store_options,
    host_words,
    outcome,
    read_run_options,
    store_directory,
)
from llmpq.dist import Hosts, run_job
from llmpq.dist.async_engine import AsyncEngine
from llmpq.dist.metrics.measurement import Measurement
from llmpq.dist.metrics.progress import Event, SilentProgress
from llmpq.errors import SpecError
from llmpq.options.declare import add_options, read_options
from llmpq.options.run import FaultOptions, PromptFiles, RunOptions
from llmpq.spec.cluster import Cluster, DeviceGroup, Node

DONE = Measurement(requests=1, generated_tokens=1, latency_s=1.0, load_s=1.0, stages=())


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_fault_options(parser)
    return parser.parse_args(words)


def test_defaults_are_three_restarts_and_thirty_seconds():
    found = read_options(FaultOptions, options())
    assert (found.max_restarts, found.drain_timeout_s, found.health) == (3, 30.0, None)
    assert options().bad_prompts == "skip"


@pytest.mark.parametrize("call", [run_job, AsyncEngine.launch])
def test_python_and_the_command_have_one_default_of_restarts(call):
    default = inspect.signature(call).parameters["max_restarts"].default
    assert default == options().max_restarts


@pytest.mark.parametrize("words", [("--max_restarts", "-1"), ("--drain_timeout", "nan")])
def test_numbers_out_of_range_raise_an_error(words):
    with pytest.raises(SpecError):
        read_options(FaultOptions, options(*words))


def test_outcome_of_a_complete_run_is_success(capsys):
    assert outcome(DONE) == 0
    assert capsys.readouterr().err == ""


def test_outcome_counts_requests_not_started(capsys):
    assert outcome(replace(DONE, not_served=7)) == 130
    assert "7 requests" in capsys.readouterr().err


def test_outcome_lists_the_first_rejected_prompts(capsys):
    refused = tuple(f"prompts: line {number}" for number in range(25))
    assert outcome(replace(DONE, refused=refused)) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 11
    assert told[0].endswith("line 0")
    assert "25 in all" in told[-1]


def test_store_option_overrides_the_variable(tmp_path):
    environ = {"LLMPQ_STORE": str(tmp_path / "b"), "XDG_CACHE_HOME": str(tmp_path)}
    assert store_directory(str(tmp_path / "a"), environ) == tmp_path / "a"
    assert store_directory(None, environ) == tmp_path / "b"
    assert store_directory("off", environ) is None
    assert store_directory(None, environ | {"LLMPQ_STORE": "off"}) is None


def test_default_store_is_in_the_cache_of_the_user(tmp_path):
    in_home = tmp_path / ".cache" / "llmpq" / "store"
    assert store_directory(None, {"HOME": str(tmp_path)}) == in_home
    assert in_home.stat().st_mode & 0o777 == 0o700
    assert store_directory(None, {"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "llmpq" / "store"
    assert store_directory(None, {}) is None


def test_no_store_without_write_access(tmp_path):
    (tmp_path / "file").touch()
    assert store_directory(None, {"XDG_CACHE_HOME": str(tmp_path / "file")}) is None


def test_store_limit_is_in_gibibytes():
    parser = argparse.ArgumentParser()
    add_store_options(parser.add_argument_group())
    limit = ["--store", "off", "--store_limit"]
    assert read_run_options(RunOptions, parser.parse_args([*limit, "1.5"])).store_limit_bytes == (
        3 * 2**29
    )
    for senseless in ("-1", "nan", "inf"):
        with pytest.raises(SpecError, match="--store_limit"):
            read_run_options(RunOptions, parser.parse_args([*limit, senseless]))


GROUP = DeviceGroup(type="cpu", count=1, threads=1)
TWO = make_plan(
    (0, 1, 3),
    cluster=Cluster(name="two", nodes=tuple(Node(name=n, devices=(GROUP,)) for n in ("a", "b"))),
)
WORDS = ["--strat_file_name", "my plan.json", "--nnodes", "2", "--node_rank=0"]
PLACE = Hosts(num_nodes=2, node_rank=0, address=("10.0.0.1", 29500))


def test_a_lone_host_says_which_host_it_waits_for_and_what_to_start_there(capsys):
    parser = make_parser("llmpq-dist", "")
    add_options(parser, PromptFiles, "strat_file_name")
    add_host_options(parser)
    words = host_words(parser.parse_args(WORDS), "llmpq-dist")
    progress = HostProgress(SilentProgress(), PLACE, TWO, words)
    assert capsys.readouterr().err == (
        "llmpq-dist: host 0 of 2 (a): with rank 0, waiting at 10.0.0.1:29500 for host 1 (b); start "
        "there: llmpq-dist --strat_file_name 'my plan.json' --nnodes 2 --node_rank 1\n"
    )
    for done in (1, 2):
        progress.report(Event(rank=0, kind="load", done=done, total=2))
    assert capsys.readouterr().err == "llmpq-dist: host 0 of 2 (a): all hosts have joined\n"


def test_another_host_says_what_it_does(capsys):
    HostProgress(SilentProgress(), replace(PLACE, node_rank=1), TWO, WORDS)
    line = "host 1 of 2 (b): with rank 1, connecting to host 0 (a) at 10.0.0.1:29500"
    assert capsys.readouterr().err == f"llmpq-dist: {line}\n"


def test_where_a_launcher_starts_all_hosts_there_is_nothing_to_start(capsys):
    HostProgress(SilentProgress(), PLACE, TWO, None)
    assert "start there" not in capsys.readouterr().err


def test_a_host_that_the_plan_lacks_raises_an_error():
    with pytest.raises(SpecError, match="nodes of the plan"):
        HostProgress(SilentProgress(), replace(PLACE, node_rank=2), TWO, WORDS)
