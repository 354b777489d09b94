"""Tokenizer and end tokens of a model directory.

transformers knows all layouts of tokenizer files. Processes without it start this module as a
program, which prints the tokenizer as one JSON object (``dist.io.detokenizer.read_tokenizer``). The
object has ``tokenizer`` (the content of a ``tokenizer.json``), ``special_tokens`` (such as
``bos_token``) and ``chat_template``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmpq.dist.model_listing import list_models_when_asked
from llmpq.errors import SpecError
from llmpq.spec.families import text_split
from llmpq.spec.model_files.tokenizer import (
    chat_templates,
    end_token_ids,
    tokenizer_arguments,
    tokenizer_error,
)
from llmpq.spec.model_files.weight_headers import read_gguf_header

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from llmpq.dist.io.prompts import Tokenizer


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
    return None if arguments is None else _TransformersTokenizer(_tokenizer(model_dir, arguments))


def _tokenizer(model_dir: Path, arguments: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    from transformers import (  # noqa: PLC0415  not before ``main`` keeps torch out
        AutoTokenizer,
        PreTrainedTokenizerFast,
    )

    is_gguf = "gguf_file" in arguments
    try:
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            **arguments, local_files_only=True
        )
    except Exception as error:  # tokenizers raise many types
        if not is_gguf:
            raise tokenizer_error(model_dir, error) from error
        # transformers looks at the configuration first, and knows few architectures.
        try:
            found = PreTrainedTokenizerFast.from_pretrained(**arguments, local_files_only=True)
        except Exception:
            raise tokenizer_error(model_dir, error) from error
    if is_gguf:
        folder = Path(arguments["pretrained_model_name_or_path"])
        _split_as_stated(found, folder / arguments["gguf_file"])
    return found


def _split_as_stated(tokenizer: PreTrainedTokenizerBase, file: Path) -> None:
    """Let a tokenizer of byte pairs split texts as a GGUF file says, before it merges.

    Raises:
        SpecError: the way to split is not known.
    """
    from tokenizers import Regex, pre_tokenizers  # noqa: PLC0415  as above

    split = text_split(read_gguf_header(file))
    if split is None:
        return
    patterns = [Regex(pattern) for pattern in split.patterns]
    backend: Any = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(pattern, behavior="isolated") for pattern in patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.model.ignore_merges = split.keeps_tokens


def eos_token_ids(model_dir: Path, config: PreTrainedConfig) -> frozenset[int]:
    """Return the end tokens of a model; see :func:`end_token_ids`."""
    return end_token_ids(model_dir, getattr(config, "eos_token_id", None))


def export_tokenizer(model_dir: Path) -> dict[str, Any] | None:
    """Return tokenizer, special tokens and chat template; ``None`` for a model without.

    Raises:
        SpecError: the tokenizer cannot be read, or has no form that the tokenizers library reads.
    """
    arguments = tokenizer_arguments(model_dir)
    if arguments is None:
        return None
    tokenizer = _tokenizer(model_dir, arguments)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise SpecError(
            f"{model_dir}: found a tokenizer written in Python, expected one that the tokenizers "
            "library reads"
        )
    return {
        "tokenizer": json.loads(backend.to_str()),
        "special_tokens": {
            name: str(value) for name, value in tokenizer.special_tokens_map.items()
        },
        "chat_template": tokenizer.chat_template
        or next(iter(chat_templates(model_dir).values()), None),
    }


def main(argv: list[str]) -> int:
    """Print the tokenizer of the directory ``argv[0]``."""
    folder = Path(argv[0])
    try:
        if "gguf_file" not in (tokenizer_arguments(folder) or {}):
            # Only GGUF files are read by torch, whose import takes seconds.
            sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
        list_models_when_asked()
        json.dump(export_tokenizer(folder), sys.stdout)
    except SpecError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
