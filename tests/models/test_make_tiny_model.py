"""The script that makes tiny models: seed, dtype and fields of the family."""

from __future__ import annotations

import json

import pytest
import torch
from helpers.tiny_models import make_tiny_model_script

from llmpq.models import Checkpoint


def _run(output, *options):
    arguments = ["--family", "llama", "--layers", "2", "--hidden", "32", "--output", str(output)]
    assert make_tiny_model_script().main([*arguments, *options]) == 0
    return Checkpoint(output)


def test_weights_depend_on_the_seed_alone(tmp_path):
    torch.manual_seed(1)
    first = _run(tmp_path / "a", "--seed", "5").layer_state_dict(0)
    torch.manual_seed(2)
    again = _run(tmp_path / "b", "--seed", "5").layer_state_dict(0)
    other = _run(tmp_path / "c", "--seed", "6").layer_state_dict(0)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_options_are_written_to_the_checkpoint(tmp_path, capsys):
    checkpoint = _run(tmp_path, "--dtype", "bfloat16", "--vocab", "77", "--set", "mlp_bias=true")
    assert checkpoint.dtype == torch.bfloat16
    assert checkpoint.config.vocab_size == 77
    assert "mlp.up_proj.bias" in checkpoint.layer_state_dict(1)
    assert "llama" in capsys.readouterr().out
    assert json.loads((tmp_path / "config.json").read_text())["mlp_bias"] is True


@pytest.mark.parametrize("override", ["mlp_bias", "mlp_bias=yes"])
def test_override_that_is_not_json_raises_an_error(tmp_path, override):
    with pytest.raises(SystemExit):
        _run(tmp_path, "--set", override)
