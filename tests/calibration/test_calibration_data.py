"""Calibration sequences: cut from texts with the model's tokenizer, sorted and checked."""

import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from llmpq.calibration import CalibrationSet, read_calibration, synthetic_calibration
from llmpq.errors import SpecError

WORDS = {"</s>": 0, "<unk>": 1} | {f"w{i}": i + 2 for i in range(50)}


@pytest.fixture
def model_dir(tmp_path):
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def write(folder, name, text):
    path = folder / name
    path.write_text(text)
    return path


def words(*numbers):
    return " ".join(f"w{i}" for i in numbers)


def test_text_is_cut_into_sequences_spread_over_it(model_dir):
    path = write(model_dir, "a.txt", words(*range(17)))
    found = read_calibration(path, model_dir, num_sequences=2, sequence_tokens=4)
    assert found.token_ids.tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]
    assert found.source == "a.txt (2 x 4 tokens)"


def test_short_text_is_one_short_sequence(model_dir):
    path = write(model_dir, "a.txt", words(3, 1))
    assert read_calibration(path, model_dir).token_ids.tolist() == [[5, 3]]


def test_lines_are_joined_with_the_end_token(model_dir):
    lines = [{"text": words(0, 1)}, {"prompt": words(2)}, {"prompt_token_ids": [7, 8]}]
    path = write(model_dir, "a.jsonl", "\n".join(map(json.dumps, lines)) + "\n\n")
    found = read_calibration(path, model_dir, sequence_tokens=7)
    assert found.token_ids.tolist() == [[2, 3, 0, 4, 0, 7, 8]]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", " \n", "found no text"),
        ("a.jsonl", '{"text": ', "line 1: not JSON"),
        ("a.jsonl", '{"words": 3}', "expected a field 'text'"),
        ("a.jsonl", '{"prompt_token_ids": [1.5]}', "token numbers"),
        ("a.jsonl", "[1]", "a JSON object"),
    ],
)
def test_unusable_files_are_refused(model_dir, name, text, message):
    with pytest.raises(SpecError, match=message):
        read_calibration(write(model_dir, name, text), model_dir)


def test_missing_file_and_tokenizer_are_named(tmp_path):
    with pytest.raises(SpecError, match="cannot be read"):
        read_calibration(tmp_path / "none.txt", tmp_path)
    with pytest.raises(SpecError, match="found no tokenizer"):
        read_calibration(write(tmp_path, "a.txt", "some text"), tmp_path)


def test_order_of_sequences_does_not_matter():
    rows = torch.tensor([[3, 1], [1, 2], [3, 0]])
    one = CalibrationSet(token_ids=rows, source="a")
    other = CalibrationSet(token_ids=rows[[2, 0, 1]], source="b")
    assert torch.equal(one.token_ids, other.token_ids)
    assert one.digest == other.digest
    assert one.digest != CalibrationSet(token_ids=rows[:2], source="a").digest


def test_synthetic_tokens_follow_the_seed():
    first, again, other = (synthetic_calibration(50, seed=s) for s in (1, 1, 2))
    assert torch.equal(first.token_ids, again.token_ids)
    assert not torch.equal(first.token_ids, other.token_ids)


def test_tokens_the_model_does_not_have_are_refused():
    found = CalibrationSet(token_ids=torch.tensor([[0, 9, 4]]), source="a")
    found.check(10, 3)
    with pytest.raises(SpecError, match="token 9"):
        found.check(9, None)
    with pytest.raises(SpecError, match="3 tokens, expected at most the 2"):
        found.check(10, 2)
    with pytest.raises(SpecError, match="no tokens"):
        CalibrationSet(token_ids=torch.empty(0, 4, dtype=torch.int64), source="a")
