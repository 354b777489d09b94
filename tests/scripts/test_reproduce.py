"""The scripts that put the paper's numbers beside ours: their data, files and arithmetic."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from llmpq.spec import catalog  # noqa: E402
from llmpq.spec.cluster import load_cluster  # noqa: E402
from llmpq.spec.plan import read_plan  # noqa: E402
from llmpq.spec.precision import Phase  # noqa: E402
from llmpq.spec.workload import load_workload  # noqa: E402
from reproduce import calibrate, output, pictures, run_all  # noqa: E402
from reproduce.run_all import LONG, SHORT, Case  # noqa: E402

pytestmark = pytest.mark.nightly

# Table 3 of the paper.
TYPES = {
    1: {"V100-32G": 1}, 2: {"A100-40G": 1}, 3: {"T4-16G": 3, "V100-32G": 1},
    4: {"P100-12G": 3, "V100-32G": 1}, 5: {"T4-16G": 4, "V100-32G": 2},
    6: {"V100-32G": 2, "A100-40G": 2}, 7: {"V100-32G": 4, "A100-40G": 4},
    8: {"V100-32G": 4, "A800-80G": 2}, 9: {"T4-16G": 4}, 10: {"V100-32G": 4}, 11: {"A800-80G": 4},
}  # fmt: skip


# --- Inputs ---


@pytest.mark.parametrize("number", TYPES)
def test_a_cluster_file_holds_the_devices_of_table_3(number):
    cluster = load_cluster(REPOSITORY / Case(cluster=number).cluster_file)
    found: dict[str, int] = {}
    for device in cluster.devices:
        found[device.type] = found.get(device.type, 0) + 1
    assert found == TYPES[number]


@pytest.mark.parametrize(
    "path", sorted((REPOSITORY / "inputs" / "workloads").glob("*.json")), ids=lambda path: path.stem
)
def test_a_workload_file_is_named_as_its_workload(path):
    assert load_workload(path).name == path.stem


def test_both_workloads_are_the_papers():
    sizes = [Case(cluster=1, workload=name).request().workload for name in (LONG, SHORT)]
    assert [(item.batch, item.prompt_tokens, item.new_tokens) for item in sizes] == [
        (32, 512, 100),
        (32, 128, 200),
    ]


# --- The paper's numbers ---


def test_the_mean_gain_is_the_one_the_paper_claims():
    # "up to 2.88x (2.26x on average)": the mean is over clusters 1 to 8, the maximum not.
    gains = {
        cluster: rows["pipeedge"].latency_s / rows["llmpq"].latency_s
        for cluster, rows in run_all.TABLE_4.items()
    }
    assert sum(gains.values()) / len(gains) == pytest.approx(2.26, abs=0.005)
    assert gains[8] == pytest.approx(2.88, abs=0.005)


def test_table_10_has_the_mean_and_the_slowest_of_the_paper():
    seconds = run_all.TABLE_10.values()
    assert sum(seconds) / len(seconds) == pytest.approx(18.38, abs=0.005)
    assert max(seconds) == 115.981


def test_throughputs_of_table_8_and_figure_9_are_those_of_the_serving_tables():
    assert 3200 / run_all.TABLE_4[3]["llmpq"].latency_s == pytest.approx(
        run_all.TABLE_8[3]["group 1"][0], abs=0.01
    )
    assert 6400 / run_all.TABLE_7[4]["llmpq"].latency_s == pytest.approx(
        run_all.FIGURE_9[4], abs=0.01
    )


# --- Plans that are kept ---


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(run_all, "STRATEGIES", tmp_path)
    return tmp_path


def test_a_kept_plan_is_written_once_and_named_like_the_commands(folder):
    case = Case(cluster=1)
    run_all.keep(case, "uniform")
    path = folder / "opt-13b__paper-01__s512-n100-b32__uniform.json"
    assert read_plan(path).search.method == "uniform"
    before = path.stat().st_mtime_ns
    run_all.keep(case, "uniform")
    assert path.stat().st_mtime_ns == before


def test_a_file_that_took_other_seconds_holds_the_same_plan_and_one_of_another_price_does_not(
    folder,
):
    plan = run_all.keep(Case(cluster=1), "uniform")
    path = Case(cluster=1).strategy("uniform")
    slower = replace(plan, search=replace(plan.search, planning_s=1e3))
    dearer = replace(plan, search=replace(plan.search, theta_s=plan.search.theta_s + 1))
    assert run_all._holds(path, slower)
    assert not run_all._holds(path, dearer)


def test_a_method_the_planner_lacks_gives_no_plan_and_no_file(folder):
    assert run_all.keep(Case(cluster=1), "no such method") is None
    assert not list(folder.iterdir())


def test_pipeedge_of_the_paper_shares_one_micro_batch_between_phases():
    plan = run_all._pipeedge_of_the_paper(Case(cluster=9))
    assert (plan.micro_batching.prefill, plan.micro_batching.decode) == (8, 8)
    assert len(set(plan.bits)) == 1


def test_the_published_formula_counts_less_than_the_steady_one():
    row = run_all._ours(2)
    assert row["by_steady"]["paper_s"] < row["by_steady"]["steady_s"]
    assert row["objective_lost"] >= -1e-3


def test_uneven_layers_are_a_sensitivity_table_of_all_layers():
    model = catalog.model("facebook/opt-13b")
    rows = run_all._uneven(model).normalised((16, 8, 4, 3))
    assert len(rows) == model.num_layers
    assert sum(row[2] for row in rows) == pytest.approx(1)
    assert rows[-1][2] > 4 * rows[0][2]


# --- Output ---


def test_reports_are_markdown_and_records_are_json(capsys):
    def collect():
        return {"rows": [1.5]}

    def report(record):
        return output.table(["a"], [[output.number(record["rows"][0])]])

    assert output.run("x", "", collect, report, []) == 0
    assert capsys.readouterr().out == "| a |\n| --- |\n| 1.50 |\n"
    assert output.run("x", "", collect, report, ["--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"rows": [1.5]}


def test_missing_numbers_have_a_sign():
    assert output.number(None) == "-"
    assert output.times(None) == "-"
    assert output.degradation(None) == "-"
    assert output.number(1045.93) == "1,045.93"


def test_pictures_are_small_and_equal_when_drawn_again(tmp_path):
    points = [
        {"multiple": m, "theta_s": 10 * m, "tokens_per_s": 50 - m, "omega": 1 / m}
        for m in (0.1, 1.0, 10.0)
    ]
    paths = [tmp_path / "a.png", tmp_path / "b.png"]
    for path in paths:
        pictures.draw_sweeps([("one", points), ("two", points)], {1.0: "10x"}, path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert len(paths[0].read_bytes()) < 150_000
    pictures.draw_bars(["x", "y"], [("slow", [1, 0]), ("fast", [2, 3])], tmp_path / "c.png")
    assert (tmp_path / "c.png").stat().st_size > 1000


# --- Calibration ---


def test_calibration_finds_the_figures_a_table_was_made_with(tmp_path):
    truth = replace(
        catalog.device("V100-32G"),
        compute_efficiency=0.6,
        memory_efficiency=0.9,
        saturation_tokens=100.0,
    )
    path = tmp_path / "layers.csv"
    sizes = [("prompt", n) for n in (250, 500, 1000, 4000, 8000)]
    sizes += [("decode", n) for n in (0, 2, 8, 32, 64, 500)]
    rows = ["model,machine,phase,batch_tokens,layer_ms"]
    for phase, size in sizes:
        sample = calibrate.Sample(
            model=catalog.model("meta-llama/Llama-2-70b-hf"),
            phase=Phase.PREFILL if phase == "prompt" else Phase.DECODE,
            size=size,
            seconds=0.0,
            quantum_s=0.0,
        )
        seconds = calibrate.predict([sample], truth, 500)[0] if size else 0.0
        rows.append(f"llama2_70b,v100,{phase},{size},{seconds * 1e3}")
    path.write_text("\n".join(rows))
    samples = calibrate.read_samples(path, "v100")
    assert {sample.size for sample in samples if sample.phase is Phase.DECODE} == {2, 8, 32, 64}
    fitted = calibrate.fit(samples, catalog.device("V100-32G"), 500)
    assert fitted.compute_efficiency == pytest.approx(0.6, rel=0.03)
    assert fitted.memory_efficiency == pytest.approx(0.9, rel=0.03)
    assert calibrate.loss(samples, fitted, 500) < 1e-4


def test_pattern_search_finds_the_bottom_of_a_bowl():
    found = calibrate.pattern_search(lambda x: (x[0] - 1) ** 2 + (x[1] + 2) ** 2, [0.0, 0.0])
    assert math.dist(found, (1, -2)) < 0.02
