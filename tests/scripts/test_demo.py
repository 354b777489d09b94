"""The demo: its prompts, its devices, and what it says on a busy machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from llmpq.dist.launch.process_environment import (
    ISA_VARIABLES,
    allowed_isa,
    cpu_environment,
    usable_isas,
)
from llmpq.dist.metrics.measurement import BUSY_SHARE
from llmpq.spec.cluster import CPU_ISAS
from scripts import demo

pytestmark = pytest.mark.nightly

CALM = {"here/cpu#0": 0.0, "here/cpu#1": 0.01}
BUSY = {"here/cpu#0": 0.54, "here/cpu#1": 0.01}


def report(prefill, decode):
    """Return a report of a run with these (predicted, measured) seconds."""
    names = ("predicted", "measured")
    return {
        "requests": 16,
        "elapsed_s": 0.5,
        "throughput_tokens_per_s": 1536.0,
        "phases": {
            "prefill": dict(zip(names, prefill, strict=True)),
            "decode": dict(zip(names, decode, strict=True)),
        },
        "stages": [
            {"device": f"here/cpu#{index}", "memory_bytes": {"predicted": 300, "measured": 290}}
            for index in (1, 0)
        ],
    }


def test_prompts_are_whole_sentences_of_one_length_from_text_the_model_has_not_seen():
    texts, workload = demo.choose_prompts()
    tokenizer = Tokenizer.from_file(str(demo.MODEL / "tokenizer.json"))
    held_out = (demo.MODEL / "heldout.txt").read_text(encoding="utf-8")
    assert workload.batch == len(texts) == len(set(texts.values())) == demo.BATCH
    for text in texts.values():
        assert text in held_out
        assert text[0].isupper()
        assert text.endswith(".")
        ids = tokenizer.encode(text).ids
        assert len(ids) == workload.prompt_tokens
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One is here. Another one is there.", ["One is here.", "Another one is there."]),
        ("It ends (so. It seems) here.", []),
        ("a part of one. A whole one.\n\nCode: x = 3.", ["A whole one."]),
    ],
)
def test_sentences_are_whole(text, expected):
    assert list(demo.sentences(text)) == expected


@pytest.mark.parametrize(
    ("isas", "allowed", "expected"),
    [
        (("sse4", "avx2", "avx512"), None, "avx2"),
        (("sse4", "avx2", "avx512"), "avx512", "avx2"),
        (("sse4", "avx2", "avx512"), "avx2", None),
        (("sse4", "avx2"), None, None),
        ((), None, None),
    ],
)
def test_the_second_device_is_held_to_avx2_only_where_there_is_more(isas, allowed, expected):
    assert demo.second_isa(isas, allowed) == expected


@pytest.mark.parametrize("isa", [None, *CPU_ISAS])
def test_the_limit_of_the_environment_is_found(isa, monkeypatch):
    for variable in ISA_VARIABLES:  # by which this test may be limited itself
        monkeypatch.delenv(variable, raising=False)
    here = usable_isas({})
    newest_here = isa if isa is None or isa in here else here[-1]
    assert allowed_isa(cpu_environment(1, isa)) == newest_here


def test_a_worker_without_a_limit_keeps_that_of_the_environment():
    limited, free = cpu_environment(1, "sse4"), cpu_environment(1)
    assert allowed_isa(limited | free) == "sse4"


def test_forecast_and_run_are_compared_on_a_calm_machine():
    lines = demo.comparison(report((0.110, 0.100), (0.4, 0.5)), CALM, CALM)
    prefill = next(line for line in lines if line.startswith("prefill"))
    assert prefill.split()[1:] == ["110", "ms", "100", "ms", "+10%"]
    assert "CPU busy with other programs while running: here/cpu#0 0%, here/cpu#1 1%" in lines
    assert not any("withheld" in line for line in lines)


@pytest.mark.parametrize(("measuring", "running"), [(BUSY, CALM), (CALM, BUSY)])
def test_forecast_seconds_are_withheld_when_other_programs_took_the_cpu(measuring, running):
    lines = demo.comparison(report((0.110, 0.100), (0.4, 0.5)), measuring, running)
    text = "\n".join(lines)
    assert "110 ms" not in text
    assert "+10%" not in text
    assert "100 ms" in text
    assert "here/cpu#0 54%" in text
    assert "run scripts/demo again" in text
    assert "memory of here/cpu#1" in text


def test_unknown_shares_are_said_to_be_unknown():
    lines = demo.comparison(report((0.1, 0.1), (0.4, 0.5)), {"here/cpu#0": None}, CALM)
    assert "CPU busy with other programs while measuring: unknown" in lines
    assert not any("withheld" in line for line in lines)


@pytest.mark.slow
def test_the_demo_runs_from_measuring_to_answers(tmp_path):
    command = [sys.executable, "scripts/demo.py", "--json", "--budget", "2"]
    environment = {**os.environ, **cpu_environment(1, "avx2")}
    done = subprocess.run(
        [*command, "--output", str(tmp_path)],
        cwd=demo.ROOT, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert found["run"]["requests"] == demo.BATCH
    assert {
        one["tokens"] for one in found["run"]["stages"][0]["work"] if one["phase"] == "prefill"
    } == {demo.PROMPT_TOKENS}
    shares = [*found["cpu_taken"]["measuring"].values(), *found["cpu_taken"]["running"].values()]
    assert len(shares) == 4
    known = [share for share in shares if share is not None]
    assert found["is_comparable"] == all(share < BUSY_SHARE for share in known)
    cluster = json.loads((tmp_path / "cluster.json").read_text())
    caps = [device["memory_bytes"] for device in cluster["nodes"][0]["devices"]]
    assert caps[0] != caps[1]
    assert "cpu_isa" not in Path(tmp_path / "cluster.json").read_text()
    assert (tmp_path / "strategy.png").exists()
