"""Chat templates of known models, written anew from their public descriptions, and answers.

Each holds what matters here: roles, tools, calls, results, reasoning, the prompt's end.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from llmpq.server.text.chat_template import ChatTemplate
from llmpq.server.tools import TemplateFormat, read_template

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "hourly": {"type": "boolean"},
    },
    "required": ["city"],
}
TIME = {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": schema}}
    for name, schema in (("get_weather", WEATHER), ("get_time", TIME))
]
CALLS = [("get_weather", {"city": 'Pa\u00f1a "x"', "days": 2}), ("get_time", {"zone": "CET"})]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A template, and what its model answers.

    Attributes:
        source: the template.
        one: an answer with the first of ``CALLS``.
        both: an answer with both; ``None`` where the format has one call only.
        thinking: an answer with the reasoning ``Hm.``, then the text ``Hello``.
        is_opened: whether the prompt opens the reasoning.
        special: marks that are special tokens.
        expected: fields of the format.
    """

    source: str
    one: str
    both: str | None = None
    thinking: str | None = None
    is_opened: bool = False
    special: tuple[str, ...] = ()
    expected: dict[str, Any] = field(default_factory=dict)


THINK = "{%- if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
CHATML_TOOLS = "{%- if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
CHATML_END = "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
XML_CALLS = """{%- for c in m.tool_calls or [] %}
{{- '\n<tool_call>\n<function=' + c.function.name + '>\n' }}
{%- for key, value in c.function.arguments | items %}
{{- '<parameter=' + key + '>\n' }}
{{- value if value is string else value | tojson }}{{- '\n</parameter>\n' }}
{%- endfor %}{{- '</function>\n</tool_call>' }}{% endfor %}"""
ONE = '{"city": "Pa\u00f1a \\"x\\"", "days": 2}'
TWO = '{"zone": "CET"}'


def widened(text: str | None) -> str | None:
    """Return a text of DeepSeek's marks, whose bars are full-width."""
    return text and text.replace("<|", "<\uff5c").replace("|>", "\uff5c>")


def deepseek(model: Model) -> Model:
    """Return a model whose marks have full-width bars."""
    texts = {name: widened(getattr(model, name)) for name in ("source", "one", "both")}
    expected = {name: widened(text) for name, text in model.expected.items()}
    special = tuple(map(widened, model.special))
    return replace(model, **texts, expected=expected, special=special)


QWEN3 = Model(
    source=CHATML_TOOLS
    + """{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}
{% if m.role == 'tool' %}<tool_response>\n{{ m.content }}\n</tool_response>{% else %}"""
    + THINK
    + """{{- m.content }}
{%- for c in m.tool_calls or [] %}{% if not loop.first or m.content %}{{ '\n' }}{% endif %}
{{- '<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' }}
{{- c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}
{{- '}\n</tool_call>' }}{% endfor %}{% endif %}<|im_end|>
{% endfor %}"""
    + CHATML_END,
    one=f'<tool_call>\n{{"name": "get_weather", "arguments": {ONE}}}\n</tool_call>',
    both=f'<tool_call>\n{{"name": "get_weather", "arguments": {ONE}}}\n</tool_call>\n'
    f'<tool_call>\n{{"name": "get_time", "arguments": {TWO}}}\n</tool_call>',
    thinking="<think>\nHm.\n</think>\n\nHello",
    expected={"kind": "object", "call_open": "<tool_call>\n", "separator": "\n"},
)
QWEN_CODER = Model(
    source=CHATML_TOOLS
    + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    + XML_CALLS
    + "<|im_end|>\n{% endfor %}"
    + CHATML_END,
    one='<tool_call>\n<function=get_weather>\n<parameter=city>\nPa\u00f1a "x"\n</parameter>\n'
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
    both='<tool_call>\n<function=get_weather>\n<parameter=city>\nPa\u00f1a "x"\n</parameter>\n'
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=get_time>\n<parameter=zone>\nCET\n</parameter>\n</function>\n"
    "</tool_call>",
    expected={"kind": "tags", "name_close": ">", "value_close": "\n</parameter>"},
)
SEED = Model(
    source=QWEN_CODER.source.replace("tool_call>", "seed:tool_call>").replace(
        "{{ m.content }}",
        "{% if m.reasoning_content %}<seed:think>{{ m.reasoning_content }}</seed:think>"
        "{% endif %}{{ m.content }}",
    ),
    one=QWEN_CODER.one.replace("tool_call>", "seed:tool_call>"),
    both=str(QWEN_CODER.both).replace("tool_call>", "seed:tool_call>"),
    thinking="<seed:think>Hm.</seed:think>Hello",
    expected={"kind": "tags"},
)
LLAMA3 = Model(
    source="""{{- bos_token }}{% for m in messages %}
{%- if m.tool_calls %}{% if m.tool_calls | length != 1 %}
{{- raise_exception('This model only supports single tool-calls at once!') }}{% endif %}
{%- set f = m.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + f.name + '", ' }}
{{- '"parameters": ' }}{{ f.arguments | tojson }}{{ '}<|eot_id|>' }}
{#- <|python_tag|> begins calls of built-in tools #}
{%- else %}
{{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) }}
{{- '<|end_header_id|>\n\n' }}
{%- if m.role == 'user' and tools %}{{ tools | tojson }}{{ '\n\n' }}{% endif %}
{{- m.content + '<|eot_id|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}""",
    one=f'{{"name": "get_weather", "parameters": {ONE}}}',
    special=("<|python_tag|>",),
    expected={
        "kind": "object",
        "arguments_key": "parameters",
        "is_parallel": False,
        "optional_open": "<|python_tag|>",
    },
)
MISTRAL_LIST = Model(
    source="""{{- bos_token }}{% for m in messages %}
{%- if m.role == 'user' %}{% if tools and loop.last %}
{{- '[AVAILABLE_TOOLS]' }}{{ tools | tojson }}{{ '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}
{%- if c.id | length != 9 %}{{ raise_exception('Tool call IDs should be 9 long!') }}{% endif %}
{{- '{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments | tojson }}
{{- ', "id": "' + c.id + '"}' }}{{ ', ' if not loop.last }}{% endfor %}{{ ']' + eos_token }}
{%- elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}
{{- raise_exception('Tool call IDs should be 9 long!') }}{% endif %}
{{- '[TOOL_RESULTS]' + m.tool_call_id + m.content + '[/TOOL_RESULTS]' }}
{%- else %}{{ m.content + eos_token }}{% endif %}{% endfor %}""",
    one=f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {ONE}, "id": "abcdefghi"}}]',
    both=f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {ONE}, "id": "abcdefghi"}}, '
    f'{{"name": "get_time", "arguments": {TWO}, "id": "123456789"}}]',
    special=("[TOOL_CALLS]",),
    expected={"kind": "object", "group_open": "[TOOL_CALLS][", "id_style": "nine"},
)
MISTRAL_ARGS = Model(
    source="""{{- bos_token }}{% if tools %}{{ '[AVAILABLE_TOOLS]' }}{{ tools | tojson }}
{{- '[/AVAILABLE_TOOLS]' }}{% endif %}{% for m in messages %}
{%- if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
{%- else %}{% if m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}
{{- m.content }}{% for c in m.tool_calls or [] %}
{{- '[TOOL_CALLS]' + c.function.name + '[ARGS]' }}
{{- c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}
{%- endfor %}{{ eos_token }}{% endif %}{% endfor %}""",
    one=f"[TOOL_CALLS]get_weather[ARGS]{ONE}",
    both=f"[TOOL_CALLS]get_weather[ARGS]{ONE}[TOOL_CALLS]get_time[ARGS]{TWO}",
    thinking="[THINK]Hm.[/THINK]Hello",
    special=("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"),
    expected={"kind": "json", "name_close": "[ARGS]", "group_open": ""},
)
DEEPSEEK_V3 = Model(
    source="""{{- bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}
{%- if m.role == 'user' %}{{ '<|User|>' + m.content }}
{%- elif m.role == 'tool' %}{{ '<|tool▁outputs▁begin|>' + m.content }}
{%- elif m.tool_calls %}{{ '<|Assistant|><|tool▁calls▁begin|>' }}{% for c in m.tool_calls %}
{{- '\n' if not loop.first }}{{ '<|tool▁call▁begin|>function<|tool▁sep|>' + c.function.name }}
{{- '\n```json\n' + c.function.arguments + '\n```<|tool▁call▁end|>' }}{% endfor %}
{{- '<|tool▁calls▁end|><|end▁of▁sentence|>' }}
{%- else %}{{ '<|Assistant|>' + m.content.split('</think>')[-1] + '<|end▁of▁sentence|>' }}
{%- endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}""",
    one="<|tool▁calls▁begin|><|tool▁call▁begin|>function<|tool▁sep|>get_weather\n```json\n"
    f"{ONE}\n```<|tool▁call▁end|><|tool▁calls▁end|>",
    both="<|tool▁calls▁begin|><|tool▁call▁begin|>function<|tool▁sep|>get_weather\n```json\n"
    f"{ONE}\n```<|tool▁call▁end|>\n<|tool▁call▁begin|>function<|tool▁sep|>get_time\n"
    f"```json\n{TWO}\n```<|tool▁call▁end|><|tool▁calls▁end|>",
    thinking="Hm.\n</think>\n\nHello",
    is_opened=True,
    special=("<|tool▁calls▁begin|>", "<|tool▁sep|>", "<|tool▁call▁begin|>"),
    expected={
        "kind": "json",
        "group_open": "<|tool▁calls▁begin|>",
        "call_open": "<|tool▁call▁begin|>function<|tool▁sep|>",
        "name_close": "\n```json\n",
    },
)
DEEPSEEK_V31 = Model(
    source=DEEPSEEK_V3.source.replace("{{- '\n' if not loop.first }}", "{{- '' }}")
    .replace("function<|tool▁sep|>' + c.function.name", "' + c.function.name")
    .replace("'\n```json\n' + c", "'<|tool▁sep|>' + c")
    .replace(" + '\n```<", " + '<"),
    one="<|tool▁calls▁begin|><|tool▁call▁begin|>get_weather<|tool▁sep|>"
    f"{ONE}<|tool▁call▁end|><|tool▁calls▁end|>",
    both="<|tool▁calls▁begin|><|tool▁call▁begin|>get_weather<|tool▁sep|>"
    f"{ONE}<|tool▁call▁end|><|tool▁call▁begin|>get_time<|tool▁sep|>{TWO}<|tool▁call▁end|>"
    "<|tool▁calls▁end|>",
    thinking="Hm.</think>Hello",
    is_opened=True,
    expected={"kind": "json", "name_close": "<|tool▁sep|>", "separator": ""},
)
GLM = Model(
    source="""[gMASK]<sop>{% if tools %}<|system|>\n{{ tools | tojson }}{% endif %}
{%- for m in messages %}{% if m.role == 'tool' %}<|observation|>\n{{ m.content }}
{%- else %}<|{{ m.role }}|>\n{% if m.reasoning_content %}
{{- '<think>' + m.reasoning_content + '</think>\n' }}{% endif %}{{ m.content }}
{%- for c in m.tool_calls or [] %}{{ '\n<tool_call>' + c.function.name }}
{%- for k, v in c.function.arguments.items() %}
{{- '\n<arg_key>' + k + '</arg_key>\n<arg_value>' }}{{ v if v is string else v | tojson }}
{{- '</arg_value>' }}{% endfor %}{{ '\n</tool_call>' }}{% endfor %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}""",
    one='\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Pa\u00f1a "x"</arg_value>\n'
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
    both='\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Pa\u00f1a "x"</arg_value>'
    "\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>get_time\n"
    "<arg_key>zone</arg_key>\n<arg_value>CET</arg_value>\n</tool_call>",
    thinking="\n<think>Hm.</think>\nHello",
    special=("<tool_call>", "</tool_call>", "<arg_key>", "<think>"),
    expected={"kind": "tags", "key_close": "</arg_key>\n<arg_value>"},
)
KIMI = Model(
    source="""{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>
{%- endif %}{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>
{%- if m.tool_calls %}{{ m.content }}<|tool_calls_section_begin|>{% for c in m.tool_calls %}
{{- '<|tool_call_begin|>' + c.id + '<|tool_call_argument_begin|>' }}
{{- c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}
{{- '<|tool_call_end|>' }}{% endfor %}<|tool_calls_section_end|>{% else %}{{ m.content }}
{%- endif %}<|im_end|>{% endfor %}
{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}""",
    one="<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    f"<|tool_call_argument_begin|>{ONE}<|tool_call_end|><|tool_calls_section_end|>",
    both="<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    f"<|tool_call_argument_begin|>{ONE}<|tool_call_end|><|tool_call_begin|>functions.get_time:1"
    f"<|tool_call_argument_begin|>{TWO}<|tool_call_end|><|tool_calls_section_end|>",
    special=("<|tool_call_begin|>", "<|tool_calls_section_begin|>"),
    expected={"kind": "json", "id_style": "kimi"},
)
MINIMAX = Model(
    source="""]~!b[{% if tools %}]~b]system\n{{ tools | tojson }}[e~[\n{% endif %}
{%- for m in messages %}]~b]{{ 'ai' if m.role == 'assistant' else m.role }}\n"""
    + THINK
    + """{{- m.content }}{% if m.tool_calls %}{{ '\n<minimax:tool_call>' }}
{%- for c in m.tool_calls %}{{ '\n<invoke name="' + c.function.name + '">' }}
{%- for k, v in c.function.arguments.items() %}{{ '\n<parameter name="' + k + '">' }}
{{- v if v is string else v | tojson }}{{ '</parameter>' }}{% endfor %}{{ '\n</invoke>' }}
{%- endfor %}{{ '\n</minimax:tool_call>' }}{% endif %}[e~[\n{% endfor %}
{%- if add_generation_prompt %}{{ ']~b]ai\n<think>\n' }}{% endif %}""",
    one='\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">'
    'Pa\u00f1a "x"</parameter>\n<parameter name="days">2</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    both='\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">'
    'Pa\u00f1a "x"</parameter>\n<parameter name="days">2</parameter>\n</invoke>\n'
    '<invoke name="get_time">\n<parameter name="zone">CET</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    thinking="Hm.\n</think>\n\nHello",
    is_opened=True,
    special=("<minimax:tool_call>", "</minimax:tool_call>"),
    expected={"kind": "tags", "group_open": "\n<minimax:tool_call>\n"},
)
GEMMA = Model(
    source="""{%- macro value(v) %}{% if v is string %}<|"|>{{ v }}<|"|>{% elif v is boolean %}
{{- 'true' if v else 'false' }}{% elif v is mapping %}{{ '{' }}{% for k, x in v | dictsort %}
{{- k }}:{{ value(x) }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}{% elif v is sequence %}
{{- '[' }}{% for x in v %}{{ value(x) }}{{ ',' if not loop.last }}{% endfor %}{{ ']' }}
{%- else %}{{ v }}{% endif %}{% endmacro %}{{ bos_token }}{% if tools %}<|turn>system
{{ tools | tojson }}<turn|>\n{% endif %}{% for m in messages %}
{{- '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}
{%- for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name }}
{%- if c.function.arguments is mapping %}{{ value(c.function.arguments) }}
{%- else %}{{ '{' + c.function.arguments + '}' }}{% endif %}<tool_call|>{% endfor %}
{{- m.content.split('<channel|>')[-1] }}<turn|>\n{% endfor %}
{%- if add_generation_prompt %}{{ '<|turn>model\n' }}{% endif %}""",
    one='<|tool_call>call:get_weather{city:<|"|>Pa\u00f1a "x"<|"|>,days:2}<tool_call|>',
    both='<|tool_call>call:get_weather{city:<|"|>Pa\u00f1a "x"<|"|>,days:2}<tool_call|>'
    '<|tool_call>call:get_time{zone:<|"|>CET<|"|>}<tool_call|>',
    thinking="<|channel>thought\nHm.<channel|>Hello",
    special=("<|tool_call>", "<tool_call|>", '<|"|>'),
    expected={"kind": "quoted", "quote": '<|"|>', "call_open": "<|tool_call>call:"},
)
HARMONY = Model(
    source="""<|start|>system<|message|># Valid channels: analysis, commentary, final.<|end|>
{%- if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}
{%- for m in messages %}{% if m.role == 'assistant' %}
{%- if m.tool_calls %}{% set f = m.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + f.name + '<|channel|>commentary json<|message|>' }}
{{- f.arguments | tojson }}<|call|>{% else %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}""",
    one="<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>" + ONE,
    both="<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    f"{ONE}<|call|><|start|>assistant to=functions.get_time<|channel|>commentary json<|message|>"
    f"{TWO}<|call|>",
    thinking="<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final"
    "<|message|>Hello<|return|>",
    special=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"),
    expected={"kind": "harmony", "is_parallel": False},
)
GRANITE = Model(
    source="""{% if tools %}<|start_of_role|>available_tools<|end_of_role|>{{ tools | tojson }}
<|end_of_text|>\n{% endif %}{% for m in messages %}
{{- '<|start_of_role|>' + m.role + '<|end_of_role|>' }}{{ m.content }}
{%- if m.tool_calls %}<|tool_call|>[{% for c in m.tool_calls %}
{{- '{"name": "' + c.function.name + '", "arguments": ' }}{{ c.function.arguments | tojson }}
{{- '}' }}{{ ', ' if not loop.last }}{% endfor %}]{% endif %}<|end_of_text|>\n{% endfor %}
{%- if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}""",
    one=f'<|tool_call|>[{{"name": "get_weather", "arguments": {ONE}}}]',
    both=f'<|tool_call|>[{{"name": "get_weather", "arguments": {ONE}}}, '
    f'{{"name": "get_time", "arguments": {TWO}}}]',
    special=("<|tool_call|>",),
    expected={"kind": "object", "group_open": "<|tool_call|>[", "group_close": "]"},
)
PHI4 = Model(
    source="""{% for m in messages %}<|{{ m.role }}|>{{ m.content }}
{%- if m.role == 'user' and tools %}<|tool|>{{ tools | tojson }}<|/tool|>{% endif %}
{%- if m.tool_calls %}<|tool_call|>[{% for c in m.tool_calls %}
{{- {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}
{{- ',' if not loop.last }}{% endfor %}]<|/tool_call|>{% endif %}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}""",
    one=f'<|tool_call|>[{{"name": "get_weather", "arguments": {ONE}}}]<|/tool_call|>',
    both=f'<|tool_call|>[{{"name": "get_weather", "arguments": {ONE}}},'
    f'{{"name": "get_time", "arguments": {TWO}}}]<|/tool_call|>',
    special=("<|tool_call|>", "<|/tool_call|>"),
    expected={"kind": "object", "group_close": "]<|/tool_call|>", "separator": ","},
)
NEMOTRON = Model(
    source="""{% for m in messages %}<SPECIAL_11>{{ m.role }}\n
{%- if m.role == 'user' and tools %}{{ tools | tojson }}\n{% endif %}{{ m.content }}
{%- if m.tool_calls %}<TOOLCALL>[{% for c in m.tool_calls %}
{{- '{"name": "' + c.function.name + '", "arguments": ' }}
{{- c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}
{{- '}' }}{{ ', ' if not loop.last }}{% endfor %}]</TOOLCALL>{% endif %}\n{% endfor %}
{%- if add_generation_prompt %}{{ '<SPECIAL_11>Assistant\n<think>\n' }}{% endif %}
{#- the answer ends its reasoning with </think> #}""",
    one=f'<TOOLCALL>[{{"name": "get_weather", "arguments": {ONE}}}]</TOOLCALL>',
    both=f'<TOOLCALL>[{{"name": "get_weather", "arguments": {ONE}}}, '
    f'{{"name": "get_time", "arguments": {TWO}}}]</TOOLCALL>',
    thinking="Hm.\n</think>\nHello",
    is_opened=True,
    expected={"kind": "object", "group_open": "<TOOLCALL>[", "group_close": "]</TOOLCALL>"},
)
COMMAND_R7B = Model(
    source="""{{ bos_token }}{% if tools %}<|START_OF_TURN_TOKEN|>{{ tools | tojson }}
<|END_OF_TURN_TOKEN|>{% endif %}{% for m in messages %}<|START_OF_TURN_TOKEN|>
{%- if m.role == 'assistant' %}<|CHATBOT_TOKEN|>{% if m.reasoning_content %}
{{- '<|START_THINKING|>' + m.reasoning_content + '<|END_THINKING|>' }}{% endif %}
{%- if m.tool_calls %}<|START_ACTION|>[{% for c in m.tool_calls %}
{{- '\n    {"tool_call_id": "' + c.id + '", "tool_name": "' + c.function.name }}
{{- '", "parameters": ' }}{{ c.function.arguments | tojson }}}{{ ',' if not loop.last }}
{%- endfor %}{{ '\n]<|END_ACTION|>' }}{% else %}
{{- '<|START_RESPONSE|>' + m.content + '<|END_RESPONSE|>' }}{% endif %}
{%- else %}<|USER_TOKEN|>{{ m.content }}{% endif %}<|END_OF_TURN_TOKEN|>{% endfor %}
{%- if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}""",
    one='<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
    f"{ONE}}}\n]<|END_ACTION|>",
    both='<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
    f'{ONE}}},\n    {{"tool_call_id": "1", "tool_name": "get_time", "parameters": {TWO}}}\n]'
    "<|END_ACTION|>",
    thinking="<|START_THINKING|>Hm.<|END_THINKING|>Hello",
    special=("<|START_ACTION|>", "<|END_ACTION|>", "<|START_THINKING|>", "<|END_THINKING|>"),
    expected={"kind": "object", "name_key": "tool_name", "arguments_key": "parameters"},
)
MODELS = {
    "qwen3": QWEN3,
    "qwen_coder": QWEN_CODER,
    "seed_oss": SEED,
    "llama3": LLAMA3,
    "mistral_list": MISTRAL_LIST,
    "mistral_args": MISTRAL_ARGS,
    "deepseek_v3": deepseek(DEEPSEEK_V3),
    "deepseek_v31": deepseek(DEEPSEEK_V31),
    "glm": GLM,
    "kimi": KIMI,
    "minimax": MINIMAX,
    "gemma": GEMMA,
    "harmony": HARMONY,
    "granite": GRANITE,
    "phi4": PHI4,
    "nemotron": NEMOTRON,
    "command_r7b": COMMAND_R7B,
}
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def render(source: str, messages: Any, **arguments: Any) -> str:
    return ChatTemplate(source, SPECIAL_TOKENS).render(messages, **arguments)


@cache
def format_of(source: str) -> TemplateFormat:
    """Return what is read from a template."""
    return read_template(partial(render, source), source)
