"""Run llmpq-serve and clients of its APIs that other projects wrote.

    python -m venv clients
    clients/bin/pip install "lm-eval[api]" transformers litellm aiperf anthropic openai
    clients/bin/pip install "pydantic-ai-slim[openai]" instructor langchain-openai llm
    clients/bin/pip install "smolagents[openai]"
    scripts/accept --python clients/bin/python

The clients may live in another environment (``--python``). One that is not installed is skipped,
with what to install. Exit status 1 when one fails. The server answers with ``models/demo`` in
float32, which gets a chat template for this, and calls functions where a form is required: its free
text is nonsense. ``lm-eval``'s log-likelihoods are compared with those that transformers computes
directly. The programs of ``scripts/agent_clients`` use the libraries that agents are made of.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from servers import VLLM_BENCH, llmpq_serve, make_plan  # noqa: E402

MODEL = "demo"
REQUESTS, CONCURRENCY, PROMPT_TOKENS, NEW_TOKENS = 16, 4, 64, 16
TOLERANCE = 1e-4
CLIENT_TIMEOUT_S = 900
"""A client that imports torch starts slowly on a busy machine."""
PLAN = {"bits": 16, "batch": 2, "prompt_tokens": 7680, "new_tokens": 512, "dtype": "float32"}
MAX_LENGTH = PLAN["prompt_tokens"] + PLAN["new_tokens"]
"""Agents have long system prompts; the model answers nonsense to them in any case."""
CHAT_TEMPLATE = """\
{%- if tools %}tools: {{ tools | tojson }}
{% endif %}{% for message in messages %}{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
TASK = """\
task: continuations
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{context}}}}"
doc_to_target: "{{{{continuation}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
LOCAL = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""Keeps litellm from asking for prices."""
LITELLM = """
import litellm, sys
base = sys.argv[1] + "/v1"
options = dict(model="hosted_vllm/demo", api_base=base, api_key="none", max_tokens=8, temperature=0)
messages = [{"role": "user", "content": "To install the package"}]
whole = litellm.completion(messages=messages, logprobs=True, top_logprobs=2, **options)
parts = list(litellm.completion(messages=messages, stream=True, **options))
text = "".join(part.choices[0].delta.content or "" for part in parts)
assert whole.usage.completion_tokens == 8, whole.usage
assert whole.choices[0].finish_reason == parts[-1].choices[0].finish_reason == "length", parts[-1]
assert text == whole.choices[0].message.content != "", (text, whole)
assert len(whole.choices[0].logprobs.content) == 8
plain = litellm.text_completion(model="text-completion-openai/demo", prompt="To install",
                                api_base=base, api_key="none", max_tokens=8, temperature=0)
assert plain.choices[0].text
try:
    litellm.completion(messages=messages, **{**options, "model": "hosted_vllm/other"})
    raise SystemExit("an unknown model was accepted")
except litellm.NotFoundError:
    print("chat, stream, logprobs, text completion, error")
"""

ANTHROPIC = """
import anthropic, sys
client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none")
options = dict(model="demo", max_tokens=8, system="Be brief", extra_body={"temperature": 0},
               messages=[{"role": "user", "content": "To install the package"}])
whole = client.messages.create(**options)
with client.messages.stream(**options) as stream:
    text = "".join(stream.text_stream)
    last = stream.get_final_message()
assert text == whole.content[0].text == last.content[0].text != "", (text, whole)
assert whole.stop_reason == last.stop_reason == "max_tokens", last
assert last.usage.output_tokens == whole.usage.output_tokens == 8, last.usage
counted = client.messages.count_tokens(**{k: options[k] for k in ("model", "system", "messages")})
usage = whole.usage
assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens, (counted, usage)
try:
    client.messages.create(**options | {"model": "other"})
    raise SystemExit("an unknown model was accepted")
except anthropic.NotFoundError:
    print("message, stream, tokens, error")
"""
OPENAI = """
import openai, sys
client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="none")
options = dict(model="demo", max_output_tokens=8, temperature=0, instructions="Be brief")
whole = client.responses.create(input="To install the package", **options)
events = list(client.responses.create(input="To install the package", stream=True, **options))
text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
last = events[-1].response
assert text == whole.output_text == last.output_text != "", (text, whole)
assert whole.status == last.status == "incomplete", last
assert last.usage.output_tokens == whole.usage.output_tokens == 8, last.usage
more = client.responses.create(input="And then?", previous_response_id=whole.id, **options)
assert more.usage.input_tokens > whole.usage.input_tokens + 8, more.usage
floats, packed = (
    client.embeddings.create(model="demo", input=["one", "two"], encoding_format=kind)
    for kind in ("float", openai.omit)
)
for one, other in zip(floats.data, packed.data, strict=True):
    assert abs(sum(value * value for value in one.embedding) - 1) < 1e-5, one
    assert max(abs(a - b) for a, b in zip(one.embedding, other.embedding)) < 1e-5
print("response, stream, conversation, embeddings")
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a client gets.

    Attributes:
        python: of the environment with the clients.
        url: of the server.
        model: directory of the model.
        folder: for the files of this client.
    """

    python: str
    url: str
    model: Path
    folder: Path

    def run(self, *words: str, **variables: str) -> str:
        """Run a program; return what it prints.

        Raises:
            AssertionError: it failed.
        """
        done = subprocess.run(
            words,
            cwd=self.folder,
            env={**os.environ, "OPENAI_API_KEY": "none", "NO_COLOR": "1", **variables},
            capture_output=True,
            text=True,
            check=False,
            timeout=CLIENT_TIMEOUT_S,
        )
        (self.folder / "output.txt").write_text(done.stdout + done.stderr)
        if done.returncode:
            raise AssertionError(f"status {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
        return done.stdout

    def program(self, name: str) -> str:
        """Return a program of the clients' environment."""
        return str(Path(self.python).absolute().parent / name)


def lm_eval(setting: Setting) -> str:
    """Compare log-likelihoods with those of a direct computation."""
    documents = documents_of(setting.model)
    folder = setting.folder
    (folder / "data.jsonl").write_text("".join(json.dumps(one) + "\n" for one in documents))
    (folder / "task.yaml").write_text(TASK.format(data=folder / "data.jsonl"))
    arguments = {
        "model": MODEL, "base_url": f"{setting.url}/v1/completions", "tokenizer": setting.model,
        "tokenizer_backend": "huggingface", "tokenized_requests": True, "num_concurrent": 2,
    }  # fmt: skip
    setting.run(
        setting.program("lm_eval"), "--model", "local-completions", "--model_args",
        ",".join(f"{name}={value}" for name, value in arguments.items()), "--tasks",
        "continuations", "--include_path", str(folder), "--batch_size", "4", "--log_samples",
        "--output_path", str(folder / "out"), HF_HOME=str(folder / "cache"),
    )  # fmt: skip
    lines = next((folder / "out").rglob("samples_*.jsonl")).read_text().splitlines()
    found = {one["doc_id"]: one["resps"][0][0] for one in map(json.loads, lines)}
    expected = log_likelihoods(setting.model, documents)
    worst = 0.0
    for number, (value, is_greedy) in enumerate(expected):
        score, flag = found[number]
        worst = max(worst, abs(float(score) - value))
        assert str(flag) == str(is_greedy), (number, found[number], is_greedy)
    assert worst <= TOLERANCE, f"log-likelihoods differ by {worst:.2e}, limit {TOLERANCE:.0e}"
    return f"{len(expected)} log-likelihoods, largest difference {worst:.1e}"


def documents_of(model: Path) -> list[dict[str, str]]:
    """Return contexts and continuations from the model's held-out text."""
    words = (model / "heldout.txt").read_text(encoding="utf-8").split()
    found = []
    for number in range(REQUESTS):
        first, size = number * 50, 5 + number
        context, rest = (
            words[first : first + size],
            words[first + size : first + size + 1 + number % 4],
        )
        found.append({"context": " ".join(context), "continuation": " " + " ".join(rest)})
    return found


def log_likelihoods(model_dir: Path, documents: list[dict[str, str]]) -> list[tuple[float, bool]]:
    """Return log-likelihood of each continuation, and whether it is the greedy one."""
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    found = []
    for document in documents:
        whole = tokenizer.encode(document["context"] + document["continuation"],
                                 add_special_tokens=False)  # fmt: skip
        context = len(tokenizer.encode(document["context"], add_special_tokens=False))
        with torch.no_grad():
            scores = model(torch.tensor([whole])).logits[0].log_softmax(-1)[context - 1 : -1]
        wanted = torch.tensor(whole[context:])
        value = float(scores.gather(-1, wanted[:, None]).sum())
        found.append((value, bool((scores.argmax(-1) == wanted).all())))
    return found


def aiperf(setting: Setting) -> str:
    """Measure with aiperf."""
    cache = setting.folder / "hub" / "models--local--demo"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("0")
    (cache / "snapshots").mkdir()
    (cache / "snapshots" / "0").symlink_to(setting.model)
    setting.run(
        setting.program("aiperf"), "profile", "--model", MODEL, "--tokenizer", "local/demo",
        "--url", setting.url, "--endpoint-type", "completions", "--streaming", "--concurrency",
        str(CONCURRENCY), "--request-count", str(REQUESTS), "--synthetic-input-tokens-mean",
        str(PROMPT_TOKENS), "--output-tokens-mean", str(NEW_TOKENS), "--extra-inputs",
        "ignore_eos:true", "--output-artifact-dir", str(setting.folder / "out"), "--ui", "none",
        HF_HUB_CACHE=str(cache.parent),
    )  # fmt: skip
    report = json.loads(
        next((setting.folder / "out").rglob("profile_export_aiperf.json")).read_text()
    )
    count = report["request_count"]["avg"]
    errors = (report.get("error_request_count") or {}).get("avg", 0)
    assert (count, errors) == (REQUESTS, 0), (count, errors)
    length = report["output_sequence_length"]["avg"]
    return f"{count:.0f} requests, {length:.3g} tokens each"


def guidellm(setting: Setting) -> str:
    """Measure with guidellm."""
    setting.run(
        setting.program("guidellm"), "run", "--backend",
        f"kind=openai_http,target={setting.url},model={MODEL}", "--profile",
        f"kind=concurrent,streams={CONCURRENCY}", "--tokenizer",
        f"kind=hf_auto,model={setting.model}", "--data",
        f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={NEW_TOKENS}",
        "--constraint", f"kind=max_requests,count={REQUESTS}", "--output",
        f"kind=json,path={setting.folder / 'report.json'}", "--disable-console",
    )  # fmt: skip
    report = json.loads((setting.folder / "report.json").read_text())
    totals = report["benchmarks"][0]["metrics"]["request_totals"]
    assert totals["errored"] == 0, totals
    assert totals["successful"] >= REQUESTS, totals
    return f"{totals['successful']} requests"


def vllm(setting: Setting) -> str:
    """Measure with ``vllm bench serve``."""
    setting.run(
        setting.python, "-c", VLLM_BENCH, "--backend", "openai", "--base-url", setting.url,
        "--endpoint", "/v1/completions", "--model", MODEL, "--tokenizer", str(setting.model),
        "--dataset-name", "random", "--random-input-len", str(PROMPT_TOKENS),
        "--random-output-len", str(NEW_TOKENS), "--num-prompts", str(REQUESTS), "--ignore-eos",
        "--max-concurrency", str(CONCURRENCY), "--save-result", "--result-dir",
        str(setting.folder / "out"), VLLM_TARGET_DEVICE="cpu",
    )  # fmt: skip
    report = json.loads(next((setting.folder / "out").rglob("*.json")).read_text())
    assert report["completed"] == REQUESTS, report["completed"]
    assert report["total_output_tokens"] == REQUESTS * NEW_TOKENS, report["total_output_tokens"]
    return f"{report['completed']} requests, {report['total_output_tokens']} tokens"


def python_client(*words: str) -> Callable[[Setting], str]:
    """Return what runs Python of the clients' environment with these words and the address."""

    def act(setting: Setting) -> str:
        return setting.run(setting.python, *words, setting.url, **LOCAL).strip()

    return act


def agent_client(name: str) -> Callable[[Setting], str]:
    """Return what runs a program of ``scripts/agent_clients``."""
    return python_client(str(ROOT / "scripts" / "agent_clients" / f"use_{name}.py"))


def aider(setting: Setting) -> str:
    """Let aider ask for a change of a file, of which nonsense makes none."""
    file, settings = setting.folder / "file.txt", setting.folder / "settings.yml"
    file.write_text("one\n")
    settings.write_text(f"- name: openai/{MODEL}\n  extra_params: {{max_tokens: 64}}\n")
    setting.run(
        setting.program("aider"), "--model", f"openai/{MODEL}", "--openai-api-base",
        f"{setting.url}/v1", "--openai-api-key", "none", "--no-git", "--yes-always",
        "--no-check-update", "--no-show-model-warnings", "--no-analytics", "--map-tokens", "0",
        "--edit-format", "whole", "--model-settings-file", str(settings), "--message", "Write two",
        str(file), HOME=str(setting.folder), **LOCAL,
    )  # fmt: skip
    text = (setting.folder / "output.txt").read_text()
    assert re.search(r"Output tokens: ~[1-9]", text), text[-2000:]  # of an answer that is cut
    return "a message, streamed until its limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A client: its module, how to install it, and what is done with it.

    Attributes:
        module: that it is imported by.
        install: words for pip.
        act: what is done with it.
        package: that has its version; ``None`` where it is named as the module.
    """

    module: str
    install: str
    act: Callable[[Setting], str]
    package: str | None = None


CLIENTS = {
    "lm-eval": Client(
        module="lm_eval", install='"lm-eval[api]" transformers', act=lm_eval, package="lm-eval"
    ),
    "litellm": Client(module="litellm", install="litellm", act=python_client("-c", LITELLM)),
    "anthropic": Client(
        module="anthropic", install="anthropic", act=python_client("-c", ANTHROPIC)
    ),
    "openai": Client(module="openai", install="openai", act=python_client("-c", OPENAI)),
    "litellm-tools": Client(module="litellm", install="litellm", act=agent_client("litellm")),
    "pydantic-ai": Client(
        module="pydantic_ai",
        install='"pydantic-ai-slim[openai]"',
        act=agent_client("pydantic_ai"),
        package="pydantic-ai-slim",
    ),
    "instructor": Client(module="instructor", install="instructor", act=agent_client("instructor")),
    "langchain-openai": Client(
        module="langchain_openai",
        install="langchain-openai",
        act=agent_client("langchain"),
        package="langchain-openai",
    ),
    "llm": Client(module="llm", install="llm", act=agent_client("llm")),
    "smolagents": Client(
        module="smolagents", install='"smolagents[openai]"', act=agent_client("smolagents")
    ),
    "aider": Client(
        module="aider",
        install="aider-chat (into another environment: it states the versions of all it needs)",
        act=aider,
        package="aider-chat",
    ),
    "aiperf": Client(module="aiperf", install="aiperf", act=aiperf),
    "guidellm": Client(module="guidellm", install="guidellm (needs torch)", act=guidellm),
    "vllm": Client(
        module="vllm",
        install="torch, --no-deps vllm, and what vllm.benchmarks.serve imports",
        act=vllm,
    ),
}


def is_installed(python: str, module: str) -> bool:
    """Return whether an environment has a module."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", code], check=False).returncode == 0


def version_of(python: str, client: Client) -> str:
    """Return the version of a client that is installed."""
    name = client.package or client.module
    code = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
    words = [python, "-c", code, name]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


def model_with_template(source: Path, output: Path) -> None:
    """Copy a model, allow it long texts, and add a chat template where there is none."""
    shutil.copytree(source, output)
    config = json.loads((output / "config.json").read_text())
    config["max_position_embeddings"] = max(MAX_LENGTH, config["max_position_embeddings"])
    (output / "config.json").write_text(json.dumps(config))
    if not (output / "chat_template.jinja").exists():
        (output / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def main() -> int:
    """Serve, run every client, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default=sys.executable, help="of the clients' environment")
    parser.add_argument("--only", nargs="+", choices=CLIENTS, default=list(CLIENTS))
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "demo")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    outcomes: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="accept-") as temporary:
        folder = Path(temporary)
        model = folder / "model"
        model_with_template(options.model, model)
        plan = make_plan(model, folder / "plan.json", **PLAN)
        with llmpq_serve(model, plan, folder / "server.log", name=MODEL) as server:
            for name in options.only:
                (folder / name).mkdir()
                setting = Setting(
                    python=str(Path(options.python).absolute()),
                    url=f"http://127.0.0.1:{server.port}",
                    model=model,
                    folder=folder / name,
                )
                outcomes[name] = run_client(CLIENTS[name], setting)
                version = outcomes[name].get("version", "")
                print(f"{name} {version}: {outcomes[name]['outcome']}: {outcomes[name]['detail']}",
                      file=sys.stderr, flush=True)  # fmt: skip
    if options.json:
        print(json.dumps(outcomes, indent=1))
    else:
        for name, one in outcomes.items():
            print(f"{name:17} {one.get('version', ''):12} {one['outcome']}")
    return int(any(one["outcome"] == "failed" for one in outcomes.values()))


def run_client(client: Client, setting: Setting) -> dict[str, Any]:
    """Run a client if it is installed."""
    if not is_installed(setting.python, client.module):
        return {"outcome": "skipped", "detail": f"not installed: pip install {client.install}"}
    version, start_s = version_of(setting.python, client), time.monotonic()
    try:
        detail, outcome = client.act(setting), "passed"
    except (
        AssertionError, KeyError, StopIteration, OSError, ValueError, subprocess.TimeoutExpired,
    ) as error:  # fmt: skip
        detail, outcome = f"{type(error).__name__}: {error}", "failed"
    seconds = round(time.monotonic() - start_s, 1)
    return {"outcome": outcome, "version": version, "detail": detail, "seconds": seconds}


if __name__ == "__main__":
    sys.exit(main())
