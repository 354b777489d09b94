"""The benchmark of applications: its files can be read, its words are tokens, its tables whole."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from llmpq.multillm.graph import load_application
from llmpq.multillm.workload import ModelLengths, build_workload, estimated_tokens, load_items

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import applications

pytestmark = pytest.mark.nightly


def bench_of(folder: Path) -> applications.Bench:
    return applications.Bench(folder, scale=1.0, budget_s=1.0)


def patterns_of(app) -> set[str]:
    found = {"router": any(edge.when for edge in app.edges)}
    found["chain"] = any(edge.is_loop for edge in app.edges)
    joined = any(len(app.inputs(node.name)) > 1 for node in app.nodes)
    found["ensemble"] = joined or not app.edges
    return {name for name, has in found.items() if has}


def test_five_applications_have_all_patterns_and_300_items(tmp_path):
    items, patterns = 0, {}
    for name, wanted in applications.APPS.items():
        app = load_application(bench_of(tmp_path)._write(name, wanted) / "app.json")
        found = load_items(app)
        items += len({item.id for own in found.values() for item in own})
        work = build_workload(app, found, {model.name: ModelLengths() for model in app.models})
        assert (work.prompt + work.answer).max() <= applications.LIMITS["max_context"]
        patterns[name] = patterns_of(app)
    assert (len(patterns), items >= 300) == (5, True)
    assert patterns["all three"] == set.union(*patterns.values()) == {"router", "chain", "ensemble"}


def test_a_word_is_a_token_of_four_characters(tmp_path):
    applications.write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    numbers = [*range(1, 400), applications.VOCABULARY - 1]
    text = tokenizer.decode(numbers)
    assert tokenizer.encode(text).ids == numbers
    assert estimated_tokens(text) == len(numbers)
    words = [applications.word(number) for number in range(1, applications.VOCABULARY)]
    assert len(set(words)) == len(words)
    assert all(sum(letter in one.casefold() for letter in applications.CLASSES) == 1
               for one in words)  # fmt: skip


def test_shares_are_those_of_the_router():
    texts = [("route", "xab"), ("route", "xcd"), ("route", "zab"), ("route", "yab"), ("by_x", "y")]
    lines = [json.dumps({"node": node, "text": text}) for node, text in texts]
    assert applications.shares_of(lines) == {"x": 0.5, "y": 0.25, "z": 0.25}


def stage(end_s, **models):
    own = [{"model": name, "devices": devices.split()} for name, devices in models.items()]
    return {"end_s": end_s, "models": own}


def report(measured, *ran):
    planned = [stage(4.0, a="cpu0", b="cpu1"), stage(9.0, b="cpu1", c="cpu0")]
    return {
        "makespan_s": {"predicted": 9.0, "measured": measured},
        "bound_s": 7.0, "idle_s": 1.0, "predicted_idle_s": 0.5, "search_s": 0.2,
        "generated_tokens": 100, "requests": {"n": 12}, "errors": {},
        "replicas": [{"load_s": 3.123}, {"load_s": None}],
        "predicted_stages": planned, "stages": list(ran) or planned,
    }  # fmt: skip


def test_tables_have_estimates_gains_and_whether_the_order_was_kept():
    early = stage(3.0, a="cpu0", b="cpu1"), stage(5.0, a="cpu0", c="cpu1")
    again = stage(2.0, b="cpu1", a="cpu0"), *report(10.0)["stages"]  # a restart changes no model
    rows = [
        {"application": "one", "requests": 12, "greedy": report(10.0, *again),
         "max": report(12.0), "min": report(20.0)},
        {"application": "two", "requests": 12, "greedy": report(8.0, *early),
         "max": report(9.0), "min": report(9.0)},
    ]  # fmt: skip
    (table,) = applications.tables(rows)
    first, second = table["rows"]
    assert first == [
        "one", "12", "2, kept", "10.0 (-10.0%)", "12.0 (-25.0%)", "20.0 (-55.0%)", "1.20", "2.00"
    ]  # fmt: skip
    assert (second[2], second[6]) == ("2, repaired", "1.12")
    assert "ours 11.2%" in table["note"]
    kept = applications.sample(rows[0])["ours"]
    assert kept["load_s"] == [3.12]
    assert kept["planned"][0] == "4.0 s: a cpu0, b cpu1"


def test_a_method_that_leaves_requests_out_is_an_error():
    less = report(9.0) | {"requests": {"n": 11}}
    with pytest.raises(SystemExit, match="expected all of them"):
        applications.requests_of({"greedy": report(9.0), "max": less})
