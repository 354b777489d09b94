"""How often a text visits each expert, against the routers of transformers."""

from __future__ import annotations

import json

import pytest
import torch
from helpers.tiny_models import load_reference, save_tiny_model

from llmpq.calibration import CalibrationSet
from llmpq.cli.commands.indicator import main
from llmpq.errors import SpecError
from llmpq.indicator import IndicatorInput, expert_use
from llmpq.spec.precision import ExpertUse, StageExperts

TOKENS = torch.randint(1, 90, (5, 24), generator=torch.Generator().manual_seed(3))


def _subject(path, **options):
    text = CalibrationSet(token_ids=TOKENS, source="test")
    return IndicatorInput(model_dir=path, calibration=text, **options)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_counts_are_those_of_the_routers(family, tmp_path):
    path = save_tiny_model(family, tmp_path / family, seed=2)
    model, expected = load_reference(path), []

    for layer in model.model.layers:
        counts = torch.zeros(layer.mlp.experts.num_experts, dtype=torch.int64)
        expected.append(counts)

        def count(_, given, made, counts=counts):
            chosen = next(one for one in made if not one.is_floating_point())
            counts += torch.bincount(chosen.flatten(), minlength=len(counts))

        layer.mlp.gate.register_forward_hook(count)
    with torch.inference_mode():
        model(TOKENS)
    found = expert_use(_subject(path, batch_tokens=48))
    assert found.tokens == TOKENS.numel()
    assert dict(found.layers) == {n: tuple(one.tolist()) for n, one in enumerate(expected)}
    assert len({counts for _, counts in found.layers}) > 1


def test_a_model_without_experts_or_a_text_is_an_error(tmp_path):
    path = save_tiny_model("llama", tmp_path / "llama")
    with pytest.raises(SpecError, match="found no routed experts"):
        expert_use(_subject(path))
    with pytest.raises(SpecError, match="expected a text to count on"):
        expert_use(IndicatorInput(model_dir=path, calibration=None))


def test_the_command_needs_a_text(tmp_path, capsys):
    path = save_tiny_model("mixtral", tmp_path / "mixtral")
    assert main(["--model", str(path), "--experts"]) == 2
    assert "--experts: expected a text to count on" in capsys.readouterr().err


def test_the_command_prints_and_writes(tmp_path, capsys, monkeypatch):
    path = save_tiny_model("mixtral", tmp_path / "mixtral")
    text = CalibrationSet(token_ids=TOKENS, source="test")
    monkeypatch.setattr("llmpq.cli.commands.indicator.calibration_of", lambda _: text)
    output = tmp_path / "use.json"
    arguments = ["--model", str(path), "--experts", "--calibration", "text.txt", "--threads", "1"]
    assert main([*arguments, "--output", str(output)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(output.read_text())
    assert found["tokens"] == TOKENS.numel()
    assert all(sum(counts) == 2 * TOKENS.numel() for counts in found["layers"].values())


def test_resident_experts_are_those_of_most_use():
    use = ExpertUse(tokens=10, layers=((1, (3, 9, 0, 9)), (4, (1, 1, 1, 1))))
    assert use.most_used(1, 2) == (1, 3)
    assert use.most_used(1, 3) == (0, 1, 3)
    found = StageExperts.on_host(use.part(0, 4), 0.5, bits=4, threads=3)
    assert [(one.layer, one.bits, one.resident) for one in found.layers] == [(1, 4, (1, 3))]
    assert found.threads == 3
    for share, kept in ((0, 4), (0.3, 3), (1, 0)):
        (_, last) = StageExperts.on_host(use, share).layers
        assert last.resident == tuple(range(kept))
    with pytest.raises(SpecError, match="found a share of 2, expected 0 to 1"):
        StageExperts.on_host(use, 2)
