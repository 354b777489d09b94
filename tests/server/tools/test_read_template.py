"""The format of calls is read from templates."""

from __future__ import annotations

import asyncio

import pytest
from helpers.served import demo_tokenizer
from model_templates import MODELS, QWEN3, format_of


@pytest.mark.parametrize("name", MODELS)
def test_calls_are_read_as_the_template_writes_them(name):
    model = MODELS[name]
    calls = format_of(model.source).calls
    assert calls is not None
    assert {key: getattr(calls, key) for key in model.expected} == model.expected
    assert calls.is_parallel == (model.both is not None and name != "harmony")
    assert calls.is_bare == (name == "llama3")


@pytest.mark.parametrize("name", MODELS)
def test_reasoning_is_read_where_the_template_has_it(name):
    model = MODELS[name]
    reasoning = format_of(model.source).reasoning
    assert (reasoning is not None) == (model.thinking is not None and name != "harmony")
    if reasoning is not None:
        assert model.is_opened or reasoning.open in str(model.thinking)
        assert reasoning.close in str(model.thinking)


@pytest.mark.parametrize(
    ("name", "needs_text", "takes_text"),
    [
        ("qwen3", False, True),
        ("qwen_coder", False, False),
        ("deepseek_v3", True, True),
        ("glm", False, False),
        ("mistral_list", False, True),
        ("gemma", False, True),
    ],
)
def test_arguments_that_a_template_needs(name, needs_text, takes_text):
    found = format_of(MODELS[name].source)
    assert found.needs_text_arguments == needs_text
    assert found.takes_text_arguments == takes_text


@pytest.mark.parametrize(
    "content",
    [
        "{%- for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}"
        "{% endfor %}",
        "{{- m['content'][0]['text'] if m['content'] }}",
    ],
)
def test_a_template_of_parts_is_read_as_that_of_texts(content):
    source = QWEN3.source.replace("{{- m.content }}", content)
    assert source != QWEN3.source
    assert format_of(source) == format_of(QWEN3.source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m }}{% endfor %}",
        "{{ messages }}",
        "{{ messages | tojson }}{{ tools | tojson }}",
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ tools | tojson }}",
        "",
    ],
)
def test_a_template_without_calls_has_none(source):
    found = format_of(source)
    assert found.calls is None
    assert found.reasoning is None


def test_the_servers_child_process_renders_the_same():
    tokenizer = demo_tokenizer(QWEN3.source)
    found = asyncio.run(tokenizer.template())
    assert found == format_of(QWEN3.source)
