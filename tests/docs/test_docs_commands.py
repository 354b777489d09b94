"""Every command of the documentation runs, or at least its options exist.

A block marked ``<!-- test: run -->`` is executed in order with the other blocks of its page, in a
folder with a tiny model; a block marked ``parse`` or not marked is parsed by the command's parser;
``none`` is for scripts that need root, a GPU or an hour.
"""

from __future__ import annotations

import importlib
import json
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from helpers.docs_pages import ROOT, Block, blocks, name_of
from safetensors.torch import load_file, save_file

LAYERS = 2
SHORT = {
    (
        "llmpq-profile",
        "layer",
    ): "--budget 0.2 --batches 1 2 --prompt_tokens 8 16 --context_tokens 8 16",
    ("llmpq-indicator",): "--calibration_sequences 2 --calibration_tokens 32 --threads 1",
    ("llmpq-eval",): "--max_tokens 64 --threads 1",
    ("llmpq-quantize",): "--calibration_sequences 2 --calibration_tokens 32",
}
"""Options added to a command so that it measures little; later options override earlier ones."""

ALL = list(blocks())
RUN = sorted({block.page for block in ALL if block.mode == "run"})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model with its first two layers only."""
    source, folder = ROOT / "models" / "demo", tmp_path_factory.mktemp("tiny") / "my-model"
    folder.mkdir()
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": LAYERS}))
    tensors = load_file(source / "model.safetensors")
    kept = {name: value for name, value in tensors.items() if layer_of(name) < LAYERS}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def layer_of(name: str) -> int:
    parts = name.split(".")
    return int(parts[2]) if parts[1] == "layers" else -1


@pytest.fixture
def folder(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with ``my-model`` and texts, as the current directory."""
    (tmp_path / "my-model").symlink_to(tiny)
    for name in ("calibration.txt", "heldout.txt"):
        text = (ROOT / "models" / "demo" / name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(text[:20_000], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # the process is shared
    return tmp_path


def scripts() -> dict[str, str]:
    """Return the module of every installed command."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return {
        name: target.partition(":")[0] for name, target in project["project"]["scripts"].items()
    }


def module_and_arguments(words: Sequence[str]) -> tuple[str, list[str]] | None:
    """Return the module whose parser reads a command, and the arguments; ``None`` for others."""
    words = list(words)
    if words[:2] == ["llmpq-dist", "doctor"]:
        return "llmpq.cli.running.doctor", words[2:]
    if words[0] in scripts():
        return scripts()[words[0]], words[1:]
    if words[0] == "torchrun":
        start = words.index("-m")
        return words[start + 1], words[start + 2 :]
    return None


def shortened(words: list[str]) -> list[str]:
    """Return a command with the options that make it measure little."""
    for start, options in SHORT.items():
        if tuple(words[: len(start)]) == start:
            return words + options.split()
    return words


def run(words: list[str]) -> None:
    """Run one command, in this process where it is one of ours."""
    found = module_and_arguments(words)
    if found is None:
        subprocess.run(shlex.join(words), shell=True, check=True)
        return
    module, _ = found
    _, arguments = module_and_arguments(shortened(words)) or found
    status = importlib.import_module(module).main(arguments)
    assert status == 0, f"{shlex.join(words)}: exit status {status}"


@pytest.mark.dist
@pytest.mark.parametrize("page", RUN, ids=name_of)
def test_marked_blocks_run(page, folder):
    names: dict[str, object] = {"__name__": "__main__"}
    for block in ALL:
        if block.page != page or block.mode != "run":
            continue
        if block.language == "python":
            exec(compile(block.text, name_of(page), "exec"), names)
            continue
        for name, text in block.files():
            Path(name).write_text(text, encoding="utf-8")
        for command in block.commands():
            if command.startswith("umask"):
                subprocess.run(command, shell=True, check=True)
            else:
                run(shlex.split(command))


@pytest.mark.parametrize(
    "block",
    [one for one in ALL if one.mode == "parse" and one.language == "bash"],
    ids=lambda one: name_of(one.page),
)
def test_options_of_all_commands_exist(block: Block):
    for command in block.commands():
        if found := module_and_arguments(shlex.split(command)):
            importlib.import_module(found[0])._parser().parse_args(found[1])


def test_marks_are_known():
    assert {block.mode for block in ALL} <= {"run", "parse", "none"}
