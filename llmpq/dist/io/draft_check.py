"""Checks that a draft model has the vocabulary of the model that answers. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmpq.batching.speculation import SpeculativeConfig
from llmpq.errors import SpecError
from llmpq.options.limits import planned_speculation
from llmpq.spec.fields import read_json
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.model_files.config import absolute_model_path
from llmpq.spec.plan import Plan

TOKENIZER_FILE = "tokenizer.json"


def checked_speculation(
    plan: Plan, config: SpeculativeConfig | None, model_dir: Path
) -> SpeculativeConfig | None:
    """Return a run's speculative decoding with the absolute path of its draft model.

    Args:
        plan: whose draft model is taken where none is asked for.
        config: as asked for.
        model_dir: directory of the model that answers.

    Raises:
        SpecError: the draft model has another vocabulary: another size, or another token in its
            ``tokenizer.json``, where both have one.
    """
    config = config or planned_speculation(plan)
    if config is None or config.model is None:
        return config
    folder = absolute_model_path(config.model)
    found, expected = load_model_dir(folder).vocab_size, load_model_dir(model_dir).vocab_size
    if found != expected:
        raise SpecError(
            f"{folder / 'config.json'}: field 'vocab_size': found {found}, expected the {expected} "
            f"of {model_dir / 'config.json'}: a draft model shares the vocabulary"
        )
    _check_tokens(folder / TOKENIZER_FILE, model_dir / TOKENIZER_FILE)
    return replace(config, model=str(folder))


def _check_tokens(own: Path, other: Path) -> None:
    """Compare the tokens of two tokenizers, where both are files that differ."""
    if not (own.is_file() and other.is_file()) or own.read_bytes() == other.read_bytes():
        return
    found, expected = _tokens(own), _tokens(other)
    for number in sorted(found.keys() | expected.keys()):
        if found.get(number) != expected.get(number):
            raise SpecError(
                f"{own}: field 'model.vocab': found token {number} {found.get(number)!r}, expected "
                f"{expected.get(number)!r} as in {other}: a draft model shares the vocabulary"
            )


def _tokens(file: Path) -> dict[int, str]:
    """Return the tokens of a tokenizer by their number."""
    fields = read_json(file)
    if not isinstance(fields, Mapping) or not isinstance(fields.get("model"), Mapping):
        raise SpecError(f"{file}: field 'model': found nothing, expected a tokenizer's model")
    vocab: Any = fields["model"].get("vocab", {})
    if isinstance(vocab, Mapping):
        tokens = {number: token for token, number in vocab.items()}
    else:  # of a unigram model: pieces with their scores
        tokens = {number: piece for number, (piece, _) in enumerate(vocab)}
    return tokens | {item["id"]: item["content"] for item in fields.get("added_tokens", ())}
