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
from llmpq.errors import SpecError, bad_field
from llmpq.spec.families import text_split
from llmpq.spec.model_files.tokenizer import (
    chat_templates,
    end_token_ids,
    tokenizer_arguments,
    tokenizer_error,
)
from llmpq.spec.model_files.weight_headers import read_gguf_arrays, read_gguf_header

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from llmpq.dist.io.prompts import Tokenizer
    from llmpq.spec.model_files.gguf_form import TextSplit
    from llmpq.spec.model_files.weight_headers import GgufHeader


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
    if is_gguf:
        folder = Path(arguments["pretrained_model_name_or_path"])
        header = read_gguf_header(folder / arguments["gguf_file"])
        split = text_split(header)
        if split is not None:
            try:
                return _byte_pair_tokenizer(header, split)
            except SpecError:
                raise
            except Exception as error:  # tokenizers raises nothing narrower
                raise tokenizer_error(model_dir, error) from error
    try:
        # Without a choice, transformers asks on the terminal whether to run code of the model.
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            **arguments, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # tokenizers raise many types
        if not is_gguf:
            raise tokenizer_error(model_dir, error) from error
        # transformers looks at the configuration first, and knows few architectures.
        try:
            found = PreTrainedTokenizerFast.from_pretrained(**arguments, local_files_only=True)
        except Exception:
            raise tokenizer_error(model_dir, error) from error
    return found


_TOKENS, _TYPES, _MERGES = (f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "merges"))
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_FOUND_WHOLE = (_CONTROL, _USER_DEFINED)
"""Types of tokens that are found in a text before it is split."""
_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Special tokens of transformers, as GGUF calls them."""


def _byte_pair_tokenizer(header: GgufHeader, split: TextSplit) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a GGUF file that merges pairs of bytes.

    transformers before 5.23 knows few architectures, and later ones give control tokens that are
    not spelled as bytes other numbers.

    Raises:
        SpecError: the file has no merges, or names a token that it has not.
    """
    from tokenizers import (  # noqa: PLC0415  as above
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
    )
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    stored = read_gguf_arrays(header.path, (_TOKENS, _TYPES, _MERGES))
    if _MERGES not in stored:
        raise bad_field(str(header.path), _MERGES, None, "pairs of tokens")
    tokens = [str(token) for token in stored[_TOKENS]]
    named = {}
    for name, key in _NAMED.items():
        number = header.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(number, int):
            if not 0 <= number < len(tokens):
                expected = f"one of the {len(tokens)} tokens"
                raise bad_field(
                    str(header.path), f"tokenizer.ggml.{key}_token_id", number, expected
                )
            named[f"{name}_token"] = tokens[number]
    types = [*stored.get(_TYPES, ())]
    types += [_NORMAL] * (len(tokens) - len(types))
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    # Tokens that are found before a text is split are not spelled as bytes, as DeepSeek's.
    raw = {token for token, kind in zip(tokens, types, strict=False) if kind in _FOUND_WHOLE}
    raw.update(named.values())
    vocabulary = {
        token if token in raw or alphabet.issuperset(token) else spell(token)[0][0]: number
        for number, token in enumerate(tokens)
    }
    pairs = (str(pair).partition(" ") for pair in stored[_MERGES])
    merges = [(left, right) for left, _, right in pairs]
    backend: Any = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split.keeps_tokens)
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(one), behavior="isolated") for one in split.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind == _CONTROL)
            for token, kind in zip(tokens, types, strict=False)
            if kind in _FOUND_WHOLE
        ]
    )
    flags = {
        f"add_{name}_token": bool(header.metadata[key])
        for name in ("bos", "eos")
        if (key := f"tokenizer.ggml.add_{name}_token") in header.metadata
    }
    build: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerBase = build(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        chat_template=header.metadata.get("tokenizer.chat_template"),
        **named,
        **flags,
    )
    return tokenizer


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
