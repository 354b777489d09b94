"""The costs of a mixed iteration, from measured operators."""

import csv
import json

import pytest

from llmpq.errors import SpecError
from reproduce import vllm_run
from reproduce.vllm_run import ONCE, PER_LAYER, Attention, Line, limits_of

pytestmark = pytest.mark.nightly

POINTS = {
    (0, 0, 1, 16): 2.0, (0, 0, 1, 32): 4.0, (0, 0, 2, 16): 6.0, (0, 0, 2, 32): 8.0,
    (16, 0, 0, 0): 10.0, (32, 0, 0, 0): 20.0, (16, 16, 0, 0): 14.0, (32, 16, 0, 0): 24.0,
    (16, 0, 1, 16): 13.0, (32, 0, 1, 16): 25.0,
}  # fmt: skip


def test_a_line_goes_on_beyond_its_points():
    line = Line({1: 1.0, 3: 5.0})
    assert [line(place) for place in (0, 1, 2, 3, 4)] == [1.0, 1.0, 3.0, 5.0, 7.0]


def test_attention_is_interpolated_in_its_cell():
    attention = Attention(POINTS)
    assert attention.decode(1, 24) == pytest.approx(3.0)
    assert attention.decode(1.5, 24) == pytest.approx(5.0)
    assert attention.prefill(24, 0) == pytest.approx(15.0)
    assert attention.prefill(16, 16) == pytest.approx(14.0)
    assert attention.added(24, 0, 1, 16) == pytest.approx(4.0)


def test_a_single_point_counts_everywhere():
    line = Line({4: 2.5})
    assert [line(place) for place in (1, 4, 9)] == [2.5, 2.5, 2.5]


def test_prompts_and_mixed_steps_on_grids_of_their_own_are_interpolated_each_in_its_own():
    def law(chunk, before, count, context):
        return 1.0 + chunk + 2.0 * before + 3.0 * count + 0.5 * context

    prompts = [(chunk, before, 0, 0) for chunk in (16, 80, 144) for before in (0, 48)]
    mixed = [(chunk, 0, count, 64) for chunk in (32, 64, 128) for count in (1, 5)]
    mixed += [(48, 0, count, context) for count in (2, 4) for context in (64, 128)]
    attention = Attention({point: law(*point) for point in prompts + mixed})
    assert attention.prefill(100, 0) == pytest.approx(law(100, 0, 0, 0))
    assert attention.prefill(144, 48) == pytest.approx(law(144, 48, 0, 0))
    found = attention.added(100, 0, 3, 64)
    assert found == pytest.approx(law(100, 0, 3, 64) - law(100, 0, 0, 0))
    # No prompt behind others was measured with decode steps: the nearest points count.
    assert attention.added(64, 48, 1, 64) == law(64, 0, 1, 64) - attention.prefill(64, 48)


def test_a_profile_without_points_is_an_error():
    with pytest.raises(SpecError, match="attention profile: found no points"):
        Attention({})


META = {
    "engine_kwargs": {"max_num_batched_tokens": 64, "max_num_seqs": 4},
    "kv_cache": {"num_gpu_blocks": 100, "block_size": 16},
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kv_cache": None}, "meta.json: field 'kv_cache.num_gpu_blocks': found None"),
        ({"kv_cache": {"num_gpu_blocks": 9}}, "field 'kv_cache.block_size'"),
        ({"engine_kwargs": []}, "field 'engine_kwargs.max_num_batched_tokens'"),
    ],
)
def test_a_run_without_its_limits_is_an_error_of_the_file(tmp_path, changed, message):
    (tmp_path / "meta.json").write_text(json.dumps(META | changed))
    with pytest.raises(SpecError) as caught:
        limits_of(tmp_path)
    assert message in str(caught.value)


def _write(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture
def folder(tmp_path):
    """A profile of one size and of two grids, and a run of two requests, one of a single token."""
    names = (*PER_LAYER, *ONCE)
    _write(
        tmp_path / "profile_x_dense.csv",
        [{"layer": name, "tokens": 1, "time_us": 1.0} for name in names],
    )
    _write(
        tmp_path / "profile_x_per_sequence.csv",
        [{"layer": "lm_head", "sequences": 1, "time_us": 5.0}],
    )
    keys = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
    points = [(16, 0, 0, 0, 1.0), (48, 0, 0, 0, 3.0), (32, 0, 1, 16, 9.0), (0, 0, 1, 32, 1.0)]
    _write(
        tmp_path / "profile_x_attention.csv", [dict(zip(keys, one, strict=True)) for one in points]
    )
    _write(tmp_path / "workload_x.csv", [
        {"arrival_time_ns": 5, "input_toks": 40, "output_toks": 4},
        {"arrival_time_ns": 9, "input_toks": 20, "output_toks": 1},
    ])  # fmt: skip
    bench = tmp_path / "bench_x"
    bench.mkdir()
    (bench / "meta.json").write_text(json.dumps(META))
    request = {"arrival_time": 1.0, "queued_ts": 2.0, "first_token_ts": 3.0, "last_token_ts": 6.0}
    (bench / "requests.jsonl").write_text(
        "\n".join(json.dumps(request | {"output_toks": tokens}) for tokens in (4, 1))
    )
    _write(
        bench / "their_simulation.csv",
        [{"arrival": 0, "TTFT": 10**9, "TPOT": 10**9, "end_time": 4 * 10**9}],
    )
    return tmp_path


def test_a_run_of_one_size_two_grids_and_single_tokens_is_reported(folder, capsys):
    assert vllm_run.main([str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["measured"] == {"first_token_s": 1.0, "per_token_s": 1.0, "makespan_s": 4.0}
    assert 0 < found["simulated"]["makespan_s"] < 1


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("bench_x/meta.json", "{}", "field 'engine_kwargs.max_num_batched_tokens'"),
        ("bench_x/meta.json", "{", "found no JSON"),
        ("profile_x_attention.csv", "prefill_chunk,time_us\n1,1\n", "field 'kv_prefill'"),
        ("profile_x_dense.csv", "layer,tokens,time_us\nact_fn,1,1\n", "expected layernorm"),
        ("workload_x.csv", "", "field 'arrival_time_ns'"),
    ],
)
def test_what_a_folder_lacks_is_one_line_that_names_the_file(folder, capsys, file, text, message):
    (folder / file).write_text(text)
    assert vllm_run.main([str(folder)]) != 0
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert file in error
    assert message in error


@pytest.mark.parametrize("file", ["meta.json", "requests.jsonl", "their_simulation.csv"])
def test_a_missing_file_is_one_line(folder, capsys, file):
    (folder / "bench_x" / file).unlink()
    assert vllm_run.main([str(folder)]) != 0
    assert f"found 0 of '{file}'" in capsys.readouterr().err
