"""Requests with the fields that Open WebUI, Continue, Cline, Codex and Claude Code send.

The bodies are written anew, from what the public code of these clients builds; texts are short.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from helpers.clocks import PATIENCE_S
from helpers.fake_engine import FakeEngine
from helpers.served import Served, make_service, serving

QUESTION = {"role": "user", "content": "What is in the file?"}
PARTS = [
    {"type": "text", "text": "<task>\nRead the file\n</task>"},
    {"type": "text", "text": "<environment_details>\nnone\n</environment_details>"},
]
PARAMETERS = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {
        "path": {"type": "string", "description": "Path of the file"},
        "line": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
    },
    "required": ["path"],
    "additionalProperties": False,
}
READ_FILE = {
    "type": "function",
    "function": {"name": "read_file", "description": "Reads a file", "parameters": PARAMETERS},
}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "read_file", "arguments": '{"path": "a.txt"}'},
}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "open-webui: chat": (
        "chat/completions",
        {
            "stream": True,
            "model": "demo",
            "messages": [{"role": "system", "content": "Be brief"}, QUESTION],
            "stream_options": {"include_usage": True},
            "temperature": 0.7,
            "top_p": 0.9,
            "max_tokens": 32,
            "frequency_penalty": 0,
            "presence_penalty": 0,
            "seed": 1,
            "stop": ["###"],
            "logit_bias": {},
        },
    ),
    "open-webui: title": (
        "chat/completions",
        {
            "model": "demo",
            "messages": [{"role": "user", "content": "### Task:\nGenerate a title"}],
            "stream": False,
            "max_completion_tokens": 1000,
        },
    ),
    "open-webui: results of a tool": (
        "chat/completions",
        {
            "model": "demo",
            "stream": True,
            "tools": [READ_FILE],
            "messages": [
                QUESTION,
                {"role": "assistant", "content": "", "tool_calls": [{**CALL, "index": 0}]},
                {"role": "tool", "tool_call_id": "call_1", "content": "empty"},
            ],
            "max_tokens": 16,
        },
    ),
    "open-webui: embeddings": ("embeddings", {"input": ["a text", "another"], "model": "demo"}),
    "continue: chat": (
        "chat/completions",
        {
            "messages": [
                {"role": "system", "content": "<important_rules>\nnone\n</important_rules>"},
                {"role": "user", "content": [{"type": "text", "text": "Explain"}]},
                {"role": "assistant", "content": " ", "tool_calls": [CALL]},
                {"role": "tool", "content": "empty", "tool_call_id": "call_1"},
            ],
            "model": "demo",
            "max_tokens": 32,
            "temperature": 0.5,
            "top_p": None,
            "frequency_penalty": None,
            "presence_penalty": None,
            "stop": None,
            "stream": True,
            "tools": [READ_FILE],
            "parallel_tool_calls": False,
            "stream_options": {"include_usage": True},
        },
    ),
    "continue: autocomplete": (
        "completions",
        {
            "model": "demo",
            "prompt": "<fim_prefix>def add(a, b):\n    return <fim_suffix>\n<fim_middle>",
            "max_tokens": 32,
            "temperature": 0.01,
            "stop": ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "\n\n", "\r\n\r\n"],
            "stream": True,
        },
    ),
    "continue: embeddings": ("embeddings", {"model": "demo", "input": ["def add(a, b):"]}),
    "codex: a turn": (
        "responses",
        {
            "model": "demo",
            "instructions": "You are an agent",
            "input": [
                {
                    "type": "message",
                    "role": "developer",
                    "content": [{"type": "input_text", "text": "<permissions>none</permissions>"}],
                },
                {
                    "type": "message",
                    "role": "user",
                    "content": [{"type": "input_text", "text": "<environment_context/>"}],
                },
                {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
                {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "+"},
                {"type": "custom_tool_call_output", "call_id": "c", "output": "Done"},
            ],
            "tools": [
                {
                    "type": "function",
                    "name": "exec_command",
                    "strict": False,
                    "parameters": PARAMETERS,
                },
                {
                    "type": "custom",
                    "name": "apply_patch",
                    "description": "Edits files",
                    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/s"},
                },
                {
                    "type": "namespace",
                    "name": "multi_agent",
                    "tools": [{"type": "function", "name": "spawn", "parameters": PARAMETERS}],
                },
                {"type": "web_search", "external_web_access": False},
            ],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "key",
            "client_metadata": {"x": "y"},
        },
    ),
    "claude code: a turn": (
        "messages?beta=true",
        {
            "model": "demo",
            "max_tokens": 64,
            "stream": True,
            "metadata": {"user_id": "u"},
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "medium"},
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1;"},
                {
                    "type": "text",
                    "text": "You are an agent",
                    "cache_control": {"type": "ephemeral", "ttl": "1h"},
                },
            ],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                {
                    "role": "system",
                    "content": [
                        {
                            "type": "text",
                            "text": "Agents: none",
                            "cache_control": {"type": "ephemeral"},
                        }
                    ],
                },
            ],
            "tools": [
                {
                    "name": "Read",
                    "description": "d",
                    "input_schema": PARAMETERS,
                    "eager_input_streaming": True,
                }
            ],
        },
    ),
    "cline: chat": (
        "chat/completions",
        {
            "model": "demo",
            "messages": [
                {"role": "system", "content": "You are Cline"},
                {"role": "user", "content": PARTS},
                {"role": "assistant", "content": "<read_file>\n<path>a.txt</path>\n</read_file>"},
                {"role": "user", "content": [{"type": "text", "text": "[read_file] Result:"}]},
            ],
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    "cline: native tools": (
        "chat/completions",
        {
            "model": "demo",
            "messages": [
                {"role": "developer", "content": "You are Cline"},
                {"role": "user", "content": PARTS},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": "empty"},
                {"role": "user", "content": PARTS[1:]},
            ],
            "reasoning_effort": "medium",
            "stream": True,
            "stream_options": {"include_usage": True},
            "tools": [{**READ_FILE, "function": {**READ_FILE["function"], "strict": False}}],
        },
    ),
}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    engine = FakeEngine(script=[300, 400, 500, 301], max_model_len=4096)
    with serving(make_service(engine)) as server:
        yield server


@pytest.mark.parametrize("name", BODIES)
def test_the_request_is_answered(served, name):
    path, body = BODIES[name]
    answer = httpx.post(f"{served.url}/v1/{path}", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        found = answer.json()
        assert len(found.get("data") or found["choices"]) == len(body.get("input", [0]))
        return
    *events, last = [line for line in answer.text.split("\n\n") if line]
    if not path.startswith("chat") and path != "completions":
        end = {"responses": "response.completed"}.get(path, "message_stop")
        assert json.loads(last.partition("data: ")[2])["type"] == end
        return
    assert last == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    if "stream_options" in body:
        *chunks, usage = chunks
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] > 0
    (choice,) = chunks[-1]["choices"]
    assert choice["finish_reason"] == "stop"
