"""A tokenizer as SentencePiece's models have them (Llama 2, Mistral, Gemma).

A piece has the space before its word; its decoder drops the space before the first piece of a
text, and unknown characters are bytes.
"""

from __future__ import annotations

import json
from functools import cache

from tokenizers import Tokenizer, decoders, models, normalizers, processors

from llmpq.server.text.tokenizer import ServerTokenizer

WORDS = ("▁the", "▁cat", "▁sat", "▁on", "ing")
SPECIAL = ("<unk>", "<s>", "</s>", "<|end|>")
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
LETTERS = tuple("abcdefghijklmnopqrstuvwxyz.\n▁")
PARTS = tuple(dict.fromkeys(word[:end] for word in WORDS for end in range(2, len(word) + 1)))
TOKENS = (*SPECIAL, *BYTES, *LETTERS, *PARTS)


@cache
def piece_tokenizer() -> Tokenizer:
    merges = [(part[:-1], part[-1]) for part in PARTS]
    vocab = {token: number for number, token in enumerate(TOKENS)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", TOKENS.index("<s>"))]
    )
    made.add_special_tokens(list(SPECIAL))
    return made


def piece_server_tokenizer(chat_template: str | None = None) -> ServerTokenizer:
    """The tokenizer as a server has it."""
    return ServerTokenizer(
        {
            "tokenizer": json.loads(piece_tokenizer().to_str()),
            "special_tokens": {"bos_token": "<s>", "eos_token": "</s>"},
            "chat_template": chat_template,
        }
    )


def pieces(*tokens: str) -> list[int]:
    """The numbers of tokens by their names in the vocabulary."""
    return [TOKENS.index(token) for token in tokens]
