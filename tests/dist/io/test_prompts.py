"""Prompt and result files: what is accepted, what is refused and how it is said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from llmpq.dist.io.prompts import (
    RequestLimits,
    make_request,
    read_prompts,
    sort_prompts,
    sort_requests,
    write_prompts,
)
from llmpq.errors import SpecError

LIMITS = RequestLimits(
    prompt_tokens=8,
    context_tokens=12,
    new_tokens=4,
    max_positions=11,
    vocab_size=100,
    eos_token_ids=frozenset({2}),
)


class Letters:
    """A tokenizer: one token a letter."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text if letter != " "]

    def decode(self, token_ids: object) -> str:
        raise NotImplementedError


def _file(folder: Path, *lines: object) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return path


def _request(folder: Path, **line: object):
    path = _file(folder, {"id": "a"} | line)
    return make_request(read_prompts(path)[0], LIMITS, Letters())


def test_text_becomes_tokens(tmp_path):
    request = _request(tmp_path, prompt="abc")
    assert request.prompt_token_ids == (0, 1, 2)
    assert request.max_new_tokens == 4
    assert request.stop_token_ids == {2}


def test_stop_tokens_add_to_the_models_own_unless_ignored(tmp_path):
    assert _request(tmp_path, prompt="a", stop_token_ids=[5]).stop_token_ids == {2, 5}
    line = {"prompt_token_ids": [1], "stop_token_ids": [5], "ignore_eos": True}
    assert _request(tmp_path, **line).stop_token_ids == {5}


def test_prompts_round_trip(tmp_path):
    path = _file(
        tmp_path,
        {"id": 7, "prompt": "x y", "max_new_tokens": 3},
        "",
        {"id": "b", "prompt_token_ids": [1, 2], "stop_token_ids": [3], "ignore_eos": True},
    )
    prompts = read_prompts(path)
    write_prompts(path, prompts)
    again = read_prompts(path)
    assert [prompt.id for prompt in again] == [7, "b"]
    first, second = again
    assert (first.text, first.max_new_tokens, first.ignore_eos) == ("x y", 3, False)
    assert (second.token_ids, second.stop_token_ids, second.ignore_eos) == ((1, 2), (3,), True)


@pytest.mark.parametrize(
    ("lines", "names"),
    [
        ([], "found no prompts"),
        (["", "  "], "found no prompts"),
        (["{"], "line 1: not JSON"),
        (["[1]"], "line 1: .*a JSON object"),
        (["[" * 100_000], "line 1: not JSON"),
        ([{"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"}], "line 2: field 'id'.*line 1"),
        ([{"prompt": "x"}], "field 'id'"),
        ([{"id": True, "prompt": "x"}], "field 'id'"),
        ([{"id": "", "prompt": "x"}], "field 'id'"),
        ([{"id": "a"}], "exactly one of the fields"),
        ([{"id": "a", "prompt": "x", "prompt_token_ids": [1]}], "exactly one of the fields"),
        ([{"id": "a", "prompt": ""}], "field 'prompt'"),
        ([{"id": "a", "prompt": 3}], "field 'prompt'"),
        ([{"id": "a", "prompt_token_ids": []}], "field 'prompt_token_ids'"),
        ([{"id": "a", "prompt_token_ids": [1.5]}], "field 'prompt_token_ids'"),
        ([{"id": "a", "prompt_token_ids": [-1]}], "field 'prompt_token_ids'"),
        ([{"id": "a", "prompt": "x", "max_new_tokens": 0}], "field 'max_new_tokens'"),
        ([{"id": "a", "prompt": "x", "max_new_tokens": 2**63}], "field 'max_new_tokens'"),
        ([{"id": "a", "prompt": "x", "stop": [1]}], "field 'stop'.*no such field"),
        ([{"id": "a", "prompt": "x", "ignore_eos": 1}], "field 'ignore_eos'"),
    ],
)
def test_a_bad_line_is_named(tmp_path, lines, names):
    with pytest.raises(SpecError, match=names) as caught:
        read_prompts(_file(tmp_path, *lines))
    assert "prompts.jsonl" in str(caught.value)


def test_bad_bytes_and_missing_files_are_refused(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"id": "\xff"}\n')
    with pytest.raises(SpecError, match="line 1: not JSON"):
        read_prompts(path)
    with pytest.raises(SpecError, match="no such file"):
        read_prompts(tmp_path / "absent.jsonl")
    with pytest.raises(SpecError, match="cannot be read"):
        read_prompts(tmp_path)


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ({"prompt_token_ids": [100]}, "token 100.*vocabulary of 100"),
        ({"prompt_token_ids": [1], "stop_token_ids": [100]}, "stop_token_ids.*token 100"),
        ({"prompt": " "}, "found no tokens"),
        ({"prompt_token_ids": [1] * 9, "max_new_tokens": 1}, "9 prompt tokens.*8 that the plan"),
        ({"prompt_token_ids": [1] * 8, "max_new_tokens": 4}, "the model's 11 positions"),
    ],
)
def test_a_request_that_does_not_fit_is_named(tmp_path, line, names):
    with pytest.raises(SpecError, match=names) as caught:
        _request(tmp_path, **line)
    assert "line 1" in str(caught.value)


def test_text_needs_a_tokenizer(tmp_path):
    prompt = read_prompts(_file(tmp_path, {"id": "a", "prompt": "secret words"}))[0]
    with pytest.raises(SpecError, match="no tokenizer") as caught:
        make_request(prompt, LIMITS, None)
    assert "secret" not in str(caught.value)


def test_a_bad_line_harms_no_other(tmp_path):
    good = {"id": "a", "prompt_token_ids": [1]}
    path = _file(tmp_path, good, {"id": "a", "prompt": "x"}, {"prompt": "x"}, good | {"id": "b"})
    path.write_bytes(
        path.read_bytes().rstrip() + b'\nno json\n{"id": "c", "prompt_token_ids": [100]}\n'
    )
    prompts, refused = sort_prompts(path)
    assert [prompt.id for prompt in prompts] == ["a", "b", "c"]
    assert [str(error).partition("line ")[2][:2] for error in refused] == ["2:", "3:", "5:"]
    requests, unfit = sort_requests(prompts, LIMITS, None)
    assert [request.id for request in requests] == ["a", "b"]
    assert [str(error).partition("line ")[2][:2] for error in unfit] == ["6:"]


@pytest.mark.parametrize("field", ["prompt", "id"])
def test_a_lone_surrogate_harms_its_line_alone(tmp_path, field):
    lines = [{"id": "a", "prompt": "x"}, {"id": "b", "prompt": "x"} | {field: "x\udc80"}]
    prompts, refused = sort_prompts(_file(tmp_path, *lines))
    assert [prompt.id for prompt in prompts] == ["a"]
    assert rf"line 2: field '{field}': found 'x\udc80', expected text" in str(refused[0])
    assert str(refused[0]).encode()


def test_a_prompt_has_sampling_parameters_of_its_own(tmp_path):
    line = {"id": "a", "prompt_token_ids": [1], "sampling_params": {"top_k": 3, "max_tokens": 2}}
    prompt = read_prompts(_file(tmp_path, line))[0]
    request = make_request(prompt, LIMITS, None)
    assert (request.sampling_params.top_k, request.max_new_tokens) == (3, 2)
    write_prompts(tmp_path / "again", [prompt])
    assert read_prompts(tmp_path / "again")[0].sampling_params == prompt.sampling_params


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"top_k": -2}, "sampling_params.top_k"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"topk": 2}, "no such field"),
    ],
)
def test_sampling_parameters_that_cannot_be_used_are_refused(tmp_path, params, message):
    path = _file(tmp_path, {"id": "a", "prompt_token_ids": [1], "sampling_params": params})
    with pytest.raises(SpecError, match=message):
        make_request(read_prompts(path)[0], LIMITS, None)


def test_log_probabilities_of_prompts_need_stages_that_do_both_phases(tmp_path):
    line = {"id": "a", "prompt_token_ids": [1], "sampling_params": {"prompt_logprobs": 0}}
    prompt = read_prompts(_file(tmp_path, line))[0]
    assert make_request(prompt, LIMITS, None).sampling_params.prompt_logprobs == 0
    with pytest.raises(SpecError, match="prompt_logprobs: found a number"):
        make_request(prompt, replace(LIMITS, scores_prompts=False), None)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_files_of_windows_are_read(tmp_path, encoding):
    lines = [{"id": "a", "prompt": "Grüße"}, {"id": "b", "prompt_token_ids": [1, 2]}]
    path = tmp_path / "prompts.jsonl"
    path.write_bytes("".join(json.dumps(x) + "\r\n" for x in lines).encode(encoding))
    text, tokens = read_prompts(path)
    assert (text.id, text.text) == ("a", "Grüße")
    assert (tokens.id, tokens.token_ids) == ("b", (1, 2))
    assert "line 2" in tokens.where
