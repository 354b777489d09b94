"""Ask for objects of a class, by calls and by schema, by instructor."""

import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, Field


class Sum(BaseModel):
    """Two numbers and what to do."""

    left: int = Field(ge=0, le=9)
    right: int = Field(ge=0, le=9)
    kind: Literal["add", "subtract"]


options = {
    "model": "demo", "max_tokens": 200, "temperature": 0, "max_retries": 0,
    "messages": [{"role": "user", "content": "Add two numbers"}],
}  # fmt: skip
for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none"), mode=mode
    )
    whole = client.chat.completions.create(response_model=Sum, **options)
    assert isinstance(whole, Sum), whole
    parts = list(client.chat.completions.create_partial(response_model=Sum, **options))
    assert parts[-1].model_dump() == whole.model_dump(), (parts[-1], whole)
print("objects and their streams, by calls, strict calls and schema")
