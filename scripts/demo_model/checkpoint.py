"""Checkpoints of a run: weights and optimizer state as safetensors, progress as JSON.

Nothing is pickled.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import safetensors.torch
import torch
from transformers import LlamaForCausalLM

from scripts.demo_model.recipe import Progress
from scripts.demo_model.records import write_json


def save_checkpoint(
    folder: Path,
    model: LlamaForCausalLM,
    optimizers: Sequence[torch.optim.Optimizer],
    progress: Progress,
) -> None:
    """Write weights, optimizer state and progress; a broken write leaves the last one whole."""
    fresh = folder / "checkpoint.new"
    fresh.mkdir(parents=True, exist_ok=True)
    weights = {name: p.detach().contiguous() for name, p in model.named_parameters()}
    safetensors.torch.save_file(weights, fresh / "weights.safetensors")
    state = {
        f"{number}/{place}/{key}": torch.as_tensor(value).contiguous()
        for number, optimizer in enumerate(optimizers)
        for place, values in optimizer.state_dict()["state"].items()
        for key, value in values.items()
    }
    safetensors.torch.save_file(state, fresh / "optimizer.safetensors")
    write_json(fresh / "progress.json", asdict(progress))
    final = folder / "checkpoint"
    if final.exists():
        shutil.rmtree(folder / "checkpoint.old", ignore_errors=True)
        final.rename(folder / "checkpoint.old")
    fresh.rename(final)


def load_checkpoint(
    folder: Path, model: LlamaForCausalLM, optimizers: Sequence[torch.optim.Optimizer]
) -> Progress:
    """Restore what `save_checkpoint` wrote, or return a fresh progress when there is nothing."""
    saved = folder / "checkpoint"
    if not saved.exists():
        return Progress()
    load_weights(saved, model)
    state = safetensors.torch.load_file(saved / "optimizer.safetensors")
    for number, optimizer in enumerate(optimizers):
        whole = optimizer.state_dict()
        for name, value in state.items():
            owner, place, key = name.split("/")
            if int(owner) == number:
                whole["state"].setdefault(int(place), {})[key] = value
        optimizer.load_state_dict(whole)
    return Progress(**json.loads((saved / "progress.json").read_text("utf-8")))


def load_weights(saved: Path, model: LlamaForCausalLM) -> None:
    """Copy the weights of a checkpoint into `model`; raises KeyError when one is missing."""
    weights = safetensors.torch.load_file(saved / "weights.safetensors")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
