"""Ask for an answer, a stream and objects, by pydantic-ai."""

import asyncio
import sys
from typing import Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Sum(BaseModel):
    """Two numbers and what to do."""

    left: int = Field(ge=0, le=9)
    right: int = Field(ge=0, le=9)
    kind: Literal["add", "subtract"]


async def main() -> None:
    provider = OpenAIProvider(base_url=f"{sys.argv[1]}/v1", api_key="none")
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model = kind("demo", provider=provider)
        settings = {"temperature": 0, "max_tokens": 200}
        plain = Agent(model, instructions="Be brief", model_settings=settings)
        text = (await plain.run("To install the package")).output
        async with plain.run_stream("To install the package") as stream:
            streamed = "".join([part async for part in stream.stream_text(delta=True)])
        assert text == streamed != "", (text, streamed)
        for output in (Sum, NativeOutput(Sum)):
            agent = Agent(model, output_type=output, model_settings=settings, retries=0)
            found = (await agent.run("Add two numbers")).output
            assert isinstance(found, Sum), found
    print("answer, stream, objects by calls and by schema; chat and responses")


asyncio.run(main())
