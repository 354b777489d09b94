"""Ask for an answer, streams, calls, objects and embeddings, by langchain-openai."""

import sys
from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field


class Sum(BaseModel):
    """Two numbers and what to do."""

    left: int = Field(ge=0, le=9)
    right: int = Field(ge=0, le=9)
    kind: Literal["add", "subtract"]


@tool(args_schema=Sum)
def compute(left: int, right: int, kind: str) -> int:
    """Compute."""
    return left + right if kind == "add" else left - right


server = {"model": "demo", "base_url": f"{sys.argv[1]}/v1", "api_key": "none"}
chat = ChatOpenAI(**server, temperature=0, max_tokens=200)
short = ChatOpenAI(**server, temperature=0, max_tokens=8)
text = short.invoke("To install the package").text
assert text, "an empty answer"
assert text == "".join(part.text for part in short.stream("To install the package"))
for method in ("function_calling", "json_schema"):
    found = chat.with_structured_output(Sum, method=method).invoke("Add two numbers")
    assert isinstance(found, Sum), (method, found)
asked = [HumanMessage("Add two numbers")]
bound = chat.bind_tools([compute], tool_choice="any", parallel_tool_calls=False)
answer = bound.invoke(asked)
(call,) = answer.tool_calls
chunks = list(bound.stream(asked))
joined = chunks[0]
for chunk in chunks[1:]:
    joined += chunk
assert joined.tool_calls[0]["args"] == call["args"], (joined, call)
result = ToolMessage(str(compute.invoke(call["args"])), tool_call_id=call["id"])
assert short.bind_tools([compute]).invoke([*asked, answer, result]).text
responses = ChatOpenAI(**server, temperature=0, max_tokens=200, use_responses_api=True)
assert responses.bind_tools([compute], tool_choice="any").invoke("Add").tool_calls
embedder = OpenAIEmbeddings(**server, check_embedding_ctx_length=False)
rows = embedder.embed_documents(["one", "two"])
assert all(abs(sum(value * value for value in row) - 1) < 1e-5 for row in rows), rows
print("answer, stream, objects, calls, responses, embeddings")
