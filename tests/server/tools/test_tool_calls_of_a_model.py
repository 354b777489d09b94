"""A served model of random habits makes calls that satisfy their schemas."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jsonschema_rs
import openai
import pytest
from helpers.served import DEMO
from model_templates import MODELS

from llmpq import plan

pytestmark = pytest.mark.dist
ORDER = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["tea", "coffee"]},
        "cups": {"type": "integer", "minimum": 1, "maximum": 9},
        "tags": {"type": "array", "items": {"enum": ["hot", "iced"]}, "maxItems": 2},
        "note": {"type": "string", "maxLength": 5},
    },
    "required": ["kind", "cups"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in (("order", ORDER), ("cancel", NOTHING))
]
SCHEMAS = {"order": ORDER, "cancel": NOTHING}


@pytest.fixture(scope="module", params=["qwen_coder", "granite"])
def client(request, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """Serve the demo with the chat template of a model."""
    folder = tmp_path_factory.mktemp("served")
    model = shutil.copytree(DEMO, folder / "model")
    template = MODELS[request.param].source
    Path(model, "chat_template.jinja").write_text(template, encoding="utf-8")
    found = plan(
        str(model),
        device_names=["cpu"],
        device_numbers=[1],
        batch=4,
        prompt=600,
        new=300,
        dtype="float32",
        bits=(16,),
    )
    found.save(folder / "plan.json")
    command = [sys.executable, "-m", "llmpq.cli.commands.serve", "--port", "0"]
    command += ["--strat_file_name", str(folder / "plan.json"), "--served_model_name", "demo"]
    command += ["--step_timeout", "60"]
    environment = os.environ | {"LLMPQ_STORE": "off"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("ready http://127.0.0.1:")
            url = f"{line.split()[1]}/v1"
            with openai.OpenAI(base_url=url, api_key="x", max_retries=0) as made:
                yield made
        finally:
            process.kill()


def fields(seed: int, choice: object):
    messages = [{"role": "user", "content": "Two cups of tea, please."}]
    return {
        "model": "demo",
        "messages": messages,
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 200,
        "seed": seed,
    }


def check(choice) -> None:
    assert choice.finish_reason == "tool_calls"
    assert not choice.message.content
    (call,) = choice.message.tool_calls
    schema = SCHEMAS[call.function.name]
    jsonschema_rs.validator_for(schema).validate(json.loads(call.function.arguments))


def test_required_calls_satisfy_their_schema(client):
    for seed in range(4):
        check(client.chat.completions.create(**fields(seed, "required")).choices[0])


def test_a_named_function_is_called_whole_and_streamed(client):
    named = {"type": "function", "function": {"name": "order"}}
    whole = client.chat.completions.create(**fields(3, named)).choices[0]
    check(whole)
    assert whole.message.tool_calls[0].function.name == "order"
    with client.chat.completions.stream(**fields(3, named)) as stream:
        streamed = stream.get_final_completion().choices[0]
    check(streamed)
    ((mine,), (theirs,)) = streamed.message.tool_calls, whole.message.tool_calls
    assert mine.function.arguments == theirs.function.arguments
