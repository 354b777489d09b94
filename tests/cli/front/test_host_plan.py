"""The plan of a model for this host: made once, used while it fits."""

import argparse
import os
from dataclasses import replace
from pathlib import Path

import pytest

from llmpq.cli.front import host_plan as module
from llmpq.cli.front.host_plan import add_host_plan_options, find_model, host_plan, plan_text
from llmpq.errors import InfeasibleError, SpecError
from llmpq.spec.cluster import Cluster, DeviceGroup, Node
from llmpq.units import GIB

DEMO = Path(__file__).resolve().parents[3] / "models" / "demo"


def host(gib):
    group = DeviceGroup(type="cpu", count=1, threads=2, memory_bytes=int(gib * GIB))
    return Cluster(name="this host", nodes=(Node(name="here", devices=(group,)),))


@pytest.fixture
def memory(monkeypatch, tmp_path):
    """Return a list whose last number is the free memory of this host in GiB."""
    free = [4.0]
    monkeypatch.setattr(module, "host_cluster", lambda: host(free[-1]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return free


def found(*words, model=DEMO):
    parser = argparse.ArgumentParser()
    add_host_plan_options(parser, 1)
    options = parser.parse_args(words)
    options.command = "llmpq test"
    return host_plan(str(model), options)


def test_a_plan_is_kept_and_used_again(memory, tmp_path):
    first, again = found(), found()
    assert (first.is_new, again.is_new) == (True, False)
    assert first.plan == again.plan
    assert first.file == again.file
    assert first.file.is_relative_to(tmp_path / "cache")
    assert found("--replan").is_new
    assert found("--bits", "4").is_new
    assert found("--max_num_seqs", "2").plan.workload.batch == 2


def test_other_files_of_the_model_make_another_plan(memory, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in DEMO.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    first = found(model=folder)
    os.utime(folder / "config.json", (1, 1))
    assert found(model=folder).file != first.file


def test_a_kept_plan_that_no_longer_fits_is_made_anew(memory):
    first = found("--max_num_seqs", "8")
    needed = sum(stage.memory.total for stage in first.plan.estimate.stages)
    memory.append(needed / GIB + 0.01)
    assert not found("--max_num_seqs", "8").is_new
    memory.append(needed / GIB - 0.01)
    second = found("--max_num_seqs", "8")
    assert second.is_new
    assert second.plan.estimate.stages[0].memory.total < needed


def test_a_broken_file_of_the_cache_is_replaced(memory):
    first = found()
    first.file.write_text("{")
    again = found()
    assert again.is_new
    assert again.plan.bits == first.plan.bits


def test_the_text_says_what_the_plan_promises(memory):
    one = found("--max_num_seqs", "3", "--max_model_len", "400")
    text = plan_text(one)
    assert "12 layers" in text
    assert "400 tokens each, 3 answers at the same time" in text
    assert str(one.file) in text
    assert "(new)" in text
    assert "kept from before" in plan_text(replace(one, is_new=False))
    assert one.answer_tokens_per_s > 0


def test_what_cannot_be_planned_is_an_error(memory):
    with pytest.raises(SpecError, match="--max_num_seqs: found 0"):
        found("--max_num_seqs", "0")
    memory.append(0.2)
    with pytest.raises(InfeasibleError):
        found()


def test_a_name_means_its_files_in_the_cache_of_the_hub(monkeypatch, tmp_path):
    pytest.importorskip("huggingface_hub")
    with pytest.raises(SpecError, match=r"hf download facebook/opt-125m"):
        find_model("facebook/opt-125m")
    folder = tmp_path / "models--own--demo"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots").mkdir()
    (folder / "snapshots" / "abc").symlink_to(DEMO)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path), raising=False)
    spec, path = find_model("own/demo")
    assert spec.num_layers == 12
    assert path == DEMO
