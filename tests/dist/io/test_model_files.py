"""What a run reads besides weights: tokenizers and end tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from helpers.tiny_models import write_tokenizer
from transformers import LlamaConfig
from transformers.dynamic_module_utils import resolve_trust_remote_code

from llmpq.dist.io.model_files import eos_token_ids, load_tokenizer
from llmpq.errors import SpecError
from llmpq.spec.model_files.tokenizer import tokenizer_error

DEMO = Path(__file__).parents[3] / "models" / "demo"
WORDS = ["<unk>", "</s>", "one", "two", "three"]


def test_text_to_tokens_and_back(tmp_path):
    write_tokenizer(tmp_path, WORDS)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("two three one") == [3, 4, 2]
    assert tokenizer.decode([3, 4, 2, 1]) == "two three one"


@pytest.mark.parametrize("extra", [[], ["<extra>"], {}, {"image_token": "<extra>"}])
def test_extra_special_tokens_are_a_list_or_an_object(tmp_path, extra):
    write_tokenizer(tmp_path, WORDS)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"extra_special_tokens": extra}))
    assert load_tokenizer(tmp_path).encode("two three one") == [3, 4, 2]


def test_code_of_the_model_directory_is_neither_run_nor_asked_for(tmp_path, monkeypatch):
    write_tokenizer(tmp_path, WORDS)
    (tmp_path / "own.py").write_text("raise AssertionError('code of the model was run')\n")
    own = {"auto_map": {"AutoTokenizer": [None, "own.Own"]}, "tokenizer_class": "Own"}
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own"} | own))
    monkeypatch.setattr("builtins.input", lambda _: pytest.fail("asked on the terminal"))
    with pytest.raises(SpecError, match="code of the model directory"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_that_is_code_is_named_without_an_option_that_no_command_has(tmp_path):
    with pytest.raises(ValueError, match="trust_remote_code") as found:
        resolve_trust_remote_code(False, str(tmp_path), False, True)
    error = tokenizer_error(tmp_path, found.value)
    assert "code of the model directory (auto_map), which llmpq never runs" in str(error)
    assert "trust_remote_code" not in str(error)


def test_no_space_of_an_answer_is_cleaned_up(tmp_path):
    # Llama 3's published configuration asks for it, which is meant for WordPiece.
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    config = json.loads((DEMO / "tokenizer_config.json").read_text())
    config["clean_up_tokenization_spaces"] = True
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("x != y , do n't")) == "x != y , do n't"


def test_a_directory_without_tokenizer_has_none(tmp_path):
    assert load_tokenizer(tmp_path) is None


def test_a_broken_tokenizer_is_named(tmp_path):
    write_tokenizer(tmp_path, WORDS)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(SpecError, match="the tokenizer cannot be read"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("stored", "expected"),
    [(None, {7}), ({}, {7}), ({"eos_token_id": 5}, {5}), ({"eos_token_id": [5, 6]}, {5, 6})],
)
def test_end_tokens_come_from_the_generation_config_first(tmp_path, stored, expected):
    if stored is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(stored))
    assert eos_token_ids(tmp_path, LlamaConfig(eos_token_id=7)) == expected


def test_senseless_end_tokens_are_refused(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": "</s>"}))
    with pytest.raises(SpecError, match="eos_token_id"):
        eos_token_ids(tmp_path, LlamaConfig())
