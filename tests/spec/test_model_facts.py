"""What the files of a model say, where it stands, and where they contradict each other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.gguf_writer import write_gguf
from helpers.served_demo import DEMO
from safetensors.torch import load_file, save_file

from llmpq.cli.commands.check import main
from llmpq.dist.io.model_files import export_tokenizer
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.model_files.facts import Fact, model_facts
from llmpq.spec.model_files.tokenizer import end_token_ids


@pytest.fixture
def folder(tiny_model, tmp_path) -> Path:
    """A model with one contradiction of every kind that is believed one way or the other."""
    path = tmp_path / "model"
    shutil.copytree(tiny_model("llama", seed=1), path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, path)
    return path


def change(path: Path, **fields: Any) -> None:
    found = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**found, **fields}))


def facts_of(path: Path) -> dict[str, Fact]:
    return {fact.name: fact for fact in model_facts(path)}


def test_every_fact_has_its_place_and_is_what_the_readers_say(folder):
    change(folder / "config.json", torch_dtype=None, dtype="float32", eos_token_id=[7, 8])
    change(folder / "generation_config.json", eos_token_id=7)
    found, model = facts_of(folder), load_model_dir(folder)
    assert found["family"].value == model.family == "llama"
    assert found["layers"].value == f"{model.num_layers} with full attention"
    assert found["context"].value == f"{model.max_positions:,} tokens"
    assert found["context"].source == "config.json: max_position_embeddings"
    assert (found["dtype"].value, found["dtype"].contradiction) == ("float32", None)
    assert found["rotation"].value == "default, base 10,000"
    ends = end_token_ids(folder, [7, 8])
    assert found["end tokens"].value == ", ".join(str(one) for one in sorted(ends))
    assert found["end tokens"].source == "generation_config.json, tokenizer"
    assert found["end tokens"].contradiction == "config.json says 7, 8"
    assert found["tokenizer"].source == "tokenizer.json"
    assert found["chat template"].value == "none"


def test_what_is_not_used_is_said(folder):
    scaling = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
    change(folder / "config.json", dtype="float16", rope_parameters=scaling)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    save_file(weights, folder / "model.safetensors")
    change(folder / "config.json", tie_word_embeddings=True)
    own = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    change(folder / "tokenizer_config.json", chat_template="another")

    found = facts_of(folder)
    assert found["dtype"].contradiction == "most weights are float32"
    assert found["head"].value == "its own"
    assert found["head"].contradiction == "tie_word_embeddings is true"
    assert found["context"].value == f"{4 * own:,} tokens"
    assert found["context"].contradiction == f"max_position_embeddings is {own:,}"
    assert found["rotation"].value == "yarn, base 10,000, factor 4"
    assert found["chat template"].source == "chat_template.jinja"
    assert found["chat template"].contradiction == "another in tokenizer_config.json"
    exported = export_tokenizer(folder)
    assert exported is not None
    assert exported["chat_template"] == "{{ messages[0].content }}"


def test_a_plan_needs_no_weights_and_no_tokenizer(folder, tmp_path):
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(folder / "config.json", alone)
    change(alone / "config.json", dtype=None, torch_dtype=None, eos_token_id=None)
    found = facts_of(alone)
    for name in ("weights", "tokenizer", "end tokens", "chat template"):
        assert (found[name].value, found[name].source) == ("none", "no file")
    assert (found["dtype"].value, found["dtype"].source) == ("bfloat16", "usual")


def test_a_gguf_file_states_all_of_it(folder, tmp_path):
    file = write_gguf(folder, tmp_path / "m.gguf")
    found, model = facts_of(file), load_model_dir(file)
    assert found["weights"].value.startswith("GGUF, ")
    assert found["dtype"].value == model.dtype == "float32"
    assert found["context"].value == f"{model.max_positions:,} tokens"
    assert all("m.gguf" in one.source or one.value == "none" for one in model_facts(file)
               if one.name not in {"dtype", "head"})  # fmt: skip


def test_the_command_prints_them(folder, capsys):
    change(folder / "config.json", dtype="float16")
    assert torch.float32 in {one.dtype for one in load_file(folder / "model.safetensors").values()}
    words = ["--model", str(folder), "--s", "16", "--n", "8"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("dtype")]
    assert line.split(maxsplit=2)[1:] == [
        "float16", "config.json: dtype; not used: most weights are float32"
    ]  # fmt: skip
    assert main([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["facts"]
    assert [fact for fact in facts if "contradiction" in fact] == [
        {
            "name": "dtype", "value": "float16", "source": "config.json: dtype",
            "contradiction": "most weights are float32",
        }
    ]  # fmt: skip
    assert len(facts) == len(model_facts(folder))
