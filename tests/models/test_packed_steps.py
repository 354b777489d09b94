"""Steps of decode rows and prompt chunks over shuffled blocks, compared with transformers."""

from __future__ import annotations

import random

import pytest
import torch
from helpers.tiny_models import Pipeline, generate_alone, load_reference
from test_model_families import CASES

from llmpq.batching.blocks import blocks_of

torch.set_num_threads(1)

WIDE = {"hidden": 64, "heads": 4, "kv_heads": 2}
"""Heads of 16, which the compiled kernel takes; the families' own tests have heads of 8."""
OVERRIDES = {
    # Three heads of 16.
    "bloom-3-heads": {"n_head": 3, "hidden_size": 48},
    "opt-350m": {"word_embed_proj_dim": 32, "do_layer_norm_before": False},
}
MORE = {
    "diffllama": ("diffllama", {}),
    "gpt_oss": ("gpt_oss", {}),
    "jetmoe": ("jetmoe", {}),
    "vaultgemma": ("vaultgemma", {"attn_logit_softcapping": 2.0}),
}
CHUNKED = [case for case in CASES if case != "llama-dynamic-rope"]
"""With dynamic rotary factors a chunk would not know the length of its prompt."""


class Serving:
    """Greedy generation in steps of random rows, chunks and blocks."""

    def __init__(self, pipeline: Pipeline, prompts: list[list[int]], new: int, seed: int) -> None:
        self._pipeline = pipeline
        self._rng = random.Random(seed)
        self._free = list(range(pipeline.num_blocks))
        self._rng.shuffle(self._free)
        self._ends = [len(prompt) + new for prompt in prompts]
        self._done = [0] * len(prompts)
        self._tables: list[list[int]] = [[] for _ in prompts]
        self.tokens = [list(prompt) for prompt in prompts]
        self.preempted = 0

    def run(self) -> list[list[int]]:
        """Return the tokens of every sequence."""
        while live := [i for i, end in enumerate(self._ends) if len(self.tokens[i]) < end]:
            if self._rng.random() < 0.1:
                self._preempt(self._rng.choice(live))
            chosen = self._rng.sample(live, self._rng.randrange(1, len(live) + 1))
            scores = self._pipeline.packed_step([self._row(i) for i in chosen])
            for i, token in zip(chosen, scores.argmax(-1).tolist(), strict=True):
                if self._done[i] == len(self.tokens[i]):
                    self.tokens[i].append(token)
        return self.tokens

    def _row(self, i: int) -> tuple[list[int], int, list[int]]:
        start, table = self._done[i], self._tables[i]
        count = min(len(self.tokens[i]) - start, self._rng.choice([1, 2, 3, 7, 16, 23]))
        while len(table) < blocks_of(start + count):
            table.append(self._free.pop(0))
        self._done[i] = start + count
        return list(table), start, self.tokens[i][start : start + count]

    def _preempt(self, i: int) -> None:
        self._free += self._tables[i]
        self._tables[i], self._done[i] = [], 0
        self.preempted += 1


def _prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1, 100) for _ in range(n)] for n in (1, 40, 9, 23, 17)]


@pytest.mark.parametrize("shape", [{}, WIDE], ids=["gathered", "paged"])
@pytest.mark.parametrize("case", [*CHUNKED, *MORE])
def test_random_steps_generate_the_tokens_of_transformers(tiny_model, case, shape):
    family, overrides = {**CASES, **MORE}[case]
    if shape:
        overrides = OVERRIDES.get(case, overrides)
    model_dir = tiny_model(family, seed=1, shape=shape, **overrides)
    seed = len(case)
    prompts = _prompts(seed)
    cuts = random.Random(seed).choice([[0, 3], [0, 1, 3], [0, 1, 2, 3]])
    serving = Serving(Pipeline(model_dir, cuts, num_slots=8), prompts, 8, seed)
    found = serving.run()
    model = load_reference(model_dir)
    for prompt, tokens in zip(prompts, found, strict=True):
        assert tokens == generate_alone(model, prompt, 8)[0]


@pytest.mark.parametrize("shape", [{}, WIDE], ids=["gathered", "paged"])
@pytest.mark.parametrize("case", ["llama", "bloom", "gemma2", "mistral-sliding"])
def test_quantized_keys_and_values_do_not_depend_on_chunks(tiny_model, case, shape):
    family, overrides = CASES[case]
    model_dir = tiny_model(family, seed=1, shape=shape, **overrides)
    prompts = _prompts(3)
    for kv_bits in (8, 4) if shape else (8,):
        runs = [
            Serving(Pipeline(model_dir, [0, 2, 3], num_slots=8, kv_bits=kv_bits), prompts, 6, seed)
            for seed in range(3)
        ]
        first, *others = [run.run() for run in runs]
        assert all(other == first for other in others)
