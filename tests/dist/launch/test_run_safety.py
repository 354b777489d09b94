"""What a run leaves open to others: no socket beyond this user, no file, no word of a prompt."""

from __future__ import annotations

import ast
import logging
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.clocks import PATIENCE_S
from helpers.ranks import make_plan

import llmpq
from llmpq.dist.io.prompts import Prompt, make_request, request_limits
from llmpq.dist.launch.ranks import Ranks
from llmpq.dist.launch.signals import clean_up_if_killed
from llmpq.errors import SpecError
from llmpq.spec.huggingface.families import load_model_dir

SOURCE = Path(llmpq.__file__).parent
FORBIDDEN_CALLS = {"eval", "exec", "compile"}
FORBIDDEN_NAMES = {
    "pickle", "marshal", "shelve", "dill", "cloudpickle", "send_object_list", "recv_object_list",
    "broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list",
}  # fmt: skip
FORBIDDEN_ATTRIBUTES = {
    ("torch", "load"),
    ("torch", "save"),
    ("yaml", "load"),
    ("distributed", "rpc"),
}


def findings(tree: ast.AST) -> list[str]:
    """Return what a module does that could run code of others."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
                found.append(node.func.id)
            for word in node.keywords:
                is_true = isinstance(word.value, ast.Constant) and word.value.value is True
                if word.arg in ("shell", "trust_remote_code") and is_true:
                    found.append(f"{word.arg}=True")
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name.partition(".")[0] for alias in node.names}
            names.add((getattr(node, "module", None) or "").partition(".")[0])
            found += sorted(names & FORBIDDEN_NAMES)
        elif isinstance(node, ast.Attribute):
            if (
                isinstance(node.value, ast.Name)
                and (node.value.id, node.attr) in FORBIDDEN_ATTRIBUTES
            ):
                found.append(f"{node.value.id}.{node.attr}")
            elif node.attr in FORBIDDEN_NAMES:
                found.append(node.attr)
    return found


def test_nothing_in_the_package_could_run_a_strangers_code():
    bad = {
        str(path.relative_to(SOURCE)): found
        for path in SOURCE.rglob("*.py")
        if (found := findings(ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert not bad


@pytest.mark.parametrize(
    "text",
    [
        "import pickle", "from marshal import loads", "eval('1')", "exec('x = 1')",
        "torch.load('x')", "run('ls', shell=True)", "f(trust_remote_code=True)",
        "dist.broadcast_object_list([])",
    ],
)  # fmt: skip
def test_the_search_would_find_it(text):
    assert findings(ast.parse(text))


def test_a_refused_prompt_is_not_quoted(caplog, tiny_model):
    model = load_model_dir(tiny_model("llama", seed=1))
    limits = request_limits(make_plan((0, 3)), model, ())
    canary = "a canary that no other user may read"
    prompt = Prompt(id="p", where="prompts.jsonl line 1", text=canary, max_new_tokens=10**9)
    with caplog.at_level(logging.DEBUG), pytest.raises(SpecError) as caught:
        make_request(prompt, limits, None)
    assert canary not in str(caught.value) + caplog.text


def test_the_folder_of_a_killed_launcher_is_removed(tmp_path):
    folder = tmp_path / "private"
    folder.mkdir(mode=0o700)
    (folder / "job.json").write_text("{}")
    other = tmp_path / "blocks on disk"
    (other / "rank-0").mkdir(parents=True)
    # A rank that still imports its libraries and has not yet asked to end with its launcher.
    rank = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)", str(folder / "job.json")]
    )
    code = (
        "import sys, time; from pathlib import Path\n"
        "from llmpq.dist.launch.signals import clean_up_if_killed\n"
        "with clean_up_if_killed(*map(Path, sys.argv[1:])):\n"
        "    print('ready', flush=True); time.sleep(600)"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", code, str(folder), str(other)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(SOURCE.parent)},
    )
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == b"ready\n"
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    assert rank.wait(timeout=PATIENCE_S) == -9
    _wait_until_gone(folder)
    _wait_until_gone(other)


def test_a_run_removes_the_folders_that_it_made(tmp_path):
    with Ranks(make_plan((0, 3))) as ranks:
        made = ranks.make_folder(tmp_path / "blocks")
        (made / "rank-0").mkdir()
        assert made.parent == tmp_path / "blocks"
        assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert [*(tmp_path / "blocks").iterdir()] == []
    (tmp_path / "file").touch()
    with Ranks(make_plan((0, 3))) as ranks, pytest.raises(SpecError, match="no folder can be made"):
        ranks.make_folder(tmp_path / "file")


def test_the_cleanup_of_a_finished_run_removes_nothing(tmp_path):
    with clean_up_if_killed(tmp_path):
        (tmp_path / "kept").touch()
    assert (tmp_path / "kept").exists()
    assert stat.S_ISREG((tmp_path / "kept").stat().st_mode)


def _wait_until_gone(folder: Path) -> None:
    end = time.monotonic() + PATIENCE_S
    while folder.exists():
        assert time.monotonic() < end
        time.sleep(0.02)
