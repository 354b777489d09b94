"""Ask for a tool call, streamed and not, and for embeddings, by litellm."""

import json
import sys

import litellm

options = {
    "model": "hosted_vllm/demo", "api_base": f"{sys.argv[1]}/v1", "api_key": "none",
    "temperature": 0, "max_tokens": 200,
}  # fmt: skip
digit = {"type": "integer", "minimum": 0, "maximum": 9}
parameters = {
    "type": "object",
    "properties": {"left": digit, "right": digit},
    "required": ["left", "right"],
    "additionalProperties": False,
}
tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
messages = [{"role": "user", "content": "Add two numbers"}]
asked = {"messages": messages, "tools": tools, "tool_choice": "required", **options}
asked["parallel_tool_calls"] = False
whole = litellm.completion(**asked).choices[0]
(call,) = whole.message.tool_calls
assert whole.finish_reason == "tool_calls", whole
assert set(json.loads(call.function.arguments)) == {"left", "right"}, call
built = litellm.stream_chunk_builder(list(litellm.completion(stream=True, **asked)))
streamed = built.choices[0].message.tool_calls[0]
assert streamed.function.name == call.function.name == "add", streamed
assert streamed.function.arguments == call.function.arguments, (streamed, call)
messages += [
    whole.message.model_dump(),
    {"role": "tool", "tool_call_id": call.id, "content": "7"},
]
assert litellm.completion(messages=messages, tools=tools, **options).choices[0].message.content
found = litellm.embedding(
    model="hosted_vllm/demo", api_base=options["api_base"], api_key="none", input=["one", "two"]
)
lengths = [sum(value * value for value in item["embedding"]) for item in found.data]
assert all(abs(length - 1) < 1e-5 for length in lengths), lengths
print("tool call, streamed tool call, its result, embeddings")
