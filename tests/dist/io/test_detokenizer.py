"""Text of an answer while it is made: whole characters, stop strings, on the demo's tokenizer."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from llmpq.dist.io.detokenizer import Detokenizer, IncrementalDecoder
from llmpq.errors import SpecError

ROOT = Path(__file__).resolve().parents[3]
TEXT = st.text(
    st.sampled_from("ab \n.eтж漢字€é👩\u200d🚀\ufffd") | st.characters(exclude_categories=("Cs",)),
    max_size=40,
)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(ROOT / "models" / "demo" / "tokenizer.json"))


def decode(token_ids) -> str:
    return tokenizer().decode(list(token_ids), skip_special_tokens=True)


def encode_in_pieces(text: str, cuts) -> list[int]:
    """Return tokens of the text; the cuts keep them from merging into the usual ones."""
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [text[begin:end] for begin, end in pairwise(places)]
    return [token for piece in pieces for token in tokenizer().encode(piece).ids]


def cut_at_first_stop(text: str, stop, *, include: bool) -> tuple[str, str | None]:
    """Read character by character until the text ends with a stop string."""
    for end in range(1, len(text) + 1):
        ended = [word for word in stop if text[:end].endswith(word)]
        if ended:
            longest = max(ended, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def read(detokenizer, token_ids) -> tuple[str, int]:
    text = ""
    for count, token in enumerate(token_ids, start=1):
        text += detokenizer.add(token)
        if getattr(detokenizer, "stop_reason", None) is not None:
            return text, count
    return text + detokenizer.finish(), len(token_ids)


@given(TEXT, st.lists(st.integers(0, 40), max_size=8))
def test_text_of_tokens_equals_decoding_at_once(text, cuts):
    token_ids = encode_in_pieces(text, cuts)
    assert read(IncrementalDecoder(decode), token_ids)[0] == decode(token_ids)


@given(st.lists(st.integers(0, 4095), max_size=60))
def test_text_of_any_tokens_equals_decoding_at_once(token_ids):
    assert read(IncrementalDecoder(decode), token_ids)[0] == decode(token_ids)


@given(
    TEXT,
    st.lists(st.integers(0, 40), max_size=8),
    st.lists(st.text(st.sampled_from("ab .e漢字€👩\u200d"), min_size=1, max_size=4), max_size=3),
    st.booleans(),
)
def test_text_ends_at_the_first_stop_string(text, cuts, stop, include):
    token_ids = encode_in_pieces(text, cuts)
    expected, reason = cut_at_first_stop(decode(token_ids), stop, include=include)
    detokenizer = Detokenizer(decode, stop, include_stop=include)
    assert read(detokenizer, token_ids)[0] == expected
    assert detokenizer.stop_reason == reason


@given(TEXT, st.text(st.sampled_from("ab .e漢字"), min_size=1, max_size=4))
def test_answer_stops_with_the_token_that_completes_the_string(text, stop):
    token_ids = tokenizer().encode(text + stop + text).ids
    _, count = read(Detokenizer(decode, [stop]), token_ids)
    assert stop not in decode(token_ids[: count - 1])
    assert stop in decode(token_ids[:count])


def test_beginning_of_a_stop_string_is_held_back():
    token_ids = tokenizer().encode("one STOX two").ids
    detokenizer = Detokenizer(decode, ["STOP"])
    texts = []
    for token in token_ids:
        texts.append(detokenizer.add(token))
        assert not any("".join(texts).endswith(word) for word in ("S", "ST", "STO"))
    assert "".join(texts) + detokenizer.finish() == "one STOX two"


def test_stop_string_within_the_first_tokens_does_not_count():
    token_ids = tokenizer().encode("a. b. c.").ids
    first = decode(token_ids).index(".")
    limit = next(n for n in range(len(token_ids)) if len(decode(token_ids[:n])) > first)
    detokenizer = Detokenizer(decode, ["."], min_tokens=limit)
    assert read(detokenizer, token_ids)[0] == "a. b"


def test_invalid_bytes_do_not_pile_up():
    """Text of bytes that never become a character arrives after a bounded number of tokens."""
    byte = next(
        n for n in range(4096) if decode([n]) == "\ufffd" and decode([n] * 3) == "\ufffd" * 3
    )
    decoder = IncrementalDecoder(decode)
    texts = [decoder.add(byte) for _ in range(200)]
    assert len("".join(texts)) > 150
    assert "".join(texts) + decoder.finish() == "\ufffd" * 200
    assert len(decoder._token_ids) < 64


def test_special_tokens_do_not_pile_up():
    decoder = IncrementalDecoder(decode)
    end = tokenizer().token_to_id("</s>")
    assert "".join(decoder.add(token) for token in [300, *[end] * 500]) == decode([300])
    assert len(decoder._token_ids) < 64


def test_no_tokenizer_gives_no_text():
    detokenizer = Detokenizer(None, ["a"])
    assert read(detokenizer, [1, 2, 3])[0] == ""


def test_empty_stop_string_is_rejected():
    with pytest.raises(SpecError, match="expected at least one character"):
        Detokenizer(decode, ["a", ""])
