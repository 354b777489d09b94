"""A byte-level tokenizer with a few merges, as those of most models."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = [("t", "r"), ("tr", "u"), ("tru", "e"), ("{", '"'), ('"', ":"), ('"', "}"), ("1", "2")]
TOKENS = ["<eos>", *LETTERS, *("".join(pair) for pair in MERGES)]
EOS = 0


def write_byte_tokenizer(folder: Path) -> Path:
    vocab = {token: number for number, token in enumerate(TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.enable_padding(length=8)  # as some models' files do; it must not matter
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def text_of(token_ids: list[int]) -> str:
    byte_of = {letter: byte for byte, letter in zip(_bytes_in_order(), LETTERS, strict=True)}
    text = "".join(TOKENS[token] for token in token_ids if token != EOS)
    return bytes(byte_of[letter] for letter in text).decode()


def _bytes_in_order() -> list[int]:
    """Return the byte that each letter of the byte-level alphabet stands for (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    letter = {byte: chr(byte) for byte in plain}
    letter |= {byte: chr(256 + number) for number, byte in enumerate(rest)}
    return sorted(range(256), key=letter.__getitem__)
