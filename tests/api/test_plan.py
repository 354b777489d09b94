"""``plan`` and ``load_plan``: planning from Python, without torch."""

from __future__ import annotations

import inspect
from dataclasses import replace
from html.parser import HTMLParser

import pytest

import llmpq
from llmpq import load_plan, plan
from llmpq.errors import SpecError
from llmpq.profiler.device import host_cpu, with_host_cpu
from llmpq.spec.cluster import load_cluster
from llmpq.spec.fields import dump_json
from llmpq.spec.plan import plan_text
from llmpq.spec.workload import Workload
from llmpq.units import format_seconds

WORKLOAD = {"batch": 4, "prompt": 16, "new": 8}


def small_cluster(memory_bytes: int = 10**9) -> dict:
    device = {"type": "cpu", "count": 1, "memory_bytes": memory_bytes, "threads": 1}
    nodes = [{"name": name, "devices": [device]} for name in ("a", "b")]
    links = [{"between": ["a", "b"], "bytes_per_s": 1e9, "latency_s": 1e-5}]
    return {"schema": 1, "name": "small", "nodes": nodes, "links": links}


def test_a_cluster_may_be_a_file_a_mapping_or_a_cluster(tiny_model, tmp_path):
    folder, content = tiny_model("llama", seed=1), small_cluster()
    file = tmp_path / "cluster.json"
    file.write_text(dump_json(content))
    plans = [
        plan(folder, cluster=cluster, **WORKLOAD)
        for cluster in (file, str(file), content, load_cluster(file))
    ]
    assert {one.cluster for one in plans} == {with_host_cpu(load_cluster(file), host_cpu())}
    assert len({one.stages for one in plans}) == 1


def test_device_names_make_a_cluster_and_options_reach_the_planner():
    names = {"device_names": ["T4-16G", "V100-32G"], "device_numbers": [3, 1]}
    sizes = {"batch": 8, "prompt": 128, "new": 16}
    found = plan("facebook/opt-30b", **names, **sizes, method="uniform", bits=(8, 4))
    assert found.search.method == "uniform"
    assert set(found.bits) <= {8, 4}
    assert found.cluster.name == "t4-16gx3-v100-32gx1"


def test_a_plan_is_saved_read_and_summarized(tiny_model, tmp_path):
    made = plan(tiny_model("llama", seed=1), cluster=small_cluster(), **WORKLOAD)
    made.save(tmp_path / "plan.json")
    assert plan_text(load_plan(tmp_path / "plan.json")) == plan_text(made)
    first, *stages, last = made.summary().splitlines()
    assert "4 x 16 prompt tokens, 8 new tokens each, float32" in first
    assert [line.split(":")[0] for line in stages] == [f"stage {s.rank}" for s in made.stages]
    assert last.startswith("predicted: ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "device_names, device_numbers: found"),
        ({"device_names": ["T4-16G"], "device_numbers": [1, 2]}, "expected a cluster"),
        ({"cluster": {}, "device_names": ["T4-16G"]}, "expected one of them"),
        ({"cluster": {"schema": 1, "name": "x"}}, "cluster: field 'nodes'"),
        ({"device_names": ["T4-16G"], "device_numbers": [1], "dtype": "int9"}, "dtype: found"),
        ({"device_names": ["T4-16G"], "device_numbers": [1], "speed": 9}, "found option 'speed'"),
        ({"device_names": ["T4-16G"], "qualty_budget": 1}, "did you mean 'quality_budget'?"),
        ({"device_names": ["T4-16G"], "theta_s": 1.0}, "did you mean 'theta'?"),
        ({"device_names": ["T4-16G"], "workload": 1}, "found option 'workload'"),
        ({"device_names": ["T4-16G"], "device_numbers": 2}, "device_numbers: found 2, expected"),
        ({"device_names": "T4-16G"}, "device_names: found 'T4-16G', expected a list"),
        ({"device_names": ["T4-16G"], "device_numbers": [1], "kv_bits": 5}, "kv_bits: found 5"),
        ({"device_names": ["T4-16G"], "kv_bits": 4}, "kv_bits: found 4 with device"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(SpecError, match=message):
        plan("facebook/opt-30b", **WORKLOAD, **options)


def test_a_batch_and_numbers_of_devices_have_defaults():
    found = plan("facebook/opt-1.3b", device_names=["T4-16G"])
    assert found.workload == Workload(batch=1, prompt_tokens=512, new_tokens=128)
    assert len(found.cluster.devices) == 1


def test_a_plan_is_shown_in_a_line():
    found = plan("facebook/opt-1.3b", device_names=["T4-16G"], bits=(8,))
    seconds = format_seconds(found.estimate.predicted_s)
    expected = f"<Plan of facebook/opt-1.3b on t4-16gx1: 1 stages, 24x8 bits, {seconds}>"
    assert repr(found) == expected


def test_a_plan_is_shown_as_a_table_in_notebooks():
    class Page(HTMLParser):
        """The cells of the tables of a page, and its paragraphs."""

        def __init__(self) -> None:
            super().__init__()
            self.texts: dict[str, list[str]] = {"td": [], "th": [], "p": []}

        def handle_data(self, data: str) -> None:
            self.texts[self.get_starttag_text()[1:-1]].append(data)

    found = plan("facebook/opt-1.3b", device_names=["T4-16G"], bits=(8,))
    odd = "<script>alert('&')</script>"
    found = replace(found, model=replace(found.model, name=odd))
    page = Page()
    page.feed(found._repr_html_())
    page.close()
    first, stage, last = found.summary().splitlines()
    assert odd in first
    assert page.texts["p"] == [first, last]
    assert page.texts["th"] == ["stage", "device", "layers", "bits", "memory"]
    rank, device, layers, bits, memory = page.texts["td"]
    assert stage == f"stage {rank}: {device}, layers {layers}, bits {bits}, {memory}"


def test_help_and_completion_know_every_option():
    parameters = inspect.signature(plan).parameters
    assert list(parameters)[:3] == ["model", "batch", "prompt"]
    assert {"quality_budget", "bits", "time_limit_s", "profile_dir"} <= set(parameters)
    assert not {"options", "workload", "theta_s"} & set(parameters)
    assert parameters["layer_group"].default == 1


def test_unknown_names_of_the_package_are_attribute_errors():
    assert {"plan", "Pipeline"} <= set(dir(llmpq))
    with pytest.raises(AttributeError, match="no attribute 'pipeline'"):
        llmpq.pipeline  # noqa: B018
