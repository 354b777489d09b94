"""Sampling of requests that leave it out: what the model's own file says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.gguf_headers import gguf_bytes

from llmpq.errors import SpecError
from llmpq.server.service import DEFAULT_SAMPLING, default_sampling_of

STATED = {"temperature": 0.6, "top_k": 20, "top_p": None}


def write(folder: Path, **fields: object) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return folder


@pytest.mark.parametrize("more", [{}, {"do_sample": True}, {"do_sample": None}])
def test_the_values_of_the_file_hold(tmp_path, more):
    found = default_sampling_of(write(tmp_path, **STATED, **more))
    assert found == {**DEFAULT_SAMPLING, "temperature": 0.6, "top_k": 20}


def test_a_file_that_does_not_sample_has_no_values(tmp_path):
    assert default_sampling_of(write(tmp_path, **STATED, do_sample=False)) == DEFAULT_SAMPLING


def test_the_file_beside_a_gguf_file_holds(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(gguf_bytes())
    write(tmp_path, **STATED)
    assert default_sampling_of(file) == default_sampling_of(tmp_path)
    assert default_sampling_of(file)["temperature"] == 0.6


def test_a_value_that_is_no_number_is_named(tmp_path):
    with pytest.raises(SpecError, match="'top_k': found 'many'"):
        default_sampling_of(write(tmp_path, top_k="many"))
