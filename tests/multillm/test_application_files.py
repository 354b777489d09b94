"""Application files and request files: read, resolved, and one clear error for every bad input."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from llmpq.errors import SpecError
from llmpq.multillm.graph import (
    Application,
    fill_template,
    fixed_text,
    load_application,
    template_fields,
)
from llmpq.multillm.workload import load_items, read_items
from llmpq.spec.fields import Fields, from_json, to_json


def application(**changes):
    """A router of two models, a chain, and a judge of everything."""
    found = {
        "schema": 1,
        "name": "all-patterns",
        "models": [{"name": "small", "model": "m1"}, {"name": "large", "model": "m2"}],
        "nodes": [
            {"name": "router", "model": "small", "requests": "q.jsonl", "max_new_tokens": 4},
            {"name": "code", "model": "small", "templates": ["Write: {prompt}"]},
            {"name": "chat", "model": "large", "templates": ["{prompt}"]},
            {"name": "summary", "model": "small", "requests": "d.jsonl",
             "templates": ["{summary}\n{prompt}"]},
            {"name": "judge", "model": "large",
             "templates": ["{code}{chat}{summary}: good?", "{code}{chat}{summary}: short?"]},
        ],
        "edges": [
            {"from": "router", "to": "code", "when": "code"},
            {"from": "router", "to": "chat", "when": "chat", "share": 0.75},
            {"from": "summary", "to": "summary"},
            {"from": "code", "to": "judge"},
            {"from": "chat", "to": "judge"},
            {"from": "summary", "to": "judge"},
        ],
    }  # fmt: skip
    for path, value in changes.items():
        target = found
        *steps, last = [int(step) if step.isdigit() else step for step in path.split("__")]
        for step in steps:
            target = target[step]
        target[last] = value
    return found


def read(value) -> Application:
    return from_json(Application, Fields(json.loads(json.dumps(value)), "app.json"))


def test_an_application_answers_about_its_graph():
    app = read(application())
    assert app.order == ("router", "code", "chat", "summary", "judge")
    assert app.producers("judge") == ("code", "chat", "summary")
    assert app.producers("summary") == ()
    assert [node.name for node in app.nodes if app.is_chain(node.name)] == ["summary"]
    assert app.model_of("chat").name == "large"
    assert [app.share(edge) for edge in app.edges] == [0.5, 0.75, 1, 1, 1, 1]


def test_an_application_is_written_as_it_is_read():
    assert read(to_json(read(application()))) == read(application())


@pytest.mark.parametrize(
    ("change", "field", "expected"),
    [
        ({"nodes__1__model": "big"}, "nodes[1].model", "one of small, large"),
        ({"nodes__1__name": "router"}, "nodes[1].name", "a name of its own"),
        ({"nodes__1__name": "prompt"}, "nodes[1].name", "not 'prompt'"),
        ({"nodes__0__name": "2nd"}, "nodes[0].name", "letters"),
        ({"nodes__0__requests": None}, "nodes[0].requests", "a file of requests"),
        ({"nodes__1__requests": "x.jsonl"}, "nodes[1].requests", "answers come over edges"),
        ({"nodes__0__join": "each"}, "nodes[0].join", "no other node"),
        ({"nodes__0__join": "some"}, "nodes[0].join", "one of all, each"),
        ({"nodes__3__templates": ["{prompt}"]}, "nodes[3].templates", "the field {summary}"),
        ({"nodes__4__templates": ["{code}{chat}"]}, "nodes[4].templates", "{summary} in one"),
        ({"nodes__4__templates": ["{router}"]}, "nodes[4].templates[0]", "{code}, {chat}"),
        ({"nodes__4__templates": ["{code.x}"]}, "nodes[4].templates[0]", "plain names"),
        ({"nodes__4__templates": ["{code"]}, "nodes[4].templates[0]", "names in braces"),
        ({"nodes__4__templates": []}, "nodes[4].templates", "at least 1"),
        ({"nodes__3__templates": ["{summary}"] * 2}, "nodes[3]", "self-loop"),
        ({"nodes__0__max_new_tokens": 0}, "nodes[0].max_new_tokens", "[1, "),
        ({"edges__0__to": "poet"}, "edges[0].to", "one of router, code"),
        ({"edges__5__to": "router"}, "nodes[0].requests", "over edges"),
        ({"edges__3": {"from": "chat", "to": "judge"}}, "edges[4]", "each edge once"),
        ({"edges__2__share": 0.5}, "edges[2]", "no 'when'"),
        ({"edges__1__share": 1.5}, "edges[1].share", "[0, 1]"),
        ({"models__0__context": 5}, "models[0].context", "no such field"),
        ({"models__0__name": "tiny"}, "models[0].name", "a model that a node uses"),
        ({"models__0__tables": [{}, {"load_s": 1}]}, "models[0].tables", "once"),
        ({"models": []}, "models", "at least 1"),
        ({"schema": 2}, "schema", "[1, 1]"),
    ],
)  # fmt: skip
def test_every_bad_application_is_one_error_with_file_and_field(change, field, expected):
    with pytest.raises(SpecError) as caught:
        read(application(**change))
    message = str(caught.value)
    assert message.startswith("app.json: ")
    assert f"field '{field}" in message
    assert expected in message


def test_a_cycle_is_named_in_the_direction_of_its_edges():
    nodes = [{"name": name, "model": "m", "templates": ["{a}{b}{c}"]} for name in "abc"]
    nodes = [{**node, "templates": [f"{{{'cab'[i]}}}"]} for i, node in enumerate(nodes)]
    edges = [{"from": one, "to": two} for one, two in ("ab", "bc", "ca")]
    value = {"schema": 1, "name": "loop", "models": [{"name": "m", "model": "m"}]}
    with pytest.raises(SpecError, match="found 'a -> b -> c -> a', expected no cycle"):
        read({**value, "nodes": nodes, "edges": edges})


def test_templates_name_their_fields_and_are_filled():
    text = "Q: {prompt} {{x}} A: {a-1}"
    assert template_fields(text) == ("prompt", "a-1")
    assert fill_template(text, {"prompt": "why {a-1}?", "a-1": "so"}) == "Q: why {a-1}? {x} A: so"
    assert fixed_text(text) == "Q:  {x} A: "


def write_lines(path, *lines):
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def test_a_file_resolves_paths_against_its_folder(tmp_path):
    (tmp_path / "m1").mkdir()
    tables = [{"iterations": "i.csv"}, {"tensor_parallel": 2}]
    path = write_lines(tmp_path / "app.json", application(models__0__tables=tables))
    write_lines(tmp_path / "q.jsonl", {"id": 1, "prompt": "one"})
    write_lines(tmp_path / "d.jsonl", {"id": "doc", "prompt": ["a", "b"], "prompt_tokens": [3, 4]})
    app = load_application(path)
    assert [model.model for model in app.models] == [str(tmp_path / "m1"), "m2"]
    assert app.models[0].tables[0].iterations == str(tmp_path / "i.csv")
    assert app.models[0].tables[1].iterations is None
    items = load_items(app)
    assert list(items) == ["router", "summary"]
    assert items["summary"][0].chunks == 2
    assert items["summary"][0].tokens(len) == (3, 4)
    assert items["router"][0].tokens(len) == (3,)


def test_lines_of_a_batch_file_are_items(tmp_path):
    common = {"method": "POST", "url": "/v1/chat/completions"}
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    body = {"model": "any", "messages": messages, "max_tokens": 5}
    plain = {"model": "any", "prompt": "Who?"}
    path = write_lines(
        tmp_path / "batch.jsonl",
        {"custom_id": "a", **common, "body": body},
        {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": plain},
    )
    first, second = read_items(path)
    assert (first.id, first.prompts, first.max_new_tokens) == ("a", ("Be brief.\n\nWhy?",), 5)
    assert (second.id, second.prompts, second.max_new_tokens) == ("b", ("Who?",), None)


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ({"id": 1}, "prompt"),
        ({"id": 1, "prompt": []}, "prompt"),
        ({"id": 1, "prompt": ["a", 2]}, "prompt[1]"),
        ({"id": 1, "prompt_tokens": [4, 0]}, "prompt_tokens[1]"),
        ({"id": 1, "prompt": "a", "prompt_tokens": [1, 2]}, "prompt_tokens"),
        ({"id": 1, "prompt": "a", "max_tokens": 4}, "max_tokens"),
        ({"prompt": "a"}, "id"),
        ({"custom_id": "a", "method": "POST", "url": "/v1/completions",
          "body": {"prompt": "a", "temperature": 0.5}}, "body.temperature"),
    ],
)  # fmt: skip
def test_every_bad_line_is_one_error_with_line_and_field(tmp_path, line, field):
    path = write_lines(tmp_path / "r.jsonl", {"id": 0, "prompt": "fine"}, line)
    with pytest.raises(SpecError, match=r"r\.jsonl: line 2") as caught:
        read_items(path)
    assert f"field '{field}'" in str(caught.value)


def test_items_that_do_not_fit_the_application_are_errors(tmp_path):
    app = write_lines(tmp_path / "app.json", application())
    write_lines(tmp_path / "d.jsonl", {"id": 1, "prompt": ["a", "b"]})
    write_lines(tmp_path / "q.jsonl", {"id": 1, "prompt": "other"})
    with pytest.raises(SpecError, match=r"d\.jsonl: line 1: field 'id': found 1 with another"):
        load_items(load_application(app))
    write_lines(tmp_path / "q.jsonl", {"id": 2, "prompt": ["a", "b"]})
    with pytest.raises(SpecError, match="node 'router' has no self-loop"):
        load_items(load_application(app))
    (tmp_path / "q.jsonl").write_text("")
    with pytest.raises(SpecError, match="no requests"):
        load_items(load_application(app))
    (tmp_path / "q.jsonl").write_text('{"id": 1, "prompt": "a"}\n' * 2)
    with pytest.raises(SpecError, match="line 2: field 'id': found 1, expected an id not yet used"):
        load_items(load_application(app))


def test_the_examples_of_the_page_are_accepted(tmp_path):
    page = Path(__file__).parents[2] / "docs" / "reference" / "applications.md"
    app, lines = re.findall(r"```json\n(.*?)```", page.read_text("utf-8"), re.S)
    (tmp_path / "app.json").write_text(app)
    (tmp_path / "documents.jsonl").write_text(lines)
    found = load_application(tmp_path / "app.json")
    assert found.order == ("summary", "judge")
    assert [item.chunks for item in load_items(found)["summary"]] == [2, 1]
