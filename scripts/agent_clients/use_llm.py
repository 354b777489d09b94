"""Ask for an answer, a stream and an object, by the program llm."""

import json
import os
import subprocess
import sys
from pathlib import Path

folder = Path("llm").absolute()
folder.mkdir()
(folder / "extra-openai-models.yaml").write_text(
    "- model_id: demo\n  model_name: demo\n  supports_schema: true\n  supports_tools: true\n"
    f"  api_base: {sys.argv[1]}/v1\n"
)


def llm(*words: str) -> str:
    """Return what the program prints."""
    command = [sys.executable, "-m", "llm", "-m", "demo", "-o", "temperature", "0", *words]
    environment = {**os.environ, "LLM_USER_PATH": str(folder)}
    return subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True
    ).stdout


short = ("-o", "max_tokens", "8", "To install the package")
whole = llm("--no-stream", *short)
assert whole == llm(*short) != "\n", whole
schema = {
    "type": "object",
    "properties": {"left": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["left"],
    "additionalProperties": False,
}
found = llm("--schema", json.dumps(schema), "-o", "max_tokens", "200", "Add two numbers")
assert 0 <= json.loads(found)["left"] <= 9, found
print("answer, stream, schema")
