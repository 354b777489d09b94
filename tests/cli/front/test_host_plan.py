"""The plan of a model for this host: made once, used while it fits."""

import argparse
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.tiny_configs import tiny_config
from safetensors.numpy import save_file

from llmpq.assigner.constraints.resolve import Overrides
from llmpq.cli.commands import serve
from llmpq.cli.front import host_plan as module
from llmpq.cli.front.host_plan import (
    find_model,
    host_plan,
    plan_decisions,
    plan_text,
    saved_state_bytes,
)
from llmpq.cli.front.hub import HubModel
from llmpq.cli.front.plan_options import add_host_plan_options
from llmpq.errors import InfeasibleError, SpecError
from llmpq.options.declare import read_options
from llmpq.options.engine import EngineOptions
from llmpq.options.limits import engine_limits
from llmpq.spec import catalog
from llmpq.spec.catalog import with_device_types
from llmpq.spec.cluster import Cluster, DeviceGroup, Node
from llmpq.spec.devices.figures import DeviceEntry
from llmpq.spec.runtime_constants import state_slots
from llmpq.units import GIB

DEMO = Path(__file__).resolve().parents[3] / "models" / "demo"


DRAFTING_SIZES = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 24, "vocab_size": 32000,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128,
    "max_position_embeddings": 4096,
    "layer_types": 6 * [*3 * ["linear_attention"], "full_attention"],
}  # fmt: skip


def host(gib):
    group = DeviceGroup(type="cpu", count=1, threads=2, memory_bytes=int(gib * GIB))
    return Cluster(name="this host", nodes=(Node(name="here", devices=(group,)),))


@pytest.fixture
def memory(monkeypatch, tmp_path):
    """Return a list whose last number is the free memory of this host in GiB."""
    free = [4.0]
    monkeypatch.setattr(module, "host_cluster", lambda: host(free[-1]))
    monkeypatch.setattr(module, "with_measured_figures", lambda cluster: cluster)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return free


def found(*words, model=DEMO, others=None):
    parser = argparse.ArgumentParser()
    add_host_plan_options(parser, 1)
    options = parser.parse_args(words)
    options.command = "llmpq test"
    return host_plan(str(model), options, others)


def test_a_plan_is_kept_and_used_again(memory, tmp_path):
    first, again = found(), found()
    assert (first.is_new, again.is_new) == (True, False)
    assert first.plan == again.plan
    assert first.file == again.file
    assert first.file.is_relative_to(tmp_path / "cache")
    assert found("--replan").is_new
    assert found("--bits", "4").is_new
    assert found("--max_num_seqs", "2").plan.workload.batch == 2


def test_devices_are_measured_for_a_new_plan_unless_the_user_forbids_it(memory, monkeypatch):
    entry = DeviceEntry(
        type="cpu",
        kind="cpu",
        memory_bytes=8 * GIB,
        memory_bytes_per_s=1e9,
        flops=(("float32", 1e10),),
        cores=2,
    )
    measured = []

    def measure(cluster):
        measured.append(cluster)
        return with_device_types(cluster, [entry])

    monkeypatch.setattr(module, "with_measured_figures", measure)
    guessed = found("--no_measure")
    assert measured == []
    assert "the catalogue; llmpq chat --replan measures" in plan_text(guessed)
    assert not found().is_new  # a plan that is kept needs no figures
    first = found("--replan")
    assert len(measured) == 1
    assert "measured devices" in plan_text(first)
    assert first.file != guessed.file
    assert first.plan.cluster.device_types == (entry,)
    assert first.answer_tokens_per_s != guessed.answer_tokens_per_s
    monkeypatch.setattr(
        module, "with_kept_figures", lambda cluster: with_device_types(cluster, [entry])
    )
    again = found()
    assert (again.file, again.is_new) == (first.file, False)
    assert len(measured) == 1


@pytest.fixture
def drafting(tmp_path):
    """A model that ships a layer for multi-token prediction; its weights are not read."""
    folder, config = tmp_path / "drafting", tiny_config("qwen3_5_text", **DRAFTING_SIZES)
    folder.mkdir()
    (folder / "config.json").write_text(config.to_json_string())
    names = ("model.layers.0.input_layernorm.weight", "mtp.fc.weight")
    save_file({name: np.zeros(1, np.float16) for name in names}, folder / "model.safetensors")
    return folder


def test_a_models_own_layer_drafts_where_that_pays(memory, drafting):
    first = found("--bits", "8", model=drafting)
    draft = first.plan.draft
    assert draft is not None
    assert (draft.model, draft.bits, draft.device) == ("mtp", 8, first.plan.stages[0].device)
    assert draft.speedup > 1
    assert plan_decisions(first)["draft_tokens"] == draft.num_speculative_tokens
    told = f"{draft.num_speculative_tokens} by multi-token prediction: {draft.speedup:.1f} times"
    assert re.search(rf"^drafts +{told} as fast where 70% are right$", plan_text(first), re.M)
    assert not found("--bits", "8", model=drafting).is_new
    needed = first.plan.estimate.stages[0].memory.total
    memory.append((needed + draft.memory_bytes - 1) / GIB)
    other = found("--bits", "8", model=drafting)
    assert other.is_new  # that has no room for the layer any more
    (drafting / "model.safetensors").unlink()
    memory.append(4.0)
    assert found("--bits", "8", model=drafting).plan.draft is None


def test_a_layer_beside_gptqs_codes_is_not_planned_with(memory, drafting):
    file = drafting / "config.json"
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
    fields = json.loads(file.read_text()) | {"quantization_config": quantization}
    file.write_text(json.dumps(fields))
    first = found(model=drafting)
    assert first.model.spec.stored
    assert first.plan.draft is None


def test_a_server_saves_states_where_there_is_room(memory, drafting):
    first = found("--bits", "8", model=drafting)
    own = first.model.spec.state_bytes()
    assert own
    assert saved_state_bytes(first) == 16 * own
    stage = first.plan.estimate.stages[0]
    assert first.plan.draft is not None
    planned = stage.memory.total + first.plan.draft.memory_bytes
    for states in (0, 1, 5):
        capacity = planned + int(states * own / 0.25) + 8
        estimate = replace(first.plan.estimate, stages=(replace(stage, capacity_bytes=capacity),))
        small = replace(first, plan=replace(first.plan, estimate=estimate))
        assert saved_state_bytes(small) == states * own
    assert saved_state_bytes(found()) == 0  # the shipped model has no such layers


@pytest.mark.parametrize(
    ("words", "states"),
    [
        ([], 16),
        (["--no_prefix_caching"], 0),
        (["--state_cache_size", "0.001"], 9),
        (["--state_cache_size", "0"], 0),
    ],
)
def test_a_server_of_a_model_is_given_them(memory, drafting, monkeypatch, words, states):
    kept = []

    def served(options, _, model):
        limits = engine_limits(
            model.found.plan,
            read_options(EngineOptions, options),
            state_bytes=model.found.model.spec.state_bytes(),
        )
        kept.append(limits.num_state_slots - state_slots(model.found.plan.workload.batch))
        return 0

    monkeypatch.setattr(serve, "_serve_plan", served)
    assert serve.main([str(drafting), "--bits", "8", "--no_measure", *words]) == 0
    assert kept == [states]


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


class Others:
    """A host that is as large as this one, with a faster processor."""

    def own(self, cluster):
        return cluster

    def joined(self, own, **_):
        entry = DeviceEntry(
            type="cpu-b",
            kind="cpu",
            memory_bytes=8 * GIB,
            memory_bytes_per_s=1e11,
            flops=(("float32", 1e13), ("bfloat16", 1e13)),
            cores=2,
        )
        group = replace(own.nodes[0].devices[0], type="cpu-b")
        nodes = (*own.nodes, Node(name="b", devices=(group,)))
        return Cluster(name="two", nodes=nodes, device_types=(entry,))


def test_a_plan_over_several_hosts_has_its_master_here(memory, monkeypatch):
    made = []
    real = module.plan_longest_context

    def other_way_round(request, *more, **options):
        """Plan with the master on the worker where the request leaves it open."""
        order = request.overrides.order or ("b/cpu-b#0", "here/cpu#0")
        request = replace(request, overrides=Overrides(order=order))
        made.append(real(request, *more, **options))
        return made[-1]

    monkeypatch.setattr(module, "plan_longest_context", other_way_round)
    memory.append(500 / 1024)
    words = ("--max_num_seqs", "64", "--max_model_len", "512", "--bits", "16", "--no_measure")
    first = found(*words, others=Others())
    assert made[0].nodes == ("b", "here")
    assert first.plan.nodes == ("here", "b")
    assert "b/cpu-b#0" in plan_text(first)
    again = found(*words, others=Others())
    assert (again.file, again.is_new) == (first.file, False)


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


def test_the_record_has_every_decision(memory):
    one = found("--max_num_seqs", "3", "--max_model_len", "400", "--bits", "8")
    record = plan_decisions(one)
    (stage,) = one.plan.estimate.stages
    assert record["model"] == {
        "name": "demo",
        "path": str(DEMO),
        "from": "here",
        "commit": None,
        "downloaded_bytes": 0,
    }
    assert record["devices"] == [
        {
            "device": "here/cpu#0",
            "figures": "catalogue",
            "threads": 2,
            "layers": 12,
            "layers_on_disk": 0,
            "memory_bytes": stage.memory.total,
            "capacity_bytes": 4 * GIB,
            "layers_with_experts_on_host": 0,
            "host_memory_bytes": 0,
        }
    ]
    assert (record["context"], record["sequences"], record["bits"]) == (400, 3, [8] * 12)
    assert record["is_new_plan"]
    assert set(record) == documented_fields("docs/install/first-answer.md")


def documented_fields(page):
    """Return the names in the first column of the table of a page."""
    text = (DEMO.parents[1] / page).read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \|", text, flags=re.M)
    return set(re.findall(r"`(\w+)`", " ".join(rows)))


def test_what_cannot_be_planned_is_an_error(memory):
    with pytest.raises(SpecError, match="--max_num_seqs: found 0"):
        found("--max_num_seqs", "0")
    memory.append(0.2)
    with pytest.raises(InfeasibleError):
        found()


def test_a_model_that_cannot_fit_is_not_downloaded(memory, monkeypatch):
    def hub_model(name, check):
        check(DEMO)
        raise AssertionError("the weights would be downloaded now")

    monkeypatch.setattr(module, "hub_model", hub_model)
    layers = 12 * catalog.resolve_model(DEMO)[0].layers[0].parameters
    memory.append((layers / 2 - 1) / GIB)
    with pytest.raises(InfeasibleError, match=r"own/name: found .* at 4 bits; it was not"):
        found("--bits", "8", "4", model="own/name")
    memory.append((layers / 2 + 1) / GIB)
    with pytest.raises(AssertionError, match="would be downloaded"):
        found("--bits", "8", "4", model="own/name")


def test_a_short_name_of_the_catalogue_means_the_model_of_the_hub(monkeypatch):
    asked = []

    def hub_model(name, check):
        asked.append(str(name))
        check(DEMO)
        return HubModel(path=DEMO, commit="abc", downloaded_bytes=7)

    monkeypatch.setattr(module, "hub_model", hub_model)
    found = find_model("opt-125m")
    assert asked == ["facebook/opt-125m"]
    assert (found.spec.name, found.spec.num_layers) == ("facebook/opt-125m", 12)
    assert found.hub.downloaded_bytes == 7
    with pytest.raises(SpecError, match="did you mean"):
        find_model("opt-125")
    assert find_model(str(DEMO)).hub is None
