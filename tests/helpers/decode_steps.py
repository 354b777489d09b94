"""Stages with compiled decode steps, in one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from helpers.tiny_models import load_master

from llmpq.dist.engine.compiled_steps import CompiledSteps, step_runner_of
from llmpq.dist.kv.cache import KVCache
from llmpq.kernels.cpu.native import has_steps, instruction_set, library
from llmpq.models import DecoderStage, PackedBatch, kv_shapes

HAS_STEPS = library() is not None and has_steps(instruction_set())


def cache_of(
    stage: DecoderStage, kv_bits: int | None = None, dtype: torch.dtype = torch.float32
) -> KVCache:
    """A cache of 24 blocks, and the states of 4 sequences."""
    return KVCache(
        kv_shapes(stage.config, stage.first_layer, stage.end_layer),
        stage.first_layer,
        num_blocks=24,
        dtype=dtype,
        kv_bits=kv_bits,
        states=stage.new_states(4),
    )


def batch_of(lengths: Sequence[int], counts: Sequence[int]) -> PackedBatch:
    """The last tokens of rows of at most 48 tokens, each in blocks of its own."""
    tables = [[23 - 4 * i, 22 - 4 * i, 21 - 4 * i] for i in range(len(lengths))]
    starts = [length - count for length, count in zip(lengths, counts, strict=True)]
    slots = range(len(lengths))
    return PackedBatch(block_tables=tables, starts=starts, counts=counts, slots=slots)


def compiled(stage: DecoderStage, cache: KVCache) -> CompiledSteps:
    """The compiled steps of a stage that has them."""
    steps = step_runner_of(stage, cache)
    assert isinstance(steps, CompiledSteps)
    return steps


def random_prompts(lengths: Sequence[int]) -> list[list[int]]:
    """Prompts of tokens below 100."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 100, (n,), generator=generator).tolist() for n in lengths]


def generate(
    path: Path, steps: CompiledSteps, prompts: Sequence[list[int]], new: int
) -> list[list[int]]:
    """All tokens of greedy generation for several prompts at a time."""
    master = load_master(path)
    rows = [list(prompt) for prompt in prompts]
    counts = [len(row) for row in rows]
    for _ in range(new):
        batch = batch_of([len(row) for row in rows], counts)
        last = [t for row, n in zip(rows, counts, strict=True) for t in row[-n:]]
        hidden = steps.forward(master.embed(torch.tensor([last]), batch.positions), batch)
        chosen = master.logits(hidden[0, batch.last_tokens]).argmax(-1)
        for row, token in zip(rows, chosen.tolist(), strict=True):
            row.append(token)
        counts = [1] * len(rows)
    return rows
