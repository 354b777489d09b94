"""All requests of an application with their lengths and what each waits for, built before planning.

A node makes the requests of an item from its templates: one for each, one for each producer's
answer (``join: each``), one for each chunk (chains). Lengths of answers are drawn from the models'
distributions, and routing from the shares of the edges, so that every prompt's length is known.

Answer lengths: sampled from a model's empirical distribution, capped by limit and context.

SamuLLM, Sec. 4.1: ``l_out = min(X, y, l_max - l_in)`` with ``X`` from the lengths of the model's
answers to many requests, ``y`` the limit and ``l_max`` the model's context.

Requests of an application: JSON lines, ours or OpenAI's Batch lines.

Ours: ``{"id", "prompt"}``. ``prompt`` is a text, or for a node with a self-loop the list of its
chunks. ``prompt_tokens``, a number or one for each chunk, states lengths; lines that are only
planned need no text. Optional ``max_new_tokens`` lowers the limit of every node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.typing import ArrayLike, NDArray

from llmpq.dist.io.prompts import RequestId, lines_of, parse_line, request_id
from llmpq.errors import SpecError
from llmpq.multillm.graph import (
    ANSWER,
    PROMPT,
    Application,
    AppNode,
    Edge,
    fixed_text,
    template_fields,
)
from llmpq.spec.fields import Fields
from llmpq.spec.workload import MAX_TOKENS, LengthDistribution

Lengths = NDArray[np.int64]


def sample_answers(
    law: LengthDistribution | None,
    prompt_tokens: ArrayLike,
    *,
    limit: ArrayLike | None,
    context: int | None,
    chance: np.random.Generator,
) -> Lengths:
    """Draw the answer length of every prompt.

    Args:
        law: distribution of the model's answers; ``None``: every answer reaches its limit.
        prompt_tokens: length of every prompt [n].
        limit: most new tokens, of all prompts or of each; ``None``: the context's.
        context: longest sequence of the model, ``None`` when unlimited.
        chance: source of randomness.

    Returns:
        Lengths [n], at least 1.

    Raises:
        SpecError: a prompt leaves no room for an answer, or nothing bounds an answer.
    """
    prompts = np.asarray(prompt_tokens, np.int64)
    if law is None and limit is None and context is None:
        raise SpecError("lengths: found no distribution, limit or context, expected one of them")
    room = np.full(prompts.shape, np.iinfo(np.int64).max)
    if context is not None:
        if prompts.size and prompts.max() >= context:
            raise SpecError(
                f"lengths: found a prompt of {prompts.max()} tokens, expected fewer than the "
                f"model's context of {context}"
            )
        room = context - prompts
    if limit is not None:
        room = np.minimum(room, np.asarray(limit, np.int64))
    if law is None:
        return room
    shares = np.cumsum(law.probabilities)
    places = np.searchsorted(shares, chance.random(prompts.shape) * shares[-1], side="right")
    drawn = np.asarray(law.lengths, np.int64)[np.minimum(places, len(law.lengths) - 1)]
    answers: Lengths = np.minimum(drawn, room)
    return answers


Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
CHARACTERS = 4
"""Characters of a token, where no tokenizer counts."""
JOIN_TOKENS = 1
"""Tokens of the empty line between joined answers."""


def estimated_tokens(text: str) -> int:
    """Return the tokens of a text by its characters."""
    return -(-len(text) // CHARACTERS)


@dataclass(frozen=True, kw_only=True, eq=False)
class AppWorkload:
    """Requests of all nodes, numbered such that a request follows those that it waits for.

    Attributes:
        app: the application.
        node: node of each request, an index into ``app.nodes`` [n].
        model: its model, an index into ``app.models`` [n].
        item: its item [n].
        prompt: tokens of its prompt [n].
        answer: tokens of its answer [n].
        before: previous chunk of its chain [n], -1 for none.
        parents: requests of other nodes that it waits for; those of request ``r`` are
            ``parents[first[r]:first[r + 1]]``.
        first: [n + 1].
    """

    app: Application
    node: Ints
    model: Ints
    item: Ints
    prompt: Ints
    answer: Ints
    before: Ints
    parents: Ints
    first: Ints

    def __len__(self) -> int:
        return len(self.node)

    def where(self, chosen: Bools) -> AppWorkload:
        """Return the chosen requests without what they wait for [n]."""
        count = int(chosen.sum())
        return replace(
            self,
            node=self.node[chosen],
            model=self.model[chosen],
            item=self.item[chosen],
            prompt=self.prompt[chosen],
            answer=self.answer[chosen],
            before=np.full(count, -1),
            parents=np.zeros(0, np.int64),
            first=np.zeros(count + 1, np.int64),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLengths:
    """What bounds and spreads the answers of a model.

    Attributes:
        law: distribution of answer lengths; ``None``: every answer reaches its limit.
        context: longest sequence; ``None`` when unlimited.
    """

    law: LengthDistribution | None = None
    context: int | None = None


def build_workload(
    app: Application,
    items: Mapping[str, Sequence[Item]],
    lengths: Mapping[str, ModelLengths],
    *,
    seed: int = 0,
    count: Callable[[str], int] = estimated_tokens,
) -> AppWorkload:
    """Build the requests of an application.

    Args:
        app: the application.
        items: items of each node with a request file.
        lengths: of each model, by name.
        seed: of answer lengths and routing.
        count: returns the tokens of a text.

    Raises:
        SpecError: a prompt leaves no room in a model's context; names node and item.
    """
    build = _WorkloadBuilder(app, lengths, np.random.default_rng(seed), count)
    for name in app.order:
        node = app.node(name)
        if node.requests is not None:
            build.add_source(node, items[name])
        else:
            build.add_consumer(node)
    return build.finish()


@dataclass(slots=True)
class _Answers:
    """A node's answers to its items.

    Attributes:
        requests: of each item, those whose answers together are the node's.
        tokens: of each item, together.
    """

    requests: dict[int, list[int]] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)

    def add(self, item: int, request: int, tokens: int) -> None:
        """Add an answer, joined to the earlier ones by an empty line."""
        if item in self.requests:
            self.requests[item].append(request)
            self.tokens[item] += JOIN_TOKENS + tokens
        else:
            self.requests[item], self.tokens[item] = [request], tokens


@dataclass(frozen=True, slots=True)
class _UndrawnRequest:
    """A request before its answer is drawn."""

    item: int
    prompt: int
    parents: Sequence[int]
    before: int = -1


class _WorkloadBuilder:
    def __init__(
        self,
        app: Application,
        lengths: Mapping[str, ModelLengths],
        chance: np.random.Generator,
        count: Callable[[str], int],
    ) -> None:
        self._app, self._lengths, self._chance, self._count = app, lengths, chance, count
        self._items: list[Item] = []
        self._numbers: dict[object, int] = {}
        self._user_tokens: list[int] = []
        self._limits: list[int | None] = []
        self._columns: dict[str, list[int]] = {
            name: [] for name in ("node", "model", "item", "prompt", "answer", "before")
        }
        self._parents: list[int] = []
        self._first = [0]
        self._answers: dict[str, _Answers] = {}
        self._takes: dict[tuple[str, str], set[int]] = {}

    def add_source(self, node: AppNode, items: Sequence[Item]) -> None:
        """Add the requests of a node with a file, chunk by chunk."""
        fixed = [self._fixed(text) for text in node.templates]
        is_chain = self._app.is_chain(node.name)
        chunks = {self._number(item): item.tokens(self._count) for item in items}
        found = self._answers[node.name] = _Answers()
        last: dict[int, tuple[int, int]] = {}
        for step in range(max(map(len, chunks.values()))):
            new = []
            for item, tokens in chunks.items():
                if step >= len(tokens):
                    continue
                before, answer = last.get(item, (-1, 0))
                for text, names in fixed:
                    prompt = text + tokens[step] * names.count(PROMPT)
                    prompt += answer * names.count(node.name)
                    new.append(_UndrawnRequest(item, max(1, prompt), (), before))
            for one, (request, answer) in zip(new, self._add(node, new), strict=True):
                if is_chain:
                    last[one.item] = request, answer
                else:
                    found.add(one.item, request, answer)
        for item, (request, answer) in last.items():
            found.add(item, request, answer)
        self._route(node.name)

    def add_consumer(self, node: AppNode) -> None:
        """Add the requests of a node that reads the answers of others."""
        fixed = [self._fixed(text) for text in node.templates]
        new: list[_UndrawnRequest] = []
        edges = self._app.inputs(node.name)
        for item in range(len(self._items)):
            asked = [edge for edge in edges if item in self._answers[edge.source].requests]
            taken = [edge for edge in asked if item in self._takes[edge.source, node.name]]
            if not taken:
                continue
            if node.join == "each":
                groups = [({ANSWER: self._tokens(edge, item)}, [edge]) for edge in taken]
            else:
                groups = [({edge.source: self._tokens(edge, item) for edge in taken}, asked)]
            for values, waits in groups:
                parents = [
                    one for edge in waits for one in self._answers[edge.source].requests[item]
                ]
                values[PROMPT] = self._user_tokens[item]
                for text, names in fixed:
                    prompt = text + sum(values.get(name, 0) for name in names)
                    new.append(_UndrawnRequest(item, max(1, prompt), parents))
        found = self._answers[node.name] = _Answers()
        for one, (request, answer) in zip(new, self._add(node, new), strict=True):
            found.add(one.item, request, answer)
        self._route(node.name)

    def finish(self) -> AppWorkload:
        """Return the requests."""
        columns = {name: np.array(values, np.int64) for name, values in self._columns.items()}
        return AppWorkload(
            app=self._app,
            parents=np.array(self._parents, np.int64),
            first=np.array(self._first, np.int64),
            **columns,
        )

    def _number(self, item: Item) -> int:
        """Return the number of an item; files may share items."""
        if item.id not in self._numbers:
            self._numbers[item.id] = len(self._items)
            self._items.append(item)
            tokens = item.tokens(self._count)
            self._user_tokens.append(sum(tokens) + JOIN_TOKENS * (len(tokens) - 1))
            self._limits.append(item.max_new_tokens)
        return self._numbers[item.id]

    def _fixed(self, template: str) -> tuple[int, tuple[str, ...]]:
        return self._count(fixed_text(template)), template_fields(template)

    def _tokens(self, edge: Edge, item: int) -> int:
        return self._answers[edge.source].tokens[item]

    def _add(self, node: AppNode, new: Sequence[_UndrawnRequest]) -> list[tuple[int, int]]:
        """Add requests of a node; return the number and the answer's tokens of each."""
        if not new:
            return []
        model = self._app.model_of(node.name)
        own = self._lengths[model.name]
        prompts = np.array([one.prompt for one in new], np.int64)
        if own.context is not None and prompts.max() >= own.context:
            worst = new[int(prompts.argmax())]
            raise SpecError(
                f"{self._items[worst.item].where}: node '{node.name}': found a prompt of "
                f"{worst.prompt} tokens, expected fewer than the {own.context} of model "
                f"'{model.name}': shorten the chunks, or lower 'max_new_tokens' of its producers"
            )
        limits = [
            [one for one in (node.max_new_tokens, self._limits[new_one.item]) if one is not None]
            for new_one in new
        ]
        bound = np.array([min(some, default=np.iinfo(np.int64).max) for some in limits], np.int64)
        answers = sample_answers(
            own.law,
            prompts,
            limit=bound if all(limits) or own.law or own.context else None,
            context=own.context,
            chance=self._chance,
        )
        node_index = self._app.nodes.index(node)
        model_index = self._app.models.index(model)
        found = []
        for one, answer in zip(new, answers.tolist(), strict=True):
            found.append((len(self._columns["node"]), answer))
            values = (node_index, model_index, one.item, one.prompt, answer, one.before)
            for column, value in zip(self._columns.values(), values, strict=True):
                column.append(value)
            self._parents += one.parents
            self._first.append(len(self._parents))
        return found

    def _route(self, name: str) -> None:
        """Draw which edges the answers of a node take.

        Edges with a condition share one draw: an answer takes those in whose part of the shares,
        laid end to end, it falls. So they exclude each other while the shares add up to 1 at most.
        """
        answered = list(self._answers[name].requests)
        draws = self._chance.random(len(answered))
        start = 0.0
        for edge in self._app.edges:
            if edge.source != name or edge.is_loop:
                continue
            share = self._app.share(edge)
            if edge.when is None:
                is_taken = self._chance.random(len(answered)) < share
            else:
                is_taken = (draws - start) % 1.0 < share
                start += share
            chosen = {item for item, taken in zip(answered, is_taken, strict=True) if taken}
            self._takes[name, edge.target] = chosen


URLS = ("/v1/completions", "/v1/chat/completions")


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One line of a request file, which passes through the nodes of the application.

    Attributes:
        id: chosen by the user; lines of several files with one id are the same item.
        where: file and line, for messages.
        prompts: text of every chunk, one without a self-loop; empty if only lengths are known.
        prompt_tokens: length of every chunk, empty if it is not stated.
        max_new_tokens: most new tokens of its answers, ``None`` if only the nodes limit them.
    """

    id: RequestId
    where: str
    prompts: tuple[str, ...] = ()
    prompt_tokens: tuple[int, ...] = ()
    max_new_tokens: int | None = None

    @property
    def chunks(self) -> int:
        """Number of chunks, at least 1."""
        return len(self.prompts) or len(self.prompt_tokens)

    def same(self, other: Item) -> bool:
        """Whether two lines state the same item."""
        return (self.prompts, self.prompt_tokens, self.max_new_tokens) == (
            other.prompts, other.prompt_tokens, other.max_new_tokens,
        )  # fmt: skip

    def tokens(self, count: Callable[[str], int]) -> tuple[int, ...]:
        """Return the length of every chunk, as stated or counted by ``count``."""
        return self.prompt_tokens or tuple(max(1, count(text)) for text in self.prompts)


def load_items(app: Application) -> dict[str, tuple[Item, ...]]:
    """Read the request files of an application; return the items of every node that has a file.

    Raises:
        SpecError: names file, line and field; also if one id stands for different items, or an
            item has several chunks at a node without a self-loop.
    """
    files: dict[str, tuple[Item, ...]] = {}
    known: dict[RequestId, Item] = {}
    found = {}
    for node in app.nodes:
        if node.requests is None:
            continue
        if node.requests not in files:
            files[node.requests] = read_items(node.requests)
        found[node.name] = files[node.requests]
        for item in found[node.name]:
            first = known.setdefault(item.id, item)
            if not item.same(first):
                raise SpecError(
                    f"{item.where}: field 'id': found {item.id!r} with another prompt than "
                    f"{first.where}, expected one item for each id"
                )
            if item.chunks > 1 and not app.is_chain(node.name):
                raise SpecError(
                    f"{item.where}: field 'prompt': found {item.chunks} chunks, expected one: "
                    f"node '{node.name}' has no self-loop"
                )
    return found


def read_items(path: str | Path) -> tuple[Item, ...]:
    """Read a request file.

    Raises:
        SpecError: names file, line and field; also for a file without lines.
    """
    path = Path(path)
    found: dict[RequestId, Item] = {}
    for number, line in lines_of(path):
        fields = parse_line(path, number, line)
        item = _batch_item(fields) if fields.has("custom_id") else _item(fields)
        if item.id in found:
            raise SpecError(
                f"{item.where}: field 'id': found {item.id!r}, expected an id not yet used in "
                f"{found[item.id].where}"
            )
        found[item.id] = item
    if not found:
        raise SpecError(f"{path}: found no requests, expected at least one line")
    return tuple(found.values())


def _item(fields: Fields) -> Item:
    name = request_id(fields)
    prompts = _several(fields, "prompt", _text) if fields.has("prompt") else ()
    lengths = _several(fields, "prompt_tokens", _length) if fields.has("prompt_tokens") else ()
    if not (prompts or lengths):
        raise fields.error("prompt", None, "a text, or 'prompt_tokens'")
    if prompts and lengths and len(prompts) != len(lengths):
        raise fields.error("prompt_tokens", lengths, f"one number for each of {len(prompts)} texts")
    item = Item(
        id=name,
        where=fields.where,
        prompts=prompts,
        prompt_tokens=lengths,
        max_new_tokens=fields.optional_integer("max_new_tokens", 1, MAX_TOKENS),
    )
    fields.done()
    return item


def _batch_item(fields: Fields) -> Item:
    """Return the item of a line of OpenAI's Batch files; the nodes decide about models."""
    name, method = fields.text("custom_id"), fields.text("method", ("POST",))
    url, body = fields.text("url", URLS), fields.child("body")
    fields.done()
    assert method == "POST"
    body.optional_text("model")
    if url == URLS[0]:
        prompt = body.text("prompt")
    else:
        messages = body.children("messages", 1)
        prompt = "\n\n".join(_content(message) for message in messages)
    limits = [body.optional_integer(key, 1) for key in ("max_tokens", "max_completion_tokens")]
    body.done()
    return Item(
        id=name,
        where=fields.where,
        prompts=(prompt,),
        max_new_tokens=next((one for one in limits if one is not None), None),
    )


def _content(message: Fields) -> str:
    message.text("role")
    content = message.text("content")
    message.done()
    return content


def _several(fields: Fields, name: str, take: Callable[[Fields, str], Any]) -> tuple[Any, ...]:
    """Return the values of a field that holds one, or a list of at least one."""
    value: Any = fields.take(name)
    items = value if isinstance(value, list) else [value]
    if not items:
        raise fields.error(name, value, "at least one entry")
    keys: Mapping[str, Any] = {
        name if items is not value else f"{name}[{place}]": item for place, item in enumerate(items)
    }
    entries = Fields(keys, fields.where)
    return tuple(take(entries, key) for key in keys)


def _text(entries: Fields, key: str) -> str:
    return entries.text(key)


def _length(entries: Fields, key: str) -> int:
    return entries.integer(key, 1, MAX_TOKENS)
