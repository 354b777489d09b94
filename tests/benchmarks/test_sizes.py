"""Cost against size and long contexts: what is computed from the runs."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import long_contexts  # noqa: E402
import rivals  # noqa: E402
import sizes  # noqa: E402
import workbench  # noqa: E402
from sizes import Point  # noqa: E402

pytestmark = pytest.mark.nightly

SPEED, CORES = 20e9, 2
ZERO = Point(
    x=0, rows=1, step_s=0, memory_bytes=0, forecast_bytes=0, read_bytes=0, stored_bytes=0,
    kv_bytes=0,
)  # fmt: skip
POINTS = {
    # 1 ms and 10 GB/s of two bytes a parameter; 300 MB and three stored bytes a parameter
    "model": [
        replace(ZERO, x=x, step_s=1e-3 + 2 * x / 10e9, memory_bytes=300e6 + 3 * x,
                forecast_bytes=310e6 + 3.3 * x, read_bytes=2 * x, stored_bytes=3 * x)
        for x in (125e6, 594e6, 1500e6)
    ],
    # a step of 8 ms and 1 ms a sequence
    "batch": [
        replace(ZERO, x=x, rows=x, step_s=8e-3 + 1e-3 * x, memory_bytes=400e6 + 5e6 * x,
                forecast_bytes=400e6 + 6e6 * x, kv_bytes=2e6 * x)
        for x in (1, 8, 64)
    ],
    "stages": [
        replace(ZERO, x=x, rows=16, step_s=seconds, memory_bytes=200e6 + 250e6 * x,
                forecast_bytes=200e6 + 300e6 * x, stored_bytes=240e6)
        for x, seconds in ((1, 1.0), (2, 0.6), (3, 0.63), (4, 0.66))
    ],
    # 5 ms and 12 kB a token at 4 GB/s; 20 kB of memory a token
    "context": [
        replace(ZERO, x=x, step_s=5e-3 + 12e3 * x / 4e9, memory_bytes=400e6 + 20e3 * x,
                forecast_bytes=410e6 + 22e3 * x, kv_bytes=12e3 * (x + 32))
        for x in (128, 2048, 32000)
    ],
}  # fmt: skip
SLOPES = {
    "model": (
        "20 ms a step for 100 M parameters", ("200 MB of weights", "10.0 GB/s, 50%"),
        "300 MB for 100 M parameters (forecast 330)", "a process takes 300 MB",
    ),
    "batch": (
        "1 ms a step for sequence", ("8.0 ms", "0.12 of the time with 64 sequences"),
        "5 MB for sequence (forecast 6)", "2 MB are keys and values",
    ),
    "stages": (
        "times 0.60 with 2 stages, 0.66 with 4", ("at best 0.50",),
        "250 MB for stage (forecast 300)", "240 MB are shared",
    ),
    "context": (
        "3 ms a step for 1,000 tokens", ("12 MB of keys and values", "4.0 GB/s, 20%"),
        "20 MB for 1,000 tokens (forecast 22)", "12 MB are keys and values",
    ),
}  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(st.floats(0.1, 1e3), st.floats(1e-3, 1e3))
def test_a_line_is_found_again(constant, slope):
    xs = [1.0, 2.0, 8.0, 64.0]
    found = sizes.line(xs, [constant + slope * x for x in xs])
    assert found == pytest.approx((constant, slope), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("size", sizes.SIZES)
def test_slopes_are_explained_by_the_points(size):
    time, memory = sizes.slopes(size, 16, POINTS[size], SPEED, CORES)
    slope, reasons, memory_slope, memory_reason = SLOPES[size]
    assert (time[2], memory[2]) == (slope, memory_slope)
    assert all(words in time[3] for words in reasons), time[3]
    assert memory_reason in memory[3]


def test_every_curve_grows_in_one_size():
    assert {size for size, _ in sizes.CURVES} == set(sizes.SIZES)
    for size, bits in sizes.CURVES:
        found = sizes.cases(size, bits, CORES)
        assert [one[size] for one in found] == list(sizes.VALUES[size])
        rest = [{**one, size: None} for one in found]
        assert all(one == rest[0] for one in rest)
        assert rest[0]["bits"] == bits


def test_the_picture_has_every_size(tmp_path):
    pytest.importorskip("matplotlib")
    curves = {(size, 16): points for size, points in POINTS.items()}
    sizes.draw(tmp_path / "sizes.png", curves, SPEED, CORES)
    assert (tmp_path / "sizes.png").read_bytes().startswith(b"\x89PNG")


def test_rounds_go_on_where_they_were(tmp_path):
    kept, cases, made = tmp_path / "runs.jsonl", [{"size": 1}, {"size": 2}], []

    def run(case):
        made.append(case["size"])
        return {"seconds": len(made)}

    kept.write_text(json.dumps({"size": 1, "seconds": 7}) + "\n")
    runs = workbench.run_rounds(kept, cases, 2, run)
    assert made == [2, 1, 2]
    assert [(one["size"], one["seconds"]) for one in runs] == [(1, 7), (2, 1), (1, 2), (2, 3)]
    assert [json.loads(line) for line in kept.read_text().splitlines()] == runs
    assert workbench.run_rounds(kept, cases, 2, run) == runs


def test_rounds_of_another_processor_do_not_count(tmp_path):
    kept, cases = tmp_path / "runs.jsonl", [{"size": 1}]
    for name, seconds in (("one", 1), ("other", 2)):
        where = {"processor": name, "cpu_isa": "avx2"}
        for _ in range(2):
            found = workbench.run_rounds(kept, cases, 1, lambda _, s=seconds: {"s": s}, where)
            assert found == [{"size": 1, "s": seconds}]
    assert len(kept.read_text().splitlines()) == 2


def test_long_contexts_compare_prompts_and_steps():
    case = {"bits": "16", "kv_bits": "16", "tokens": 2000}
    seconds = {"llmpq": (1.0, 0.01), "llama.cpp": (4.0, 0.02), "transformers": (2.0, 0.05)}
    runs = [
        {**case, "run": name, "prompt_s": prompt, "step_s": step}
        for name, (prompt, step) in seconds.items()
    ]
    runs.append({**case, "tokens": 32000, "run": "llmpq", "step_s": 0.1})
    found = long_contexts.table_of(runs)["rows"]
    assert found == [
        ["prompt", 16, 16, 2000, 2000.0, 500.0, 1000.0, 4.0, 2.0],
        ["decode", 16, 16, 2000, 100.0, 50.0, 20.0, 2.0, 5.0],
        ["decode", 16, 16, 32000, 10.0, None, None, None, None],
    ]


def test_every_run_of_long_contexts_is_another():
    found = long_contexts.cases(["16", "4"])
    assert len({tuple(one.items()) for one in found}) == len(found)
    transformers = [one for one in found if one["run"] == "transformers"]
    assert {one["bits"] for one in transformers} == {"16"}
    assert max(one["tokens"] for one in found if one["run"] == "llama.cpp") == 8192


@pytest.mark.parametrize("bits", rivals.FORMATS)
def test_models_of_llama_cpp_have_weights_of_one_deviation(tmp_path, bits):
    gguf = pytest.importorskip("gguf")
    rivals.write_gguf(tmp_path, "tiny", bits, "1", "256", "512", "4", "2", "300")
    tensors = {one.name: one for one in gguf.GGUFReader(tmp_path / f"tiny-{bits}.gguf").tensors}
    assert len(tensors) == 12
    down = tensors["blk.0.ffn_down.weight"]
    assert down.tensor_type.name == rivals.FORMATS[bits]
    values = gguf.quants.dequantize(down.data, down.tensor_type)
    assert values.shape == (256, 512)
    assert values.std() == pytest.approx(0.02, rel=0.1)
