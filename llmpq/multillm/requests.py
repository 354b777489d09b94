"""Requests of an application: JSON lines, ours or OpenAI's Batch lines.

Ours: ``{"id", "prompt"}``. ``prompt`` is a text, or for a node with a self-loop the list of its
chunks. ``prompt_tokens``, a number or one for each chunk, states lengths; lines that are only
planned need no text. Optional ``max_new_tokens`` lowers the limit of every node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmpq.dist.io.prompts import RequestId, lines_of, parse_line, request_id
from llmpq.errors import SpecError
from llmpq.multillm.graph import Application
from llmpq.spec.fields import Fields
from llmpq.spec.workload import MAX_TOKENS

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
