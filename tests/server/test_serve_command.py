"""``llmpq-serve`` and batch files with real ranks and the shipped model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
import torch
from helpers.served import DEMO, demo_tokenizer
from transformers import AutoModelForCausalLM

from llmpq import plan
from llmpq.cli.commands import dist

PROMPTS = ("The server listens on", "To install the package,", "If the file")
NEW = 12

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def strategy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    found = plan(
        str(DEMO),
        device_names=["cpu"],
        device_numbers=[2],
        batch=4,
        prompt=64,
        new=32,
        dtype="float32",
        bits=(16,),
    )
    found.save(path)
    return path


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """The greedy answers of transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    texts = []
    for prompt in PROMPTS:
        ids = torch.tensor([demo_tokenizer().encode(prompt)])
        made = model.generate(ids, max_new_tokens=NEW, do_sample=False)
        texts.append(demo_tokenizer().decode(made[0, ids.shape[1] :].tolist()))
    return texts


@pytest.fixture(scope="module")
def server(strategy: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "llmpq.cli.commands.serve", "--port", "0"]
    command += ["--strat_file_name", str(strategy), "--served_model_name", "demo"]
    command += ["--max_num_queued_reqs", "64", "--step_timeout", "60"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"LLMPQ_STORE": "off"}
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("ready http://127.0.0.1:")
            yield process, line.split()[1]
        finally:
            process.kill()


@pytest.fixture(scope="module")
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server[1]}/v1", api_key="x", max_retries=0) as made:
        yield made


def test_greedy_answers_equal_transformers(client, expected):
    answer = client.completions.create(
        model="demo", prompt=list(PROMPTS), max_tokens=NEW, temperature=0
    )
    assert [choice.text for choice in answer.choices] == expected


def test_streams_at_the_same_time_equal_transformers(client, expected):
    def ask(number: int) -> str:
        chunks = client.completions.create(
            model="demo", prompt=PROMPTS[number % 3], max_tokens=NEW, temperature=0, stream=True
        )
        return "".join(chunk.choices[0].text for chunk in chunks)

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(ask, range(12)))
    assert texts == [expected[number % 3] for number in range(12)]


def test_echoed_logprobs_equal_transformers(client):
    prompt = demo_tokenizer().encode(PROMPTS[0])
    answer = client.completions.create(
        model="demo", prompt=prompt, max_tokens=0, echo=True, logprobs=1
    )
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    with torch.no_grad():
        scores = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    wanted = [float(scores[place, token]) for place, token in enumerate(prompt[1:])]
    found = answer.choices[0].logprobs.token_logprobs
    assert found[0] is None
    assert found[1:] == pytest.approx(wanted, abs=1e-4)


def test_seeds_and_n(client):
    def ask(seed: int) -> list[str]:
        answer = client.completions.create(
            model="demo", prompt=PROMPTS[0], max_tokens=NEW, temperature=1, n=3, seed=seed
        )
        return [choice.text for choice in answer.choices]

    assert ask(1) == ask(1) != ask(2)
    assert len(set(ask(1))) == 3


def test_stop_string_and_abort_leave_the_engine_idle(client, server):
    answer = client.completions.create(
        model="demo", prompt=PROMPTS[0], max_tokens=30, temperature=0, stop=[" "]
    )
    assert " " not in answer.choices[0].text.lstrip()
    stream = client.completions.create(
        model="demo", prompt=PROMPTS[0], max_tokens=30, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    while httpx.get(f"{server[1]}/load").json()["server_load"]:
        pass
    again = client.completions.create(model="demo", prompt=PROMPTS[0], max_tokens=3)
    assert again.usage.completion_tokens == 3


def test_sigterm_ends_the_server(client, server, expected):
    process, url = server
    assert httpx.get(f"{url}/health").status_code == 200
    with client.completions.create(
        model="demo", prompt=PROMPTS[0], max_tokens=NEW, temperature=0, stream=True
    ) as stream:
        chunks = iter(stream)
        first = next(chunks).choices[0].text
        process.send_signal(signal.SIGTERM)
        text = first + "".join(chunk.choices[0].text for chunk in chunks)
    assert text == expected[0]
    assert process.wait(60) == 0


def test_batch_file_is_answered(strategy, tmp_path, expected, capsys):
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": prompt, "max_tokens": NEW, "temperature": 0},
        }
        for number, prompt in enumerate(PROMPTS)
    ]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    words = ["--strat_file_name", str(strategy), "--format", "openai_batch", "--json"]
    words += ["--prompts", str(source), "--output", str(output), "--step_timeout", "60"]
    assert dist.main(words) == 0
    answers = map(json.loads, output.read_text(encoding="utf-8").splitlines())
    found = {item["custom_id"]: item for item in answers}
    texts = [found[str(n)]["response"]["body"]["choices"][0]["text"] for n in range(3)]
    assert texts == expected
    summary = json.loads(capsys.readouterr().out)
    assert (summary["requests"], summary["errors"]) == (3, 0)
