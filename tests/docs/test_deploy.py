"""deploy/: the image, its compose file and the service say what the commands accept."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
import tomllib

import pytest
import yaml
from helpers.docs_pages import ROOT

from llmpq.cli.commands.serve import _parser
from scripts.image_check import instructions

DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()


def test_image_installs_extras_that_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r'^ARG EXTRAS="(.+)"$', DOCKERFILE, re.M)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    (torch,) = re.findall(r'^ARG TORCH="(.+)"$', DOCKERFILE, re.M)
    assert torch in project["optional-dependencies"]["runtime"]


def test_image_runs_as_a_user_and_has_no_compiler():
    steps = list(instructions(DOCKERFILE))
    last = steps[max(at for at, (name, _) in enumerate(steps) if name == "FROM") :]
    assert ("USER", "1000") in last
    assert not any("gcc" in words for name, words in last if name == "RUN")
    assert ("ENTRYPOINT", '["llmpq"]') in last


def test_context_of_the_image_has_all_that_its_steps_read():
    ignored = (ROOT / ".dockerignore").read_text().split()
    for needed in ("llmpq", "scripts/build_wheel.py", "pyproject.toml", "setup.cfg", "README.md"):
        assert (ROOT / needed).exists()
        assert not any(needed.startswith(name) for name in ignored if not name.startswith("#"))


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_compose_file_starts_a_server_with_a_key(name):
    service = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"][name]
    verb, *words = service["command"]
    assert verb == "serve"
    options = _parser().parse_args(words)
    assert (options.given, options.host, options.port) == ("/model", "0.0.0.0", 8000)
    mounted = {volume.rsplit(":", 2)[-2] for volume in service["volumes"][:2]}
    assert {options.given, str(options.api_key_file)} == mounted
    assert service["ports"] == ["127.0.0.1:8000:8000"]


def unit() -> configparser.ConfigParser:
    found = configparser.ConfigParser(interpolation=None, strict=False)
    found.optionxform = str  # type: ignore[assignment, method-assign]
    found.read(DEPLOY / "llmpq.service")
    return found


def test_service_starts_a_server():
    program, verb, *words = shlex.split(unit()["Service"]["ExecStart"])
    assert program.endswith("/bin/llmpq")
    assert (verb, words) == ("serve", ["${MODEL}", "$OPTIONS"])
    options = _parser().parse_args(["/srv/models/my-model"])
    assert float(unit()["Service"]["TimeoutStopSec"]) > options.drain_timeout


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_service_is_understood_by_systemd(tmp_path):
    text = (DEPLOY / "llmpq.service").read_text().replace("/opt/llmpq/bin/llmpq", "/bin/true")
    (tmp_path / "llmpq.service").write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / "llmpq.service")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
