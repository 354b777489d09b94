"""Texts, places and bytes of tokens as clients see them, on tokenizers of both usual kinds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from helpers.clocks import PATIENCE_S
from helpers.fake_engine import FakeEngine
from helpers.piece_tokenizer import TOKENS, piece_server_tokenizer, piece_tokenizer, pieces
from helpers.served import demo_tokenizer, make_service, serving

from llmpq.server.text.tokenizer import ServerTokenizer

CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
TOOLS_BY_NONE = (
    "{% if tools is not none %}tools {% endif %}{% for m in messages %}"
    "{{ m.role + ':' + m.content }}{% for call in m.tool_calls %}!{{ call.function.name }}"
    "{% endfor %};{% endfor %}"
)
EURO = ("<0xE2>", "<0x82>", "<0xAC>")


@contextlib.contextmanager
def answering(
    script: list[int], tokenizer: ServerTokenizer | None = None, vocab_size: int = len(TOKENS)
) -> Iterator[Any]:
    """A server that gives these tokens; calls return the first choice of the answer."""
    engine = FakeEngine(script=script, vocab_size=vocab_size, eos=TOKENS.index("</s>"))
    tokenizer = tokenizer or piece_server_tokenizer(CHAT)
    with serving(make_service(engine, tokenizer=tokenizer)) as server:

        def post(path: str, **body: Any) -> dict[str, Any]:
            found = httpx.post(
                f"{server.url}/v1/{path}", json={"temperature": 0, **body}, timeout=PATIENCE_S
            )
            assert found.status_code == 200, found.text
            choice: dict[str, Any] = found.json()["choices"][0]
            return choice

        post.engine = engine  # type: ignore[attr-defined]
        yield post


@pytest.mark.parametrize("prompt", ["the cat", pieces("<s>", "▁the", "▁cat")])
def test_a_completion_goes_on_where_the_prompt_ends(prompt):
    with answering(pieces("▁sat", "▁on", "</s>")) as post:
        assert post("completions", prompt=prompt)["text"] == " sat on"
        assert post("completions", prompt=prompt, echo=True)["text"] == "the cat sat on"


def test_a_completion_inside_a_word_has_no_space():
    with answering(pieces("ing", "</s>")) as post:
        assert post("completions", prompt="the cat")["text"] == "ing"


def test_only_a_continued_message_goes_on_where_the_prompt_ends():
    messages = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "the cat"}]
    with answering(pieces("▁sat", "</s>")) as post:
        whole = post("chat/completions", messages=messages[:1])
        assert whole["message"]["content"] == "sat"
        rest = post(
            "chat/completions",
            messages=messages,
            continue_final_message=True,
            add_generation_prompt=False,
        )
        assert rest["message"]["content"] == " sat"


def test_a_prompt_that_ends_inside_a_character_changes_nothing_else():
    with answering(pieces("<0xAC>", "▁sat", "</s>")) as post:
        prompt = pieces("<s>", "▁the", "<0xE2>", "<0x82>")
        assert post("completions", prompt=prompt)["text"].endswith(" sat")


def test_offsets_are_places_in_the_text():
    # Of the issue: <s>, The, and ' server' begin at 0, 0 and 3.
    demo = demo_tokenizer()
    with answering([demo.encode(" 8")[-1]], demo, vocab_size=4096) as post:
        choice = post(
            "completions", prompt="The server listens on", max_tokens=1, echo=True, logprobs=1
        )
    found, text = choice["logprobs"], choice["text"]
    assert found["tokens"][0] == "<s>"
    assert found["text_offset"][:2] == [0, 0]
    for token, offset in list(zip(found["tokens"], found["text_offset"], strict=True))[1:]:
        assert text[offset:].startswith(token)


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("prompt", ["the cat", "the ca"])
def test_offsets_count_spaces_and_parts_of_characters(echo, prompt):
    answer = ("▁sat", "▁", *EURO, "▁on", "</s>")
    with answering(pieces(*answer)) as post:
        choice = post("completions", prompt=prompt, echo=echo, logprobs=0)
    found, text = choice["logprobs"], choice["text"]
    assert text == (prompt if echo else "") + " sat € on"
    start = len(prompt) if echo else 0
    places = [start + place for place in (0, 4, 5, 5, 5, 6, 9)]
    assert found["text_offset"][-len(answer) :] == places
    assert found["tokens"][-len(answer) :][0] == " sat"  # not 'sat', which is another token
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        if token not in ("<s>", "</s>", "\ufffd"):
            assert text[offset:].startswith(token) or token == " the"  # the first drops its space


def test_bytes_of_parts_of_characters_are_their_own():
    with answering(pieces(*EURO, "▁on", "</s>")) as post:
        choice = post(
            "chat/completions",
            messages=[{"role": "user", "content": "the"}],
            logprobs=True,
            top_logprobs=1,
        )
    content = choice["logprobs"]["content"]
    assert [entry["bytes"] for entry in content[:4]] == [[0xE2], [0x82], [0xAC], list(b" on")]
    assert content[0]["top_logprobs"][0]["bytes"] == [0xE2]


def test_bytes_of_a_text_are_those_of_its_tokens():
    demo = demo_tokenizer()
    for text in (" é漢字👩\u200d🚀\n", "\ufffd a", "plain"):
        tokens = demo.encode(text, add_special_tokens=False)
        assert b"".join(map(demo.token_bytes, tokens)) == text.encode()
    pieces_of = piece_server_tokenizer()
    tokens = piece_tokenizer().encode("the € cat", add_special_tokens=False).ids
    assert b"".join(map(pieces_of.token_bytes, tokens)) == " the € cat".encode()


def test_a_stop_string_may_be_a_special_token():
    with answering(pieces("▁sat", "<|end|>", "▁on")) as post:
        for stop in ("<|end|>", ["x", "<|end|>"]):
            choice = post("completions", prompt="the cat", stop=stop)
            assert (choice["text"], choice["finish_reason"]) == (" sat", "stop")
        shown = post(
            "completions",
            prompt="the cat",
            stop="<|end|>",
            skip_special_tokens=False,
            include_stop_str_in_output=True,
        )
        assert (shown["text"], shown["stop_reason"]) == (" sat<|end|>", "<|end|>")
        assert post("completions", prompt="the cat", max_tokens=3)["finish_reason"] == "length"


@pytest.mark.parametrize("most", [0, -1])
def test_answers_of_no_tokens_are_refused(most):
    with answering(pieces("▁sat", "</s>")) as post:
        for path, prompt in (
            ("completions", {"prompt": "the cat"}),
            ("chat/completions", {"messages": [{"role": "user", "content": "the cat"}]}),
        ):
            with pytest.raises(AssertionError, match="max_tokens"):
                post(path, **prompt, max_tokens=most)
        assert not post.engine.requests


def test_no_tools_are_none_and_no_content_is_an_empty_text():
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "r"},
    ]
    tokenizer = demo_tokenizer(TOOLS_BY_NONE)
    with answering([300], tokenizer, vocab_size=4096) as post:
        post("chat/completions", messages=messages, tools=[], max_tokens=1)
        (request,) = post.engine.requests.values()
    prompt = tokenizer.decode(request.prompt_token_ids)
    assert prompt == "user:q;assistant:!f;assistant:!f;tool:r;"
