"""Scores of a model on text: its loss, and the losses of guesses to compare it with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM


def held_out_scores(
    model: LlamaForCausalLM, ids: Sequence[int], train_tokens: np.ndarray, text_bytes: int
) -> dict[str, Any]:
    """Measure the trained model on the held-out text, before and after rounding to bfloat16.

    Leaves the model rounded, in float32. `rounded` is what a float32 run of the shipped file
    gives, `bf16` what a bfloat16 run gives.
    """
    loss = {"fp32": mean_loss(model, ids)}
    model.to(torch.bfloat16)
    loss["bf16"] = mean_loss(model, ids)
    model.float()
    loss["rounded"] = mean_loss(model, ids)
    first = mean_loss(model, ids[:2048])
    unigram = unigram_loss(train_tokens, ids[1:], model.config.vocab_size)
    return {
        "tokens": len(ids),
        "bytes": text_bytes,
        "window": 512,
        "loss": loss,
        "perplexity": {name: math.exp(value) for name, value in loss.items()},
        "perplexity_first_2048_tokens": math.exp(first),
        "unigram_perplexity": math.exp(unigram),
        "unigram_perplexity_first_2048_tokens": math.exp(
            unigram_loss(train_tokens, ids[1:2048], model.config.vocab_size)
        ),
        "uniform_perplexity": model.config.vocab_size,
        "bits_per_byte": loss["rounded"] * len(ids) / text_bytes / math.log(2),
    }


@torch.no_grad()
def mean_loss(model: torch.nn.Module, ids: Sequence[int], window: int = 512) -> float:
    """Return the mean next-token loss in nats over `ids`, cut into windows that do not overlap.

    The first token of a window is context only. What is left after the last whole window counts
    too, when it holds two tokens at least.
    """
    total, count = 0.0, 0
    for start in range(0, len(ids) - 1, window):
        row = torch.tensor([ids[start : start + window]])  # [1, S]
        if row.shape[1] < 2:
            break
        logits = model(input_ids=row[:, :-1], use_cache=False).logits[0].float()  # [S - 1, V]
        total += cross_entropy(logits, row[0, 1:], reduction="sum").item()
        count += row.shape[1] - 1
    return total / count


def unigram_loss(train_tokens: np.ndarray, ids: Sequence[int], vocab_size: int) -> float:
    """Return the mean loss in nats of guessing each token by its share of the training text."""
    counts = np.bincount(train_tokens, minlength=vocab_size) + 1.0  # add one: no share is zero
    return float(-np.log(counts / counts.sum())[np.asarray(ids)].mean())
