"""The speed benchmark: its search of settings, what it keeps, and its tables."""

from __future__ import annotations

import itertools
import json
import os
import sys
from argparse import Namespace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import rivals  # noqa: E402
import sizes  # noqa: E402
import speed  # noqa: E402
import workbench  # noqa: E402

pytestmark = pytest.mark.nightly

WHERE = {"processor": "P", "cpu_isa": "avx2"}
OPTIONS = Namespace(
    cases=["decode", "prompts", "batch16"], models=["125M", "594M"], bits=["16", "4"],
    threads=[1, 2], sequences=[1, 8], tokens=[128, 2048], stages=[1, 2],
)  # fmt: skip
ZEN_3 = "model name : AMD EPYC\nflags : fpu sse4_1 avx2 fma f16c\n"
ZEN_4 = "flags : sse4_1 avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_vnni avx512_bf16\n"


# workbench


@pytest.mark.parametrize(
    ("lscpu", "cpuinfo", "name"),
    [
        ("Vendor ID: AuthenticAMD\nModel name: AMD EPYC\nCPU family: 25\n", ZEN_3,
         "AMD EPYC (Zen 3, AVX2)"),
        ("Vendor ID: AuthenticAMD\nModel name: AMD EPYC\nCPU family: 25\n", ZEN_4,
         "AMD EPYC (Zen 4, AVX512-BF16)"),
        ("Vendor ID: AuthenticAMD\nModel name: AMD EPYC\nCPU family: 26\n", ZEN_4,
         "AMD EPYC (Zen 5, AVX512-BF16)"),
        ("Vendor ID: GenuineIntel\nModel name: Intel(R) Xeon(R)  CPU\nCPU family: 6\n",
         ZEN_4 + "", "Intel Xeon CPU (AVX512-BF16)"),
    ],
)  # fmt: skip
def test_a_processor_has_its_architecture_and_newest_extension(lscpu, cpuinfo, name):
    assert workbench.processor(lscpu, cpuinfo) == name


def test_a_run_replaces_that_of_the_same_processor_alone(tmp_path):
    file = tmp_path / "x.json"
    for name, isa, date in (("B", "avx2", 1), ("A", "native", 2), ("B", "avx2", 3),
                            ("B", "native", 4)):  # fmt: skip
        workbench.keep_run(file, "x", {"processor": name, "cpu_isa": isa, "date": date})
    found = json.loads(file.read_text())
    assert found["topic"] == "x"
    assert [(one["processor"], one["cpu_isa"], one["date"]) for one in found["runs"]] == [
        ("A", "native", 2), ("B", "native", 4), ("B", "avx2", 3),
    ]  # fmt: skip


def test_a_limit_is_set_for_all_libraries_and_lifted(monkeypatch):
    variables = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
    for name in variables:
        monkeypatch.setenv(name, "other")
    monkeypatch.setattr(workbench, "instruction_set_of", lambda isa: isa)
    workbench.restrict("avx2")
    assert [os.environ[name] for name in variables] == ["avx2", "AVX2", "AVX2"]
    workbench.restrict("native")
    assert not set(variables) & set(os.environ)


def test_a_processor_without_the_extension_is_an_error(monkeypatch):
    monkeypatch.setattr(workbench, "instruction_set_of", lambda _: "avx2")
    with pytest.raises(SystemExit, match="found avx512, expected one of a processor with AVX2"):
        workbench.restrict("avx512")


def test_builds_of_llama_cpp_have_folders_of_their_own(tmp_path):
    folders = {rivals.bench_of(tmp_path, isa).parents[1].name for isa in workbench.ISAS}
    assert folders == {"build-native", "build-avx512", "build-avx2"}
    newer = {"GGML_NATIVE", "GGML_AVX512", "GGML_AVX512_VNNI", "GGML_AVX512_BF16", "GGML_AVX_VNNI"}
    assert not newer & set(rivals.ISA_OPTIONS["avx2"])
    assert newer & set(rivals.ISA_OPTIONS["avx512"]) == {"GGML_AVX512"}


# search


def test_the_search_ends_with_the_best_of_every_choice():
    choices = {"a": (1, 2), "b": ("x", "y", "z"), "c": (0, 5)}
    tried = []
    while (setting := speed.next_setting(choices, tried)) is not None:
        cost = (setting["a"] != 2) + "xzy".index(setting["b"]) + (setting["c"] != 5)
        assert all(one != setting for one, _ in tried)
        tried.append((setting, 1.0 + cost))
    assert len(tried) == 1 + 1 + 2 + 1
    assert min(tried, key=lambda one: one[1])[0] == {"a": 2, "b": "x", "c": 5}


def test_who_has_no_choices_runs_once():
    assert speed.next_setting({}, []) == {}
    assert speed.next_setting({}, [({}, 1.0)]) is None


def test_llama_cpp_is_tried_in_both_16_bit_formats_and_with_fewer_threads():
    case = {"case": "decode", "model": "125M", "bits": "16", "threads": 2, "sequences": 1}
    found = speed.choices(case, "llama.cpp")
    assert found["format"] == ("16", "f16")
    assert found["threads"] == (2, 1)
    assert set(found["format"]) <= set(rivals.FORMATS)
    prompt = {"case": "prompts", "model": "125M", "bits": "4", "threads": 1, "tokens": 2048}
    assert speed.choices(prompt, "llama.cpp")["ubatch"] == (512, 2048)
    assert speed.choices({**prompt, "tokens": 128}, "llama.cpp").keys() == {
        "format", "flash_attention", "repack",
    }  # fmt: skip


# runs


def test_rounds_run_in_turn_and_go_on_where_they_were(tmp_path):
    kept = speed.Kept(tmp_path / "speed.jsonl", WHERE)
    case = {"case": "batch16", "model": "125M", "stages": 0}
    ours = {"case": "batch16", "model": "125M", "bits": "4", "stages": 1}
    contenders = [(ours, "llmpq"), (case, "transformers")]
    made = []

    def run(case, name, setting):
        made.append((name, setting.get("dtype")))
        return {"seconds": 2.0 if setting.get("dtype") == "float32" else 1.0}

    first = speed.expected(kept, contenders, 2)
    speed.measure(kept, contenders, 2, run)
    assert made == [
        ("llmpq", None), ("transformers", "float32"), ("transformers", "bfloat16"),
        ("llmpq", None), ("transformers", "bfloat16"),
    ]  # fmt: skip
    assert len(first) == len(made)
    assert speed.expected(kept, contenders, 2) == []
    again = speed.Kept(tmp_path / "speed.jsonl", WHERE)
    speed.measure(again, contenders, 2, run)
    assert len(made) == 5
    other = speed.Kept(tmp_path / "speed.jsonl", {**WHERE, "cpu_isa": "native"})
    assert other.runs == []
    assert len(speed.expected(other, contenders, 2)) == 5
    again.forget([ours])
    assert {one["run"] for one in speed.Kept(tmp_path / "speed.jsonl", WHERE).runs} == {
        "transformers"
    }


def test_all_cases_differ_and_can_be_selected():
    found = list(speed.cases(OPTIONS))
    assert len({tuple(sorted(one.items())) for one in found}) == len(found)
    counts = {name: sum(one["case"] == name for one in found)
              for name in (*speed.TITLES, *speed.LIMITS.values())}  # fmt: skip
    assert counts == {
        "decode": 16, "prompts": 16, "batch16": 2 * (4 + 1), "memory": 8, "products": 2,
    }  # fmt: skip
    only = Namespace(**{**vars(OPTIONS), "cases": ["prompts"], "models": ["594M"], "bits": ["3"]})
    assert {(one["case"], one["model"], one["bits"]) for one in speed.cases(only)} == {
        ("prompts", "594M", "3")
    }


# tables


def test_tables_compare_our_median_with_their_best(tiny_model):
    model = tiny_model("llama")
    case = {"model": model.name, "bits": "16", "threads": 1}
    runs = [
        {"case": "decode", **case, "sequences": 4, "run": name, "seconds": 31e-3 * ms}
        for name, times in (("llmpq", (2.0, 4.0, 2.5)), ("llama.cpp", (6.0, 5.0)))
        for ms in times
    ]
    runs.append({"case": "memory", **case, "run": "memory", "seconds": 2e-3})
    read = sizes.read_bytes(sizes.load_model_dir(model), 16)
    (row,) = speed.decode_rows(model.parent, runs)
    assert row == [
        model.name, "16", 1, 4, 2.5, 2.0, 4.0, 5.0, 0.5, float(f"{read / 2.5e6:.4g}"), 0.8,
    ]  # fmt: skip
    assert len(row) == len(speed.COLUMNS["decode"])
    (alone,) = speed.decode_rows(model.parent, runs[:3])
    assert alone[7:9] == [None, None]


def test_prompts_and_batches_are_tokens_a_second():
    case = {"case": "prompts", "model": "125M", "bits": "4", "threads": 2, "tokens": 512}
    runs = [{**case, "run": name, "seconds": s} for name, s in (("llmpq", 1.0), ("llama.cpp", 2.0))]
    rows = speed.prompt_rows(Path(), runs)
    assert rows == [["125M", "4", 2, 512, 512.0, 512.0, 512.0, 256.0, 2.0]]
    batch = {"case": "batch16", "model": "125M"}
    others = [
        {**batch, "stages": 0, "run": "transformers", "setting": {"dtype": dtype}, "seconds": s}
        for dtype, s in (("float32", 4.0), ("bfloat16", 8.0))
    ]
    ours = {**batch, "bits": "4", "stages": 2, "run": "llmpq", "seconds": 2.0}
    limit = {"case": "products", "model": "125M", "run": "products", "seconds": 1.5}
    assert speed.batch16_rows(Path(), [*others, ours, limit]) == [
        ["125M", "4", 2, 256.0, 256.0, 256.0, 128.0, "float32", 2.0, 0.75]
    ]
    assert speed.batch16_rows(Path(), [*others, ours])[0][-1] is None


def test_the_least_time_of_a_batch_is_that_of_its_products(tiny_model, monkeypatch):
    model = tiny_model("llama")
    spec = sizes.load_model_dir(model)
    monkeypatch.setattr(speed, "float32_flops_per_s", lambda: 1e9)
    layers = sum(
        op.count * op.out_features * op.in_features
        for kind in spec.layer_kinds
        for op in spec.layer_types[kind].linears
    )
    tokens = 16 * (128 + 31)
    assert speed._products(model.parent, model.name) == pytest.approx(
        2e-9 * (tokens * layers + 16 * 32 * spec.head_weights), rel=0.05
    )


@pytest.mark.parametrize("topic", speed.TITLES)
def test_columns_of_pages_are_columns_of_the_table(topic):
    assert set(speed.BESIDE[topic]) <= set(speed.COLUMNS[topic][speed.KEYS[topic] :])
    assert len(speed.FIELDS[topic]) == speed.KEYS[topic]
    assert list(itertools.chain(speed.FIELDS[topic])) == list(
        speed.COLUMNS[topic][: speed.KEYS[topic]]
    )
