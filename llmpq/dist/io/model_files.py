"""Tokenizer and end tokens of a model directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from llmpq.dist.io.prompts import Tokenizer
from llmpq.spec.model_files.tokenizer import end_token_ids, tokenizer_arguments, tokenizer_error


class _TransformersTokenizer:
    """Adapter of a transformers tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt, special tokens as the model expects them."""
        return [int(token) for token in self._tokenizer(text)["input_ids"]]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of an answer, without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))


def load_tokenizer(model_dir: Path) -> Tokenizer | None:
    """Return the directory's tokenizer, ``None`` if there is none."""
    arguments = tokenizer_arguments(model_dir)
    if arguments is None:
        return None
    try:
        return _TransformersTokenizer(
            AutoTokenizer.from_pretrained(**arguments, local_files_only=True)
        )
    except Exception as error:  # tokenizers raise many types
        raise tokenizer_error(model_dir, error) from error


def eos_token_ids(model_dir: Path, config: PreTrainedConfig) -> frozenset[int]:
    """Return the end tokens of a model; see :func:`end_token_ids`."""
    return end_token_ids(model_dir, getattr(config, "eos_token_id", None))
