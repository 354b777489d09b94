"""The second step: tokens to checkpoints, going on from the last one when there is one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from scripts.demo_model.checkpoint import load_checkpoint, save_checkpoint
from scripts.demo_model.network import demo_config, new_model
from scripts.demo_model.optimizer import learning_rate_scale, make_optimizers
from scripts.demo_model.recipe import Progress, Recipe
from scripts.demo_model.records import write_json


def train(
    work: Path,
    run: str,
    recipe: Recipe,
    *,
    threads: int,
    checkpoint_s: float,
    command: Sequence[str],
) -> None:
    """Train from `train_tokens.npy` into `run/`, or go on where an earlier call stopped."""
    torch.set_num_threads(threads)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(work / "tokenizer")
    model = new_model(demo_config(len(tokenizer)), recipe.seed)
    tokens = np.load(work / "train_tokens.npy", mmap_mode="r")
    folder = work / run
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "recipe.json", {"command": list(command), "recipe": asdict(recipe)})
    print(f"{model.num_parameters():,} parameters, {len(tokens):,} tokens a pass", flush=True)
    progress = fit(model, tokens, recipe, folder, checkpoint_s)
    print(f"done: {progress.tokens:,} tokens in {progress.elapsed_s / 60:.1f} min")


def fit(
    model: LlamaForCausalLM,
    tokens: np.ndarray,
    recipe: Recipe,
    folder: Path,
    checkpoint_s: float = 300.0,
) -> Progress:
    """Train `model` until the budget is spent, resuming from and saving to `folder`."""
    optimizers = make_optimizers(model, recipe)
    progress = load_checkpoint(folder, model, optimizers)
    step_loss = loss_function(model, recipe)
    started = time.monotonic() - progress.elapsed_s
    saved = time.monotonic()
    while (fraction := progress.fraction(recipe)) < 1:
        scale = learning_rate_scale(progress.step, fraction, recipe)
        for group in (g for o in optimizers for g in o.param_groups):
            group["lr"] = recipe.learning_rate * scale
        loss = update(step_loss, optimizers, batch_rows(tokens, recipe, progress.step), recipe)
        if not math.isfinite(loss):
            raise FloatingPointError(f"loss is {loss} at step {progress.step}")
        progress.step += 1
        progress.tokens += recipe.step_tokens
        progress.elapsed_s = time.monotonic() - started
        _note(progress, recipe, loss, scale)
        if time.monotonic() - saved > checkpoint_s:
            save_checkpoint(folder, model, optimizers, progress)
            saved = time.monotonic()
    save_checkpoint(folder, model, optimizers, progress)
    return progress


def loss_function(model: LlamaForCausalLM, recipe: Recipe) -> Callable[..., torch.Tensor]:
    """Return the mean next-token loss of [rows, sequence + 1] tokens, compiled when asked."""
    network = torch.compile(model) if recipe.compiled else model

    def step_loss(rows: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=recipe.bf16):
            logits = network(input_ids=rows[:, :-1], use_cache=False).logits  # [B, S, V]
        return cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())

    return step_loss


def batch_rows(tokens: np.ndarray, recipe: Recipe, step: int) -> torch.Tensor:
    """Return the windows of update `step`, [rows * accumulate, sequence + 1], int64.

    Each pass over the data cuts it at another offset and visits the windows in another order; both
    derive from the seed and the pass, so a resumed run sees what an unbroken one would.
    """
    count = recipe.rows * recipe.accumulate
    windows = (len(tokens) - 1) // recipe.sequence - 1
    if windows < 1:
        raise ValueError(f"need {2 * recipe.sequence + 1} tokens at least, found {len(tokens)}")
    rows = []
    for index in range(step * count, (step + 1) * count):
        epoch, place = divmod(index, windows)
        random = np.random.default_rng([recipe.seed, epoch])
        offset = int(random.integers(recipe.sequence))
        start = offset + recipe.sequence * int(random.permutation(windows)[place])
        rows.append(tokens[start : start + recipe.sequence + 1].astype(np.int64))
    return torch.from_numpy(np.stack(rows))


def update(
    step_loss: Callable[[torch.Tensor], torch.Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
    batch: torch.Tensor,
    recipe: Recipe,
) -> float:
    """Take one optimizer step on `batch` ([rows * accumulate, sequence + 1]); return its loss."""
    total = 0.0
    for rows in batch.split(recipe.rows):
        loss = step_loss(rows) / recipe.accumulate
        loss.backward()
        total += loss.item()
    weights = [p for o in optimizers for g in o.param_groups for p in g["params"]]
    torch.nn.utils.clip_grad_norm_(weights, recipe.clip)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return total


def _note(progress: Progress, recipe: Recipe, loss: float, scale: float) -> None:
    if progress.losses is None:
        progress.losses = []
    progress.losses.append([progress.step, progress.tokens, round(loss, 4)])
    if progress.step % 10 == 0 or progress.step <= 3:
        done = progress.fraction(recipe)
        left = progress.elapsed_s * (1 - done) / max(done, 1e-9) / 60
        recent = [entry[2] for entry in progress.losses[-10:]]
        print(
            f"step {progress.step} tokens {progress.tokens:,} loss {sum(recent) / len(recent):.4f} "
            f"lr x{scale:.3f} {progress.tokens / progress.elapsed_s:,.0f} tokens/s "
            f"{left:.1f} min left",
            flush=True,
        )
