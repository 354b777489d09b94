"""Application files: models, nodes, edges and templates.

An application is a graph. A node asks one model; an edge carries answers to another node, or to the
next chunk of the same request (self-loop). Templates turn prompts and answers into prompts.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from llmpq.errors import SpecError
from llmpq.spec.fields import SCHEMA, Fields, Rule, from_json, read_json
from llmpq.spec.workload import MAX_TOKENS

PROMPT, ANSWER = "prompt", "answer"
"""Template fields of the user's prompt, and of the one answer of ``"join": "each"``."""
MAX_DEGREE = 64
_NAME = re.compile(r"[A-Za-z_][\w-]*")

Join = Literal["all", "each"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTable:
    """Measured figures of a model on devices that share its layers.

    Attributes:
        tensor_parallel: devices that share every layer.
        iterations: path of a table of whole iterations, ``None`` to price it from its layers.
        load_s: seconds to load the model; ``None``: estimated from its bytes.
    """

    tensor_parallel: Annotated[int, Rule(minimum=1, maximum=MAX_DEGREE, optional=True)] = 1
    iterations: str | None = None
    load_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AppModel:
    """A model that nodes ask, with its context, answer lengths and measured figures.

    Attributes:
        name: by which nodes name it.
        model: name of the catalogue, or directory relative to the application file.
        max_model_len: longest sequence, prompt and answer; ``None``: the model's own.
        lengths: path of the distribution of its answer lengths; ``None``: answers reach the limit.
        tables: measured figures, at most one for each degree of tensor parallelism.
    """

    name: str
    model: str
    max_model_len: Annotated[int | None, Rule(minimum=2, maximum=MAX_TOKENS)] = None
    lengths: str | None = None
    tables: Annotated[tuple[ModelTable, ...], Rule(optional=True)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AppNode:
    """One use of a model.

    Attributes:
        name: unique; the field of its answers in the templates of its consumers.
        model: name of one of the application's models.
        requests: path of a JSONL file; only nodes without a producer have one.
        templates: texts of its prompts. Every template makes one request of an item.
        join: ``all`` waits for the answers of all producers; ``each`` makes a request of every
            producer's answer.
        max_new_tokens: longest answer; ``None``: what the model's context allows.
    """

    name: str
    model: str
    requests: str | None = None
    templates: Annotated[tuple[str, ...], Rule(minimum=1, optional=True)] = ("{prompt}",)
    join: Annotated[Join, Rule(optional=True)] = "all"
    max_new_tokens: Annotated[int | None, Rule(minimum=1, maximum=MAX_TOKENS)] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """A flow of answers from one node to another, or to itself.

    Attributes:
        when: only answers that contain this text, in any case, take the edge.
        share: expected share of answers that take it, for planning; ``None``: 1, or with ``when``
            an even share of the producer's edges with ``when``.
    """

    source: Annotated[str, Rule(key="from")]
    target: Annotated[str, Rule(key="to")]
    when: str | None = None
    share: Annotated[float | None, Rule(maximum=1)] = None

    @property
    def is_loop(self) -> bool:
        """Whether the answer returns to its own node."""
        return self.source == self.target


@dataclass(frozen=True, slots=True, kw_only=True)
class Application:
    """An application; valid once constructed.

    Raises:
        SpecError: a name is unknown or used twice, a cycle, or a template does not fit its edges.
    """

    SCHEMA: ClassVar[int] = SCHEMA

    name: str
    models: Annotated[tuple[AppModel, ...], Rule(minimum=1)]
    nodes: Annotated[tuple[AppNode, ...], Rule(minimum=1)]
    edges: Annotated[tuple[Edge, ...], Rule(optional=True)] = ()

    def __post_init__(self) -> None:
        _check_names("models", (one.name for one in self.models))
        _check_names("nodes", (one.name for one in self.nodes))
        self._check_models()
        self._check_edges()
        for place, node in enumerate(self.nodes):
            self._check_node(f"nodes[{place}]", node)
        self.order  # noqa: B018  raises on a cycle

    def model_of(self, node: str) -> AppModel:
        """Return the model of a node."""
        name = self.node(node).model
        return next(model for model in self.models if model.name == name)

    def node(self, name: str) -> AppNode:
        """Return the node of that name."""
        return next(node for node in self.nodes if node.name == name)

    def producers(self, node: str) -> tuple[str, ...]:
        """Return the nodes whose answers a node reads, itself excluded, in order of the edges."""
        return tuple(one.source for one in self.inputs(node))

    def inputs(self, node: str) -> tuple[Edge, ...]:
        """Return the edges into a node from other nodes."""
        return tuple(one for one in self.edges if one.target == node and not one.is_loop)

    def is_chain(self, node: str) -> bool:
        """Whether a node reads its own answers, chunk by chunk."""
        return any(one.is_loop and one.source == node for one in self.edges)

    def share(self, edge: Edge) -> float:
        """Return the expected share of answers that take an edge."""
        if edge.share is not None or edge.when is None:
            return 1.0 if edge.share is None else edge.share
        return 1.0 / sum(one.source == edge.source and one.when is not None for one in self.edges)

    @property
    def order(self) -> tuple[str, ...]:
        """Names of the nodes, producers before consumers, else as in the file."""
        left, found = [node.name for node in self.nodes], list[str]()
        while left:
            ready = next((name for name in left if set(self.producers(name)) <= set(found)), None)
            if ready is None:
                raise _bad("edges", " -> ".join(self._cycle(left)), "no cycle but self-loops")
            left.remove(ready)
            found.append(ready)
        return tuple(found)

    def _cycle(self, left: list[str]) -> list[str]:
        path = [left[0]]
        while path[-1] not in path[:-1]:
            path.append(next(name for name in self.producers(path[-1]) if name in left))
        return path[path.index(path[-1]) :][::-1]

    def _check_models(self) -> None:
        used = {node.model for node in self.nodes}
        for place, model in enumerate(self.models):
            if model.name not in used:
                raise _bad(f"models[{place}].name", model.name, "a model that a node uses")
            degrees = [table.tensor_parallel for table in model.tables]
            if len(set(degrees)) != len(degrees):
                raise _bad(f"models[{place}].tables", degrees, "each tensor_parallel once")

    def _check_edges(self) -> None:
        names, seen = [node.name for node in self.nodes], set()
        for place, edge in enumerate(self.edges):
            for key, end in (("from", edge.source), ("to", edge.target)):
                if end not in names:
                    raise _bad(f"edges[{place}].{key}", end, f"one of {', '.join(names)}")
            if (edge.source, edge.target) in seen:
                raise _bad(f"edges[{place}]", f"{edge.source} -> {edge.target}", "each edge once")
            if edge.is_loop and (edge.when, edge.share) != (None, None):
                raise _bad(f"edges[{place}]", edge.source, "no 'when' or 'share' on a self-loop")
            seen.add((edge.source, edge.target))

    def _check_node(self, field: str, node: AppNode) -> None:
        names = [model.name for model in self.models]
        if node.model not in names:
            raise _bad(f"{field}.model", node.model, f"one of {', '.join(names)}")
        producers = self.producers(node.name)
        if producers and node.requests is not None:
            raise _bad(f"{field}.requests", node.requests, "none: answers come over edges")
        if not producers and node.requests is None:
            raise _bad(f"{field}.requests", None, "a file of requests, or an edge to this node")
        if node.join == "each" and not producers:
            raise _bad(f"{field}.join", node.join, "all: no other node has an edge to this one")
        if self.is_chain(node.name) and (len(node.templates) > 1 or producers):
            raise _bad(
                field, node.name, "one template and requests of its own: the node has a self-loop"
            )
        self._check_templates(field, node)

    def _check_templates(self, field: str, node: AppNode) -> None:
        """Check that templates use what the edges bring, and all that has no condition."""
        needed = [one.source for one in self.edges if one.target == node.name and one.when is None]
        known = [PROMPT, *(one.source for one in self.edges if one.target == node.name)]
        if node.join == "each":
            known, needed = [PROMPT, ANSWER], [ANSWER]
        used = set()
        for place, text in enumerate(node.templates):
            for name in template_fields(text, f"{field}.templates[{place}]"):
                if name not in known:
                    offers = ", ".join(f"{{{one}}}" for one in known)
                    raise _bad(f"{field}.templates[{place}]", f"{{{name}}}", f"one of {offers}")
                used.add(name)
        for name in needed:
            if name not in used:
                raise _bad(
                    f"{field}.templates", list(node.templates), f"the field {{{name}}} in one"
                )


def load_application(path: str | Path) -> Application:
    """Read an application file; relative paths are resolved against its folder.

    Raises:
        SpecError: names the file, the field, the value found and what was expected.
    """
    path = Path(path)
    found = from_json(Application, Fields(read_json(path), str(path)))

    def placed(name: str | None) -> str | None:
        return None if name is None else str(path.parent / name)

    models = tuple(
        replace(
            model,
            model=str(path.parent / model.model)
            if (path.parent / model.model).exists()
            else model.model,
            lengths=placed(model.lengths),
            tables=tuple(replace(one, iterations=placed(one.iterations)) for one in model.tables),
        )
        for model in found.models
    )
    nodes = tuple(replace(node, requests=placed(node.requests)) for node in found.nodes)
    return replace(found, models=models, nodes=nodes)


def template_fields(text: str, field: str = "template") -> tuple[str, ...]:
    """Return the names in braces of a template, in order; ``{{`` and ``}}`` stand for braces.

    Raises:
        SpecError: a brace is not closed, or holds more than a name.
    """
    try:
        parts = list(string.Formatter().parse(text))
    except ValueError as error:
        raise _bad(field, text, f"names in braces ({error})") from None
    names = []
    for _, name, form, conversion in parts:
        if name is None:
            continue
        if form or conversion or not _NAME.fullmatch(name):
            raise _bad(field, text, "plain names in braces; {{ and }} for braces")
        names.append(name)
    return tuple(names)


def fill_template(text: str, values: Mapping[str, str]) -> str:
    """Return a template with its fields replaced; a field without a value is empty."""
    parts = string.Formatter().parse(text)
    return "".join(before + values.get(name or "", "") for before, name, _, _ in parts)


def fixed_text(text: str) -> str:
    """Return the text of a template outside its fields."""
    return fill_template(text, {})


def _check_names(field: str, names: Iterable[str]) -> None:
    seen = set[str]()
    for place, name in enumerate(names):
        if not _NAME.fullmatch(name) or name in (PROMPT, ANSWER):
            raise _bad(
                f"{field}[{place}].name", name,
                "letters, digits, _ and -, from a letter on, and not 'prompt' or 'answer'",
            )  # fmt: skip
        if name in seen:
            raise _bad(f"{field}[{place}].name", name, "a name of its own")
        seen.add(name)


def _bad(field: str, found: object, expected: str) -> SpecError:
    return SpecError(f"field '{field}': found {found!r}, expected {expected}")
