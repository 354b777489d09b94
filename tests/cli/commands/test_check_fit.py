"""``llmpq-check --model``: does it run my model on my device?"""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest

from llmpq.assigner import PlanRequest
from llmpq.assigner.explain.compare import fit_answers
from llmpq.cli.commands.check import main
from llmpq.costmodel import build_costs
from llmpq.costmodel.host_clusters import with_experts_on_hosts
from llmpq.profiler.device import host_cluster, host_memory_bytes
from llmpq.spec import catalog
from llmpq.spec.cluster import Cluster, DeviceGroup, cluster_of_types
from llmpq.spec.precision import DTYPE_BYTES, Phase
from llmpq.spec.tables import LatencySample, LatencyTable, write_latency_table
from llmpq.spec.workload import Workload
from llmpq.units import GIB
from scripts.docs_site.fit_table import most_bits

WORK = Workload(batch=1, prompt_tokens=256, new_tokens=32)
ARGV = ["--s", "256", "--n", "32"]


def test_every_bitwidth_is_answered(capsys) -> None:
    assert main(["--model", "Qwen/Qwen3-32B", "--device_names", "RTX3090", *ARGV, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is True
    fits = {one["bits"]: one["fits"] for one in found["answers"]}
    assert fits == {16: False, 8: False, 4: True, 3: True}
    for one in found["answers"]:
        assert (one["reason"] is None) == one["fits"]
        if one["fits"]:
            assert one["throughput_tokens_per_s"] > 0
            assert {width for stage in one["stages"] for width in stage["bits"]} == {one["bits"]}


def test_the_text_names_formats_and_reasons(capsys) -> None:
    argv = ["--model", "Qwen/Qwen3-14B", "--device_names", "T4-16G", "V100-16G", *ARGV]
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert "16    yes" in text
    assert "T4-16G#0 computes float16, float32, not bfloat16" in text
    assert "tokens/s" in text


def test_without_devices_this_host_is_looked_at(capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    free = []

    def host():
        return host_cluster(free)

    monkeypatch.setattr("llmpq.cli.planning.fit.host_cluster", host)
    assert main(["--model", "facebook/opt-125m", *ARGV, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cluster"] == "this host"
    (stage,) = found["answers"][0]["stages"]
    assert stage["device"] == "here/cpu#0"
    assert stage["capacity_bytes"] < host_memory_bytes()
    free.append(("NVIDIA GeForce RTX 3090", 20 * GIB))
    assert main(["--model", "Qwen/Qwen3-8B", *ARGV]) == 0
    assert "Qwen/Qwen3-8B on this host" in (text := capsys.readouterr().out)
    assert "RTX3090" in text


def test_measured_tables_are_used(capsys, tmp_path) -> None:
    samples = tuple(
        LatencySample(phase=phase, bits=16, batch=batch, tokens=256, seconds=0.5)
        for phase in Phase
        for batch in (1, 2)
    )
    model = catalog.model("facebook/opt-125m")
    origin = {"model": model.name, "device": "L4", "dtype": "float16"}
    table = LatencyTable(samples=samples, provenance=tuple(origin.items()))
    write_latency_table(tmp_path / "slow.csv", table)
    argv = ["--model", model.name, "--device_names", "L4", "--dtype", "float16", *ARGV, "--json"]
    seconds = []
    for more in ([], ["--profile", str(tmp_path)]):
        assert main([*argv, *more]) == 0
        answers = json.loads(capsys.readouterr().out)["answers"]
        seconds.append(answers[0]["latency_s"])
    roofline_s, measured_s = seconds
    assert roofline_s < 1.0
    assert measured_s == pytest.approx(model.num_layers * WORK.new_tokens * 0.5, rel=0.1)
    assert [one["fits"] for one in answers] == [True, False, False, False]
    assert "found no prefill samples at 8 bits" in answers[1]["reason"]


def test_what_does_not_fit_has_a_short_line(capsys) -> None:
    assert main(["--model", "Qwen/Qwen3-32B", "--device_names", "RTX3090", *ARGV]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^16 bits  \d+ of 64 layers fit; needs \+2 RTX3090$", text, re.M)
    assert re.search(r"^8 bits   \d+ of 64 layers fit; needs \+1 RTX3090$", text, re.M)
    assert all(len(line) <= 100 for line in text.splitlines())


@pytest.mark.parametrize(
    ("model", "device", "prompt", "named"),
    [
        ("Qwen/Qwen3-8B", "RTX3090", "256", [("3", "4")]),
        ("Qwen/Qwen3-8B", "H100", "256", [("8", "16"), ("3", "4")]),
        ("Qwen/Qwen3-8B", "T4-16G", "256", []),
        # The prompt takes less time at 8 bits than at 4, and an answer more.
        ("google/gemma-3-27b-it", "L40S", "131000", [("3", "4")]),
    ],
)
def test_fewer_bits_that_are_no_faster_are_named(capsys, model, device, prompt, named) -> None:
    argv = ["--model", model, "--device_names", device, "--s", prompt, "--n", "32"]
    assert main(argv) == 0
    text = capsys.readouterr().out
    found = re.findall(r"^(\d+) bits +no faster than (\d+) bits; saves memory$", text, re.MULTILINE)
    assert found == named
    assert main([*argv, "--json"]) == 0
    answers = {one["bits"]: one for one in json.loads(capsys.readouterr().out)["answers"]}
    for bits, wider in named:
        few, many = answers[int(bits)], answers[int(wider)]
        assert many["latency_s"] <= few["latency_s"]
        assert many["answer_tokens_per_s"] >= few["answer_tokens_per_s"]


@pytest.mark.parametrize(
    ("model", "device", "prompt", "bits"),
    [
        ("meta-llama/Llama-3.1-8B", "L40S", 131_000, 16),
        ("google/gemma-3-27b-it", "L40S", 131_000, 8),
        ("openai/gpt-oss-20b", "RTX5070Ti", 16_384, 4),
        ("openai/gpt-oss-20b", "RTX4060Ti-16G", 16_384, 4),
        ("openai/gpt-oss-120b", "H100", 100_000, 4),
        ("deepseek-ai/DeepSeek-V3", "H200", 16_384, None),
    ],
)
def test_long_prompts_fit_where_people_run_them(capsys, model, device, prompt, bits) -> None:
    argv = ["--model", model, "--device_names", device, "--s", str(prompt), "--n", "72", "--json"]
    assert main(argv) == (0 if bits else 3)
    answers = json.loads(capsys.readouterr().out)["answers"]
    assert [one["bits"] for one in answers if one["fits"]][:1] == ([bits] if bits else [])
    for one in answers:
        if one["fits"]:
            (stage,) = one["stages"]
            assert stage["memory_bytes"] <= catalog.device(device).memory_bytes - 2**29
        else:
            # Weights do not fit; the first part that is named is the largest.
            assert "needed: weights of" in one["reason"]
            assert "temporary memory (prompts in chunks of 1024 tokens)" in one["reason"]


def test_a_reserve_is_left_free(capsys) -> None:
    argv = ["--model", "Qwen/Qwen3-8B", "--device_names", "RTX3090", *ARGV, "--json"]
    found = {}
    for reserve in ([], ["--reserve_gib", "0"], ["--reserve_gib", "4.25"]):
        assert main([*argv, *reserve]) == 0
        answers = json.loads(capsys.readouterr().out)["answers"]
        (stage,) = answers[-1]["stages"]
        found[tuple(reserve)] = stage["capacity_bytes"] / 2**30
    assert list(found.values()) == [23.5, 24, 19.75]
    assert main([*argv, "--reserve_gib", "24"]) == 2
    assert "--reserve_gib: found 24" in capsys.readouterr().err


def test_a_model_that_never_fits_is_status_3(capsys) -> None:
    argv = ["--model", "meta-llama/Llama-3.1-405B", "--device_names", "T4-16G", *ARGV]
    assert main(argv) == 3
    printed = capsys.readouterr()
    assert "no" in printed.out
    assert "does not fit" in printed.err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "expected either a strategy FILE, or --model"),
        (["plan.json", "--model", "x"], "expected either a strategy FILE, or --model"),
        (
            ["--model", "Qwen/Qwen3-8B", "--cluster", "a.json", "--device_names", "L4"],
            "--cluster and --device_names: found both",
        ),
        (["--model", "Qwen/Qwen3-8B", "--device_names", "RTX4091"], "RTX4090"),
        (["--model", "nothing", "--device_names", "L4"], "found 'nothing'"),
    ],
)
def test_bad_input_is_status_2(argv, message, capsys) -> None:
    assert main(argv) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("device", ["RTX3060-12G", "T4-16G", "P40", "M2-Max", "Arc-B580"])
@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B", "facebook/opt-13b"])
def test_the_table_agrees_with_the_planner(device, name) -> None:
    model, cluster = catalog.model(name), cluster_of_types({device: 1})
    bits = 8 * DTYPE_BYTES[model.dtype]
    costs = build_costs(model, cluster, dtype=model.dtype, kv_bits=bits, latency="roofline")
    request = PlanRequest(
        model=model, cluster=cluster, workload=WORK, dtype=model.dtype, kv_bits=bits,
        latency="roofline",
    )  # fmt: skip
    planned = [one.bits for one in fit_answers(request) if one.plan is not None]
    assert most_bits(costs, WORK) == max(planned, default=None)


def test_what_if_names_what_one_more_device_brings(capsys) -> None:
    argv = ["--model", "Qwen/Qwen3-14B", "--device_names", "RTX3090", "T4-16G", *ARGV, "--what_if"]
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["device"] for one in found["one_more"]] == ["node0/RTX3090", "node1/T4-16G"]
    assert all(one["throughput_gain"] >= 0 for one in found["one_more"])
    assert found["one_more"][0]["throughput_gain"] > 0.01
    assert main(argv) == 0
    assert "one more       node0/RTX3090: " in capsys.readouterr().out


def test_the_time_of_many_requests_is_a_column(capsys) -> None:
    argv = ["--model", "Qwen/Qwen3-8B", "--device_names", "RTX3090", *ARGV, "--global_bz", "4"]
    argv += ["--requests", "50000"]
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    fits = [one for one in found["answers"] if one["fits"]]
    assert all(
        one["requests"] == {"number": 50000, "seconds": pytest.approx(12_500 * one["latency_s"])}
        for one in fits
    )
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert "50,000 requests" in text
    assert " h " in text


def test_experts_of_this_host_are_in_its_memory_where_that_is_better(
    capsys, monkeypatch, tmp_path
) -> None:
    """As `--host_gib` plans them, or with the CPU as a device, whichever is faster."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu = DeviceGroup(
        type="Ryzen-9-7950X", count=1, threads=16, memory_bytes=40 * GIB, instruction_set="avx512"
    )
    (node,) = host_cluster([("NVIDIA GeForce RTX 3060", 12 * GIB)]).nodes
    node = replace(node, devices=(node.devices[0], cpu))
    here = Cluster(name="this host", nodes=(node,))
    monkeypatch.setattr("llmpq.cli.planning.fit.host_cluster", lambda: here)
    model = "openai/gpt-oss-20b"
    assert main(["--model", model, *ARGV, "--json"]) == 0
    answers = json.loads(capsys.readouterr().out)["answers"]
    seconds = {}
    for cluster in (here, with_experts_on_hosts(here)):
        spec = catalog.model(model)
        request = PlanRequest(
            model=spec, cluster=cluster, workload=WORK, dtype=spec.dtype, kv_bits=16
        )
        for one in fit_answers(request):
            found = math.inf if one.plan is None else one.plan.estimate.latency_s
            seconds.setdefault(one.bits, []).append(found)
    apart = {}
    for one in answers:
        (whole_s, apart_s), own_s = seconds[one["bits"]], one.get("latency_s", math.inf)
        assert own_s == pytest.approx(min(whole_s, apart_s))
        apart[one["bits"]] = any(stage.get("experts") for stage in one.get("stages", ()))
        assert apart[one["bits"]] == (apart_s < whole_s)
    assert set(apart.values()) == {True, False}
    assert main(["--model", model, *ARGV]) == 0
    text = capsys.readouterr().out
    rows = re.findall(r"RTX3060-12G#0 and experts of \d+ layers in host memory \(\d", text)
    assert len(rows) == sum(apart.values())
    assert main(["--model", "Qwen/Qwen3-8B", *ARGV]) == 0
    assert "experts" not in capsys.readouterr().out
