"""Dataflow: requests have the prompts that plain recursion over the graph gives, in any order."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmpq.multillm.graph import Application, AppModel, AppNode, Edge, fill_template
from llmpq.multillm.running.dataflow import Dataflow, RequestKey
from llmpq.multillm.workload import Item


def answer_of(node: str, prompt: str) -> str:
    return hashlib.sha256(f"{node}|{prompt}".encode()).hexdigest()[:6]


def item(name: str, *prompts: str, limit: int | None = None) -> Item:
    return Item(id=name, where=f"r.jsonl:{name}", prompts=prompts, max_new_tokens=limit)


def app_of(nodes: list[AppNode], edges: list[Edge] = ()) -> Application:
    return Application(
        name="a", models=(AppModel(name="m", model="m"),), nodes=tuple(nodes), edges=tuple(edges)
    )


def node(
    name: str, *templates: str, source: bool = False, join: str = "all", limit=None
) -> AppNode:
    return AppNode(
        name=name,
        model="m",
        requests="r.jsonl" if source else None,
        templates=templates or ("{prompt}",),
        join=join,
        max_new_tokens=limit,
    )


def edge(text: str, when: str | None = None) -> Edge:
    source, target = text.split(">")
    return Edge(source=source, target=target, when=when)


def run(app, items, chance=None, fails=()) -> tuple[Dataflow, dict[RequestKey, str]]:
    """Answer all requests, in the order of ``chance``; return the prompts."""
    flow = Dataflow(app, items)
    waiting, prompts = flow.begin(), {}
    while waiting:
        ready = waiting.pop(0 if chance is None else chance.randrange(len(waiting)))
        assert ready.key not in prompts
        prompts[ready.key] = ready.prompt
        if ready.key.node in fails:
            waiting += flow.fail(ready.key, "too long")
        else:
            waiting += flow.answer(ready.key, answer_of(ready.key.node, ready.prompt))
    assert flow.finished() == {one.name for one in app.nodes}
    for name in flow.finished():
        assert flow.known(name) == sum(key.node == name for key in prompts)
    return flow, prompts


class Recursion:
    """Asks by plain recursion over the graph; ``prompts`` are those of all requests."""

    def __init__(self, app: Application, items) -> None:
        self.app, self.items = app, items
        self.known = {one.id: one for found in items.values() for one in found}
        self.prompts: dict[RequestKey, str] = {}
        for name in app.order:
            for id in self.known:
                self.outcome(name, id)

    def ask(self, name, id, part, template, values):
        self.prompts[RequestKey(name, id, part)] = text = fill_template(template, values)
        return answer_of(name, text)

    def outcome(self, name: str, id) -> str | None:
        if self.app.inputs(name):
            return self.consumed(name, id)
        if id not in [other.id for other in self.items[name]]:
            return None
        if not self.app.is_chain(name):
            return self.asked(name, id, [(0, {})])
        text, template = "", self.app.node(name).templates[0]
        for part, chunk in enumerate(self.known[id].prompts):
            text = self.ask(name, id, part, template, {"prompt": chunk, name: text})
        return text

    def consumed(self, name: str, id) -> str | None:
        found = []
        for place, way in enumerate(self.app.inputs(name)):
            text = self.outcome(way.source, id)
            if text is not None and (way.when or "").lower() in text.lower():
                found.append((place, way.source, text))
        if not found:
            return None
        if self.app.node(name).join == "all":
            return self.asked(name, id, [(0, {source: text for _, source, text in found})])
        return self.asked(name, id, [(place, {"answer": text}) for place, _, text in found])

    def asked(self, name: str, id, arrived) -> str:
        templates = self.app.node(name).templates
        user = {"prompt": "\n\n".join(self.known[id].prompts)}
        return "\n\n".join(
            self.ask(name, id, place * len(templates) + number, template, user | values)
            for place, values in arrived
            for number, template in enumerate(templates)
        )


def expected(app: Application, items) -> dict[RequestKey, str]:
    return Recursion(app, items).prompts


def test_chain_ensemble_and_router_are_asked_in_turn():
    app = app_of(
        [
            node("route", "Which? {prompt}", source=True),
            node("code"),
            node("chat", "Talk: {prompt} ({route})"),
            node("sum", "{sum}+{prompt}", source=True),
            node("judge", "{code}{chat}{sum}?", "short? {sum}{code}{chat}"),
        ],
        [edge("route>code", "A"), edge("route>chat"), edge("sum>sum"),
         edge("code>judge", "x"), edge("chat>judge"), edge("sum>judge")],
    )  # fmt: skip
    items = {"route": [item("1", "one"), item("2", "two")], "sum": [item("3", "c1", "c2", "c3")]}
    flow, prompts = run(app, items)
    assert prompts == expected(app, items)
    first = answer_of("sum", "+c1")
    assert prompts[RequestKey("sum", "3", 1)] == f"{first}+c2"
    assert prompts[RequestKey("judge", "3", 0)].endswith("?")
    assert flow.errors == {}


def test_limits_are_the_least_of_node_and_item():
    app = app_of([node("a", source=True, limit=9)])
    items = {"a": [item("1", "x", limit=4), item("2", "y", limit=30), item("3", "z")]}
    assert [one.max_new_tokens for one in Dataflow(app, items).begin()] == [4, 9, 9]


def test_an_item_that_cannot_be_asked_takes_its_consumers_along():
    app = app_of(
        [node("a", source=True), node("b", source=True), node("c", "{a}{b}"), node("d", "{c}")],
        [edge("a>c"), edge("b>c"), edge("c>d")],
    )
    flow, prompts = run(app, {"a": [item("1", "x")], "b": [item("1", "x")]}, fails="a")
    assert {key.node for key in prompts} == {"a", "b"}
    assert flow.errors == {RequestKey("a", "1", 0): "too long"}


def test_an_answer_is_taken_once():
    flow = Dataflow(app_of([node("a", source=True)]), {"a": [item("1", "x")]})
    (ready,) = flow.begin()
    flow.answer(ready.key, "y")
    with pytest.raises(AssertionError, match="twice"):
        flow.answer(ready.key, "y")


@st.composite
def applications(draw):
    """Nodes in order; every node reads some of those before it, with and without conditions."""
    nodes, edges, items = [], [], {}
    for number in range(draw(st.integers(1, 6))):
        name = "abcdef"[number]
        producers = [one.name for one in nodes if draw(st.booleans())][:3]
        if producers:
            join = draw(st.sampled_from(["all", "each"]))
            edges += [edge(f"{one}>{name}", draw(st.sampled_from([None, "a", "7"])))
                      for one in producers]  # fmt: skip
            fields = "".join(f"{{{one}}}" for one in producers) if join == "all" else "{answer}"
            count = draw(st.integers(1, 2))
            texts = [f"{place}{fields}{{prompt}}" for place in range(count)]
            nodes.append(node(name, *texts, join=join))
            continue
        is_chain = draw(st.booleans())
        ids = draw(st.sets(st.sampled_from("123"), min_size=1))
        if is_chain:
            edges.append(edge(f"{name}>{name}"))
            nodes.append(node(name, f"{{{name}}}|{{prompt}}", source=True))
        else:
            count = draw(st.integers(1, 2))
            nodes.append(node(name, *[f"{place}{{prompt}}" for place in range(count)], source=True))
        more = ["second", "third"] if is_chain else []
        prefix = name if is_chain else ""
        items[name] = [item(f"{prefix}{id}", id, *more) for id in sorted(ids)]
    return app_of(nodes, edges), items


@given(applications(), st.randoms(use_true_random=False))
def test_any_order_asks_what_recursion_asks(drawn, chance):
    app, items = drawn
    flow, prompts = run(app, items, chance)
    assert prompts == expected(app, items)
    assert flow.errors == {}
