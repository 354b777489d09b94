"""Ask for an answer, a stream and a call, and run an agent, by smolagents."""

import sys

from smolagents import OpenAIModel, Tool, ToolCallingAgent


class Answer(Tool):
    """Ends a run; the model chooses one of two answers."""

    name = "final_answer"
    description = "Gives the final answer."
    inputs = {  # noqa: RUF012  as smolagents asks
        "answer": {"type": "string", "description": "the answer", "enum": ["yes", "no"]}
    }
    output_type = "string"

    def forward(self, answer: str) -> str:
        return answer


model = OpenAIModel(
    model_id="demo", api_base=f"{sys.argv[1]}/v1", api_key="none", temperature=0, max_tokens=100,
    parallel_tool_calls=False,
)  # fmt: skip
messages = [{"role": "user", "content": [{"type": "text", "text": "To install the package"}]}]
whole = model.generate(messages).content
assert whole, "an empty answer"
assert whole == "".join(part.content or "" for part in model.generate_stream(messages))
(call,) = model.generate(messages, tools_to_call_from=[Answer()]).tool_calls
assert call.function.name == "final_answer", call
agent = ToolCallingAgent(tools=[Answer()], model=model, max_steps=1, verbosity_level=0)
found = agent.run("Is it so?")
assert found in ("yes", "no"), found
print("answer, stream, call, an agent's run")
