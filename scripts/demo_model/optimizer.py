"""The optimizers, Muon with AdamW or AdamW alone, and the schedule of their rates."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaForCausalLM

from scripts.demo_model.recipe import Recipe


def make_optimizers(model: LlamaForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Build AdamW for all weights, or Muon for the layers' matrices and AdamW for the rest."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "layers." in n]
    embeddings = [p for n, p in model.named_parameters() if p.ndim == 2 and "layers." not in n]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    adamw = {"lr": recipe.learning_rate, "betas": (0.9, 0.95), "fused": True}
    decay = {"weight_decay": recipe.weight_decay}
    groups: list[dict[str, Any]] = [{"params": vectors, "weight_decay": 0.0}]
    if recipe.optimizer == "adamw":
        groups.append({"params": matrices + embeddings} | decay)
        return [torch.optim.AdamW(groups, **adamw)]
    groups.append({"params": embeddings} | decay)
    muon = torch.optim.Muon(
        matrices, lr=recipe.learning_rate, adjust_lr_fn="match_rms_adamw", momentum=0.95, **decay
    )
    return [torch.optim.AdamW(groups, **adamw), muon]


def learning_rate_scale(step: int, fraction: float, recipe: Recipe) -> float:
    """Warm up over steps, stay at 1, then fall to 0 over the last part of the budget."""
    warm = min(1.0, (step + 1) / recipe.warmup_steps)
    if recipe.decay_fraction == 0:
        return warm
    return warm * min(1.0, max(0.0, (1 - fraction) / recipe.decay_fraction))
