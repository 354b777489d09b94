"""From paragraphs to training and held-out documents, which share no paragraph."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One page of prose: `name` is `package/path`, `text` has paragraphs parted by blank lines."""

    name: str
    text: str


def split_documents(
    raw: dict[str, list[tuple[str, bool]]], seed: int, held_out_bytes: int
) -> tuple[list[Document], list[Document]]:
    """Clean pages into (train, held-out) documents that share no paragraph.

    Held-out documents are cleaned first, so a paragraph they share with others leaves the training
    text and not the other way round.
    """
    sizes = {name: sum(len(t) for t, _ in pars if is_prose(t)) for name, pars in raw.items()}
    held_out_names = choose_held_out(sizes, seed, held_out_bytes)
    order = sorted(raw, key=lambda n: (n not in held_out_names, rank_of(n, seed)))
    seen: set[bytes] = set()
    train, held_out = [], []
    for name in order:
        text = clean(raw[name], seen)
        if len(text) >= 400:
            part = held_out if name in held_out_names else train
            part.append(Document(name=name, text=text))
    return train, held_out


def choose_held_out(sizes: dict[str, int], seed: int, wanted_bytes: int) -> set[str]:
    """Pick whole documents of middling length until they hold about `wanted_bytes` in all."""
    chosen: set[str] = set()
    total = 0
    for name in sorted(sizes, key=lambda n: rank_of(n, seed)):
        if total >= wanted_bytes:
            break
        if 1_000 <= sizes[name] <= 30_000:
            chosen.add(name)
            total += sizes[name]
    return chosen


def rank_of(name: str, seed: int) -> str:
    """Order documents by a digest of their name: stable when others are added or removed."""
    return hashlib.sha256(f"{seed}:{name}".encode()).hexdigest()


def clean(paragraphs: Iterable[tuple[str, bool]], seen: set[bytes]) -> str:
    """Join the prose among `paragraphs`, dropping every paragraph already in `seen`.

    A heading is kept only right before a kept paragraph. `seen` collects digests across documents,
    so that boilerplate, and text repeated between train and held-out documents, occurs once.
    """
    kept: list[str] = []
    heading = ""
    for text, is_heading in paragraphs:
        if is_heading:
            heading = text if len(text.split()) <= 14 and text.isascii() else ""
            continue
        digest = hashlib.sha1(text.lower().encode()).digest()[:10]
        if not is_prose(text) or digest in seen:
            continue
        seen.add(digest)
        kept.extend([heading, text] if heading else [text])
        heading = ""
    return "\n\n".join(kept)


def is_prose(paragraph: str) -> bool:
    """Tell sentences from signatures, tables, menus and other languages."""
    letters = sum(c.isalpha() or c == " " for c in paragraph)
    foreign = sum(not c.isascii() for c in paragraph)
    return (
        len(paragraph.split()) >= 8
        and letters >= 0.82 * len(paragraph)
        and foreign <= 0.02 * len(paragraph)
        and paragraph.rstrip("\"')")[-1:] in {".", ":", "?", "!", ";"}
    )
