"""Tiny models, commands and servers with which ``cases.py`` tries the inputs of reports."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from workbench import ROOT

sys.path.insert(0, str(ROOT / "tests"))

import httpx
from helpers.piece_tokenizer import TOKENS, piece_tokenizer, pieces

DEMO = ROOT / "models" / "demo"
SMALL = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 64**-0.5,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
CPU = ("--device_names", "cpu", "--device_numbers", "1", "--no_explain")
CHAT = (
    "{% if tools is not none %}tools{% endif %}"
    "{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}"
)
CALLS = (
    "{% if tools %}{{ tools[0].function.name }}\n{% endif %}{% for m in messages %}<{{ m.role }}>"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}\n</tool_call>"
    "{% endfor %}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A template of chat with the calls of Hermes."""
ANSWERED = "answered"
LIMIT_S = 600.0


def model(folder: Path, family: str = "llama", **fields: Any) -> Path:
    """Write a tiny random model of a family of transformers; return its folder."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**{**SMALL, **fields})
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    made.save_pretrained(folder / "model")
    return folder / "model"


def edit(file: Path, **fields: Any) -> None:
    """Set fields of a JSON file; one that is ``...`` is removed."""
    found = {**(json.loads(file.read_text()) if file.exists() else {}), **fields}
    file.write_text(json.dumps({key: value for key, value in found.items() if value is not ...}))


def reference(folder: Path, prompt: Sequence[int], count: int) -> list[int]:
    """Return what transformers generates greedily."""
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    made = loaded.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0,
    )  # fmt: skip
    found: list[int] = made[0, len(prompt) :].tolist()
    return found


def program(name: str) -> list[str]:
    """Return the beginning of a command line of ours."""
    code = f"import sys; from llmpq.cli.commands.{name} import main; sys.exit(main())"
    return [sys.executable, "-c", code]


def run(name: str, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the package that Python imports."""
    return subprocess.run(
        [*program(name), *map(str, words)],
        capture_output=True, text=True, check=False, timeout=LIMIT_S,
        env=os.environ | {"LLMPQ_STORE": "off", "OMP_WAIT_POLICY": "PASSIVE"} | environment,
    )  # fmt: skip


def outcome(done: subprocess.CompletedProcess[str], folder: Path, good: str = ANSWERED) -> str:
    """Return how a command ended: ``good``, or its status and its last line."""
    if done.returncode == 0:
        return good
    lines = done.stderr.strip().splitlines() or [""]
    text = re.sub(r"^llmpq-\w+: error: ", "", lines[-1])
    return f"status {done.returncode}: {text.replace(str(folder.resolve()), '')[:300]}"


def plan(folder: Path, *words: object, name: str = "plan.json") -> subprocess.CompletedProcess[str]:
    """Plan the model of a folder for one CPU worker, in float32 at 16 bits."""
    sizes = ("--global_bz", 2, "--s", 112, "--n", 32, "--bits", 16, "--dtype", "float32")
    words = words or ("--model", folder / "model")
    return run("algo", *words, *CPU, *sizes, "--output", folder / name)


def answers(folder: Path, prompts: Sequence[Sequence[int]], count: int, *words: object) -> Any:
    """Return the tokens of offline answers, or how the command ended."""
    file = folder / "prompts.jsonl"
    lines = (
        {
            "id": number,
            "prompt_token_ids": list(prompt),
            "max_new_tokens": count,
            "ignore_eos": True,
        }
        for number, prompt in enumerate(prompts)
    )
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = plan(folder) if not (folder / "plan.json").exists() else None
    if done is not None and done.returncode:
        return outcome(done, folder)
    output = folder / "answers.jsonl"
    output.unlink(missing_ok=True)
    paths = ("--strat_file_name", folder / "plan.json", "--prompts", file, "--output", output)
    done = run("dist", *paths, *words)
    if done.returncode:
        return outcome(done, folder)
    return [json.loads(line)["token_ids"] for line in output.read_text().splitlines()]


@contextlib.contextmanager
def server(folder: Path, *words: object, **environment: str) -> Iterator[httpx.Client]:
    """Serve the plan of a folder; a client of the server.

    Raises:
        RuntimeError: it does not start; holds its last line.
    """
    if not (folder / "plan.json").exists() and (done := plan(folder)).returncode:
        raise RuntimeError(outcome(done, folder))
    command = [*program("serve"), "--port", "0"]
    command += ["--strat_file_name", str(folder / "plan.json"), *map(str, words)]
    with (folder / "server.log").open("w") as log, subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=log, text=True,
        env=os.environ | {"LLMPQ_STORE": "off", "OMP_WAIT_POLICY": "PASSIVE"} | environment,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        line = process.stdout.readline()
        try:
            if not line.startswith("ready "):
                process.wait()
                raise RuntimeError((folder / "server.log").read_text().strip().splitlines()[-1])
            with httpx.Client(base_url=line.split()[1], timeout=LIMIT_S, trust_env=False) as client:
                yield client
        finally:
            process.terminate()


def ask(client: httpx.Client, path: str = "completions", **body: Any) -> Any:
    """Return the first choice of an answer, or status and message of a refusal."""
    found = client.post(f"/v1/{path}", json={"temperature": 0, **body})
    if found.status_code != 200:
        return f"{found.status_code} {found.json()['error']['message']}"
    return found.json()["choices"][0]


def piece_model(folder: Path) -> Path:
    """Write a tiny model with a tokenizer as SentencePiece's, and fewer tokens than the model."""
    made = model(folder, vocab_size=len(TOKENS) + 8)
    piece_tokenizer().save(str(made / "tokenizer.json"))
    edit(
        made / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", bos_token="<s>",
        eos_token="</s>", chat_template=CHAT,
    )  # fmt: skip
    return made


def only(*names: str) -> dict[str, Any]:
    """Return the fields of a request whose answer has these tokens only."""
    return {"allowed_token_ids": pieces(*names), "max_tokens": 2, "ignore_eos": True}


def demo(folder: Path, name: str = "model") -> Path:
    """Copy the shipped model to a folder."""
    target = folder / name
    target.mkdir()
    for file in DEMO.iterdir():
        if file.is_file():
            (target / file.name).write_bytes(file.read_bytes())
    return target


def equal(found: Any, expected: Any) -> str:
    """Return whether tokens are those of transformers, or what was found instead of tokens."""
    if isinstance(found, str):
        return found
    return "tokens of transformers" if found == expected else "other tokens"
