"""The examples of the page about serving run against a server."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from helpers.docs_pages import ROOT, blocks
from helpers.fake_engine import FakeEngine
from helpers.served import make_service, serving

PAGE = ROOT / "docs" / "tutorials" / "serve.md"
ADDRESS = "http://127.0.0.1:8000"
PYTHON = [block.text for block in blocks() if block.page == PAGE and block.language == "python"]
CURL = [
    command
    for block in blocks()
    if block.page == PAGE and block.mode == "parse"
    for command in block.commands()
    if command.startswith("curl")
]


def test_page_has_examples():
    assert len(PYTHON) == 2
    assert len(CURL) == 2


@pytest.mark.parametrize("text", PYTHON)
def test_python_examples_run(text, capsys):
    with serving(make_service(FakeEngine())) as served:
        exec(compile(text.replace(ADDRESS, served.url), str(PAGE), "exec"), {})
    assert capsys.readouterr().out.strip()


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("command", CURL)
def test_curl_examples_run(command):
    with serving(make_service(FakeEngine())) as served:
        done = subprocess.run(
            f"{command.replace(ADDRESS, served.url)} --silent --fail-with-body --max-time 20",
            shell=True,
            capture_output=True,
            text=True,
            check=True,
        )
    assert '"finish_reason":"length"' in done.stdout
