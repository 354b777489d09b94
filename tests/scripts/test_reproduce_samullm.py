"""SamuLLM's evaluation: its applications can be read, and have the published sizes."""

from __future__ import annotations

import json

import numpy as np
import pytest

from llmpq.multillm.candidates import resolve_models
from llmpq.multillm.graph import load_application
from llmpq.multillm.planner.application import workload_of
from llmpq.multillm.workload import load_items
from llmpq.spec.cluster import load_cluster
from reproduce import samullm
from reproduce.samullm import Cases, report

pytestmark = pytest.mark.nightly

LAWS = ("Llama-2-7b-chat-hf", "chatglm3-6b", "Mixtral-8x7B-v0.1")


@pytest.fixture
def data(tmp_path):
    """Return made-up data: one length of answers, one load time, no iterations."""
    folder = tmp_path / "data"
    folder.mkdir()
    pdfs = {name: [0.0] * 40 + [1.0] for name in LAWS}
    (folder / "output_length_pdf_norobots.json").write_text(json.dumps(pdfs))
    loads = {"THUDM/chatglm3-6b|tp1": [10.0, 11.5]}
    (folder / "model_load_seconds.json").write_text(json.dumps(loads))
    return folder


def workload(path):
    app = load_application(path)
    return workload_of(app, load_items(app), resolve_models(app), seed=0)


def test_applications_have_the_published_sizes(data, tmp_path):
    folder = tmp_path / "cases"
    folder.mkdir()
    cases = Cases(data, folder)
    assert len(load_cluster(cases.cluster).devices) == 8
    ensemble = workload(cases.ensemble(500, 256))
    assert len(ensemble) == 9 * 500
    assert (ensemble.prompt.min(), ensemble.prompt.max() <= 127) == (5, True)
    assert ensemble.prompt.mean() == pytest.approx(21, abs=2)
    routed = workload(cases.routing(is_known=True))
    assert np.bincount(routed.model).tolist() == [408, 1267, 2068, 456, 2657]
    assert routed.prompt.mean() == pytest.approx(310, abs=5)
    assert routed.answer.mean() == pytest.approx(199, abs=10)
    assert (routed.answer.min() >= 3, routed.answer.max() <= 1585) == (True, True)
    chain = workload(cases.chain(100, 2))
    chunks = np.bincount(chain.item[chain.model == 0])
    assert (chunks.max(), np.median(chunks)) == (60, 3)
    assert (chain.model == 1).sum() == 200


def test_the_tables_have_all_methods_and_cases():
    figures = {
        "predicted_s": 90.0, "played_s": 100.0, "search_s": 1.0, "bound_s": 60.0, "idle_s": 3.0,
        "stages": 2,
    }  # fmt: skip
    methods = {name: dict(figures) for name in ("greedy", "samullm", "max", "min")}
    methods["max"]["played_s"] = 150.0
    text = report({"cases": [{"name": "one", "published": ("1.0-1.3", "1.0-1.4"), **methods}]})
    row = "| one | 100 | 100 | 150 | 100 | 1.00 | 1.50 | 1.00 | 1.50 | 1.0-1.3 | 1.00 | 1.0-1.4 |"
    assert row in text
    assert "33%" in text
    assert "+11.1%" in text


def test_gains_over_rivals_are_those_of_algorithm_1():
    case = {"samullm": {"played_s": 200.0}, "max": {"played_s": 150.0}, "min": {"played_s": 250.0}}
    case["published"] = ("1.0-1.3", "1.1-1.4")
    assert samullm.gain(case, "max") == 0.75
    assert samullm.published(case, "min") == (1.1, 1.4)


def test_parts_of_a_mixed_application_are_added_up():
    def case(name, seconds):
        return {"name": name} | {method: {"played_s": seconds} for method in samullm.METHODS}

    names = [one.name for one in samullm.CASES]
    cases = [case(name, 100.0 if name.startswith("mixed") else 60.0) for name in names]
    text = samullm._apart(cases)
    assert text.count("| 1.20 | 1.20 | 1.20 | 1.20 |") == len(samullm.MIXED_DOCUMENTS)


def test_kept_figures_are_not_computed_again(data, tmp_path, monkeypatch):
    figures = {"predicted_s": 90.0, "played_s": 100.0}
    computed = []

    def play(_, case, options):
        computed.append((case.name, options.method, options.preemption, options.seed))
        return {**figures, "played_s": 120.0 if not options.preemption else 100.0}

    monkeypatch.setattr(samullm._Bench, "_played", play)
    keep = tmp_path / "keep.json"
    for turn in range(2):
        (tmp_path / str(turn)).mkdir()
        bench = samullm._Bench(Cases(data, tmp_path / str(turn)), 1.0, keep)
        case = samullm.ABLATIONS[0]
        found = {case.name: bench.ablations(case)}
        assert bench.compare(case)["max"]["played_s"] == 100.0
    assert len(computed) == len(set(computed)) == 3 * 3 + 1
    text = samullm._ablations(found)
    row = "| mixed, 500 documents, 5,000 requests of limit 256 | Min | no preemption | 120 | 1.20 |"
    assert f"{row} 1.20 | +33.3% |" in text
