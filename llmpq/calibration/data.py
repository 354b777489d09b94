"""Calibration data: token sequences of one length, from a text or from a seed.

A text is one stream of tokens; the sequences are spread evenly over it. They are sorted, so results
do not depend on the order of the input.

Shape legend: N sequences, T tokens of each.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from llmpq.errors import SpecError
from llmpq.spec.fields import Fields, read_text
from llmpq.spec.model_files.tokenizer import missing_tokenizer, tokenizer_arguments, tokenizer_error

DEFAULT_SEQUENCES = 128
DEFAULT_SEQUENCE_TOKENS = 512

_TEXT_FIELDS = ("text", "prompt")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CalibrationSet:
    """Token sequences to calibrate with.

    Attributes:
        token_ids: int64 ``[N, T]``; sorted when the set is built.
        source: description of their origin, for provenance.

    Raises:
        SpecError: there is no token.
    """

    token_ids: Tensor
    source: str

    def __post_init__(self) -> None:
        if self.token_ids.dim() != 2 or self.token_ids.numel() == 0:
            raise SpecError(f"{self.source}: found no tokens to calibrate with")
        rows = sorted(self.token_ids.to(torch.int64).tolist())
        object.__setattr__(self, "token_ids", torch.tensor(rows, dtype=torch.int64))

    @property
    def tokens(self) -> int:
        """Tokens in all sequences together."""
        return self.token_ids.numel()

    @property
    def digest(self) -> str:
        """SHA-256 of the shape and the tokens, in hexadecimal; independent of their order."""
        state = hashlib.sha256(repr(tuple(self.token_ids.shape)).encode())
        state.update(self.token_ids.numpy().astype("<i8").tobytes())
        return state.hexdigest()

    def check(self, vocab_size: int, max_positions: int | None) -> None:
        """Check tokens and lengths against the limits of a model.

        Raises:
            SpecError: a token is outside the vocabulary, or the sequences are too long.
        """
        low, high = int(self.token_ids.min()), int(self.token_ids.max())
        if low < 0 or high >= vocab_size:
            raise SpecError(
                f"{self.source}: found token {low if low < 0 else high}, expected tokens of a "
                f"vocabulary of {vocab_size}"
            )
        length = self.token_ids.shape[1]
        if max_positions is not None and length > max_positions:
            raise SpecError(
                f"{self.source}: found sequences of {length} tokens, expected at most the "
                f"{max_positions} positions of the model"
            )


def read_calibration(
    path: Path | str,
    model_dir: Path | str,
    *,
    num_sequences: int = DEFAULT_SEQUENCES,
    sequence_tokens: int = DEFAULT_SEQUENCE_TOKENS,
) -> CalibrationSet:
    """Tokenize a file with the model's own tokenizer and cut sequences out of it.

    Args:
        path: ``.jsonl`` with a field ``text``, ``prompt`` or ``prompt_token_ids`` in every line;
            any other name is plain text.
        model_dir: directory with the tokenizer; code in it is never run.
        num_sequences: maximum number; a short text gives fewer.
        sequence_tokens: T; a shorter text becomes one sequence of its own length.

    Raises:
        SpecError: the file or the tokenizer cannot be read, or the file holds no text.
    """
    path = Path(path)
    is_lines = path.suffix == ".jsonl"
    stream = _jsonl_stream(path, Path(model_dir)) if is_lines else _text_stream(path, model_dir)
    windows = _cut(stream, num_sequences, sequence_tokens, path)
    count, length = windows.shape
    return CalibrationSet(token_ids=windows, source=f"{path.name} ({count} x {length} tokens)")


def synthetic_calibration(
    vocab_size: int, *, num_sequences: int = 16, sequence_tokens: int = 128, seed: int = 0
) -> CalibrationSet:
    """Return sequences of uniformly random tokens, for runs without a text."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_sequences, sequence_tokens)
    token_ids = torch.randint(0, vocab_size, shape, generator=generator)
    source = f"random tokens, seed {seed} ({num_sequences} x {sequence_tokens} tokens)"
    return CalibrationSet(token_ids=token_ids, source=source)


def _cut(stream: list[int], count: int, length: int, path: Path) -> Tensor:
    """Return ``count`` disjoint sequences, spread evenly over the stream: ``[N, T]``."""
    if count < 1 or length < 1:
        raise SpecError(f"calibration: found {count} sequences of {length} tokens, expected some")
    if not stream:
        raise SpecError(f"{path}: found no text to calibrate with")
    if len(stream) < length:
        return torch.tensor([stream], dtype=torch.int64)
    windows = torch.tensor(stream, dtype=torch.int64)[: len(stream) // length * length]
    windows = windows.view(-1, length)
    if len(windows) <= count:
        return windows
    return windows[torch.arange(count) * len(windows) // count]


def _text_stream(path: Path, model_dir: Path | str) -> list[int]:
    text = _read(path)
    return _encode(_load_tokenizer(Path(model_dir)), text) if text.strip() else []


def _jsonl_stream(path: Path, model_dir: Path) -> list[int]:
    """Return the tokens of all documents, each followed by the end token if there is one."""
    stream: list[int] = []
    tokenizer: PreTrainedTokenizerBase | None = None
    for line in _json_lines(path):
        if line.has("prompt_token_ids"):
            stream += _token_ids(line)
            continue
        tokenizer = tokenizer or _load_tokenizer(model_dir)
        stream += _encode(tokenizer, _text_of(line))
        if isinstance(tokenizer.eos_token_id, int):
            stream.append(tokenizer.eos_token_id)
    return stream


def _token_ids(line: Fields) -> list[int]:
    values = line.items("prompt_token_ids")
    if not all(type(value) is int for value in values):
        raise line.error("prompt_token_ids", values, "token numbers")
    return values


def _text_of(line: Fields) -> str:
    for name in _TEXT_FIELDS:
        if line.has(name):
            return line.text(name)
    raise SpecError(f"{line.where}: expected a field 'text', 'prompt' or 'prompt_token_ids'")


def _json_lines(path: Path) -> Iterator[Fields]:
    for number, text in enumerate(_read(path).splitlines(), start=1):
        if text.strip():
            where = f"{path}: line {number}"
            try:
                value = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise SpecError(f"{where}: not JSON: {error}") from None
            yield Fields(value, where)


def _read(path: Path) -> str:
    try:
        return read_text(path)
    except OSError as error:
        raise SpecError(f"{path}: cannot be read as text: {error}") from None


def _load_tokenizer(model_dir: Path) -> PreTrainedTokenizerBase:
    arguments = tokenizer_arguments(model_dir)
    if arguments is None:
        raise SpecError(f"{model_dir}: found no tokenizer: {missing_tokenizer(model_dir)}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            **arguments, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # tokenizers fail with types of their own
        raise tokenizer_error(model_dir, error) from error
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    # verbose: a whole text is longer than the model takes, and is cut afterwards.
    return [int(token) for token in tokenizer(text, verbose=False)["input_ids"]]
