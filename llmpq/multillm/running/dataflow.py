"""Dataflow: which requests of an application can be asked, from the answers that there are.

The communicator of SamuLLM, Sec. 4.3: it fills templates with answers and routes the results to
the nodes that read them, as soon as they are there. Pure: it asks nothing itself.

A request is one template of a node for one item; in a chain, one chunk; with ``"join": "each"``,
one template for each producer's answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from llmpq.dist.io.prompts import RequestId
from llmpq.multillm.graph import ANSWER, PROMPT, Application, Edge, fill_template
from llmpq.multillm.workload import Item

JOINT = "\n\n"
"""Between the answers of a node that reach a consumer, and between the chunks of a prompt."""


@dataclass(frozen=True, slots=True)
class RequestKey:
    """Names a request; ``part`` counts its templates, chunks or producers from 0."""

    node: str
    item: RequestId
    part: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyRequest:
    """A request that can be asked.

    Attributes:
        prompt: filled template.
        max_new_tokens: longest answer by node and item; ``None``: as the context allows.
        where: file and line of its item.
    """

    key: RequestKey
    prompt: str
    max_new_tokens: int | None
    where: str


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What becomes of an item at a node: an answer, none because it was not asked, or an error."""

    text: str | None = None
    error: str | None = None


@dataclass(slots=True)
class _Visit:
    """An item at a node."""

    inputs: dict[str, _Outcome] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)
    answers: dict[int, str] = field(default_factory=dict)
    error: str | None = None
    is_decided: bool = False


class Dataflow:
    """The state of all items at all nodes.

    Args:
        app: the application.
        items: of every node with a request file, as ``load_items`` returns them; with texts.

    Attributes:
        unfinished: items of every node whose outcome is open.
        errors: requests that cannot be asked, and why.
    """

    def __init__(self, app: Application, items: Mapping[str, Sequence[Item]]) -> None:
        self.errors: dict[RequestKey, str] = {}
        self._app = app
        self._nodes = {node.name: node for node in app.nodes}
        self._items = {item.id: item for found in items.values() for item in found}
        self._inputs = {node.name: app.inputs(node.name) for node in app.nodes}
        self._outputs: defaultdict[str, list[Edge]] = defaultdict(list)
        for edge in app.edges:
            if not edge.is_loop:
                self._outputs[edge.source].append(edge)
        self._visits: dict[str, dict[RequestId, _Visit]] = {}
        for name in app.order:
            if self._inputs[name]:
                ids = dict.fromkeys(
                    id for edge in self._inputs[name] for id in self._visits[edge.source]
                )
            else:
                ids = dict.fromkeys(item.id for item in items[name])
            self._visits[name] = {id: _Visit() for id in ids}
        self.unfinished = {name: len(found) for name, found in self._visits.items()}

    def begin(self) -> list[ReadyRequest]:
        """Return the requests that need no answer, in the order of nodes and items."""
        found: list[ReadyRequest] = []
        for name in self._app.order:
            if not self._inputs[name]:
                for id in self._visits[name]:
                    found += self._ask(name, id, self._first_parts(name), {})
        # Items that a producer never has do not arrive from it.
        for name in self._app.order:
            for edge in self._inputs[name]:
                for id in self._visits[name]:
                    if id not in self._visits[edge.source]:
                        found += self._receive(edge, id, _Outcome())
        return found

    def answer(self, key: RequestKey, text: str) -> list[ReadyRequest]:
        """Take the answer of a request; return the requests that can be asked now."""
        visit = self._visits[key.node][key.item]
        assert key.part in visit.asked, f"{key} was not asked"
        assert key.part not in visit.answers, f"{key} was answered twice"
        visit.answers[key.part] = text
        if self._app.is_chain(key.node) and visit.error is None:
            item = self._items[key.item]
            if key.part + 1 < item.chunks:
                return list(self._ask(key.node, key.item, (key.part + 1,), {key.node: text}))
            return self._decide(key.node, key.item, _Outcome(text))
        return self._decide_if_complete(key.node, key.item)

    def fail(self, key: RequestKey, error: str) -> list[ReadyRequest]:
        """Note that a request cannot be asked; return the requests that can be asked now."""
        visit = self._visits[key.node][key.item]
        assert key.part in visit.asked, f"{key} was not asked"
        visit.error = self.errors[key] = error
        visit.answers[key.part] = ""
        return self._decide_if_complete(key.node, key.item)

    def finished(self) -> set[str]:
        """Return the nodes whose items are all answered, or never will be."""
        return {name for name, count in self.unfinished.items() if not count}

    def known(self, node: str) -> int:
        """Return how many requests of a node are known so far, chunks to come included."""
        if self._app.is_chain(node):
            return sum(self._items[id].chunks for id in self._visits[node])
        return sum(len(visit.asked) for visit in self._visits[node].values())

    def _first_parts(self, name: str) -> Sequence[int]:
        return (0,) if self._app.is_chain(name) else range(len(self._nodes[name].templates))

    def _ask(
        self, name: str, id: RequestId, parts: Sequence[int], answers: Mapping[str, str]
    ) -> Iterator[ReadyRequest]:
        """Yield the requests of some parts; ``answers`` are the values of the templates."""
        node, item = self._nodes[name], self._items[id]
        is_chain = self._app.is_chain(name)
        limits = [n for n in (node.max_new_tokens, item.max_new_tokens) if n is not None]
        for part in parts:
            self._visits[name][id].asked.add(part)
            prompt = item.prompts[part] if is_chain else JOINT.join(item.prompts)
            template = node.templates[0 if is_chain else part % len(node.templates)]
            yield ReadyRequest(
                key=RequestKey(name, id, part),
                prompt=fill_template(template, {PROMPT: prompt, **answers}),
                max_new_tokens=min(limits, default=None),
                where=item.where,
            )

    def _receive(self, edge: Edge, id: RequestId, outcome: _Outcome) -> list[ReadyRequest]:
        """Take what a producer has for an item."""
        visit = self._visits[edge.target][id]
        visit.inputs[edge.source] = outcome
        node = self._nodes[edge.target]
        if outcome.error is not None:
            visit.error = outcome.error
        elif node.join == "each" and outcome.text is not None:
            first = len(node.templates) * self._inputs[edge.target].index(edge)
            parts = range(first, first + len(node.templates))
            return list(self._ask(edge.target, id, parts, {ANSWER: outcome.text}))
        return self._decide_if_complete(edge.target, id)

    def _decide_if_complete(self, name: str, id: RequestId) -> list[ReadyRequest]:
        """Ask, or decide about, an item at a node, once all that it waits for is there."""
        visit = self._visits[name][id]
        if len(visit.inputs) < len(self._inputs[name]) or len(visit.answers) < len(visit.asked):
            return []
        if visit.error is not None:
            return self._decide(name, id, _Outcome(error=visit.error))
        if visit.asked:
            texts = [visit.answers[part] for part in sorted(visit.answers)]
            return self._decide(name, id, _Outcome(JOINT.join(texts)))
        arrived = {source: one.text for source, one in visit.inputs.items() if one.text is not None}
        if not arrived or self._nodes[name].join == "each":
            return self._decide(name, id, _Outcome())
        return list(self._ask(name, id, self._first_parts(name), arrived))

    def _decide(self, name: str, id: RequestId, outcome: _Outcome) -> list[ReadyRequest]:
        visit = self._visits[name][id]
        assert not visit.is_decided
        visit.is_decided = True
        self.unfinished[name] -= 1
        found: list[ReadyRequest] = []
        for edge in self._outputs[name]:
            found += self._receive(edge, id, _taken(edge, outcome))
        return found


def _taken(edge: Edge, outcome: _Outcome) -> _Outcome:
    """Return what takes an edge: the outcome, or nothing where its text is not the edge's."""
    if edge.when is None or outcome.text is None:
        return outcome
    return outcome if edge.when.casefold() in outcome.text.casefold() else _Outcome()
