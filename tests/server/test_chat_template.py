"""Chat templates are rendered as transformers renders them."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from helpers.served import DEMO
from transformers import AutoTokenizer

from llmpq.dist.io.model_files import export_tokenizer
from llmpq.errors import SpecError
from llmpq.server.apis.openai import encode_chat
from llmpq.server.errors import ApiError
from llmpq.server.protocol import ChatCompletionRequest
from llmpq.server.service import ServedModel
from llmpq.server.text.chat_template import ChatTemplate
from llmpq.server.text.tokenizer import ChatEncoder, ServerTokenizer, load_server_tokenizer

CHAT_ML = """{%- for message in messages %}
    {%- if loop.first and message['role'] != 'system' %}
        {{- bos_token }}<|im_start|>system\nBe brief.<|im_end|>\n
    {%- endif %}
    <|im_start|>{{ message['role'] }}
{{ message['content'] | trim }}<|im_end|>
{% endfor %}
{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
WITH_NAMESPACE = """{% set ns = namespace(count=0) %}{% for message in messages %}
{%- if message.role == 'skip' %}{% continue %}{% endif %}
{%- set ns.count = ns.count + 1 %}{{ ns.count }}:
{%- if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}
{%- elif message.reasoning_content is defined %}({{ message.reasoning_content }})
{{- message.content }}
{%- else %}{{ message.content }}{% endif %}
{% endfor %}{{ dict(a=1) | tojson }}{{ extra | default('none') }}{{ eos_token }}"""
STRICT = """{% if messages[0].role != 'user' %}{{ raise_exception('Only users begin') }}{% endif %}
{%- for message in messages %}{{ message.content }}{% if message.tool_calls %}
{{- message.tool_calls[0].function.arguments.x }}{% endif %}{% endfor %}"""
CHATS = [
    [{"role": "user", "content": " Hi <b> & 漢字 "}],
    [
        {"role": "system", "content": "Sys"},
        {"role": "user", "content": "a\nb", "name": None},
        {"role": "assistant", "content": "c", "reasoning": "because"},
        {"role": "user", "content": "d", "thinking": "hm"},
        {"role": "skip", "content": "e"},
    ],
    [
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
        },
    ],
    [{"role": "assistant", "content": "I begin"}],
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<é>"}}]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO, local_files_only=True)


def render_both(tokenizer, template, messages, **options) -> tuple[str, str]:
    """Return the prompt of transformers and that of the server, or their errors."""
    continues = options.get("continue_final_message", False)
    extra = options.pop("variables", {})
    try:
        theirs = tokenizer.apply_chat_template(
            messages,
            chat_template=template,
            tokenize=False,
            **{"add_generation_prompt": not continues, **options, **extra},
        )
    except Exception as error:
        theirs = type(error).__name__
    ours = ChatTemplate(template, tokenizer.special_tokens_map)
    try:
        mine = ours.render(
            messages,
            **{"add_generation_prompt": not continues, **options},
            variables=extra,
        )
    except ApiError:
        mine = theirs if theirs.isidentifier() else "error"
    return theirs, mine


@pytest.mark.parametrize("template", [CHAT_ML, WITH_NAMESPACE, STRICT])
@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tools": TOOLS},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"variables": {"extra": "more", "bos_token": "<other>"}},
    ],
)
def test_prompt_equals_that_of_transformers(tokenizer, template, messages, options):
    theirs, mine = render_both(tokenizer, template, messages, **options)
    if template == STRICT and messages[0]["role"] == "system":
        assert theirs == "TemplateError"
        begin = {**messages[1], "content": "Sys\n\na\nb"}
        theirs, _ = render_both(tokenizer, template, [begin, *messages[2:]], **options)
    assert mine == theirs


QWEN_3_5 = """{%- if messages[0].role == 'system' %}<system>{{ messages[0].content }}|{% endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}{{- raise_exception('System message must be first') }}{% endif %}
    {%- else %}<{{ message.role }}>{{ message.content }}|{% endif %}
{%- endfor %}"""
"""It rejects system messages that follow another one."""
HARMONY = """{%- set rest = messages %}
{%- if messages[0].role in ('system', 'developer') %}
    {%- set rest = messages[1:] %}<system>{{ messages[0].content }}|
{%- endif %}
{%- for message in rest %}
    {%- if message.role in ('user', 'assistant', 'tool') %}
        {{- '<' + message.role + '>' + message.content + '|' }}
    {%- endif %}
{%- endfor %}"""
"""It leaves them out."""


ROLES = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}


def _chat(text):
    return [{"role": ROLES[word[0]], "content": word} for word in text.split()]


@pytest.mark.parametrize("template", [QWEN_3_5, HARMONY])
@pytest.mark.parametrize(
    ("chat", "expected"),
    [
        ("s u1 a", "s:s u:u1 a:a"),
        ("s1 s2 u a", "s:s1+s2 u:u a:a"),
        ("s1 d2 u s3", "s:s1+d2 u:u+s3"),  # Claude Code sends its environment so
        ("s1 u a t s2 s3 a t", "s:s1 u:u a:a t:t+s2+s3 a:a t:t"),  # and tokens that are left so
        ("s1 u a s2 u2", "s:s1 u:u a:a u:s2+u2"),
        ("s1 u a s2 t", "s:s1 u:u a:a t:s2+t"),
        ("s1 u a s2", "s:s1 u:u a:a u:s2"),
        ("u s1 a", "u:u+s1 a:a"),
    ],
)
def test_system_messages_are_where_a_template_takes_them(template, chat, expected):
    made = ChatTemplate(template, {}).render(_chat(chat))
    parts = [part.split(":") for part in expected.split()]
    texts = [text.replace("+", "\n\n") for _, text in parts]
    roles = [ROLES[name] for name, _ in parts]
    assert made == "".join(f"<{role}>{text}|" for role, text in zip(roles, texts, strict=True))


def test_system_messages_stay_where_a_template_shows_them():
    made = ChatTemplate(CHAT_ML, {}).render(_chat("s1 s2 u s3"))
    assert made.count("<|im_start|>system") == 3


def test_system_messages_stay_where_a_template_needs_tools_to_show_any():
    template = "{% for tool in tools %}{{ tool.name }}{% endfor %}" + QWEN_3_5
    made = ChatTemplate(template, {}).render(_chat("s u"), tools=[{"name": "f"}])
    assert made == "f<system>s|<user>u|"


IN_PARTS = """{%- for message in messages %}<{{ message.role }}>
    {%- for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}
    {%- endfor %}|{% endfor %}"""
IN_EITHER = """{%- for message in messages %}<{{ message.role }}>
    {%- if message.content is string %}{{ message.content }}
    {%- else %}{% for part in message.content %}[{{ part.text }}]{% endfor %}{% endif %}|
    {%- endfor %}"""


@pytest.mark.parametrize("options", [{}, {"continue_final_message": True}])
def test_a_template_that_loops_over_parts_gets_parts(tokenizer, options):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    parts = [
        {"role": one["role"], "content": [{"type": "text", "text": one["content"]}]}
        for one in messages
    ]
    theirs, _ = render_both(tokenizer, IN_PARTS, parts, **options)
    mine = ChatTemplate(IN_PARTS, tokenizer.special_tokens_map).render(messages, **options)
    assert mine == theirs
    assert "<user>Hi|<assistant>Yes?" in mine


def test_a_template_that_takes_texts_gets_texts():
    made = ChatTemplate(IN_EITHER, {}).render([{"role": "user", "content": "Hi"}])
    assert made == "<user>Hi|"


@pytest.mark.parametrize(
    ("template", "role"), [("", "system"), ("{# knows the developer #}", "developer")]
)
def test_a_developer_is_a_system_unless_the_template_names_it(template, role):
    template += "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    made = ChatTemplate(template, {}).render([{"role": "developer", "content": "Be brief"}])
    assert made == f"<{role}>Be brief"


def test_a_template_that_takes_the_first_part_gets_parts():
    template = (
        "{% for message in messages %}<{{ message.role }}>{{ message.content[0].text }}{% endfor %}"
    )
    made = ChatTemplate(template, {}).render([{"role": "user", "content": "what is it"}])
    assert made == "<user>what is it"


def test_templates_by_name_prefer_that_for_tools():
    template = ChatTemplate({"default": "plain", "tool_use": "tools"}, {})
    assert template.render([{"role": "user", "content": "x"}]) == "plain"
    assert template.render([{"role": "user", "content": "x"}], tools=TOOLS) == "tools"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages.__class__.__mro__ }}", "rejects"),
        ("{{ ''.__class__.__base__ }}", "rejects"),
        ("{% set ns = namespace(__init__=1) %}", "rejects"),
        ("{{ messages.append(1) }}", "rejects"),
        ("{{ raise_exception('not like this') }}", "not like this"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[9].content.x }}", "rejects"),
    ],
)
def test_template_that_fails_is_a_bad_request(template, message):
    with pytest.raises(ApiError, match=message) as raised:
        ChatTemplate(template, {}).render([{"role": "user", "content": "x"}])
    assert raised.value.status == 400


def test_no_template_is_a_bad_request():
    with pytest.raises(ApiError, match="no chat template"):
        ChatTemplate(None, {}).render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "place",
    [
        "chat_template.jinja",
        "tokenizer_config.json",
        "chat_template.json",  # of the processor of a multimodal model
        "processor_config.json",
    ],
)
def test_tokenizer_process_finds_template_and_gives_the_same_tokens(tmp_path, tokenizer, place):
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(DEMO / name, tmp_path / name)
    write_template(tmp_path, place)
    made = load_server_tokenizer(tmp_path) if place.endswith("jinja") else in_process(tmp_path)
    assert made is not None
    prompt = asyncio.run(made.render(CHATS[0]))
    made.close()
    assert prompt == tokenizer.apply_chat_template(
        CHATS[0], chat_template=CHAT_ML, tokenize=False, add_generation_prompt=True
    )
    for text in ("Hello world", " é漢字👩‍🚀\n", "", "<s> x</s>"):
        assert made.encode(text) == tokenizer(text)["input_ids"]
        bare = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert made.encode(text, add_special_tokens=False) == bare
        assert made.decode(bare) == tokenizer.decode(bare, skip_special_tokens=True)


@pytest.mark.parametrize("variables", [{}, {"extra": "x"}])
@pytest.mark.parametrize("arguments", ["arguments.x", "arguments + ''"])  # object, text
def test_a_conversation_of_the_python_api_has_the_tokens_of_the_server(
    tmp_path, variables, arguments
):
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(DEMO / name, tmp_path / name)
    template = STRICT.replace("arguments.x", arguments) + "{{ extra }}"
    (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "tool_calls": [
                {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
            ],
        },
    ]
    tokenizer = in_process(tmp_path)
    served = ServedModel(
        names=("m",), root=str(tmp_path), tokenizer=tokenizer, max_model_len=64, vocab_size=4096
    )
    body = ChatCompletionRequest(messages=messages, chat_template_kwargs=variables)
    expected = asyncio.run(encode_chat(body, served, add_special_tokens=False))
    tokenizer.close()
    encoder = ChatEncoder(tmp_path)
    assert encoder.encode(messages, variables) == tuple(expected)
    with pytest.raises(SpecError, match="Only users begin"):
        encoder.encode(messages[1:], variables)
    with pytest.raises(SpecError, match="parts of type text only"):
        encoder.encode([{"role": "user", "content": [{"type": "image_url"}]}], variables)


def test_a_conversation_needs_a_tokenizer_and_a_template(tmp_path):
    with pytest.raises(SpecError, match="the model has no tokenizer: a conversation needs it"):
        ChatEncoder(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(DEMO / name, tmp_path / name)
    with pytest.raises(SpecError, match="found no chat template, expected one in tokenizer_config"):
        ChatEncoder(tmp_path)


def in_process(folder: Path) -> ServerTokenizer:
    exported = export_tokenizer(folder)
    assert exported is not None
    return ServerTokenizer(exported)


def test_model_without_tokenizer_files_has_none(tmp_path):
    assert export_tokenizer(tmp_path) is None


def write_template(folder: Path, place: str) -> None:
    path = folder / place
    if place.endswith(".jinja"):
        path.write_text(CHAT_ML, encoding="utf-8")
    else:
        config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        path.write_text(json.dumps(config | {"chat_template": CHAT_ML}), encoding="utf-8")
